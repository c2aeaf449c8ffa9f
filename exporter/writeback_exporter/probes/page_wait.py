# SPDX-License-Identifier: Apache-2.0
"""Waits for pages under writeback by cgroup: bpf/page_wait.bpf.c."""

from __future__ import annotations

from writeback_exporter.collector import Host
from writeback_exporter.features import Feature, Refused
from writeback_exporter.kernel.loader import Kernel
from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.exposition import Snapshot
from writeback_exporter.names.cgroups import Hierarchies
from writeback_exporter.probes.base import CgroupMap, Probe

_FEATURE = "page_wait_exact_end"


class PageWait(Probe):
    """Time that tasks of a cgroup waited for pages under writeback."""

    name = "page_wait"

    def __init__(self) -> None:
        super().__init__()
        self._first = self.file.enum("page_wait_exponents")["PAGE_WAIT_FIRST"]
        self._duration = self.file.struct("page_wait").pick("ns", "slots")
        self._waits = CgroupMap(self, "page_wait")

    def load(self, kernel: Kernel, hierarchies: Hierarchies) -> list[Feature]:
        if kernel.btf.tracepoint_arity("folio_wait_writeback") is not None:
            begin, ends = "folio_wait_begins", ["folio_wait_ends", "folio_wait_killable_ends"]
        else:
            kernel.arity("wait_on_page_writeback", known=(2,))
            begin, ends = "page_wait_begins", ["page_wait_ends"]
        constants = {"memory_v1": hierarchies.memory_v1}
        try:
            kernel.require_fexit_of_sleepers()
            self.bpf = kernel.load(self.file, [*ends, begin], constants)
            feature = Feature(_FEATURE, True)
        except Refused as refusal:
            kernel.arity("sched_switch", known=(3, 4))  # the fourth, since 5.18, is not read
            self.bpf = kernel.load(self.file, ["switched", begin], constants)
            feature = Feature.refused(_FEATURE, refusal)
        self._waits.make_room(hierarchies.task)
        return [feature]

    def read(self) -> None:
        self._waits.read()
        self._dump("page_waiters")

    def fill(self, snapshot: Snapshot, host: Host) -> None:
        table = self._waits.table(host.cgroups)
        snapshot.histograms.append(
            table.histogram(catalogue.PAGE_WAIT_SECONDS, self._first, self._duration)
        )

    def forget(self, gone: set[tuple[int, int]], host: Host, now: float) -> None:
        self._waits.forget(gone, host.cgroups)
