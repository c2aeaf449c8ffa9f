# SPDX-License-Identifier: Apache-2.0
"""Block IO against /proc/diskstats, which shares no code with ours, and writers of known size."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests import lab
from tests.host.witness import Witness, unless_hidden
from tests.lab import DIRECT_READER, DIRECT_WRITER, Cgroup, Disk, Scrape
from tests.waiting import PATIENCE_SECONDS


class Measure:
    """What the exporter, the kernel and the witness counted on a disk since it was begun."""

    def __init__(self, exporter: lab.Exporter, disk: Disk, witness: Witness) -> None:
        self.exporter, self.disk, self.witness = exporter, disk, witness
        self.hidden_before = witness.hidden(disk)
        self.stats_before = disk.settled()
        self.before = exporter.scrape()

    def end(self) -> None:
        self.truth = self.disk.settled() - self.stats_before
        self.hidden = self.witness.hidden(self.disk) - self.hidden_before
        self.after = self.exporter.scrape()

    def count(self, name: str, **labels: str) -> int:
        labels["device"] = self.disk.name
        return int(self.after.sum(name, **labels) - self.before.sum(name, **labels))

    def requests(self, op: str, **labels: str) -> tuple[int, int]:
        """Requests of an op and their bytes."""
        return (
            self.count("block_io_size_bytes_count", op=op, **labels),
            self.count("block_io_size_bytes_sum", op=op, **labels),
        )

    def check(self) -> int:
        """Every count of the disk equals the kernel's own, exactly; the events that were hidden."""
        if self.hidden == 0:
            truth = self.truth
            assert self.requests("read") == (truth.reads, truth.read_bytes)
            assert self.requests("write") == (truth.writes, truth.written_bytes)
            assert self.requests("discard") == (truth.discards, truth.discarded_bytes)
            assert self.count("block_io_depth_count") == self.count("block_io_size_bytes_count")
            assert self.after.sum("block_io_inflight", device=self.disk.name) == 0
        requests = self.count("block_io_size_bytes_count")
        for name in ("block_io_device_seconds", "block_io_queue_seconds"):
            assert self.count(f"{name}_count") == requests
            assert self.count(f"{name}_bucket", le="+Inf") == requests
        return self.hidden


@pytest.mark.parametrize("scheduler", ["none", "mq-deadline"])
@pytest.mark.parametrize("iostats", ["1", "0"])
def test_direct_io_is_counted_exactly_and_charged_to_its_cgroup(
    exporter: lab.Exporter,
    disk: Disk,
    io_cgroup: Cgroup,
    witness: Witness,
    scheduler: str,
    iostats: str,
) -> None:
    sizes = {512: 33, 4096: 500, 65536: 100, 262144: 17}
    counts = sum(sizes.values()), sum(size * count for size, count in sizes.items())

    def attempt() -> int:
        measure = Measure(exporter, disk, witness)
        for size, count in sizes.items():
            lab.run_in([io_cgroup], DIRECT_WRITER, disk.path, size, count, 0)
            lab.run_in([io_cgroup], DIRECT_READER, disk.path, size, count, 0)
        measure.end()
        if measure.hidden == 0:
            for op in ("read", "write"):
                assert measure.requests(op, cgroup=io_cgroup.label) == counts
                for edge, expected in ((512, 33), (4096, 533), (32768, 533), (65536, 633)):
                    bucket = {"op": op, "cgroup": io_cgroup.label, "le": str(float(edge))}
                    assert measure.count("block_io_size_bytes_bucket", **bucket) == expected
        if iostats == "0":  # which diskstats counts nothing without
            return measure.hidden
        return measure.check()

    with disk.queue(scheduler=scheduler, iostats=iostats):
        unless_hidden(attempt)


def test_parallel_writers_of_several_cgroups(
    exporter: lab.Exporter, disk: Disk, io_cgroup: Cgroup, witness: Witness
) -> None:
    with lab.cgroup(lab.hierarchies().io, f"wbx-second-{os.getpid()}") as second:
        groups = [io_cgroup, second]

        def attempt() -> int:
            measure = Measure(exporter, disk, witness)
            writers = [
                lab.spawn_in([group], DIRECT_WRITER, disk.path, 4096, 1000, i * 1000 * 4096)
                for i, group in enumerate(groups * 4)
            ]
            for writer in writers:
                writer.communicate(timeout=PATIENCE_SECONDS)
                assert writer.returncode == 0
            measure.end()
            if measure.hidden == 0:
                for group in groups:
                    assert measure.requests("write", cgroup=group.label) == (4000, 4000 * 4096)
            return measure.check()

        unless_hidden(attempt)


