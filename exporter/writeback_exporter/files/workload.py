# SPDX-License-Identifier: Apache-2.0
"""Who each cgroup is: its unit, container, pod, user and Slurm job (writeback_cgroup_info).

What the path tells is known at once. Names of pods and containers come from files of kubelet and
the runtimes, which a thread reads: on a dead disk it hangs for ever, and scrapes go on with what is
known by then. So does the exporter's end.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

from writeback_exporter.collector import Host
from writeback_exporter.features import Feature
from writeback_exporter.files.base import Reader
from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.exposition import Labels, Snapshot, family
from writeback_exporter.names.cgroups import Cgroups
from writeback_exporter.names.containers import Container, Names, Pod, Search
from writeback_exporter.names.workloads import UNKNOWN, Workload, parse
from writeback_exporter.settings import Settings

log = logging.getLogger(__name__)

_PASS_SECONDS = 5.0
"""Between two looks for what is new: a container has its names also if no scrape falls into the
time that it runs."""
_HANG_SECONDS = 60.0
"""After which the log says that names are not read any more."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A series, and of what it was made."""

    workload: Workload
    pod: Pod | None
    container: Container | None
    labels: Labels


class Workloads(Reader):
    """Who each cgroup is: unit, container, pod, user, Slurm job."""

    name = "workload"

    def __init__(self) -> None:
        self._seen: tuple[int, tuple[int, int]] | None = None
        self._workloads: dict[str, Workload] = {}
        """By label. Replaced when cgroups came or went, never changed: the thread reads it."""
        self._names = Names()
        """Replaced by the thread."""
        self._rows: dict[str, _Row] = {}
        self._stop = threading.Event()
        self._searching_since: float | None = None
        self._hanging_since: float | None = None

    def open(self, settings: Settings, host: Host, lock: threading.Lock) -> list[Feature]:
        arguments = (Search(settings.rootfs), host.cgroups, lock)
        self._searcher = threading.Thread(
            target=self._search, args=arguments, name=self.name, daemon=True
        )
        return []

    def begin(self) -> None:
        self._searcher.start()

    def fill(self, snapshot: Snapshot, host: Host) -> None:
        self._learn(host.cgroups)
        names = self._names
        self._rows = {
            cgroup: self._row(cgroup, workload, names)
            for cgroup, workload in self._workloads.items()
            if workload is not UNKNOWN
        }
        rows = ((row.labels, 1) for row in self._rows.values())
        snapshot.families.append(family(catalogue.CGROUP_INFO, rows))
        self._tell_if_hanging()

    def close(self) -> None:
        self._stop.set()  # and no more: the thread may hang

    def _learn(self, cgroups: Cgroups) -> None:
        """Takes in which cgroups there are; for the holder of the lock."""
        # What is forgotten changes the counts alone.
        now = (cgroups.generation, cgroups.counts)
        if now == self._seen:
            return
        self._seen = now
        labels: set[str] = set()
        for hierarchy in cgroups.hierarchies.all:
            labels |= cgroups.labels_in_use(hierarchy, set())
        old = self._workloads
        self._workloads = {label: old.get(label) or parse(label) for label in labels}

    def _row(self, cgroup: str, workload: Workload, names: Names) -> _Row:
        pod = names.pods.get(workload.pod_uid)
        container = names.containers.get(workload.container_id)
        row = self._rows.get(cgroup)
        # 10,000 rows take 4 ms where they are as before.
        if row and row.pod is pod and row.container is container and row.workload is workload:
            return row
        labels = (
            cgroup,
            workload.runtime or (container.runtime if container else ""),
            workload.container_id,
            workload.container or (container.name if container else ""),
            pod.name if pod else "",
            pod.namespace if pod else "",
            workload.pod_uid,
            workload.qos_class,
            workload.slice,
            workload.unit,
            workload.user,
            workload.slurm_job,
            workload.slurm_step,
        )
        return _Row(workload, pod, container, labels)

    def _tell_if_hanging(self) -> None:
        since = self._searching_since
        if since is None or since == self._hanging_since:
            return
        if time.monotonic() - since > _HANG_SECONDS:
            self._hanging_since = since
            log.warning(
                "new containers have no names: a disk below --path.rootfs has not answered for "
                "%.0f s",
                _HANG_SECONDS,
            )

    # Names

    def _search(self, search: Search, cgroups: Cgroups, lock: threading.Lock) -> None:
        told: set[int | None] = set()
        while not self._stop.is_set():
            with lock:
                self._learn(cgroups)
                workloads = self._workloads
            self._searching_since = time.monotonic()
            try:
                self._names = search.find(workloads.values(), self._searching_since)
            except Exception as error:  # whatever it is, it looks again
                log.error("cannot read the names of containers: %s", error)
                log.debug("its traceback", exc_info=True)
            self._searching_since = None
            problem = search.problem
            if problem and problem.errno not in told:
                told.add(problem.errno)
                log.warning(
                    "pods or containers have no names: cannot read %s: %s; mount the host's "
                    "directory there, read-only, and run as root or with CAP_DAC_READ_SEARCH "
                    "(docs/identity.md)",
                    problem.filename,
                    problem.strerror,
                )
            self._stop.wait(_PASS_SECONDS)
