# SPDX-License-Identifier: Apache-2.0
"""Relocated BPF programs, looked at without a kernel that would verify them: whether they can come
to an access of a field that the kernel does not have.

libbpf makes a call of an unknown helper of such an instruction. Most are behind a question whether
the field is there, which is a constant by then; so the branches that constants decide are followed
as the verifier follows them, and of others both.
"""

import ctypes
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from writeback_exporter.kernel.libbpf import BpfError, Object

POISON = 195896080  # "invalid func unknown#195896080"; bpf_core_poison_insn() in libbpf
# Visits of one instruction after which nothing is held to be known there, so that loops end.
_ENOUGH = 100

_libbpf = ctypes.CDLL("libbpf.so.1")
_libbpf.bpf_program__insns.restype = ctypes.c_void_p
_libbpf.bpf_program__insns.argtypes = [ctypes.c_void_p]
_libbpf.bpf_program__insn_cnt.restype = ctypes.c_size_t
_libbpf.bpf_program__insn_cnt.argtypes = [ctypes.c_void_p]

Registers = tuple[int | None, ...]
_UNKNOWN: Registers = (None,) * 11


@dataclass(frozen=True, slots=True)
class Instruction:
    """struct bpf_insn, include/uapi/linux/bpf.h."""

    code: int
    target: int
    source: int
    offset: int
    immediate: int


def relocate(bpf: Object) -> bool:
    """Has libbpf relocate the programs that are to be loaded; whether it could, for at some fields
    it gives up. The running kernel may refuse to load what is meant for another one: the programs
    stay as they are then."""
    try:
        bpf.load()
    except BpfError as error:
        return "CO-RE" not in "".join(error.log)
    return True


def instructions(bpf: Object, program: str) -> list[Instruction]:
    pointer = bpf.programs[program]._pointer
    raw = ctypes.string_at(
        _libbpf.bpf_program__insns(pointer), 8 * _libbpf.bpf_program__insn_cnt(pointer)
    )
    return [
        Instruction(code, registers & 15, registers >> 4, offset, immediate)
        for code, registers, offset, immediate in struct.iter_unpack("<BBhi", raw)
    ]


def reachable_poison(program: list[Instruction]) -> set[int]:
    """Indexes of the instructions that a run can come to and that no kernel accepts."""
    found: set[int] = set()
    visits = [0] * len(program)
    seen: set[tuple[int, Registers, tuple[int, ...]]] = set()
    waiting: list[tuple[int, Registers, tuple[int, ...]]] = [(0, _UNKNOWN, ())]
    while waiting:
        at, registers, callers = waiting.pop()
        visits[at] += 1
        if visits[at] > _ENOUGH:
            registers = _UNKNOWN
        if (at, registers, callers) in seen:
            continue
        seen.add((at, registers, callers))
        if program[at].code == 0x85 and program[at].immediate == POISON:
            found.add(at)
        else:
            waiting += _next(program[at], program, at, registers, callers)
    return found


def _next(
    now: Instruction,
    program: list[Instruction],
    at: int,
    registers: Registers,
    callers: tuple[int, ...],
) -> Iterator[tuple[int, Registers, tuple[int, ...]]]:
    """Where a run goes from an instruction, with what is known there."""
    kind = now.code & 7

    def with_target(value: int | None) -> Registers:
        return (*registers[: now.target], value, *registers[now.target + 1 :])

    if now.code == 0x18:  # load 64 bits, in two instructions; of a map if there is a source
        high = program[at + 1].immediate
        value = None if now.source else (high & 0xFFFFFFFF) << 32 | now.immediate & 0xFFFFFFFF
        assert now.source != 4, "the address of a function: it may be called from a helper"
        yield at + 2, with_target(value), callers
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
        yield at + 1, with_target(None), callers
    elif now.code in {0xC3, 0xDB}:  # atomic: may fetch into the source or, cmpxchg, into r0
        known = [None if i in {0, now.source} else value for i, value in enumerate(registers)]
        yield at + 1, tuple(known), callers
    else:
        assert kind in {2, 3}, f"unknown instruction {now}"  # store
        yield at + 1, registers, callers


def _operands(now: Instruction, registers: Registers, bits: int) -> tuple[int, int] | None:
    """Target and operand, unsigned, if both are known."""
    left = registers[now.target]
    right = registers[now.source] if now.code & 8 else now.immediate
    mask = (1 << bits) - 1
    return None if left is None or right is None else (left & mask, right & mask)


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


def _computed(now: Instruction, registers: Registers, bits: int) -> int | None:
    mask = (1 << bits) - 1
    if now.code & 0xF0 == 0xB0:  # move
        value = registers[now.source] if now.code & 8 else now.immediate
        return None if value is None else value & mask
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
