# SPDX-License-Identifier: Apache-2.0
"""Settings of BDIs and their parts by cgroup, in the form of several kernels."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.unit.files import Machine
from writeback_exporter.features import Refused
from writeback_exporter.files.bdi import BDIS_LIMIT, Bdis
from writeback_exporter.names.cgroups import DYING_SECONDS

OLD = {"min_ratio": 0, "max_ratio": 100, "read_ahead_kb": 128, "stable_pages_required": 0}
NEW = {
    **OLD,
    "min_ratio": 2,
    "min_ratio_fine": 25_000,
    "max_ratio": 0,
    "max_ratio_fine": 1_234,
    "min_bytes": 4_432_000,
    "max_bytes": 218_000,
    "strict_limit": 1,
}

STATS_6_1 = """\
BdiWriteback:               12 kB
BdiReclaimable:            448 kB
BdiDirtyThresh:           1000 kB
DirtyThresh:            171912 kB
BackgroundThresh:        85852 kB
BdiDirtied:               4096 kB
BdiWritten:               3636 kB
BdiWriteBandwidth:      102400 kBps
b_dirty:                     1
b_io:                        0
b_more_io:                   0
b_dirty_time:                0
bdi_list:                    1
state:                       5
"""


def wb(cgroup: int, dirtied: int = 0, written: int = 0, reclaimable: int = 0) -> str:
    """A block of wb_stats, 6.12."""
    return f"""\
WbCgIno:           {cgroup:10}
WbWriteback:                4 kB
WbReclaimable:     {reclaimable:10} kB
WbDirtyThresh:          21384 kB
WbDirtied:         {dirtied:10} kB
WbWritten:         {written:10} kB
WbWriteBandwidth:      102400 kBps
b_dirty:                    0
b_io:                       0
b_more_io:                  0
b_dirty_time:               0
state:                      1

"""


class MachineOfBdis(Machine):
    def add(self, bdi: str, settings: dict[str, int], size: int | None = None) -> None:
        self.write(self.sysfs / "class/bdi" / bdi, settings)
        if size is not None:
            self.write(self.sysfs / "dev/block" / bdi, {"size": size})

    def debugfs(self, bdi: str, **files: str) -> None:
        self.write(self.sysfs / "kernel/debug/bdi" / bdi, files)


@pytest.fixture
def machine(tmp_path: Path) -> MachineOfBdis:
    return MachineOfBdis(tmp_path)


# Settings ----------------------------------------------------------------------------------------


def test_settings(machine: MachineOfBdis) -> None:
    machine.add("8:0", NEW)
    machine.add("0:47", OLD)
    collector = Bdis()
    features = machine.open(collector)
    assert features.keys() == {"bdi_debugfs"}
    assert features["bdi_debugfs"].reason == "not mounted"
    assert machine.scrape(collector) == {
        "bdi_min_ratio": {("8:0",): 0.025, ("0:47",): 0},
        "bdi_max_ratio": {("8:0",): 0.001234, ("0:47",): 1},
        "bdi_min_bytes": {("8:0",): 4_432_000},
        "bdi_max_bytes": {("8:0",): 218_000},
        "bdi_strict_limit": {("8:0",): 1},
        "bdi_read_ahead_bytes": {("8:0",): 131_072, ("0:47",): 131_072},
    }


def test_disks_without_anything_in_them(machine: MachineOfBdis) -> None:
    machine.add("7:0", OLD, size=0)
    machine.add("7:1", OLD, size=2048)
    collector = Bdis()
    machine.open(collector)
    assert machine.scrape(collector)["bdi_max_ratio"].keys() == {("7:1",)}
    machine.write(machine.sysfs / "dev/block/7:0", {"size": 2048})
    assert machine.scrape(collector)["bdi_max_ratio"].keys() == {("7:0",), ("7:1",)}


def test_thousands_of_mounts(machine: MachineOfBdis, caplog: pytest.LogCaptureFixture) -> None:
    for i in range(BDIS_LIMIT + 5):
        machine.add(f"0:{i}", {"max_ratio": 100})
    machine.add("8:0", OLD, size=2048)
    collector = Bdis()
    machine.open(collector)
    with caplog.at_level(logging.WARNING):
        ratios = machine.scrape(collector)["bdi_max_ratio"]
        machine.scrape(collector)
    assert len(ratios) == BDIS_LIMIT
    assert ("8:0",) in ratios
    assert [record.getMessage() for record in caplog.records] == [
        f"{BDIS_LIMIT + 6} BDIs: only the first {BDIS_LIMIT} are exported"
    ]


def test_without_sysfs(machine: MachineOfBdis) -> None:
    (machine.sysfs / "class/bdi").rmdir()
    with pytest.raises(Refused, match=r"--path\.sysfs"):
        machine.open(Bdis())


# By cgroup ---------------------------------------------------------------------------------------


def test_stats_of_6_1(machine: MachineOfBdis) -> None:
    """Only the root's part, and under its name."""
    machine.add("8:0", OLD)
    machine.debugfs("8:0", stats=STATS_6_1)
    collector = Bdis()
    features = machine.open(collector)
    assert features["bdi_debugfs"].available
    assert not features["bdi_debugfs_cgroups"].available
    assert features["bdi_debugfs_cgroups"].reason == "not in this kernel"
    samples = machine.scrape(collector)
    assert {name: series for name, series in samples.items() if name.startswith("wb_")} == {
        "wb_reclaimable_bytes": {("8:0", "/"): 448 * 1024},
        "wb_writeback_bytes": {("8:0", "/"): 12 * 1024},
        "wb_dirty_threshold_bytes": {("8:0", "/"): 1000 * 1024},
        "wb_write_bandwidth_bytes": {("8:0", "/"): 102400 * 1024},
        "wb_dirtied_bytes_total": {("8:0", "/"): 4096 * 1024},
        "wb_written_bytes_total": {("8:0", "/"): 3636 * 1024},
    }


