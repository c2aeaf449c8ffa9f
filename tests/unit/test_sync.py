# SPDX-License-Identifier: Apache-2.0
"""Sync calls from maps to families. The maps are in memory; their layout is the object's."""

from __future__ import annotations

import platform
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.unit.memory import MachineOfCgroups, Memory, changed, load
from writeback_exporter.features import Refused
from writeback_exporter.kernel.loader import Kernel
from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.exposition import Labels, Snapshot
from writeback_exporter.names.cgroups import OTHER, OTHER_ID, EventKind, Hierarchies
from writeback_exporter.probes.sync import Sync

FSYNC, FDATASYNC, SYNC = range(3)


class Scraped:
    def __init__(self, snapshot: Snapshot) -> None:
        (histogram,) = snapshot.histograms
        self.rows = {labels: (list(slots), total) for labels, slots, total in histogram.rows()}
        self.families = {family.metric.name: dict(family.rows) for family in snapshot.families}

    @property
    def counts(self) -> dict[Labels, int]:
        return {labels: sum(slots) for labels, (slots, _) in self.rows.items()}

    @property
    def open(self) -> dict[Labels, float]:
        return self.families[catalogue.SYNC_OPEN_SECONDS.name]

    @property
    def errors(self) -> dict[Labels, float]:
        return self.families[catalogue.SYNC_ERRORS.name]


class Machine(MachineOfCgroups[Scraped]):
    """Threads that make calls, and the probe; its methods do to the maps what bpf/sync.bpf.c does.
    `in_call` are those that the kernel finds in their call when it is asked."""

    def __init__(self, sysfs: Path) -> None:
        self.probe = Sync()
        super().__init__(sysfs, self.probe, Scraped)
        calls, open_calls = self.probe.file.map("sync"), self.probe.file.map("open_calls")
        assert calls.key is not None
        assert calls.value is not None
        assert open_calls.value is not None
        self.key, self.calls, self.open_call = calls.key, calls.value, open_calls.value
        self.sync = Memory(self.key.size, self.calls.size, 8192)
        self.open_calls = Memory(4, self.open_call.size, 8192)
        self.in_call: set[int] = set()
        self.asked: list[int] = []
        maps = {"sync": self.sync, "open_calls": self.open_calls}
        load(self.probe, maps, {"still_open": self._still_open})

    def _still_open(self, tid: int) -> int:
        self.asked.append(tid)
        if tid in self.in_call:
            return 1
        self.open_calls.delete(tid.to_bytes(4, sys.byteorder))
        return 0

    def called(self, cgroup: int, call: int, times: int = 1, errors: int = 0) -> None:
        """Calls that took 2^20 ns."""
        key = changed(self.key, None, {"cgroup": cgroup, "call": call})
        before = self.sync.entries.get(key)
        old = self.calls.pick("total_ns", "slots", "errors").unpack(
            before or bytes(self.calls.size)
        )
        total, *slots, failed = old
        slots[20 - self.probe.file.enum("sync_exponents")["SYNC_FIRST"]] += times
        self.sync.entries[key] = changed(
            self.calls,
            before,
            {"total_ns": total + (times << 20), "slots": slots, "errors": failed + errors},
        )

    def calls_now(self, tid: int, cgroup: int, call: int, ago_ns: int) -> None:
        self.open_calls.entries[tid.to_bytes(4, sys.byteorder)] = changed(
            self.open_call,
            None,
            {"key.cgroup": cgroup, "key.call": call, "start_ns": time.monotonic_ns() - ago_ns},
        )


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path)
    machine.event(EventKind.MKDIR, 5, "/a")
    machine.event(EventKind.MKDIR, 6, "/b")
    monkeypatch.setattr(time, "monotonic_ns", lambda: 10**15)
    return machine


def test_calls_and_errors(machine: Machine) -> None:
    machine.called(5, FSYNC, times=3, errors=1)
    machine.called(5, SYNC)
    machine.called(6, FSYNC)
    scraped = machine.scrape()
    assert scraped.counts == {("/a", "fsync"): 3, ("/a", "sync"): 1, ("/b", "fsync"): 1}
    assert scraped.rows["/a", "fsync"][1] == 3 << 20
    assert scraped.errors == {("/a", "fsync"): 1, ("/a", "sync"): 0, ("/b", "fsync"): 0}
    assert scraped.open == dict.fromkeys(scraped.counts, 0)


def test_all_calls_have_their_names(machine: Machine) -> None:
    for call in range(len(machine.probe.file.enum("sync_call"))):
        machine.called(5, call)
    assert {call for _, call in machine.scrape().counts} == {
        *("fsync", "fdatasync", "sync", "syncfs", "msync", "sync_file_range")
    }


