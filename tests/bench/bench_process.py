# SPDX-License-Identifier: Apache-2.0
"""A running exporter: its start, its scrapes over HTTP beside node_exporter's, its idle time, and
how it grows with disks and CPUs.

    python -m tests.bench.bench_process
"""

from __future__ import annotations

import argparse
import fcntl
import gzip
import os
import re
import signal
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from tests import lab
from tests.bench import peers
from tests.bench.bench_files import WRITER
from tests.bench.bench_scrape import ACCEPT, container_name
from tests.bench.tables import Goal, print_table, print_text
from tests.monitoring import free_address
from writeback_exporter.exporter import COLLECTORS
from writeback_exporter.files.cgroup_files import SELDOM_SECONDS
from writeback_exporter.kernel.libbpf import Map, enable_stats
from writeback_exporter.probes.base import Probe

RUNS = 5
SCRAPES = 11
ACTIVE = 1_000
IDLE_CGROUPS = 300
IDLE_SECONDS = 60
INTERVAL = 15
DISKS = (1, 8, 64)

START_SECONDS = 1.0
IDLE_MB = 60
IDLE_PERCENT = 0.3
SCRAPE_CPU_MS = 100
SCRAPE_PEAK_MB = 80

START = """What is beyond the CPU time is waiting: for a CPU where others want it, and for the
kernel at each program that is attached."""
IDLE = """BPF programs run for whatever the machine does meanwhile, and cgroups that others make
cost the process as well. Nearly all of the rest is the scrapes: at an interval of 30 s it is
half."""
FILES = """Each cgroup reads and writes before each scrape of ours. They follow one another; in the
second row they are 15 s apart, as Prometheus asks, and a scrape has a twentieth of what is read
every five minutes, caches that others have used, and all that the process did meanwhile. Half of
ours is the kernel's files of cgroups. Where that is too much, --no-collector.cgroup_memory,
cgroup_io and pressure leave what BPF counts, which is the third row. node_exporter writes a
hundredth of the series, so that its fixed part shows in each."""

DEFAULT = [name for name, collector in COLLECTORS.items() if collector.default]
BY_BPF = [name for name in DEFAULT if issubclass(COLLECTORS[name], Probe)]


# A process ----------------------------------------------------------------------------------------


def megabytes(pid: int, key: str) -> float:
    """VmRSS or VmHWM, or Pss, which shares what is shared by those who share it."""
    name = "smaps_rollup" if key == "Pss" else "status"
    found = re.search(rf"^{key}:\s+(\d+) kB$", Path(f"/proc/{pid}/{name}").read_text(), re.M)
    assert found is not None
    return int(found[1]) * 1024 / 1e6


def cpu_seconds(pid: int) -> float:
    """Of its threads that live; the exporter and Go keep theirs."""
    total = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        total += int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0])
    return total / 1e9


@dataclass(frozen=True, slots=True)
class Scrape:
    """Medians of several, as Prometheus asks, compressed: milliseconds, MB, lines without #."""

    cpu_ms: float
    wall_ms: float
    sent: float
    text: float
    series: int
    peak: float

    def cells(self) -> list[str]:
        return [
            f"{self.cpu_ms:.1f}",
            f"{self.wall_ms:.1f}",
            f"{self.series:,}",
            f"{self.text:.2f}",
            f"{self.sent:.3f}",
            f"{self.cpu_ms / self.series * 1e3:.1f}",
            f"{self.peak:.1f}",
        ]


SCRAPE_HEAD = ("CPU ms", "wall ms", "series", "MB", "gzip MB", "us CPU a series", "peak RSS MB")


def nothing() -> None:
    """What is done before a scrape where the machine is at rest."""


