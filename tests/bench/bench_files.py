# SPDX-License-Identifier: Apache-2.0
"""What the files of many cgroups cost a scrape, and the ways to read them.

    python -m tests.bench.bench_files [--cgroups N]

Cgroups are made four levels deep, as those of containers are, and each has had IO on our disk.
Seconds are of CPU, medians of several rounds; each way reads the same files in turn. Also runs in a
guest (tests/guest), for cgroup v2: there the ratios count.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests import lab
from tests.bench.tables import Goal, print_table, print_text
from writeback_exporter.collector import Host
from writeback_exporter.exporter import COLLECTORS
from writeback_exporter.files.base import Reader, content
from writeback_exporter.files.cgroup_files import SELDOM_SECONDS, CgroupFiles
from writeback_exporter.metrics.exposition import Snapshot, negotiate, render
from writeback_exporter.names.cgroups import Cgroups, Hierarchies, Hierarchy
from writeback_exporter.names.devices import Devices
from writeback_exporter.settings import Settings

CGROUPS = 1_000
ROUNDS = 7
CPU_SECONDS = 0.1
READERS = ("cgroup_io", "cgroup_memory", "pressure")
ACCEPT = "application/openmetrics-text;version=1.0.0"  # what Prometheus asks for first

TEXT = """Three ways to read files of cgroups, CPU time. The exporter keeps those open that each
scrape reads, for the kernel's memory 4.4 KB each; and reads those that seldom change when somebody
has written to them, relative to their directory."""

FILES: tuple[tuple[Callable[[Hierarchies], Hierarchy | None], tuple[str, ...]], ...] = (
    (lambda found: found.memory, ("memory.stat", "memory.current", "memory.usage_in_bytes")),
    (lambda found: found.io, ("io.stat", "io.max", "blkio.throttle.io_service_bytes")),
    (lambda found: found.v2, ("io.pressure",)),
)

WRITER = """
import mmap
path, directories = arguments[0], arguments[1:]
buffer = mmap.mmap(-1, 4096)
fd = os.open(path, os.O_WRONLY | os.O_DIRECT)
for directory in directories:
    with open(directory + "/cgroup.procs", "w") as procs:
        procs.write("0")
    assert os.pwrite(fd, buffer, 0) == 4096
"""
"""Writes once from within each of the cgroups."""


@contextmanager
def many_cgroups(hierarchy: Hierarchy, count: int) -> Iterator[list[bytes]]:
    """The directories of that many cgroups."""
    with ExitStack() as stack:
        above = Path(hierarchy.mount)
        for level in (f"wbx-files-{os.getpid()}", "burstable.slice", "pod.slice"):
            above /= level
            above.mkdir()
            stack.callback(above.rmdir)
            if hierarchy.id == 0:
                controllers = (above / "cgroup.controllers").read_text().split()
                text = " ".join(f"+{c}" for c in controllers if c in ("io", "memory"))
                (above / "cgroup.subtree_control").write_text(text)
        for number in range(count):
            directory = above / f"container-{number:05d}.scope"
            directory.mkdir()
            stack.callback(directory.rmdir)
        yield [os.fsencode(above / f"container-{n:05d}.scope") for n in range(count)]


@contextmanager
def used_disk(hierarchy: Hierarchy, directories: Sequence[bytes]) -> Iterator[None]:
    """A disk on which each of the cgroups has had IO."""
    with (
        tempfile.TemporaryDirectory(prefix="wbx-bench-", dir="/dev/shm") as place,
        lab.loop_disk(Path(place), 8 << 20) as disk,
    ):
        if hierarchy.id != 0:  # without which v1 counts nothing (6.18)
            limit = Path(os.fsdecode(directories[0]), "blkio.throttle.write_bps_device")
            limit.write_text(f"{disk.dev} {1 << 30}")
        lab.run_in([], WRITER, disk.path, *map(os.fsdecode, directories))
        yield


# Ways of reading ----------------------------------------------------------------------------------


def cpu_seconds(work: Callable[[], object]) -> float:
    def once() -> float:
        begin = time.process_time()
        work()
        return time.process_time() - begin

    return statistics.median(once() for _ in range(ROUNDS))


def by_path(directories: Sequence[bytes], name: bytes) -> float:
    suffix = b"/" + name
    return cpu_seconds(lambda: [content(directory + suffix) for directory in directories])


def by_directory(directories: Sequence[bytes], name: bytes) -> float:
    """Relative to descriptors of the directories that are kept open."""
    with ExitStack() as stack:
        kept = [os.open(directory, os.O_PATH) for directory in directories]
        for descriptor in kept:
            stack.callback(os.close, descriptor)

        def read(directory: int) -> bytes:
            descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
            text = os.read(descriptor, 1 << 16)
            os.close(descriptor)
            return text

        return cpu_seconds(lambda: [read(directory) for directory in kept])


def by_descriptor(directories: Sequence[bytes], name: bytes) -> float:
    """From the start of files that are kept open, as the readers do where there is room."""
    with ExitStack() as stack:
        kept = [os.open(d + b"/" + name, os.O_RDONLY | os.O_CLOEXEC) for d in directories]
        for descriptor in kept:
            stack.callback(os.close, descriptor)
        return cpu_seconds(lambda: [os.pread(descriptor, 1 << 16, 0) for descriptor in kept])


def _ways(directories: Sequence[bytes], files: Sequence[str]) -> Iterator[list[str]]:
    for name in map(os.fsencode, files):
        if content(directories[0] + b"/" + name) is None:
            continue
        took = [way(directories, name) for way in (by_path, by_directory, by_descriptor)]
        each = [seconds / len(directories) * 1e6 for seconds in took]
        ratios = [f"{seconds / took[0]:.2f}" for seconds in took[1:]]
        yield [os.fsdecode(name), *(f"{microseconds:.1f}" for microseconds in each), *ratios]


# Readers ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of CPU: to read the files and make samples, the first time and when files are open
    and what seldom changes is known, and to write them as text; lines of it."""

    first: float
    fill: float
    render: float
    lines: int


