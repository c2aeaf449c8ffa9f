# SPDX-License-Identifier: Apache-2.0
"""SQPOLL threads against what the test itself reads of their rings."""

from __future__ import annotations

import pytest

from tests import lab
from tests.lab import Cgroup, Scrape
from tests.sqpoll import Times, rings


@pytest.fixture(autouse=True)
def _available(exporter: lab.Exporter) -> None:
    features = exporter.scrape().select("exporter_feature_available", feature="io_uring")
    if set(features.values()) != {1}:
        pytest.skip(f"no times of SQPOLL threads here: {features}")


def counted(scrape: Scrape, cgroup: Cgroup) -> Times:
    """Microseconds of the cgroup."""
    total = scrape.sum("io_uring_sq_seconds_total", cgroup=cgroup.label)
    busy = scrape.sum("io_uring_sq_busy_seconds_total", cgroup=cgroup.label)
    return Times(round(total * 1e6), round(busy * 1e6))


def owners(scrape: Scrape) -> float:
    return scrape.sum("exporter_map_entries", map="io_uring/ring_owners")


def test_a_ring(exporter: lab.Exporter, task_cgroup: Cgroup) -> None:
    with rings([task_cgroup], "own") as made:
        truth = made.at_rest(made.fds[0])
        assert 0 < truth.busy <= truth.total <= made.thread_ns(made.fds[0]) / 1000
        scrape = exporter.scrape()
        assert counted(scrape, task_cgroup) == truth
        assert owners(scrape) == 1
        assert counted(exporter.scrape(), task_cgroup) == truth
    # What has ended stays counted, and is not looked for any more.
    scrape = exporter.scrape()
    assert counted(scrape, task_cgroup) == truth
    scrape = exporter.scrape()
    assert owners(scrape) == 0
    with rings([task_cgroup], "own") as made:
        later = made.at_rest(made.fds[0])
        both = Times(truth.total + later.total, truth.busy + later.busy)
        assert counted(exporter.scrape(), task_cgroup) == both


def test_rings_that_share_a_thread(exporter: lab.Exporter, task_cgroup: Cgroup) -> None:
    with rings([task_cgroup], "own", "attached", "own", "plain") as made:
        first, attached, own, _plain, copy = made.fds
        threads = [made.fields(fd)["SqThread"] for fd in made.fds]
        assert threads[0] == threads[1] == threads[4] != threads[2]
        assert threads[3] == -1
        one, other = made.at_rest(first), made.at_rest(own)
        assert made.at_rest(attached) == made.at_rest(copy) == one
        assert counted(exporter.scrape(), task_cgroup) == Times(
            one.total + other.total, one.busy + other.busy
        )


def test_a_ring_that_was_there_before_the_exporter(task_cgroup: Cgroup) -> None:
    with rings([task_cgroup], "own") as made:
        truth = made.at_rest(made.fds[0])
        with lab.Exporter() as exporter:
            assert counted(exporter.scrape(), task_cgroup) == truth
            assert owners(exporter.scrape()) == 0


def test_a_ring_without_a_thread_is_nobodys_business(
    exporter: lab.Exporter, task_cgroup: Cgroup
) -> None:
    with rings([task_cgroup], "plain"):
        scrape = exporter.scrape()
    assert owners(scrape) == 0
    assert not scrape.select("io_uring_sq_seconds_total", cgroup=task_cgroup.label)
