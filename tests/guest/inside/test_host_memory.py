# SPDX-License-Identifier: Apache-2.0
"""Thresholds in vmstat follow vm.dirty_*, at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import lab

MIB = 1 << 20


def test_thresholds_with_bytes_set() -> None:
    vm = Path("/proc/sys/vm")
    before = {name: (vm / name).read_text() for name in ("dirty_background_ratio", "dirty_ratio")}
    with lab.Exporter(*lab.only("host_memory")) as exporter:
        scrape = exporter.scrape()
        assert scrape.sum("host_dirty_limit_bytes") == 0
        assert scrape.sum("host_dirty_ratio") == int(before["dirty_ratio"]) / 100
        # While all memory is free the limits are these shares of what is available.
        thresholds = scrape.sum("host_dirty_threshold_bytes")
        background = scrape.sum("host_dirty_background_threshold_bytes")
        assert background / thresholds == pytest.approx(0.5, rel=0.01)
        try:
            for hard in (8 * MIB, 16 * MIB):
                (vm / "dirty_background_bytes").write_text(str(2 * MIB))
                (vm / "dirty_bytes").write_text(str(hard))
                scrape = exporter.scrape()
                assert scrape.sum("host_dirty_limit_bytes") == hard
                assert scrape.sum("host_dirty_background_limit_bytes") == 2 * MIB
                assert scrape.sum("host_dirty_ratio") == 0
                assert scrape.sum("host_dirty_background_ratio") == 0
                assert scrape.sum("host_dirty_threshold_bytes") == hard
                assert scrape.sum("host_dirty_background_threshold_bytes") == 2 * MIB
                assert scrape.sum("host_dirty_freerun_bytes") == (hard + 2 * MIB) // 2
        finally:
            for name, value in before.items():
                (vm / name).write_text(value)


def test_what_every_kernel_has() -> None:
    with lab.Exporter(*lab.only("host_memory")) as exporter:
        scrape = exporter.scrape()
    reclaimers = scrape.values("host_reclaimed_bytes_total", "by")
    assert {"kswapd", "direct"} <= reclaimers <= {"kswapd", "direct", "khugepaged", "proactive"}
    assert {"dma", "normal"} <= scrape.values("host_allocation_stalls_total", "zone")
    for name in ("dirtied", "written", "page_in", "page_out", "swap_in", "swap_out"):
        assert len(scrape.select(f"host_{name}_bytes_total")) == 1
