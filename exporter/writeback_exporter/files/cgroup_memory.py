# SPDX-License-Identifier: Apache-2.0
"""Memory by cgroup, from the files of the memory controller.

Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst. Numbers are of a cgroup and those
below it, except for events of v1, which are its own.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass

from writeback_exporter.collector import Host
from writeback_exporter.features import Feature, Refused
from writeback_exporter.files.base import Reader, content, keyed
from writeback_exporter.files.cgroup_files import Seldom
from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.exposition import Samples, Snapshot, family
from writeback_exporter.names.cgroups import Hierarchy, printable
from writeback_exporter.settings import Settings

# How long events of v1 without a limit are remembered though no task was killed, should one be
# counted as the host's a moment before it is as the cgroup's, and both be read between.
_EVENTS_SECONDS = 600

# No machine has 2^62 bytes: v1 writes nearly 2^63 where there is no limit, and what has run below
# zero is nearly 2^64.
_BYTES_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class _Names:
    """Where a version of cgroups has what."""

    # A pattern takes 0.5 us in the 40 lines of memory.stat; to split them all takes 13.
    dirty: re.Pattern[bytes]
    writeback: re.Pattern[bytes]
    usage: bytes
    limits: tuple[tuple[str, bytes], ...]
    events: tuple[tuple[bytes, dict[bytes, str]], ...]
    """Files, and what their events are called where not all are taken as they are; what two call
    the same is summed."""
    events_of_limits: bool
    """Whether a cgroup without a limit has no events but that tasks are killed."""


_STAT = b"memory.stat"
_V2 = _Names(
    dirty=re.compile(rb"\nfile_dirty (\d+)\n"),
    writeback=re.compile(rb"\nfile_writeback (\d+)\n"),
    usage=b"memory.current",
    limits=(("max", b"memory.max"), ("high", b"memory.high")),
    events=((b"memory.events", {}),),
    events_of_limits=False,  # those below it may have limits
)
# total_: with those below it, unless 5.10 or before has use_hierarchy off; then both are the same.
_V1 = _Names(
    dirty=re.compile(rb"\ntotal_dirty (\d+)\n"),
    writeback=re.compile(rb"\ntotal_writeback (\d+)\n"),
    usage=b"memory.usage_in_bytes",
    limits=(("max", b"memory.limit_in_bytes"), ("soft", b"memory.soft_limit_in_bytes")),
    events=(
        # Where the limit of memory and swap is the same, as Docker sets it, only that one is met.
        (b"memory.failcnt", {b"": "max"}),
        (b"memory.memsw.failcnt", {b"": "max"}),
        (b"memory.oom_control", {b"oom_kill": "oom_kill"}),
    ),
    events_of_limits=True,
)


class CgroupMemory(Reader):
    """Memory of each cgroup: dirty, under writeback, in use, its limits, and how often it met
    them."""

    name = "cgroup_memory"

    def open(self, settings: Settings, host: Host, lock: threading.Lock) -> list[Feature]:
        hierarchy = host.cgroups.hierarchies.memory
        if hierarchy is None:
            raise Refused(
                "no memory controller",
                "no cgroup hierarchy has the memory controller",
                "boot with cgroup_enable=memory, on a kernel with CONFIG_MEMCG",
            )
        self._hierarchy: Hierarchy = hierarchy
        self._procfs = settings.procfs
        self._names = names = _V2 if hierarchy.id == 0 else _V1
        self._files = files = host.files
        self._stat = files.kept(hierarchy, _STAT)
        self._usage = files.kept(hierarchy, names.usage)
        self._events = [files.kept(hierarchy, name) for name, _ in names.events]
        self._limits: Seldom[list[tuple[str, int]]] = files.seldom(
            hierarchy, [name for _, name in names.limits]
        )
        self._met_without: Seldom[dict[str, int]] = files.seldom(hierarchy, seconds=_EVENTS_SECONDS)
        return []

    def fill(self, snapshot: Snapshot, host: Host) -> None:
        names = self._names
        dirty: Samples = []
        writeback: Samples = []
        usage: Samples = []
        limits: Samples = []
        events: Samples = []
        killed = self._killed() if names.events_of_limits else None
        for cgroup, label, directory in host.cgroups.listed(self._hierarchy):
            stat = self._stat.read(cgroup, directory)
            if stat is None:  # it has gone, or the controller is off there
                self._limits.forget(cgroup)
                self._met_without.forget(cgroup)
                continue
            owner = (label,)
            for samples, pattern in ((dirty, names.dirty), (writeback, names.writeback)):
                match = pattern.search(stat)
                if match and (number := _bytes(match[1])) is not None:
                    samples.append((owner, number))
            if (number := _bytes(self._usage.read(cgroup, directory))) is not None:
                usage.append((owner, number))
            try:
                if names.events_of_limits:
                    sizes = self._limits.get(cgroup, directory, self._read_limits)
                    if sizes:
                        met = self._met_now(cgroup, directory)
                        self._met_without.forget(cgroup)
                    else:
                        met = self._met_without.get(cgroup, directory, self._read_events, killed)
                else:
                    # A lower limit may be met long before its write is over, which frees memory
                    # first (mm/memcontrol.c, memory_max_write).
                    met = self._met_now(cgroup, directory)
                    sizes = self._limits.get(cgroup, directory, self._read_limits, met)
            except OSError:  # it has gone meanwhile, or its directory has been closed to us
                continue
            limits += (((label, limit), size) for limit, size in sizes)
            events += (((label, event), count) for event, count in met.items())
        snapshot.families += [
            family(catalogue.CGROUP_DIRTY_BYTES, dirty),
            family(catalogue.CGROUP_WRITEBACK_BYTES, writeback),
            family(catalogue.CGROUP_MEMORY_BYTES, usage),
            family(catalogue.CGROUP_MEMORY_LIMIT_BYTES, limits),
            family(catalogue.CGROUP_MEMORY_EVENTS, events),
        ]

    def _killed(self) -> object:
        """How many tasks have been killed for want of memory on the host, by limits too; each is
        one of its cgroup's as well (mm/oom_kill.c, __oom_kill_process). Something else each time
        where that is not known."""
        return keyed(content(f"{self._procfs}/vmstat") or b"").get(b"oom_kill", object())

    def _read_limits(self, cgroup: int, directory: bytes) -> list[tuple[str, int]]:
        """Those that are set, in bytes."""
        names = [name for _, name in self._names.limits]
        texts = self._files.contents(cgroup, directory, names)
        sizes = [_bytes(text) for text in texts]
        named = zip(self._names.limits, sizes, strict=True)
        return [(limit, size) for (limit, _), size in named if size is not None]

    def _read_events(self, cgroup: int, directory: bytes) -> dict[str, int]:
        names = [name for name, _ in self._names.events]
        return self._met(self._files.contents(cgroup, directory, names))

    def _met_now(self, cgroup: int, directory: bytes) -> dict[str, int]:
        return self._met([file.read(cgroup, directory) for file in self._events])

    def _met(self, texts: list[bytes | None]) -> dict[str, int]:
        """Numbers by event."""
        met: dict[str, int] = {}
        for (_, called), text in zip(self._names.events, texts, strict=True):
            for kernels, count in keyed(text or b"").items():
                if not called or kernels in called:
                    event = called.get(kernels) or printable(kernels)
                    met[event] = met.get(event, 0) + count
        return met


def _bytes(text: bytes | None) -> int | None:
    """The number in a file; None where it has none, or "max"."""
    number = (text or b"").rstrip()
    return size if number.isdigit() and (size := int(number)) < _BYTES_LIMIT else None
