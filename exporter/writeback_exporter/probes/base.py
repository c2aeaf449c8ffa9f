# SPDX-License-Identifier: Apache-2.0
"""What the probes share: their life, and tables of histogram rows by label."""

from __future__ import annotations

import struct
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from writeback_exporter.collector import Collector
from writeback_exporter.features import Feature
from writeback_exporter.kernel.layout import Layout, ObjectFile
from writeback_exporter.kernel.libbpf import Map, Object, Program
from writeback_exporter.kernel.loader import Kernel, open_file
from writeback_exporter.metrics.catalogue import Metric
from writeback_exporter.metrics.exposition import HistogramFamily, HistogramRow, Labels
from writeback_exporter.names.cgroups import (
    OTHER_ID,
    RETENTION_SECONDS,
    Cgroups,
    Hierarchies,
    Hierarchy,
    printable,
)
from writeback_exporter.names.devices import Devices

Row = tuple[bytes, Labels, bytes | memoryview]
"""An entry of a map: its key, the labels that the key stands for, its value."""


@dataclass(slots=True)
class MapUse:
    """Entries in a map and how many it can hold."""

    entries: int
    capacity: int


class Probe(Collector):
    """A BPF object with its reader: `load` once; at each scrape `read` copies the maps and `fill`
    turns the copies into families."""

    def __init__(self) -> None:
        self.file: ObjectFile = open_file(self.name)
        self.bpf: Object | None = None
        self.use: dict[str, MapUse] = {}

    @abstractmethod
    def load(self, kernel: Kernel, hierarchies: Hierarchies) -> list[Feature]:
        """Loads and attaches; the features beside the main one. Raises Refused."""

    def drops(self) -> dict[str, int]:
        """Events that found no room, by map."""
        name = self.file.enum("drop")
        value = self.map("drops").lookup(bytes(4)) or b""
        counts = struct.unpack(f"={len(value) // 8}Q", value)
        return {
            reason.removeprefix("DROP_").lower(): counts[index]
            for reason, index in name.items()
            if index < len(counts)
        }

    def programs(self) -> list[Program]:
        """Those that run on this kernel."""
        assert self.bpf is not None, "load() comes first"
        return [self.bpf.programs[name] for name in self.bpf.attached]

    def close(self) -> None:
        if self.bpf:
            self.bpf.close()
            self.bpf = None

    def _key_layout(self, name: str) -> Layout:
        layout = self.file.map(name).key
        assert layout is not None, f"the key of {name} is a plain number"
        return layout

    def _value_layout(self, name: str) -> Layout:
        layout = self.file.map(name).value
        assert layout is not None, f"the value of {name} is a plain number"
        return layout

    def map(self, name: str) -> Map:
        assert self.bpf is not None, "load() comes first"
        return self.bpf.maps[name]

    def _of_known(
        self, name: str, entries: list[tuple[bytes, memoryview]], is_known: Callable[[bytes], bool]
    ) -> list[tuple[bytes, memoryview]]:
        """Without the entries of forgotten devices, which are deleted: a request that hung in an
        unplugged disk for minutes makes one when it fails."""
        known = []
        for key, row in entries:
            if is_known(key):
                known.append((key, row))
            else:
                self.map(name).delete(key)
        return known

    def _dump(self, name: str, use: str = "") -> list[tuple[bytes, memoryview]]:
        """A map's entries; notes how full it is, under the name that its drops have."""
        source = self.map(name)
        keys, values = source.dump()
        view, key_size, size = memoryview(values), source.key_size, source.value_size
        count = len(keys) // key_size
        self.use[use or name] = MapUse(count, source.max_entries)
        return [
            (keys[i * key_size : (i + 1) * key_size], view[i * size : (i + 1) * size])
            for i in range(count)
        ]


