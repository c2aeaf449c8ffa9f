# SPDX-License-Identifier: Apache-2.0
"""What runs at each scrape: a collector, be it a BPF object with its reader (probes/) or a reader
of the kernel's files (files/)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from writeback_exporter.files.cgroup_files import CgroupFiles
from writeback_exporter.metrics.exposition import Snapshot
from writeback_exporter.metrics.history import Sample
from writeback_exporter.names.cgroups import Cgroups
from writeback_exporter.names.devices import Devices


@dataclass(slots=True)
class Host:
    """What a collector needs to know of the host to name what it counted."""

    cgroups: Cgroups
    devices: Devices
    procfs: str = "/proc"
    files: CgroupFiles = field(default_factory=CgroupFiles)


class Collector(ABC):
    """`begin`, then at each scrape `read`, `fill`, `forget`, and `close` at the end. For the status
    page `read`, then `sample`."""

    name: ClassVar[str]
    """Of the switch --collector.NAME, of its main feature, and in its self-metrics."""
    default: ClassVar[bool] = True
    """Whether it runs unless it is switched off."""
    main: ClassVar[bool] = False
    """Whether the exporter is run for it: `doctor` fails where it is not available."""

    def begin(self) -> None:
        """Starts its threads, once it is loaded or open: they have what rights are left then."""

    def read(self) -> None:
        """Copies what must be copied before the last events of cgroups are taken in."""

    @abstractmethod
    def fill(self, snapshot: Snapshot, host: Host) -> None:
        """Adds this collector's families."""

    def sample(self, sample: Sample, host: Host) -> None:
        """Adds what the status page shows of it, as `read` found it; changes nothing."""

    def forget(self, gone: set[tuple[int, int]], host: Host, now: float) -> None:
        """Drops what has been exported for the last time: these (hierarchy, cgroup), and devices
        that are gone; `now` is a monotonic time in seconds."""

    def close(self) -> None:
        """Gives back what it holds."""
