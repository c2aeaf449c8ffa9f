# SPDX-License-Identifier: Apache-2.0
"""A thin ctypes binding on libbpf.so.1 (libbpf >= 1.0): no compiler and no C extension at run time.

Objects own what they opened: close an `Object` and its programs, maps and links are gone, except
what was pinned. Every refusal is a `BpfError` that carries libbpf's and the verifier's own words.
"""

from __future__ import annotations

import ctypes as C
import errno
import functools
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from types import TracebackType

from writeback_exporter.kernel.layout import ObjectFile

_PTR, _STR, _INT, _UINT, _SIZE, _U64 = (
    C.c_void_p,
    C.c_char_p,
    C.c_int,
    C.c_uint,
    C.c_size_t,
    C.c_uint64,
)
_PrintFn = C.CFUNCTYPE(_INT, _INT, _PTR, _PTR)
_SampleFn = C.CFUNCTYPE(_INT, _PTR, _PTR, _SIZE)


class _OpenOptions(C.Structure):
    """struct bpf_object_open_opts up to where libbpf 1.0 had it, which is what `sz` tells."""

    _fields_ = (
        ("sz", _SIZE),
        ("object_name", _STR),
        ("relaxed_maps", C.c_bool),
        ("pin_root_path", _STR),
        ("_reserved", _UINT),
        ("kconfig", _STR),
        ("btf_custom_path", _STR),
        ("kernel_log_buf", _PTR),
        ("kernel_log_size", _SIZE),
        ("kernel_log_level", C.c_uint32),
    )


class _RunOptions(C.Structure):
    """struct bpf_test_run_opts."""

    _fields_ = (
        ("sz", _SIZE),
        ("data_in", _PTR),
        ("data_out", _PTR),
        ("data_size_in", C.c_uint32),
        ("data_size_out", C.c_uint32),
        ("ctx_in", _PTR),
        ("ctx_out", _PTR),
        ("ctx_size_in", C.c_uint32),
        ("ctx_size_out", C.c_uint32),
        ("retval", C.c_uint32),
        ("repeat", _INT),
        ("duration", C.c_uint32),
        ("flags", C.c_uint32),
        ("cpu", C.c_uint32),
        ("batch_size", C.c_uint32),
    )


