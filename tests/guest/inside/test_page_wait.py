# SPDX-License-Identifier: Apache-2.0
"""Waits for pages under writeback, against the kernel's own trace and the call that waited."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import lab
from tests.lab import Disk, exporter_in_process
from writeback_exporter.features import Refused
from writeback_exporter.kernel import loader
from writeback_exporter.kernel.layout import ObjectFile
from writeback_exporter.kernel.libbpf import Object
from writeback_exporter.kernel.loader import load
from writeback_exporter.probes import page_wait

from .kernel import NEVER, TRACING, dirty_limits, ftrace

MIB = 1 << 20
SLOW = Disk("/dev/vda")  # 4 MB/s of writes
FSYNC = """
import time
path, size = arguments[0], int(arguments[1])
fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
os.write(fd, b"x" * size)
begin = time.monotonic()
os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # sends all pages on their way
sent, cpu = time.monotonic(), time.process_time()
os.fsync(fd)
print(os.getpid(), sent - begin, time.process_time() - cpu, time.monotonic() - sent)
"""


def event() -> str:
    names = ("folio_wait_writeback", "wait_on_page_writeback")
    return next(f"writeback/{n}" for n in names if (TRACING / "events/writeback" / n).exists())


@pytest.mark.parametrize("way", ["fexit", "sched_switch"])
def test_a_task_that_calls_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    def without_fexit(file: ObjectFile, programs: Sequence[str], *rest: Any) -> Object:
        if programs[0].endswith("_ends"):
            raise Refused("not permitted", "for this test", "do without")
        return load(file, programs, *rest)

    if way == "sched_switch":
        monkeypatch.setattr(loader, "load", without_fexit)
    with (
        lab.ext4(SLOW, tmp_path) as mount,
        dirty_limits(400 * MIB, 500 * MIB, interval=NEVER),
        lab.cgroup(lab.hierarchies().task, "waits") as group,
        exporter_in_process("page_wait") as exporter,
    ):
        (found,) = (f for f in exporter.features if f.name == "page_wait_exact_end")
        assert found.available == (way == "fexit")
        with ftrace(event()) as trace:
            pid, *times = lab.run_in([group], FSYNC, mount / "file", 8 * MIB).split()
        tasks = re.findall(r"-(\d+) +\[\d+\] .*_writeback: ", trace.read_text())
        scrape = lab.scrape(exporter)
        (probe,) = (p for p in exporter.running if isinstance(p, page_wait.PageWait))
        left, _ = probe.map("page_waiters").dump()

    assert tasks.count(pid) > 0
    waited = scrape.sum("page_wait_seconds_sum", cgroup="/waits")
    sending, cpu, fsync = map(float, times)
    assert waited <= fsync
    # The disk does 4 MiB/s, and QEMU lets a tenth of a second's worth through at once. What is left
    # of that time when all pages are sent is waited for, but for half at most when others run.
    assert waited > 0.5 * (8 / 4 - 0.1 - sending - cpu)
    assert waited > 0
    counts = {
        dict(series)["cgroup"]: int(count)
        for series, count in scrape.select("page_wait_seconds_count").items()
    }
    # One that is over before its task sleeps is seen with the next, or when it sleeps otherwise.
    pending = len(left) // 4
    assert pending == 0 or way == "sched_switch"
    assert sum(counts.values()) == len(tasks) - pending
    assert counts["/waits"] == tasks.count(pid)
    assert not any(scrape.select("exporter_map_dropped_total").values())
