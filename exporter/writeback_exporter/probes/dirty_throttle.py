# SPDX-License-Identifier: Apache-2.0
"""Sleep in balance_dirty_pages by (cgroup, BDI): bpf/dirty_throttle.bpf.c."""

from __future__ import annotations

import mmap
import struct
import time
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping

from writeback_exporter.collector import Host
from writeback_exporter.features import Feature, Refused
from writeback_exporter.kernel.loader import Kernel
from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.exposition import Labels, Snapshot, family
from writeback_exporter.metrics.history import Sample
from writeback_exporter.names.cgroups import (
    OTHER,
    Cgroups,
    Hierarchies,
    Hierarchy,
)
from writeback_exporter.probes.base import Bdi, BdiMap, Probe, Row, Table

_CLOCK_MONOTONIC_COARSE = 6  # include/uapi/linux/time.h; the time module does not name it
_VALUES_ARITY, _CONTROL_ARITY = 12, 8
# A counter of pages that ran below zero reads as 2^64 - n. No machine has 2^48 pages.
_PAGES_LIMIT = 1 << 48
# A thread is entered a moment before it sleeps, 200 ms at most (MAX_PAUSE, mm/page-writeback.c).
# Where a nowait write (BDP_ASYNC) made the entry it never does, and the next of its pauses takes
# the entry over; and no run of an fexit program is certain. What is older is nobody's sleep.
_STALE_NS = 60_000_000_000


def ticks_per_second() -> int:
    """The kernel's HZ: the coarse clocks' resolution is one tick (TICK_NSEC, kernel/time)."""
    return round(1 / time.clock_getres(_CLOCK_MONOTONIC_COARSE))