def test_flushes(exporter: lab.Exporter, disk: Disk, witness: Witness) -> None:
    """Each fsync of the device is a flush. diskstats counts besides, as a write of 0 bytes, the
    request that asked for it and never went to the driver; we do not."""

    def attempt() -> int:
        measure = Measure(exporter, disk, witness)
        code = "fd = os.open(arguments[0], os.O_WRONLY)\nfor _ in range(40): os.fsync(fd)"
        lab.run_in([], code, disk.path)
        measure.end()
        truth = measure.truth
        assert (truth.flushes, truth.writes, truth.written_bytes) == (40, 40, 0)
        assert measure.requests("write") == (0, 0)
        if measure.hidden == 0:
            assert measure.requests("flush", cgroup="unattributed") == (40, 0)
        return measure.hidden

    unless_hidden(attempt)


def test_file_system_with_journal_and_discards(
    exporter: lab.Exporter, disk: Disk, witness: Witness, tmp_path: Path
) -> None:
    """FUA and flush sequences end twice, journals and trims batch: bytes are exact all the same."""

    def attempt() -> int:
        measure = Measure(exporter, disk, witness)
        with lab.ext4(disk, tmp_path) as mount:
            for i in range(20):
                with open(mount / f"file{i}", "wb") as stream:
                    stream.write(os.urandom(300_000))
                    os.fsync(stream.fileno())
            for i in range(10):
                (mount / f"file{i}").unlink()
            lab.sh("sync", "-f", mount)
            lab.sh("fstrim", mount)
        lab.sh("blkdiscard", "-f", "-o", "1M", "-l", "4M", disk.path)
        measure.end()
        truth = measure.truth
        assert truth.flushes > 20
        assert truth.discards > 0
        if measure.hidden:
            return measure.hidden
        assert measure.requests("read") == (truth.reads, truth.read_bytes)
        assert measure.requests("discard") == (truth.discards, truth.discarded_bytes)
        assert measure.requests("flush")[0] == truth.flushes
        # mkfs zeroes its tables with REQ_OP_WRITE_ZEROES: writes for diskstats, though no data
        # moves.
        writes, written = map(sum, zip(*map(measure.requests, ("write", "other")), strict=True))
        assert written == truth.written_bytes
        # See test_flushes: diskstats counts requests that only ask for a flush.
        assert truth.writes - truth.flushes <= writes <= truth.writes
        assert measure.after.sum("block_io_inflight", device=disk.name) == 0
        return 0

    unless_hidden(attempt)


def test_latency_agrees_with_diskstats(
    exporter: lab.Exporter, disk: Disk, witness: Witness
) -> None:
    """Queue and device time together are what the kernel sums as time spent writing."""

    def attempt() -> int:
        measure = Measure(exporter, disk, witness)
        began = time.monotonic()
        for _ in range(20):
            lab.run_in([], DIRECT_WRITER, disk.path, 262144, 240, 0)
        wall_ms = 1000 * (time.monotonic() - began)
        measure.end()
        before, after = measure.before, measure.after
        ours_ms = 1000 * sum(
            scrape_sum(after, disk, part) - scrape_sum(before, disk, part)
            for part in ("queue", "device")
        )
        if measure.hidden == 0:
            # The kernel takes its end some microseconds later, when it has woken the writer.
            assert measure.truth.write_ms > 100
            assert 0.8 * measure.truth.write_ms <= ours_ms <= measure.truth.write_ms + 1
            assert ours_ms < wall_ms  # one write at a time
        return measure.check()

    unless_hidden(attempt)


def scrape_sum(scrape: Scrape, disk: Disk, part: str) -> float:
    return scrape.sum(f"block_io_{part}_seconds_sum", device=disk.name, op="write")


TRUNCATED_READER = """
path = arguments[0]
import mmap
buffer = mmap.mmap(-1, 65536)
fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
failed = 0
for i in range(16):
    try:
        os.preadv(fd, [buffer], i * 65536)
    except OSError as error:
        assert error.errno == 5
        failed += 1
print(failed)
"""


def test_errors_and_partial_completions(
    exporter: lab.Exporter, disk: Disk, io_cgroup: Cgroup, witness: Witness, tmp_path: Path
) -> None:
    """Past the end of its file a loop device completes a portion, requeues, then fails."""
    os.truncate(tmp_path / "image", 7 * 65536 + 4096)

    def attempt() -> int:
        measure = Measure(exporter, disk, witness)
        failed = int(lab.run_in([io_cgroup], TRUNCATED_READER, disk.path))
        measure.end()
        assert failed == 9
        assert measure.truth.reads == 16
        hidden = measure.hidden + 1  # for the portion was completed, but not issued, by itself
        if hidden:
            return hidden
        scrape = measure.after - measure.before
        errors = scrape.select("block_io_errors_total", device=disk.name)
        assert {
            (labels["cgroup"], labels["op"], labels["error"]): count
            for labels, count in ((dict(series), count) for series, count in errors.items())
        } == {(io_cgroup.label, "read", "io"): failed}
        reads = (16, measure.truth.read_bytes)
        assert measure.requests("read", cgroup=io_cgroup.label) == reads
        assert measure.after.sum("block_io_inflight", device=disk.name) == 0
        return 0

    unless_hidden(attempt)
