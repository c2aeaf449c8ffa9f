# SPDX-License-Identifier: Apache-2.0
"""How a scrape grows with cgroups.

    python -m tests.bench.bench_scrape [--cgroups N...]

In a process of its own for each size runs an exporter with all collectors, whose real block_io map
is filled with entries of a disk of ours and of many cgroups: up to a thousand are made, in each
hierarchy, those beyond are made known as if the kernel had told of them, and have no files.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from tests import lab
from tests.bench.bench_bpf import ROOT, ram_disk
from tests.bench.tables import Goal, print_table, print_text
from writeback_exporter.exporter import COLLECTORS, Exporter
from writeback_exporter.metrics.exposition import gzip_chunks, negotiate, render
from writeback_exporter.names.cgroups import EventKind
from writeback_exporter.probes.block_io import BlockIo
from writeback_exporter.settings import Settings

TEXT = """Block IO of many cgroups on a disk, {ops} operations each, in OpenMetrics with gzip, by
an exporter with all collectors; no HTTP. Up to {real:,} cgroups have files that are read too,
those beyond have none."""

CGROUPS = (10, 100, 1_000, 10_000)
REAL_CGROUPS = 1_000
OPS = 2
SCRAPES = 5
RUNS = 3
ACCEPT = "application/openmetrics-text;version=1.0.0"  # what Prometheus asks for first


def _status_mb(key: str, pid: int | str = "self") -> float:
    """A size from /proc/PID/status, which has it in units of 1024 bytes."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition(f"{key}:")[2].split()[0]) * 1024 / 1e6


# An exporter with many cgroups --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scrape:
    """Medians of one process' scrapes: seconds, bytes, MB."""

    collect_seconds: float
    """Reading the maps and naming what is in them."""
    seconds: float
    """That, and rendering and compressing it."""
    cpu_seconds: float
    raw_bytes: int
    gzip_bytes: int
    peak_mb: float


def scrapes(cgroups: int) -> Scrape:
    with ExitStack() as stack:
        disk = stack.enter_context(ram_disk())
        made = list(_made(stack, min(cgroups, REAL_CGROUPS)))
        exporter = Exporter(
            Settings((), "/metrics", frozenset(COLLECTORS), "/proc", "/sys", "/sys/fs/cgroup")
        )
        stack.callback(exporter.close)
        exporter.start()
        known = _make_known(exporter, cgroups - len(made))
        block_io = next(probe for probe in exporter.running if isinstance(probe, BlockIo))
        _fill(block_io, [cgroup.id for cgroup in made] + known, _index(block_io, disk))
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        return _median([_scrape(exporter) for _ in range(SCRAPES)])


def _made(stack: ExitStack, count: int) -> Iterator[lab.Cgroup]:
    """Those of the hierarchy that owns IO."""
    hierarchies = lab.hierarchies()
    for i in range(count):
        name = f"{container_name(i)}-{os.getpid()}"
        for hierarchy in hierarchies.all - {hierarchies.io}:
            stack.enter_context(lab.cgroup(hierarchy, name))
        yield stack.enter_context(lab.cgroup(hierarchies.io, name))


def container_name(number: int) -> str:
    """As long as a container's."""
    return f"docker-{random.Random(number).getrandbits(256):064x}.scope"


def _make_known(exporter: Exporter, count: int) -> list[int]:
    """Ids that the exporter has names for, as after as many events of the kernel."""
    ids = [(1 << 40) + i for i in range(count)]
    with exporter.lock:
        for i in ids:
            path = f"/system.slice/{container_name(i)}".encode()
            tree = exporter.hierarchies.io.id
            exporter.host.cgroups.apply(EventKind.MKDIR, tree, i, path, time.monotonic())
    return ids


def _index(block_io: BlockIo, disk: lab.Disk) -> int:
    """The disk's place in the maps, which it gets with its first IO."""
    assert block_io.bpf is not None
    with open(disk.path, "rb") as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        stream.read(4096)
    layout = block_io.file.map("disk_index").key
    assert layout is not None
    major, minor = map(int, disk.dev.split(":"))
    keys, values = block_io.bpf.maps["disk_index"].dump()
    for i, (dev,) in enumerate(layout.pick("dev").iter_unpack(keys)):
        if dev == major << 32 | minor:
            return int(struct.unpack_from("=I", values, 4 * i)[0])
    raise AssertionError(f"{disk.name} had IO that the exporter has not seen")


def _fill(block_io: BlockIo, cgroups: Sequence[int], disk: int) -> None:
    assert block_io.bpf is not None
    chance = random.Random(len(cgroups))
    for cgroup in cgroups:
        for op in range(OPS):
            key = struct.pack("=QII", cgroup, disk, op)
            block_io.bpf.maps["block_io"].update(key, _value(block_io, chance))
    block_io.read()
    assert block_io.use["block_io"].entries >= len(cgroups) * OPS


def _value(block_io: BlockIo, chance: random.Random) -> bytes:
    """A struct io_histograms whose histograms each have observations in six slots."""
    layout = block_io.file.struct("io_histograms")
    value = bytearray(layout.size)
    for field in layout.fields.values():
        numbers = [0] * field.count
        if field.count == 1:
            numbers[0] = chance.getrandbits(44)
        for slot in range(min(6, field.count - 1)):
            numbers[slot + field.count // 4] = int(10 ** chance.uniform(0, 6))
        struct.pack_into(f"={field.count}Q", value, field.offset, *numbers)
    return bytes(value)


def _scrape(exporter: Exporter) -> Scrape:
    begin, cpu = time.perf_counter(), time.process_time()
    snapshot = exporter.collect()
    collected = time.perf_counter()
    raw = 0

    def counted() -> Iterator[bytes]:
        nonlocal raw
        for chunk in render(snapshot, negotiate(ACCEPT)):
            raw += len(chunk)
            yield chunk

    compressed = sum(map(len, gzip_chunks(counted())))
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return Scrape(collected - begin, seconds, cpu, raw, compressed, _status_mb("VmHWM"))


def _median(taken: Sequence[Scrape]) -> Scrape:
    figures = [asdict(scrape) for scrape in taken]
    return Scrape(**{key: statistics.median(each[key] for each in figures) for key in figures[0]})


def in_a_child(cgroups: int) -> Scrape:
    command = [sys.executable, "-m", "tests.bench.bench_scrape", "--child", str(cgroups)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    return Scrape(**json.loads(done.stdout))


# Printing -----------------------------------------------------------------------------------------


def _row(cgroups: int) -> list[str]:
    scrape = _median([in_a_child(cgroups) for _ in range(RUNS)])
    return [
        f"{cgroups:,}",
        f"{scrape.collect_seconds:.4f}",
        f"{scrape.seconds:.4f}",
        f"{scrape.cpu_seconds:.4f}",
        f"{scrape.raw_bytes / 1e6:.2f}",
        f"{scrape.gzip_bytes / 1e6:.2f}",
        f"{scrape.peak_mb:.1f}",
    ]


def main(arguments: Sequence[str] | None = None) -> list[Goal]:
    """Measures and prints; there is no goal."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cgroups", type=int, nargs="+", default=CGROUPS)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        print(json.dumps(asdict(scrapes(options.child))))
        return []
    print_text(TEXT.format(ops=OPS, real=REAL_CGROUPS))
    print_table(
        "Growth with cgroups",
        ("cgroups", "collect s", "+ render, gzip s", "CPU s", "MB", "gzip MB", "peak RSS MB"),
        [_row(cgroups) for cgroups in options.cgroups],
    )
    return []


if __name__ == "__main__":
    main()