class DirtyThrottle(Probe):
    """Sleep by cgroup and BDI, who sleeps now, which limit decided, and the BDI's state then."""

    name = "dirty_throttle"
    main = True

    def __init__(self) -> None:
        super().__init__()
        throttle, bdi = self.file.struct("throttle"), self._value_layout("bdis")
        self._first = self.file.enum("pause_exponents")["PAUSE_FIRST"]
        self._sleep = throttle.pick("slept_ns", "slept_slots")
        self._slept = throttle.pick("slept_ns")
        self._requested = throttle.pick("requested_ns")
        self._key = self._key_layout("dirty_throttle").pick("cgroup", "bdi")
        self._sleeper = self._value_layout("sleepers").pick(
            "key.cgroup", "key.bdi", "event_ns", "sleep_ns", "pause_ns"
        )
        self._domains = [
            domain.removeprefix("DOMAIN_").lower()
            for domain in self.file.enum("throttle_domain")
            if domain != "DOMAINS"
        ]
        self._bdi_state = bdi.pick("dirty", "threshold", "dirty_ratelimit", "write_bandwidth")
        start = bdi.fields["other.slept_ns"].offset
        self._other_at = slice(start, start + throttle.size)
        pauses = bdi.fields["pauses"]
        self._pauses = struct.Struct(f"={pauses.count}Q")
        self._pauses_at = slice(pauses.offset, pauses.offset + pauses.size)

        self.measured = False
        self._hierarchy = Hierarchy(0, "")
        self._throttles: list[tuple[bytes, memoryview]] = []
        self._asleep: Counter[tuple[int, int]] = Counter()
        self._bdis = BdiMap(self)
        self._inherited_ns: Counter[Hashable] = Counter()
        """What is in rows of others' sleep, and no news for the status page."""

    def load(self, kernel: Kernel, hierarchies: Hierarchies) -> list[Feature]:
        arity = kernel.arity("balance_dirty_pages", known=(_VALUES_ARITY, _CONTROL_ARITY))
        if arity == _CONTROL_ARITY:
            programs = ["throttled_control"]
        else:
            programs = ["global_thresholds", "throttled_values"]
        constants = {"hz": ticks_per_second(), "memory_v1": hierarchies.memory_v1}
        self._hierarchy = hierarchies.task
        try:
            kernel.require_fexit_of_sleepers()
            measuring = ["sleep_exit", "sleep_enter", *programs]
            self.bpf = kernel.load(self.file, measuring, {**constants, "measured": True})
            self.measured = True
            return [Feature("dirty_throttle_measured_sleep", True)]
        except Refused as refusal:
            self.bpf = kernel.load(self.file, programs, {**constants, "measured": False})
            return [Feature.refused("dirty_throttle_measured_sleep", refusal)]

    def read(self) -> None:
        # Histograms first: a BDI or cgroup that is in them is then known to what is read later.
        self._throttles = self._dump("dirty_throttle")
        self._read_sleepers()
        self._bdis.read()
        self._throttles = self._of_known("dirty_throttle", self._throttles, self._has_known_bdi)

    def _has_known_bdi(self, key: bytes) -> bool:
        _, bdi = self._key.unpack(key)
        return bdi in self._bdis.known

    def _read_sleepers(self) -> None:
        sleepers = self._dump("sleepers")
        now = time.monotonic_ns()  # the clock of bpf_ktime_get_ns()
        tick_ns = 1_000_000_000 // ticks_per_second()
        self._asleep.clear()
        for tid, value in sleepers:
            cgroup, bdi, event_ns, sleep_ns, pause_ns = self._sleeper.unpack(value)
            # The timer wheel rounds up: a pause is a tick longer than requested.
            wakes_ns = event_ns + pause_ns + tick_ns
            asleep = sleep_ns != 0 if self.measured else now < wakes_ns
            if now - event_ns - pause_ns > _STALE_NS:
                self.map("sleepers").delete(tid)
            elif asleep:
                self._asleep[cgroup, bdi] += 1

    def fill(self, snapshot: Snapshot, host: Host) -> None:
        table = Table()
        for _, labels, row in self._rows(host.cgroups):
            table.add(labels, row)
        for labels, row in self._other_rows(self._bdis.known):
            table.add(labels, row)
        snapshot.histograms.append(
            table.histogram(catalogue.DIRTY_THROTTLE_SECONDS, self._first, self._sleep)
        )
        requested = (
            (labels, self._requested.unpack(row)[0] / 1e9) for labels, row in table.rows.items()
        )
        asleep = self._asleep_by_labels(host.cgroups)
        method = "fexit" if self.measured else "requested"
        snapshot.families += [
            family(catalogue.DIRTY_THROTTLE_REQUESTED_SECONDS, requested),
            # Zero where tasks were throttled once, so that a query finds the series.
            family(catalogue.DIRTY_THROTTLED_TASKS, ((row, asleep[row]) for row in table.rows)),
            family(catalogue.DIRTY_THROTTLE_METHOD_INFO, [((method,), 1)]),
        ]
        self._fill_bdis(snapshot)

    def _asleep_by_labels(self, cgroups: Cgroups) -> Counter[Labels]:
        asleep = Counter[Labels]()
        for (cgroup, bdi), tasks in self._asleep.items():
            if bdi in self._bdis.known:
                asleep[self._labels(cgroups, cgroup, bdi)] += tasks
        return asleep

    def _fill_bdis(self, snapshot: Snapshot) -> None:
        pauses = Table()
        state: dict[str, tuple[int, ...]] = {}
        for bdi in sorted(self._bdis.known.values(), key=lambda bdi: bdi.id):
            pauses.add((bdi.name,), bdi.value[self._pauses_at])
            # Ids count up: of two that had one name the later one is the one of today.
            state[bdi.name] = self._bdi_state.unpack(bdi.value)
        by_domain = (
            ((name, domain), count)
            for (name,), row in pauses.rows.items()
            for domain, count in zip(self._domains, self._pauses.unpack(row), strict=True)
        )
        snapshot.families.append(family(catalogue.DIRTY_THROTTLE_DOMAIN, by_domain))
        gauges = (
            catalogue.BDI_DIRTY_BYTES,
            catalogue.BDI_DIRTY_THRESHOLD_BYTES,
            catalogue.BDI_DIRTY_RATELIMIT_BYTES,
            catalogue.BDI_WRITE_BANDWIDTH_BYTES,
        )
        for field, gauge in enumerate(gauges):
            rows = (
                ((name,), pages[field] * mmap.PAGESIZE)
                for name, pages in state.items()
                if pages[field] < _PAGES_LIMIT
            )
            snapshot.families.append(family(gauge, rows))

    def _labels(self, cgroups: Cgroups, cgroup: int, bdi: int) -> Labels:
        return cgroups.name(self._hierarchy, cgroup), self._bdis.known[bdi].name

    def _rows(self, cgroups: Cgroups) -> Iterator[Row]:
        for key, row in self._throttles:
            yield key, self._labels(cgroups, *self._key.unpack(key)), row

    def _other_rows(self, bdis: Mapping[int, Bdi]) -> Iterator[tuple[Labels, bytes]]:
        """What found no room in dirty_throttle, by BDI."""
        for bdi in bdis.values():
            row = bytes(bdi.value[self._other_at])
            if any(row):
                yield (OTHER, bdi.name), row

    def sample(self, sample: Sample, host: Host) -> None:
        throttled: dict[Hashable, tuple[Labels, int]] = {}
        for key, labels, row in self._rows(host.cgroups):
            throttled[key] = labels, self._slept_ns(row) - self._inherited_ns[key]
        for bdi in self._bdis.known.values():
            slept_ns = self._slept_ns(bdi.value[self._other_at])
            throttled[bdi.id] = (OTHER, bdi.name), slept_ns - self._inherited_ns[bdi.id]
        sample.throttled = throttled
        sample.asleep = self._asleep_by_labels(host.cgroups)
        names = {bdi.name for bdi in self._bdis.known.values()}
        sample.disks = {bdi: disk for bdi in names if (disk := host.devices.name(bdi))}

    def _slept_ns(self, row: bytes | memoryview) -> int:
        (slept_ns,) = self._slept.unpack(row)
        return int(slept_ns)

    def forget(self, gone: set[tuple[int, int]], host: Host, now: float) -> None:
        bdis = self._bdis.heirs(self._bdis.dead(host.devices, now))
        cgroups = {cgroup for tree, cgroup in gone if tree == self._hierarchy.id}
        if not bdis and not cgroups:
            return
        heirs = host.cgroups.heirs(self._hierarchy, gone)
        for key, labels, row in list(self._rows(host.cgroups)):
            cgroup, bdi = self._key.unpack(key)
            if cgroup not in cgroups and bdi not in bdis:
                continue
            owner = heirs.get(labels[0]) if cgroup in cgroups else cgroup
            heir = bdis.get(bdi, bdi)
            if owner is None or heir is None:
                self.map("dirty_throttle").delete(key)
            else:
                heirs_key = self._key.pack(owner, heir)
                self._bequeath("dirty_throttle", key, heirs_key)
                self._inherited_ns[heirs_key] += self._slept_ns(row)
            del self._inherited_ns[key]
        for bdi, heir in bdis.items():
            if heir is not None:
                row = self._bdis.known[bdi].value[self._other_at]
                self._inherited_ns[heir] += self._slept_ns(row)
            del self._inherited_ns[bdi]
        self._bdis.forget(bdis)
