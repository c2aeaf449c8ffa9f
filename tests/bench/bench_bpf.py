# SPDX-License-Identifier: Apache-2.0
"""What BPF programs cost an event: ours, the usual design's and other tools', by the kernel's own
statistics.

    python -m tests.bench.bench_bpf [--rounds N] [--bcc]

All contenders are loaded; then, in turns and many times, one is attached alone for some
milliseconds of the same workload. Medians are shown, and medians of the ratios of turns of one
round. So a machine on which others work compares them fairly too, though its figures are higher.

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
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tests import lab
from tests.bench import peers
from tests.bench.tables import Goal, print_table, print_text, spread
from writeback_exporter import __version__
from writeback_exporter.kernel.layout import ObjectFile
from writeback_exporter.kernel.libbpf import Object, Runs, enable_stats
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


class Attachable(Protocol):
    """A loaded program: of ours, or of another tool."""

    def attach(self) -> Closable: ...

    def runs(self) -> Runs: ...


class Closable(Protocol):
    def close(self) -> None: ...


@dataclass(slots=True)
class Contender:
    """Programs that are measured together, each with the event that it is for."""

    label: str
    answers: str
    programs: Sequence[tuple[str, Attachable]]

    @contextmanager
    def attached(self) -> Iterator[None]:
        with ExitStack() as stack:
            for _, program in self.programs:
                stack.enter_context(closing(program.attach()))
            yield

    def runs(self) -> dict[str, tuple[int, int]]:
        """Runs so far and nanoseconds in them, by event."""
        counted: dict[str, tuple[int, int]] = {}
        for event, program in self.programs:
            runs, nanoseconds = counted.get(event, (0, 0))
            more = program.runs()
            counted[event] = runs + more.count, nanoseconds + more.nanoseconds
        return counted


class KernelWithoutCmpxchg(Kernel):
    """The running kernel as one before 5.12 would be."""

    def has_cmpxchg(self) -> bool:
        return False


def ours(stack: ExitStack, label: str, answers: str, probe: Probe, kernel: Kernel) -> Contender:
    """What the exporter itself would load."""
    stack.callback(probe.close)
    probe.load(kernel, lab.hierarchies())
    assert isinstance(probe.bpf, Object)
    # issue_slots, throttled_control: event and variant.
    programs = [(name.split("_")[0], probe.bpf.programs[name]) for name in probe.bpf.attached]
    probe.bpf.detach()  # from here on in turns
    return Contender(label, answers, programs)


def from_here(
    stack: ExitStack,
    label: str,
    answers: str,
    source: str,
    programs: Mapping[str, str],
    **constants: int,
) -> Contender:
    """Programs of a source of this directory."""
    bpf = stack.enter_context(Object(_compile(source)))
    for program in bpf.programs.values():
        program.autoload = program.name in programs.values()
    bpf.set_constants(**constants)
    bpf.load()
    return Contender(label, answers, [(e, bpf.programs[name]) for e, name in programs.items()])


def of_tools(stack: ExitStack, *tools: peers.Tool) -> list[Contender]:
    """Those that run here; of the others it is said why not."""
    found: list[Contender] = []
    for tool in tools:
        try:
            programs = stack.enter_context(tool.programs())
        except peers.Unavailable as why:
            print_text(f"Not measured here: {why}")
        else:
            found.append(Contender(tool.label, tool.answers, programs))
    return found


def together(label: str, answers: str, contenders: Sequence[Contender]) -> Contender:
    """Attached at once."""
    return Contender(label, answers, [each for one in contenders for each in one.programs])


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

    def ratio(self, other: Figures) -> float:
        """The median of those of each round."""
        return statistics.median(self.ratios(other))

    def ratios(self, other: Figures) -> list[float]:
        return [mine / its for mine, its in zip(self.all, other.all, strict=True)]

    def cells(self, events: Sequence[str]) -> list[str]:
        medians = [statistics.median(self.by_event.get(event, [0])) for event in events]
        return [
            f"{statistics.median(self.all):.0f}",
            *(f"{ns:.0f}" if ns else "" for ns in medians),
        ]


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
    assert events, f"{contender.label} saw nothing"
    figures.all.append(sum(ns for _, ns in delta.values()) / events)
    for event, (runs, ns) in delta.items():
        if runs > events / 2:  # a handful says nothing: the first of each on a CPU are slow
            figures.by_event.setdefault(event, []).append(ns / events)


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


ANSWERS = "device time, queue time, size by cgroup, disk, op"


def block_contenders(stack: ExitStack, kernel: Kernel) -> list[Contender]:
    nothing = {event: f"nothing_{event}" for event in BLOCK_EVENTS}
    usual = {event: f"usual_{event}" for event in BLOCK_EVENTS}
    by_disk = ANSWERS.replace("cgroup, ", "")
    without_cmpxchg = KernelWithoutCmpxchg()
    stack.callback(without_cmpxchg.close)
    return [
        ours(stack, "ours", ANSWERS, BlockIo(), kernel),
        from_here(stack, "nothing", "", "nothing", nothing),
        ours(stack, "ours, for kernels before 5.12", ANSWERS, BlockIo(), without_cmpxchg),
        from_here(stack, "usual design", ANSWERS, "usual_design", usual),
        from_here(stack, "usual design, no cgroups", by_disk, "usual_design", usual, per_device=1),
    ]


def block_tools(stack: ExitStack, bcc: bool) -> list[Contender]:
    if bcc:
        return of_tools(stack, peers.THREE[0], *peers.BCC)
    single = of_tools(stack, peers.BIOLATENCY, *peers.THREE, peers.BPFTRACE_TIMES)
    three = [one for one in single if one.label in [tool.label for tool in peers.THREE]]
    if len(three) < len(peers.THREE):
        return single
    return [*single, together("the three of libbpf-tools with options", "all that", three)]


@dataclass(frozen=True, slots=True)
class Load:
    """Cgroups that each keep `depth` requests in flight, on a disk with that scheduler.

    One cgroup is the usual design's best case: all its keys stay in the cache.
    """

    cgroups: int
    depth: int
    schedulers: tuple[str, ...] = ("none", "mq-deadline")

    def __str__(self) -> str:
        return f"{self.cgroups} cgroup{'s' * (self.cgroups > 1)}, {self.depth} in flight each"


def block_io(kernel: Kernel, rounds: int, loads: Sequence[Load], bcc: bool) -> Iterator[Goal]:
    """The contenders' time with each load."""
    with ExitStack() as stack:
        disk = stack.enter_context(ram_disk())
        contenders = block_contenders(stack, kernel) + block_tools(stack, bcc)
        print_table(
            "Block IO: what is measured",
            ("", "answers"),
            [[each.label, each.answers] for each in contenders],
        )
        for load in loads:
            yield from _block_io(disk, contenders, rounds, load)


