# SPDX-License-Identifier: Apache-2.0
"""Relocated BPF programs, looked at without a kernel that would verify them: what they can come to,
and what of the kernel they rely on there.

libbpf makes a call of an unknown helper of an access to a field that the kernel does not have. Most
are behind a question whether the field is there, which is a constant by then; so the branches that
constants decide are followed as the verifier follows them, and of others both.
"""

from __future__ import annotations

import ctypes
import re
import struct
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from writeback_exporter.kernel import libbpf
from writeback_exporter.kernel.libbpf import BpfError, Object

POISON = 195896080  # "invalid func unknown#195896080"; bpf_core_poison_insn() in libbpf
# Visits of one instruction after which nothing is held to be known there, so that loops end.
_ENOUGH = 100


@dataclass(frozen=True, slots=True)
class Instruction:
    """struct bpf_insn, include/uapi/linux/bpf.h."""

    code: int
    target: int
    source: int
    offset: int
    immediate: int


@dataclass(slots=True)
class Relocation:
    """What libbpf made of one: the `kind` that it names so, of a `type` and its field or member
    `path`; which of the kernel's types match; the `instruction` that has the result."""

    kind: str
    type: str
    path: list[str]
    candidates: set[str] = field(default_factory=set)
    instruction: int = -1


@dataclass(frozen=True, slots=True)
class Relocated:
    """A program as it would be loaded. The relocations are those of its own, not of functions."""

    instructions: list[Instruction]
    relocations: list[Relocation]
    rodata: bytes
    rodata_fd: int


def relocate(bpf: Object, programs: Iterable[str]) -> dict[str, Relocated]:
    """Has libbpf relocate these programs, which are those to be loaded.

    The running kernel may refuse to load what is meant for another one: the programs stay as they
    are then. Raises BpfError where it comes not so far, for at some fields libbpf gives up.
    """
    size = ctypes.c_size_t()
    sections = [made for name, made in bpf._map_pointers.items() if name.endswith(".rodata")]
    rodata = b"".join(
        ctypes.string_at(libbpf._lib.bpf_map__initial_value(made, ctypes.byref(size)), size.value)
        for made in sections
    )
    with _debug_log() as log:
        try:
            bpf.load()
        except BpfError as error:
            if any("failed to perform CO-RE relocations" in line for line in log):
                raise
            # Without any the programs would be as the compiler left them.
            if not any("relo #" in line for line in log):
                raise AssertionError(f"nothing was relocated: {error} {log[-5:]}") from error
    fds = re.findall(r"map '\S*\.rodata': created successfully, fd=(\d+)", "\n".join(log))
    relocations = _read(log)
    return {
        name: Relocated(
            list(_instructions(bpf, name)), relocations.get(name, []), rodata, int(*fds)
        )
        for name in programs
    }


@contextmanager
def _debug_log() -> Iterator[list[str]]:
    lines: list[str] = []

    def keep(_level: int, message: int, arguments: int) -> int:
        buffer = ctypes.create_string_buffer(1024)
        libbpf._libc.vsnprintf(
            *(buffer, ctypes.c_size_t(len(buffer))),
            *(ctypes.c_void_p(message), ctypes.c_void_p(arguments)),
        )
        lines.append(buffer.value.decode(errors="replace"))
        return 0

    keep_c = libbpf._PrintFn(keep)
    libbpf._lib.libbpf_set_print(keep_c)
    try:
        yield lines
    finally:
        libbpf._lib.libbpf_set_print(libbpf._keep_message_c)


