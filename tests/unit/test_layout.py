# SPDX-License-Identifier: Apache-2.0
"""Layouts read from the built objects, against bpftool, a C compiler and llvm-readelf."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from writeback_exporter import __version__
from writeback_exporter.kernel import loader
from writeback_exporter.kernel.layout import BadObject, Field, Layout, ObjectFile
from writeback_exporter.kernel.loader import OBJECTS, open_file

ROOT = Path(__file__).parents[2]
NAMES = sorted(source.name.removesuffix(".bpf.c") for source in (ROOT / "bpf").glob("*.bpf.c"))
INNER = {
    "block_io": ("io_histograms", "io_depth"),
    "dirty_throttle": ("throttle",),
    "work": ("work",),
}
"""Structs that are asked for by name, and not as a map's key or value."""
BYTES = {name: (OBJECTS / f"{name}.bpf.o").read_bytes() for name in NAMES}
CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}
HANG = 10
"""Seconds after which reading an object is taken to hang."""


@dataclass(frozen=True)
class Bpftool:
    """What bpftool reads in an object's BTF."""

    path: str

    def dump(self, *options: str) -> str:
        # Debian has it in /usr/sbin, which is not on everybody's PATH.
        tool = shutil.which("bpftool", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        assert tool, "bpftool is among the packages that `make unit` installs"
        command = [tool, "-j"] if not options else [tool]
        command += ["btf", "dump", "file", self.path, *options]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    @cached_property
    def types(self) -> dict[int, dict[str, Any]]:
        return {kind["id"]: kind for kind in json.loads(self.dump())["types"]}

    @property
    def enums(self) -> dict[str, dict[str, int]]:
        return {
            kind["name"]: {value["name"]: value["val"] for value in kind["values"]}
            for kind in self.types.values()
            if kind["kind"] == "ENUM"
        }

    @property
    def maps(self) -> dict[str, tuple[str | None, str | None]]:
        """Names of the structs that are a map's key and value; None for a number."""
        found = {}
        (section,) = (
            kind
            for kind in self.types.values()
            if kind["kind"] == "DATASEC" and kind["name"] == ".maps"
        )
        for variable in section["vars"]:
            declared = self.types[variable["type_id"]]
            members = {m["name"]: m for m in self.types[declared["type_id"]]["members"]}
            key, value = (self._struct(members.get(part)) for part in ("key", "value"))
            found[declared["name"]] = key, value
        return found

    def element(self, type_id: int) -> tuple[dict[str, Any], int]:
        """The number that a type or, if it is an array, its elements are; how many there are."""
        kind, count = self._resolved(type_id), 1
        if kind["kind"] == "ARRAY":
            kind, count = self._resolved(kind["type_id"]), kind["nr_elems"]
        return kind, count

    def _resolved(self, type_id: int) -> dict[str, Any]:
        kind = self.types[type_id]
        while kind["kind"] in ("TYPEDEF", "CONST", "VOLATILE"):
            kind = self.types[kind["type_id"]]
        return kind

    def _struct(self, member: dict[str, Any] | None) -> str | None:
        if member is None:
            return None
        target = self._resolved(self.types[member["type_id"]]["type_id"])
        return target["name"] if target["kind"] == "STRUCT" else None


@dataclass
class Subject:
    """An object as we read it, and as bpftool does."""

    name: str
    file: ObjectFile
    bpftool: Bpftool

    @property
    def layouts(self) -> dict[str, Layout]:
        """Every struct that the exporter decodes."""
        maps = (part for m in self.file.maps.values() for part in (m.key, m.value) if part)
        inner = map(self.file.struct, INNER.get(self.name, ()))
        return {layout.name: layout for layout in (*maps, *inner)}


@pytest.fixture(scope="module", params=NAMES)
def subject(request: pytest.FixtureRequest) -> Subject:
    path = str(OBJECTS / f"{request.param}.bpf.o")
    return Subject(request.param, ObjectFile(path), Bpftool(path))


# Against independent readers ----------------------------------------------------------------------


def test_every_object_is_here() -> None:
    assert {path.name.removesuffix(".bpf.o") for path in OBJECTS.iterdir()} == set(NAMES)


def test_maps_and_their_structs(subject: Subject) -> None:
    ours = {
        name: (m.key and m.key.name, m.value and m.value.name)
        for name, m in subject.file.maps.items()
    }
    assert ours == subject.bpftool.maps
    assert {name: subject.file.map(name) for name in ours} == subject.file.maps


MEASURE = """
#include "object.h"
int printf(const char *format, ...);
#define LAYOUT(type) printf(#type " %zu\\n", sizeof(type))
#define FIELD(type, field) printf( \\
    #type " " #field " %zu %zu\\n", __builtin_offsetof(type, field), sizeof(((type *)0)->field))
int main(void)
{
%s
    return 0;
}
"""


def test_sizes_and_offsets_are_a_c_compilers(subject: Subject, tmp_path: Path) -> None:
    """bpftool writes the structs as C; clang tells where their fields are."""
    (tmp_path / "object.h").write_text(subject.bpftool.dump("format", "c"))
    lines = []
    for layout in subject.layouts.values():
        lines.append(f"LAYOUT(struct {layout.name});")
        lines += (f"FIELD(struct {layout.name}, {name});" for name in layout.fields)
    (tmp_path / "measure.c").write_text(MEASURE.replace("%s", "\n".join(lines)))
    clang = [os.environ.get("CLANG", "clang"), "-w", "-DBPF_NO_PRESERVE_ACCESS_INDEX"]
    subprocess.run([*clang, "-o", tmp_path / "measure", tmp_path / "measure.c"], check=True)
    said = subprocess.run([tmp_path / "measure"], check=True, capture_output=True, text=True)

    ours = []
    for layout in subject.layouts.values():
        ours.append(f"struct {layout.name} {layout.size}")
        for name, field in layout.fields.items():
            ours.append(f"struct {layout.name} {name} {field.offset} {field.size}")
    assert said.stdout.splitlines() == ours
    assert len(ours) > len(subject.layouts)


def test_no_member_is_left_out(subject: Subject) -> None:
    described = {
        kind["name"]: kind for kind in subject.bpftool.types.values() if kind["kind"] == "STRUCT"
    }
    for layout in subject.layouts.values():
        members = described[layout.name]["members"]
        ends = [member["bits_offset"] // 8 for member in members[1:]] + [layout.size]
        # Members of zero length name an enum and are not data.
        data = [
            member["name"]
            for member, end in zip(members, ends, strict=True)
            if member["bits_offset"] // 8 < end
        ]
        heads = [re.split(r"[.\[]", name)[0] for name in layout.fields]
        assert list(dict.fromkeys(heads)) == data


def test_codes(subject: Subject) -> None:
    """Size, number and sign of what a field's format code stands for."""
    described = {
        kind["name"]: kind for kind in subject.bpftool.types.values() if kind["kind"] == "STRUCT"
    }
    for layout in subject.layouts.values():
        for field in layout.fields.values():
            assert struct.calcsize(f"={field.count}{field.code}") == field.size
        for member in described[layout.name]["members"]:
            if member["name"] not in layout.fields:
                continue  # a struct, which is flattened, or of zero length
            element, count = subject.bpftool.element(member["type_id"])
            code = "s" if element["name"] == "char" else CODES[element["size"]]
            if "SIGNED" in element["encoding"].split() and code != "s":
                code = code.lower()
            field = layout.fields[member["name"]]
            assert (field.code, field.count) == (code, count), member["name"]


def test_enums(subject: Subject) -> None:
    names = subject.bpftool.enums
    assert names
    assert {name: subject.file.enum(name) for name in names} == names


def test_constants(subject: Subject) -> None:
    tool = shutil.which("llvm-readelf")
    assert tool, "llvm is among the packages that `make bpf` installs"
    said = subprocess.run(
        [tool, "--elf-output-style=GNU", "--wide", "-S", "-s", subject.file.path],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    index = re.search(r"\[ *(\d+)\] \.rodata ", said)
    if index is None:
        assert subject.name in ("io_uring", "work"), "the others have constants"
        return
    constants = {
        symbol["name"]: (int(symbol["value"], 16), int(symbol["size"]))
        for symbol in re.finditer(
            r"^ *\d+: (?P<value>[0-9a-f]+) +(?P<size>\d+) OBJECT +\w+ +\w+ +"
            rf"{index[1] if index else 'none'} (?P<name>\w+)$",
            said,
            re.MULTILINE,
        )
    }
    assert bool(constants) == (subject.name != "work")  # which has none
    assert {name: subject.file.constant(name) for name in constants} == constants


def test_constants_that_the_probes_set() -> None:
    sizes = {
        ("block_io", "queue_argument"): 1,
        ("cgroup_lifecycle", "io_hierarchy"): 4,
        ("cgroup_lifecycle", "task_hierarchy"): 4,
        ("dirty_throttle", "hz"): 4,
        ("dirty_throttle", "measured"): 1,
        ("dirty_throttle", "memory_v1"): 1,
        ("page_flow", "memory_v1"): 1,
        ("page_wait", "memory_v1"): 1,
    }
    found = {(name, constant): open_file(name).constant(constant)[1] for name, constant in sizes}
    assert found == sizes


def test_version_is_that_of_the_package(subject: Subject) -> None:
    assert subject.file.version == __version__
    assert open_file(subject.name).path == subject.file.path


def test_unknown_names_are_of_another_version(subject: Subject) -> None:
    for ask in (subject.file.map, subject.file.struct, subject.file.enum, subject.file.constant):
        with pytest.raises(BadObject, match=r"has no \w+ no_such.*another version.*make bpf"):
            ask("no_such")


# Picking ------------------------------------------------------------------------------------------


def test_pick_unpacks_each_field_where_it_is(subject: Subject) -> None:
    for layout in subject.layouts.values():
        buffer = bytes(i % 251 for i in range(layout.size))
        for name, field in layout.fields.items():
            picked = layout.pick(name)
            assert picked.size == layout.size
            assert picked.unpack(buffer) == numbers(buffer, field), name
        everything = layout.pick(*layout.fields)
        assert everything.unpack(buffer) == tuple(
            number for field in layout.fields.values() for number in numbers(buffer, field)
        )


def numbers(buffer: bytes, field: Field) -> tuple[int | bytes, ...]:
    part = buffer[field.offset : field.offset + field.size]
    if field.code == "s":
        return (part,)
    size = field.size // field.count
    return tuple(
        int.from_bytes(part[i : i + size], sys.byteorder, signed=field.code.islower())
        for i in range(0, field.size, size)
    )


ROW = open_file("block_io").struct("io_histograms")


@given(st.lists(st.sampled_from([*ROW.fields]), max_size=6))
def test_pick_wants_the_structs_order(names: list[str]) -> None:
    offsets = [ROW.fields[name].offset for name in names]
    if offsets == sorted(set(offsets)):
        assert ROW.pick(*names).size == ROW.size
    else:
        with pytest.raises(ValueError, match="comes earlier in struct io_histograms"):
            ROW.pick(*names)


def test_pick_of_an_unknown_field() -> None:
    with pytest.raises(KeyError, match="no_such"):
        open_file("block_io").struct("io_depth").pick("no_such")


def test_picked_structs_iterate_over_a_dump() -> None:
    layout = open_file("dirty_throttle").struct("throttle")
    picked = layout.pick("requested_ns")
    rows = bytearray(3 * layout.size)
    for i in range(3):
        struct.pack_into("=Q", rows, i * layout.size + layout.fields["requested_ns"].offset, i + 7)
    assert [*picked.iter_unpack(rows)] == [(7,), (8,), (9,)]


# Files that are no such object --------------------------------------------------------------------


def read_all(path: Path) -> None:
    """Asks for everything that the exporter may ask for."""
    file = ObjectFile(str(path))
    for ask, names in (
        (file.struct, ("io_histograms", "io_depth", "throttle")),
        (file.enum, ("drop", "io_op", "io_latency_exponents", "throttle_domain")),
        (file.map, ("block_io", "disks", "bdis", "scratch")),
        (file.constant, ("hz", "queue_argument")),
    ):
        for name in names:
            with contextlib.suppress(BadObject):
                ask(name)


@contextlib.contextmanager
def no_longer_than(seconds: float) -> Iterator[None]:
    def alarm(_number: int, _frame: FrameType | None) -> None:
        raise AssertionError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("name", NAMES)
def test_truncated_objects(name: str, tmp_path: Path) -> None:
    path = tmp_path / "object.bpf.o"
    path.write_bytes(BYTES[name])
    with no_longer_than(HANG):
        for size in reversed(range(0, len(BYTES[name]), 97)):
            os.truncate(path, size)
            with pytest.raises(BadObject, match=f"{path} is truncated"):
                ObjectFile(str(path))


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layout") / "object.bpf.o"


@settings(max_examples=150)
@given(
    st.sampled_from(NAMES),
    st.lists(
        st.tuples(
            st.one_of(
                st.integers(0, 63),  # ELF header
                st.integers(-24 * 64, -1),  # section headers
                st.integers(0, 2**20),
            ),
            st.one_of(st.sampled_from((0, 1, 0x7F, 0x80, 0xFF)), st.integers(0, 255)),
        ),
        min_size=1,
        max_size=8,
    ),
)
def test_mutated_objects(scratch: Path, name: str, changes: list[tuple[int, int]]) -> None:
    content = bytearray(BYTES[name])
    for place, value in changes:
        content[place % len(content)] = value
    scratch.write_bytes(content)
    with no_longer_than(HANG), contextlib.suppress(BadObject):
        read_all(scratch)


def section(name: str, content: bytes) -> slice:
    """Where a section's bytes are, by the ELF header (64 bit, little-endian)."""
    (headers,) = struct.unpack_from("<Q", content, 0x28)
    count, names_index = struct.unpack_from("<HH", content, 0x3C)
    entries = [struct.unpack_from("<IIQQQQIIQQ", content, headers + 64 * i) for i in range(count)]
    names = content[entries[names_index][4] :]
    (found,) = (e for e in entries if names[e[0] :].split(b"\0", 1)[0] == name.encode())
    return slice(found[4], found[4] + found[5])


@settings(max_examples=150)
@given(
    st.sampled_from(NAMES),
    st.lists(
        st.tuples(
            st.integers(0, 2**16),
            st.one_of(
                st.integers(0, 2**8), st.sampled_from((2**16, 2**24, 2**31, 2**32 - 1)).map(int)
            ),
        ),
        min_size=1,
        max_size=8,
    ),
)
def test_mutated_btf(scratch: Path, name: str, changes: list[tuple[int, int]]) -> None:
    """Words of the type information itself: ids and offsets that lead nowhere or in circles."""
    content = bytearray(BYTES[name])
    btf = section(".BTF", BYTES[name])
    for word, value in changes:
        place = btf.start + 4 * word % (btf.stop - btf.start - 3)
        struct.pack_into("=I", content, place, value)
    scratch.write_bytes(content)
    with no_longer_than(HANG), contextlib.suppress(BadObject):
        read_all(scratch)


@pytest.mark.parametrize("name", NAMES)
def test_type_that_refers_to_itself(name: str, tmp_path: Path) -> None:
    """A typedef of itself has no end; where a map's key or value is of it, neither has reading."""
    content = bytearray(BYTES[name])
    btf = section(".BTF", BYTES[name])
    typedefs = [
        kind
        for kind in Bpftool(str(OBJECTS / f"{name}.bpf.o")).types.values()
        if kind["kind"] == "TYPEDEF"
    ]
    # struct btf_type: name, info with the kind in bits 24 to 28, type.
    places = [
        place
        for place in range(btf.start + 4, btf.stop - 4, 4)
        if struct.unpack_from("=I", content, place)[0] == 8 << 24
    ]
    assert len(places) == len(typedefs) > 0
    for place, typedef in zip(places, typedefs, strict=True):
        assert struct.unpack_from("=I", content, place + 4)[0] == typedef["type_id"]
        struct.pack_into("=I", content, place + 4, typedef["id"])
    path = tmp_path / "object.bpf.o"
    path.write_bytes(content)
    with no_longer_than(HANG), pytest.raises(BadObject, match="no BPF object of this exporter"):
        _ = ObjectFile(str(path)).maps


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"#!/bin/sh\n", b"\x7fELF", b"\x7fELF" + bytes(2000), b"\xff" * 5000],
    ids=["empty", "newline", "script", "magic", "zeroes", "ones"],
)
def test_no_object_at_all(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "object.bpf.o"
    path.write_bytes(content)
    with pytest.raises(BadObject, match=f"{path} is truncated or no BPF object.*make bpf"):
        ObjectFile(str(path))


def test_elf_that_is_no_bpf_object() -> None:
    with pytest.raises(BadObject, match="no BPF object of this exporter"):
        ObjectFile(sys.executable)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", [".BTF", "exporter_version"])
def test_object_without_a_section(name: str, part: str, tmp_path: Path) -> None:
    path = tmp_path / "object.bpf.o"
    renamed = BYTES[name].replace(part.encode() + b"\0", b"x" * len(part) + b"\0")
    assert renamed != BYTES[name]
    path.write_bytes(renamed)
    with pytest.raises(BadObject, match="no BPF object of this exporter"):
        ObjectFile(str(path))


def test_btf_of_the_other_byte_order(tmp_path: Path) -> None:
    path = tmp_path / "object.bpf.o"
    content = bytearray(BYTES["block_io"])
    btf = section(".BTF", BYTES["block_io"])
    content[btf.start : btf.start + 2] = content[btf.start : btf.start + 2][::-1]
    path.write_bytes(content)
    with pytest.raises(BadObject, match="no BPF object of this exporter"):
        ObjectFile(str(path))


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(BadObject, match=r"cannot read BPF object .*: No such file.*make bpf"):
        ObjectFile(str(tmp_path / "object.bpf.o"))


def test_directory(tmp_path: Path) -> None:
    with pytest.raises(BadObject, match=r"cannot read BPF object .*: Is a directory.*make bpf"):
        ObjectFile(str(tmp_path))


# Another version ----------------------------------------------------------------------------------


def with_version(name: str, version: bytes, directory: Path) -> Path:
    content = bytearray(BYTES[name])
    place = section("exporter_version", BYTES[name])
    content[place] = version.ljust(place.stop - place.start, b"\0")
    assert len(content) == len(BYTES[name])
    path = directory / f"{name}.bpf.o"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("name", NAMES)
def test_object_of_another_version(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "OBJECTS", tmp_path)
    path = with_version(name, __version__.encode(), tmp_path)
    assert open_file(name).path == str(path)

    other = "9" + __version__[1:]
    with_version(name, other.encode(), tmp_path)
    with pytest.raises(BadObject) as error:
        open_file(name)
    assert str(error.value).startswith(
        f"{path} was built for version {other}, this is {__version__}; reinstall"
    )


def test_object_without_a_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "OBJECTS", tmp_path)
    with_version("block_io", b"", tmp_path)
    with pytest.raises(BadObject, match="was built for version "):
        open_file("block_io")


def test_version_that_is_no_text(tmp_path: Path) -> None:
    path = with_version("block_io", b"\xff\xfe", tmp_path)
    with pytest.raises(BadObject, match="no BPF object of this exporter"):
        ObjectFile(str(path))


def test_missing_object_of_this_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "OBJECTS", tmp_path)
    with pytest.raises(BadObject, match=rf"cannot read BPF object {tmp_path}/block_io\.bpf\.o"):
        open_file("block_io")
