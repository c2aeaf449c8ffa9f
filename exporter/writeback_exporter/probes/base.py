# SPDX-License-Identifier: Apache-2.0
"""What the probes share: their life, and tables of histogram rows by label."""

from __future__ import annotations

import logging
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
from writeback_exporter.kernel.pins import PinnedObject
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

log = logging.getLogger(__name__)

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
        self.bpf: Object | PinnedObject | None = None
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

    def run(self, program: str, *arguments: int) -> int:
        """Runs a program that is at no hook, which `load` loads as well."""
        assert self.bpf is not None, "load() comes first"
        return self.bpf.programs[program].run(*arguments)

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

    def _bequeath(self, name: str, key: bytes, heir: bytes) -> None:
        """Adds an entry to its heir's and deletes it, in one step (bpf/inherit.h). Where the map
        has no room for the heir's, it counts as other's, as all that finds no room."""
        for one in (heir, _id(OTHER_ID) + heir[8:]):
            words = struct.unpack(f"={2 * len(key) // 8}Q", key + one)
            if self.run(f"{name}_inherit", *words):
                return
        self.map(name).delete(key)
        log.warning("BPF map %s/%s is full: what an exited cgroup counted is lost", self.name, name)

    def _dump(self, name: str, use: str = "") -> list[tuple[bytes, memoryview]]:
        """A map's entries; notes how full it is, under the name that its drops have."""
        entries = self._entries(name)
        self.use[use or name] = MapUse(len(entries), self.map(name).max_entries)
        return entries

    def _entries(self, name: str) -> list[tuple[bytes, memoryview]]:
        source = self.map(name)
        keys, values = source.dump()
        view, key_size, size = memoryview(values), source.key_size, source.value_size
        return [
            (keys[i * key_size : (i + 1) * key_size], view[i * size : (i + 1) * size])
            for i in range(len(keys) // key_size)
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

    def make_room(self, hierarchy: Hierarchy, rests: Iterable[bytes] = (b"",)) -> None:
        """At load: whose ids the keys have, and the rests of keys that there can be."""
        self._hierarchy = hierarchy
        bpf_map = self._probe.map(self._name)
        for rest in rests:
            # It is there where the map was pinned.
            bpf_map.insert(_id(OTHER_ID) + rest, bytes(bpf_map.value_size))

    def read(self) -> None:
        self._entries = self._probe._dump(self._name)

    def keep(self, is_known: Callable[[bytes], bool]) -> None:
        """Deletes what was read of keys whose rest is of a forgotten device."""
        self._entries = self._probe._of_known(
            self._name, self._entries, lambda key: is_known(key[8:])
        )

    def table(self, cgroups: Cgroups) -> Table:
        """The rows by (cgroup, more...); entries that counted nothing are left out."""
        table = Table()
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
        heir_of_rest: Callable[[bytes], bytes | None] | None = None,
    ) -> None:
        """Drops the entries of these (hierarchy, cgroup): what they counted goes to another cgroup
        that has the label, if there is one. Where devices have gone, `heir_of_rest` gives for a
        key's rest the one that stays for it, which may be itself, or None."""
        dead = {cgroup for tree, cgroup in gone if tree == self._hierarchy.id}
        if not dead and heir_of_rest is None:
            return
        heirs = cgroups.heirs(self._hierarchy, gone)
        for key, labels, _ in list(self._rows(cgroups)):
            cgroup = int.from_bytes(key[:8], sys.byteorder)
            heir = heirs.get(labels[0]) if cgroup in dead else cgroup
            rest = heir_of_rest(key[8:]) if heir_of_rest else key[8:]
            if heir is None or rest is None:
                self._probe.map(self._name).delete(key)
            elif (heir, rest) != (cgroup, key[8:]):
                self._probe._bequeath(self._name, key, _id(heir) + rest)


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

    def heirs(self, dead: Mapping[int, Bdi]) -> dict[int, int | None]:
        """For each of `dead` the BDI that has its name when they are forgotten, if there is one: a
        device may have come again."""
        left = {self.known[bdi].name: bdi for bdi in sorted(self.known) if bdi not in dead}
        return {bdi.id: left.get(bdi.name) for bdi in dead.values()}

    def forget(self, heirs: Mapping[int, int | None]) -> None:
        """Drops BDIs, with what the probe has counted on them where they have no heir."""
        for bdi, heir in heirs.items():
            if heir is None:
                self._probe.map("bdis").delete(_id(bdi))
            else:
                self._probe._bequeath("bdis", _id(bdi), _id(heir))


@dataclass(slots=True, kw_only=True)
class Disk(Device):
    """A disk that a probe has counted on."""

    name: str
    dev: str
    """MAJOR:MINOR"""
    since_ns: int
    """When it had its first IO, by the kernel's monotonic clock."""


DiskKey = TypeVar("DiskKey")


def disks_that_left(
    disks: Mapping[DiskKey, Disk], devices: Devices, now: float
) -> dict[DiskKey, DiskKey | None]:
    """Those that were unplugged long enough ago for their last samples to have been scraped, each
    with the one that has its name now, if there is one; `now` is a monotonic time in seconds."""
    # Of two that had one name, the one that came later is the one of today.
    latest: dict[str, DiskKey] = {}
    for key in sorted(disks, key=lambda key: disks[key].since_ns):
        latest[disks[key].name] = key
    left: dict[DiskKey, DiskKey | None] = {}
    for key, disk in disks.items():
        is_latest = latest[disk.name] == key
        if disk.has_left(is_latest and devices.has_disk(disk.name, disk.dev), now):
            left[key] = None if is_latest else latest[disk.name]
    for key, heir in left.items():
        if heir in left:  # which has gone, too
            left[key] = None
    return left


class Table:
    """Rows of a map by label set. A row is a struct of 64 bit counters as the kernel has it, and
    keys of one label set, as two cgroups that had the same path one after the other, are one row.
    """

    def __init__(self) -> None:
        self.rows: dict[Labels, bytes | memoryview] = {}

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


def c_string(padded: bytes) -> str:
    """A name as a kernel struct has it, as a label value."""
    return printable(padded.split(b"\0", 1)[0])


def _id(number: int) -> bytes:
    return number.to_bytes(8, sys.byteorder)


def _sum(left: bytes | memoryview, right: bytes | memoryview) -> bytes:
    # As one number, 1.5 us for the 74 counters of block_io instead of 15 one by one: none comes
    # near 2^64, where it would run over into its neighbour.
    order = sys.byteorder
    return (int.from_bytes(left, order) + int.from_bytes(right, order)).to_bytes(len(left), order)