def _read(log: list[str]) -> dict[str, list[Relocation]]:
    """From lines such as these, of which the second and third are not there for all:

    prog 'exec': relo #2: <byte_off> [57] struct bdi.dev_name (0:2 @ offset 12)
    prog 'exec': relo #2: matching candidate #0 <byte_off> [64223] struct bdi.dev_name (0:19 ...
    prog 'exec': relo #2: patched insn #119 (ALU/ALU64) imm 12 -> 1064
    """
    found: dict[str, list[Relocation]] = {}
    for line in log:
        match = re.match(r"libbpf: prog '(\w+)': relo #\d+: (.*)", line)
        if not match:
            continue
        of_program, said = found.setdefault(match[1], []), match[2]
        if match := re.match(
            r"<(\w+)> \[\d+\] \w+ (\w+?)(?:___\w+)?\b(?:\.|::)?([\w.\[\]]*)", said
        ):
            path = [part.partition("[")[0] for part in match[3].split(".") if part]
            of_program.append(Relocation(match[1], match[2], path))
        elif match := re.match(r"matching candidate #\d+ <\w+> (\[\d+\])", said):
            of_program[-1].candidates.add(match[1])
        elif match := re.match(r"(?:patched|substituting) insn #(\d+)", said):
            of_program[-1].instruction = int(match[1])
    return found


def _instructions(bpf: Object, program: str) -> Iterator[Instruction]:
    for instruction in bpf.programs[program].instructions:
        code, registers, offset, immediate = struct.unpack("<BBhi", instruction)
        yield Instruction(code, registers & 15, registers >> 4, offset, immediate)


@dataclass(frozen=True, slots=True)
class Context:
    """The address of the hook's arguments, or beyond by so many bytes."""

    offset: int = 0


@dataclass(frozen=True, slots=True)
class Argument:
    """The value of one of the hook's arguments."""

    index: int


@dataclass(frozen=True, slots=True)
class Constant:
    """The address of so many bytes into .rodata."""

    offset: int


Value = int | Context | Argument | Constant | None  # None: not known
Registers = tuple[Value, ...]
_UNKNOWN: Registers = (None,) * 11
_State = tuple[int, Registers, tuple[int, ...]]
"""Where a run is, what it knows there, and where it returns to."""


