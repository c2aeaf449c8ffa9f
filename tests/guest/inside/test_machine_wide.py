# SPDX-License-Identifier: Apache-2.0
"""What a machine as a whole can suffer while an exporter runs: a clock that is set, a full file
system, no memory, no file that can be opened, disks that come and go."""

from __future__ import annotations

import http.client
import itertools
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests import lab
from tests.lab import DIRECT_WRITER, TWO_CAPABILITIES, Disk
from tests.waiting import PATIENCE_SECONDS, wait_for

from .test_block_io import scsi_disk
from .test_failures import LOCKED_MEMORY
from .test_main_signals import FAST, MIB, SLOW, io_stat

HOUR = 3600


def successes(scrape: lab.Scrape) -> set[float]:
    return set(scrape.select("exporter_collector_success").values())


def writes(scrape: lab.Scrape, group: lab.Cgroup, disk: Disk) -> float:
    labels = {"cgroup": group.label, "device": disk.name, "op": "write"}
    return scrape.sum("block_io_size_bytes_count", **labels)


def connected(exporter: lab.Exporter) -> http.client.HTTPConnection:
    """A connection of its own, kept from scrape to scrape as Prometheus does."""
    return http.client.HTTPConnection(
        exporter.url.removeprefix("http://"), timeout=PATIENCE_SECONDS
    )


def scraped(client: http.client.HTTPConnection) -> lab.Scrape:
    """As Prometheus does, which says how long it waits: as long as the exporter heeds."""
    client.request("GET", "/metrics", headers={"X-Prometheus-Scrape-Timeout-Seconds": "60"})
    answer = client.getresponse()
    assert answer.status == 200
    return lab.Scrape(answer.read().decode())


# The clock ----------------------------------------------------------------------------------------


@contextmanager
def clock_stepped(seconds: int) -> Iterator[None]:
    """The clock is set, and then set back by as much."""
    time.clock_settime(time.CLOCK_REALTIME, time.time() + seconds)
    try:
        yield
    finally:
        time.clock_settime(time.CLOCK_REALTIME, time.time() - seconds)


@pytest.mark.parametrize("hours", [9, -9])
def test_clock_that_is_stepped(hours: int) -> None:
    """In the middle of IO: no time is negative, or longer than the test; what has exited is neither
    forgotten at once nor kept for hours (tests/soak waits for that)."""
    hierarchy = lab.hierarchies().io
    collectors = lab.only("block_io", "work", "pressure")
    with lab.Exporter(*collectors) as exporter, lab.cgroup(hierarchy, "timed") as timed:
        begin = time.monotonic()
        with lab.cgroup(hierarchy, "gone") as gone:
            lab.run_in([gone], DIRECT_WRITER, FAST.path, 4096, 3, 0)
        before = exporter.scrape()
        # Two seconds' worth of the slow disk, so that requests are under way at each step.
        writer = lab.spawn_in([timed], DIRECT_WRITER, SLOW.path, MIB, 8, 0)
        wait_for(lambda: SLOW.stats().inflight, what="IO")
        with clock_stepped(hours * HOUR):
            during = exporter.scrape()
            page = exporter.get("/")
            wait_for(lambda: writer.poll() is not None, what="the writer's end")
        writer.communicate(timeout=PATIENCE_SECONDS)
        assert writer.returncode == 0
        after = exporter.scrape()
        elapsed = time.monotonic() - begin
        written = after.sum("block_io_size_bytes_sum", cgroup=timed.label, op="write")
        truth = io_stat(timed, SLOW)
    for scrape in (before, during, after):
        assert successes(scrape) == {1}
        assert writes(scrape, gone, FAST) == 3
        for name, series in scrape.samples.items():
            if name.startswith("writeback_"):
                negative = {labels: value for labels, value in series.items() if value < 0}
                assert not negative, name
            if name.endswith(("_open_seconds", "_oldest_seconds")):
                assert all(value <= elapsed for value in series.values()), name
    assert written == truth["wbytes"] == 8 * MIB
    grown = after - before
    for name in ("device", "queue"):
        spent = grown.sum(f"block_io_{name}_seconds_sum", cgroup=timed.label)
        # As many requests at once as a write of 1 MiB is made of.
        requests = grown.sum(f"block_io_{name}_seconds_count", cgroup=timed.label)
        assert 0 <= spent <= elapsed * requests / 8, name
    assert grown.sum("block_io_device_seconds_sum", cgroup=timed.label) > 0.5
    waited = grown.sum("pressure_waiting_seconds_total", resource="io", cgroup=timed.label)
    assert waited <= elapsed
    assert b"Throttled" in page


