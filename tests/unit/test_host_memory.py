# SPDX-License-Identifier: Apache-2.0
"""vmstat and vm.dirty_* of several kernels; the content is made up, its form is theirs."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from tests.unit.files import Machine, Samples
from writeback_exporter.features import Refused
from writeback_exporter.files.host_memory import HostMemory

PAGE = mmap.PAGESIZE

VMSTAT_5_10 = """\
nr_free_pages 900
nr_dirty 7
nr_writeback 3
nr_writeback_temp 0
nr_dirtied 1000
nr_written 800
nr_dirty_threshold 43915
nr_dirty_background_threshold 21930
pgpgin 11
pgpgout 13
pswpin 17
pswpout 19
allocstall_dma 0
allocstall_dma32 1
allocstall_normal 2
allocstall_movable 3
pgsteal_kswapd 23
pgsteal_direct 29
pgsteal_anon 50
pgsteal_file 2
nr_unstable 0"""
VMSTAT_6_12 = VMSTAT_5_10.replace(
    "nr_written 800", "nr_written 800\nnr_throttled_written 5"
).replace("pgsteal_anon", "pgsteal_khugepaged 31\npgsteal_anon")
# The order differs, since the counters of reclaim are a node's here.
VMSTAT_7_3 = """\
nr_dirtied 1000
nr_written 800
nr_throttled_written 5
pgsteal_kswapd 23
pgsteal_direct 29
pgsteal_khugepaged 31
pgsteal_proactive 37
pgsteal_anon 50
nr_dirty_threshold 43915
nr_dirty_background_threshold 21930
pgpgin 11
allocstall_device 4"""

SETTINGS = {
    "dirty_ratio": 20,
    "dirty_background_ratio": 10,
    "dirty_bytes": 0,
    "dirty_background_bytes": 0,
    "dirty_expire_centisecs": 3000,
    "dirty_writeback_centisecs": 500,
}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.write(made.procfs / "sys/vm", SETTINGS)
    return made


def scrape(machine: Machine, vmstat: str) -> Samples:
    machine.write(machine.procfs, {"vmstat": vmstat})
    collector = HostMemory()
    assert machine.open(collector) == {}
    return machine.scrape(collector)


def single(samples: Samples) -> dict[str, float]:
    """The samples that have no labels."""
    return {name: series[()] for name, series in samples.items() if () in series}


def test_5_10(machine: Machine) -> None:
    samples = scrape(machine, VMSTAT_5_10)
    assert single(samples) == {
        "host_dirty_bytes": 7 * PAGE,
        "host_writeback_bytes": 3 * PAGE,
        "host_dirty_threshold_bytes": 43915 * PAGE,
        "host_dirty_background_threshold_bytes": 21930 * PAGE,
        "host_dirty_freerun_bytes": 32922 * PAGE,  # 32922.5, as the kernel divides
        "host_dirtied_bytes_total": 1000 * PAGE,
        "host_written_bytes_total": 800 * PAGE,
        "host_page_in_bytes_total": 11 * 1024,
        "host_page_out_bytes_total": 13 * 1024,
        "host_swap_in_bytes_total": 17 * PAGE,
        "host_swap_out_bytes_total": 19 * PAGE,
        "host_dirty_ratio": 0.2,
        "host_dirty_background_ratio": 0.1,
        "host_dirty_limit_bytes": 0,
        "host_dirty_background_limit_bytes": 0,
        "host_dirty_expire_seconds": 30,
        "host_dirty_writeback_interval_seconds": 5,
    }
    reclaimed = {("kswapd",): 23 * PAGE, ("direct",): 29 * PAGE}
    assert samples["host_reclaimed_bytes_total"] == reclaimed
    stalls = {("dma",): 0, ("dma32",): 1, ("normal",): 2, ("movable",): 3}
    assert samples["host_allocation_stalls_total"] == stalls


def test_6_12(machine: Machine) -> None:
    samples = scrape(machine, VMSTAT_6_12)
    assert single(samples)["host_throttled_written_bytes_total"] == 5 * PAGE
    assert samples["host_reclaimed_bytes_total"][("khugepaged",)] == 31 * PAGE


def test_a_kernel_that_lacks_some(machine: Machine) -> None:
    """Each missing line or file takes its own sample with it, and no other."""
    (machine.procfs / "sys/vm/dirty_bytes").unlink()
    (machine.procfs / "sys/vm/dirty_expire_centisecs").write_text("many\n")
    samples = scrape(machine, VMSTAT_7_3)
    missing = {
        "host_dirty_bytes",
        "host_writeback_bytes",
        "host_page_out_bytes_total",
        "host_swap_in_bytes_total",
        "host_swap_out_bytes_total",
        "host_dirty_limit_bytes",
        "host_dirty_expire_seconds",
    }
    full = single(scrape(machine, VMSTAT_6_12)).keys() | missing
    assert full - single(samples).keys() == missing
    assert samples["host_reclaimed_bytes_total"][("proactive",)] == 37 * PAGE
    assert samples["host_allocation_stalls_total"] == {("device",): 4}
    without_one = scrape(machine, VMSTAT_7_3.replace("nr_dirty_background", "nr_other"))
    assert "host_dirty_freerun_bytes" not in without_one


def test_a_count_below_zero_is_left_out(machine: Machine) -> None:
    nonsense = VMSTAT_5_10.replace("nr_dirty 7", f"nr_dirty {2**64 - 2}")
    nonsense = nonsense.replace("allocstall_dma32 1", f"allocstall_dma32 {2**64 - 1}")
    samples = scrape(machine, nonsense)
    assert "host_dirty_bytes" not in samples
    assert single(samples)["host_writeback_bytes"] == 3 * PAGE
    assert ("dma32",) not in samples["host_allocation_stalls_total"]


def test_counters_do_not_go_back(machine: Machine) -> None:
    machine.write(machine.procfs, {"vmstat": VMSTAT_5_10})
    collector = HostMemory()
    machine.open(collector)
    counts = []
    for dirtied in (1000, 998, 999, 1001):
        vmstat = VMSTAT_5_10.replace("nr_dirtied 1000", f"nr_dirtied {dirtied}")
        machine.write(machine.procfs, {"vmstat": vmstat})
        counts.append(machine.scrape(collector)["host_dirtied_bytes_total"][()] / PAGE)
    assert counts == [1000, 1000, 1000, 1001]


def test_gauges_go_back(machine: Machine) -> None:
    machine.write(machine.procfs, {"vmstat": VMSTAT_5_10})
    collector = HostMemory()
    machine.open(collector)
    machine.scrape(collector)
    machine.write(machine.procfs, {"vmstat": VMSTAT_5_10.replace("nr_dirty 7", "nr_dirty 2")})
    assert machine.scrape(collector)["host_dirty_bytes"] == {(): 2 * PAGE}


def test_without_vmstat(machine: Machine) -> None:
    with pytest.raises(Refused, match=r"vmstat.*--path\.procfs"):
        machine.open(HostMemory())
