# SPDX-License-Identifier: Apache-2.0
"""The exporter without its command line and HTTP: starts the collectors, and collects.

kernel event -> BPF program -> map -> probe -> names -> Snapshot (-> exposition -> HTTP)
kernel's file -> reader -> names -> Snapshot
both -> Sample -> History -> Recent (-> status page)
"""

from __future__ import annotations

import logging
import platform
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from writeback_exporter import __version__
from writeback_exporter.collector import Collector, Host
from writeback_exporter.features import Feature, Refused
from writeback_exporter.files.base import Reader
from writeback_exporter.files.bdi import Bdis
from writeback_exporter.files.cgroup_io import CgroupIo
from writeback_exporter.files.cgroup_memory import CgroupMemory
from writeback_exporter.files.devices import DeviceInfo
from writeback_exporter.files.host_memory import HostMemory
from writeback_exporter.files.pressure import Pressure
from writeback_exporter.files.pressure_triggers import PressureTriggers
from writeback_exporter.files.workload import Workloads
from writeback_exporter.kernel import libbpf
from writeback_exporter.kernel.libbpf import BpfError
from writeback_exporter.kernel.loader import Kernel
from writeback_exporter.kernel.loader import refusal as refusal_of
from writeback_exporter.kernel.pins import Pins, TakeoverError
from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.exposition import Family, Snapshot, family
from writeback_exporter.metrics.history import History, Recent, Sample
from writeback_exporter.metrics.idle import Idle
from writeback_exporter.metrics.process import process_metrics
from writeback_exporter.names.attribution import attribution
from writeback_exporter.names.cgroups import NEAR, Cgroups, find_hierarchies
from writeback_exporter.names.devices import Devices
from writeback_exporter.probes.base import Probe
from writeback_exporter.probes.block_io import BlockIo
from writeback_exporter.probes.block_io_limit import BlockIoLimit
from writeback_exporter.probes.cgroup_lifecycle import CgroupLifecycle
from writeback_exporter.probes.dirty_throttle import DirtyThrottle
from writeback_exporter.probes.io_uring import IoUring
from writeback_exporter.probes.memory_stall import MemoryStall
from writeback_exporter.probes.page_flow import PageFlow
from writeback_exporter.probes.page_wait import PageWait
from writeback_exporter.probes.sync import Sync
from writeback_exporter.probes.work import Work
from writeback_exporter.settings import Settings

log = logging.getLogger(__name__)

_COLLECTORS: tuple[type[Collector], ...] = (
    DirtyThrottle,
    BlockIo,
    BlockIoLimit,
    Work,
    PageWait,
    PageFlow,
    Sync,
    Pressure,
    PressureTriggers,
    MemoryStall,
    HostMemory,
    Bdis,
    CgroupMemory,
    CgroupIo,
    IoUring,
    Workloads,
    DeviceInfo,
)
COLLECTORS = {collector.name: collector for collector in _COLLECTORS}
"""What --collector.NAME switches."""


_PATIENCE = 20
"""Scrapes for which nothing is forgotten because a collector fails."""


