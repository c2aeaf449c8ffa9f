# SPDX-License-Identifier: Apache-2.0
"""Block IO against sources that share nothing with the exporter: blktrace, the kernel's own
counters of disks, cgroups and SCSI commands, and what the writers themselves were told."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import lab
from tests.lab import BUFFERED_WRITER, Cgroup, Disk, DiskStats, Scrape
from tests.waiting import PATIENCE_SECONDS, wait_for

from .kernel import NEVER, again_if_missed, dirty_limits, ftrace, missed
from .test_devices import counted, mapped
from .test_main_signals import FAST, MIB, SLOW, io_stat

EXEC = "os.execvp(arguments[0], arguments)"


REQUESTS = "block_io/issue", "block_io/complete"


def missing(ours: tuple[float, float], kernel: tuple[int, int]) -> int:
    """How many requests of the kernel's (count, bytes) ours lacks; nothing else may differ."""
    assert ours <= kernel
    assert (ours[0] == kernel[0]) == (ours[1] == kernel[1])
    return int(kernel[0] - ours[0])


@pytest.fixture(scope="module")
def exporter() -> Iterator[lab.Exporter]:
    """One for all, which must have lost nothing in the end."""
    with lab.Exporter(*lab.only("block_io")) as running:
        yield running
        scrape = running.scrape()
        # A request whose end was not shown to us.
        assert scrape.sum("exporter_map_dropped_total") <= missed(scrape, *REQUESTS)


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[Cgroup]:
    """Each test's own, so that all its counts began at nothing."""
    with lab.cgroup(lab.hierarchies().io, re.sub(r"\W", "-", request.node.name)) as made:
        yield made


def fio(disk: Disk, size: int, *options: str) -> list[str]:
    """A command: direct IO on the disk, each job's in `size` bytes of its own."""
    return [
        *("fio", "--name=job", f"--filename={disk.path}", "--direct=1", "--thread"),
        *("--minimal", f"--size={size}", f"--offset_increment={size}", "--invalidate=0", *options),
    ]


@contextmanager
def scsi_disk(**parameters: int) -> Iterator[Disk]:
    """A disk of scsi_debug, which is as slow as it is asked to be and fails when it is asked to."""
    lab.sh("modprobe", "sd_mod")
    lab.sh("modprobe", "scsi_debug", *(f"{name}={value}" for name, value in parameters.items()))
    try:
        yield wait_for(probed, what="the disk of scsi_debug")
    finally:
        lab.sh("modprobe", "-r", "scsi_debug")


SCSI_DEBUG = Path("/sys/bus/pseudo/drivers/scsi_debug")


def probed() -> Disk | None:
    """Its disk, which another thread probes."""
    for queue in SCSI_DEBUG.glob("adapter*/host*/target*/*/block/*/queue"):
        disk = Disk(f"/dev/{queue.parent.name}")
        if Path(disk.path).exists():
            return disk
    return None


# blktrace ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Traced:
    """A request as blktrace saw it: times in seconds."""

    op: str
    queued: float
    """Q: its bio came to the block layer."""
    got: float
    """G: it has a request."""
    issued: float
    """D: it went to the driver, for the last time."""
    completed: float
    """C."""


@dataclass(frozen=True, slots=True)
class Times:
    count: int
    sum: float
    """Seconds."""


@dataclass(slots=True)
class Trace:
    requests: list[Traced]
    btt: dict[str, Times]
    """What btt says of Q2G, G2I, I2D and D2C."""


