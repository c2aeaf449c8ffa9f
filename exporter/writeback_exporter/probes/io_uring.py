# SPDX-License-Identifier: Apache-2.0
"""Threads that poll io_uring submission queues (SQPOLL): bpf/io_uring.bpf.c and fdinfo.

The kernel says in /proc/PID/fdinfo/FD of a ring which thread polls it, how long that thread ran and
for how much of it there was work (since 6.9). Only processes that made such a ring are looked at,
and of them only descriptors that are rings: of others fdinfo may be long.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from writeback_exporter import privileges
from writeback_exporter.collector import Host
from writeback_exporter.features import Feature, Refused, raise_if_exhausted
from writeback_exporter.files.base import content
from writeback_exporter.kernel.loader import Kernel
from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.exposition import Snapshot, family
from writeback_exporter.names.cgroups import OTHER, Hierarchies, Hierarchy
from writeback_exporter.probes.base import Probe

_FORBIDDEN = b"2"  # to all processes; 1 forbids it to those without a right or a group
_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # its inode: PROC_PID_INIT_INO (include/linux/proc_ns.h)
_DESCRIPTORS = 65_536
"""Of a process that are looked at: each takes 5 us of a scrape."""

_RING = "anon_inode:[io_uring]"
_THREAD = b"iou-sqp-"  # io_sq_thread(), io_uring/sqpoll.c
# SqThreadCpu is -1, which does not match, while the thread has not begun to run: SqThread is then
# the thread that made the ring.
_FIELD = re.compile(rb"^(SqThread|SqThreadCpu|SqTotalTime|SqWorkTime):\t(\d+)$", re.MULTILINE)
_FIELDS = 4
# They are left out while the ring's lock is held, for which fdinfo does not wait
# (io_uring_show_fdinfo(), io_uring/fdinfo.c).
_ATTEMPTS = 3


@dataclass(slots=True)
class _Owner:
    """A process, the number of rings that it had made when its descriptors were listed, and those
    that were rings."""

    made: int
    fds: list[str]


@dataclass(frozen=True, slots=True)
class _Made:
    """Rings that a process has made since we came, and its cgroup then; 0 where it made none."""

    rings: int = 0
    cgroup: int = 0


@dataclass(slots=True)
class _Times:
    """Microseconds that a thread ran, and of these that it had work."""

    total: int = 0
    busy: int = 0


class IoUring(Probe):
    """CPU time of io_uring's SQPOLL threads, and how much of it they had work, by cgroup."""

    name = "io_uring"

    def __init__(self) -> None:
        super().__init__()
        self._fields = self._value_layout("ring_owners").pick("made", "cgroup")
        self._hierarchy = Hierarchy(0, "")
        self._older: set[int] | None = None
        self._made: dict[int, _Made] = {}
        self._owners: dict[int, _Owner] = {}
        self._threads: dict[int, _Times] = {}
        self._counted: dict[str, _Times] = {}

    def load(self, kernel: Kernel, hierarchies: Hierarchies) -> list[Feature]:
        self._hierarchy = hierarchies.task
        _check(kernel)
        kernel.arity("io_uring_create", known=(5,))
        constants = {"memory_v1": hierarchies.memory_v1}
        self.bpf = kernel.load(self.file, ["io_uring_create"], constants)
        if kernel.has_function("io_sq_cpu_usec"):
            return [Feature("io_uring_thread_time", True)]
        whole_process = Refused(
            "time of the process",
            "this kernel gives as a thread's time the system time of all threads of its process",
            "use a kernel from 6.18 on, or a stable one of that time, such as 6.12.56",
        )
        return [Feature.refused("io_uring_thread_time", whole_process)]

    def read(self) -> None:
        self._made = {
            int.from_bytes(process, sys.byteorder): _Made(*self._fields.unpack(value))
            for process, value in self._dump("ring_owners")
        }

    def fill(self, snapshot: Snapshot, host: Host) -> None:
        if self._older is None:  # once, after the program was attached: none is missed
            self._older = set(_processes_with_sq_thread(host.procfs))
        seen = set()
        for process, made in {**dict.fromkeys(self._older, _Made()), **self._made}.items():
            fds = self._ring_fds(host.procfs, process, made.rings)
            if not fds:
                self._disown(process, made.rings)
            fdinfo = f"{host.procfs}/{process}/fdinfo"
            seen |= {self._read_ring(host, f"{fdinfo}/{fd}", made.cgroup) for fd in fds}
        for thread in self._threads.keys() - seen:
            if not os.path.exists(f"{host.procfs}/{thread}"):
                del self._threads[thread]
        rows = [((cgroup,), times) for cgroup, times in self._counted.items()]
        snapshot.families += [
            family(catalogue.IO_URING_SQ_SECONDS, ((row, t.total / 1e6) for row, t in rows)),
            family(catalogue.IO_URING_SQ_BUSY_SECONDS, ((row, t.busy / 1e6) for row, t in rows)),
        ]

    def _ring_fds(self, procfs: str, process: int, made: int) -> list[str]:
        """The process' descriptors that are rings; all are listed only where that may change."""
        directory = f"{procfs}/{process}/fd"
        owner = self._owners.get(process)
        if not owner or owner.made != made or not all(_is_ring(directory, fd) for fd in owner.fds):
            try:
                with os.scandir(directory) as entries:
                    first = islice(entries, _DESCRIPTORS)
                    fds = [entry.name for entry in first if _is_ring(directory, entry.name)]
            except OSError as error:
                raise_if_exhausted(error)
                fds = []  # it has ended
            owner = self._owners[process] = _Owner(made, fds)
        return owner.fds

    def _disown(self, process: int, made: int) -> None:
        """Looks at the process no more, unless it has made a ring just now."""
        self._owners.pop(process, None)
        if self._older:
            self._older.discard(process)
        key = process.to_bytes(4, sys.byteorder)
        value = self.map("ring_owners").lookup_and_delete(key)
        if value is not None and self._fields.unpack(value)[0] != made:
            self.map("ring_owners").update(key, value)

    def _read_ring(self, host: Host, fdinfo: str, made_in: int) -> int | None:
        """Counts what the ring's thread did since the last time; its id, None where the kernel does
        not tell. Rings that share a thread tell the same of it."""
        for _ in range(_ATTEMPTS):
            # Behind come the names of files, which say what their owner likes.
            head = (content(fdinfo) or b"").partition(b"\nUserFiles:")[0]
            fields = {key: int(value) for key, value in _FIELD.findall(head)}
            if len(fields) == _FIELDS:
                thread = fields[b"SqThread"]
                cgroup = self._cgroup_of(host, thread, made_in)
                if cgroup is not None:  # else all is counted the next time
                    times = _Times(fields[b"SqTotalTime"], fields[b"SqWorkTime"])
                    self._count(thread, cgroup, times)
                return thread
        return None

    def _count(self, thread: int, cgroup: str, times: _Times) -> None:
        last = self._threads.get(thread, _Times())
        if times.total < last.total:  # another thread, with the number of one that has ended
            last = _Times()
        counted = self._counted.setdefault(cgroup, _Times())
        counted.total += times.total - last.total
        counted.busy += max(0, times.busy - last.busy)
        self._threads[thread] = times

    def _cgroup_of(self, host: Host, thread: int, made_in: int) -> str | None:
        """The label of a thread's cgroup; None where the thread has ended, or the cgroup was made
        since this scrape began and has no name yet. `made_in` is where its process was before."""
        # Not splitlines(): a carriage return may be in a name.
        for line in (content(f"{host.procfs}/{thread}/cgroup") or b"").split(b"\n"):
            number, _, path = line.partition(b":")
            path = path.partition(b":")[2]
            if number == str(self._hierarchy.id).encode():
                if path.startswith(b"/.."):  # as seen from our own cgroup namespace
                    cgroup = made_in
                else:
                    try:
                        cgroup = os.stat(os.fsencode(self._hierarchy.mount) + path).st_ino
                    except OSError:
                        cgroup = made_in  # outside of what is mounted here
                if not cgroup:
                    return OTHER
                if host.cgroups.knows(self._hierarchy, cgroup):
                    return host.cgroups.name(self._hierarchy, cgroup)
        return None

    def forget(self, gone: set[tuple[int, int]], host: Host, now: float) -> None:
        if gone and self._counted:
            in_use = host.cgroups.labels_in_use(self._hierarchy, gone)
            self._counted = {c: times for c, times in self._counted.items() if c in in_use}