def scrape(pid: int, url: str, load: Callable[[], None] = nothing, interval: float = 0) -> Scrape:
    """After `load` each, and that many seconds after one another; what the process does meanwhile
    counts as the scrape's."""
    request = urllib.request.Request(url, headers={"Accept": ACCEPT, "Accept-Encoding": "gzip"})
    cpu, wall = [], []
    for number in range(SCRAPES):
        if number == 1:  # the first one is of another kind: what it opens and compiles stays
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak so far is forgotten
        before = cpu_seconds(pid)
        due = time.monotonic() + interval
        load()
        time.sleep(max(0.0, due - time.monotonic()))
        begin = time.perf_counter()
        with urllib.request.urlopen(request, timeout=60) as response:
            body = response.read()
        wall.append(time.perf_counter() - begin)
        time.sleep(0.05)  # until it has closed the connection
        cpu.append(cpu_seconds(pid) - before)
    text = gzip.decompress(body)
    series = sum(not line.startswith(b"#") for line in text.splitlines())
    cpu_ms, wall_ms = (statistics.median(each[1:]) * 1e3 for each in (cpu, wall))
    peak = megabytes(pid, "VmHWM")
    return Scrape(cpu_ms, wall_ms, len(body) / 1e6, len(text) / 1e6, series, peak)


def scrape_ours(*flags: str) -> Scrape:
    with lab.Exporter(*flags) as exporter:
        return scrape(exporter.process.pid, f"{exporter.url}/metrics")


# Start --------------------------------------------------------------------------------------------


def start() -> Iterator[Goal]:
    seconds, cpu, started, scraped, shared = [], [], [], [], []
    for _ in range(RUNS):
        begin = time.perf_counter()
        with lab.Exporter() as exporter:
            pid = exporter.process.pid
            started.append(megabytes(pid, "VmRSS"))
            exporter.get("/metrics")
            seconds.append(time.perf_counter() - begin)
            cpu.append(cpu_seconds(pid))
            for _ in range(9):
                exporter.get("/metrics", {"Accept": ACCEPT, "Accept-Encoding": "gzip"})
            scraped.append(megabytes(pid, "VmRSS"))
            shared.append(megabytes(pid, "Pss"))
    middle = [statistics.median(each) for each in (seconds, cpu, started, scraped, shared)]
    print_table(
        f"Start, medians of {RUNS}",
        ("", "to first scrape s", "CPU s", "RSS MB then", "RSS MB after 10 scrapes", "PSS MB"),
        [["exporter", *(f"{s:.2f}" for s in middle[:2]), *(f"{mb:.1f}" for mb in middle[2:])]],
    )
    print_text(START)
    yield Goal("start to first scrape", min(seconds), START_SECONDS, "s")
    yield Goal("RSS after 10 scrapes without load", middle[2], IDLE_MB, "MB")


# Scrapes ------------------------------------------------------------------------------------------


@contextmanager
def cgroups(count: int) -> Iterator[list[lab.Cgroup]]:
    """In each hierarchy; those of the one that owns IO."""
    hierarchies = lab.hierarchies()
    with ExitStack() as stack:
        made: list[lab.Cgroup] = []
        for number in range(count):
            name = f"{container_name(number)}-{os.getpid()}"
            for hierarchy in hierarchies.all - {hierarchies.io}:
                stack.enter_context(lab.cgroup(hierarchy, name))
            made.append(stack.enter_context(lab.cgroup(hierarchies.io, name)))
        yield made


READER = WRITER.replace("O_WRONLY", "O_RDONLY").replace(
    "os.pwrite(fd, buffer", "os.preadv(fd, [buffer]"
)


class SameFamilies(Collector):
    """A scrape's families, as prometheus-client has them."""

    def __init__(self, text: str) -> None:
        self._families = list(text_string_to_metric_families(text))

    def collect(self) -> Iterable[Metric]:
        return self._families


def by_client(text: str) -> tuple[float, float]:
    """CPU ms of generate_latest, and with gzip, for the same families."""
    registry = CollectorRegistry()
    registry.register(SameFamilies(text))
    written, compressed = [], []
    for _ in range(3):
        begin = time.process_time()
        again = generate_latest(registry)
        written.append(time.process_time() - begin)
        gzip.compress(again)
        compressed.append(time.process_time() - begin)
    return statistics.median(written) * 1e3, statistics.median(compressed) * 1e3


