# SPDX-License-Identifier: Apache-2.0
"""Memory by cgroup, from the files of the memory controller.

Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst. Numbers are of a cgroup and those
below it, except for events of v1, which are its own.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from writeback_exporter.collector import Host
from writeback_exporter.features import Feature, Refused
from writeback_exporter.files.base import Reader, content, keyed
from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.exposition import Labels, Snapshot, family
from writeback_exporter.names.cgroups import Hierarchy, printable
from writeback_exporter.settings import Settings

# No machine has 2^62 bytes: v1 writes nearly 2^63 where there is no limit, and what has run below
# zero is nearly 2^64.
_BYTES_LIMIT = 1 << 62

Samples = list[tuple[Labels, float]]


@dataclass(frozen=True, slots=True)
class _Files:
    """Where a version of cgroups has what."""

    # A pattern takes 0.5 us in the 40 lines of memory.stat; to split them all takes 13.
    dirty: re.Pattern[bytes]
    writeback: re.Pattern[bytes]
    usage: bytes
    limits: tuple[tuple[str, bytes], ...]
    events: tuple[tuple[bytes, dict[bytes, str]], ...]
    """Files, and what their events are called where not all are taken as they are; what two call
    the same is summed."""


_STAT = b"/memory.stat"
_V2 = _Files(
    dirty=re.compile(rb"\nfile_dirty (\d+)\n"),
    writeback=re.compile(rb"\nfile_writeback (\d+)\n"),
    usage=b"/memory.current",
    limits=(("max", b"/memory.max"), ("high", b"/memory.high")),
    events=((b"/memory.events", {}),),
)
# total_: with those below it, unless 5.10 or before has use_hierarchy off; then both are the same.
_V1 = _Files(
    dirty=re.compile(rb"\ntotal_dirty (\d+)\n"),
    writeback=re.compile(rb"\ntotal_writeback (\d+)\n"),
    usage=b"/memory.usage_in_bytes",
    limits=(("max", b"/memory.limit_in_bytes"), ("soft", b"/memory.soft_limit_in_bytes")),
    events=(
        # Where the limit of memory and swap is the same, as Docker sets it, only that one is met.
        (b"/memory.failcnt", {b"": "max"}),
        (b"/memory.memsw.failcnt", {b"": "max"}),
        (b"/memory.oom_control", {b"oom_kill": "oom_kill"}),
    ),
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
        self._files = _V2 if hierarchy.id == 0 else _V1
        return []

    def fill(self, snapshot: Snapshot, host: Host) -> None:
        files = self._files
        dirty: Samples = []
        writeback: Samples = []
        usage: Samples = []
        limits: Samples = []
        events: Samples = []
        for _, cgroup, directory in host.cgroups.listed(self._hierarchy):
            stat = content(directory + _STAT)
            if stat is None:  # it has gone, or the controller is off there
                continue
            for samples, pattern in ((dirty, files.dirty), (writeback, files.writeback)):
                if match := pattern.search(stat):
                    samples += _bytes((cgroup,), match[1])
            usage += _bytes((cgroup,), content(directory + files.usage))
            for limit, name in files.limits:
                limits += _bytes((cgroup, limit), content(directory + name))
            met: dict[str, int] = {}
            for name, called in files.events:
                for kernels, count in keyed(content(directory + name) or b"").items():
                    if not called or kernels in called:
                        event = called.get(kernels) or printable(kernels)
                        met[event] = met.get(event, 0) + count
            events += (((cgroup, event), count) for event, count in met.items())
        snapshot.families += [
            family(catalogue.CGROUP_DIRTY_BYTES, dirty),
            family(catalogue.CGROUP_WRITEBACK_BYTES, writeback),
            family(catalogue.CGROUP_MEMORY_BYTES, usage),
            family(catalogue.CGROUP_MEMORY_LIMIT_BYTES, limits),
            family(catalogue.CGROUP_MEMORY_EVENTS, events),
        ]


def _bytes(labels: Labels, text: bytes | None) -> Iterator[tuple[Labels, int]]:
    """A sample of a file with one number; none where it has none, or "max"."""
    number = (text or b"").rstrip()
    if number.isdigit() and int(number) < _BYTES_LIMIT:
        yield labels, int(number)