class Reached:
    """What a run of a program can come to.

    `poison`: the instructions, among those `reached`, that no kernel accepts; `arguments`: those
    of the hook's that are read; `accesses`: (instruction, argument) where that is a pointer to what
    is read.
    """

    def __init__(self, program: Relocated) -> None:
        self._program = program.instructions
        self._rodata, self._rodata_fd = program.rodata, program.rodata_fd
        self.reached: set[int] = set()
        self.poison: set[int] = set()
        self.arguments: set[int] = set()
        self.accesses: set[tuple[int, int]] = set()
        visits = [0] * len(self._program)
        seen: set[_State] = set()
        waiting: list[_State] = [(0, (None, Context(), *_UNKNOWN[2:]), ())]
        while waiting:
            at, registers, callers = waiting.pop()
            visits[at] += 1
            if visits[at] > _ENOUGH:
                registers = _UNKNOWN
            if (at, registers, callers) in seen:
                continue
            seen.add((at, registers, callers))
            self.reached.add(at)
            now = self._program[at]
            if now.code == 0x85 and now.immediate == POISON:
                self.poison.add(at)
            else:
                waiting += self._next(at, registers, callers)

    def _next(self, at: int, registers: Registers, callers: tuple[int, ...]) -> Iterator[_State]:
        """Where a run goes from an instruction, with what is known there."""
        now = self._program[at]
        kind = now.code & 7

        def with_target(value: Value) -> Registers:
            return (*registers[: now.target], value, *registers[now.target + 1 :])

        if now.code == 0x18:  # load 64 bits, in two instructions
            yield at + 2, with_target(self._wide(at)), callers
        elif now.code == 0x95:  # exit
            if callers:
                yield callers[-1], (registers[0], *_UNKNOWN[1:]), callers[:-1]
        elif now.code == 0x85:  # call: of a function of the program, or of the kernel
            if now.source == 1:
                yield at + now.immediate + 1, registers, (*callers, at + 1)
            else:
                yield at + 1, (*_UNKNOWN[:6], *registers[6:]), callers
        elif now.code == 0x05:  # jump
            yield at + now.offset + 1, registers, callers
        elif kind in {5, 6}:  # jump on condition, of 64 or 32 bits
            taken = _decide(now, registers, 64 if kind == 5 else 32)
            if taken is not False:
                yield at + now.offset + 1, registers, callers
            if taken is not True:
                yield at + 1, registers, callers
        elif kind in {4, 7}:
            yield at + 1, with_target(_computed(now, registers, 64 if kind == 7 else 32)), callers
        elif kind == 1:  # load from memory
            yield at + 1, with_target(self._loaded(at, registers[now.source])), callers
        elif now.code in {0xC3, 0xDB}:  # atomic: may fetch into the source or, cmpxchg, into r0
            known = [None if i in {0, now.source} else value for i, value in enumerate(registers)]
            yield at + 1, tuple(known), callers
        else:
            assert kind in {2, 3}, f"unknown instruction {now}"  # store
            yield at + 1, registers, callers

    def _wide(self, at: int) -> Value:
        low, high = self._program[at], self._program[at + 1]
        match low.source:
            case 0:
                return (high.immediate & 0xFFFFFFFF) << 32 | low.immediate & 0xFFFFFFFF
            case 2 if low.immediate == self._rodata_fd:  # BPF_PSEUDO_MAP_VALUE
                return Constant(high.immediate)
        assert low.source in {1, 2}, "the address of a function: it may be called from a helper"
        return None

    def _loaded(self, at: int, address: Value) -> Value:
        if isinstance(address, Constant):
            size = {0x61: 4, 0x69: 2, 0x71: 1, 0x79: 8}[self._program[at].code]
            start = address.offset + self._program[at].offset
            return int.from_bytes(self._rodata[start : start + size], sys.byteorder)
        if isinstance(address, Context):
            index, rest = divmod(address.offset + self._program[at].offset, 8)
            self.arguments.add(index)
            # A whole one: of what is narrower it is no pointer.
            return Argument(index) if self._program[at].code == 0x79 and not rest else None
        if isinstance(address, Argument):
            self.accesses.add((at, address.index))
        return None


def _operands(now: Instruction, registers: Registers, bits: int) -> tuple[int, int] | None:
    """Target and operand, unsigned, if both are known."""
    left = registers[now.target]
    right = registers[now.source] if now.code & 8 else now.immediate
    mask = (1 << bits) - 1
    if isinstance(left, int) and isinstance(right, int):
        return left & mask, right & mask
    return None


def _decide(now: Instruction, registers: Registers, bits: int) -> bool | None:
    known = _operands(now, registers, bits)
    if known is None:
        return None
    left, right = known
    comparisons = {
        0x10: left == right,
        0x50: left != right,
        0x20: left > right,
        0x30: left >= right,
        0xA0: left < right,
        0xB0: left <= right,
        0x40: bool(left & right),
    }
    return comparisons.get(now.code & 0xF0)  # signed ones: both ways


def _computed(now: Instruction, registers: Registers, bits: int) -> Value:
    mask = (1 << bits) - 1
    left, right = registers[now.target], registers[now.source] if now.code & 8 else now.immediate
    if now.code & 0xF0 == 0xB0:  # move
        if isinstance(right, int):
            return right & mask
        return right if bits == 64 else None
    if now.code == 0x07 and isinstance(left, Context):
        return Context(left.offset + now.immediate)
    known = _operands(now, registers, bits)
    if known is None:
        return None
    left, right = known
    match now.code & 0xF0:
        case 0x00:
            return (left + right) & mask
        case 0x10:
            return (left - right) & mask
        case 0x40:
            return left | right
        case 0x50:
            return left & right
        case 0xA0:
            return left ^ right
        case 0x60:
            return left << (right % bits) & mask
        case 0x70:
            return left >> (right % bits)
    return None
