# SPDX-License-Identifier: Apache-2.0
"""Sync calls by (cgroup, call), and the oldest one that is open: bpf/sync.bpf.c."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterator

from writeback_exporter import privileges
from writeback_exporter.collector import Host
from writeback_exporter.features import Feature, Refused, raise_if_exhausted
from writeback_exporter.files.base import number
from writeback_exporter.kernel.loader import Kernel
from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.exposition import Labels, Snapshot, family
from writeback_exporter.names.cgroups import Cgroups, Hierarchies, Hierarchy
from writeback_exporter.probes.base import CgroupMap, Probe

# SYSCALL_DEFINE (arch/*/include/asm/syscall_wrapper.h) and, on x86, where it has another name: a
# call without arguments is an alias of __do_sys_NAME, which is what BTF knows.
_FUNCTIONS = {
    "x86_64": {
        "fsync": "__x64_sys_fsync",
        "fdatasync": "__x64_sys_fdatasync",
        "sync": "__do_sys_sync",
        "syncfs": "__x64_sys_syncfs",
        "msync": "__x64_sys_msync",
        "sync_file_range": "__x64_sys_sync_file_range",
    },
    "aarch64": {
        "fsync": "__arm64_sys_fsync",
        "fdatasync": "__arm64_sys_fdatasync",
        "sync": "__arm64_sys_sync",
        "syncfs": "__arm64_sys_syncfs",
        "msync": "__arm64_sys_msync",
        "sync_file_range": "__arm64_sys_sync_file_range",
    },
}
# What 32 bit programs come through, where that is another function.
_COMPAT_FUNCTIONS = {
    "x86_64": {
        "fsync": "__ia32_sys_fsync",
        "fdatasync": "__ia32_sys_fdatasync",
        "syncfs": "__ia32_sys_syncfs",
        "msync": "__ia32_sys_msync",
        "sync_file_range": "__ia32_sys_ia32_sync_file_range",
    },
    "aarch64": {"sync_file_range": "__arm64_compat_sys_aarch32_sync_file_range2"},
}
# A call that seems to be open for longer is looked at: its end may not have been shown to us.
_DOUBT_NS = 2_000_000_000
_TRACEFS = ("/sys/kernel/tracing", "/sys/kernel/debug/tracing")


class Sync(Probe):
    """Duration and errors of fsync, sync, msync and their like, and the oldest that is open."""

    name = "sync"

    def __init__(self) -> None:
        super().__init__()
        calls = self._value_layout("sync")
        self._calls = [call.removeprefix("CALL_").lower() for call in self.file.enum("sync_call")]
        self._first = self.file.enum("sync_exponents")["SYNC_FIRST"]
        self._picked = calls.pick("total_ns", "slots")
        self._errors = calls.pick("errors")
        self._open_call = self._value_layout("open_calls").pick(
            "key.cgroup", "key.call", "start_ns"
        )
        self._sync = CgroupMap(self, "sync", self._call)
        self._hierarchy = Hierarchy(0, "")
        self._open: list[tuple[int, int, int]] = []

    def _call(self, rest: bytes) -> Labels:
        return (self._calls[int.from_bytes(rest[:4], sys.byteorder)],)

    def load(self, kernel: Kernel, hierarchies: Hierarchies) -> list[Feature]:
        constants = {"memory_v1": hierarchies.memory_v1}
        try:
            targets = self._targets(kernel)
            self.bpf = kernel.load(self.file, [*targets], constants, targets=targets)
            feature = Feature("sync_fentry", True)
        except Refused as refusal:
            if not kernel.syscall_tracepoints:
                raise Refused(
                    refusal.reason,
                    refusal.detail,
                    "use a kernel with fentry (arm64: from 6.x on), or let tracepoints of system "
                    "calls be used: --sync.tracepoints, whose help says what they cost",
                ) from refusal
            feature = Feature.refused("sync_fentry", refusal)
            _check_tracefs()
            programs = [f"{call}_{side}_tp" for call in self._calls for side in ("exit", "enter")]
            try:
                self.bpf = kernel.load(self.file, programs, constants)
            except Refused as refusal:
                _check_perf_events(kernel.procfs, refusal)
                raise
        self._hierarchy = hierarchies.task
        self._sync.make_room(
            hierarchies.task,
            (call.to_bytes(4, sys.byteorder) + bytes(4) for call in range(len(self._calls))),
        )
        return [feature]

    def _targets(self, kernel: Kernel) -> dict[str, str]:
        """The kernel's function for each program, ends first."""
        machine = platform.machine()
        functions = _FUNCTIONS.get(machine)
        if functions is None:
            raise Refused(
                "unknown architecture",
                f"the names of system calls' functions on {machine} are not known",
                "use x86-64 or arm64",
            )
        kernel.require_fexit_of_sleepers()
        for function in functions.values():
            if not kernel.has_function(function):
                raise Refused(
                    "not in this kernel",
                    f"the kernel's BTF has no function {function}",
                    "use another kernel",
                )
        # A kernel that runs no 32 bit programs does not have these.
        compat = {
            f"{call}_compat": function
            for call, function in _COMPAT_FUNCTIONS[machine].items()
            if kernel.has_function(function)
        }
        both = {**functions, **compat}
        return {f"{name}_{side}": both[name] for side in ("exit", "enter") for name in both}

    def read(self) -> None:
        # Counts first: a call that ends now is open in one scrape, and not counted in it.
        self._sync.read()
        entries = self._dump("open_calls")
        now = time.monotonic_ns()  # the clock of bpf_ktime_get_ns()
        self._open = []
        for tid, value in entries:
            cgroup, call, start_ns = self._open_call.unpack(value)
            age_ns = max(now - start_ns, 0)
            thread = int.from_bytes(tid, sys.byteorder)
            if age_ns < _DOUBT_NS or self.run("still_open", thread):
                self._open.append((cgroup, call, age_ns))

    def fill(self, snapshot: Snapshot, host: Host) -> None:
        table = self._sync.table(host.cgroups)
        snapshot.histograms.append(
            table.histogram(catalogue.SYNC_SECONDS, self._first, self._picked)
        )
        # Zero where there was a call once, so that a query finds the series.
        oldest_ns = dict.fromkeys(table.rows, 0)
        for labels, age_ns in self._open_by_labels(host.cgroups):
            oldest_ns[labels] = max(age_ns, oldest_ns.get(labels, 0))
        snapshot.families += [
            family(
                catalogue.SYNC_OPEN_SECONDS, ((row, age / 1e9) for row, age in oldest_ns.items())
            ),
            family(
                catalogue.SYNC_ERRORS,
                ((labels, self._errors.unpack(row)[0]) for labels, row in table.rows.items()),
            ),
        ]

    def _open_by_labels(self, cgroups: Cgroups) -> Iterator[tuple[Labels, int]]:
        for cgroup, call, age_ns in self._open:
            yield (cgroups.name(self._hierarchy, cgroup), self._calls[call]), age_ns

    def forget(self, gone: set[tuple[int, int]], host: Host, now: float) -> None:
        self._sync.forget(gone, host.cgroups)