def dirtied(
    machine: MachineOfBdis, collector: Bdis, *blocks: str, bdi: str = "8:0"
) -> dict[str, float]:
    """KiB dirtied by cgroup, when debugfs has these blocks."""
    machine.debugfs(bdi, wb_stats="".join(blocks))
    series = machine.scrape(collector).get("wb_dirtied_bytes_total", {})
    return {cgroup: count / 1024 for (_, cgroup), count in series.items()}


@pytest.fixture
def collector(machine: MachineOfBdis) -> Bdis:
    machine.add("8:0", NEW)
    machine.debugfs("8:0", wb_stats=wb(1))
    made = Bdis()
    features = machine.open(made)
    assert features.keys() == {"bdi_debugfs", "bdi_debugfs_cgroups"}
    assert all(feature.available for feature in features.values())
    return made


def test_wb_stats_of_6_12(machine: MachineOfBdis, collector: Bdis) -> None:
    a, b = machine.cgroup("/a"), machine.cgroup("/b")
    machine.debugfs("8:0", wb_stats=wb(1, 10, 9, 1) + wb(a, 300, 100, 200) + wb(b))
    samples = machine.scrape(collector)
    # /b has never had a dirty page, and has no series.
    assert {name: series for name, series in samples.items() if name.startswith("wb_")} == {
        "wb_reclaimable_bytes": {("8:0", "/"): 1024, ("8:0", "/a"): 200 * 1024},
        "wb_writeback_bytes": {("8:0", "/"): 4096, ("8:0", "/a"): 4096},
        "wb_dirty_threshold_bytes": {("8:0", "/"): 21384 * 1024, ("8:0", "/a"): 21384 * 1024},
        "wb_write_bandwidth_bytes": {("8:0", "/"): 102400 * 1024, ("8:0", "/a"): 102400 * 1024},
        "wb_dirtied_bytes_total": {("8:0", "/"): 10 * 1024, ("8:0", "/a"): 300 * 1024},
        "wb_written_bytes_total": {("8:0", "/"): 9 * 1024, ("8:0", "/a"): 100 * 1024},
    }


def test_an_unused_bdi_has_no_series(machine: MachineOfBdis, collector: Bdis) -> None:
    assert dirtied(machine, collector, wb(1)) == {}


def test_an_unknown_cgroup_is_other(machine: MachineOfBdis, collector: Bdis) -> None:
    assert dirtied(machine, collector, wb(987, 5), wb(654, 6)) == {"other": 11}


def test_inodes_that_came_from_another_cgroup(machine: MachineOfBdis, collector: Bdis) -> None:
    """Their dirty pages come along, and were not dirtied here."""
    a = machine.cgroup("/a")
    machine.debugfs("8:0", wb_stats=wb(a, reclaimable=8))
    samples = machine.scrape(collector)
    assert samples["wb_reclaimable_bytes"] == {("8:0", "/a"): 8 * 1024}
    assert samples["wb_dirtied_bytes_total"] == {("8:0", "/a"): 0}


