# SPDX-License-Identifier: Apache-2.0
"""SQPOLL threads from the map of owners and a procfs; fdinfo is in the form of several kernels."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.unit.files import Machine, no_descriptors
from tests.unit.memory import Memory
from writeback_exporter import privileges
from writeback_exporter.features import Refused
from writeback_exporter.kernel.libbpf import Object
from writeback_exporter.kernel.loader import Kernel
from writeback_exporter.privileges import Capability
from writeback_exporter.probes import io_uring
from writeback_exporter.probes.io_uring import IoUring

RING, OTHER_FILE = "anon_inode:[io_uring]", "anon_inode:[eventpoll]"

Times = dict[str, tuple[float, float]]
"""Total and busy seconds by cgroup."""


def fdinfo(thread: int, total: int, busy: int, cpu: int = 0) -> str:
    """As 6.18 prints it; times in microseconds."""
    return f"""\
pos:	0
flags:	02000002
mnt_id:	17
ino:	630765
SqMask:	0x7
SqHead:	0
SqTail:	0
CachedSqHead:	0
CqMask:	0xf
CqHead:	0
CqTail:	0
CachedCqTail:	0
SQEs:	0
CQEs:	0
SqThread:	{thread}
SqThreadCpu:	{cpu}
SqTotalTime:	{total}
SqWorkTime:	{busy}
UserFiles:	1
    0: evil