def _check(kernel: Kernel) -> None:
    """Raises Refused where there is nothing to see, or it may not be seen."""
    if kernel.btf.tracepoint_arity("io_uring_create") is None:
        raise Refused(
            "no io_uring",
            "the kernel was built without io_uring",
            "nothing is missing: no process can use it",
        )
    if not kernel.btf.has_field("io_sq_data", "work_time"):
        raise Refused(
            "not in this kernel",
            "the kernel does not tell what SQPOLL threads do (before 6.9)",
            "use a kernel from 6.9 on, or do without",
        )
    disabled = content(f"{kernel.procfs}/sys/kernel/io_uring_disabled") or b""
    if disabled.strip() == _FORBIDDEN:
        raise Refused(
            "switched off",
            "no process may use io_uring (kernel.io_uring_disabled is 2)",
            "nothing is missing; if you set it to 0 or 1, start the exporter again",
        )
    if not _is_of_the_host(kernel.procfs):
        raise Refused(
            "pid namespace",
            f"{kernel.procfs} does not have the host's processes",
            "share the host's (hostPID: true, docker --pid=host), or mount its procfs and say "
            "where it is with --path.procfs",
        )
    if not privileges.holds(privileges.RINGS):
        need = privileges.RINGS.capabilities
        raise privileges.refusal("other users' /proc/PID/fdinfo cannot be read", need)


def _is_of_the_host(procfs: str) -> bool:
    try:
        return os.stat(f"{procfs}/1/ns/pid").st_ino == _FIRST_PID_NAMESPACE
    except OSError:
        return True  # not known; a right that is missing is told of


def _is_ring(directory: str, fd: str) -> bool:
    try:
        return os.readlink(f"{directory}/{fd}") == _RING
    except OSError:
        return False  # closed meanwhile


def _processes_with_sq_thread(procfs: str) -> Iterator[int]:
    for process in filter(str.isdecimal, os.listdir(procfs)):
        tasks = f"{procfs}/{process}/task"
        try:
            threads = os.listdir(tasks)
        except OSError as error:
            raise_if_exhausted(error)
            continue  # it has ended
        if len(threads) > 1 and any(
            (content(f"{tasks}/{thread}/comm") or b"").startswith(_THREAD) for thread in threads
        ):
            yield int(process)
