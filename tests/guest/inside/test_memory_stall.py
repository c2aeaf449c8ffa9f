# SPDX-License-Identifier: Apache-2.0
"""Stalls for memory against the function tracer and against PSI's own total."""

from __future__ import annotations

import re
import time
from pathlib import Path

from tests import lab
from tests.waiting import PATIENCE_SECONDS, wait_for

from .kernel import TRACING, clear_trace
from .test_main_signals import FAST, MIB

READER = """
import time
path, go, stop = arguments
os.sched_setaffinity(0, {0})
while not os.path.exists(go):
    time.sleep(0.01)
fd = os.open(path, os.O_RDONLY)
while not os.path.exists(stop):
    if not os.read(fd, 1 << 20):
        os.lseek(fd, 0, os.SEEK_SET)
"""
FUNCTIONS = "psi_memstall_enter\npsi_memstall_leave\n"


def pressure(group: lab.Cgroup) -> float:
    """Seconds in which some task of the cgroup was stalled for memory."""
    text = (group.directory / "memory.pressure").read_text()
    (total,) = re.findall(r"^some .*total=(\d+)$", text, re.MULTILINE)
    return int(total) / 1e6


def outermost(trace: str) -> list[float]:
    """Seconds of each stall in a trace of one thread, from its outermost begin to its end; without
    the one that it is in."""
    stalls, depth, began = [], 0, 0.0
    for stamp, side in re.findall(r" (\d+\.\d+): psi_memstall_(enter|leave) ", trace):
        depth += 1 if side == "enter" else -1
        if side == "enter" and depth == 1:
            began = float(stamp)
        elif depth == 0:
            stalls.append(float(stamp) - began)
    return stalls


def test_stalls_of_a_cgroup_at_its_limit(tmp_path: Path) -> None:
    """One thread on one CPU, which reads a file of five times the memory that its cgroup has.

    Until it has stalled often and long enough, not for a number of bytes: above memory.high the
    kernel lets it sleep for up to two seconds a call, and on 7.3 the file took between a few
    seconds and more than 30.
    """
    go, stop = tmp_path / "go", tmp_path / "stop"

    def has_stalled() -> bool:
        stalls = outermost((TRACING / "trace").read_text())
        return len(stalls) > 10 and sum(stalls) > 1

    with (
        lab.ext4(FAST, tmp_path) as mount,
        lab.Exporter(*lab.only("memory_stall")) as exporter,
        lab.cgroup(lab.hierarchies().task, "stalled") as group,
    ):
        (mount / "file").write_bytes(bytes(40 * MIB))
        lab.sh("sync", "-f", mount)
        Path("/proc/sys/vm/drop_caches").write_text("3")
        (group.directory / "memory.high").write_text(str(8 * MIB))
        process = lab.spawn_in([group], READER, mount / "file", go, stop)
        (TRACING / "set_ftrace_filter").write_text(FUNCTIONS)
        (TRACING / "set_ftrace_pid").write_text(str(process.pid))
        joined = Path("/proc", str(process.pid), "cgroup")
        wait_for(lambda: "stalled" in joined.read_text(), what="joining the cgroup")
        before, psi_before = exporter.scrape(), pressure(group)
        clear_trace()
        (TRACING / "current_tracer").write_text("function")
        try:
            begin = time.monotonic()
            go.touch()
            wait_for(has_stalled, what="more than ten stalls of more than a second together")
            stop.touch()
            process.communicate(timeout=PATIENCE_SECONDS)
            wall = time.monotonic() - begin
            trace = (TRACING / "trace").read_text()
        finally:
            (TRACING / "current_tracer").write_text("nop")
            (TRACING / "set_ftrace_pid").write_text("")
            (TRACING / "set_ftrace_filter").write_text("")
        assert process.returncode == 0
        psi = pressure(group) - psi_before
        after = exporter.scrape()

    def gained(sample: str) -> float:
        name = f"memory_stall_seconds_{sample}"
        return after.sum(name, cgroup="/stalled") - before.sum(name, cgroup="/stalled")

    stalls = outermost(trace)
    print(f"{len(stalls)} stalls: {gained('sum')=} {psi=} ftrace={sum(stalls)} {wall=}")
    assert trace.count(" psi_memstall_enter ") == trace.count(" psi_memstall_leave ")
    assert len(stalls) > 10
    assert gained("count") == len(stalls)
    # One thread's outermost stalls do not overlap.
    assert 0 < gained("sum") < wall
    # PSI's clock starts a moment after ours, within psi_memstall_enter(), and stops a moment later.
    assert gained("sum") > 0.8 * psi > 0
    assert not any(after.select("exporter_map_dropped_total").values())
