# SPDX-License-Identifier: Apache-2.0
"""Our writer of histograms against prometheus-client's: time, size and memory.

    python -m tests.bench.bench_exposition

Both write the block IO histograms of 10, 1,000 and 10,000 cgroups x 2 operations, held as raw bytes
like a dump of the BPF map, in OpenMetrics (which Prometheus asks for first) and in text 0.0.4, and
compress it as they do in service: ours in a stream at level 1, prometheus-client's whole at
gzip.compress's default. Each measurement is a process of its own, the two writers in turn; medians
are shown. Seconds are of CPU (neither waits), so that others on the host disturb less. For
prometheus-client the time to build the families is left out, although ours includes reading rows.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import statistics
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from tests.bench.tables import Goal, print_table, print_text
from writeback_exporter.metrics.catalogue import (
    BLOCK_IO_DEVICE_SECONDS,
    BLOCK_IO_QUEUE_SECONDS,
    BLOCK_IO_SIZE_BYTES,
    Metric,
)
from writeback_exporter.metrics.exposition import (
    HistogramFamily,
    HistogramRow,
    Snapshot,
    gzip_chunks,
    negotiate,
    render,
)

ACCEPT = ("application/openmetrics-text;version=1.0.0", "text/plain;version=0.0.4")
CGROUPS = (10, 1_000, 10_000)
ROOT = Path(__file__).parents[2]
TIMES_FASTER = 10
TEXT = """Block IO histograms, two operations of each cgroup, from the bytes of the BPF map; for
prometheus-client from families that are made already, and with the gzip level that it has in
service. Ours compresses with ISA-L; where zlib has to do, as on Debian 12, gzip takes four times as
long."""

PEAK_MB = 120


@dataclass(frozen=True)
class Part:
    """Where one histogram lies in struct io_histograms (bpf/block_io.bpf.c)."""

    metric: Metric
    first_exponent: int
    slots: int
    layout: str
    """The sum and the slots, as struct.iter_unpack reads them from consecutive values."""


PARTS = (
    Part(BLOCK_IO_DEVICE_SECONDS, 14, 21, "=22Q368x"),
    Part(BLOCK_IO_QUEUE_SECONDS, 14, 21, "=176x22Q192x"),
    Part(BLOCK_IO_SIZE_BYTES, 9, 23, "=352x24Q"),
)


# Input --------------------------------------------------------------------------------------------


class Dump:
    """Keys with their names, and the values of the map as one block of bytes, 544 for each key."""

    def __init__(self, cgroups: int) -> None:
        chance = random.Random(cgroups)
        self.keys: list[tuple[str, str, str]] = []
        self.values = bytearray()
        for number in range(cgroups):
            path, device = _path(chance, number), f"nvme{number % 8}n1"
            for op in ("read", "write"):
                self.keys.append((path, device, op))
                self.values += _value(chance)

    def rows(self, part: Part) -> Iterator[HistogramRow]:
        values = struct.iter_unpack(part.layout, self.values)
        for labels, (total, *slots) in zip(self.keys, values, strict=True):
            yield labels, slots, total


def _path(chance: random.Random, number: int) -> str:
    """A quarter each of services, sessions, Docker and Kubernetes: 90 characters on average."""
    pod, container = f"{chance.getrandbits(128):032x}", f"{chance.getrandbits(256):064x}"
    return (
        f"/system.slice/unit-{number:05d}.service",
        f"/user.slice/user-{1000 + number}.slice/session-{number}.scope",
        f"/system.slice/docker-{container}.scope",
        f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{pod[:8]}_{pod[8:12]}_"
        f"{pod[12:16]}_{pod[16:20]}_{pod[20:]}.slice/cri-containerd-{container}.scope",
    )[number % 4]


# Observations of a series, as powers of ten, and how many of 100 series are such.
_OBSERVATIONS = {(0.0, 2.0): 40, (2.0, 5.0): 35, (5.0, 8.0): 20, (8.0, 10.5): 5}


def _value(chance: random.Random) -> bytes:
    low, high = chance.choices(list(_OBSERVATIONS), list(_OBSERVATIONS.values()))[0]
    observations = int(10 ** chance.uniform(low, high))
    numbers: list[int] = []
    for part in PARTS:
        slots = _bell(part.slots, observations, chance.uniform(1, 8), chance.uniform(0.5, 2.5))
        if chance.random() < 0.3:
            slots[15] += 1  # one that was slow
        numbers += [sum(slots) * chance.randrange(1_000, 10_000_000), *slots]
    return struct.pack("=68Q", *numbers)


def _bell(slots: int, observations: int, mean: float, deviation: float) -> list[int]:
    edges = [math.erf((slot - 0.5 - mean) / deviation / math.sqrt(2)) for slot in range(slots + 1)]
    return [int(observations * (above - below) / 2) for below, above in pairwise(edges)]


# The two writers ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    render_seconds: float
    total_seconds: float
    """Rendering and gzip."""
    raw_bytes: int
    gzip_bytes: int
    peak_bytes: int
    checksum: int


def ours(dump: Dump, accept: str) -> Result:
    format = negotiate(accept)
    histograms = [
        HistogramFamily(part.metric, part.first_exponent, partial(dump.rows, part))
        for part in PARTS
    ]
    snapshot = Snapshot(histograms=histograms)
    start = time.process_time()
    raw_bytes = sum(map(len, render(snapshot, format)))
    rendered = time.process_time()
    gzip_bytes = sum(map(len, gzip_chunks(render(snapshot, format))))
    done = time.process_time()
    checksum = 0
    for chunk in render(snapshot, format):
        checksum = zlib.crc32(chunk, checksum)
    return Result(rendered - start, done - rendered, raw_bytes, gzip_bytes, _peak_bytes(), checksum)


class Families(Collector):
    """The same rows for prometheus-client, one family at a time to spare its memory."""

    def __init__(self, dump: Dump) -> None:
        self._dump = dump
        self.seconds = 0.0

    def describe(self) -> Iterable[HistogramMetricFamily]:
        return []

    def collect(self) -> Iterator[HistogramMetricFamily]:
        for part in PARTS:
            start = time.process_time()
            family = self._family(part)
            self.seconds += time.process_time() - start
            yield family

    def _family(self, part: Part) -> HistogramMetricFamily:
        metric = part.metric
        les = [*map(floatToGoString, metric.edges), "+Inf"]
        indices = [*(exponent - part.first_exponent for exponent in metric.exponents), -1]
        divisor = round(1 / metric.scale)
        family = HistogramMetricFamily(
            metric.name, metric.help, labels=metric.labels, unit=metric.unit
        )
        for labels, slots, total in self._dump.rows(part):
            counts = list(accumulate(slots))
            buckets = [(le, counts[index]) for le, index in zip(les, indices, strict=True)]
            family.add_metric(labels, buckets, total / divisor)
        return family


def theirs(dump: Dump, accept: str) -> Result:
    registry, families = CollectorRegistry(), Families(dump)
    registry.register(families)
    encode, _ = choose_encoder(accept)
    start = time.process_time()
    text = encode(registry)
    rendered = time.process_time()
    compressed = gzip.compress(text)
    done = time.process_time()
    building = families.seconds
    return Result(
        rendered - start - building,
        done - start - building,
        len(text),
        len(compressed),
        _peak_bytes(),
        zlib.crc32(text),
    )


def _peak_bytes() -> int:
    # Not getrusage: its peak is inherited over exec, so that a large parent would be counted.
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


# Measuring ----------------------------------------------------------------------------------------

WRITERS = {"ours": ours, "prometheus-client": theirs}


def measure(cgroups: int, runs: int, accept: str) -> dict[str, Result]:
    """The median of each figure for each writer."""
    results: dict[str, list[Result]] = {writer: [] for writer in WRITERS}
    for _ in range(runs):
        for writer, of_writer in results.items():
            child = ["--child", writer, "--cgroups", str(cgroups), "--accept", accept]
            command = [sys.executable, "-m", "tests.bench.bench_exposition", *child]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT).stdout
            of_writer.append(Result(**json.loads(output)))
    return {writer: _median(of_writer) for writer, of_writer in results.items()}


def _median(results: Sequence[Result]) -> Result:
    figures = [asdict(result) for result in results]
    return Result(**{key: statistics.median(each[key] for each in figures) for key in figures[0]})


HEADINGS = ("cgroups", "writer", "render s", "with gzip s", "MB", "gzip MB", "peak MB")


def _row(cgroups: int, writer: str, result: Result) -> list[str]:
    return [
        f"{cgroups:,}",
        writer,
        f"{result.render_seconds:.4f}",
        f"{result.total_seconds:.4f}",
        f"{result.raw_bytes / 1e6:.2f}",
        f"{result.gzip_bytes / 1e6:.2f}",
        f"{result.peak_bytes / 1e6:.1f}",
    ]


def compare(accept: str, sizes: Sequence[int], runs: int) -> list[Goal]:
    """Prints the table of one format; the goals, with the last of `sizes`."""
    content_type = negotiate(accept).content_type
    rows: list[list[str]] = []
    for cgroups in sizes:
        results = measure(cgroups, runs, accept)
        rows += [_row(cgroups, writer, result) for writer, result in results.items()]
        mine, other = results["ours"], results["prometheus-client"]
        if mine.checksum != other.checksum:
            raise SystemExit("the two writers differ: run tests/unit/test_exposition.py")
        faster = other.render_seconds / mine.render_seconds
        faster_with_gzip = other.total_seconds / mine.total_seconds
        rows.append(["", "times faster", f"{faster:.1f}", f"{faster_with_gzip:.1f}", "", "", ""])
    print_table(content_type, HEADINGS, rows)
    what = f"block IO of {sizes[-1]:,} cgroups written as {content_type.partition(';')[0]}"
    return [
        Goal(f"{what}, times as fast, gzip included", faster_with_gzip, TIMES_FASTER, "", True),
        Goal(f"{what}, peak", mine.peak_bytes / 1e6, PEAK_MB, "MB"),
    ]


def main(arguments: Sequence[str] | None = None) -> list[Goal]:
    """Measures and prints; the goals."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cgroups", type=int, nargs="+", default=CGROUPS)
    parser.add_argument("--accept", nargs="+", default=ACCEPT, help="Accept headers")
    parser.add_argument("--runs", type=int, default=3, help="processes for each figure")
    parser.add_argument("--child", choices=WRITERS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        result = WRITERS[options.child](Dump(options.cgroups[0]), options.accept[0])
        print(json.dumps(asdict(result)))
        return []
    print_text(TEXT)
    compared = [compare(accept, options.cgroups, options.runs) for accept in options.accept]
    return [goal for goals in compared for goal in goals]


if __name__ == "__main__":
    main()