@contextmanager
def blktrace(disk: Disk, directory: Path) -> Iterator[Trace]:
    """The kernel's trace of the disk's IO; filled in when it is over."""
    stream, binary = directory / "stream", directory / "binary"
    trace = Trace([], {})
    with stream.open("wb") as output:
        tracer = subprocess.Popen(
            ["blktrace", "-d", disk.path, "-o", "-"], stdout=output, stderr=subprocess.PIPE
        )
    try:
        while not stream.stat().st_size:  # its first record is of its start
            assert tracer.poll() is None
            time.sleep(0.05)
        yield trace
    finally:
        tracer.send_signal(signal.SIGINT)
        _, told = tracer.communicate(timeout=PATIENCE_SECONDS)
    assert not re.search(rb"dropped [1-9]", told), told
    with stream.open("rb") as records:
        lines = subprocess.check_output(
            ["blkparse", "-q", "-i", "-", "-d", binary, "-f", "%a %d %T.%t %S\n"],
            stdin=records,
            text=True,
        )
    # From a pipe it does not get the CPUs' events in order.
    events = re.findall(r"^([QGDC]) ([RW])\S* ([\d.]+) (\d+)$", lines, re.MULTILINE)
    last: dict[tuple[str, str], float] = {}
    for event, op, at, sector in sorted(events, key=lambda fields: float(fields[2])):
        last[event, sector] = float(at)
        if event == "C":
            times = (last[each, sector] for each in "QGDC")
            trace.requests.append(Traced({"R": "read", "W": "write"}[op], *times))
    for name, average, count in re.findall(
        r"^(Q2G|G2I|I2D|D2C) +[\d.]+ +([\d.]+) +[\d.]+ +(\d+)$",
        lab.sh("btt", "-i", binary),
        re.MULTILINE,
    ):
        trace.btt[name] = Times(int(count), int(count) * float(average))


SLACK = 0.001
"""Seconds by which a duration of ours may differ from blktrace's. Both take the time (of one clock)
at the same tracepoints, one after the other: 1-20 us apart, in these guests."""

OUTLIERS = 3
"""Requests that may differ by more: the guest's CPUs take turns on one of the host's, which itself
has other work, and either may happen between two stamps (13 ms, once in four runs)."""


def check_buckets(
    buckets: dict[float, float], durations: Sequence[tuple[float, float]], lost: int
) -> None:
    """Each request's duration lies between two bounds, and so does the count below each edge."""
    assert buckets[math.inf] == len(durations) - lost
    for edge, count in buckets.items():
        surely = sum(high + SLACK <= edge for _, high in durations)
        perhaps = sum(low - SLACK <= edge for low, _ in durations)
        assert surely - OUTLIERS - lost <= count <= perhaps + OUTLIERS, (edge, buckets, durations)


def check_times(grown: Scrape, group: Cgroup, disk: Disk, trace: Trace) -> None:
    """Device time is D2C. Queue time is from the kernel's stamp, which it takes when it has made
    the request, after Q and a wait for a tag, if any, and before G (5.10-6.1); since 6.12 it is the
    plug's, which may have been taken a little before Q. So it is between G2D and Q2D."""
    lost = 0
    for op in ("read", "write"):
        labels = {"device": disk.name, "cgroup": group.label, "op": op}
        those = [request for request in trace.requests if request.op == op]
        assert those
        lacking = len(those) - int(counted(grown, disk, op, group.label)[0])
        device = [(r.completed - r.issued, r.completed - r.issued) for r in those]
        queue = [(r.issued - r.got, r.issued - r.queued) for r in those]
        check_buckets(grown.buckets("block_io_device_seconds", **labels), device, lacking)
        check_buckets(grown.buckets("block_io_queue_seconds", **labels), queue, lacking)
        lost += lacking
    assert lost == missed(grown, *REQUESTS)


def test_times_agree_with_blktrace(exporter: lab.Exporter, group: Cgroup, tmp_path: Path) -> None:
    """On a disk without a scheduler, with requests of many durations and next to no queue."""
    options = ("--rw=randrw", "--rwmixread=30", "--bssplit=4k/40:64k/60", "--number_ios=30")
    with SLOW.queue(nomerges="2", scheduler="none"):
        before = exporter.scrape()
        with blktrace(SLOW, tmp_path) as trace:
            lab.run_in([group], EXEC, *fio(SLOW, 8 * MIB, *options, "--numjobs=4"))
        grown = exporter.scrape() - before
    assert len(trace.requests) == trace.btt["D2C"].count == 4 * 30
    check_times(grown, group, SLOW, trace)
    mine = {"device": SLOW.name, "cgroup": group.label}
    device = grown.sum("block_io_device_seconds_sum", **mine)
    print(device, grown.sum("block_io_queue_seconds_sum", **mine), trace.btt)
    assert device == pytest.approx(trace.btt["D2C"].sum, rel=0.05)


