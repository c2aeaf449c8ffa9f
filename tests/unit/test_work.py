# SPDX-License-Identifier: Apache-2.0
"""Writeback work from maps to families. The maps are in memory; their layout is the object's."""

from __future__ import annotations

import mmap
import sys
import time
from pathlib import Path

import pytest

from tests.unit.memory import MachineOfCgroups, Memory, changed, extent, load
from writeback_exporter.kernel.libbpf import KernelBtf
from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.catalogue import Metric
from writeback_exporter.metrics.exposition import Labels, Snapshot
from writeback_exporter.probes.work import Work, reasons

BACKGROUND, SYNC, UNNAMED = 0, 2, 9
NAMES = {BACKGROUND: "background", 1: "vmscan", SYNC: "sync", 3: "periodic"}


class Scraped:
    """What one scrape exports."""

    def __init__(self, snapshot: Snapshot) -> None:
        (self.duration,) = snapshot.histograms
        self.rows = {labels: (sum(slots), total) for labels, slots, total in self.duration.rows()}
        self.families = {family.metric: family for family in snapshot.families}

    def of(self, metric: Metric) -> dict[Labels, float]:
        rows = self.families[metric].rows
        found = dict(rows)
        assert len(found) == len(rows), "a series is there twice"
        return found

    @property
    def bytes(self) -> dict[Labels, float]:
        return self.of(catalogue.WORK_BYTES)

    @property
    def oldest(self) -> dict[Labels, float]:
        return self.of(catalogue.WORK_OLDEST_SECONDS)


class Machine(MachineOfCgroups[Scraped]):
    """A machine's BDIs and flushers; its methods do to the maps what bpf/work.bpf.c does."""

    def __init__(self, sysfs: Path) -> None:
        self.probe = Work()
        self.probe.reasons = NAMES
        super().__init__(sysfs, self.probe, Scraped)
        bdi, opened = self.probe.file.map("bdis").value, self.probe.file.map("running").value
        assert bdi is not None
        assert opened is not None
        self.bdi, self.opened = bdi, opened
        self.maps = {
            "bdis": Memory(8, bdi.size, 1024),
            "queued": Memory(8, opened.size, 8192),
            "running": Memory(4, opened.size, 1024),
        }
        works = extent(bdi, "works[0].ns", "works[11].pages")
        load(self.probe, self.maps, counters={"bdis": [works]})

    def plug(self, bdi: int, name: str) -> None:
        (self.sysfs / "class/bdi" / name).mkdir(exist_ok=True)
        entries = self.maps["bdis"].entries
        entries[_u64(bdi)] = changed(self.bdi, None, {"name": name.encode()})

    def unplug(self, name: str) -> None:
        (self.sysfs / "class/bdi" / name).rmdir()

    def done(self, bdi: int, reason: int, ns: int = 1 << 25, pages: int = 1) -> None:
        """One more piece of work that lasted 2^20 ns or less, or more than 2^24 up to 2^25."""
        entries, fields = self.maps["bdis"].entries, ("ns", "slots", "pages")
        before = entries[_u64(bdi)]
        row = f"works[{reason}]"
        total, *slots, written = self.bdi.pick(*(f"{row}.{f}" for f in fields)).unpack(before)
        slots[0 if ns <= 1 << 20 else 5] += 1
        values = {f"{row}.ns": total + ns, f"{row}.slots": slots, f"{row}.pages": written + pages}
        entries[_u64(bdi)] = changed(self.bdi, before, values)

    def open(self, name: str, key: int, bdi: int, reason: int, ago: float) -> None:
        begin = time.monotonic_ns() - round(ago * 1e9)
        bpf_map = self.maps[name]
        bpf_map.entries[key.to_bytes(bpf_map.key_size, sys.byteorder)] = changed(
            self.opened, None, {"bdi": bdi, "begin_ns": begin, "reason": reason}
        )


def _u64(number: int) -> bytes:
    return number.to_bytes(8, sys.byteorder)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.plug(1, "8:0")
    made.plug(2, "0:40")
    return made


