# SPDX-License-Identifier: Apache-2.0
"""The exporter without its command line and HTTP: starts the probes, and collects.

kernel event -> BPF program -> map -> probe -> names -> Snapshot (-> exposition -> HTTP)
"""

from __future__ import annotations

import logging
import platform
import threading
import time
from collections.abc import Callable

from prometheus_client import ProcessCollector
from prometheus_client.metrics_core import Metric as PrometheusMetric

from writeback_exporter import __version__
from writeback_exporter.features import Feature, Refused
from writeback_exporter.kernel import libbpf
from writeback_exporter.kernel.loader import Kernel
from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.exposition import Snapshot, family
from writeback_exporter.names.attribution import attribution
from writeback_exporter.names.cgroups import Cgroups, find_hierarchies
from writeback_exporter.names.devices import Devices
from writeback_exporter.probes.base import Host, Probe
from writeback_exporter.probes.block_io import BlockIo
from writeback_exporter.probes.cgroup_lifecycle import CgroupLifecycle
from writeback_exporter.probes.dirty_throttle import DirtyThrottle
from writeback_exporter.settings import Settings

log = logging.getLogger(__name__)

COLLECTORS: dict[str, type[DirtyThrottle] | type[BlockIo]] = {
    probe.name: probe for probe in (DirtyThrottle, BlockIo)
}
"""What --collector.NAME switches."""


class Exporter:
    """The probes that run on this host. `start`, then `collect` at each scrape, then `close`."""

    def __init__(self, settings: Settings) -> None:
        """Raises CgroupfsError or BadObject, which no host can be blamed for."""
        self.hierarchies = find_hierarchies(settings.cgroupfs, settings.procfs)
        self._loaded: list[Feature] = []
        self.host = Host(Cgroups(self.hierarchies), Devices(settings.sysfs))
        self.lock = threading.Lock()
        self._lifecycle = CgroupLifecycle(self.host.cgroups, self.lock)
        self._probes: list[Probe] = [
            probe() for name, probe in COLLECTORS.items() if name in settings.collectors
        ]
        # Last: its events then name all that the others have read.
        self._probes.append(self._lifecycle)
        self.running: list[Probe] = []
        try:
            self._libbpf_version = libbpf.version()
        except libbpf.LibbpfMissing:
            self._libbpf_version = ""  # the features say why

    @property
    def features(self) -> list[Feature]:
        """What works here. Controllers of cgroups may be switched on at any time."""
        return attribution(self.hierarchies) + self._loaded

    def start(self) -> None:
        """Loads and attaches what this host allows; `features` then says what that is."""
        for feature in attribution(self.hierarchies):
            if not feature.available:
                log.warning("%s: %s; %s", feature.name, feature.detail, feature.remedy)
        with self.lock:
            self._load()
            if self.running:
                self.host.cgroups.walk(time.monotonic())

    def _load(self) -> None:
        try:
            kernel = Kernel()
        except Refused as refusal:
            self._loaded += [Feature.refused(probe.name, refusal) for probe in self._probes]
            log.error("no BPF: %s", refusal)
            return
        try:
            # The last one first: a cgroup that is made during the walk is learnt from its event.
            for probe in reversed(self._probes):
                self._start(probe, kernel)
        finally:
            kernel.close()

    def _start(self, probe: Probe, kernel: Kernel) -> None:
        try:
            more = probe.load(kernel, self.hierarchies)
        except Refused as refusal:
            log.error("%s is not available: %s", probe.name, refusal)
            self._loaded.append(Feature.refused(probe.name, refusal))
            if probe is not self._lifecycle:  # which then walks the tree at each scrape
                return
        else:
            self._loaded += [Feature(probe.name, True), *more]
            for feature in more:
                if not feature.available:
                    log.info("%s is not available: %s", feature.name, feature.detail)
        self.running.insert(0, probe)

    def collect(self) -> Snapshot:
        """All that is known now. A probe that fails is left out, and a metric says so."""
        snapshot = Snapshot()
        with self.lock:
            runs = [_Run(probe) for probe in self.running]
            # All maps first, the events of cgroups last: each id in a map has its name by then.
            for run in runs:
                run.attempt(run.probe.read)
            for run in runs:
                run.attempt(run.probe.fill, run.snapshot, self.host)
            now = time.monotonic()
            gone = self.host.cgroups.expired(now)
            if any(run.error for run in runs):
                gone.clear()  # all forget together, or rows of one would lose their name
            for run in runs:
                run.attempt(run.probe.forget, gone, self.host, now)
                run.attempt(run.inspect)
        for run in runs:
            if run.error is None:
                snapshot.families += run.snapshot.families
                snapshot.histograms += run.snapshot.histograms
        snapshot.families += _about_collectors(runs) + _about_maps(runs) + self._about_self()
        return snapshot

    def close(self) -> None:
        """Detaches and unloads all. Waits for a collection that is under way."""
        self._lifecycle.stop_following()
        with self.lock:
            for probe in self.running:
                probe.close()
            self.running.clear()

    def _about_self(self) -> list[PrometheusMetric]:
        process = ProcessCollector(registry=None)
        build = (__version__, platform.python_version(), self._libbpf_version)
        return [
            family(catalogue.EXPORTER_BUILD_INFO, [(build, 1)]),
            family(
                catalogue.EXPORTER_FEATURE_AVAILABLE,
                (((f.name, f.reason), float(f.available)) for f in self.features),
            ),
            *process.collect(),
        ]


