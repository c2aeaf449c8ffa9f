# SPDX-License-Identifier: Apache-2.0
"""SQPOLL threads on each kernel: what it tells of them, or why it does not."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from tests import lab
from tests.sqpoll import Times, rings

DISABLED = Path("/proc/sys/kernel/io_uring_disabled")
# Since 6.6 as the sysctl is: of the guests' kernels those have it that tell times (6.9).
HAS_TIMES = DISABLED.exists()


def reasons(scrape: lab.Scrape, feature: str) -> set[str]:
    return scrape.values("exporter_feature_available", "reason", feature=feature)


@pytest.mark.skipif(not HAS_TIMES, reason=f"{platform.release()} does not tell times (6.9)")
def test_rings() -> None:
    with (
        lab.Exporter(*lab.only("io_uring")) as exporter,
        lab.cgroup(lab.hierarchies().task, "rings") as group,
    ):
        with rings([group], "own", "attached", "own") as made:
            first, attached, own, copy = made.fds
            one, other = made.at_rest(first), made.at_rest(own)
            assert made.at_rest(attached) == made.at_rest(copy) == one
            assert 0 < one.busy <= one.total
            truth = Times(one.total + other.total, one.busy + other.busy)
            scrape = exporter.scrape()
        ended = exporter.scrape()
    for each in (scrape, ended):
        total = each.sum("io_uring_sq_seconds_total", cgroup="/rings")
        busy = each.sum("io_uring_sq_busy_seconds_total", cgroup="/rings")
        assert Times(round(total * 1e6), round(busy * 1e6)) == truth
    assert reasons(scrape, "io_uring") == {""}
    # Fixed in each of these kernels: the times are the thread's, not its process'.
    assert reasons(scrape, "io_uring_thread_time") == {""}
    assert not any(scrape.select("exporter_map_dropped_total", map="io_uring/ring_owners").values())


@pytest.mark.skipif(not HAS_TIMES, reason="this kernel has no kernel.io_uring_disabled (6.6)")
def test_switched_off() -> None:
    DISABLED.write_text("2")
    try:
        with lab.Exporter(*lab.only("io_uring")) as exporter:
            assert reasons(exporter.scrape(), "io_uring") == {"switched off"}
    finally:
        DISABLED.write_text("0")


@pytest.mark.skipif(HAS_TIMES, reason="this kernel tells times")
def test_a_kernel_that_does_not_tell_times() -> None:
    with (
        lab.Exporter(*lab.only("io_uring")) as exporter,
        lab.cgroup(lab.hierarchies().task, "rings") as group,
        rings([group], "plain", seconds=0),
    ):
        scrape = exporter.scrape()
    assert reasons(scrape, "io_uring") == {"not in this kernel"}
    assert not scrape.select("io_uring_sq_seconds_total")
    assert not [line for line in exporter.log if "ERROR" in line]