class Clock:
    """Of what is remembered: all is new at first, and then not."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def cost(reader: Reader, host: Host, clock: Clock) -> Cost:
    reader.open(
        Settings((), "/metrics", frozenset(COLLECTORS), "/proc", "/sys", "/sys/fs/cgroup"),
        host,
        threading.Lock(),
    )
    try:
        snapshot = Snapshot()
        begin = time.process_time()
        reader.fill(Snapshot(), host)
        first = time.process_time() - begin
        clock.now += SELDOM_SECONDS
        fill = cpu_seconds(lambda: reader.fill(Snapshot(), host))
        reader.fill(snapshot, host)
        text = b"".join(render(snapshot, negotiate(ACCEPT)))
        write = cpu_seconds(lambda: list(render(snapshot, negotiate(ACCEPT))))
        return Cost(first, fill, write, text.count(b"\n"))
    finally:
        reader.close()


def main(arguments: Sequence[str] | None = None) -> list[Goal]:
    """Measures and prints; the goals."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cgroups", type=int, default=CGROUPS)
    print_text(TEXT)
    count: int = parser.parse_args(arguments).cgroups
    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    found = lab.hierarchies()
    with ExitStack() as stack:
        made = {h: stack.enter_context(many_cgroups(h, count)) for h in found.all}
        stack.enter_context(used_disk(found.io, made[found.io]))
        rows: list[list[str]] = []
        for hierarchy, files in FILES:
            if owner := hierarchy(found):
                rows += _ways(made[owner], files)
        print_table(
            f"A file in {count:,} cgroups, CPU us each",
            ("file", "by path", "kept directory", "kept file", "ratio", "ratio"),
            rows,
        )
        cgroups = Cgroups(found)
        cgroups.walk(time.monotonic())
        clock = Clock()
        host = Host(cgroups, Devices("/sys"), files=CgroupFiles(clock))
        readers = [COLLECTORS[name]() for name in READERS if name in COLLECTORS]
        costs = {r.name: cost(r, host, clock) for r in readers if isinstance(r, Reader)}
        host.files.close()
    print_table(
        f"The readers with {count:,} cgroups",
        ("reader", "first CPU s", "fill CPU s", "us a cgroup", "write CPU s", "lines"),
        [
            [
                name,
                f"{c.first:.4f}",
                f"{c.fill:.4f}",
                f"{c.fill / count * 1e6:.0f}",
                f"{c.render:.4f}",
                str(c.lines),
            ]
            for name, c in costs.items()
        ],
    )
    total = sum(c.fill + c.render for c in costs.values()) * CGROUPS / count
    return [Goal(f"files of {CGROUPS:,} cgroups, read and written", total, CPU_SECONDS, "CPU s")]


if __name__ == "__main__":
    main()
