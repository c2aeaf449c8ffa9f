# SPDX-License-Identifier: Apache-2.0
"""Which of the programs that there are for different kernels a kernel's types ask for; read from
them with bpftool, which shares the reading with nothing of ours."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path


def expected(btf: Btf, *, fentry: bool, cmpxchg: bool) -> dict[str, bool]:
    """Whether each is to be chosen, where fentry and fexit can be attached or cannot. No type tells
    of the instruction cmpxchg, which came with 5.12."""
    folios = btf.has_tracepoint("folio_wait_writeback")
    control = len(btf.arguments("balance_dirty_pages")) == 8
    assert control or len(btf.arguments("balance_dirty_pages")) == 12
    fexit = fentry and btf.has_struct("bpf_tramp_image")
    return {
        "throttled_control": control,
        "throttled_values": not control,
        "global_thresholds": not control,
        "sleep_enter": fexit,
        "sleep_exit": fexit,
        "folio_wait_begins": folios,
        "page_wait_begins": not folios,
        "folio_wait_ends": folios and fexit,
        "page_wait_ends": not folios and fexit,
        "switched": not fexit,
        "dirtied_folio": btf.has_tracepoint("writeback_dirty_folio"),
        "dirtied_page": btf.has_tracepoint("writeback_dirty_page"),
        "written_folio": fentry and btf.has_function("__folio_end_writeback"),
        "written_page": fentry and btf.has_function("test_clear_page_writeback"),
        "written_inode": not fentry,
        "wbt_hold": fentry and btf.has_function("rq_qos_wake_function"),
        "iolatency_enter": fentry and btf.has_function("blkcg_iolatency_throttle"),
        "iocost_hold": fentry and btf.has_function("iocg_kick_waitq"),
        "throttle_hold": fentry and btf.has_function("throtl_add_bio_tg"),
        "stall_enter": fentry and btf.has_function("psi_memstall_enter"),
        "fsync_enter": fexit and btf.has_function("__x64_sys_fsync"),
        "fsync_enter_tp": False,
        "merge_slots": cmpxchg and btf.has_tracepoint("block_rq_merge"),
        "issue_slots": cmpxchg,
        "issue_hash": not cmpxchg,
    }


class Btf:
    """A kernel's types, as bpftool prints them: a line each, and further ones for members."""

    def __init__(self, path: Path) -> None:
        self._lines = subprocess.run(
            ["bpftool", "btf", "dump", "file", path], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        self._at: dict[int, int] = {}
        self._named: dict[tuple[str, str], list[int]] = defaultdict(list)
        for number, line in enumerate(self._lines):
            if line.startswith("["):
                type_id, kind, name = line.split(" ", 2)
                self._at[int(type_id[1:-1])] = number
                self._named[kind, name[1 : name.index("'", 1)]].append(int(type_id[1:-1]))

    def has_function(self, name: str) -> bool:
        return ("FUNC", name) in self._named

    def has_struct(self, name: str) -> bool:
        return ("STRUCT", name) in self._named

    def has_tracepoint(self, name: str) -> bool:
        return ("TYPEDEF", f"btf_trace_{name}") in self._named

    def arguments(self, tracepoint: str) -> list[str]:
        """As `parameters`, without the first one, which is the tracer's own."""
        (typedef,) = self._named["TYPEDEF", f"btf_trace_{tracepoint}"]
        return self._parameters(self._target(self._target(typedef)))[1:]

    def parameters(self, function: str) -> list[str]:
        """Of each the struct that it points to, or nothing."""
        functions = {
            tuple(self._parameters(self._target(f))) for f in self._named["FUNC", function]
        }
        (parameters,) = functions
        return list(parameters)

    def offsets(self, struct: str, path: list[str]) -> set[int]:
        """Of the field, in bits, in each struct of that name that has it."""
        return {
            offset
            for kind in ("STRUCT", "UNION")
            for type_id in self._named.get((kind, struct), ())
            for offset in self._offsets(type_id, path)
        }

    def numbers(self, enum: str, member: str) -> set[int]:
        """Of the member, in each enum of that name that has it."""
        return {
            int(value)
            for kind in ("ENUM", "ENUM64")
            for type_id in self._named.get((kind, enum), ())
            for name, value in re.findall(r"'(.+)' val=(-?\d+)", self._members(type_id))
            if name == member
        }

    def _offsets(self, type_id: int, path: list[str]) -> Iterator[int]:
        if not path:
            yield 0
            return
        members = r"'(.+)' type_id=(\d+) bits_offset=(\d+)"
        for name, member, offset in re.findall(members, self._members(type_id)):
            if name == path[0]:
                inner, rest = self._bare(int(member)), path[1:]
            elif name == "(anon)":
                inner, rest = self._bare(int(member)), path
            else:
                continue
            yield from (int(offset) + further for further in self._offsets(inner, rest))

    def _parameters(self, prototype: int) -> list[str]:
        found = []
        for type_id in re.findall(r"type_id=(\d+)", self._members(prototype)):
            parameter = self._bare(int(type_id))
            pointed = self._bare(self._target(parameter)) if self._kind(parameter) == "PTR" else 0
            named = pointed and self._kind(pointed) == "STRUCT"
            found.append(self._line(pointed).split("'")[1] if named else "")
        return found

    def _bare(self, type_id: int) -> int:
        """Without qualifiers and other names."""
        while self._kind(type_id) in {"CONST", "VOLATILE", "RESTRICT", "TYPEDEF", "TYPE_TAG"}:
            type_id = self._target(type_id)
        return type_id

    def _line(self, type_id: int) -> str:
        return self._lines[self._at[type_id]]

    def _kind(self, type_id: int) -> str:
        return self._line(type_id).split(" ", 2)[1] if type_id else "VOID"

    def _target(self, type_id: int) -> int:
        match = re.search(r" type_id=(\d+)", self._line(type_id))
        assert match, self._line(type_id)
        return int(match[1])

    def _members(self, type_id: int) -> str:
        start = end = self._at[type_id] + 1
        while end < len(self._lines) and self._lines[end].startswith("\t"):
            end += 1
        return "\n".join(self._lines[start:end])