def _block_io(
    disk: lab.Disk, contenders: Sequence[Contender], rounds: int, load: Load
) -> Iterator[Goal]:
    with ExitStack() as stack:
        io = lab.hierarchies().io
        name = f"wbx-bench-{os.getpid()}"
        made = [stack.enter_context(lab.cgroup(io, f"{name}-{i}")) for i in range(load.cgroups)]
        work = DirectIo(disk, made, load.depth)
        stack.callback(work.close)
        for scheduler in load.schedulers:
            with disk.queue(scheduler=scheduler):
                figures = take_turns(contenders, rounds, work)
            ours = figures["ours"]
            print_table(
                f"Block IO, ns per IO: {load}, scheduler {scheduler}",
                ("", "all", *BLOCK_EVENTS, "ours / it"),
                [
                    [label, *of.cells(BLOCK_EVENTS), spread(ours.ratios(of))]
                    for label, of in figures.items()
                ],
            )
            ratio = ours.ratio(figures["usual design"])
            yield Goal(f"block IO, ours / usual design: {load}, {scheduler}", ratio, AT_MOST)


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
    mine = "sleep and requested pause by cgroup, BDI; who sleeps now; deciding limit; BDI's state"
    design = "requested pause by cgroup, BDI"
    return [
        ours(stack, "ours", mine, DirtyThrottle(), kernel),
        from_here(stack, "nothing", "", "nothing", {"throttled": "nothing_throttled"}),
        from_here(stack, "usual design", design, "usual_design", usual, hz=ticks_per_second()),
        *of_tools(stack, peers.BPFTRACE_PAUSES),
    ]


