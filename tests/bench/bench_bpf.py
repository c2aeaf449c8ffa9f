# SPDX-License-Identifier: Apache-2.0
"""What our BPF programs cost an event, against the usual design, by the kernel's own statistics.

    python -m tests.bench.bench_bpf [--rounds N]

All contenders are loaded; then, in turns and many times, one is attached alone for some
milliseconds of the same workload, and medians are shown. So a machine on which others work compares
them fairly too, though its figures are higher.

The kernel reads its clock before and after a program: "nothing", programs that only return, shows
how much of each figure that is. Without statistics to call a program costs nearly as much (33 and
24-29 ns where this was written), so nothing is subtracted.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tests import lab
from tests.bench.tables import Reach, print_table
from writeback_exporter import __version__
from writeback_exporter.kernel.layout import ObjectFile
from writeback_exporter.kernel.libbpf import Object, enable_stats
from writeback_exporter.kernel.loader import Kernel, load, open_file
from writeback_exporter.probes.base import Probe
from writeback_exporter.probes.block_io import BlockIo
from writeback_exporter.probes.dirty_throttle import DirtyThrottle, ticks_per_second
from writeback_exporter.probes.page_wait import PageWait

ROOT = Path(__file__).parents[2]
AT_MOST = 0.5
"""Of the usual design's time."""
ROUNDS = 50
MIB = 1 << 20

BLOCK_EVENTS = ("insert", "issue", "complete")


# Contenders ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Contender:
    """Programs that are measured together, by the event that they are for."""

    label: str
    bpf: Object
    programs: dict[str, str]

    @contextmanager
    def attached(self) -> Iterator[None]:
        with ExitStack() as stack:
            for name in self.programs.values():
                stack.callback(self.bpf.programs[name].attach().close)
            yield

    def runs(self) -> dict[str, tuple[int, int]]:
        """Runs so far and nanoseconds in them."""
        runs = {event: self.bpf.programs[name].runs() for event, name in self.programs.items()}
        return {event: (r.count, r.nanoseconds) for event, r in runs.items()}


class KernelWithoutCmpxchg(Kernel):
    """The running kernel as one before 5.12 would be."""

    def has_cmpxchg(self) -> bool:
        return False


def ours(stack: ExitStack, label: str, probe: Probe, kernel: Kernel) -> Contender:
    """What the exporter itself would load."""
    stack.callback(probe.close)
    probe.load(kernel, lab.hierarchies())
    assert isinstance(probe.bpf, Object)
    # issue_slots, throttled_control: event and variant.
    programs = {program.name.split("_")[0]: program.name for program in probe.programs()}
    probe.bpf.detach()  # from here on in turns
    return Contender(label, probe.bpf, programs)


def from_here(
    stack: ExitStack, label: str, source: str, programs: Mapping[str, str], **constants: int
) -> Contender:
    """Programs of a source of this directory."""
    bpf = stack.enter_context(Object(_compile(source)))
    for program in bpf.programs.values():
        program.autoload = program.name in programs.values()
    bpf.set_constants(**constants)
    bpf.load()
    return Contender(label, bpf, dict(programs))


def _compile(source: str) -> ObjectFile:
    # With the Makefile's flags, so that nothing but the design differs.
    target = ROOT / "build/bench" / f"{source}.bpf.o"
    target.parent.mkdir(parents=True, exist_ok=True)
    lab.sh(
        *("clang", "-target", "bpf", "-mcpu=v3", "-O2", "-g", "-Wall", "-Wextra", "-Werror"),
        *("-Wno-unused-parameter", "-idirafter", f"/usr/include/{platform.machine()}-linux-gnu"),
        f'-DEXPORTER_VERSION="{__version__}"',
        *("-c", Path(__file__).with_name(f"{source}.bpf.c"), "-o", target),
    )
    lab.sh("llvm-strip", "-g", target)
    return ObjectFile(str(target))


# Taking turns -------------------------------------------------------------------------------------


class Work(Protocol):
    """Makes events."""

    def warm_up(self) -> None: ...

    def run(self) -> int:
        """The number of events made; 0 where only the programs know."""


@dataclass(slots=True)
class Figures:
    """Nanoseconds in each turn."""

    by_event: dict[str, list[float]] = field(default_factory=dict)
    all: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.all)

    def cells(self, events: Sequence[str]) -> list[str]:
        medians = [statistics.median(self.by_event.get(event, [0])) for event in events]
        return [f"{self.median:.0f}", *(f"{ns:.0f}" if ns else "" for ns in medians)]