SqThread:	1
SqTotalTime:	9
UserBufs:	0
PollList:
CqOverflowList:
NAPI:	disabled
"""


LOCKED_6_12 = fdinfo(-1, 0, 0, cpu=-1)
LOCKED_6_18 = "pos:\t0\nflags:\t02000002\nmnt_id:\t17\nino:\t630765\n"


NOWHERE = Path("/nowhere")


class Processes(Machine):
    """A machine on which processes make rings, and the probe that follows them."""

    def __init__(self, place: Path) -> None:
        super().__init__(place)
        self.probe = IoUring()
        self.owner = self.probe._fields
        self.owners = Memory(4, self.owner.size, 4096)
        maps = {"ring_owners": self.owners}
        self.probe.bpf = cast(Object, SimpleNamespace(maps=maps, attached=()))
        self.probe._hierarchy = self.hierarchy

    def start(self, process: int, cgroup: str = "/a") -> None:
        directory = self.procfs / str(process)
        for name in ("fd", "fdinfo"):
            (directory / name).mkdir(parents=True)
        self.thread(process, process, "worker", cgroup)
        self.descriptor(process, 0, "/dev/null", "pos:\t0\n")
        self.descriptor(process, 1, OTHER_FILE, fdinfo(1, 10**9, 10**9))

    def thread(self, process: int, thread: int, name: str, cgroup: str = "/a") -> None:
        """A thread; procfs has it also below its own number, though no listing shows it."""
        task = self.procfs / str(process) / "task" / str(thread)
        self.write(task, {"comm": name})
        text = f"9:name=systemd:/\n4:memory:/elsewhere\n0::{cgroup}"
        self.write(self.procfs / str(thread), {"comm": name, "cgroup": text})

    def descriptor(self, process: int, fd: int, target: str, info: str) -> None:
        directory = self.procfs / str(process)
        (directory / "fd" / str(fd)).unlink(missing_ok=True)
        (directory / "fd" / str(fd)).symlink_to(target)
        (directory / "fdinfo" / str(fd)).write_text(info)

    def make(self, process: int, fd: int, info: str, cgroup: int = 0) -> None:
        """The process makes a ring in a cgroup, which the kernel shows to the program."""
        self.descriptor(process, fd, RING, info)
        key = process.to_bytes(4, sys.byteorder)
        made, first = self.owner.unpack(self.owners.entries.get(key, bytes(16)))
        self.owners.update(key, self.owner.pack(made + 1, first or cgroup))

    def end(self, *numbers: int) -> None:
        for number in numbers:
            shutil.rmtree(self.procfs / str(number))

    def times(self) -> Times:
        samples = self.scrape(self.probe)
        totals = samples.get("io_uring_sq_seconds_total", {})
        busy = samples.get("io_uring_sq_busy_seconds_total", {})
        assert totals.keys() == busy.keys()
        return {labels[0]: (totals[labels], busy[labels]) for labels in totals}


@pytest.fixture
def machine(tmp_path: Path) -> Processes:
    made = Processes(tmp_path)
    made.cgroup("/a")
    made.cgroup("/b")
    return made


# Counting ----------------------------------------------------------------------------------------


def test_nobody_has_a_ring(machine: Processes) -> None:
    machine.start(100)
    assert machine.times() == {}


def test_a_ring(machine: Processes) -> None:
    machine.start(100)
    machine.thread(100, 101, "iou-sqp-100")
    machine.make(100, 3, fdinfo(101, 2_500_000, 500_000))
    assert machine.times() == {"/a": (2.5, 0.5)}
    machine.descriptor(100, 3, RING, fdinfo(101, 3_000_000, 600_000))
    assert machine.times() == {"/a": (3.0, 0.6)}


def test_a_shared_thread_is_counted_once(machine: Processes) -> None:
    """By dup(), by IORING_SETUP_ATTACH_WQ, and by a descriptor that was sent to another owner."""
    for process in (100, 200):
        machine.start(process, "/a" if process == 100 else "/b")
    machine.thread(100, 101, "iou-sqp-100", "/a")
    machine.thread(200, 201, "iou-sqp-200", "/b")
    machine.make(100, 3, fdinfo(101, 1_000_000, 0))
    machine.make(100, 4, fdinfo(101, 1_000_000, 0))
    machine.descriptor(100, 5, RING, fdinfo(101, 1_000_000, 0))
    machine.descriptor(200, 6, RING, fdinfo(101, 1_000_000, 0))
    machine.make(200, 7, fdinfo(201, 5_000_000, 0))
    assert machine.times() == {"/a": (1.0, 0), "/b": (5.0, 0)}
    assert machine.times() == {"/a": (1.0, 0), "/b": (5.0, 0)}


def test_threads_of_a_cgroup_are_added_up(machine: Processes) -> None:
    machine.start(100)
    for thread in (101, 102):
        machine.thread(100, thread, "iou-sqp-100")
        machine.make(100, thread, fdinfo(thread, 1_000_000, 250_000))
    assert machine.times() == {"/a": (2.0, 0.5)}


def test_what_has_ended_stays_counted(machine: Processes) -> None:
    machine.start(100)
    machine.thread(100, 101, "iou-sqp-100")
    machine.make(100, 3, fdinfo(101, 1_000_000, 100_000))
    assert machine.times() == {"/a": (1.0, 0.1)}
    machine.end(100, 101)
    assert machine.times() == {"/a": (1.0, 0.1)}
    assert machine.owners.entries == {}
    # Its numbers come again.
    machine.start(100)
    machine.thread(100, 101, "iou-sqp-100")
    machine.make(100, 3, fdinfo(101, 2_000_000, 0))
    assert machine.times() == {"/a": (3.0, 0.1)}


def test_a_thread_with_the_number_of_one_that_has_ended(machine: Processes) -> None:
    machine.start(100)
    machine.thread(100, 101, "iou-sqp-100")
    machine.make(100, 3, fdinfo(101, 2_000_000, 100_000))
    assert machine.times() == {"/a": (2.0, 0.1)}
    machine.make(100, 3, fdinfo(101, 500_000, 50_000))
    assert machine.times() == {"/a": (2.5, 0.15)}


@pytest.mark.parametrize("locked", [LOCKED_6_12, LOCKED_6_18], ids=["6.12", "6.18"])
def test_a_ring_that_is_locked(machine: Processes, locked: str) -> None:
    machine.start(100)
    machine.thread(100, 101, "iou-sqp-100")
    machine.make(100, 3, locked)
    assert machine.times() == {}
    machine.descriptor(100, 3, RING, fdinfo(101, 1_000_000, 0))
    assert machine.times() == {"/a": (1.0, 0)}
    machine.descriptor(100, 3, RING, locked)
    assert machine.times() == {"/a": (1.0, 0)}
    machine.descriptor(100, 3, RING, fdinfo(101, 1_500_000, 0))
    assert machine.times() == {"/a": (1.5, 0)}


def test_a_thread_that_has_not_begun(machine: Processes) -> None:
    """The kernel then says the thread that made the ring."""
    machine.start(100)
    machine.make(100, 3, fdinfo(100, 0, 0, cpu=-1))
    assert machine.times() == {}


def test_a_process_that_moves(machine: Processes) -> None:
    machine.start(100)
    machine.thread(100, 101, "iou-sqp-100", "/a")
    machine.make(100, 3, fdinfo(101, 1_000_000, 0))
    machine.times()
    machine.thread(100, 101, "iou-sqp-100", "/b")
    machine.descriptor(100, 3, RING, fdinfo(101, 1_200_000, 0))
    times = machine.times()
    assert times["/a"] == (1.0, 0)
    assert times["/b"] == (0.2, 0)


def test_a_cgroup_outside_of_what_is_mounted(machine: Processes) -> None:
    machine.start(100)
    machine.thread(100, 101, "iou-sqp-100", "/../elsewhere")
    machine.make(100, 3, fdinfo(101, 1_000_000, 0))
    assert machine.times() == {"other": (1.0, 0)}


def test_a_cgroup_that_is_made_during_the_scrape(machine: Processes) -> None:
    """Its event is taken in at the next one."""
    (machine.cgroupfs / "new").mkdir()
    machine.start(100)
    machine.thread(100, 101, "iou-sqp-100", "/new")
    machine.make(100, 3, fdinfo(101, 1_000_000, 0))
    assert machine.times() == {}
    (machine.cgroupfs / "new").rmdir()
    machine.cgroup("/new")
    assert machine.times() == {"/new": (1.0, 0)}


def test_seen_from_a_cgroup_namespace(machine: Processes) -> None:
    """Paths then lead out of it; the cgroup is where the process made its first ring."""
    a, b = ((machine.cgroupfs / name).stat().st_ino for name in ("a", "b"))
    for process, cgroup in ((100, a), (200, b), (300, 0)):
        machine.start(process)
        machine.thread(process, process + 1, "iou-sqp", "/../../b")
        machine.make(process, 3, fdinfo(process + 1, 1_000_000, 0), cgroup)
    assert machine.times() == {"/a": (1.0, 0), "/b": (1.0, 0), "other": (1.0, 0)}


def test_a_cgroup_with_a_line_end_in_its_name(machine: Processes) -> None:
    machine.cgroup("/a\rb")
    machine.start(100)
    machine.thread(100, 101, "iou-sqp-100", "/a\rb")
    machine.make(100, 3, fdinfo(101, 1_000_000, 0))
    assert machine.times() == {"/a\rb": (1.0, 0)}


def test_a_removed_cgroup(machine: Processes) -> None:
    machine.start(100)
    machine.thread(100, 101, "iou-sqp-100")
    machine.make(100, 3, fdinfo(101, 1_000_000, 0))
    machine.times()
    machine.end(100, 101)
    machine.remove("/a")
    assert machine.times() == {"/a": (1.0, 0)}
    machine.cgroup("/a")  # as a service that is started again
    machine.scrape_until_over(machine.probe)
    assert machine.times() == {"/a": (1.0, 0)}
    machine.remove("/a")
    machine.scrape_until_over(machine.probe)
    assert machine.times() == {}


# Owners ------------------------------------------------------------------------------------------


def test_a_ring_that_was_there_before(machine: Processes) -> None:
    machine.start(100)
    machine.thread(100, 101, "iou-sqp-100")
    machine.descriptor(100, 3, RING, fdinfo(101, 1_000_000, 0))
    machine.start(200)
    machine.thread(200, 201, "pool-worker")
    machine.descriptor(200, 3, RING, fdinfo(-1, 0, 0, cpu=-1))
    assert machine.times() == {"/a": (1.0, 0)}
    machine.descriptor(100, 3, RING, fdinfo(101, 2_000_000, 0))
    assert machine.times() == {"/a": (2.0, 0)}


def test_rings_are_kept_where_no_file_can_be_opened(machine: Processes) -> None:
    """Neither one of the map nor one that was there before is taken for closed."""
    machine.start(100)
    machine.thread(100, 101, "iou-sqp-100")
    machine.descriptor(100, 3, RING, fdinfo(101, 1_000_000, 0))
    machine.start(200, "/b")
    machine.thread(200, 201, "iou-sqp-200", "/b")
    machine.make(200, 3, fdinfo(201, 2_000_000, 0))
    with no_descriptors(), pytest.raises(OSError, match="Too many open files"):
        machine.times()
    assert machine.times() == {"/a": (1, 0), "/b": (2, 0)}
    machine.make(200, 4, fdinfo(201, 3_000_000, 0))
    # Both rings have one thread, whose time is the same; which is read first is the file system's.
    machine.descriptor(200, 3, RING, fdinfo(201, 3_000_000, 0))
    with no_descriptors(), pytest.raises(Refused, match="Too many open files"):
        machine.times()
    assert machine.times() == {"/a": (1, 0), "/b": (3, 0)}


def test_descriptors_are_listed_once(machine: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.start(100)
    machine.thread(100, 101, "iou-sqp-100")
    machine.make(100, 3, fdinfo(101, 1_000_000, 0))
    listed: list[str] = []

    def noted(real: Callable[[str], object]) -> Callable[[str], object]:
        def listing(path: str) -> object:
            listed.append(path)
            return real(path)

        return listing

    monkeypatch.setattr(os, "listdir", noted(os.listdir))
    monkeypatch.setattr(os, "scandir", noted(os.scandir))
    machine.times()
    machine.times()
    assert listed.count(f"{machine.procfs}/100/fd") == 1
    assert listed.count(str(machine.procfs)) == 1, "one walk at start"
    machine.thread(100, 102, "iou-sqp-100")
    machine.make(100, 4, fdinfo(102, 500_000, 0))
    assert machine.times() == {"/a": (1.5, 0)}
    # The first descriptor is closed, a copy of it stays.
    machine.descriptor(100, 3, OTHER_FILE, "")
    machine.descriptor(100, 9, RING, fdinfo(101, 3_000_000, 0))
    assert machine.times() == {"/a": (3.5, 0)}
    assert listed.count(f"{machine.procfs}/100/fd") == 3


def test_a_process_without_a_ring_any_more(machine: Processes) -> None:
    machine.start(100)
    machine.thread(100, 101, "iou-sqp-100")
    machine.make(100, 3, fdinfo(101, 1_000_000, 0))
    machine.times()
    machine.descriptor(100, 3, OTHER_FILE, "")
    machine.times()
    assert machine.owners.entries == {}


def test_a_ring_that_is_made_while_its_owner_is_given_up(machine: Processes) -> None:
    machine.start(100)
    machine.thread(100, 101, "iou-sqp-100")
    machine.make(100, 3, fdinfo(101, 1_000_000, 0))
    machine.descriptor(100, 3, OTHER_FILE, "")
    machine.probe.read()
    key = (100).to_bytes(4, sys.byteorder)
    machine.owners.update(key, machine.owner.pack(2, 0))
    machine.probe._disown(100, made=1)
    assert machine.owners.entries.keys() == {key}


# What a kernel gives -----------------------------------------------------------------------------


class Btf:
    """A kernel's type information as far as the probe asks."""

    def __init__(self, arity: int | None = 5, times: bool = True) -> None:
        self._arity, self._times = arity, times

    def tracepoint_arity(self, name: str) -> int | None:
        assert name == "io_uring_create"
        return self._arity

    def has_field(self, struct: str, field: str) -> bool:
        assert (struct, field) == ("io_sq_data", "work_time")
        return self._times


