# SPDX-License-Identifier: Apache-2.0
"""Waits for pages under writeback, against the kernel's own trace and the call that waited."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import lab
from tests.calls import frozen
from tests.lab import Disk, exporter_in_process
from tests.waiting import PATIENCE_SECONDS, wait_for
from writeback_exporter.features import Refused
from writeback_exporter.kernel import loader
from writeback_exporter.kernel.layout import ObjectFile
from writeback_exporter.kernel.libbpf import Object
from writeback_exporter.kernel.loader import load
from writeback_exporter.probes import page_wait

from .kernel import NEVER, TRACING, dirty_limits, ftrace

MIB = 1 << 20
FAST = Disk("/dev/vdb")
FSYNC = """
import time
path, count = arguments[0], int(arguments[1])
fd = os.open(path, os.O_WRONLY)
seconds = 0
for _ in range(count):
    os.write(fd, bytes(65536))
    begin = time.monotonic()
    os.fsync(fd)
    seconds += time.monotonic() - begin
print(seconds)
"""
"""Each call has little to send, for it is the end of that which it is to wait for."""


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
        dirty_limits(400 * MIB, 500 * MIB, interval=NEVER),
        lab.cgroup(lab.hierarchies().task, "waits") as group,
        lab.ext4(FAST, tmp_path) as mount,
        lab.loop_disk(mount, 4 * MIB) as disk,
        frozen(mount) as release,
        exporter_in_process("page_wait") as exporter,
    ):
        (found,) = (f for f in exporter.features if f.name == "page_wait_exact_end")
        assert found.available == (way == "fexit")
        with ftrace(event()) as trace:

            def waiting() -> list[str]:
                return re.findall(r"-(\d+) +\[\d+\] .*_writeback: ", trace.read_text())

            process = lab.spawn_in([group], FSYNC, disk.path, 20)
            pid = str(process.pid)
            wait_for(lambda: pid in waiting(), what="a wait")
            begin = time.monotonic()
            time.sleep(1)
            at_least = time.monotonic() - begin
            release()
            output, _ = process.communicate(timeout=PATIENCE_SECONDS)
        tasks = waiting()
        scrape = lab.scrape(exporter)
        (probe,) = (p for p in exporter.running if isinstance(p, page_wait.PageWait))
        left, _ = probe.map("page_waiters").dump()

    print(f"{tasks.count(pid)} waits")
    assert tasks.count(pid) > 0
    waited = scrape.sum("page_wait_seconds_sum", cgroup="/waits")
    assert at_least <= waited <= float(output)
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
