# SPDX-License-Identifier: Apache-2.0
"""Dirty memory by BDI and cgroup from debugfs, against the memory controller's own count."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests import lab
from tests.lab import BUFFERED_WRITER

from .kernel import NEVER, vm
from .test_main_signals import FAST, MIB

DEBUGFS = Path("/sys/kernel/debug/bdi")
CPUS = os.cpu_count() or 1
# wb_stats reads counters without what each CPU still holds back of them (WB_STAT_BATCH,
# include/linux/backing-dev.h).
PAGE = os.sysconf("SC_PAGESIZE")
BATCHES = CPUS * 8 * CPUS.bit_length() * PAGE

has_cgroups = pytest.mark.skipif(
    not (DEBUGFS / FAST.dev / "wb_stats").exists(), reason="this kernel has no wb_stats (6.10)"
)


def memory_stat(group: lab.Cgroup, name: str) -> int:
    for line in (group.directory / "memory.stat").read_text().splitlines():
        key, value = line.split()
        if key == name:
            return int(value)
    raise AssertionError(f"no {name} in memory.stat")


def dirty_memory(group: lab.Cgroup) -> int:
    """Dirty memory of a cgroup by its own count once that stands still: it may be two seconds
    behind (FLUSH_TIME, mm/memcontrol.c)."""
    before, now = -1, memory_stat(group, "file_dirty")
    while before != now:
        time.sleep(2.5)
        before, now = now, memory_stat(group, "file_dirty")
    return now


@has_cgroups
def test_a_writer_in_a_cgroup(tmp_path: Path) -> None:
    with (
        lab.ext4(FAST, tmp_path) as mount,
        lab.cgroup(lab.hierarchies().io, "dirty") as group,
        lab.Exporter(*lab.only("bdi")) as exporter,
    ):
        labels = {"bdi": FAST.dev, "cgroup": "/dirty"}
        with vm(dirty_writeback_centisecs=str(NEVER)):
            lab.run_in([group], BUFFERED_WRITER, mount / "file", 8 * MIB)
            dirty = dirty_memory(group)
            scrape = exporter.scrape()
        assert 8 * MIB <= dirty <= 9 * MIB
        assert scrape.sum("wb_reclaimable_bytes", **labels) == pytest.approx(dirty, abs=BATCHES)
        assert scrape.sum("wb_dirtied_bytes_total", **labels) >= 8 * MIB - BATCHES
        assert scrape.sum("wb_written_bytes_total", **labels) == pytest.approx(
            scrape.sum("wb_dirtied_bytes_total", **labels) - dirty, abs=2 * BATCHES
        )
        assert scrape.sum("wb_dirty_threshold_bytes", **labels) >= 0

        lab.sh("sync", "-f", mount)
        scrape = exporter.scrape()
        assert dirty_memory(group) == 0
        assert scrape.sum("wb_reclaimable_bytes", **labels) <= BATCHES
        assert scrape.sum("wb_written_bytes_total", **labels) >= 8 * MIB - BATCHES
        assert scrape.sum("wb_write_bandwidth_bytes", **labels) > 0
        assert scrape.values("exporter_feature_available", "reason", feature="bdi_debugfs") == {""}
        # Loop devices have BDIs also without a file.
        empty = {
            (loop / "dev").read_text().strip()
            for loop in Path("/sys/block").glob("loop*")
            if int((loop / "size").read_text()) == 0
        }
        assert empty
        assert not empty & scrape.values("bdi_max_ratio", "bdi")
        written = scrape.sum("wb_written_bytes_total", **labels)
        bdis = scrape.values("wb_written_bytes_total", "bdi")
    assert FAST.dev in bdis
    assert written <= 16 * MIB


@has_cgroups
def test_a_cgroup_that_is_made_again(tmp_path: Path) -> None:
    """Its wb is another one, that counts from 0; the series goes on."""
    counts = []
    with lab.ext4(FAST, tmp_path) as mount, lab.Exporter(*lab.only("bdi")) as exporter:
        for i in range(2):
            with lab.cgroup(lab.hierarchies().io, "again") as group:
                lab.run_in([group], BUFFERED_WRITER, mount / f"file{i}", 4 * MIB)
                lab.sh("sync", "-f", mount)
                scrape = exporter.scrape()
                counts.append(scrape.sum("wb_written_bytes_total", bdi=FAST.dev, cgroup="/again"))
    assert 4 * MIB - BATCHES <= counts[0] <= 5 * MIB
    assert counts[0] + 4 * MIB - BATCHES <= counts[1] <= 10 * MIB


@pytest.mark.skipif(
    (DEBUGFS / FAST.dev / "wb_stats").exists(), reason="this kernel has all cgroups in wb_stats"
)
def test_before_wb_stats_there_is_only_the_root(tmp_path: Path) -> None:
    with (
        lab.ext4(FAST, tmp_path) as mount,
        lab.cgroup(lab.hierarchies().io, "dirty") as group,
        lab.Exporter(*lab.only("bdi")) as exporter,
    ):
        with vm(dirty_writeback_centisecs=str(NEVER)):
            lab.run_in([group], BUFFERED_WRITER, mount / "theirs", 8 * MIB)
            before = exporter.scrape()
            lab.run_in([], BUFFERED_WRITER, mount / "roots", 8 * MIB)
            after = exporter.scrape()
            assert dirty_memory(group) > 7 * MIB
        assert after.values("wb_reclaimable_bytes", "cgroup") == {"/"}
        assert before.sum("wb_reclaimable_bytes", bdi=FAST.dev) < 4 * MIB
        assert after.sum("wb_reclaimable_bytes", bdi=FAST.dev) >= 8 * MIB - BATCHES
        features = after.select("exporter_feature_available", feature="bdi_debugfs_cgroups")
        assert list(features.values()) == [0]
