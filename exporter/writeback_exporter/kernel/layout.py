# SPDX-License-Identifier: Apache-2.0
"""What a compiled BPF object says of itself: version, constants, and the layout of its maps.

Read from the file's ELF sections (pyelftools) and its BTF, so that no struct of bpf/ is typed a
second time in Python. BTF's format: Documentation/bpf/btf.rst in the kernel.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

_INT, _PTR, _ARRAY, _STRUCT, _UNION, _ENUM, _FWD, _TYPEDEF, _VOLATILE, _CONST = range(1, 11)
_RESTRICT, _FUNC, _FUNC_PROTO, _VAR, _DATASEC, _FLOAT, _DECL_TAG, _TYPE_TAG, _ENUM64 = range(11, 20)
_MODIFIERS = (_TYPEDEF, _VOLATILE, _CONST, _RESTRICT, _TYPE_TAG)
# Bytes that follow struct btf_type: for the type, and for each of its vlen members.
_TRAILER = {
    _INT: (4, 0),
    _ARRAY: (12, 0),
    _STRUCT: (0, 12),
    _UNION: (0, 12),
    _ENUM: (0, 8),
    _FUNC_PROTO: (0, 8),
    _VAR: (4, 0),
    _DATASEC: (0, 12),
    _DECL_TAG: (4, 0),
    _ENUM64: (0, 12),
}
_NONSENSE = (
    *(ELFError, KeyError, ValueError, IndexError, AttributeError, TypeError),
    *(RecursionError, MemoryError, OverflowError, struct.error),
)
_REMEDY = "reinstall writeback-exporter, or run `make bpf` in its source"
_LONGEST_ARRAY = 1 << 16
_VERSION = "exporter_version"  # the section of that; bpf/kernel.h
_OWN_PROGRAMS = "raw_tp"
_SHF_EXECINSTR = 4
_UNSIGNED = {1: "B", 2: "H", 4: "I", 8: "Q"}


class BadObject(Exception):
    """A BPF object file that cannot be used; the message names it, the fault and the remedy."""


@dataclass(slots=True)
class _Type:
    kind: int
    name: str
    size_or_type: int
    members: list[tuple[str, int, int]] = field(default_factory=list)
    """(name, type id, byte offset) of a struct; (name, 0, value) of an enum."""
    array: tuple[int, int] = (0, 0)
    """(element's type id, number of elements)."""
    signed: bool = False


@dataclass(frozen=True, slots=True)
class Field:
    """A member of a struct: `count` numbers, or that many bytes of text, from byte `offset`."""

    offset: int
    size: int
    count: int
    code: str
    """Its character in the struct module's formats."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A struct of a BPF object. Nested structs appear as fields named `outer.inner`, and arrays of
    structs as `outer[0].inner`."""

    name: str
    size: int
    fields: dict[str, Field]

    def pick(self, *names: str) -> struct.Struct:
        """Unpacks just these fields, in this order, which must be the struct's own; arrays unpack
        into that many values. For `iter_unpack` over a map's dump."""
        fmt, position = "=", 0
        for name in names:
            part = self.fields[name]
            if part.offset < position:
                raise ValueError(f"{name} comes earlier in struct {self.name}")
            fmt += f"{part.offset - position}x{part.count}{part.code}"
            position = part.offset + part.size
        return struct.Struct(f"{fmt}{self.size - position}x")


@dataclass(frozen=True, slots=True)
class MapLayout:
    """Key and value of a map. `None` for a key or value that is a plain number."""

    key: Layout | None
    value: Layout | None


class ObjectFile:
    """A BPF object file as it is on disk."""

    def __init__(self, path: str) -> None:
        """Raises BadObject where the file is absent, truncated, or no BPF object."""
        self.path = path
        self.name = os.path.basename(path)
        with self._reading(), open(path, "rb") as stream:
            elf = ELFFile(stream)
            sections = {section.name: section for section in elf.iter_sections()}
            btf = sections[".BTF"].data()
            self.version = sections[_VERSION].data().rstrip(b"\0").decode()
            self._constants = self._symbols_of(elf, ".rodata", "STT_OBJECT")
            self._types = list(_parse(btf))
            self.maps = self._read_maps()
            self.own_programs = frozenset(self._symbols_of(elf, _OWN_PROGRAMS, "STT_FUNC"))
            """Programs that are at no hook: user space runs them."""

    def digest(self) -> str:
        """Of what the kernel makes of the file: code, maps and types. Not of the rest: lines of the
        source and where it was compiled change nothing."""
        with self._reading(), open(self.path, "rb") as stream:
            sections = {section.name: section for section in ELFFile(stream).iter_sections()}
            code = [
                (name, section.data())
                for name, section in sections.items()
                if section["sh_flags"] & _SHF_EXECINSTR
                or (name.startswith((".rel", ".rodata")) and ".BTF" not in name)
            ]
            relocations = _relocations(*(sections[name].data() for name in (".BTF", ".BTF.ext")))
        return hashlib.sha256(repr((code, self._types, relocations)).encode()).hexdigest()

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """What is read in here is the file's content: whatever goes wrong is the file's fault."""
        try:
            yield
        except OSError as error:
            raise BadObject(
                f"cannot read BPF object {self.path}: {error.strerror}; {_REMEDY}"
            ) from error
        # pyelftools' parser raises any of these on a file that ends early, and ours on nonsense.
        except _NONSENSE as error:
            raise BadObject(
                f"{self.path} is truncated or no BPF object of this exporter; {_REMEDY}"
            ) from error

    @staticmethod
    def _symbols_of(elf: ELFFile, section: str, kind: str) -> dict[str, tuple[int, int]]:
        index = elf.get_section_index(section)
        return {
            symbol.name: (symbol["st_value"], symbol["st_size"])
            for table in elf.iter_sections()
            if isinstance(table, SymbolTableSection)
            for symbol in table.iter_symbols()
            if index is not None
            and symbol["st_shndx"] == index
            and symbol["st_info"]["type"] == kind
        }

    def constant(self, name: str) -> tuple[int, int]:
        """(offset, size) in .rodata of a `const volatile` global."""
        if name not in self._constants:
            raise self._foreign(f"constant {name}")
        return self._constants[name]

    def enum(self, name: str) -> dict[str, int]:
        """Names and values of an enum."""
        for kind in self._types:
            if kind.kind == _ENUM and kind.name == name:
                return {member: value for member, _, value in kind.members}
        raise self._foreign(f"enum {name}")

    def struct(self, name: str) -> Layout:
        """A struct that some map's value is or holds."""
        for type_id, described in enumerate(self._types):
            if described.kind == _STRUCT and described.name == name:
                with self._reading():
                    return self._layout(type_id)
        raise self._foreign(f"struct {name}")

    def _read_maps(self) -> dict[str, MapLayout]:
        """Layouts by map, from the definitions in section .maps."""
        found = {}
        for section in self._types:
            if section.kind == _DATASEC and section.name == ".maps":
                for _, variable, _ in section.members:
                    definition = self._types[self._types[variable].size_or_type]
                    found[self._types[variable].name] = MapLayout(
                        *(self._pointed_to(definition, member) for member in ("key", "value"))
                    )
        return found

    def map(self, name: str) -> MapLayout:
        if name not in self.maps:
            raise self._foreign(f"map {name}")
        return self.maps[name]

    def _foreign(self, missing: str) -> BadObject:
        return BadObject(
            f"{self.path} has no {missing}: it was built for another version; {_REMEDY}"
        )

    def _pointed_to(self, definition: _Type, member: str) -> Layout | None:
        # BTF of a map definition: struct { KEY *key; VALUE *value; ... }
        for name, type_id, _ in definition.members:
            if name == member:
                target = self._resolve(self._types[type_id].size_or_type)
                if self._types[target].kind == _STRUCT:
                    return self._layout(target)
        return None

    def _resolve(self, type_id: int) -> int:
        for _ in self._types:
            if self._types[type_id].kind not in _MODIFIERS:
                return type_id
            type_id = self._types[type_id].size_or_type
        raise ValueError("types that refer to each other in a circle")

    def _layout(self, type_id: int) -> Layout:
        described = self._types[type_id]
        fields: dict[str, Field] = {}
        self._flatten("", type_id, 0, fields)
        return Layout(described.name, described.size_or_type, fields)

    def _flatten(self, name: str, type_id: int, offset: int, fields: dict[str, Field]) -> None:
        type_id = self._resolve(type_id)
        described = self._types[type_id]
        if described.kind == _STRUCT:
            for member, member_type, member_offset in described.members:
                inner = f"{name}.{member}" if name else member
                self._flatten(inner, member_type, offset + member_offset, fields)
        elif described.kind == _ARRAY:
            element_id, count = described.array
            if count > _LONGEST_ARRAY:
                raise ValueError(f"array {name} of {count}")
            element = self._types[self._resolve(element_id)]
            if element.kind == _STRUCT:
                for i in range(count):
                    start = offset + i * element.size_or_type
                    self._flatten(f"{name}[{i}]", element_id, start, fields)
            elif element.name == "char":
                fields[name] = Field(offset, count, count, "s")
            elif count:
                size = element.size_or_type
                fields[name] = Field(offset, size * count, count, self._code(element))
        else:
            size = described.size_or_type
            fields[name] = Field(offset, size, 1, self._code(described))

    def _code(self, number: _Type) -> str:
        code = _UNSIGNED[number.size_or_type]
        return code.lower() if number.signed else code


def _parse(blob: bytes) -> list[_Type]:
    """The types of a .BTF section, by id; id 0 is void."""
    magic, _, _, header, type_offset, type_size, string_offset, _ = struct.unpack_from(
        "=HBBIIIII", blob
    )
    if magic != 0xEB9F:
        raise ValueError("no BTF, or of the other byte order")
    strings = blob[header + string_offset :]

    def text(offset: int) -> str:
        return strings[offset : strings.index(b"\0", offset)].decode()

    types = [_Type(0, "void", 0)]
    position, end = header + type_offset, header + type_offset + type_size
    while position < end:
        name, info, size_or_type = struct.unpack_from("=III", blob, position)
        kind, vlen = info >> 24 & 0x1F, info & 0xFFFF
        fixed, each = _TRAILER.get(kind, (0, 0))
        described = _Type(kind, text(name), size_or_type)
        start = position + 12
        if kind == _INT:
            described.signed = bool(struct.unpack_from("=I", blob, start)[0] >> 24 & 1)
        elif kind == _ARRAY:
            element, _, count = struct.unpack_from("=III", blob, start)
            described.array = element, count
        elif kind in (_STRUCT, _UNION):
            for i in range(vlen):
                member, member_type, bits = struct.unpack_from("=III", blob, start + 12 * i)
                # With kind_flag set, the high byte is a bit field's width; no map has one.
                described.members.append((text(member), member_type, (bits & 0xFFFFFF) // 8))
        elif kind == _ENUM:
            described.signed = bool(info >> 31)
            for i in range(vlen):
                member, value = struct.unpack_from("=Ii", blob, start + 8 * i)
                described.members.append((text(member), 0, value))
        elif kind == _DATASEC:
            for i in range(vlen):
                variable, offset, _ = struct.unpack_from("=III", blob, start + 12 * i)
                described.members.append(("", variable, offset))
        types.append(described)
        position = start + fixed + each * vlen
    return types


def _relocations(btf: bytes, extension: bytes) -> list[tuple[str, int, int, str, int]]:
    """The CO-RE relocations in .BTF.ext: section, place, type, path to the field, kind."""
    header, _, _, strings, _ = struct.unpack_from("=4xIIIII", btf)
    begin = header + strings

    def text(offset: int) -> str:
        return btf[begin + offset : btf.index(b"\0", begin + offset)].decode()

    header, *_, offset, size = struct.unpack_from("=4xIIIIIII", extension)

    found: list[tuple[str, int, int, str, int]] = []
    if not size:  # a program that reads nothing of the kernel's
        return found
    position, end = header + offset, header + offset + size
    (record,) = struct.unpack_from("=I", extension, position)
    position += 4
    while position < end:
        section, count = struct.unpack_from("=II", extension, position)
        position += 8
        for _ in range(count):
            place, type_id, path, kind = struct.unpack_from("=IIII", extension, position)
            found.append((text(section), place, type_id, text(path), kind))
            position += record
    return found
