# SPDX-License-Identifier: Apache-2.0
"""Waits that limits impose on block IO by (cgroup, disk, limit): bpf/block_io_limit.bpf.c."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from writeback_exporter.collector import Host
from writeback_exporter.features import Feature, Refused
from writeback_exporter.kernel.libbpf import BpfError, Object
from writeback_exporter.kernel.loader import Kernel, load
from writeback_exporter.kernel.pins import PinnedObject
from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.exposition import Labels, Snapshot
from writeback_exporter.names.cgroups import Hierarchies
from writeback_exporter.probes.base import CgroupMap, Disk, Probe, c_string, disks_that_left

_STALE_NS = 600_000_000_000
"""No disk that works lets a task wait for so long."""
_MINOR_BITS = 20  # of the kernel's dev_t (include/linux/kdev_t.h)
_POP_ARITIES = {2: 0, 3: 1}
"""By number of throtl_pop_queued()'s arguments (2 in 6.12, 3 in 6.18): is the direction one?"""


@dataclass(frozen=True, slots=True)
class _Policy:
    """Something that holds IO: the kernel's functions that its programs need, and the programs, of
    which the one that sees the end comes first."""

    functions: tuple[str, ...]
    programs: tuple[str, ...]
    sleeps: bool = False
    """Whether a task sleeps in a function that fexit is attached to."""


_POLICIES = {
    "max": _Policy(
        ("throtl_add_bio_tg", "throtl_pop_queued"), ("throttle_release", "throttle_hold")
    ),
    "iocost": _Policy(("iocg_kick_waitq", "iocg_wake_fn"), ("iocost_release", "iocost_hold")),
    # The function that only wbt has, for io.latency waits with the same.
    "wbt": _Policy(
        ("rq_qos_wake_function", "prepare_to_wait_exclusive", "wbt_inflight_cb"),
        ("wbt_release", "wbt_hold"),
    ),
    "iolatency": _Policy(
        ("rq_qos_wait", "iolat_acquire_inflight"),
        ("iolatency_exit", "iolatency_enter"),
        sleeps=True,
    ),
}


@dataclass(slots=True, kw_only=True)
class _Disk(Disk):
    """A disk on which a limit held IO."""

    identity: bytes
    """Key in limit_disks."""


