# SPDX-License-Identifier: Apache-2.0
"""Maps in memory, so that a probe's reading can be tested without a kernel; the layout of keys and
values is the object's own."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Generic, TypeVar, cast

from writeback_exporter.collector import Host
from writeback_exporter.kernel.layout import Layout
from writeback_exporter.kernel.libbpf import Object
from writeback_exporter.metrics.exposition import Snapshot
from writeback_exporter.names.cgroups import (
    RETENTION_SECONDS,
    Cgroups,
    EventKind,
    Hierarchies,
    Hierarchy,
)
from writeback_exporter.names.devices import Devices
from writeback_exporter.probes.base import Probe

Values = Mapping[str, int | bytes | list[int]]


class Memory:
    """A hash map, or an array of which only some entries are not zero; the calls of libbpf.Map."""

    def __init__(self, key_size: int, value_size: int, max_entries: int, array: bool = False):
        self.key_size, self.value_size, self.max_entries = key_size, value_size, max_entries
        self.array = array
        self.entries: dict[bytes, bytes] = {}

    def dump(self) -> tuple[bytes, bytes]:
        return b"".join(self.entries), b"".join(self.entries.values())

    def lookup(self, key: bytes) -> bytes | None:
        return self.entries.get(key, bytes(self.value_size) if self.array else None)

    def lookup_and_delete(self, key: bytes) -> bytes | None:
        return self.entries.pop(key, None)

    def delete(self, key: bytes) -> bool:
        return self.entries.pop(key, None) is not None

    def update(self, key: bytes, value: bytes) -> None:
        assert (len(key), len(value)) == (self.key_size, self.value_size)
        self.entries[key] = value

    def insert(self, key: bytes, value: bytes) -> bool:
        if key in self.entries:
            return False
        self.update(key, value)
        return True


class Inherit:
    """What a program of bpf/inherit.h does to a map; tests/host/test_inherit.py runs the real ones.
    `counters`: the parts of a row that are added to the heir's."""

    def __init__(self, bpf_map: Memory, counters: Sequence[slice]) -> None:
        self._map, self._counters = bpf_map, counters

    def run(self, *words: int) -> int:
        keys = struct.pack(f"={len(words)}Q", *words)
        key, heir = keys[: len(keys) // 2], keys[len(keys) // 2 :]
        row = self._map.lookup_and_delete(key)
        if row is not None and not self._map.insert(heir, row):
            for counters in self._counters:
                self._map.update(heir, added(self._map.entries[heir], row, counters))
        return 1


def added(row: bytes, more: bytes, counters: slice) -> bytes:
    """The row with the 64 bit counters of another one, which is of the same length."""
    left, right = (memoryview(one)[counters].cast("Q") for one in (row, more))
    total = struct.pack(f"={len(left)}Q", *map(sum, zip(left, right, strict=True)))
    return row[: counters.start] + total + row[counters.stop :]


def extent(layout: Layout, *fields: str) -> slice:
    """Where these fields of a struct are, from the first to the last."""
    first, last = layout.fields[fields[0]], layout.fields[fields[-1]]
    return slice(first.offset, last.offset + last.size)


def changed(layout: Layout, before: bytes | None, values: Values) -> bytes:
    """A struct with these fields, and the others as before, or zero."""
    content = bytearray(before or bytes(layout.size))
    for name, value in values.items():
        field = layout.fields[name]
        numbers = value if isinstance(value, list) else [value]
        struct.pack_into(f"={field.count}{field.code}", content, field.offset, *numbers)
    return bytes(content)


def in_memory(probe: Probe, **value_sizes: int) -> dict[str, Memory]:
    """Gives a probe maps whose keys are cgroups, with values of these sizes."""
    maps = {name: Memory(8, size, 16384) for name, size in value_sizes.items()}
    load(probe, maps)
    return maps


def load(
    probe: Probe,
    maps: Mapping[str, Memory],
    programs: Mapping[str, Callable[..., int]] | None = None,
    counters: Mapping[str, Sequence[slice]] | None = None,
) -> None:
    """Gives a probe these maps, and programs to run. `counters`: the parts of a map's rows that an
    heir gets, where it is not the whole."""
    inherit = {
        f"{name}_inherit": Inherit(m, (counters or {}).get(name, [slice(0, m.value_size)]))
        for name, m in maps.items()
    }
    others = {name: SimpleNamespace(run=run) for name, run in (programs or {}).items()}
    probe.bpf = cast(Object, SimpleNamespace(maps=maps, programs={**inherit, **others}))


def put(bpf_map: Memory, cgroup: int, *numbers: int) -> None:
    """Sets a cgroup's row, 64 bit counters."""
    row = struct.pack(f"={len(numbers)}Q", *numbers)
    bpf_map.update(cgroup.to_bytes(8, sys.byteorder), row)


Scraped = TypeVar("Scraped")


class MachineOfCgroups(Generic[Scraped]):
    """The cgroups and the sysfs of a machine in memory, as events and plugging change them, and
    scrapes of a probe; `scraped` is what a test makes of a snapshot."""

    def __init__(self, sysfs: Path, probe: Probe, scraped: Callable[[Snapshot], Scraped]) -> None:
        self._probe, self._scraped = probe, scraped
        self.hierarchy = Hierarchy(0, "/nowhere")
        self.cgroups = Cgroups(Hierarchies(self.hierarchy, self.hierarchy))
        self.sysfs = sysfs
        for directory in ("block", "class/bdi"):
            (sysfs / directory).mkdir(parents=True)
        self.host = Host(self.cgroups, Devices(str(sysfs)))
        self.now = 0.0

    def event(self, kind: EventKind, cgroup: int, path: str) -> None:
        self.cgroups.apply(kind, 0, cgroup, path.encode(), self.now)

    def exit(self, cgroup: int, path: str) -> None:
        self.event(EventKind.RMDIR, cgroup, path)
        self.event(EventKind.RELEASE, cgroup, path)

    def scrape(self, after: float = 15.0) -> Scraped:
        """One collection, as Exporter.collect() has it."""
        self.now += after
        result = self.peek()
        gone = self.cgroups.expired(self.now)
        self._probe.forget(gone, self.host, self.now)
        self.cgroups.forget(gone, self.now)
        return result

    def peek(self) -> Scraped:
        """What a collection finds, without its consequences."""
        snapshot = Snapshot()
        self._probe.read()
        self._probe.fill(snapshot, self.host)
        return self._scraped(snapshot)

    def scrape_until_retention_is_over(self) -> Scraped:
        """Scrapes as Prometheus does, so that what exited before is gone in the last one."""
        for _ in range(4):
            self.scrape(RETENTION_SECONDS / 2)
        return self.scrape()