_SIGNATURES: dict[str, tuple[object, ...]] = {  # name: (result, argument, ...)
    "libbpf_set_print": (_PTR, _PrintFn),
    "libbpf_version_string": (_STR,),
    "bpf_object__open_file": (_PTR, _STR, C.POINTER(_OpenOptions)),
    "bpf_object__load": (_INT, _PTR),
    "bpf_object__close": (None, _PTR),
    "bpf_object__next_program": (_PTR, _PTR, _PTR),
    "bpf_object__next_map": (_PTR, _PTR, _PTR),
    "bpf_program__name": (_STR, _PTR),
    "bpf_program__section_name": (_STR, _PTR),
    "bpf_program__fd": (_INT, _PTR),
    "bpf_program__autoload": (C.c_bool, _PTR),
    "bpf_program__set_autoload": (_INT, _PTR, C.c_bool),
    "bpf_program__set_attach_target": (_INT, _PTR, _INT, _STR),
    "bpf_program__attach": (_PTR, _PTR),
    "bpf_program__insns": (_PTR, _PTR),
    "bpf_program__insn_cnt": (_SIZE, _PTR),
    "bpf_program__set_insns": (_INT, _PTR, _STR, _SIZE),
    "bpf_link__destroy": (_INT, _PTR),
    "bpf_link__fd": (_INT, _PTR),
    "bpf_link__disconnect": (None, _PTR),
    "bpf_map__name": (_STR, _PTR),
    "bpf_map__fd": (_INT, _PTR),
    "bpf_map__key_size": (_UINT, _PTR),
    "bpf_map__value_size": (_UINT, _PTR),
    "bpf_map__max_entries": (_UINT, _PTR),
    "bpf_map__set_max_entries": (_INT, _PTR, C.c_uint32),
    "bpf_map__initial_value": (_PTR, _PTR, C.POINTER(_SIZE)),
    "bpf_map_lookup_batch": (_INT, _INT, _PTR, _PTR, _PTR, _PTR, C.POINTER(_UINT), _PTR),
    "bpf_map_lookup_and_delete_batch": (
        *(_INT, _INT, _PTR, _PTR, _PTR, _PTR, C.POINTER(_UINT), _PTR),
    ),
    "bpf_map_lookup_elem": (_INT, _INT, _PTR, _PTR),
    "bpf_map_lookup_and_delete_elem": (_INT, _INT, _PTR, _PTR),
    "bpf_map_update_elem": (_INT, _INT, _PTR, _PTR, _U64),
    "bpf_map_delete_elem": (_INT, _INT, _PTR),
    "bpf_obj_pin": (_INT, _INT, _STR),
    "bpf_obj_get": (_INT, _STR),
    "bpf_obj_get_info_by_fd": (_INT, _INT, _PTR, C.POINTER(C.c_uint32)),
    "bpf_prog_test_run_opts": (_INT, _INT, C.POINTER(_RunOptions)),
    "bpf_raw_tracepoint_open": (_INT, _STR, _INT),
    "bpf_prog_load": (_INT, _INT, _STR, _STR, _PTR, _SIZE, _PTR),
    "bpf_enable_stats": (_INT, _INT),
    "ring_buffer__new": (_PTR, _INT, _SampleFn, _PTR, _PTR),
    "ring_buffer__consume": (_INT, _PTR),
    "ring_buffer__epoll_fd": (_INT, _PTR),
    "ring_buffer__free": (None, _PTR),
    "btf__load_vmlinux_btf": (_PTR,),
    "btf__parse": (_PTR, _STR, _PTR),
    "btf__free": (None, _PTR),
    "btf__find_by_name_kind": (C.c_int32, _PTR, _STR, C.c_uint32),
    "btf__type_by_id": (_PTR, _PTR, C.c_uint32),
    "btf__name_by_offset": (_STR, _PTR, C.c_uint32),
}

_WARN = 0  # LIBBPF_WARN
_NOEXIST = 1  # BPF_NOEXIST
# The verifier's log arrives as one message; its last lines are the ones that matter, and a message
# longer than the buffer would lose just them. The longest seen was 60 KiB.
_MESSAGE_SIZE = 1 << 20

# Of values that are read at once. Larger buffers come from the kernel page by page, each time anew
# (malloc.py): with room for 1,024 values, 2.4 MB for the two of work/bdis, a read took 3.2 ms of
# CPU, now 0.1; that of 2,000 values of block_io took 1.7, now 1.3.
_BATCH_BYTES = 64 * 1024

_libc = C.CDLL(None, use_errno=True)
_messages = threading.local()


class BpfError(OSError):
    """A refusal by libbpf or the kernel: `errno`, what was tried, and `log`, their own words."""

    def __init__(self, error: int, tried: str, log: Sequence[str] = ()) -> None:
        super().__init__(error, os.strerror(error))
        self.tried = tried
        self.log = tuple(log)

    def __str__(self) -> str:
        return f"{self.tried}: {self.reason}"

    @property
    def reason(self) -> str:
        """One line: the verifier's verdict where it gave one, and the error's name."""
        lines = [line for message in self.log for line in message.splitlines() if line.strip()]
        # 7.3 points at the line of the source, and ends with a suggestion.
        for line in lines:
            if "^-- error: " in line:
                return f"{line.partition('^-- error: ')[2]} ({self.strerror})"
        for position, line in enumerate(lines):
            if line.startswith("processed ") and "insns" in line and position:
                verdict = lines[position - 1]
                if "BEGIN PROG LOAD LOG" not in verdict:  # else it accepted the program
                    return f"{verdict} ({self.strerror})"
        return str(self.strerror)


