# SPDX-License-Identifier: Apache-2.0
"""The host's memory against /proc/meminfo, sysctl and a writer of known size."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from tests import lab
from tests.lab import BUFFERED_WRITER, Disk
from tests.waiting import wait_for

MIB = 1 << 20


def meminfo(name: str) -> int:
    """A line of /proc/meminfo, in bytes: the same counter by another way."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, value = line.split(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise AssertionError(f"no {name} in /proc/meminfo")


def vmstat(name: str) -> int:
    for line in Path("/proc/vmstat").read_text().splitlines():
        key, value = line.split()
        if key == name:
            return int(value)
    raise AssertionError(f"no {name} in /proc/vmstat")


@pytest.mark.parametrize(
    ("metric", "line"), [("host_dirty_bytes", "Dirty"), ("host_writeback_bytes", "Writeback")]
)
def test_dirty_memory(metric: str, line: str) -> None:
    """It moves all the time, but not between two looks of many."""
    with lab.Exporter(*lab.only("host_memory")) as exporter:

        def agrees() -> bool:
            before = meminfo(line)
            shown = exporter.scrape().select(metric)
            return shown == {(): before} and meminfo(line) == before

        wait_for(agrees, what=f"{metric} between two equal looks at {line}")


def test_a_writer_of_known_size(exporter: lab.Exporter, disk: Disk, tmp_path: Path) -> None:
    with lab.ext4(disk, tmp_path) as mount:
        before = exporter.scrape()
        lab.run_in([], BUFFERED_WRITER, mount / "file", 16 * MIB)
        lab.sh("sync", "-f", mount)
        low = {name: vmstat(f"nr_{name}") for name in ("dirtied", "written")}
        after = exporter.scrape()
        high = {name: vmstat(f"nr_{name}") for name in ("dirtied", "written")}
    for name in ("dirtied", "written"):
        metric = f"host_{name}_bytes_total"
        # The file, and once more what its loop device makes dirty of the image.
        assert after.sum(metric) - before.sum(metric) >= 16 * MIB
        assert low[name] <= after.sum(metric) / mmap.PAGESIZE <= high[name]


def test_thresholds(exporter: lab.Exporter) -> None:
    """In bytes, in their order, and freerun half-way, as balance_dirty_pages has it."""
    scrape = exporter.scrape()
    hard = scrape.sum("host_dirty_threshold_bytes")
    background = scrape.sum("host_dirty_background_threshold_bytes")
    freerun = scrape.sum("host_dirty_freerun_bytes")
    assert 0 < background < freerun < hard < meminfo("MemTotal")
    assert 0 <= (hard + background) / 2 - freerun < mmap.PAGESIZE


@pytest.mark.parametrize(
    ("metric", "setting", "parts"),
    [
        ("host_dirty_ratio", "dirty_ratio", 100),
        ("host_dirty_background_ratio", "dirty_background_ratio", 100),
        ("host_dirty_limit_bytes", "dirty_bytes", 1),
        ("host_dirty_background_limit_bytes", "dirty_background_bytes", 1),
        ("host_dirty_expire_seconds", "dirty_expire_centisecs", 100),
        ("host_dirty_writeback_interval_seconds", "dirty_writeback_centisecs", 100),
    ],
)
def test_settings(exporter: lab.Exporter, metric: str, setting: str, parts: int) -> None:
    truth = int(lab.sh("sysctl", "-n", f"vm.{setting}"))
    assert exporter.scrape().select(metric) == {(): truth / parts}


def test_paging_of_block_devices(exporter: lab.Exporter, disk: Disk) -> None:
    """A direct reader counts too; the unit is 1 KiB."""
    before = exporter.scrape()
    lab.run_in([], lab.DIRECT_READER, disk.path, MIB, 8, 0)
    after = exporter.scrape()
    metric = "host_page_in_bytes_total"
    assert after.sum(metric) - before.sum(metric) >= 8 * MIB
    assert after.sum(metric) <= vmstat("pgpgin") * 1024