class CgroupMap:
    """A map of counters whose key is a cgroup's id (64 bit, first) and perhaps a little more.

    `more` makes the labels after the cgroup's of the key's rest. Where the map is full the BPF
    program counts for OTHER_ID instead (cgroup_row() in bpf/cgroup.h): `make_room` makes those
    entries first.
    """

    def __init__(self, probe: Probe, name: str, more: Callable[[bytes], Labels] = lambda _: ()):
        self._probe, self._name, self._more = probe, name, more
        self._hierarchy = Hierarchy(0, "")
        self._entries: list[tuple[bytes, memoryview]] = []
        self._carried: dict[Labels, bytes] = {}

    def make_room(self, hierarchy: Hierarchy, rests: Iterable[bytes] = (b"",)) -> None:
        """At load: whose ids the keys have, and the rests of keys that there can be."""
        self._hierarchy = hierarchy
        bpf_map = self._probe.map(self._name)
        for rest in rests:
            key = OTHER_ID.to_bytes(8, sys.byteorder) + rest
            bpf_map.update(key, bytes(bpf_map.value_size))

    def read(self) -> None:
        self._entries = self._probe._dump(self._name)

    def keep(self, is_known: Callable[[bytes], bool]) -> None:
        """Deletes what was read of keys whose rest is of a forgotten device."""
        self._entries = self._probe._of_known(
            self._name, self._entries, lambda key: is_known(key[8:])
        )

    def table(self, cgroups: Cgroups) -> Table:
        """The rows by (cgroup, more...); entries that counted nothing are left out."""
        table = Table(self._carried)
        for _, labels, row in self._rows(cgroups):
            if any(row):
                table.add(labels, row)
        return table

    def _rows(self, cgroups: Cgroups) -> Iterator[Row]:
        for key, row in self._entries:
            cgroup = int.from_bytes(key[:8], sys.byteorder)
            yield key, (cgroups.name(self._hierarchy, cgroup), *self._more(key[8:])), row

    def forget(
        self,
        gone: set[tuple[int, int]],
        cgroups: Cgroups,
        dead_rests: Callable[[bytes], bool] | None = None,
        rest_in_use: Callable[[Labels], bool] = lambda _: True,
    ) -> None:
        """Deletes the entries of these (hierarchy, cgroup), and carries what they counted. Where
        devices have gone, `dead_rests` tells whether the key's rest is of one of them and
        `rest_in_use` whether the labels after the cgroup's stay."""
        dead = {cgroup for tree, cgroup in gone if tree == self._hierarchy.id}
        if not dead and dead_rests is None:
            return
        in_use = cgroups.labels_in_use(self._hierarchy, gone)

        leaving: list[tuple[Labels, bytes]] = []
        try:
            for key, labels, _ in list(self._rows(cgroups)):
                is_dead = int.from_bytes(key[:8], sys.byteorder) in dead
                if is_dead or (dead_rests is not None and dead_rests(key[8:])):
                    row = self._probe.map(self._name).lookup_and_delete(key)
                    if row is not None and any(row):
                        leaving.append((labels, row))
        finally:  # what is deleted is carried, though another one could not be
            self._carried = carry(
                self._carried,
                leaving,
                lambda labels: labels[0] in in_use and rest_in_use(labels[1:]),
            )


@dataclass(slots=True, kw_only=True)
class Device:
    """A disk or BDI that a probe has counted on, until it is gone and its last samples scraped."""

    gone_since: float | None = None

    def has_left(self, is_there: bool, now: float) -> bool:
        """Whether it went long enough ago; notes when it went, at a monotonic time in seconds."""
        if is_there:
            self.gone_since = None
        elif self.gone_since is None:
            self.gone_since = now
        return self.gone_since is not None and now - self.gone_since >= RETENTION_SECONDS


@dataclass(slots=True)
class Bdi(Device):
    """A BDI that a probe has counted on, as `read` found it."""

    id: int
    name: str
    value: memoryview


