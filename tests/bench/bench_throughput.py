# SPDX-License-Identifier: Apache-2.0
"""What fio loses while programs are attached: throughput, and CPU time an IO.

    python -m tests.bench.bench_throughput [--rounds N]

One fio runs throughout. The contenders take turns: some tenths of a second with its programs
attached, and as long without, whichever first, so that each pair has the same neighbours. BPF
statistics are off, as in service.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests import lab
from tests.bench import peers
from tests.bench.bench_bpf import (
    ANSWERS,
    BLOCK_EVENTS,
    Contender,
    from_here,
    of_tools,
    ours,
    ram_disk,
    together,
)
from tests.bench.tables import Goal, print_table, print_text
from writeback_exporter.exporter import COLLECTORS
from writeback_exporter.features import Refused
from writeback_exporter.kernel.libbpf import Object
from writeback_exporter.kernel.loader import Kernel
from writeback_exporter.probes.base import Probe
from writeback_exporter.probes.block_io import BlockIo

ROUNDS = 25
SECONDS = 0.2
AT_LEAST = 1000
"""Requests in a window."""
SETTLE = 0.03
"""Seconds after programs come or go."""
DEPTH = 16

TEXT = """fio on a loop device over memory, random reads and writes of 4 KiB, {depth} in flight:
nearly all that an IO takes is CPU time, so that no real device shows more of a program's cost.
Each row has {rounds} pairs of {seconds} s or a little more, with the programs and without; the
median, and in brackets its 95 % confidence interval. "no program" attaches none: what its row
shows is noise. CPU time is that of fio and of all kernel workers, which serve loop devices; it
suffers less from what else the machine does."""


@dataclass(frozen=True, slots=True)
class Window:
    """IO a second; seconds of CPU an IO."""

    rate: float
    cpu: float


@dataclass(slots=True)
class Pairs:
    without: list[Window] = field(default_factory=list)
    attached: list[Window] = field(default_factory=list)

    def lost(self) -> list[float]:
        """Percent of the throughput."""
        pairs = zip(self.attached, self.without, strict=True)
        return [100 - 100 * there.rate / none.rate for there, none in pairs]

    def cpu(self) -> list[float]:
        """Percent that an IO takes more."""
        pairs = zip(self.attached, self.without, strict=True)
        return [100 * there.cpu / none.cpu - 100 for there, none in pairs]


class Fio:
    """A running fio on a disk, in a cgroup."""

    def __init__(self, disk: lab.Disk, cgroup: lab.Cgroup) -> None:
        self._disk = disk
        command = (
            *("fio", "--name=bench", f"--filename={disk.path}", "--direct=1", "--rw=randrw"),
            *("--bs=4k", "--ioengine=libaio", f"--iodepth={DEPTH}", "--thread", "--time_based"),
            *("--runtime=1d", "--norandommap", "--eta=never"),
        )
        self.process = lab.spawn_in([cgroup], "os.execvp(arguments[0], arguments)", *command)
        self.window()  # until it is at work

    def window(self) -> Window:
        time.sleep(SETTLE)
        begin, before, cpu = time.perf_counter(), self._requests(), self._cpu()
        count = 0
        while count < AT_LEAST:  # less, where others keep it from the CPU, is chance
            time.sleep(SECONDS)
            end, count, cpu_after = time.perf_counter(), self._requests() - before, self._cpu()
            assert self.process.poll() is None, f"fio ended: {self.process.communicate()[0]}"
        spent = sum(ns - cpu[thread] for thread, ns in cpu_after.items() if thread in cpu)
        return Window(count / (end - begin), spent / 1e9 / count)

    def _requests(self) -> int:
        stats = self._disk.stats()
        return stats.reads + stats.writes

    def _cpu(self) -> dict[str, int]:
        """Nanoseconds of CPU by thread, of fio and of kernel workers."""
        tasks = Path(f"/proc/{self.process.pid}/task")
        threads = [f"{tasks}/{thread}" for thread in os.listdir(tasks)]
        return {thread: _nanoseconds(thread) for thread in [*threads, *_kernel_workers()]}

    def close(self) -> None:
        self.process.terminate()
        self.process.communicate()


def _kernel_workers() -> Iterator[str]:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if Path(f"/proc/{pid}/comm").read_text().startswith(("kworker", "ksoftirqd")):
                yield f"/proc/{pid}"
        except OSError:  # it has ended
            continue


def _nanoseconds(thread: str) -> int:
    try:
        return int(Path(thread, "schedstat").read_text().split()[0])
    except OSError:
        return 0


def default_programs(stack: ExitStack, kernel: Kernel) -> Contender:
    """All that a running exporter has attached here unless told otherwise."""
    programs = []
    for collector in COLLECTORS.values():
        if not collector.default or not issubclass(collector, Probe):
            continue
        probe = collector()
        stack.callback(probe.close)
        try:
            probe.load(kernel, lab.hierarchies())
        except Refused:  # this kernel does not have it; others go on, as in the exporter
            continue
        assert isinstance(probe.bpf, Object)
        programs += [(name, probe.bpf.programs[name]) for name in probe.bpf.attached]
        probe.bpf.detach()
    return Contender("ours, all of a default exporter", "", programs)


def contenders(stack: ExitStack, kernel: Kernel) -> list[Contender]:
    usual = {event: f"usual_{event}" for event in BLOCK_EVENTS}
    tools = of_tools(stack, peers.BIOLATENCY, *peers.THREE, peers.BPFTRACE_TIMES)
    three = [one for one in tools if one.label in [tool.label for tool in peers.THREE]]
    others = [one for one in tools if one not in three[1:]]
    return [
        Contender("no program", "", []),
        ours(stack, "ours, block_io", ANSWERS, BlockIo(), kernel),
        default_programs(stack, kernel),
        from_here(stack, "usual design", ANSWERS, "usual_design", usual),
        *others,
        together("the three of libbpf-tools with options", "", three),
    ]


@contextmanager
def running_fio() -> Iterator[Fio]:
    with ram_disk() as disk:
        name = f"wbx-bench-{os.getpid()}"
        with lab.cgroup(lab.hierarchies().io, name) as cgroup, ExitStack() as stack:
            fio = Fio(disk, cgroup)
            stack.callback(fio.close)
            yield fio


def measure(fio: Fio, of: Sequence[Contender], rounds: int) -> dict[str, Pairs]:
    pairs = {contender.label: Pairs() for contender in of}
    chance = random.Random(rounds)
    for _ in range(rounds):
        for contender in chance.sample(of, len(of)):
            taken = pairs[contender.label]
            first = chance.random() < 0.5
            if first:
                taken.without.append(fio.window())
            with contender.attached():
                taken.attached.append(fio.window())
            if not first:
                taken.without.append(fio.window())
    return pairs


def interval(values: Sequence[float]) -> str:
    """The median and, in brackets, its 95 % confidence interval, by order statistics."""
    ordered = sorted(values)
    reach = 0.98 * math.sqrt(len(ordered))  # 1.96 standard deviations of a binomial at one half
    low = max(0, math.floor((len(ordered) - 1) / 2 - reach))
    high = min(len(ordered) - 1, math.ceil((len(ordered) - 1) / 2 + reach))
    return f"{statistics.median(ordered):.1f} ({ordered[low]:.1f} to {ordered[high]:.1f})"


def main(arguments: Sequence[str] | None = None) -> list[Goal]:
    """Measures and prints; there is no goal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds: int = parser.parse_args(arguments).rounds
    print_text(TEXT.format(depth=DEPTH, rounds=rounds, seconds=SECONDS))
    kernel = Kernel()
    with ExitStack() as stack:
        stack.callback(kernel.close)
        of = contenders(stack, kernel)
        fio = stack.enter_context(running_fio())
        pairs = measure(fio, of, rounds)
    without = [window for each in pairs.values() for window in each.without]
    rate = statistics.median(window.rate for window in without)
    cpu = statistics.median(window.cpu for window in without)
    print_text(f"Without: {rate:,.0f} IO a second, {cpu * 1e6:.1f} us of CPU each.")
    print_table(
        "fio, while attached",
        ("", "throughput lost, %", "CPU more an IO, %", "that is ns"),
        [
            [
                label,
                interval(each.lost()),
                interval(each.cpu()),
                f"{statistics.median(each.cpu()) / 100 * cpu * 1e9:.0f}",
            ]
            for label, each in pairs.items()
        ],
    )
    return []


if __name__ == "__main__":
    main()