@contextmanager
def node_exporter() -> Iterator[tuple[int, str]]:
    """Debian's, with its own defaults: its process id, the URL of its metrics."""
    url = free_address()
    process = subprocess.Popen(
        [
            peers.UNPACKED / "usr/bin/prometheus-node-exporter",
            f"--web.listen-address={url.removeprefix('http://')}",
        ],
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(200):
            try:
                urllib.request.urlopen(url, timeout=5).close()
                break
            except OSError:
                time.sleep(0.05)
        yield process.pid, f"{url}/metrics"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def scrapes(active: int) -> Iterator[Goal]:
    bpf_alone = lab.only(*BY_BPF)
    with (
        tempfile.TemporaryDirectory(prefix="wbx-bench-", dir="/dev/shm") as place,
        lab.loop_disk(Path(place), 8 << 20) as disk,
        cgroups(active) as made,
        lab.Exporter() as exporter,
        lab.Exporter(*bpf_alone) as alone,
    ):

        def load() -> None:
            for code in (WRITER, READER):
                lab.run_in([], code, disk.path, *(str(cgroup.directory) for cgroup in made))

        load()
        found = exporter.scrape()
        counted = found.values("block_io_device_seconds_count", "cgroup", device=disk.name)
        assert len(counted) >= active, f"{len(counted)} of {active} cgroups had IO"
        text = exporter.get("/metrics").decode()
        written, compressed = by_client(text)
        time.sleep(SELDOM_SECONDS)  # in a cgroup's first minute its limits are read at each scrape
        pid = exporter.process.pid
        ours = scrape(pid, f"{exporter.url}/metrics", load)
        apart = scrape(pid, f"{exporter.url}/metrics", load, INTERVAL)
        only_bpf = scrape(alone.process.pid, f"{alone.url}/metrics", load)
        with node_exporter() as (its_pid, url):
            node = scrape(its_pid, url)
    print_table(
        f"A scrape over HTTP, with {active:,} cgroups that have read and written",
        ("", *SCRAPE_HEAD),
        [
            ["ours", *ours.cells()],
            [f"ours, {INTERVAL} s apart", *apart.cells()],
            ["ours, collectors by BPF alone", *only_bpf.cells()],
            ["node_exporter, which knows no cgroups", *node.cells()],
        ],
    )
    print_text(
        f"prometheus-client's generate_latest takes {written:.0f} ms of CPU to write the same "
        f"families once they are made, {compressed:.0f} with gzip."
    )
    print_text(FILES)
    yield Goal(f"scrape of {active:,} active cgroups, CPU", ours.cpu_ms, SCRAPE_CPU_MS, "ms")
    what = "the same, collectors by BPF alone"
    yield Goal(what, only_bpf.cpu_ms, SCRAPE_CPU_MS, "ms")
    yield Goal(f"scrape of {active:,} active cgroups, peak", ours.peak, SCRAPE_PEAK_MB, "MB")


# Idle ---------------------------------------------------------------------------------------------


def idle(seconds: int) -> Iterator[Goal]:
    with ExitStack() as stack:
        stack.callback(os.close, enable_stats())
        stack.enter_context(cgroups(IDLE_CGROUPS))
        exporter = stack.enter_context(lab.Exporter())
        headers = {"Accept": ACCEPT, "Accept-Encoding": "gzip"}

        def wait_and_scrape(seconds: float) -> lab.Scrape:
            time.sleep(seconds)
            exporter.get("/metrics", headers)
            return lab.Scrape(exporter.get("/metrics").decode()) if not seconds else lab.Scrape("")

        wait_and_scrape(0)
        time.sleep(SELDOM_SECONDS)
        first = wait_and_scrape(0)
        begin, before = time.perf_counter(), cpu_seconds(exporter.process.pid)
        for _ in range(seconds // INTERVAL):
            wait_and_scrape(INTERVAL)
        took = time.perf_counter() - begin
        spent = cpu_seconds(exporter.process.pid) - before
        name = "exporter_program_run_seconds_total"
        programs = wait_and_scrape(0).sum(name) - first.sum(name)
    process, bpf = 100 * spent / took, 100 * programs / took
    print_table(
        f"Idle: {IDLE_CGROUPS} cgroups, a scrape each {INTERVAL} s, for {took:.0f} s, % of one CPU",
        ("", "process", "BPF programs"),
        [["exporter", f"{process:.3f}", f"{bpf:.3f}"]],
    )
    print_text(IDLE)
    yield Goal(f"idle CPU with {IDLE_CGROUPS} cgroups", process, IDLE_PERCENT, "%")


# Growth -------------------------------------------------------------------------------------------


def disks(counts: Sequence[int]) -> None:
    rows: list[list[str]] = []
    with lab.Exporter() as exporter, ExitStack() as stack:
        before = loop_devices()
        made: list[lab.Disk] = []
        for count in counts:
            while len(made) < count:
                place = stack.enter_context(
                    tempfile.TemporaryDirectory(prefix="wbx-bench-", dir="/dev/shm")
                )
                disk = lab.loop_disk(Path(place), 1 << 20)
                with ExitStack() as this:
                    made.append(this.enter_context(disk))
                    if made[-1].name not in before:
                        stack.callback(remove, made[-1])
                    stack.push(this.pop_all())
                for code in (lab.DIRECT_WRITER, lab.DIRECT_READER):
                    lab.run_in([], code, made[-1].path, 4096, 1, 0)
            taken = scrape(exporter.process.pid, f"{exporter.url}/metrics")
            rows.append([str(count), *taken.cells()])
    print_table("Growth with disks that are in use", ("disks", *SCRAPE_HEAD), rows)


def loop_devices() -> set[str]:
    return {path.name for path in Path("/sys/block").glob("loop*")}


def remove(disk: lab.Disk) -> None:
    """Takes away a loop device that losetup made, unless somebody else has it by now."""
    with open("/dev/loop-control") as control, suppress(OSError):
        fcntl.ioctl(control, 0x4C81, int(disk.name.removeprefix("loop")))  # LOOP_CTL_REMOVE


_PER_CPU = {5, 6, 10, 21}  # BPF_MAP_TYPE_PERCPU_*, include/uapi/linux/bpf.h


def per_cpu_bytes(bpf_map: Map) -> int:
    """Bytes that a map has for each CPU; 0 for one that is shared."""
    text = Path(f"/proc/self/fdinfo/{bpf_map.fd}").read_text()
    about = dict(re.findall(r"^(\w+):\t(\d+)$", text, re.MULTILINE))
    if int(about["map_type"]) not in _PER_CPU:
        return 0
    return -(-int(about["value_size"]) // 8) * 8 * int(about["max_entries"])


def cpus() -> None:
    with lab.exporter_in_process(*DEFAULT) as exporter:
        probes = [probe for probe in exporter.running if isinstance(probe, Probe) and probe.bpf]
        found = {
            f"{probe.name}/{name}": per_cpu_bytes(bpf_map)
            for probe in probes
            if probe.bpf
            for name, bpf_map in probe.bpf.maps.items()
        }
    each = {name: size for name, size in found.items() if size}
    total = sum(each.values())
    names = ", ".join(f"{name} {size:,}" for name, size in sorted(each.items()))
    print_text(
        f"**Growth with CPUs, on paper.** {len(each)} of {len(found)} maps have a value for each "
        f"CPU, value size x entries: {names}. So the kernel's memory grows by {total:,} bytes a "
        f"CPU, {total * 256 / 1e6:.2f} MB with 256. All counters are shared and updated with "
        "atomic adds: "
        "neither a scrape's time nor its bytes depend on the number of CPUs."
    )


PARTS: tuple[Callable[[], Iterable[Goal] | None], ...] = (
    start,
    lambda: scrapes(ACTIVE),
    lambda: idle(IDLE_SECONDS),
    lambda: disks(DISKS),
    cpus,
)


def main(arguments: Sequence[str] | None = None) -> list[Goal]:
    """Measures and prints; the goals."""
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0]).parse_args(arguments)
    return [goal for part in PARTS for goal in part() or ()]


if __name__ == "__main__":
    main()