class BdiMap:
    """The map `bdis` of a probe: BDIs by their id, which is never used twice, with their name and
    what the probe counts on them (bpf/bdi.h)."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._name = probe._value_layout("bdis").pick("name")
        self.known: dict[int, Bdi] = {}

    def read(self) -> None:
        before, self.known = self.known, {}
        for key, value in self._probe._dump("bdis"):
            bdi = int.from_bytes(key, sys.byteorder)
            (name,) = self._name.unpack(value)
            text = c_string(name)
            self.known[bdi] = Bdi(bdi, text, value)
            if bdi in before:
                self.known[bdi].gone_since = before[bdi].gone_since

    def dead(self, devices: Devices, now: float) -> dict[int, Bdi]:
        """BDIs that went long enough ago for their last samples to have been scraped."""
        latest = {bdi.name: bdi.id for bdi in sorted(self.known.values(), key=lambda bdi: bdi.id)}
        dead = {}
        for bdi in self.known.values():
            is_there = bdi.id == latest[bdi.name] and devices.has_bdi(bdi.name)
            if bdi.has_left(is_there, now):
                dead[bdi.id] = bdi
        return dead

    def names_without(self, dead: Mapping[int, Bdi]) -> set[str]:
        """The names that stay in use when `dead` are forgotten: a device may have come again."""
        return {bdi.name for bdi in self.known.values() if bdi.id not in dead}

    def delete(self, dead: Iterable[int]) -> None:
        for bdi in dead:
            self._probe.map("bdis").delete(bdi.to_bytes(8, sys.byteorder))


@dataclass(slots=True, kw_only=True)
class Disk(Device):
    """A disk that a probe has counted on."""

    name: str
    dev: str
    """MAJOR:MINOR"""
    seen: int
    """The number of the reading that found it first."""


AnyDisk = TypeVar("AnyDisk", bound=Disk)


def disks_that_left(disks: Iterable[AnyDisk], devices: Devices, now: float) -> list[AnyDisk]:
    """Those that were unplugged long enough ago for their last samples to have been scraped; `now`
    is a monotonic time in seconds."""
    disks = list(disks)
    # Of two that had one name, the one that came later is the one of today.
    latest: dict[str, int] = {}
    for disk in disks:
        latest[disk.name] = max(disk.seen, latest.get(disk.name, 0))
    return [
        disk
        for disk in disks
        if disk.has_left(
            disk.seen == latest[disk.name] and devices.has_disk(disk.name, disk.dev), now
        )
    ]


class Table:
    """Rows of a map by label set. A row is a struct of 64 bit counters as the kernel has it, and
    keys of one label set, as two cgroups that had the same path one after the other, are one row.

    What leaves a map while its label set stays in use is carried from table to table, so that no
    counter ever goes backwards.
    """

    def __init__(self, carried: Mapping[Labels, bytes]) -> None:
        self.rows: dict[Labels, bytes | memoryview] = dict(carried)

    def add(self, labels: Labels, row: bytes | memoryview) -> None:
        old = self.rows.get(labels)
        self.rows[labels] = row if old is None else _sum(old, row)

    def histogram(
        self, metric: Metric, first_exponent: int, picked: struct.Struct
    ) -> HistogramFamily:
        """A family of what `picked` unpacks of each row: the sum, then the slots."""

        def histogram_rows() -> Iterator[HistogramRow]:
            for labels, row in self.rows.items():
                total, *slots = picked.unpack(row)
                yield labels, slots, total

        return HistogramFamily(metric, first_exponent, histogram_rows, len(self.rows))


def carry(
    carried: Mapping[Labels, bytes],
    leaving: Iterable[tuple[Labels, bytes]],
    in_use: Callable[[Labels], bool],
) -> dict[Labels, bytes]:
    """What the next tables carry: what this one did and what is leaving, of the label sets that
    are still in use."""
    table = Table(carried)
    for labels, row in leaving:
        table.add(labels, row)
    return {labels: bytes(row) for labels, row in table.rows.items() if in_use(labels)}


def c_string(padded: bytes) -> str:
    """A name as a kernel struct has it, as a label value."""
    return printable(padded.split(b"\0", 1)[0])


def _sum(left: bytes | memoryview, right: bytes | memoryview) -> bytes:
    # As one number, 1.5 us for the 74 counters of block_io instead of 15 one by one: none comes
    # near 2^64, where it would run over into its neighbour.
    order = sys.byteorder
    return (int.from_bytes(left, order) + int.from_bytes(right, order)).to_bytes(len(left), order)