class BlockIoLimit(Probe):
    """Time that io.max, io.latency, iocost and wbt hold IO, by cgroup and disk; needs fentry."""

    name = "block_io_limit"

    def __init__(self) -> None:
        super().__init__()
        waits = self._value_layout("block_io_limit")
        self._first = self.file.enum("limit_exponents")["LIMIT_FIRST"]
        self._waits = waits.pick("ns", "slots")
        self._key = self._key_layout("block_io_limit").pick("gendisk", "dev", "limit")
        self._held = self._value_layout("limit_held").pick("key.gendisk", "key.dev")
        self._hold = self._value_layout("limit_held").pick("key.limit", "since_ns")
        self._identity = self._key_layout("limit_disks").pick("gendisk", "dev")
        self._disk = self._value_layout("limit_disks").pick("since_ns", "name")
        self._limits = [
            limit.removeprefix("LIMIT_").lower()
            for limit in self.file.enum("limit")
            if limit != "LIMITS"
        ]
        self._rows = CgroupMap(self, "block_io_limit", self._more)
        self._disks: dict[tuple[int, int], _Disk] = {}

    def load(self, kernel: Kernel, hierarchies: Hierarchies) -> list[Feature]:
        arity = kernel.btf.function_arity("throtl_pop_queued")
        constants = {"direction_argument": _POP_ARITIES.get(arity or 0, 0)}
        refusals: dict[str, Refused] = {}
        for name, policy in _POLICIES.items():
            if not _is_in(kernel, policy):
                refusals[name] = _not_in_this_kernel(name)
            elif policy.sleeps:
                try:
                    kernel.require_fexit_of_sleepers()
                except Refused as refusal:
                    refusals[name] = refusal
        programs = {
            name: policy.programs for name, policy in _POLICIES.items() if name not in refusals
        }
        self.bpf = self._load_what_can_be(kernel, constants, programs, refusals)
        for name in [name for name in programs if name not in refusals]:
            try:
                for program in programs[name]:
                    self.bpf.attach(program)
            except BpfError as error:
                refusals[name] = _needs_fentry(str(error))
        if len(refusals) == len(_POLICIES):
            self.close()
            raise refusals["max"]
        self._rows.make_room(hierarchies.io, rests=())  # the BPF program makes it with each disk
        return [
            Feature.refused(f"{self.name}_{name}", refusals[name])
            if name in refusals
            else Feature(f"{self.name}_{name}", True)
            for name in _POLICIES
        ]

    def _load_what_can_be(
        self,
        kernel: Kernel,
        constants: Mapping[str, int],
        programs: Mapping[str, tuple[str, ...]],
        refusals: dict[str, Refused],
    ) -> Object | PinnedObject:
        """The programs of all policies; where the kernel refuses them, of those that it does not
        refuse alone. Raises Refused where there are none."""
        if programs:
            try:
                return kernel.load(
                    self.file, (), constants, also=[*chain.from_iterable(programs.values())]
                )
            except Refused as refusal:
                if refusal.reason == "not permitted":
                    raise _needs_fentry(refusal.detail) from refusal
        for name, alone in programs.items():
            try:
                load(self.file, (), constants, also=alone).close()
            except Refused as refusal:
                refusals[name] = refusal
        good = [p for name in programs if name not in refusals for p in programs[name]]
        if good:
            return kernel.load(self.file, (), constants, also=good)
        raise refusals["max"]

    def read(self) -> None:
        # Rows first: a disk that is in them is then among those that are read later.
        self._rows.read()
        self._give_up_old()
        known, self._disks = self._disks, {}
        for identity, value in self._dump("limit_disks"):
            gendisk, dev = self._identity.unpack(identity)
            since_ns, name = self._disk.unpack(value)
            old = known.get((gendisk, dev))
            self._disks[gendisk, dev] = old or _Disk(
                name=c_string(name),
                dev=f"{dev >> _MINOR_BITS}:{dev & ((1 << _MINOR_BITS) - 1)}",
                since_ns=since_ns,
                identity=identity,
            )
        self._rows.keep(lambda rest: self._unpacked(rest)[:2] in self._disks)

    def _give_up_old(self) -> None:
        """A task may have got room before it slept, under wbt: then nobody wakes it."""
        now = time.monotonic_ns()  # the clock of bpf_ktime_get_ns()
        for address, hold in self._dump("limit_held"):
            limit, since_ns = self._hold.unpack(hold)
            if self._limits[limit] == "qos" and now - since_ns > _STALE_NS:
                self.map("limit_held").delete(address)

    def _unpacked(self, rest: bytes) -> tuple[int, int, int]:
        gendisk, dev, limit = self._key.unpack(bytes(8) + rest)
        return gendisk, dev, limit

    def _more(self, rest: bytes) -> Labels:
        gendisk, dev, limit = self._unpacked(rest)
        return self._disks[gendisk, dev].name, self._limits[limit]

    def fill(self, snapshot: Snapshot, host: Host) -> None:
        table = self._rows.table(host.cgroups)
        snapshot.histograms.append(
            table.histogram(catalogue.BLOCK_IO_LIMIT_SECONDS, self._first, self._waits)
        )

    def forget(self, gone: set[tuple[int, int]], host: Host, now: float) -> None:
        left = disks_that_left(self._disks, host.devices, now)
        if not left:
            self._rows.forget(gone, host.cgroups)
            return

        def heir_of_rest(rest: bytes) -> bytes | None:
            *disk, limit = self._unpacked(rest)
            heir = left.get((disk[0], disk[1]), (disk[0], disk[1]))
            return heir and self._key.pack(*heir, limit)[8:]

        self._rows.forget(gone, host.cgroups, heir_of_rest)
        # What was held when the disk went, and whose end the kernel has not shown us.
        for key, hold in self._dump("limit_held"):
            if self._held.unpack(hold) in left:
                self.map("limit_held").delete(key)
        for disk in left:
            # Out of _disks too: it may have been known again by the next `read`.
            self.map("limit_disks").delete(self._disks.pop(disk).identity)


def _is_in(kernel: Kernel, policy: _Policy) -> bool:
    return all(kernel.has_function(function) for function in policy.functions) and (
        "throtl_pop_queued" not in policy.functions
        or kernel.btf.function_arity("throtl_pop_queued") in _POP_ARITIES
    )


def _not_in_this_kernel(name: str) -> Refused:
    return Refused(
        "not in this kernel",
        f"the kernel has no {name} limits of block IO, or has inlined their functions",
        "nothing is to be done where none are configured; else use another kernel",
    )


def _needs_fentry(detail: str) -> Refused:
    return Refused(
        "needs fentry",
        detail,
        "use a kernel with CONFIG_DYNAMIC_FTRACE_WITH_DIRECT_CALLS (x86-64: 5.5, aarch64: 6.4) and "
        "allow bpf(2) in the container; until then waits for limits are in no metric",
    )