# Full file systems --------------------------------------------------------------------------------


def fill_blocks(mount: Path) -> None:
    """Again after each sync, which gives back what was reserved for too much."""
    for i in itertools.count():
        with (mount / f"filler-{i}").open("wb", buffering=0) as filler:
            written = 0
            with suppress(OSError):
                while True:
                    written += filler.write(bytes(65536))
            lab.sh("sync", "-f", mount)
            if not written:
                filler.write(b"x")


def fill_inodes(mount: Path) -> None:
    for i in itertools.count():
        (mount / f"filler-{i}").touch()


@pytest.mark.parametrize("fill", [fill_blocks, fill_inodes])
def test_textfile_on_a_full_file_system(tmp_path: Path, fill: Callable[[Path], None]) -> None:
    """What is there stays as it is, and nothing is left beside it."""
    command = [
        str(lab.PROGRAM),
        "snapshot",
        "--snapshot.duration=0s",
        *lab.only("block_io", "work"),
    ]
    with lab.file_system(FAST, tmp_path, "ext4", "-N", "64", "-m", "0") as mount:
        output = mount / "textfile/writeback.prom"
        output.parent.mkdir()
        command.append(f"--snapshot.output={output}")
        lab.sh(*command)
        before, written = output.read_bytes(), output.stat()
        assert lab.Scrape(before.decode()).select("exporter_build_info")
        with pytest.raises(OSError, match="No space left"):
            fill(mount)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        told = [line for line in done.stderr.splitlines() if "level=" not in line]
        assert told == [f"writeback-exporter: cannot write {output}: No space left on device"]
        assert done.stdout == ""
        assert os.listdir(output.parent) == [output.name]
        assert output.read_bytes() == before
        assert output.stat().st_ino == written.st_ino
        for filler in mount.glob("filler*"):
            filler.unlink()
        lab.sh(*command)
        assert output.stat().st_ino != written.st_ino
        assert os.listdir(output.parent) == [output.name]


# Memory -------------------------------------------------------------------------------------------

HOG = """
import time
def available():
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
with open("/proc/self/oom_score_adj", "w") as score:
    score.write("1000")
blocks = []
while available() > 160 << 10:
    blocks.append(b"x" * (8 << 20))
print("full", flush=True)
time.sleep(600)
"""


def test_memory_that_runs_out() -> None:
    """Who has taken most of it is killed; the exporter goes on while it is short and after. The
    kernel is told to kill (sysrq): left to itself it first evicts all programs' text, for minutes
    in a guest."""
    hierarchy = lab.hierarchies().memory
    assert hierarchy
    collectors = lab.only("block_io", "cgroup_memory", "pressure")
    with (
        lab.Exporter(*collectors) as exporter,
        lab.cgroup(hierarchy, "hog") as hog,
        lab.cgroup(lab.hierarchies().io, "writer") as writer,
    ):
        assert exporter.scrape().sum("cgroup_memory_events_total", cgroup=hog.label) == 0
        process = lab.spawn_in([hog], HOG)
        assert process.stdout
        assert process.stdout.readline() == "full\n"
        scrape = exporter.scrape()
        assert successes(scrape) == {1}
        used = int((hog.directory / "memory.current").read_text())
        assert scrape.sum("cgroup_memory_bytes", cgroup=hog.label) == pytest.approx(used, rel=0.1)
        assert used > 200 * MIB
        Path("/proc/sysrq-trigger").write_text("f")
        process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == -9
        lab.run_in([writer], DIRECT_WRITER, FAST.path, 4096, 7, 0)
        scrape = exporter.scrape()
        assert successes(scrape) == {1}
        assert writes(scrape, writer, FAST) == 7
        events = (hog.directory / "memory.events").read_text().split()
        killed = int(events[events.index("oom_kill") + 1])
        kills = scrape.sum("cgroup_memory_events_total", cgroup=hog.label, event="oom_kill")
        assert kills == killed == 1
        assert not any(scrape.select("exporter_map_dropped_total").values())
        assert exporter.stop() == 0


