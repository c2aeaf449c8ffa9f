# SPDX-License-Identifier: Apache-2.0
"""Sync calls by fentry: counted exactly, open ones seen, and no end lost for good."""

from __future__ import annotations

import os
import platform
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import lab
from tests.calls import COUNTS, ERRORS, HANGING, SYNC_CALLS, stuck_disk
from tests.waiting import PATIENCE_SECONDS, wait_for
from writeback_exporter.collector import Host
from writeback_exporter.kernel.libbpf import Object
from writeback_exporter.kernel.loader import Kernel
from writeback_exporter.metrics.exposition import Snapshot
from writeback_exporter.names.cgroups import Cgroups
from writeback_exporter.names.devices import Devices
from writeback_exporter.probes.sync import Sync

from .test_main_signals import FAST

OPEN, COUNT, SUM = "sync_open_seconds", "sync_seconds_count", "sync_seconds_sum"


def exporter_of_calls() -> lab.Exporter:
    """Without the other collectors, which take their time to start."""
    return lab.Exporter(*lab.only("sync"))


def calls_of(scrape: lab.Scrape, cgroup: str) -> dict[str, tuple[float, float]]:
    """Number and errors of each call."""
    return {
        call: (
            scrape.sum(COUNT, cgroup=cgroup, call=call),
            scrape.sum("sync_errors_total", cgroup=cgroup, call=call),
        )
        for call in scrape.values(COUNT, "call", cgroup=cgroup)
    }


def test_calls_are_counted_exactly_by_two_exporters(tmp_path: Path) -> None:
    with (
        lab.ext4(FAST, tmp_path) as mount,
        exporter_of_calls() as first,
        exporter_of_calls() as second,
        lab.cgroup(lab.hierarchies().task, "sync") as group,
    ):
        took = lab.run_in([group], SYNC_CALLS, mount / "file")
        seconds = dict(line.split() for line in took.splitlines())
        for scrape in (first.scrape(), second.scrape()):
            assert scrape.sum("exporter_feature_available", feature="sync_fentry") == 1
            assert calls_of(scrape, "/sync") == {c: (COUNTS[c], ERRORS[c]) for c in COUNTS}
            for call in COUNTS:
                labels = {"cgroup": "/sync", "call": call}
                # What the program measured around the calls has all of them in it.
                assert 0 < scrape.sum(SUM, **labels) <= float(seconds[call])
                assert [*scrape.select(OPEN, **labels).values()] == [0]
            assert not any(scrape.select("exporter_map_dropped_total").values())


