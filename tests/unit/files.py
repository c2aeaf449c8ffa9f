# SPDX-License-Identifier: Apache-2.0
"""Trees of procfs, sysfs and cgroupfs in a directory, and scrapes of what reads them."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from writeback_exporter.collector import Collector, Host
from writeback_exporter.features import Feature
from writeback_exporter.files.base import Reader
from writeback_exporter.metrics.exposition import Labels, Snapshot
from writeback_exporter.names.cgroups import (
    RETENTION_SECONDS,
    Cgroups,
    EventKind,
    Hierarchies,
    Hierarchy,
)
from writeback_exporter.names.devices import Devices
from writeback_exporter.settings import Settings

Samples = dict[str, dict[Labels, float]]
"""By the metric's name as it is written, without the prefix, and by label values."""


class Machine:
    """A host whose kernel's files are below `place`; its cgroups are directories."""

    def __init__(self, place: Path) -> None:
        self.procfs, self.sysfs = place / "proc", place / "sys"
        self.cgroupfs = self.sysfs / "fs/cgroup"
        for directory in (
            self.procfs,
            self.cgroupfs,
            self.sysfs / "block",
            self.sysfs / "class/bdi",
        ):
            directory.mkdir(parents=True)
        self.hierarchy = Hierarchy(0, str(self.cgroupfs))
        cgroups = Cgroups(Hierarchies(self.hierarchy, self.hierarchy))
        self.host = Host(cgroups, Devices(str(self.sysfs)), str(self.procfs))
        self.now = 0.0
        cgroups.walk(self.now)
        # Each hierarchy's root has inode 1; a directory's number is another.
        cgroups.apply(EventKind.MKDIR, 0, 1, b"/", self.now)

    def write(self, directory: Path, files: Mapping[str, object]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name).write_text(f"{text}\n")

    def _event(self, kind: EventKind, cgroup: int, path: str) -> None:
        self.host.cgroups.apply(kind, self.hierarchy.id, cgroup, path.encode(), self.now)

    def cgroup(self, path: str) -> int:
        """Makes a cgroup; its id."""
        directory = Path(f"{self.cgroupfs}{path}")
        directory.mkdir()
        cgroup = directory.stat().st_ino
        self._event(EventKind.MKDIR, cgroup, path)
        return cgroup

    def remove(self, path: str, release: bool = True) -> None:
        """Removes a cgroup, which the kernel keeps for its page cache unless `release`."""
        directory = Path(f"{self.cgroupfs}{path}")
        cgroup = directory.stat().st_ino
        directory.rmdir()
        self._event(EventKind.RMDIR, cgroup, path)
        if release:
            self._event(EventKind.RELEASE, cgroup, path)

    def open(self, reader: Reader) -> dict[str, Feature]:
        settings = Settings(
            listen=(),
            telemetry_path="/metrics",
            collectors=frozenset({reader.name}),
            procfs=str(self.procfs),
            sysfs=str(self.sysfs),
            cgroupfs=str(self.cgroupfs),
        )
        features = reader.open(settings, self.host, threading.Lock())
        return {feature.name: feature for feature in features}

    def scrape(self, collector: Collector, after: float = 15.0) -> Samples:
        """One collection, as Exporter.collect() has it."""
        self.now += after
        snapshot = Snapshot()
        collector.read()
        collector.fill(snapshot, self.host)
        gone = self.host.cgroups.expired(self.now)
        collector.forget(gone, self.host, self.now)
        self.host.cgroups.forget(gone, self.now)
        samples: Samples = {}
        for family in snapshot.families:
            assert family.metric.name.removeprefix("writeback_") not in samples, (
                "a family is there twice"
            )
            for sample in family.model().samples:
                series = samples.setdefault(sample.name.removeprefix("writeback_"), {})
                labels = tuple(sample.labels.values())
                assert labels not in series, f"{sample.name}{labels} is there twice"
                series[labels] = sample.value
        return samples

    def scrape_until_over(
        self, collector: Collector, seconds: float = RETENTION_SECONDS
    ) -> Samples:
        """Scrapes until what was removed that long ago at least is forgotten."""
        for _ in range(4):
            self.scrape(collector, seconds / 2)
        return self.scrape(collector)


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process can open no file, for a while."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open("/dev/null", os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
