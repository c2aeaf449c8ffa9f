# SPDX-License-Identifier: Apache-2.0
"""Pages dirtied and written from maps to families. The maps are in memory."""

from __future__ import annotations

import mmap
from pathlib import Path

from tests.unit.memory import MachineOfCgroups, in_memory, put
from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.exposition import Snapshot
from writeback_exporter.names.cgroups import UNATTRIBUTED, EventKind
from writeback_exporter.probes.page_flow import PageFlow


def flow(snapshot: Snapshot) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes dirtied and written, by cgroup."""
    dirtied, written = snapshot.families
    assert dirtied.metric is catalogue.PAGE_DIRTIED_BYTES
    assert written.metric is catalogue.PAGE_WRITTEN_BYTES
    return (
        {cgroup: value for (cgroup,), value in dirtied.rows},
        {cgroup: value for (cgroup,), value in written.rows},
    )


def test_flow_is_in_bytes(tmp_path: Path) -> None:
    probe = PageFlow()
    machine = MachineOfCgroups(tmp_path, probe, flow)
    maps = in_memory(probe, page_dirtied=8, page_written=8)
    machine.event(EventKind.MKDIR, 5, "/a")
    put(maps["page_dirtied"], 5, 3)
    put(maps["page_written"], 5, 2)
    put(maps["page_written"], 0, 7)
    dirtied, written = machine.scrape()
    assert dirtied == {"/a": 3 * mmap.PAGESIZE}
    assert written == {"/a": 2 * mmap.PAGESIZE, UNATTRIBUTED: 7 * mmap.PAGESIZE}
    machine.exit(5, "/a")
    dirtied, written = machine.scrape_until_retention_is_over()
    assert (dirtied, written) == ({}, {UNATTRIBUTED: 7 * mmap.PAGESIZE})
    assert not maps["page_dirtied"].entries