def test_queueing_agrees_with_blktrace(
    exporter: lab.Exporter, group: Cgroup, tmp_path: Path
) -> None:
    """Six writers on a disk that takes two requests at a time, each for up to 100 ms: they wait in
    the scheduler, and for its four requests."""
    with (
        scsi_disk(delay=25, random=1, max_queue=2, dev_size_mb=16) as disk,
        disk.queue(nomerges="2", scheduler="mq-deadline"),
    ):
        options = ("--rw=randrw", "--bs=4k", "--numjobs=6", "--number_ios=16")
        before = exporter.scrape()
        with blktrace(disk, tmp_path) as trace:
            lab.run_in([group], EXEC, *fio(disk, MIB, *options))
        grown = exporter.scrape() - before
    assert len(trace.requests) == trace.btt["D2C"].count == 6 * 16
    check_times(grown, group, disk, trace)
    mine = {"device": disk.name, "cgroup": group.label}
    device = grown.sum("block_io_device_seconds_sum", **mine)
    queue = grown.sum("block_io_queue_seconds_sum", **mine)
    print(device, queue, trace.btt)
    assert device == pytest.approx(trace.btt["D2C"].sum, rel=0.05)
    got_to_issue = trace.btt["G2I"].sum + trace.btt["I2D"].sum
    assert got_to_issue > 1
    assert 0.95 * got_to_issue < queue < 1.05 * (trace.btt["Q2G"].sum + got_to_issue)


# Errors -----------------------------------------------------------------------------------------

TRIER = """
import errno, mmap
path, call = arguments[:2]
size, count, offset, openflags, flags = map(int, arguments[2:])
buffer = mmap.mmap(-1, size)
fd = os.open(path, os.O_RDWR | os.O_DIRECT | openflags)
for i in range(count):
    try:
        if call == "fsync":
            os.fsync(fd)
        else:
            assert getattr(os, call)(fd, [buffer], offset + i * size, flags) == size
        print("ok")
    except OSError as error:
        print(errno.errorcode[error.errno])
"""
"""Makes a call of SIZE bytes COUNT times from OFFSET on, and prints what came of each."""


def tried(
    group: Cgroup,
    disk: Disk,
    call: str,
    size: int,
    count: int,
    offset: int = 0,
    open_flags: int = 0,
    flags: int = 0,
) -> Counter[str]:
    numbers = (size, count, offset, open_flags, flags)
    return Counter(lab.run_in([group], TRIER, disk.path, call, *numbers).split())


def errors(scrape: Scrape, disk: Disk) -> dict[tuple[str, str, str], float]:
    """All of a disk's, by cgroup, op and error."""
    found = scrape.select("block_io_errors_total", device=disk.name)
    return {
        (labels["cgroup"], labels["op"], labels["error"]): count
        for labels, count in ((dict(series), count) for series, count in found.items())
    }


@contextmanager
def injecting(**settings: int) -> Iterator[None]:
    """Settings of scsi_debug, for a while; all of them are 0 else."""
    try:
        for name, value in settings.items():
            (SCSI_DEBUG / name).write_text(str(value))
        yield
    finally:
        for name in reversed(settings):
            (SCSI_DEBUG / name).write_text("0")


# opts of scsi_debug (drivers/scsi/scsi_debug.c).
MEDIUM, TRANSPORT = 2, 16
BAD_SECTORS = range(4660, 4670)
"""That cannot be read under MEDIUM."""
RETRIES = 5
"""SD_MAX_RETRIES: as often sd sends a command again, which is a request issued again."""


