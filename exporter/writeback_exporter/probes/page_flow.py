# SPDX-License-Identifier: Apache-2.0
"""Page cache made dirty and written back by cgroup: bpf/page_flow.bpf.c."""

from __future__ import annotations

import mmap
import struct

from writeback_exporter.collector import Host
from writeback_exporter.features import Feature, Refused
from writeback_exporter.kernel.loader import Kernel
from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.catalogue import Metric
from writeback_exporter.metrics.exposition import Family, Snapshot, family
from writeback_exporter.names.cgroups import Cgroups, Hierarchies
from writeback_exporter.probes.base import CgroupMap, Probe

_FEATURE = "page_flow_all_writers"
_PAGES = struct.Struct("=Q")


class PageFlow(Probe):
    """Page cache made dirty by a cgroup's tasks, and written back of its inodes; a few hundred
    nanoseconds a page."""

    name = "page_flow"
    default = False

    def __init__(self) -> None:
        super().__init__()
        self._dirtied = CgroupMap(self, "page_dirtied")
        self._written = CgroupMap(self, "page_written")

    def load(self, kernel: Kernel, hierarchies: Hierarchies) -> list[Feature]:
        if kernel.btf.tracepoint_arity("writeback_dirty_folio") is not None:
            dirtied, written = "dirtied_folio", "written_folio"
        else:
            kernel.arity("writeback_dirty_page", known=(2,))
            dirtied, written = "dirtied_page", "written_page"
        constants = {"memory_v1": hierarchies.memory_v1}
        try:
            self.bpf = kernel.load(self.file, [written, dirtied], constants)
            feature = Feature(_FEATURE, True)
        except Refused as refusal:
            kernel.arity("writeback_single_inode", known=(3,))
            self.bpf = kernel.load(self.file, ["written_inode", dirtied], constants)
            feature = Feature.refused(_FEATURE, refusal)
        self._dirtied.make_room(hierarchies.task)
        # An inode's owner is a cgroup of the memory controller.
        self._written.make_room(hierarchies.memory or hierarchies.task)
        return [feature]

    def read(self) -> None:
        self._written.read()
        self._dirtied.read()

    def fill(self, snapshot: Snapshot, host: Host) -> None:
        snapshot.families += [
            _bytes(catalogue.PAGE_DIRTIED_BYTES, self._dirtied, host.cgroups),
            _bytes(catalogue.PAGE_WRITTEN_BYTES, self._written, host.cgroups),
        ]

    def forget(self, gone: set[tuple[int, int]], host: Host, now: float) -> None:
        self._dirtied.forget(gone, host.cgroups)
        self._written.forget(gone, host.cgroups)


def _bytes(metric: Metric, pages: CgroupMap, cgroups: Cgroups) -> Family:
    rows = pages.table(cgroups).rows.items()
    return family(metric, ((labels, _PAGES.unpack(row)[0] * mmap.PAGESIZE) for labels, row in rows))