class LibbpfMissing(Exception):
    """libbpf.so.1 cannot be loaded; the message says what to install."""


def _keep_message(level: int, message: int, arguments: int) -> int:
    # The va_list arrives as a pointer, on x86-64 and on aarch64.
    if level == _WARN:
        buffer = C.create_string_buffer(_MESSAGE_SIZE)
        _libc.vsnprintf(buffer, C.c_size_t(_MESSAGE_SIZE), _PTR(message), _PTR(arguments))
        _pending().append(buffer.value.decode(errors="replace").rstrip())
    return 0


_keep_message_c = _PrintFn(_keep_message)  # must live as long as libbpf


def _pending() -> list[str]:
    if not hasattr(_messages, "lines"):
        _messages.lines = []
    lines: list[str] = _messages.lines
    return lines


class _Library:
    """libbpf.so.1, loaded at the first call, each function with its types."""

    def __init__(self) -> None:
        self._lib: C.CDLL | None = None

    def __getattr__(self, name: str) -> Callable[..., int]:
        if self._lib is None:
            self._lib = self._load()
        return getattr(self._lib, name)  # type: ignore[no-any-return]

    @staticmethod
    def _load() -> C.CDLL:
        try:
            lib = C.CDLL("libbpf.so.1", use_errno=True)
            for name, (result, *arguments) in _SIGNATURES.items():
                function = getattr(lib, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise LibbpfMissing(
                f"libbpf.so.1 cannot be used ({error}); install libbpf 1.0 or newer "
                "(Debian package libbpf1)"
            ) from error
        lib.libbpf_set_print(_keep_message_c)
        return lib


_lib = _Library()


def _failure(tried: str, error: int = 0) -> BpfError:
    log, _messages.lines = _pending(), []
    return BpfError(error or C.get_errno(), tried, log)


def _checked(result: int, tried: str) -> int:
    if result < 0:
        raise _failure(tried, -result)
    return result


def version() -> str:
    """libbpf's version, such as "1.1"."""
    text: bytes = _lib.libbpf_version_string()  # type: ignore[assignment]
    return text.decode().removeprefix("v")


def pin(fd: int, path: str) -> None:
    """Has a map, program or link stay in the kernel, under a path in a BPF file system, when its
    last descriptor is closed."""
    _checked(_lib.bpf_obj_pin(fd, os.fsencode(path)), f"pin {path}")


def pinned(path: str) -> int:
    """A descriptor of what is pinned there."""
    return _checked(_lib.bpf_obj_get(os.fsencode(path)), f"open {path}")


class Map:
    """A BPF map. Keys and values are bytes in the kernel's layout."""

    def __init__(self, name: str, key_size: int, value_size: int, max_entries: int, fd: int = -1):
        self.name = name
        self.key_size = key_size
        self.value_size = value_size
        self.max_entries = max_entries
        """May be set before the object is loaded."""
        self.fd = fd
        """-1 before the object is loaded."""

    @classmethod
    def of_descriptor(cls, fd: int) -> Map:
        """A map that is in the kernel already; its name is the kernel's, of 15 bytes at most."""
        # struct bpf_map_info: type, id, key_size, value_size, max_entries, map_flags, name
        info = _info(fd, 40)
        key_size, value_size, max_entries, name = struct.unpack("=8xIII4x16s", info)
        return cls(name.split(b"\0")[0].decode(), key_size, value_size, max_entries, fd)

    def dump(self) -> tuple[bytes, bytes]:
        """All keys and all values, each in one piece and in the same order (BPF_MAP_LOOKUP_BATCH).

        Entries that come or go meanwhile may or may not be there; the others are, once each.
        """
        return self._batches(_lib.bpf_map_lookup_batch, "read")

    def drain(self) -> tuple[bytes, bytes]:
        """As `dump`, and each entry is deleted in the same step, under its bucket's lock."""
        return self._batches(_lib.bpf_map_lookup_and_delete_batch, "drain")

    def _batches(self, call: Callable[..., int], verb: str) -> tuple[bytes, bytes]:
        keys, values = bytearray(), bytearray()
        chunk = max(1, min(self.max_entries, 1024, _BATCH_BYTES // self.value_size))
        # The kernel writes a position into one and reads it from the other; for hash maps it is a
        # bucket's number, for arrays a key.
        position = [C.create_string_buffer(max(self.key_size, 8)) for _ in range(2)]
        first = True
        while True:
            some_keys = C.create_string_buffer(chunk * self.key_size)
            some_values = C.create_string_buffer(chunk * self.value_size)
            count = _UINT(chunk)
            result = call(
                *(self.fd, None if first else position[0], position[1]),
                *(some_keys, some_values, C.byref(count), None),
            )
            if result == -errno.ENOSPC and chunk < self.max_entries:
                # One bucket holds more than the chunk: nothing was copied of it.
                chunk = min(chunk * 2, self.max_entries)
                continue
            if result not in (0, -errno.ENOENT):
                raise _failure(f"{verb} map {self.name}", -result)
            keys += memoryview(some_keys)[: count.value * self.key_size]
            values += memoryview(some_values)[: count.value * self.value_size]
            if result:  # ENOENT: that was the last
                return bytes(keys), bytes(values)
            position.reverse()
            first = False

    def lookup(self, key: bytes) -> bytes | None:
        """The value, or None where the key is not there."""
        return self._lookup(_lib.bpf_map_lookup_elem, key, "look up")

    def lookup_and_delete(self, key: bytes) -> bytes | None:
        """The value, taken out in one step (hash maps: kernel 5.14; before it in two)."""
        try:
            return self._lookup(_lib.bpf_map_lookup_and_delete_elem, key, "take")
        except BpfError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, 524):  # 524: ENOTSUPP
                raise
        value = self.lookup(key)
        self.delete(key)
        return value

    def _lookup(self, call: Callable[..., int], key: bytes, verb: str) -> bytes | None:
        value = C.create_string_buffer(self.value_size)
        result = call(self.fd, key, value)
        if result == -errno.ENOENT:
            return None
        _checked(result, f"{verb} in map {self.name}")
        return value.raw

    def update(self, key: bytes, value: bytes) -> None:
        """Sets the value, whether or not the key is there."""
        _checked(_lib.bpf_map_update_elem(self.fd, key, value, 0), f"write map {self.name}")

    def insert(self, key: bytes, value: bytes) -> bool:
        """Sets the value where the key is not there; False where it is."""
        result = _lib.bpf_map_update_elem(self.fd, key, value, _NOEXIST)
        if result == -errno.EEXIST:
            return False
        _checked(result, f"insert into map {self.name}")
        return True

    def delete(self, key: bytes) -> bool:
        """False where the key was not there."""
        result = _lib.bpf_map_delete_elem(self.fd, key)
        if result == -errno.ENOENT:
            return False
        _checked(result, f"delete from map {self.name}")
        return True


class Link:
    """An attached program; detached when closed, unless pinned."""

    def __init__(self, pointer: int) -> None:
        self._pointer: int | None = pointer
        self.pinned = False
        """Whether to leave the program attached when this is closed."""

    def pin(self, path: str) -> None:
        """EINVAL for what the kernel attaches without a link: programs of classic tracepoints
        before 5.15."""
        pin(_lib.bpf_link__fd(self._pointer), path)
        self.pinned = True

    def close(self) -> None:
        if self._pointer is None:
            return
        fd = _lib.bpf_link__fd(self._pointer)
        if self.pinned:
            # Closing alone would not detach, but disable the event of a classic tracepoint.
            _lib.bpf_link__disconnect(self._pointer)
        _lib.bpf_link__destroy(self._pointer)
        if self.pinned:
            os.close(fd)
        self._pointer = None


@dataclass(frozen=True, slots=True)
class Runs:
    """What the kernel says of a program: runs and nanoseconds in it, while BPF statistics were on,
    and events that it was not shown because it was running on that CPU (since 5.12)."""

    count: int
    nanoseconds: int
    missed: int


class Program:
    """A BPF program."""

    def __init__(self, name: str, fd: int = -1) -> None:
        self.name = name
        self.fd = fd
        """-1 before the object is loaded."""

    def run(self, *arguments: int) -> int:
        """Runs a raw tracepoint's program once, with these as its arguments; what it returned."""
        context = (_U64 * len(arguments))(*arguments)
        options = _RunOptions(sz=C.sizeof(_RunOptions))
        options.ctx_in, options.ctx_size_in = C.addressof(context), C.sizeof(context)
        _checked(_lib.bpf_prog_test_run_opts(self.fd, C.byref(options)), f"run {self.name}")
        return int(options.retval)

    def runs(self) -> Runs:
        # struct bpf_prog_info (include/uapi/linux/bpf.h): run_time_ns, run_cnt, recursion_misses at
        # 192; a kernel without the last leaves it 0.
        nanoseconds, count, missed = struct.unpack_from("=QQQ", _info(self.fd, 216), 192)
        return Runs(count, nanoseconds, missed)

    @property
    def id(self) -> int:
        """The kernel's number of it."""
        return int(struct.unpack_from("=I", _info(self.fd, 8), 4)[0])


class ObjectProgram(Program):
    """A program of an object that is being loaded."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer
        name: bytes = _lib.bpf_program__name(pointer)  # type: ignore[assignment]
        section: bytes = _lib.bpf_program__section_name(pointer)  # type: ignore[assignment]
        super().__init__(name.decode())
        self.section = section.decode()

    @property
    def autoload(self) -> bool:
        return bool(_lib.bpf_program__autoload(self._pointer))

    @autoload.setter
    def autoload(self, load: bool) -> None:
        """Whether `Object.load` loads this program."""
        _checked(_lib.bpf_program__set_autoload(self._pointer, load), f"choose {self.name}")

    def set_target(self, function: str) -> None:
        """Which function of the kernel a fentry or fexit program is for, before it is loaded."""
        _pending().clear()
        _checked(
            _lib.bpf_program__set_attach_target(self._pointer, 0, function.encode()),
            f"find {function} for {self.name}",
        )

    @property
    def instructions(self) -> list[bytes]:
        """Each a struct bpf_insn (include/uapi/linux/bpf.h); relocated by Object.load, also where
        the kernel refuses them."""
        count = _lib.bpf_program__insn_cnt(self._pointer)
        code = C.string_at(_lib.bpf_program__insns(self._pointer), 8 * count)
        return [code[at : at + 8] for at in range(0, len(code), 8)]

    def prepare(self, btf: str | None) -> None:
        """Makes the calls of bpf/preempt.h, if it has such, what they are on this kernel."""
        old = self.instructions
        if _PREEMPTION.isdisjoint(old):
            return
        calls = _preemption(btf)
        new = b"".join(calls.get(instruction, instruction) for instruction in old)
        _checked(_lib.bpf_program__set_insns(self._pointer, new, len(old)), f"prepare {self.name}")

    def loaded_fd(self) -> int:
        return _lib.bpf_program__fd(self._pointer)

    def attach(self) -> Link:
        """Attaches where the program's section or `set_target` says."""
        _pending().clear()
        pointer = _lib.bpf_program__attach(self._pointer)
        if not pointer:
            raise _failure(f"attach {self.name} to {self.section}")
        return Link(pointer)


def attach(program: Program) -> int:
    """Attaches a loaded program of a typed tracepoint or of a function, where it was loaded for; a
    descriptor of the link."""
    return _checked(_lib.bpf_raw_tracepoint_open(None, program.fd), f"attach {program.name}")


def program_of_link(fd: int) -> int:
    """The kernel's number of a link's program."""
    # struct bpf_link_info: type, id, prog_id
    return int(struct.unpack_from("=I", _info(fd, 12), 8)[0])


def _info(fd: int, size: int) -> bytes:
    """What the kernel says of a map, program or link, up to `size` bytes."""
    info = C.create_string_buffer(size)
    length = C.c_uint32(size)
    _checked(_lib.bpf_obj_get_info_by_fd(fd, info, C.byref(length)), f"ask about descriptor {fd}")
    return info.raw


class Object:
    """A BPF object: opened by the constructor, then `load`, then `attach` its programs."""

    def __init__(self, file: ObjectFile, btf: str | None = None) -> None:
        """`btf`: relocate against this file instead of the running kernel's BTF."""
        options = _OpenOptions(sz=C.sizeof(_OpenOptions))
        options.btf_custom_path = os.fsencode(btf) if btf else None
        self.file = file
        self._btf = btf
        self._links: dict[str, Link] = {}
        self._pins: str | None = None
        _pending().clear()
        pointer = _lib.bpf_object__open_file(os.fsencode(file.path), C.byref(options))
        if not pointer:
            raise _failure(f"open BPF object {file.path}")
        self._pointer: int | None = pointer
        self.programs: dict[str, ObjectProgram] = {}
        self.maps: dict[str, Map] = {}
        self._map_pointers: dict[str, int] = {}
        item = _lib.bpf_object__next_program(pointer, None)
        while item:
            program = ObjectProgram(item)
            self.programs[program.name] = program
            item = _lib.bpf_object__next_program(pointer, item)
        item = _lib.bpf_object__next_map(pointer, None)
        while item:
            name: bytes = _lib.bpf_map__name(item)  # type: ignore[assignment]
            ask = (_lib.bpf_map__key_size, _lib.bpf_map__value_size, _lib.bpf_map__max_entries)
            bpf_map = Map(name.decode(), *(question(item) for question in ask))
            self.maps[bpf_map.name] = bpf_map
            self._map_pointers[bpf_map.name] = item
            item = _lib.bpf_object__next_map(pointer, item)

    def set_constants(self, **values: int) -> None:
        """Sets `const volatile` globals by name, before the object is loaded."""
        for name, value in values.items():
            offset, size = self.file.constant(name)
            (section,) = (p for m, p in self._map_pointers.items() if m.endswith(".rodata"))
            start = _lib.bpf_map__initial_value(section, C.byref(_SIZE()))
            C.memmove(start + offset, value.to_bytes(size, sys.byteorder, signed=value < 0), size)

    def load(self) -> None:
        """Creates the maps, verifies and loads the programs that are to be loaded."""
        for program in self.programs.values():
            if program.autoload:
                program.prepare(self._btf)
        _pending().clear()
        for name, pointer in self._map_pointers.items():
            entries = self.maps[name].max_entries
            if entries != _lib.bpf_map__max_entries(pointer):
                result = _lib.bpf_map__set_max_entries(pointer, entries)
                _checked(result, f"set capacity of {name}")
        _checked(_lib.bpf_object__load(self._pointer), f"load {self.file.name}")
        for name, pointer in self._map_pointers.items():
            self.maps[name].fd = _lib.bpf_map__fd(pointer)
        for program in self.programs.values():
            if program.autoload:
                program.fd = program.loaded_fd()

    def attach(self, program: str) -> Link:
        """Attaches a program; the object keeps the link and closes it with itself."""
        link = self.programs[program].attach()
        self._links[program] = link
        if self._pins:
            link.pin(f"{self._pins}/link-{program}")
        return link

    @property
    def pinned(self) -> bool:
        """Whether it stays in the kernel when it is closed."""
        return self._pins is not None

    def pin(self, directory: str) -> None:
        """Pins the maps, loaded programs and links, and what is attached from now on, as
        DIRECTORY/{map,program,link}-NAME."""
        for bpf_map in self.maps.values():
            if "." not in bpf_map.name:  # the programs keep their data sections
                pin(bpf_map.fd, f"{directory}/map-{bpf_map.name}")
        for program in self.programs.values():
            if program.autoload:
                pin(program.fd, f"{directory}/program-{program.name}")
        for name, link in self._links.items():
            link.pin(f"{directory}/link-{name}")
        self._pins = directory

    def pin_in(self, directory: str) -> None:
        """Where the pins are from now on, for they were moved."""
        self._pins = directory

    def unpin(self) -> None:
        """Says that the pins have been removed."""
        self._pins = None
        for link in self._links.values():
            link.pinned = False

    @property
    def attached(self) -> tuple[str, ...]:
        """The programs that run now."""
        return tuple(self._links)

    def detach(self) -> None:
        """Detaches all programs; they stay loaded, and the maps are as they were."""
        for link in self._links.values():
            link.close()
        self._links.clear()

    def close(self) -> None:
        self.detach()
        if self._pointer is not None:
            _lib.bpf_object__close(self._pointer)
            self._pointer = None

    def __enter__(self) -> Object:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class RingBuffer:
    """The reading end of a BPF ring buffer; not for two threads at once."""

    def __init__(self, ring: Map, handle: Callable[[bytes], None]) -> None:
        """`handle` gets each record, in order, when `consume` is called."""

        def sample(_context: int, data: int, size: int) -> int:
            handle(C.string_at(data, size))
            return 0

        self._sample = _SampleFn(sample)  # must live as long as libbpf may call it
        _pending().clear()
        pointer = _lib.ring_buffer__new(ring.fd, self._sample, None, None)
        if not pointer:
            raise _failure(f"read ring buffer {ring.name}")
        self._pointer: int | None = pointer

    def fileno(self) -> int:
        """Readable when there are records."""
        return _lib.ring_buffer__epoll_fd(self._pointer)

    def consume(self) -> int:
        """Hands over all records there are; their number."""
        return _checked(_lib.ring_buffer__consume(self._pointer), "read ring buffer")

    def close(self) -> None:
        if self._pointer is not None:
            _lib.ring_buffer__free(self._pointer)
            self._pointer = None


class KernelBtf:
    """Questions to the running kernel's BTF (/sys/kernel/btf/vmlinux), or to a file's.

    Through libbpf: reading its 100,000 types in Python would take seconds.
    """

    _KIND_STRUCT, _KIND_ENUM, _KIND_TYPEDEF, _KIND_FUNC = 4, 6, 8, 12

    def __init__(self, path: str | None = None) -> None:
        _pending().clear()
        if path is None:
            self._pointer = _lib.btf__load_vmlinux_btf()
        else:
            self._pointer = _lib.btf__parse(os.fsencode(path), None)
        if not self._pointer:
            raise _failure(f"read BTF of {path or 'the running kernel'}")

    def tracepoint_arity(self, name: str) -> int | None:
        """Number of a tracepoint's arguments; None where the kernel does not have it.

        Of `btf_trace_NAME`: typedef, pointer, prototype with a leading `void *`.
        """
        type_id = self._find(f"btf_trace_{name}", self._KIND_TYPEDEF)
        if type_id is None:
            return None
        prototype = self._info(self._target(self._target(type_id)))
        return (prototype & 0xFFFF) - 1

    def has_function(self, name: str) -> bool:
        """Whether there is a function of that name."""
        return self.function_id(name) is not None

    def function_id(self, name: str) -> int | None:
        """The id by which a program calls a function of the kernel; None where there is none."""
        return self._find(name, self._KIND_FUNC)

    def has_field(self, name: str, field: str) -> bool:
        """Whether there is a struct of that name with such a field."""
        type_id = self._find(name, self._KIND_STRUCT)
        if type_id is None:
            return False
        # struct btf_member { name_off, type, offset }
        return any(name == field for name, _ in self._members(type_id, 12))

    def has_struct(self, name: str) -> bool:
        """Whether there is a struct of that name."""
        return self._find(name, self._KIND_STRUCT) is not None

    def function_arity(self, name: str) -> int | None:
        """Number of a function's arguments; None where the kernel does not have it."""
        type_id = self._find(name, self._KIND_FUNC)
        return None if type_id is None else self._info(self._target(type_id)) & 0xFFFF

    def enum_value(self, enum: str, member: str) -> int | None:
        """The number of a member; None where the kernel does not have that enum or member."""
        return self.enum(enum).get(member)

    def enum(self, name: str) -> dict[str, int]:
        """Members and their numbers; empty where the kernel does not have that enum."""
        type_id = self._find(name, self._KIND_ENUM)
        if type_id is None:
            return {}
        return dict(self._members(type_id, 8))  # struct btf_enum { name_off, val }

    def close(self) -> None:
        _lib.btf__free(self._pointer)

    def _find(self, name: str, kind: int) -> int | None:
        type_id = _lib.btf__find_by_name_kind(self._pointer, name.encode(), kind)
        return type_id if type_id > 0 else None

    def _members(self, type_id: int, size: int) -> Iterator[tuple[str, int]]:
        """Names and second words of a type's members, which have `size` bytes each."""
        first = _lib.btf__type_by_id(self._pointer, type_id) + 12  # behind struct btf_type
        for i in range(self._info(type_id) & 0xFFFF):
            offset, value = struct.unpack("=Ii", C.string_at(first + size * i, 8))
            text: bytes = _lib.btf__name_by_offset(self._pointer, offset)  # type: ignore[assignment]
            yield text.decode(), value

    def _info(self, type_id: int) -> int:
        # struct btf_type { name_off, info, type }
        return C.c_uint32.from_address(_lib.btf__type_by_id(self._pointer, type_id) + 4).value

    def _target(self, type_id: int) -> int:
        return C.c_uint32.from_address(_lib.btf__type_by_id(self._pointer, type_id) + 8).value


def load_instructions(program_type: int, instructions: bytes, name: str) -> None:
    """Has the kernel verify a program of raw instructions, which is discarded; BpfError if refused.

    How a kernel is asked for an instruction: versions and configurations do not tell.
    """
    fd = _lib.bpf_prog_load(
        *(program_type, name.encode(), b"Dual BSD/GPL", instructions, len(instructions) // 8, None)
    )
    os.close(_checked(fd, f"load {name}"))


def may_call() -> bool:
    """Whether bpf(2) looks at what it is asked for: no seccomp filter denies it before."""
    nothing = C.create_string_buffer(8)
    return _lib.bpf_map_lookup_elem(-1, nothing, nothing) != -errno.EPERM


def enable_stats() -> int:
    """The kernel counts runs and time of BPF programs until this descriptor is closed."""
    return _checked(_lib.bpf_enable_stats(0), "enable BPF statistics")


def _kfunc_call(function: int) -> bytes:
    """struct bpf_insn: BPF_JMP | BPF_CALL with BPF_PSEUDO_KFUNC_CALL as its source."""
    return struct.pack("=BBhi", 0x85, 2 << 4, 0, function)


_NOTHING = struct.pack("=BBhi", 0x05, 0, 0, 0)  # goto +0
# As bpf/preempt.h has them: the numbers stand for disable and enable.
_PREEMPTION = {_kfunc_call(1), _kfunc_call(2)}


@functools.cache
def _preemption(btf: str | None) -> dict[bytes, bytes]:
    """What these become."""
    with closing(KernelBtf(btf)) as kernel:
        ids = [kernel.function_id(f"bpf_preempt_{what}") for what in ("disable", "enable")]
    return {
        _kfunc_call(number): _NOTHING if function is None else _kfunc_call(function)
        for number, function in enumerate(ids, start=1)
    }
