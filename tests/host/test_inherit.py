# SPDX-License-Identifier: Apache-2.0
"""Rows that go to their heirs in the kernel: the programs of bpf/inherit.h, with real maps."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.unit.memory import added, extent
from writeback_exporter.kernel.libbpf import Map, Object, Program
from writeback_exporter.kernel.loader import OBJECTS, load, open_file
from writeback_exporter.names.cgroups import OTHER_ID
from writeback_exporter.probes.base import Probe
from writeback_exporter.probes.page_flow import PageFlow

# Of the rows that are more than counters, the parts that are.
PARTS: dict[tuple[str, str], list[tuple[str, ...]]] = {
    ("dirty_throttle", "bdis"): [("pauses",), ("other.slept_ns", "other.requested_ns")],
    ("work", "bdis"): [("works[0].ns", "works[11].pages")],
}


def programs() -> list[tuple[str, str]]:
    """(object, map) of each program that there is."""
    found = []
    for path in sorted(OBJECTS.glob("*.bpf.o")):
        name = path.name.removesuffix(".bpf.o")
        with Object(open_file(name)) as opened:
            found += [
                (name, program.removesuffix("_inherit"))
                for program in opened.programs
                if program.endswith("_inherit")
            ]
    return found


MAPS = programs()


@contextmanager
def loaded(name: str, bpf_map: str, entries: int = 0) -> Iterator[tuple[Map, Program]]:
    with Object(open_file(name)) as opened:
        for program in opened.programs.values():
            program.autoload = program.name == f"{bpf_map}_inherit"
        if entries:
            opened.maps[bpf_map].max_entries = entries
        opened.load()
        yield opened.maps[bpf_map], opened.programs[f"{bpf_map}_inherit"]


def words(*keys: bytes) -> tuple[int, ...]:
    joined = b"".join(keys)
    return struct.unpack(f"={len(joined) // 8}Q", joined)


def counters(size: int) -> bytes:
    # Small enough for no counter to run over.
    return struct.pack(f"={size // 8}Q", *(random.getrandbits(60) for _ in range(size // 8)))


def parts(name: str, bpf_map: str, size: int) -> list[slice]:
    layout = open_file(name).map(bpf_map).value
    if (name, bpf_map) not in PARTS:
        return [slice(0, size)]
    assert layout is not None
    return [extent(layout, *fields) for fields in PARTS[name, bpf_map]]


def test_every_map_of_rows_that_can_go_has_a_program() -> None:
    assert {bpf_map for _, bpf_map in programs()} == {
        *("block_io", "block_io_errors", "block_io_limit", "bdis", "dirty_throttle"),
        *("memory_stall", "page_dirtied", "page_wait", "page_written", "sync"),
    }


@pytest.mark.parametrize(("name", "bpf_map"), MAPS)
def test_the_heir_has_both(name: str, bpf_map: str) -> None:
    with loaded(name, bpf_map) as (rows, inherit):
        old, heir, other = (random.randbytes(rows.key_size) for _ in range(3))
        before = {key: counters(rows.value_size) for key in (old, heir, other)}
        for key, row in before.items():
            rows.update(key, row)
        assert inherit.run(*words(old, heir)) == 1
        expected = before[heir]
        for part in parts(name, bpf_map, rows.value_size):
            expected = added(expected, before[old], part)
        assert rows.lookup(old) is None
        assert rows.lookup(heir) == expected
        assert rows.lookup(other) == before[other]
        # As after a crash between this and what comes after it.
        assert inherit.run(*words(old, heir)) == 1
        assert rows.lookup(heir) == expected


@pytest.mark.parametrize(("name", "bpf_map"), MAPS)
def test_an_heir_without_a_row_gets_it_as_it_is(name: str, bpf_map: str) -> None:
    with loaded(name, bpf_map) as (rows, inherit):
        old, heir = (random.randbytes(rows.key_size) for _ in range(2))
        row = counters(rows.value_size)
        rows.update(old, row)
        assert inherit.run(*words(old, heir)) == 1
        assert (rows.lookup(old), rows.lookup(heir)) == (None, row)


def test_no_room_changes_nothing() -> None:
    with loaded("page_wait", "page_wait", entries=2) as (rows, inherit):
        keys = [number.to_bytes(8, "little") for number in (1, 2)]
        for key in keys:
            rows.update(key, counters(rows.value_size))
        before = rows.dump()
        assert inherit.run(1, 3) == 0
        assert rows.dump() == before


def test_what_finds_no_room_for_its_heir_is_others() -> None:
    probe: Probe = PageFlow()
    with Object(probe.file) as opened:
        for program in opened.programs.values():
            program.autoload = program.name in probe.file.own_programs
        opened.maps["page_dirtied"].max_entries = 2
        opened.load()
        probe.bpf = opened
        one, other = (number.to_bytes(8, "little") for number in (1, OTHER_ID))
        rows = probe.map("page_dirtied")
        rows.update(one, struct.pack("=Q", 5))
        rows.update(other, struct.pack("=Q", 70))
        probe._bequeath("page_dirtied", one, struct.pack("=Q", 3))
        assert rows.dump() == (other, struct.pack("=Q", 75))


@pytest.mark.parametrize("heir", [1023, 1024], ids=["heir", "none"])
def test_disk(heir: int) -> None:
    """Its place is free and its name unknown, all in one step."""
    file = open_file("block_io")
    layout = file.map("disks").value
    assert layout is not None
    depth = extent(layout, "depth.sum", "depth.slots")
    other = extent(layout, "other[0].device_ns", "other[4].size_slots")
    opened = load(file, [], {})
    with opened:
        disks, drop = opened.maps["disks"], opened.programs["drop_disk"]
        places = {index: struct.pack("=I", index) for index in (3, 1023)}
        rows = {index: counters(layout.size) for index in places}
        for index, place in places.items():
            identity = rows[index][:16]  # gendisk, dev
            disks.update(place, rows[index])
            opened.maps["disk_index"].update(identity, place)
            opened.maps["disk_owner"].update(place, identity)
        for _ in range(2):  # the second time there is nothing left to inherit
            assert drop.run(3, heir) == 1
            expected = rows[1023]
            if heir == 1023:
                expected = added(added(expected, rows[3], depth), rows[3], other)
            assert disks.lookup(places[1023]) == expected
            assert disks.lookup(places[3]) == bytes(layout.size)
            assert opened.maps["disk_index"].dump() == (rows[1023][:16], places[1023])
            assert opened.maps["disk_owner"].dump() == (places[1023], rows[1023][:16])
        assert drop.run(1024, 3) == 0, "no such place"