@dataclass(frozen=True, slots=True)
class Commands:
    """What the SCSI disk's driver has seen end, and end in an error."""

    done: int
    failed: int

    def __sub__(self, earlier: Commands) -> Commands:
        return Commands(self.done - earlier.done, self.failed - earlier.failed)


def commands(disk: Disk) -> Commands:
    directory = Path("/sys/block", disk.name, "device")
    return Commands(*(int((directory / f"io{n}_cnt").read_text(), 16) for n in ("done", "err")))


def test_unreadable_sectors(exporter: lab.Exporter, group: Cgroup) -> None:
    """Once for each read that fails, by its reader, also through a volume of device mapper: that
    is bio-based and has no requests."""
    with scsi_disk(dev_size_mb=16) as disk, injecting(opts=MEDIUM), mapped(disk) as volume:
        before, scsi, stats = exporter.scrape(), commands(disk), disk.settled()
        failed = 0
        for above, size in ((disk, 4096), (disk, 65536), (volume, 4096)):
            first, last = (sector * 512 // size for sector in (BAD_SECTORS[0], BAD_SECTORS[-1]))
            bad = last - first + 1
            told = tried(group, above, "preadv", size, bad + 6, (first - 3) * size)
            assert told == {"ok": 6, "ENODATA": bad}
            failed += bad
        truth, ended = disk.settled() - stats, commands(disk) - scsi
        grown = exporter.scrape() - before
        assert errors(grown, disk) == {(group.label, "read", "medium"): failed}
        assert not errors(grown, volume)
        assert counted(grown, disk, "read", group.label) == (truth.reads, truth.read_bytes)
        assert truth.reads == failed + 3 * 6
        assert ended == Commands(truth.reads, failed)


def test_writes_that_fail_for_good_or_are_sent_again(exporter: lab.Exporter, group: Cgroup) -> None:
    """Errors are what the writer is told: what sending again has mended is none."""
    with scsi_disk(dev_size_mb=16, delay=1) as disk:
        before, scsi, stats = exporter.scrape(), commands(disk), disk.settled()
        with injecting(opts=TRANSPORT, every_nth=3):
            assert tried(group, disk, "pwritev", 4096, 30) == {"ok": 30}
        mended = commands(disk) - scsi
        assert mended.done == 30 + mended.failed
        assert mended.failed >= 10
        assert not errors(exporter.scrape() - before, disk)

        with injecting(opts=TRANSPORT, every_nth=1):
            told = tried(group, disk, "pwritev", 4096, 7, 30 * 4096)
        failed = commands(disk) - scsi
        truth, grown = disk.settled() - stats, exporter.scrape() - before
        print(told, mended, failed)
        assert told == {"EIO": 7}
        assert failed.failed - mended.failed == 7 * (1 + RETRIES)
        assert errors(grown, disk) == {(group.label, "write", "io"): 7}
        assert counted(grown, disk, "write", group.label) == (37, 37 * 4096)
        assert (truth.writes, truth.written_bytes) == (37, 37 * 4096)


OFFLINE = """
import errno, mmap
path, state, count = arguments[0], arguments[1], int(arguments[2])
buffer = mmap.mmap(-1, 4096)
fd = os.open(path, os.O_WRONLY | os.O_DIRECT)
with open(state, "w") as file:
    file.write("offline\\n")
for call in (lambda: os.pwritev(fd, [buffer], 0), lambda: os.fsync(fd)) * count:
    try:
        call()
        print("ok")
    except OSError as error:
        print(errno.errorcode[error.errno])
"""
"""Takes the disk offline, then COUNT times writes to it and flushes it."""


def test_requests_that_are_never_issued(exporter: lab.Exporter, group: Cgroup) -> None:
    """SCSI refuses them where the disk is offline: errors without an observation. A flush has no
    owner, and neither it nor the request that asked for it counts."""
    with scsi_disk(dev_size_mb=16, delay=0) as disk:
        before, scsi = exporter.scrape(), commands(disk)
        state = Path("/sys/block", disk.name, "device/state")
        try:
            told = Counter(lab.run_in([group], OFFLINE, disk.path, state, 7).split())
            assert commands(disk) == scsi
        finally:
            state.write_text("running\n")
        grown = exporter.scrape() - before
        ((refused, count),) = told.items()
        assert count == 2 * 7
        # BLK_STS_OFFLINE, of which the number is not the same in all kernels, since 5.18.
        error = {"EIO": "io", "ENODEV": "other"}[refused]
        assert errors(grown, disk) == {(group.label, "write", error): 7}
        assert counted(grown, disk, "write", group.label) == (0, 0)


def test_a_flush_sequence_whose_data_fails(
    exporter: lab.Exporter, group: Cgroup, tmp_path: Path
) -> None:
    """A loop device has no FUA: such a write is one of data, then a flush, and its request ends
    twice. Its file lies on a file system that is full after some of the writes."""
    size, count = 65536, 40
    lab.sh("mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path)
    try:
        with lab.loop_disk(tmp_path, 4 * MIB) as disk:
            queue = Path("/sys/block", disk.name, "queue")
            assert (queue / "write_cache").read_text() == "write back\n"
            assert (queue / "fua").read_text() == "0\n"
            before, stats = exporter.scrape(), disk.settled()
            with ftrace("block/block_rq_complete") as trace:
                told = tried(group, disk, "pwritev", size, count, open_flags=os.O_DSYNC)
            truth, grown = disk.settled() - stats, exporter.scrape() - before
            ends = re.findall(r"rq_complete: \S+ W\S* .* \[(-?\d+)\]$", trace.read_text(), re.M)
            print(told, Counter(ends), truth)
            (failure,) = told.keys() - {"ok"}
            error = {"EIO": "io", "ENOSPC": "no_space"}[failure]  # as the kernel has it
            assert told["ok"] > 0
            assert sum(code != "0" for code in ends) == 2 * told[failure]
            assert errors(grown, disk) == {(group.label, "write", error): told[failure]}
            assert counted(grown, disk, "write", group.label) == (count, count * size)
            assert counted(grown, disk, "flush", "unattributed") == (truth.flushes, 0)
            assert truth.flushes >= told["ok"]
            assert truth.written_bytes == count * size
            assert exporter.scrape().sum("block_io_inflight", device=disk.name) == 0
    finally:
        lab.sh("umount", tmp_path)


def test_errors_of_a_layer_without_requests(exporter: lab.Exporter, group: Cgroup) -> None:
    """What device mapper itself fails never was a request, and is no error of the disk below."""
    lab.sh("modprobe", "dm-flakey")
    before, stats = exporter.scrape(), FAST.settled()
    with mapped(FAST, target="error") as failing:
        assert tried(group, failing, "preadv", 4096, 5) == {"EIO": 5}
        assert tried(group, failing, "pwritev", 4096, 5) == {"EIO": 5}
        assert FAST.settled() == stats
    with mapped(FAST, target="flakey {path} 0 0 1 1 error_writes") as flaky:
        stats = FAST.settled()
        assert tried(group, flaky, "pwritev", 4096, 5) == {"EIO": 5}
        assert tried(group, flaky, "preadv", 4096, 5) == {"ok": 5}
        truth = FAST.settled() - stats
    grown = exporter.scrape() - before
    assert not grown.select("block_io_errors_total")
    assert grown.values("block_io_size_bytes_count", "device", cgroup=group.label) == {FAST.name}
    assert counted(grown, FAST, "read", group.label) == (truth.reads, truth.read_bytes)
    assert (truth.reads, truth.writes) == (5, 0)
    assert counted(grown, FAST, "write", group.label) == (0, 0)


def test_writes_that_would_have_to_wait(exporter: lab.Exporter, group: Cgroup) -> None:
    """RWF_NOWAIT on a disk whose only tag others have: refused, without a request or an error."""
    with scsi_disk(dev_size_mb=16, delay=10, max_queue=1) as disk, disk.queue(scheduler="none"):
        before, stats = exporter.scrape(), disk.settled()
        others = lab.spawn_in(
            [], EXEC, *fio(disk, MIB, "--rw=write", "--bs=4k", "--numjobs=3", "--number_ios=100")
        )
        wait_for(lambda: disk.stats().writes > stats.writes)
        busy: Counter[str] = Counter()
        while not busy["EAGAIN"] and others.poll() is None:
            busy += tried(group, disk, "pwritev", 4096, 200, 8 * MIB, flags=os.RWF_NOWAIT)
        finish([others])
        for _ in range(5):
            disk.settled()  # its tag is given back after the last writer was woken
            assert tried(group, disk, "pwritev", 4096, 1, flags=os.RWF_NOWAIT) == {"ok": 1}
        truth, grown = disk.settled() - stats, exporter.scrape() - before
        print(busy)
        assert busy.keys() <= {"ok", "EAGAIN"}
        assert busy["EAGAIN"] > 0
        written = 5 + busy["ok"]
        assert counted(grown, disk, "write", group.label) == (written, written * 4096)
        assert truth.writes == 300 + written
        assert not errors(grown, disk)


# Writers ----------------------------------------------------------------------------------------


def group_lacks(grown: Scrape, group: Cgroup, disk: Disk) -> int:
    """How many of the requests that the kernel counts for the cgroup we do not."""
    own = io_stat(group, disk)
    return sum(
        missing(
            counted(grown, disk, op, group.label),
            (own.get(f"{op[0]}ios", 0), own.get(f"{op[0]}bytes", 0)),
        )
        for op in ("read", "write")
    )


def disk_lacks(grown: Scrape, disk: Disk, truth: DiskStats) -> int:
    """The same for a disk, over all cgroups."""
    return sum(
        missing(
            (
                grown.sum("block_io_size_bytes_count", device=disk.name, op=op),
                grown.sum("block_io_size_bytes_sum", device=disk.name, op=op),
            ),
            kernel,
        )
        for op, kernel in (
            ("read", (truth.reads, truth.read_bytes)),
            ("write", (truth.writes, truth.written_bytes)),
        )
    )


@pytest.mark.parametrize("engine", ["io_uring", "libaio"])
def test_asynchronous_writers(exporter: lab.Exporter, group: Cgroup, engine: str) -> None:
    with FAST.queue(nomerges="2"):
        before, stats = exporter.scrape(), FAST.settled()
        options = (f"--ioengine={engine}", "--iodepth=16", "--rw=randrw", "--bssplit=4k/50:64k/50")
        lab.run_in([group], EXEC, *fio(FAST, 4 * MIB, *options, "--numjobs=2"))
        truth, grown = FAST.settled() - stats, exporter.scrape() - before
    assert truth.read_bytes + truth.written_bytes == 2 * 4 * MIB
    assert group_lacks(grown, group, FAST) == missed(grown, *REQUESTS)
    assert disk_lacks(grown, FAST, truth) == missed(grown, *REQUESTS)


def test_64_writers_of_several_cgroups(exporter: lab.Exporter, group: Cgroup) -> None:
    size, number = 32768, 16
    total = number * size
    with ExitStack() as stack:
        stack.enter_context(FAST.queue(nomerges="2"))
        groups = [group] + [
            stack.enter_context(lab.cgroup(lab.hierarchies().io, f"{group.directory.name}-{i}"))
            for i in range(3)
        ]
        before, stats = exporter.scrape(), FAST.settled()
        jobs = fio(FAST, size, "--rw=write", "--bs=4k", f"--numjobs={number}")
        finish(
            lab.spawn_in([each], EXEC, *jobs, f"--offset={i * total}")
            for i, each in enumerate(groups)
        )
        truth, grown = FAST.settled() - stats, exporter.scrape() - before
        assert (truth.writes, truth.written_bytes) == (4 * total // 4096, 4 * total)
        assert disk_lacks(grown, FAST, truth) == missed(grown, *REQUESTS)
        for each in groups:
            assert io_stat(each, FAST)["wbytes"] == total
        assert sum(group_lacks(grown, each, FAST) for each in groups) == missed(grown, *REQUESTS)
        print(missed(grown, *REQUESTS), "missed")


def finish(writers: Iterable[subprocess.Popen[str]]) -> None:
    """Waits for writers, all of which have been started."""
    for writer in list(writers):
        writer.communicate(timeout=PATIENCE_SECONDS)
        assert writer.returncode == 0


MMAP_WRITER = """
import mmap
path, total = arguments[0], int(arguments[1])
fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
os.ftruncate(fd, total)
memory = mmap.mmap(fd, total)
memory[:] = b"x" * total
"""

READER = """
def opened(name):
    return os.open(f"{arguments[0]}/{name}", os.O_RDONLY | os.O_NOATIME)
os.listdir(opened("lost+found"))
file = opened("file")
while os.read(file, 1 << 20):
    pass
"""
"""Without time stamps, which would have the journal commit at a time of its own."""


@pytest.mark.parametrize("writer", [BUFFERED_WRITER, MMAP_WRITER], ids=["write", "mmap"])
@again_if_missed
def test_a_file_system(exporter: lab.Exporter, tmp_path: Path, writer: str) -> None:
    """Data is its writer's, though the flusher sends it; metadata is the reader's where it is read,
    and written it is the root cgroup's, as is the journal."""
    total = 2 * MIB
    with (
        FAST.queue(nomerges="2"),
        lab.ext4(FAST, tmp_path) as mount,
        lab.cgroup(lab.hierarchies().io, "files-writer") as group,
        lab.cgroup(lab.hierarchies().io, "files-reader") as reader,
        dirty_limits(64 * MIB, 128 * MIB, interval=NEVER),
    ):
        lab.sh("sync", "-f", mount)
        before, stats = exporter.scrape(), FAST.settled()
        lab.run_in([group], writer, mount / "file", total)
        lab.sh("sync", "-f", mount)
        Path("/proc/sys/vm/drop_caches").write_text("3")
        lab.run_in([reader], READER, mount)
        truth, grown = FAST.settled() - stats, exporter.scrape() - before
        assert group_lacks(grown, group, FAST) == group_lacks(grown, reader, FAST) == 0
        assert counted(grown, FAST, "write", group.label)[1] == total
        assert counted(grown, FAST, "write", reader.label) == (0, 0)
        assert counted(grown, FAST, "read", reader.label)[1] > total
        _, written = counted(grown, FAST, "write", "/")
        assert written == truth.written_bytes - total > 0
        assert counted(grown, FAST, "flush", "unattributed") == (truth.flushes, 0)


# Interrupts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("irqmode", [1, 2], ids=["softirq", "timer"])
def test_completions_in_interrupts(exporter: lab.Exporter, group: Cgroup, irqmode: int) -> None:
    """They come while our programs run for other IO, on the same CPU."""
    lab.sh("modprobe", "null_blk", f"irqmode={irqmode}", "completion_nsec=100000", "gb=1")
    size = MIB // 2
    try:
        disks = Disk("/dev/nullb0"), FAST
        with disks[0].queue(nomerges="2"), FAST.queue(nomerges="2"):
            before, stats = exporter.scrape(), [disk.settled() for disk in disks]
            options = ("--rw=randrw", "--bs=4k", "--ioengine=libaio", "--iodepth=16", "--numjobs=2")
            finish(lab.spawn_in([group], EXEC, *fio(disk, size, *options)) for disk in disks)
            after = [disk.settled() for disk in disks]
            grown = exporter.scrape() - before
        truths = [late - early for early, late in zip(stats, after, strict=True)]
        lacking = [disk_lacks(grown, *each) for each in zip(disks, truths, strict=True)]
        assert sum(lacking) == missed(grown, *REQUESTS)
        assert [group_lacks(grown, group, disk) for disk in disks] == lacking
        for truth in truths:
            assert truth.reads + truth.writes == 2 * size // 4096
        print(missed(grown, *REQUESTS), "missed")
    finally:
        lab.sh("modprobe", "-r", "null_blk")
