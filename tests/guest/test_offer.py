# SPDX-License-Identifier: Apache-2.0
"""On each kernel the exporter chooses the programs that are right for it, they are attached where
they belong, and docs/kernels.md says so."""

import re
import subprocess
from pathlib import Path

import pytest

from . import offer as offers
from .kernels import Kernel
from .offer import Offer


@pytest.fixture(scope="module")
def offer(kernel: Kernel, tmp_path_factory: pytest.TempPathFactory) -> Offer:
    return offers.gather(kernel, tmp_path_factory.mktemp(f"offer-{kernel.name}-"))


def test_programs_are_attached_where_they_belong(offer: Offer) -> None:
    """As the kernel has it: each program of ours has a link, to the tracepoint of its section;
    ftrace knows the functions."""
    sections = offers.hooks()
    names = {program.partition("/")[2]: sections[program] for program in offer.programs}
    assert len(names) == len(offer.programs), "two objects have programs of one name"
    assert offer.linked == set(names)
    tracepoints = {
        name: section.removeprefix("tp_btf/")
        for name, section in names.items()
        if section.startswith("tp_btf/")
    }
    assert offer.tracepoints == tracepoints
    functions = {
        function
        for kind, _, function in (section.partition("/") for section in names.values())
        if kind in {"fentry", "fexit"} and function
    }
    # Those of system calls have sections without a name, for it differs by architecture.
    calls = {function for function in offer.functions if "_sys_" in function}
    assert offer.functions - calls == functions
    assert len(calls) == list(names.values()).count("fentry")


def test_variants(offer: Offer) -> None:
    """Of programs that there are for different kernels, those that this one's types ask for."""
    btf = Btf(offer.btf)
    chosen = {program.partition("/")[2] for program in offer.programs}
    folios = btf.has_tracepoint("folio_wait_writeback")
    control = btf.arguments("balance_dirty_pages") == 8
    assert control or btf.arguments("balance_dirty_pages") == 12
    rules = {
        "throttled_control": control,
        "throttled_values": not control,
        "global_thresholds": not control,
        "folio_wait_begins": folios,
        "page_wait_begins": not folios,
        "dirtied_folio": btf.has_tracepoint("writeback_dirty_folio"),
        "dirtied_page": btf.has_tracepoint("writeback_dirty_page"),
        "written_folio": btf.has_function("__folio_end_writeback"),
        "written_page": btf.has_function("test_clear_page_writeback"),
        "sleep_enter": btf.has_struct("bpf_tramp_image"),
        "sleep_exit": btf.has_struct("bpf_tramp_image"),
        "wbt_hold": btf.has_function("rq_qos_wake_function"),
        "iolatency_enter": btf.has_function("blkcg_iolatency_throttle"),
        "iocost_hold": btf.has_function("iocg_kick_waitq"),
        "throttle_hold": btf.has_function("throtl_add_bio_tg"),
        "stall_enter": btf.has_function("psi_memstall_enter"),
        # No type tells of the instruction, which came with 5.12.
        "issue_slots": offer.name != "5.10",
        "issue_hash": offer.name == "5.10",
        # Methods for kernels without fexit or fentry.
        "switched": False,
        "written_inode": False,
        "fsync_enter_tp": False,
    }
    unknown = rules.keys() - {program.partition("/")[2] for program in offers.hooks()}
    assert not unknown
    assert {name: name in chosen for name in rules} == rules


def test_document(offer: Offer) -> None:
    assert offers.documented(offer.name) == offer.column, "run `python -m tests.guest.offer`"


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
