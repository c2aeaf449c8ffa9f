# SPDX-License-Identifier: Apache-2.0
"""Waits for pages from maps to families. The maps are in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.memory import MachineOfCgroups, in_memory, put
from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.exposition import Labels, Snapshot
from writeback_exporter.names.cgroups import OTHER, OTHER_ID, EventKind
from writeback_exporter.probes.page_wait import PageWait


def waits(snapshot: Snapshot) -> dict[Labels, tuple[int, int]]:
    """(number, nanoseconds) by cgroup."""
    (histogram,) = snapshot.histograms
    assert histogram.metric is catalogue.PAGE_WAIT_SECONDS
    return {labels: (sum(slots), total) for labels, slots, total in histogram.rows()}


class Waiting(MachineOfCgroups[dict[Labels, tuple[int, int]]]):
    def __init__(self, sysfs: Path) -> None:
        probe = PageWait()
        super().__init__(sysfs, probe, waits)
        layout = probe.file.struct("page_wait")
        self.slots = layout.fields["slots"].count
        self.maps = in_memory(probe, page_wait=layout.size, page_waiters=24)
        # As load() does.
        put(self.maps["page_wait"], OTHER_ID, *[0] * (1 + self.slots))
        self.event(EventKind.MKDIR, 5, "/a")

    def waited(self, cgroup: int, ns: int, times: int) -> None:
        put(self.maps["page_wait"], cgroup, ns, times, *[0] * (self.slots - 1))


@pytest.fixture
def waiting(tmp_path: Path) -> Waiting:
    return Waiting(tmp_path)


def test_waits_by_cgroup(waiting: Waiting) -> None:
    waiting.waited(5, 3000, 2)
    assert waiting.scrape() == {("/a",): (2, 3000)}
    waiting.waited(OTHER_ID, 9, 1)
    assert waiting.scrape() == {("/a",): (2, 3000), (OTHER,): (1, 9)}


def test_waits_of_a_service_that_is_started_again(waiting: Waiting) -> None:
    waiting.waited(5, 3000, 2)
    waiting.exit(5, "/a")
    waiting.event(EventKind.MKDIR, 50, "/a")
    waiting.waited(50, 1000, 1)
    assert waiting.scrape() == {("/a",): (3, 4000)}
    assert waiting.scrape_until_retention_is_over() == {("/a",): (3, 4000)}
    assert len(waiting.maps["page_wait"].entries) == 2
    waiting.exit(50, "/a")
    assert waiting.scrape_until_retention_is_over() == {}
    assert len(waiting.maps["page_wait"].entries) == 1, "there is still room for others"