def test_exporter_at_its_memory_limit() -> None:
    """In a cgroup where it must give back what it read at each step, and has no room to grow."""
    hierarchy = lab.hierarchies().memory
    assert hierarchy
    with lab.cgroup(hierarchy, "small") as small:
        join = ("sh", "-c", f'echo 0 >{small.directory}/cgroup.procs && exec "$@"', "sh")
        with lab.Exporter(*lab.only("block_io", "pressure", "devices"), prefix=join) as exporter:
            client = connected(exporter)
            assert successes(scraped(client)) == {1}
            used = int((small.directory / "memory.current").read_text())
            # Not much less: how long it sleeps at each step grows with the square of what is above.
            (small.directory / "memory.high").write_text(str(used * 7 // 8))
            for _ in range(3):
                assert successes(scraped(client)) == {1}
            events = (small.directory / "memory.events").read_text().split()
            assert int(events[events.index("high") + 1]) > 0, "it was never held back"
            (small.directory / "memory.high").write_text("max")
            client.close()
            assert exporter.stop() == 0


# Files --------------------------------------------------------------------------------------------

FILE_MAX = Path("/proc/sys/fs/file-max")


def test_files_that_run_out_on_the_machine() -> None:
    """fs.file-max holds for who has no CAP_SYS_ADMIN: what opens a file fails and says so; all is
    well again with the first scrape after it."""
    prefix = (*LOCKED_MEMORY, *TWO_CAPABILITIES)
    collectors = lab.only("block_io", "pressure", "cgroup_memory", "devices", "workload")
    before = FILE_MAX.read_text()
    with lab.Exporter(*collectors, prefix=prefix) as exporter:
        client = connected(exporter)
        assert successes(scraped(client)) == {1}
        try:
            FILE_MAX.write_text("1")
            during = scraped(client)
            # A new connection has to wait, and is neither refused nor forgotten.
            waiting = connected(exporter)
            waiting.request("GET", "/-/healthy")
            time.sleep(0.5)
        finally:
            FILE_MAX.write_text(before)
        assert waiting.getresponse().status == 200
        waiting.close()
        failed = {
            dict(series)["collector"]
            for series, value in during.select("exporter_collector_success").items()
            if not value
        }
        assert failed == {"pressure", "cgroup_memory", "devices"}
        assert not during.select("pressure_waiting_seconds_total")
        assert not during.select("cgroup_memory_bytes")
        assert successes(scraped(client)) == {1}
        client.close()
        assert exporter.stop() == 0
    for name in failed:
        (line,) = (line for line in exporter.log if f"collector {name} failed" in line)
        assert "Too many open files in system; raise fs.file-max" in line


# Disks --------------------------------------------------------------------------------------------


def test_disks_that_come_and_go() -> None:
    """Drivers are loaded and unloaded, twice: each request counts, under a name that stays the same
    also when it is another disk's."""
    with (
        lab.Exporter(*lab.only("block_io", "devices", "bdi")) as exporter,
        lab.cgroup(lab.hierarchies().io, "plugged") as group,
    ):
        for turn in (1, 2):
            lab.sh("modprobe", "null_blk", "nr_devices=2", "gb=1")
            disks = [Disk("/dev/nullb0"), Disk("/dev/nullb1")]
            try:
                for disk in disks:
                    lab.run_in([group], DIRECT_WRITER, disk.path, 4096, 10, 0)
                    assert disk.settled().writes == 10
                plugged = exporter.scrape()
            finally:
                lab.sh("modprobe", "-r", "null_blk")
            unplugged = exporter.scrape()
            for scrape in (plugged, unplugged):
                assert successes(scrape) == {1}
                assert [writes(scrape, group, disk) for disk in disks] == [10 * turn, 10 * turn]
            for disk in disks:
                assert plugged.select("device_info", device=disk.name)
                assert not unplugged.select("device_info", device=disk.name)
                assert not unplugged.sum("block_io_inflight", device=disk.name)
        assert exporter.stop() == 0


ENDLESS = DIRECT_WRITER.replace("range(count)", "iter(int, 1)").replace("i * size", "0")


def test_a_disk_that_is_pulled_out() -> None:
    """While requests are under way: they end, and so does the disk."""
    with (
        lab.Exporter(*lab.only("block_io", "devices", "bdi")) as exporter,
        lab.cgroup(lab.hierarchies().io, "pulled") as group,
        scsi_disk(delay=5, dev_size_mb=16) as disk,
    ):
        writer = lab.spawn_in([group], ENDLESS, disk.path, 4096, 0, 0)
        wait_for(lambda: writes(exporter.scrape(), group, disk) > 5, what="IO")
        Path("/sys/block", disk.name, "device/delete").write_text("1")
        writer.communicate(timeout=PATIENCE_SECONDS)
        assert writer.returncode != 0  # its write failed
        scrape = exporter.scrape()
        assert successes(scrape) == {1}
        assert scrape.sum("block_io_inflight", device=disk.name) == 0
        assert not scrape.select("device_info", device=disk.name)
        requests = scrape.sum("block_io_size_bytes_count", device=disk.name)
        assert requests == scrape.sum("block_io_device_seconds_count", device=disk.name) > 5
        assert exporter.stop() == 0
