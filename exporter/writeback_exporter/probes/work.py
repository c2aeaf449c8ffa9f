# SPDX-License-Identifier: Apache-2.0
"""Writeback work by (BDI, reason): bpf/work.bpf.c."""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from writeback_exporter.collector import Host
from writeback_exporter.features import Feature
from writeback_exporter.kernel.libbpf import KernelBtf
from writeback_exporter.kernel.loader import Kernel
from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.exposition import Labels, Snapshot, family
from writeback_exporter.names.cgroups import Hierarchies
from writeback_exporter.probes.base import Bdi, BdiMap, Probe, Table

_PREFIX = "WB_REASON_"
_OTHER = "other"


def reasons(btf: KernelBtf) -> dict[int, str]:
    """Why this kernel's flushers work, by number: background, periodic, sync, vmscan and so on
    (enum wb_reason, include/linux/backing-dev-defs.h)."""
    return {
        number: name.removeprefix(_PREFIX).lower()
        for name, number in btf.enum("wb_reason").items()
        if name != f"{_PREFIX}MAX"
    }


@dataclass(frozen=True, slots=True)
class _Open:
    """Work that is queued or being done."""

    map: str
    key: bytes
    bdi: int
    reason: int
    begin_ns: int


class Work(Probe):
    """Writeback work by BDI and reason: duration, bytes, and the age of what is not done yet."""

    name = "work"

    def __init__(self) -> None:
        super().__init__()
        work, bdi = self.file.struct("work"), self._value_layout("bdis")
        self._first = self.file.enum("work_exponents")["WORK_FIRST"]
        self._duration = work.pick("ns", "slots")
        self._pages = work.pick("pages")
        self._open_work = self._value_layout("running").pick("bdi", "begin_ns", "reason")
        starts = [f.offset for name, f in bdi.fields.items() if name.endswith("].ns")]
        self._rows_at = [slice(start, start + work.size) for start in starts]

        self.reasons: dict[int, str] = {}
        self._bdis = BdiMap(self)
        self._open: list[_Open] = []
        self._now_ns = 0

    def load(self, kernel: Kernel, hierarchies: Hierarchies) -> list[Feature]:
        for tracepoint in ("queue", "exec", "start", "written"):
            kernel.arity(f"writeback_{tracepoint}", known=(2,))
        kernel.arity("writeback_pages_written", known=(1,))
        self.reasons = reasons(kernel.btf)
        self.bpf = kernel.load(
            self.file, ["pages_written", "written", "start", "exec", "queue"], {}
        )
        return []

    def read(self) -> None:
        # Open work first: its BDIs are then known to what is read later.
        self._open = [*self._read_open("queued"), *self._read_open("running")]
        self._now_ns = time.monotonic_ns()  # the clock of bpf_ktime_get_ns()
        self._bdis.read()

    def _read_open(self, name: str) -> Iterator[_Open]:
        for key, value in self._dump(name):
            bdi, begin_ns, reason = self._open_work.unpack(value)
            yield _Open(name, key, bdi, reason, begin_ns)

    def _reason(self, number: int) -> str:
        """Its label. The last row is for all numbers that have none of their own."""
        return self.reasons.get(number, _OTHER) if number < len(self._rows_at) - 1 else _OTHER

    def fill(self, snapshot: Snapshot, host: Host) -> None:
        table = Table()
        for labels, row in self._rows(self._bdis.known.values()):
            table.add(labels, row)
        snapshot.histograms.append(
            table.histogram(catalogue.WORK_SECONDS, self._first, self._duration)
        )
        written = (
            (labels, self._pages.unpack(row)[0] * mmap.PAGESIZE)
            for labels, row in table.rows.items()
        )
        oldest = dict.fromkeys(table.rows, 0.0)
        for work in self._open:
            bdi = self._bdis.known.get(work.bdi)
            if bdi and bdi.gone_since is None:
                age = max(0, self._now_ns - work.begin_ns) / 1e9
                labels = (bdi.name, self._reason(work.reason))
                oldest[labels] = max(oldest.get(labels, 0.0), age)
        snapshot.families += [
            family(catalogue.WORK_BYTES, written),
            family(catalogue.WORK_OLDEST_SECONDS, oldest.items()),
        ]

    def _rows(self, bdis: Iterable[Bdi]) -> Iterator[tuple[Labels, bytes]]:
        for bdi in bdis:
            for number, place in enumerate(self._rows_at):
                row = bytes(bdi.value[place])
                if any(row):
                    yield (bdi.name, self._reason(number)), row

    def _give_up(self, work: _Open) -> None:
        value = self.map(work.map).lookup(work.key)
        # Else the flusher has turned to other work since.
        if value is not None and self._open_work.unpack(value)[1] == work.begin_ns:
            self.map(work.map).delete(work.key)

    def forget(self, gone: set[tuple[int, int]], host: Host, now: float) -> None:
        dead = self._bdis.dead(host.devices, now)
        # The kernel waits for all work of a BDI before it takes its name out of sysfs: what is
        # still open then has no end that we could see.
        for work in self._open:
            bdi = self._bdis.known.get(work.bdi)
            if bdi is None or bdi.gone_since is not None:
                self._give_up(work)
        self._bdis.forget(self._bdis.heirs(dead))