def _check_perf_events(procfs: str, refusal: Refused) -> None:
    """Raises another Refused where the cause is a sysctl: classic tracepoints are perf events."""
    paranoid = number(f"{procfs}/sys/kernel/perf_event_paranoid") or 0
    need = privileges.PERF_EVENTS
    if refusal.reason == "not permitted" and paranoid > 2 and not privileges.holds(need):
        detail = f"{refusal.detail} (kernel.perf_event_paranoid is {paranoid})"
        raise privileges.refusal(
            detail, need.capabilities, "set kernel.perf_event_paranoid to 2"
        ) from refusal


def _check_tracefs() -> None:
    for top in _TRACEFS:
        # What libbpf reads. Directories say nothing: in 6.18 anybody may list them.
        file = f"{top}/events/syscalls/sys_enter_fsync/id"
        try:
            os.close(os.open(file, os.O_RDONLY | os.O_CLOEXEC))
            return
        except PermissionError as error:
            detail = f"cannot read {file}: {error.strerror}"
            raise privileges.refusal(detail, privileges.TRACEFS.capabilities) from error
        except OSError as error:
            raise_if_exhausted(error)
        if os.path.isdir(f"{top}/events"):
            raise Refused(
                "no tracepoint",
                f"the kernel has no tracepoints of system calls ({top}/events/syscalls)",
                "use a kernel built with CONFIG_FTRACE_SYSCALLS, or with fentry",
            )
    raise Refused(
        "no tracefs",
        "tracefs, which names the tracepoints of system calls, is not mounted",
        f"mount it: mount -t tracefs tracefs {_TRACEFS[0]}",
    )
