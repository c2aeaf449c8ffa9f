# SPDX-License-Identifier: Apache-2.0
"""Writeback work by reason, against the kernel's own trace and its count of pages written."""

from __future__ import annotations

import mmap
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import lab
from tests.calls import frozen
from tests.lab import BUFFERED_WRITER, Disk, Scrape
from tests.waiting import PATIENCE_SECONDS, wait_for

from .kernel import NEVER, dirty_limits, ftrace, vm, vmstat

MIB = 1 << 20
FAST = Disk("/dev/vdb")
EVENTS = [
    f"writeback/writeback_{event}"
    for event in ("queue", "exec", "start", "written", "pages_written")
]
# "kworker/u4:1-31 [000] .... 12.3: writeback_start: bdi 254:0: ... reason=background cgroup_ino=1"
LINE = re.compile(
    r"-(?P<tid>\d+) .*: writeback_(?P<event>\w+): "
    r"(?:bdi (?P<bdi>\S+): .*nr_pages=(?P<pages>-?\d+) .*reason=(?P<reason>\w+))?"
)


def traced(trace: Path, disk: Disk) -> tuple[Counter[str], Counter[str], bool]:
    """Works of the disk by reason, pages that they wrote, and whether one is under way."""
    works, written = Counter[str](), Counter[str]()
    doing: dict[str, str] = {}
    left: dict[str, int] = {}
    for line in trace.read_text().splitlines():
        match = LINE.search(line)
        if not match or match["event"] == "queue":
            continue
        tid, event, reason, bdi = match["tid"], match["event"], match["reason"], match["bdi"]
        if event == "pages_written":
            doing.pop(tid, None)
        elif bdi == disk.dev:
            if event == "exec" or (event == "start" and doing.get(tid) != reason):
                works[reason] += 1
                doing[tid] = reason
            if event == "start":
                left[tid] = int(match["pages"])
            elif event == "written":
                written[reason] += left[tid] - int(match["pages"])
    return works, written, bool(doing)


def by_reason(scrape: Scrape, name: str) -> dict[str, int]:
    return {
        dict(series)["reason"]: int(value)
        for series, value in scrape.select(name, bdi=FAST.dev).items()
        if value
    }


@contextmanager
def in_peace(mount: Path) -> Iterator[None]:
    """No flusher of the disk, which has this file system, works for a reason of its own: it has
    half of the limits also when it has written nothing for a while, of which its share comes, and
    no commit of the journal, 5 s after a file was made, makes a page dirty in the meantime."""
    ratio = Path("/sys/class/bdi", FAST.dev, "min_ratio")
    before = ratio.read_text()
    lab.sh("mount", "-o", "remount,commit=600", mount)
    ratio.write_text("50")
    try:
        yield
    finally:
        ratio.write_text(before)


# Each makes pages dirty and has them written for its reason, and waits() meanwhile.


def in_background(mount: Path, wait: Callable[[], object]) -> None:
    lab.run_in([], BUFFERED_WRITER, mount / "file", 8 * MIB)
    wait()


def by_age(mount: Path, wait: Callable[[], object]) -> None:
    with vm(dirty_expire_centisecs="20", dirty_writeback_centisecs="10"):
        lab.run_in([], BUFFERED_WRITER, mount / "file", 2 * MIB)
        wait()


def by_sync(mount: Path, wait: Callable[[], object]) -> None:
    lab.run_in([], BUFFERED_WRITER, mount / "file", 3 * MIB)
    lab.sh("sync", "-f", mount)
    wait()


def by_reclaim(mount: Path, wait: Callable[[], object]) -> None:
    """A cgroup full of dirty pages is given less memory: reclaim wakes the flusher."""
    with lab.cgroup(lab.hierarchies().io, "reclaimed") as group:
        lab.run_in([group], BUFFERED_WRITER, mount / "file", 8 * MIB)
        (group.directory / "memory.high").write_text(str(MIB))
        wait()
        (group.directory / "memory.high").write_text("max")


@pytest.mark.parametrize(
    ("reason", "provoke", "limit"),
    [
        ("background", in_background, MIB),
        ("periodic", by_age, 400 * MIB),
        ("sync", by_sync, 400 * MIB),
        ("vmscan", by_reclaim, 400 * MIB),
    ],
)
def test_each_work_and_each_page(
    tmp_path: Path, reason: str, provoke: Callable[[Path, Callable[[], object]], None], limit: int
) -> None:
    with (
        lab.ext4(FAST, tmp_path) as mount,
        in_peace(mount),
        dirty_limits(limit, 500 * MIB, interval=NEVER),
    ):
        lab.sh("sync")
        with lab.Exporter(*lab.only("work")) as exporter:
            with ftrace(*EVENTS) as trace:
                before = vmstat("nr_written")

                def is_done() -> bool:
                    _, pages, under_way = traced(trace, FAST)
                    written = pages[reason] * mmap.PAGESIZE > MIB
                    return written and not under_way and vmstat("nr_writeback") == 0

                provoke(mount, lambda: wait_for(is_done, what=f"writeback, {reason}"))
                wait_for(is_done)  # of what came in the end
                written = vmstat("nr_written") - before
            scrape = exporter.scrape()
            works, pages, _ = traced(trace, FAST)

            assert by_reason(scrape, "work_seconds_count") == works
            assert works[reason] > 0
            size = by_reason(scrape, "work_bytes_total")
            assert size == {why: n * mmap.PAGESIZE for why, n in pages.items() if n}
            if reason == "sync":
                # The caller itself writes the file system's metadata.
                assert size["sync"] == 3 * MIB
            else:
                assert sum(size.values()) == written * mmap.PAGESIZE
                assert size[reason] > MIB
            assert not any(scrape.select("work_oldest_seconds", bdi=FAST.dev).values())
            assert not any(scrape.select("exporter_map_dropped_total").values())


def test_the_oldest_work_that_is_not_done(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    with (
        lab.ext4(FAST, tmp_path) as outer,
        lab.loop_disk(outer, 16 * MIB) as disk,
        lab.ext4(disk, inner) as mount,
        dirty_limits(400 * MIB, 500 * MIB, interval=NEVER),
        lab.Exporter(*lab.only("work")) as exporter,
        # Few and small requests, so that the flusher waits for the disk.
        disk.queue(nr_requests="4", max_sectors_kb="64"),
        frozen(outer) as release,
    ):

        def oldest() -> float:
            return exporter.scrape().sum("work_oldest_seconds", bdi=disk.dev, reason="sync")

        lab.run_in([], BUFFERED_WRITER, mount / "file", 2 * MIB)
        begin = time.monotonic()
        sync = lab.spawn_in([], "os.sync()")
        wait_for(lambda: oldest() > 0, what="the work")
        first, between = oldest(), time.monotonic()
        time.sleep(0.5)
        waited = time.monotonic() - between
        second = oldest()
        assert first + waited <= second
        # No older than the call.
        assert second <= time.monotonic() - begin
        release()
        sync.communicate(timeout=PATIENCE_SECONDS)
        scrape = exporter.scrape()
    assert scrape.sum("work_seconds_sum", bdi=disk.dev, reason="sync") >= second
    assert scrape.sum("work_oldest_seconds", bdi=disk.dev) == 0
    assert scrape.sum("work_bytes_total", bdi=disk.dev) >= 2 * MIB
