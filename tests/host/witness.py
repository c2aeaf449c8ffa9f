# SPDX-License-Identifier: Apache-2.0
"""Runs witness.bpf.c with bpftool: a loader, a reader and programs that are none of ours.

This machine's kernel now and then runs a whole softirq without showing any tracepoint to anybody:
of 90,000 BLOCK softirqs in /proc/softirqs 50 were missing at raw_tp/softirq_entry, and completions
with them, under load. The witness tells such runs, for which no exporter can be exact, from faults
of ours.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import lab
from writeback_exporter.kernel.libbpf import KernelBtf

_ISSUED, _REQUEUED, _COMPLETED, _BYTES, _PAUSES, _TICKS, _WORK, _PAGE_WAITS = range(8)


_PROGRAMS = {
    "issue": "block_rq_issue",
    "requeue": "block_rq_requeue",
    "complete": "block_rq_complete",
    "work": "writeback_queue",
}


def _attach(program: Path, tracepoint: str) -> int:
    # bpftool learnt to attach (autoattach) with 7.2; Debian 12 has 7.1.
    libbpf = ctypes.CDLL("libbpf.so.1", use_errno=True)
    descriptor: int = libbpf.bpf_raw_tracepoint_open(
        tracepoint.encode(), libbpf.bpf_obj_get(os.fsencode(program))
    )
    assert descriptor >= 0, f"{tracepoint}: {os.strerror(-descriptor)}"
    return descriptor


def _first_bytes(bdi: str) -> int:
    return int.from_bytes(bdi.encode()[:7].ljust(8, b"\0"), "little")


class Witness:
    def __init__(self, pinned: Path) -> None:
        self._pinned = pinned

    def _seen(self) -> dict[tuple[int, int, int], int]:
        dump = json.loads(lab.sh("bpftool", "-j", "map", "dump", "pinned", self._pinned))
        return {
            (e["key"]["what"], e["key"]["major"], e["key"]["minor"]): e["value"]
            for e in (entry.get("formatted", entry) for entry in dump)
        }

    def completed(self, disk: lab.Disk) -> tuple[int, int]:
        """Requests of the disk that ended, and their bytes."""
        major, minor = map(int, disk.dev.split(":"))
        seen = self._seen()
        return seen.get((_COMPLETED, major, minor), 0), seen.get((_BYTES, major, minor), 0)

    def hidden(self, disk: lab.Disk) -> int:
        """Completions that the kernel did not show, once nothing is in flight."""
        major, minor = map(int, disk.dev.split(":"))
        seen = self._seen()
        counts = [seen.get((what, major, minor), 0) for what in (_ISSUED, _REQUEUED, _COMPLETED)]
        return counts[0] - counts[1] - counts[2]

    def queued(self, bdi: str) -> dict[int, int]:
        """Writeback work that was queued for a BDI, by why (enum wb_reason)."""
        name = _first_bytes(bdi)
        return {
            reason: count
            for (what, on, reason), count in self._seen().items()
            if (what, on) == (_WORK, name)
        }

    def page_waits(self) -> dict[int, int]:
        """Waits for pages under writeback, by cgroup id."""
        return {
            cgroup: count
            for (what, _, cgroup), count in self._seen().items()
            if what == _PAGE_WAITS
        }

    def pauses(self, bdi: str) -> dict[int, tuple[int, int]]:
        """Pauses on a BDI and the ticks they asked for, by cgroup id."""
        name = _first_bytes(bdi)
        seen = self._seen()
        return {
            cgroup: (count, seen[_TICKS, name, cgroup])
            for (what, on, cgroup), count in seen.items()
            if what == _PAUSES and on == name
        }


@contextmanager
def witness(directory: Path) -> Iterator[Witness]:
    """The witness, attached; `directory` gets its object and a bpffs of its own."""
    source, built = Path(__file__).with_name("witness.bpf.c"), directory / "witness.bpf.o"
    include = f"/usr/include/{platform.machine()}-linux-gnu"
    lab.sh("clang", "-target", "bpf", "-O2", "-g", "-idirafter", include, "-c", source, "-o", built)
    bpffs = directory / "bpffs"
    bpffs.mkdir()
    descriptors: list[int] = []
    lab.sh("mount", "-t", "bpf", "bpf", bpffs)
    try:
        programs, maps = bpffs / "programs", bpffs / "maps"
        lab.sh("bpftool", "prog", "loadall", built, programs, "pinmaps", maps)
        kernel = KernelBtf()
        throttle = f"throttle_{kernel.tracepoint_arity('balance_dirty_pages')}"
        # Up to 5.15 it has another name.
        has_folios = kernel.tracepoint_arity("folio_wait_writeback") is not None
        kernel.close()
        more = {
            throttle: "balance_dirty_pages",
            "page_wait": "folio_wait_writeback" if has_folios else "wait_on_page_writeback",
        }
        for program, tracepoint in {**_PROGRAMS, **more}.items():
            descriptors.append(_attach(programs / program, tracepoint))
        yield Witness(maps / "seen")
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
        subprocess.run(["umount", bpffs], check=True)
        bpffs.rmdir()


def unless_hidden(attempt: Callable[[], int], tries: int = 5) -> None:
    """Calls `attempt`, which checks counts that hold only where the kernel hid nothing, until it
    returns 0 hidden events. What it asserts itself fails at once."""
    hidden = [attempt()]
    while hidden[-1] and len(hidden) < tries:
        hidden.append(attempt())
    assert hidden[-1] == 0, f"the kernel hid tracepoints in each of {tries} runs: {hidden}"