class _Run:
    """One probe in one collection."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.snapshot = Snapshot()
        self.seconds = 0.0
        self.error: Exception | None = None
        self.drops: dict[str, int] = {}
        self.programs: dict[str, libbpf.Runs] = {}

    def attempt(self, step: Callable[..., None], *arguments: object) -> None:
        if self.error:
            return
        begin = time.perf_counter()
        try:
            step(*arguments)
        except Exception as error:  # whatever it is, the other collectors go on
            self.error = error
            log.error("collector %s failed: %s", self.probe.name, error)
            log.debug("its traceback", exc_info=True)
        self.seconds += time.perf_counter() - begin

    def inspect(self) -> None:
        """How its maps and programs are."""
        if self.probe.bpf:
            self.drops = self.probe.drops()
            self.programs = {
                f"{self.probe.name}/{program.name}": program.runs()
                for program in self.probe.programs()
            }


def _about_collectors(runs: list[_Run]) -> list[PrometheusMetric]:
    return [
        family(
            catalogue.EXPORTER_COLLECTOR_DURATION_SECONDS,
            (((run.probe.name,), run.seconds) for run in runs),
        ),
        family(
            catalogue.EXPORTER_COLLECTOR_SUCCESS,
            (((run.probe.name,), float(run.error is None)) for run in runs),
        ),
    ]


def _about_maps(runs: list[_Run]) -> list[PrometheusMetric]:
    use = {m: use for run in runs for m, use in run.probe.use.items() if run.error is None}
    drops = {m: count for run in runs for m, count in run.drops.items()}
    programs = {p: counts for run in runs for p, counts in run.programs.items()}
    return [
        family(catalogue.EXPORTER_MAP_ENTRIES, (((m,), u.entries) for m, u in use.items())),
        family(catalogue.EXPORTER_MAP_CAPACITY, (((m,), u.capacity) for m, u in use.items())),
        family(catalogue.EXPORTER_MAP_DROPPED, (((m,), n) for m, n in drops.items())),
        family(catalogue.EXPORTER_PROGRAM_RUNS, (((p,), r.count) for p, r in programs.items())),
        family(
            catalogue.EXPORTER_PROGRAM_RUN_SECONDS,
            (((p,), r.nanoseconds / 1e9) for p, r in programs.items()),
        ),
        family(catalogue.EXPORTER_PROGRAM_MISSED, (((p,), r.missed) for p, r in programs.items())),
    ]
