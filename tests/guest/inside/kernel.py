# SPDX-License-Identifier: Apache-2.0
"""What tests in a guest set of the kernel, and what it tells of itself."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

from tests.lab import BUFFERED_WRITER, Cgroup, Exporter, Scrape, run_in, sh

TRACING = Path("/sys/kernel/tracing")
PREEMPTS = int(os.uname().release.partition(".")[0]) >= 7
"""Whether a task can be preempted in a program at a tracepoint, and another's event is then missed
(bpf/preempt.h)."""


NEVER = 360_000
"""An hour, in 1/100 s, for flushers not to look for old pages. With 0, which is said to switch that
off, the first page that becomes dirty for a cgroup lets its flusher run at once, which then writes
what there is by then: a cgroup that is new to a disk has no share of the limits, and is above them
(wb_wakeup_delayed() and wb_over_bg_thresh(), mm/backing-dev.c and mm/page-writeback.c)."""


@contextmanager
def vm(**settings: str) -> Iterator[None]:
    """Settings in /proc/sys/vm, for a while; this is a guest."""
    before = {name: Path("/proc/sys/vm", name).read_text() for name in settings}
    try:
        for name, value in settings.items():
            Path("/proc/sys/vm", name).write_text(value)
        if "dirty_writeback_centisecs" in settings:
            sh("sync")  # another interval wakes all flushers
        yield
    finally:
        for name, value in before.items():
            Path("/proc/sys/vm", name).write_text(value)


@contextmanager
def dirty_limits(background: int, hard: int, interval: int = 10) -> Iterator[None]:
    """Global limits in bytes, for a while, and how often flushers look for old pages, in
    1/100 s."""
    with ExitStack() as stack:
        # To set a ratio again puts its limit in bytes out of force.
        for name in ("dirty_background_ratio", "dirty_ratio"):
            file = Path("/proc/sys/vm", name)
            stack.callback(file.write_text, file.read_text())
        stack.enter_context(vm(dirty_writeback_centisecs=str(interval)))
        Path("/proc/sys/vm/dirty_background_bytes").write_text(str(background))
        Path("/proc/sys/vm/dirty_bytes").write_text(str(hard))
        yield


def clear_trace() -> None:
    """An empty trace, with room, stamped by a clock that all CPUs share: what begins on one may end
    on another."""
    (TRACING / "buffer_size_kb").write_text("8192")
    (TRACING / "trace_clock").write_text("mono")
    (TRACING / "trace").write_text("")


@contextmanager
def ftrace(*events: str) -> Iterator[Path]:
    """Trace events recorded by the kernel itself; the trace when it is over."""
    switches = [TRACING / "events" / event / "enable" for event in events]
    clear_trace()
    for switch in switches:
        switch.write_text("1")
    try:
        yield TRACING / "trace"
    finally:
        for switch in switches:
            switch.write_text("0")


@contextmanager
def kprobes(*definitions: str) -> Iterator[None]:
    """Kprobe events (Documentation/trace/kprobetrace), for ftrace() to record as kprobes/NAME."""
    events = TRACING / "kprobe_events"
    events.write_text("\n".join(definitions))
    try:
        yield
    finally:
        events.write_text("")


def pauses(trace: Path, bdi: str = r"\S+") -> int:
    """How often balance_dirty_pages() demanded one, by the event of that name; of a BDI, or all."""
    found = re.findall(rf" balance_dirty_pages: bdi {bdi}: .* pause=(-?\d+)", trace.read_text())
    return sum(int(pause) > 0 for pause in found)


def missed(scrape: Scrape, *programs: str) -> int:
    """Events that the kernel did not show to the programs whose names begin so, and says so (since
    5.12): the program was running on that CPU. Since 7.0 tasks can be preempted in a program at a
    tracepoint, and in guests, where programs are slow, some are missed although bpf/preempt.h
    forbids it: before its first instruction and after its last. Before 7.0 none was in any run."""
    return int(
        sum(
            count
            for series, count in scrape.select("exporter_program_missed_total").items()
            if dict(series)["program"].startswith(programs)
        )
    )


Test = TypeVar("Test", bound=Callable[..., None])


def again_if_missed(test: Test) -> Test:
    """For a test, with a fixture `exporter`, of counts that hold only where nothing was missed: one
    that fails, and missed something, is begun anew, on kernels where that can be."""

    @functools.wraps(test)
    def run(exporter: Exporter, **fixtures: object) -> None:
        for _ in range(4 if PREEMPTS else 0):
            before = missed(exporter.scrape(), "")
            try:
                test(exporter=exporter, **fixtures)
            except AssertionError as error:
                if missed(exporter.scrape(), "") == before:
                    raise
                print(f"again, for the kernel did not show all events: {error}")
            else:
                return
        test(exporter=exporter, **fixtures)

    return cast(Test, run)


@dataclass(frozen=True)
class Call:
    """A call of a kernel function, as ftrace has it."""

    task: str
    at: float
    """Seconds."""
    function: str
    caller: str


class Calls:
    """Calls of kernel functions by ftrace's function tracer, which owes nothing to BPF."""

    def __init__(self, *functions: str) -> None:
        self._functions = functions

    def __enter__(self) -> Calls:
        (TRACING / "set_ftrace_filter").write_text("\n".join(self._functions))
        (TRACING / "current_tracer").write_text("function")
        clear_trace()
        return self

    def __exit__(self, *_: object) -> None:
        self.all = [
            Call(task, float(at), function, caller)
            for task, at, function, caller in re.findall(
                r"^\s*(.+-\d+)\s+\[.* ([\d.]+): (\w+) <-([\w.]+)$",
                (TRACING / "trace").read_text(),
                re.MULTILINE,
            )
        ]
        (TRACING / "current_tracer").write_text("nop")
        (TRACING / "set_ftrace_filter").write_text("")

    def count(self, function: str, *callers: str) -> int:
        """Those by functions whose names begin so."""
        return sum(
            call.function == function and call.caller.startswith(callers) for call in self.all
        )


def vmstat(name: str) -> int:
    """A counter of /proc/vmstat, with what the CPUs had not yet added to it."""
    Path("/proc/sys/vm/stat_refresh").write_text("1")
    for line in Path("/proc/vmstat").read_text().splitlines():
        if line.startswith(f"{name} "):
            return int(line.split()[1])
    raise AssertionError(f"no {name} in /proc/vmstat")


def write_until_throttled(
    cgroups: Sequence[Cgroup],
    file: Path,
    size: int,
    paused: Callable[[], float],
    code: str = BUFFERED_WRITER,
) -> int:
    """Has tasks of these cgroups write so many bytes to a file, again and again, until they were
    `paused` more than ten times; how many bytes that were. How often the same bytes are is the
    machine's affair: the slower a writer, the fewer and longer its pauses, down to none."""
    for rounds in range(1, 31):
        run_in(cgroups, code, file, size)
        if paused() > 10:
            return rounds * size
        sh("sync", file)  # none of it is dirty, and all of it is so again with the next round
    raise AssertionError(f"paused {paused()} times only")