def test_a_wb_that_begins_anew(machine: MachineOfBdis, collector: Bdis) -> None:
    """As when the io controller is switched for the cgroup: both are there for a while."""
    a = machine.cgroup("/a")
    assert dirtied(machine, collector, wb(a, 100)) == {"/a": 100}
    assert dirtied(machine, collector, wb(a, 110), wb(a, 5)) == {"/a": 115}
    assert dirtied(machine, collector, wb(a, 7)) == {"/a": 115}
    assert dirtied(machine, collector, wb(a, 9)) == {"/a": 117}
    assert dirtied(machine, collector) == {"/a": 117}
    assert dirtied(machine, collector, wb(a, 20)) == {"/a": 137}


def test_a_service_that_is_started_again(machine: MachineOfBdis, collector: Bdis) -> None:
    first = machine.cgroup("/a")
    assert dirtied(machine, collector, wb(first, 100)) == {"/a": 100}
    machine.remove("/a")
    second = machine.cgroup("/a")
    assert dirtied(machine, collector, wb(first, 100), wb(second, 3)) == {"/a": 103}
    machine.debugfs("8:0", wb_stats=wb(second, 3))
    machine.scrape_until_over(collector)
    assert dirtied(machine, collector, wb(second, 4)) == {"/a": 104}


def test_a_removed_cgroup(machine: MachineOfBdis, collector: Bdis) -> None:
    a = machine.cgroup("/a")
    assert dirtied(machine, collector, wb(a, 100)) == {"/a": 100}
    machine.remove("/a")
    assert dirtied(machine, collector) == {"/a": 100}
    assert "wb_dirtied_bytes_total" not in machine.scrape_until_over(collector)


def test_a_removed_cgroup_that_the_kernel_keeps(machine: MachineOfBdis, collector: Bdis) -> None:
    a = machine.cgroup("/a")
    machine.remove("/a", release=False)
    assert dirtied(machine, collector, wb(a, 100)) == {"/a": 100}
    machine.scrape_until_over(collector, DYING_SECONDS)
    assert dirtied(machine, collector, wb(a, 100)) == {}
    # Its pages are written after all: counted from there on.
    assert dirtied(machine, collector, wb(a, 101)) == {"/a": 1}


def test_debugfs_that_fails_for_a_moment(machine: MachineOfBdis, collector: Bdis) -> None:
    assert dirtied(machine, collector, wb(1, 100)) == {"/": 100}
    (machine.sysfs / "kernel/debug/bdi/8:0/wb_stats").unlink()
    samples = machine.scrape(collector)
    assert samples["wb_dirtied_bytes_total"] == {("8:0", "/"): 100 * 1024}
    assert "wb_reclaimable_bytes" not in samples
    assert dirtied(machine, collector, wb(1, 101)) == {"/": 101}


def test_a_bdi_that_is_unplugged(machine: MachineOfBdis, collector: Bdis) -> None:
    assert dirtied(machine, collector, wb(1, 100)) == {"/": 100}
    for place in ("class/bdi/8:0", "kernel/debug/bdi/8:0"):
        for file in (machine.sysfs / place).iterdir():
            file.unlink()
        (machine.sysfs / place).rmdir()
    assert machine.scrape(collector) == {}
    machine.add("8:0", NEW)
    assert dirtied(machine, collector, wb(1, 2)) == {"/": 2}


def test_nonsense_is_left_out(machine: MachineOfBdis, collector: Bdis) -> None:
    block = wb(1, 5).replace("WbReclaimable:              0", f"WbReclaimable: {2**64 - 8}")
    machine.debugfs("8:0", wb_stats=block + "WbCgIno: what?\n\n")
    samples = machine.scrape(collector)
    assert "wb_reclaimable_bytes" not in samples
    assert samples["wb_dirtied_bytes_total"] == {("8:0", "/"): 5 * 1024}


def test_debugfs_that_nobody_may_read(machine: MachineOfBdis) -> None:
    machine.add("8:0", NEW)
    machine.write(machine.sysfs / "kernel/debug/bdi/8:0", {})
    assert machine.open(Bdis())["bdi_debugfs"].reason == "unreadable"