COMPAT_CALLS = """
import ctypes, mmap
# As a 32 bit program calls: push %rbx; mov %edi,%eax; mov %esi,%ebx; int $0x80; pop %rbx; ret
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("53 89f8 89f3 cd80 5b c3"))
address = ctypes.addressof(ctypes.c_char.from_buffer(code))
call = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int)(address)
fd = os.open(arguments[0], os.O_RDWR | os.O_CREAT, 0o600)
# fsync, fdatasync, sync, syncfs (arch/x86/entry/syscalls/syscall_32.tbl)
print(*(call(number, fd) for number in (118, 118, 148, 36, 344)))
# fsync, sync_file_range of no descriptor, msync of an address within a page
print(*(call(number, value) < 0 for number, value in ((118, -1), (314, -1), (144, 1))))
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="int $0x80 is x86's")
def test_calls_of_32_bit_programs(tmp_path: Path) -> None:
    with exporter_of_calls() as exporter, lab.cgroup(lab.hierarchies().task, "compat") as group:
        said = lab.run_in([group], COMPAT_CALLS, tmp_path / "file")
        assert said.split() == ["0"] * 5 + ["True"] * 3
        assert calls_of(exporter.scrape(), "/compat") == {
            "fsync": (3, 1),
            "fdatasync": (1, 0),
            "sync": (1, 0),
            "syncfs": (1, 0),
            "msync": (1, 1),
            "sync_file_range": (1, 1),
        }


def test_killed_in_a_call_of_a_stuck_disk(tmp_path: Path) -> None:
    """The kernel lets nobody die before the pages are written, so the call does return, in the
    kernel, and its end is seen."""
    labels = {"cgroup": "/killed", "call": "fsync"}
    with (
        exporter_of_calls() as exporter,
        lab.cgroup(lab.hierarchies().task, "killed") as group,
        stuck_disk(FAST, tmp_path) as (stuck, release),
    ):
        process = lab.spawn_in([group], HANGING, stuck.path, tmp_path / "go")
        assert process.stdout is not None
        assert process.stdout.readline() == "calls\n"
        wait_for(lambda: exporter.scrape().sum(OPEN, **labels) > 0, what="the call")
        first, between = exporter.scrape(), time.monotonic()
        assert first.sum(OPEN, **labels) > 0
        assert not first.select(COUNT, **labels)
        process.send_signal(signal.SIGKILL)
        time.sleep(0.5)
        waited = time.monotonic() - between
        second = exporter.scrape()
        assert second.sum(OPEN, **labels) - first.sum(OPEN, **labels) >= waited
        assert process.poll() is None
        release()
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
        assert (output, process.returncode) == ("", -signal.SIGKILL)
        scrape = exporter.scrape()
        assert scrape.sum(OPEN, **labels) == 0
        assert scrape.sum(COUNT, **labels) == 1
        assert scrape.sum(SUM, **labels) >= second.sum(OPEN, **labels)
        assert scrape.sum("exporter_map_entries", map="sync/open_calls") == 0
        assert not any(scrape.select("exporter_map_dropped_total").values())


def test_an_end_that_is_not_shown(tmp_path: Path) -> None:
    """When another exporter detaches, the kernel replaces the functions' trampolines, and a call
    that is open then ends without its fexit programs. It is not open for ever all the same."""
    labels = {"cgroup": "/hidden", "call": "fsync"}
    go = tmp_path / "go"
    with (
        exporter_of_calls() as exporter,
        lab.cgroup(lab.hierarchies().task, "hidden") as group,
        stuck_disk(FAST, tmp_path) as (stuck, release),
    ):
        with exporter_of_calls():
            process = lab.spawn_in([group], HANGING, stuck.path, go)
            assert process.stdout is not None
            assert process.stdout.readline() == "calls\n"
            wait_for(lambda: exporter.scrape().sum(OPEN, **labels) > 0, what="the call")
        time.sleep(2)
        # It is looked at by now, and found to be open.
        assert exporter.scrape().sum(OPEN, **labels) > 2
        release()
        assert process.stdout.readline() == "returned\n"
        scrape = exporter.scrape()
        lost = scrape.sum("exporter_map_dropped_total", map="sync/open_calls")
        print(f"on {os.uname().release} {lost:.0f} end was lost")
        assert scrape.sum(OPEN, **labels) == 0
        assert scrape.sum(COUNT, **labels) + lost == 1
        # The same thread's next call is counted.
        go.touch()
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
        assert output == "calls\nreturned\n"
        scrape = exporter.scrape()
        assert scrape.sum(COUNT, **labels) + lost == 2
        assert scrape.sum("exporter_map_dropped_total", map="sync/open_calls") == lost
        assert scrape.sum(OPEN, **labels) == 0


def test_what_finds_no_room_is_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for one cgroup and call, beside the entries of `other` for each call."""
    load = Object.load

    def load_smaller(self: Object) -> None:
        self.maps["sync"].max_entries = len(COUNTS) + 1
        load(self)

    monkeypatch.setattr(Object, "load", load_smaller)
    probe, hierarchies, kernel = Sync(), lab.hierarchies(), Kernel()
    host = Host(Cgroups(hierarchies), Devices("/sys"))
    with ExitStack() as stack:
        stack.callback(probe.close)
        stack.callback(kernel.close)
        probe.load(kernel, hierarchies)
        groups = [
            stack.enter_context(lab.cgroup(hierarchies.task, name)) for name in ("full-1", "full-2")
        ]
        for group in groups:
            lab.run_in([group], SYNC_CALLS, tmp_path / "file")
        host.cgroups.walk(0.0)
        probe.read()
        snapshot = Snapshot()
        probe.fill(snapshot, host)
        (histogram,) = snapshot.histograms
        counts = {labels: sum(slots) for labels, slots, _ in histogram.rows()}
        dropped = probe.drops()
    expected = {("other", call): 2 * count for call, count in COUNTS.items()}
    expected["other", "fsync"] -= COUNTS["fsync"]
    expected["/full-1", "fsync"] = COUNTS["fsync"]
    assert counts == expected
    assert dropped == {"sync": 2 * sum(COUNTS.values()) - COUNTS["fsync"], "open_calls": 0}