def throttling(kernel: Kernel, rounds: int) -> None:
    """The contenders' time; no goal, for a sleep of milliseconds follows each event."""
    with ExitStack() as stack:
        disk = stack.enter_context(ram_disk())
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wbx-bench-")))
        mount = stack.enter_context(lab.ext4(disk, directory))
        stack.enter_context(lab.strict_limit(disk, 65536))
        cgroup = stack.enter_context(lab.cgroup(lab.hierarchies().task, f"wbx-bench-{os.getpid()}"))
        contenders = throttle_contenders(stack, kernel)
        figures = take_turns(contenders, rounds, Throttled(cgroup, mount / "file"))
    ours = figures["ours"]
    print_table(
        "Throttling, ns per balance_dirty_pages event",
        ("", "answers", "all", "ours / it"),
        [
            [each.label, each.answers, *of.cells(()), spread(ours.ratios(of))]
            for each, of in zip(contenders, figures.values(), strict=True)
        ],
    )
    print_text(THROTTLED)


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
        contenders = [from_here(stack, "nothing", "", "nothing", {"switch": "nothing_switched"})]
        for label, waiting in (("ours, nobody waits", 0), ("ours, somebody waits", 1)):
            bpf = load(open_file(PageWait.name), [], {"memory_v1": 0}, also=["switched"])
            stack.callback(bpf.close)
            (counter,) = (m for name, m in bpf.maps.items() if name.endswith(".bss"))
            counter.update(bytes(4), waiting.to_bytes(counter.value_size, sys.byteorder))
            contenders.append(Contender(label, "", [("switch", bpf.programs["switched"])]))
        figures = take_turns(contenders, rounds, PingPong())
    print_table(
        "Waits for pages without fexit, ns per context switch",
        ("", "all"),
        [[label, *of.cells(())] for label, of in figures.items()],
    )


LOADS = (Load(1, 16), Load(16, 4))

TEXT = """Nanoseconds in BPF programs as the kernel counts them while its BPF statistics are on.
Left out is what comes before a program: nearly nothing at typed tracepoints, which ours and those
of libbpf-tools use; for bpftrace the copy of the event's fields. "nothing" are programs that only
return: so much of each figure is the statistics' own clock. "usual design" answers the same as
ours in the way that most tools are written (tests/bench/usual_design.bpf.c); other tools answer
less, and of block IO none of them tells cgroups apart. Their commands are in
tests/bench/peers.py."""
LOSS = """What is above 1 has less to do: bitesize has one event an IO and counts one thing. Before
5.12 the kernel has no atomic instruction that returns what was there, so ours then keeps requests
in a hash map as others do: that is the most of what it takes more."""
THROTTLED = """A pause of milliseconds precedes each event, so that every cache is cold: figures
are high, and scatter. Besides what the usual design counts ours notes who sleeps now, which limit
decided and the BDI's state, in three maps, and each is another cold line: hence a ratio above 1.
Against a sleep of 10 ms it is less than a thousandth."""


def main(arguments: Sequence[str] | None = None) -> list[Goal]:
    """Measures and prints; the goals."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--bcc", action="store_true", help="block IO alone, with bcc's tools")
    options = parser.parse_args(arguments)
    kernel = Kernel()
    try:
        if options.bcc:
            load = Load(1, 16, ("none",))
            return list(block_io(kernel, options.rounds, [load], bcc=True))
        print_text(TEXT)
        goals = list(block_io(kernel, options.rounds, LOADS, bcc=False))
        print_text(LOSS)
        throttling(kernel, max(1, options.rounds // 5))
        switches(max(1, options.rounds // 5))
    finally:
        kernel.close()
    return goals


if __name__ == "__main__":
    main()