class Exporter:
    """The collectors that run on this host. `start`, `collect` at each scrape, then `close`."""

    def __init__(self, settings: Settings) -> None:
        """Raises CgroupfsError or BadObject, which no host can be blamed for."""
        self.hierarchies = find_hierarchies(settings.cgroupfs, settings.procfs)
        self._settings = settings
        self._full_maps: set[str] = set()
        self._withheld = 0
        self._missed: dict[str, set[tuple[int, int]]] = {}
        """What the others have forgotten while a collector failed."""
        self._idle = Idle(settings.idle_timeout) if settings.idle_timeout else None
        self._history = History()
        self._found: list[Feature] = []
        self._pins: Pins | None = None
        cgroups = Cgroups(self.hierarchies, settings.cgroups)
        self.host = Host(cgroups, Devices(settings.sysfs), settings.procfs)
        self.lock = threading.Lock()
        self._begun = threading.Event()
        """Set when `start` is over, well or not. The lock is free meanwhile, for readers."""
        self._lifecycle = CgroupLifecycle(self.host.cgroups, self.lock)
        collectors = [make() for name, make in COLLECTORS.items() if name in settings.collectors]
        self._readers = [c for c in collectors if isinstance(c, Reader)]
        # Last: its events then name all that the others have read.
        self._probes = [*(c for c in collectors if isinstance(c, Probe)), self._lifecycle]
        self.running: list[Collector] = []
        try:
            self._libbpf_version = libbpf.version()
        except libbpf.LibbpfMissing:
            self._libbpf_version = ""  # the features say why

    @property
    def features(self) -> list[Feature]:
        """What works here. Controllers of cgroups may be switched on at any time."""
        return attribution(self.hierarchies) + self._found

    def start(self, pins: Pins | None = None, prepared: Callable[[], None] = lambda: None) -> None:
        """Loads and attaches what this host allows, or takes it over from `pins`, which then belong
        to this exporter; `features` then says what that is. `prepared` is called when that is done,
        before collectors start threads."""
        self._pins = pins
        for feature in attribution(self.hierarchies):
            if not feature.available:
                log.warning("%s: %s; %s", feature.name, feature.detail, feature.remedy)
        try:
            with self.lock:
                self._load()
                self.host.cgroups.walk(time.monotonic())
                self._lifecycle.recall()
            for reader in self._readers:
                self._start(reader, partial(reader.open, self._settings, self.host, self.lock))
            prepared()
            for collector in self.running:
                collector.begin()
        finally:
            self._begun.set()
        self.observe()  # from here on the history counts

    def _load(self) -> None:
        try:
            kernel = Kernel(
                self._settings.procfs,
                self._settings.sync_tracepoints,
                self._pins,
                (hierarchy.id for hierarchy in self.hierarchies.by_use),
            )
        except Refused as refusal:
            self._found += [Feature.refused(probe.name, refusal) for probe in self._probes]
            log.error("no BPF: %s", refusal)
            self.running.append(self._lifecycle)
            return
        try:
            # The last one first: a cgroup that is made during the walk is learnt from its event.
            for probe in reversed(self._probes):
                self._start(probe, partial(probe.load, kernel, self.hierarchies))
        finally:
            kernel.close()
        if self._pins:
            self._pins.settle()
            self._found.append(self._pins.feature)

    def _start(self, collector: Collector, begin: Callable[[], list[Feature]]) -> None:
        refusal, more = None, list[Feature]()
        try:
            more = begin()
        except TakeoverError as error:
            refusal = error.refusal
        except BpfError as error:
            refusal = refusal_of(error)
        except Refused as error:
            refusal = error
        if refusal:
            level = logging.ERROR if collector.main else logging.WARNING
            log.log(level, "%s is not available: %s", collector.name, refusal)
            self._found.append(Feature.refused(collector.name, refusal))
            if collector is not self._lifecycle:  # which then walks the tree at each scrape
                return
        else:
            self._found += [Feature(collector.name, True), *more]
            for feature in more:
                if not feature.available:
                    log.info(
                        "%s is not available: %s; %s",
                        feature.name,
                        feature.detail,
                        feature.remedy,
                    )
        self.running.insert(0, collector)

    def collect(self) -> Snapshot:
        """All that is known now. A collector that fails is left out, and a metric says so. Waits
        for the end of `start`: what had only half of the collectors would look like a gap."""
        self._begun.wait()
        snapshot = Snapshot()
        with self.lock:
            runs = [_Run(collector) for collector in self.running]
            # All maps first, the events of cgroups last: each id in a map has its name by then.
            for run in runs:
                run.attempt(run.collector.read)
            self.host.files.settle(self.host.cgroups)
            for run in runs:
                run.attempt(run.collector.fill, run.snapshot, self.host)
            now = time.monotonic()
            if now >= self._history.due:
                self._add_sample(runs, now)
            gone = self._gone(runs, now)
            for run in runs:
                due = gone | self._missed.pop(run.collector.name, set())
                run.attempt(run.collector.forget, due, self.host, now)
                run.attempt(run.inspect)
                if run.error and due:
                    self._missed[run.collector.name] = due
            self._warn_of_full_maps(runs)
        for run in runs:
            if run.error is None:
                snapshot.families += run.snapshot.families
                snapshot.histograms += run.snapshot.histograms
        snapshot.families += _about_collectors(runs) + _about_maps(runs) + self._about_self()
        with suppress(OSError):  # no /proc, where --path.procfs is another
            snapshot.others += list(process_metrics())
        if self._idle:
            self._idle.leave_out(snapshot, now)
        itself = 1
        snapshot.families.append(
            family(catalogue.EXPORTER_SERIES, [((), snapshot.series + itself)])
        )
        return snapshot

    def observe(self) -> Recent:
        """What happened in the last minutes, for the status page.

        Not a scrape: nothing counts as exported and nothing is forgotten; and only what the page
        shows is read. Waits for the end of `start`, as `collect` does.
        """
        self._begun.wait()
        with self.lock:
            runs = [
                _Run(collector)
                for collector in self.running
                if collector is self._lifecycle or type(collector).sample is not Collector.sample
            ]
            for run in runs:
                run.attempt(run.collector.read)
            self._add_sample(runs, time.monotonic())
            return self._history.recent()

    def _add_sample(self, runs: list[_Run], now: float) -> None:
        sample = Sample(now)
        for run in runs:
            if run.error is None:
                # On its own: what the page has to do without is not missing in a scrape.
                _Run(run.collector).attempt(run.collector.sample, sample, self.host)
        self._history.add(sample)

    def _gone(self, runs: list[_Run], now: float) -> set[tuple[int, int]]:
        """The (hierarchy, cgroup) to forget. All forget together, or rows of one would lose their
        name: while one fails none does, but not for ever, since the maps would fill."""
        gone = self.host.cgroups.expired(now)
        failing = any(
            run.error and type(run.collector).forget is not Collector.forget for run in runs
        )
        self._withheld = self._withheld + 1 if failing else 0
        return set() if 0 < self._withheld <= _PATIENCE else gone

    def close(self) -> None:
        """Detaches and unloads all that is not pinned. Waits for a collection that is under way."""
        self._lifecycle.stop_following()
        with self.lock:
            running = self.running.copy()
            self.running.clear()
        for collector in running:  # without the lock, for which a thread of theirs may wait
            collector.close()
        with self.lock:
            self.host.files.close()
        if self._pins:
            self._pins.close()
            self._pins = None

    def _warn_of_full_maps(self, runs: list[_Run]) -> None:
        full = {
            f"{run.probe.name}/{name}": use
            for run in runs
            if run.probe
            for name, use in run.probe.use.items()
            if use.entries >= NEAR * use.capacity
        }
        for name in full.keys() - self._full_maps:
            use = full[name]
            log.warning(
                "BPF map %s has %d of at most %d entries; what finds no room counts as other",
                name,
                use.entries,
                use.capacity,
            )
        self._full_maps = set(full)

    def _about_self(self) -> list[Family]:
        build = (__version__, platform.python_version(), self._libbpf_version)
        return [
            family(catalogue.EXPORTER_BUILD_INFO, [(build, 1)]),
            family(
                catalogue.EXPORTER_FEATURE_AVAILABLE,
                (((f.name, f.reason), float(f.available)) for f in self.features),
            ),
        ]