def take_turns(contenders: Sequence[Contender], rounds: int, work: Work) -> dict[str, Figures]:
    figures = {contender.label: Figures() for contender in contenders}
    statistics_on = enable_stats()
    try:
        for number in range(rounds):
            # Forth and back: what drifts hits all alike.
            for contender in contenders[:: -1 if number % 2 else 1]:
                _take_turn(contender, work, figures[contender.label])
    finally:
        os.close(statistics_on)
    return figures


def _take_turn(contender: Contender, work: Work, figures: Figures) -> None:
    with contender.attached():
        work.warm_up()
        before = contender.runs()
        events = work.run()
        after = contender.runs()
    delta = {e: (after[e][0] - before[e][0], after[e][1] - before[e][1]) for e in before}
    events = events or max(runs for runs, _ in delta.values())
    figures.all.append(sum(ns for _, ns in delta.values()) / events)
    for event, (runs, ns) in delta.items():
        if runs > events / 2:  # a handful says nothing: the first of each on a CPU are slow
            figures.by_event.setdefault(event, []).append(ns / runs)


# Block IO -----------------------------------------------------------------------------------------


class DirectIo:
    """workload.py on a disk, from cgroups made for it."""

    def __init__(self, disk: lab.Disk, cgroups: Sequence[lab.Cgroup], depth: int) -> None:
        self._batches = max(1, 1500 // depth // len(cgroups))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.workload", disk.path, str(depth)]
            + [str(cgroup.directory) for cgroup in cgroups],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self._order(0)

    def _order(self, batches: int) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{batches}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n", "the workload failed"

    def warm_up(self) -> None:
        self._order(2)

    def run(self) -> int:
        before = _requests()
        self._order(self._batches)
        return _requests() - before

    def close(self) -> None:
        self._process.communicate()


def _requests() -> int:
    """Requests of all disks that have any (diskstats), for the programs see those of others too."""
    names = [entry.name for entry in os.scandir("/sys/block") if os.path.exists(f"{entry.path}/mq")]
    stats = [lab.Disk(f"/dev/{name}").stats() for name in names]
    return sum(s.reads + s.writes + s.discards + s.flushes for s in stats)


@contextmanager
def ram_disk() -> Iterator[lab.Disk]:
    """A loop device over memory: it has requests, tags and schedulers as any disk."""
    with (
        tempfile.TemporaryDirectory(prefix="wbx-bench-", dir="/dev/shm") as directory,
        lab.loop_disk(Path(directory), 256 * MIB) as disk,
    ):
        with open(disk.path, "wb", buffering=0) as stream:
            for _ in range(256):
                stream.write(bytes(MIB))
        yield disk


def block_contenders(stack: ExitStack, kernel: Kernel) -> list[Contender]:
    nothing = {event: f"nothing_{event}" for event in BLOCK_EVENTS}
    usual = {event: f"usual_{event}" for event in BLOCK_EVENTS}
    without_cmpxchg = KernelWithoutCmpxchg()
    stack.callback(without_cmpxchg.close)
    return [
        from_here(stack, "nothing", "nothing", nothing),
        ours(stack, "ours", BlockIo(), kernel),
        ours(stack, "ours, for kernels before 5.12", BlockIo(), without_cmpxchg),
        from_here(stack, "usual design", "usual_design", usual),
        from_here(stack, "usual design, no cgroups", "usual_design", usual, per_device=1),
    ]


def block_io(kernel: Kernel, rounds: int, cgroups: int, depth: int) -> Iterator[Reach]:
    """The contenders' time, with this many cgroups that each keep `depth` requests in flight.

    One cgroup is the usual design's best case: all its keys stay in the cache.
    """
    with ExitStack() as stack:
        disk = stack.enter_context(ram_disk())
        name = f"wbx-bench-{os.getpid()}"
        made = [
            stack.enter_context(lab.cgroup(lab.hierarchies().io, f"{name}-{i}"))
            for i in range(cgroups)
        ]
        contenders = block_contenders(stack, kernel)
        work = DirectIo(disk, made, depth)
        stack.callback(work.close)
        for scheduler in ("none", "mq-deadline"):
            with disk.queue(scheduler=scheduler):
                figures = take_turns(contenders, rounds, work)
            where = f"{cgroups} cgroup{'s' * (cgroups > 1)} x depth {depth}, {scheduler}"
            print_table(
                f"Block IO, ns per IO: {where}",
                ("", "all", *BLOCK_EVENTS),
                [[label, *of.cells(BLOCK_EVENTS)] for label, of in figures.items()],
            )
            mine, usual = figures["ours"].median, figures["usual design"].median
            yield Reach(f"block IO, ours / usual, {where}", mine / usual, AT_MOST)


# Throttling ---------------------------------------------------------------------------------------


class Throttled:
    """A writer behind a strict limit on its disk's BDI; no global setting is touched."""

    def __init__(self, cgroup: lab.Cgroup, file: Path) -> None:
        self._cgroup = cgroup
        self._file = file

    def warm_up(self) -> None:
        self._write(MIB)

    def run(self) -> int:
        self._write(6 * MIB)
        return 0

    def _write(self, size: int) -> None:
        lab.run_in([self._cgroup], lab.BUFFERED_WRITER, self._file, size)


def throttle_contenders(stack: ExitStack, kernel: Kernel) -> list[Contender]:
    arity = kernel.arity("balance_dirty_pages", known=(8, 12))
    usual = {"throttled": "usual_throttled_control" if arity == 8 else "usual_throttled_values"}
    return [
        from_here(stack, "nothing", "nothing", {"throttled": "nothing_throttled"}),
        ours(stack, "ours", DirtyThrottle(), kernel),
        from_here(stack, "usual design", "usual_design", usual, hz=ticks_per_second()),
    ]


def throttling(kernel: Kernel, rounds: int) -> None:
    """The contenders' time; no reach, for a sleep of milliseconds follows each event.

    It also precedes each, so that every cache is cold: the figures are high, and scatter.
    """
    with ExitStack() as stack:
        disk = stack.enter_context(ram_disk())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wbx-bench-")))
        mount = stack.enter_context(lab.ext4(disk, directory))
        stack.enter_context(lab.strict_limit(disk, 65536))
        cgroup = stack.enter_context(lab.cgroup(lab.hierarchies().task, f"wbx-bench-{os.getpid()}"))
        contenders = throttle_contenders(stack, kernel)
        figures = take_turns(contenders, rounds, Throttled(cgroup, mount / "file"))
    print_table(
        "Throttling, ns per balance_dirty_pages event; ours besides notes who sleeps now, which "
        "limit decided, and the BDI's state",
        ("", "all"),
        [[label, *of.cells(())] for label, of in figures.items()],
    )


# Context switches ---------------------------------------------------------------------------------


class PingPong:
    """Two processes on one CPU that wake each other: nothing but context switches."""

    _CODE = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
(read, answer), (hear, write) = os.pipe(), os.pipe()
times = int(sys.argv[1])
if not os.fork():
    for _ in range(times):
        os.read(read, 1)
        os.write(write, b"x")
    os._exit(0)
for _ in range(times):
    os.write(answer, b"x")
    os.read(hear, 1)
"""

    def warm_up(self) -> None:
        self._switch(1000)

    def run(self) -> int:
        self._switch(20_000)
        return 0

    def _switch(self, times: int) -> None:
        subprocess.run([sys.executable, "-I", "-S", "-c", self._CODE, str(times)], check=True)


def switches(rounds: int) -> None:
    """What page_wait costs a context switch where fexit is refused, while nobody waits for a page
    and while somebody does."""
    with ExitStack() as stack:
        contenders = [from_here(stack, "nothing", "nothing", {"switch": "nothing_switched"})]
        for label, waiting in (("ours, nobody waits", 0), ("ours, somebody waits", 1)):
            bpf = load(open_file(PageWait.name), [], {"memory_v1": 0}, also=["switched"])
            stack.callback(bpf.close)
            (counter,) = (m for name, m in bpf.maps.items() if name.endswith(".bss"))
            counter.update(bytes(4), waiting.to_bytes(counter.value_size, sys.byteorder))
            contenders.append(Contender(label, bpf, {"switch": "switched"}))
        figures = take_turns(contenders, rounds, PingPong())
    print_table(
        "Waits for pages without fexit, ns per context switch",
        ("", "all"),
        [[label, *of.cells(())] for label, of in figures.items()],
    )


def main(arguments: Sequence[str] | None = None) -> list[Reach]:
    """Measures and prints; what is to be reached."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args(arguments)
    kernel = Kernel()
    try:
        reaches: list[Reach] = []
        for cgroups, depth in ((1, 16), (16, 4)):
            for reach in block_io(kernel, options.rounds, cgroups, depth):
                print(reach, flush=True)
                reaches.append(reach)
        throttling(kernel, max(1, options.rounds // 5))
        switches(max(1, options.rounds // 5))
    finally:
        kernel.close()
    return reaches


if __name__ == "__main__":
    main()
