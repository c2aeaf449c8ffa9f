# SPDX-License-Identifier: Apache-2.0
"""Stalls for memory by cgroup: bpf/memory_stall.bpf.c."""

from __future__ import annotations

import os

from writeback_exporter.collector import Host
from writeback_exporter.features import Feature, Refused
from writeback_exporter.kernel.loader import Kernel
from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.exposition import Snapshot
from writeback_exporter.names.cgroups import Hierarchies
from writeback_exporter.probes.base import CgroupMap, Probe

_PRESSURE = "/proc/pressure"  # absent where PSI is off, on all kernels


class MemoryStall(Probe):
    """Each stall of tasks for memory (reclaim, refault, swap-in), by cgroup; needs fentry."""

    name = "memory_stall"
    default = False

    def __init__(self) -> None:
        super().__init__()
        stalls = self._value_layout("memory_stall")
        self._first = self.file.enum("stall_exponents")["STALL_FIRST"]
        self._picked = stalls.pick("total_ns", "slots")
        self._stalls = CgroupMap(self, "memory_stall")

    def load(self, kernel: Kernel, hierarchies: Hierarchies) -> list[Feature]:
        if not kernel.has_function("psi_memstall_enter") or not os.path.exists(_PRESSURE):
            raise Refused(
                "PSI off",
                "the kernel does not account pressure (/proc/pressure is absent)",
                "boot with psi=1, on a kernel built with CONFIG_PSI=y",
            )
        constants = {"memory_v1": hierarchies.memory_v1}
        self.bpf = kernel.load(self.file, ["stall_leave", "stall_enter"], constants)
        self._stalls.make_room(hierarchies.task)
        return []

    def read(self) -> None:
        self._dump("stalled")  # for how full it is
        self._stalls.read()

    def fill(self, snapshot: Snapshot, host: Host) -> None:
        table = self._stalls.table(host.cgroups)
        snapshot.histograms.append(
            table.histogram(catalogue.MEMORY_STALL_SECONDS, self._first, self._picked)
        )

    def forget(self, gone: set[tuple[int, int]], host: Host, now: float) -> None:
        self._stalls.forget(gone, host.cgroups)
