# SPDX-License-Identifier: Apache-2.0
"""Pressure stall information (PSI): /proc/pressure/* and the *.pressure files of cgroup v2."""

from __future__ import annotations

import errno
import re
import threading

from writeback_exporter.collector import Host
from writeback_exporter.features import Feature, Refused
from writeback_exporter.files.base import Reader, content
from writeback_exporter.files.cgroup_files import KeptFile
from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.exposition import Labels, Samples, Snapshot, family
from writeback_exporter.metrics.history import Sample
from writeback_exporter.names.cgroups import Hierarchy
from writeback_exporter.settings import Settings

RESOURCES = ("cpu", "memory", "io", "irq")

# "some avg10=0.00 avg60=0.00 avg300=0.00 total=1234" (kernel/sched/psi.c, psi_show). cpu has no
# full before 5.13, and irq has nothing else. 2^64 ns, which no stall lasts, would be 17 digits.
_TOTAL = re.compile(rb"^(some|full) .*\btotal=([0-9]{1,16})$", re.MULTILINE)

# The kernel has the file, or may have it, and accounts nothing there.
_UNSUPPORTED = (errno.ENOENT, errno.EOPNOTSUPP)


class Pressure(Reader):
    """Time that tasks waited for CPU, memory, IO and interrupts, of the host and each cgroup."""

    name = "pressure"

    def __init__(self) -> None:
        self._files: dict[str, str] = {}
        """The host's, by resource."""
        self._hierarchy: Hierarchy | None = None
        self._of_cgroups: dict[str, KeptFile] = {}

    def open(self, settings: Settings, host: Host, lock: threading.Lock) -> list[Feature]:
        resources, features = supported(settings.procfs)
        self._files = {resource: f"{settings.procfs}/pressure/{resource}" for resource in resources}
        try:
            self._hierarchy = hierarchy = hierarchy_with_pressure(host)
        except Refused as refusal:
            features.append(Feature.refused("pressure_cgroups", refusal))
        else:
            features.append(Feature("pressure_cgroups", True))
            self._of_cgroups = {
                resource: host.files.kept(hierarchy, f"{resource}.pressure".encode())
                for resource in resources
            }
        return features

    def fill(self, snapshot: Snapshot, host: Host) -> None:
        waiting: Samples = []
        stalled: Samples = []

        def add(labels: Labels, text: bytes | None) -> None:
            for kind, microseconds in _TOTAL.findall(text or b""):
                series = waiting if kind == b"some" else stalled
                series.append((labels, int(microseconds) / 1e6))

        for resource, path in self._files.items():
            add(("/", resource), content(path))
        if self._hierarchy:
            for cgroup, label, directory in host.cgroups.listed(self._hierarchy):
                if label != "/":  # /proc/pressure is the root's
                    for resource, file in self._of_cgroups.items():
                        add((label, resource), file.read(cgroup, directory))
        snapshot.families += [
            family(catalogue.PRESSURE_WAITING_SECONDS, waiting),
            family(catalogue.PRESSURE_STALLED_SECONDS, stalled),
        ]

    def sample(self, sample: Sample, host: Host) -> None:
        found = {resource: totals(path) for resource, path in self._files.items()}
        sample.waiting = {name: kinds["some"] for name, kinds in found.items() if "some" in kinds}


def totals(path: str | bytes) -> dict[str, int]:
    """Microseconds by kind, some and full, of a pressure file; nothing where there is none, as
    where the cgroup has gone or 0 was written to its cgroup.pressure (kernel 6.1)."""
    found = _TOTAL.findall(content(path) or b"")
    return {kind.decode(): int(microseconds) for kind, microseconds in found}


def supported(procfs: str) -> tuple[list[str], list[Feature]]:
    """The resources that the kernel accounts, and a feature for each that there is not.

    Raises Refused where there is none.
    """
    resources, refusals = [], {}
    for resource in RESOURCES:
        path = f"{procfs}/pressure/{resource}"
        try:
            with open(path, "rb") as stream:
                stream.read()
        except OSError as error:
            refusals[resource] = _refusal(resource, path, error)
        else:
            resources.append(resource)
    if not resources:
        raise next(
            (r for r in refusals.values() if r.reason != _NOT_ACCOUNTED),
            Refused(
                "PSI off",
                f"the kernel accounts no pressure: there is nothing in {procfs}/pressure",
                "boot with psi=1; if that is done, the kernel lacks CONFIG_PSI",
            ),
        )
    return resources, [Feature.refused(f"pressure_{r}", why) for r, why in refusals.items()]


_NOT_ACCOUNTED = "not in this kernel"


def _refusal(resource: str, path: str, error: OSError) -> Refused:
    if error.errno not in _UNSUPPORTED:
        return Refused(
            "unreadable",
            f"cannot read {path}: {error.strerror}",
            "run the exporter as root, or say where procfs is with --path.procfs",
        )
    return Refused(
        _NOT_ACCOUNTED,
        f"the kernel accounts no {resource} pressure: {path}: {error.strerror}",
        "use a kernel from 6.1 on with CONFIG_IRQ_TIME_ACCOUNTING, or do without"
        if resource == "irq"
        else "use another kernel, or do without",
    )


def hierarchy_with_pressure(host: Host) -> Hierarchy:
    """The hierarchy whose cgroups have pressure files. Raises Refused where there is none."""
    hierarchy = host.cgroups.hierarchies.v2
    if hierarchy is None:
        raise Refused(
            "cgroup v1",
            "only cgroup v2 has pressure files, and it is not mounted: the host's alone are read",
            "mount it beside v1: mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified",
        )
    # cgroup.pressure remains where it has switched the root's others off.
    if all(
        content(f"{hierarchy.mount}/{name}") is None for name in ("io.pressure", "cgroup.pressure")
    ):
        raise Refused(
            "cgroup pressure off",
            f"there are no pressure files in {hierarchy.mount}: the host's alone are read",
            "boot without cgroup_disable=pressure",
        )
    return hierarchy
