# SPDX-License-Identifier: Apache-2.0
"""How long throttled tasks sleep, against kprobes on the function that they sleep in."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests import lab
from tests.lab import BUFFERED_WRITER
from writeback_exporter.features import Refused
from writeback_exporter.kernel import loader
from writeback_exporter.kernel.layout import ObjectFile
from writeback_exporter.kernel.libbpf import Object
from writeback_exporter.kernel.loader import load

from .kernel import (
    PREEMPTS,
    dirty_limits,
    ftrace,
    kprobes,
    missed,
    pauses,
    write_until_throttled,
)
from .test_main_signals import MIB, SLOW

TWO_WRITERS = f"""
if os.fork():
    arguments[0] += "2"
{BUFFERED_WRITER}
if path.endswith("2"):
    os.wait()
"""


class Sleep(NamedTuple):
    """Seconds between two kprobes at io_schedule_timeout(), of which BPF programs there see less,
    and those of schedule_timeout(), which it calls: between the two probes of the programs."""

    outer: float
    inner: float


def sleeps(trace: str) -> list[Sleep]:
    """Each sleep that balance_dirty_pages asked for, of all tasks."""
    asked: set[str] = set()
    asleep: dict[str, dict[str, float]] = {}
    found = []
    for line in trace.splitlines():
        match = re.search(r"-(\d+) +\[\d+\] \S+ +(\d+\.\d+): (\w+): (.*)", line)
        if not match:
            continue
        task, time, event, rest = match.groups()
        if event == "balance_dirty_pages" and not re.search(r" pause=(0|-\d+) ", rest):
            asked.add(task)
        elif event == "sleep" and task in asked:
            asleep[task] = {event: float(time)}
        elif event in ("begin", "end") and task in asleep:
            asleep[task][event] = float(time)
        elif event == "wake" and task in asleep:
            at = asleep.pop(task)
            found.append(Sleep(float(time) - at["sleep"], at["end"] - at["begin"]))
            asked.remove(task)
    assert not asked, "a pause that was not slept"
    return found


def throttle(directory: Path) -> list[Sleep]:
    """Has two tasks of the cgroup /throttled write more than they may to the slow disk; their
    sleeps."""
    hooks = (
        "p:sleep io_schedule_timeout",
        "r:wake io_schedule_timeout",
        "p:begin schedule_timeout",
        "r100:end schedule_timeout",  # of as many tasks at a time: many sleep there
    )
    events = [f"kprobes/{name}" for name in ("sleep", "wake", "begin", "end")]
    with (
        lab.ext4(SLOW, directory) as mount,
        lab.cgroup(lab.hierarchies().io, "throttled") as group,
        dirty_limits(MIB, 2 * MIB),
        kprobes(*hooks),
        ftrace("writeback/balance_dirty_pages", *events) as trace,
    ):
        write_until_throttled(
            [group], mount / "file", 6 * MIB, lambda: pauses(trace), code=TWO_WRITERS
        )
        text = trace.read_text()
    return sleeps(text)


@pytest.mark.parametrize("method", ["fexit", "requested"])
def test_sleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Measured, it is between what kprobes around and inside say. Requested, it is less:
    docs/kernels.md."""

    def without_fexit(file: ObjectFile, programs: Sequence[str], *rest: Any) -> Object:
        if "sleep_exit" in programs:
            raise Refused("not permitted", "for this test", "do without")
        return load(file, programs, *rest)

    if method == "requested":
        monkeypatch.setattr(loader, "load", without_fexit)
    with lab.exporter_in_process("dirty_throttle") as exporter:
        slept = throttle(tmp_path)
        scrape = lab.scrape(exporter)
    assert scrape.values("dirty_throttle_method_info", "method") == {method}
    labels = {"cgroup": "/throttled", "bdi": SLOW.dev}
    # Of two writers, one may come while the other is preempted in a program.
    lost = missed(scrape, "dirty_throttle/") if PREEMPTS else 0
    counted = scrape.sum("dirty_throttle_seconds_count")
    assert len(slept) - lost <= counted <= len(slept)
    assert scrape.sum("dirty_throttle_seconds_count", **labels) == counted
    seconds = scrape.sum("dirty_throttle_seconds_sum", **labels)
    # A trace has whole microseconds: each of two times is wrong by half of one.
    most = sum(sleep.outer + 1e-6 for sleep in slept)
    if method == "fexit":
        inner = sorted(sleep.inner - 1e-6 for sleep in slept)
        assert sum(inner[: len(inner) - lost]) <= seconds <= most
    else:
        assert seconds == scrape.sum("dirty_throttle_requested_seconds_total", **labels)
        assert seconds < most
    assert not any(scrape.select("exporter_map_dropped_total").values())