class _Run:
    """One collector in one collection."""

    def __init__(self, collector: Collector) -> None:
        self.collector = collector
        self.probe = collector if isinstance(collector, Probe) and collector.bpf else None
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
            log.error("collector %s failed: %s", self.collector.name, error)
            log.debug("its traceback", exc_info=True)
        self.seconds += time.perf_counter() - begin

    def inspect(self) -> None:
        """How its maps and programs are."""
        if self.probe:
            self.drops = {
                f"{self.probe.name}/{name}": count for name, count in self.probe.drops().items()
            }
            self.programs = {
                f"{self.probe.name}/{program.name}": program.runs()
                for program in self.probe.programs()
            }


def _about_collectors(runs: list[_Run]) -> list[Family]:
    return [
        family(
            catalogue.EXPORTER_COLLECTOR_DURATION_SECONDS,
            (((run.collector.name,), run.seconds) for run in runs),
        ),
        family(
            catalogue.EXPORTER_COLLECTOR_SUCCESS,
            (((run.collector.name,), float(run.error is None)) for run in runs),
        ),
    ]


def _about_maps(runs: list[_Run]) -> list[Family]:
    probes = [run.probe for run in runs if run.probe and run.error is None]
    use = {f"{probe.name}/{m}": use for probe in probes for m, use in probe.use.items()}
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
