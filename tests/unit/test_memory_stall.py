# SPDX-License-Identifier: Apache-2.0
"""Stalls for memory from map to family. The map is in memory; its layout is the object's."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.unit.memory import MachineOfCgroups, Memory, changed, load
from writeback_exporter.features import Refused
from writeback_exporter.kernel.loader import Kernel
from writeback_exporter.metrics.exposition import Labels, Snapshot
from writeback_exporter.names.cgroups import EventKind, Hierarchies
from writeback_exporter.probes import memory_stall
from writeback_exporter.probes.memory_stall import MemoryStall

Rows = dict[Labels, tuple[list[int], int]]


def rows(snapshot: Snapshot) -> Rows:
    (histogram,) = snapshot.histograms
    return {labels: (list(slots), total) for labels, slots, total in histogram.rows()}


class Machine(MachineOfCgroups[Rows]):
    def __init__(self, sysfs: Path) -> None:
        self.probe = MemoryStall()
        super().__init__(sysfs, self.probe, rows)
        stalls = self.probe.file.map("memory_stall").value
        stalled = self.probe.file.map("stalled").value
        assert stalls is not None
        assert stalled is not None
        self.stalls, self.map = stalls, Memory(8, stalls.size, 8192)
        maps = {"memory_stall": self.map, "stalled": Memory(4, stalled.size, 16384)}
        load(self.probe, maps)

    def stalled(self, cgroup: int, slot: int, times: int) -> None:
        slots = [0] * self.stalls.fields["slots"].count
        slots[slot] = times
        self.map.entries[cgroup.to_bytes(8, sys.byteorder)] = changed(
            self.stalls, None, {"total_ns": times * 1000, "slots": slots}
        )


def test_stalls_and_a_restarted_service(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.event(EventKind.MKDIR, 5, "/a")
    machine.stalled(5, 3, times=4)
    machine.exit(5, "/a")
    machine.event(EventKind.MKDIR, 50, "/a")
    machine.stalled(50, 3, times=1)
    for found in (machine.scrape(), machine.scrape_until_retention_is_over()):
        slots, total = found["/a",]
        assert (slots[3], sum(slots), total) == (5, 5, 5000)
    assert len(machine.map.entries) == 1


@pytest.mark.parametrize(("has_function", "has_files"), [(False, True), (True, False)])
def test_no_psi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_function: bool, has_files: bool
) -> None:
    """Built without, or switched off: then the functions are there, and do nothing."""
    files = tmp_path if has_files else tmp_path / "absent"
    monkeypatch.setattr(memory_stall, "_PRESSURE", str(files))
    kernel = cast(Kernel, SimpleNamespace(has_function=lambda name: has_function))
    with pytest.raises(Refused, match="psi=1") as caught:
        MemoryStall().load(kernel, cast(Hierarchies, SimpleNamespace(memory_v1=False)))
    assert caught.value.reason == "PSI off"