def test_what_found_no_room_is_others(machine: Machine) -> None:
    machine.called(OTHER_ID, FSYNC, times=2)
    machine.called(99, FSYNC)  # of a cgroup that nobody knows: the same label
    assert machine.scrape().counts == {(OTHER, "fsync"): 3}


def test_the_oldest_open_call(machine: Machine) -> None:
    machine.called(5, FDATASYNC)
    machine.called(6, FSYNC)
    for tid, ago_ns in ((1, 3), (2, 5), (3, 4)):
        machine.calls_now(tid, 5, FSYNC, ago_ns)
    machine.calls_now(4, 6, FSYNC, 7)
    scraped = machine.scrape()
    # Of /a's fsync no call has returned yet: it is there all the same.
    assert scraped.open == {("/a", "fsync"): 5e-9, ("/a", "fdatasync"): 0, ("/b", "fsync"): 7e-9}
    assert scraped.counts.keys() == {("/a", "fdatasync"), ("/b", "fsync")}
    assert not machine.asked


def test_a_call_that_began_while_we_read_is_not_younger_than_now(machine: Machine) -> None:
    machine.calls_now(1, 5, FSYNC, -50)
    assert machine.scrape().open == {("/a", "fsync"): 0}


def test_what_is_open_for_long_is_looked_at(machine: Machine) -> None:
    machine.in_call = {1}
    machine.calls_now(1, 5, FSYNC, 60 * 10**9)
    machine.calls_now(2, 5, FSYNC, 90 * 10**9)  # returned, and nobody was shown its end
    machine.calls_now(3, 5, FSYNC, 10**9)
    assert machine.scrape().open == {("/a", "fsync"): 60}
    assert sorted(machine.asked) == [1, 2]
    assert len(machine.open_calls.entries) == 2


def test_restarted_service_counts_on(machine: Machine) -> None:
    machine.called(5, FSYNC, times=4, errors=2)
    machine.exit(5, "/a")
    machine.event(EventKind.MKDIR, 50, "/a")
    machine.called(50, FSYNC)
    for scraped in (machine.scrape(), machine.scrape_until_retention_is_over()):
        assert scraped.counts == {("/a", "fsync"): 5}
        assert scraped.errors == {("/a", "fsync"): 2}
    assert len(machine.sync.entries) == 1
    machine.exit(50, "/a")
    scraped = machine.scrape_until_retention_is_over()
    assert (scraped.counts, scraped.open, scraped.errors) == ({}, {}, {})


# Which functions ----------------------------------------------------------------------------------


class KernelOf:
    """A kernel whose BTF has these functions."""

    syscall_tracepoints = False
    require_fexit_of_sleepers = Kernel.require_fexit_of_sleepers

    def __init__(self, *functions: str, safe: bool = True) -> None:
        self.has_function = set(functions).__contains__
        self.btf = SimpleNamespace(has_struct=lambda name: safe)


def targets(*functions: str) -> dict[str, str]:
    return Sync()._targets(cast(Kernel, KernelOf(*functions)))


NATIVE = [
    *("__x64_sys_fsync", "__x64_sys_fdatasync", "__do_sys_sync", "__x64_sys_syncfs"),
    *("__x64_sys_msync", "__x64_sys_sync_file_range"),
]


def test_each_program_has_a_function_and_ends_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    found = targets(*NATIVE, "__ia32_sys_fsync")
    assert [*found.values()] == [*NATIVE, "__ia32_sys_fsync"] * 2
    assert found["fsync_compat_exit"] == found["fsync_compat_enter"] == "__ia32_sys_fsync"
    assert [name.rpartition("_")[2] for name in found] == ["exit"] * 7 + ["enter"] * 7


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_programs_are_the_objects(monkeypatch: pytest.MonkeyPatch, machine: str) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    probe = Sync()
    kernel = KernelOf()
    kernel.has_function = lambda name: True
    symbols = Path(probe.file.path).read_bytes()
    for program in probe._targets(cast(Kernel, kernel)):
        assert f"\0{program}\0".encode() in symbols


@pytest.mark.parametrize(
    ("machine", "kernel", "reason"),
    [
        ("x86_64", KernelOf(*NATIVE[:-1]), "not in this kernel"),
        ("x86_64", KernelOf(*NATIVE, safe=False), "unsafe fexit"),
        ("riscv64", KernelOf(*NATIVE), "unknown architecture"),
    ],
)
def test_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, machine: str, kernel: KernelOf, reason: str
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    probe = Sync()
    with pytest.raises(Refused, match=r"--sync\.tracepoints") as caught:
        probe.load(cast(Kernel, kernel), cast(Hierarchies, _Nowhere))
    assert caught.value.reason == reason


_Nowhere = SimpleNamespace(memory_v1=False, task=None)
