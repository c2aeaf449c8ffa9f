# SPDX-License-Identifier: Apache-2.0
"""Which of the programs that there are for different kernels a kernel's types ask for; read from
them with bpftool, which shares the reading with nothing of ours."""

import re
import subprocess
from pathlib import Path


def expected(btf_file: Path, *, fentry: bool, cmpxchg: bool) -> dict[str, bool]:
    """Whether each is to be chosen, where fentry and fexit can be attached or cannot. No type tells
    of the instruction cmpxchg, which came with 5.12."""
    btf = Btf(btf_file)
    folios = btf.has_tracepoint("folio_wait_writeback")
    control = btf.arguments("balance_dirty_pages") == 8
    assert control or btf.arguments("balance_dirty_pages") == 12
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
    """A kernel's types, as bpftool prints them."""

    def __init__(self, path: Path) -> None:
        self._lines = subprocess.run(
            ["bpftool", "btf", "dump", "file", path], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        self._ids = {line[1 : line.index("]")]: line for line in self._lines if line[0] == "["}

    def has_function(self, name: str) -> bool:
        return self._has("FUNC", name)

    def has_struct(self, name: str) -> bool:
        return self._has("STRUCT", name)

    def has_tracepoint(self, name: str) -> bool:
        return self._has("TYPEDEF", f"btf_trace_{name}")

    def arguments(self, tracepoint: str) -> int:
        """Without the first one, which is the tracer's own."""
        pointer = self._referred(self._line("TYPEDEF", f"btf_trace_{tracepoint}"))
        prototype = self._referred(pointer)
        match = re.search(r"FUNC_PROTO .* vlen=(\d+)", prototype)
        assert match, prototype
        return int(match[1]) - 1

    def _has(self, kind: str, name: str) -> bool:
        return any(f"] {kind} '{name}' " in line for line in self._lines)

    def _line(self, kind: str, name: str) -> str:
        (line,) = (line for line in self._lines if f"] {kind} '{name}' " in line)
        return line

    def _referred(self, line: str) -> str:
        match = re.search(r"type_id=(\d+)", line)
        assert match, line
        return self._ids[match[1]]