def test_reasons_are_the_kernels() -> None:
    """Of this machine's kernel: renumbered in 7.0, and some went and came."""
    kernel = KernelBtf()
    found = reasons(kernel)
    kernel.close()
    assert {"background", "vmscan", "sync", "periodic", "fs_free_space"} <= set(found.values())
    assert "max" not in found.values()
    assert sorted(found) == list(range(len(found)))


def test_rows(machine: Machine) -> None:
    machine.done(1, SYNC, pages=3)
    machine.done(1, SYNC, pages=0)
    machine.done(2, BACKGROUND, ns=7, pages=1)
    scraped = machine.scrape()
    assert scraped.rows == {("8:0", "sync"): (2, 2 << 25), ("0:40", "background"): (1, 7)}
    assert scraped.bytes == {
        ("8:0", "sync"): 3 * mmap.PAGESIZE,
        ("0:40", "background"): mmap.PAGESIZE,
    }
    (slots,) = (s for labels, s, _ in scraped.duration.rows() if labels[0] == "8:0")
    assert {scraped.duration.first_exponent + i: n for i, n in enumerate(slots) if n} == {25: 2}


def test_reasons_without_a_name_are_others(machine: Machine) -> None:
    last = sum(name.endswith("].ns") for name in machine.bdi.fields) - 1
    machine.probe.reasons = {**NAMES, last: "never"}
    machine.done(1, UNNAMED)
    machine.done(1, last)  # what is beyond the rows is in the last one
    machine.open("running", 1, 1, last + 40, 3)
    scraped = machine.scrape()
    assert scraped.rows == {("8:0", "other"): (2, 2 << 25)}
    assert scraped.oldest == {("8:0", "other"): pytest.approx(3, abs=1)}


def test_oldest(machine: Machine) -> None:
    machine.done(1, BACKGROUND)
    machine.open("queued", 1, 1, SYNC, 100)
    machine.open("queued", 2, 1, SYNC, 200)
    machine.open("running", 1, 1, SYNC, 300)
    machine.open("running", 2, 2, SYNC, 50)
    assert machine.scrape().oldest == {
        ("8:0", "background"): 0,
        ("8:0", "sync"): pytest.approx(300, abs=10),
        ("0:40", "sync"): pytest.approx(50, abs=10),
    }


def test_work_that_begins_while_the_maps_are_read(machine: Machine) -> None:
    machine.open("running", 1, 1, SYNC, -5)
    assert machine.scrape().oldest == {("8:0", "sync"): 0}


def test_open_work_of_a_bdi_that_is_gone(machine: Machine) -> None:
    """The kernel waits for it before it takes the BDI out of sysfs: we have missed its end."""
    machine.done(1, SYNC)
    machine.open("queued", 1, 1, SYNC, 100)
    machine.open("running", 1, 1, SYNC, 100)
    machine.open("running", 2, 77, SYNC, 100)  # of a BDI that found no room
    machine.open("running", 3, 2, SYNC, 100)
    machine.unplug("8:0")
    machine.scrape()
    assert machine.scrape().oldest == {
        ("8:0", "sync"): 0,
        ("0:40", "sync"): pytest.approx(100, abs=10),
    }
    assert not machine.maps["queued"].entries
    assert len(machine.maps["running"].entries) == 1


def test_a_bdi_that_is_gone_is_exported_and_then_its_entry_goes(machine: Machine) -> None:
    machine.done(1, SYNC)
    machine.unplug("8:0")
    assert machine.scrape().rows == {("8:0", "sync"): (1, 1 << 25)}
    assert machine.scrape_until_retention_is_over().rows == {}
    assert len(machine.maps["bdis"].entries) == 1


def test_a_bdi_replaced_under_its_name_counts_on(machine: Machine) -> None:
    machine.done(1, SYNC)
    machine.done(1, BACKGROUND)
    machine.plug(9, "8:0")
    machine.done(9, SYNC, pages=4)
    for scraped in (machine.scrape(), machine.scrape_until_retention_is_over()):
        assert scraped.rows == {
            ("8:0", "sync"): (2, 2 << 25),
            ("8:0", "background"): (1, 1 << 25),
        }
        assert scraped.bytes["8:0", "sync"] == 5 * mmap.PAGESIZE
    assert len(machine.maps["bdis"].entries) == 2