def refused(btf: Btf, procfs: Path = NOWHERE) -> Refused:
    with pytest.raises(Refused) as error:
        io_uring._check(kernel(btf, procfs))
    return error.value


def kernel(btf: Btf, procfs: Path) -> Kernel:
    return cast(Kernel, SimpleNamespace(btf=btf, procfs=str(procfs)))


def test_a_kernel_without_io_uring() -> None:
    assert refused(Btf(arity=None)).reason == "no io_uring"


def test_a_kernel_that_does_not_tell_times() -> None:
    assert refused(Btf(times=False)).reason == "not in this kernel"


def test_io_uring_is_switched_off(tmp_path: Path) -> None:
    (tmp_path / "sys/kernel").mkdir(parents=True)
    (tmp_path / "sys/kernel/io_uring_disabled").write_text("2\n")
    assert refused(Btf(), tmp_path).reason == "switched off"


def test_a_procfs_of_another_pid_namespace(tmp_path: Path) -> None:
    """Its numbers are not the kernel's."""
    (tmp_path / "1/ns").mkdir(parents=True)
    (tmp_path / "1/ns/pid").touch()
    assert refused(Btf(), tmp_path).reason == "pid namespace"


def test_rights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whom fdinfo may be read: CAP_SYS_PTRACE, and one of two to list the descriptors."""
    held: set[Capability] = set()

    def sets() -> privileges._Sets:
        return privileges._Sets(privileges._mask(held), 0, 0)

    monkeypatch.setattr(privileges._Sets, "of_this_thread", sets)
    reading, override = Capability.DAC_READ_SEARCH, Capability.DAC_OVERRIDE
    for some, lacking in (
        (set(), "CAP_DAC_READ_SEARCH and CAP_SYS_PTRACE"),
        ({Capability.SYS_PTRACE}, "CAP_DAC_READ_SEARCH"),
        ({reading, override}, "CAP_SYS_PTRACE"),
    ):
        held.clear()
        held.update(some)
        refusal = refused(Btf())
        assert refusal.reason == "no right"
        assert refusal.detail.endswith(f": the exporter lacks {lacking}")
        assert refusal.remedy.startswith(f"grant {lacking} (")
    for enough in ({override, Capability.SYS_PTRACE}, {reading, Capability.SYS_PTRACE}):
        held.clear()
        held.update(enough)
        io_uring._check(kernel(Btf(), NOWHERE))
