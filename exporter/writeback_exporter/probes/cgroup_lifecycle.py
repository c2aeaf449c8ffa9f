# SPDX-License-Identifier: Apache-2.0
"""Keeps the names of cgroups true while they come and go: bpf/cgroup_lifecycle.bpf.c."""

from __future__ import annotations

import logging
import os
import select
import sys
import threading
import time
import zlib

from writeback_exporter.collector import Host
from writeback_exporter.features import Feature
from writeback_exporter.kernel.libbpf import BpfError, RingBuffer
from writeback_exporter.kernel.loader import Kernel, refusal
from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.exposition import Snapshot, family
from writeback_exporter.names.cgroups import NEAR, Cgroups, EventKind, Hierarchies
from writeback_exporter.probes.base import Probe

log = logging.getLogger(__name__)

_RECORDS = "cgroup_events"
_RULES = ((1 << 32) - 1, 0)
"""No cgroup has this (hierarchy, id): under it cgroup_labels says by which rules it was made."""
_KEPT_PATH = 1023


class CgroupLifecycle(Probe):
    """Applies the kernel's cgroup events to the names, at each scrape and in between."""

    name = "cgroup_lifecycle"

    def __init__(self, cgroups: Cgroups, lock: threading.Lock) -> None:
        """`lock` is held by whoever uses `cgroups`."""
        super().__init__()
        self._cgroups = cgroups
        self._lock = lock
        self._record = self._value_layout("scratch")
        self._fields = self._record.pick("id", "hierarchy", "kind", "path")
        self._ring: RingBuffer | None = None
        self._follower: threading.Thread | None = None
        self._stop_read, self._stop_write = -1, -1
        self._dropped = 0
        self._warned = False
        self._identity = self._key_layout("exited_cgroups").pick("id", "hierarchy")
        self._exited = self._value_layout("exited_cgroups").pick("released", "path")
        whys = self.file.enum("cgroup_label")
        self._whys = {
            "": whys["LABEL_OWN"],
            "limit": whys["LABEL_LIMIT"],
            "no name": whys["LABEL_NO_NAME"],
        }
        self._kept_exited: dict[tuple[int, int], bool] = {}
        """By (hierarchy, id): what is in exited_cgroups, and whether as released."""
        self._kept_labels: set[tuple[int, int]] = set()
        """(hierarchy, id) of what is in cgroup_labels."""
        self._cannot_keep = False

    def load(self, kernel: Kernel, hierarchies: Hierarchies) -> list[Feature]:
        kernel.arity("cgroup_mkdir", known=(2,))
        self.bpf = kernel.load(
            self.file,
            ["cgroup_mkdir", "cgroup_rename", "cgroup_rmdir", "cgroup_release"],
            {
                "io_hierarchy": hierarchies.io.id,
                "task_hierarchy": hierarchies.task.id,
                "memory_hierarchy": (hierarchies.memory or hierarchies.task).id,
            },
        )
        try:
            self._ring = RingBuffer(self.map(_RECORDS), self._apply)
        except BpfError as error:
            super().close()
            raise refusal(error) from error
        self._stop_read, self._stop_write = os.pipe()
        return []

    def begin(self) -> None:
        if self._ring:
            self._follower = threading.Thread(target=self._follow, name=self.name, daemon=True)
            self._follower.start()

    def _apply(self, record: bytes) -> None:
        # Only the bytes of the path that there are were sent.
        padded = record.ljust(self._record.size, b"\0")
        cgroup, hierarchy, kind, path = self._fields.unpack(padded)
        path = path.split(b"\0", 1)[0]
        self._cgroups.apply(EventKind(kind), hierarchy, cgroup, path, time.monotonic())
        if self._keeps and kind in (EventKind.RMDIR, EventKind.RELEASE):
            # Now, for with the next record this one is gone from the ring buffer.
            self._keep_exited((hierarchy, cgroup))

    def recall(self) -> None:
        """After the first walk: takes in what the exporter before this one has known, if it has
        left its pins."""
        if not self._keeps:
            return
        exited = []
        for key, value in self._entries("exited_cgroups"):
            cgroup, hierarchy = self._identity.unpack(key)
            released, path = self._exited.unpack(value)
            exited.append((hierarchy, cgroup, path.split(b"\0", 1)[0], bool(released)))
            self._kept_exited[hierarchy, cgroup] = bool(released)
        labels = {}
        for key, value in self._entries("cgroup_labels"):
            cgroup, hierarchy = self._identity.unpack(key)
            labels[hierarchy, cgroup] = int.from_bytes(value, sys.byteorder)
        rules = zlib.crc32(self._cgroups.rules.text.encode())
        if labels.pop(_RULES, rules) != rules:
            # Whoever changes the rules wants the new ones to count, though OTHER's counts go back.
            for cgroup in labels:
                self.map("cgroup_labels").delete(self._key_of(cgroup))
            labels.clear()
        self.map("cgroup_labels").update(self._key_of(_RULES), rules.to_bytes(4, sys.byteorder))
        self._kept_labels = {*labels}
        texts = {number: why for why, number in self._whys.items()}
        self._cgroups.recall(
            exited,
            {cgroup: texts[why] for cgroup, why in labels.items() if why in texts},
            time.monotonic(),
        )

    @property
    def _keeps(self) -> bool:
        """Whether another exporter will ask for what this one knows."""
        return self.bpf is not None and self.bpf.pinned

    def _key_of(self, cgroup: tuple[int, int]) -> bytes:
        hierarchy, number = cgroup
        return self._identity.pack(number, hierarchy)

    def _keep_exited(self, cgroup: tuple[int, int]) -> None:
        """Writes down what is known of an exited cgroup, if that has changed."""
        known = self._cgroups.exit_of(*cgroup)
        if known is None:
            if self._kept_exited.pop(cgroup, None) is not None:
                self.map("exited_cgroups").delete(self._key_of(cgroup))
            return
        path, released = known
        if self._kept_exited.get(cgroup) == released or len(path) > _KEPT_PATH:
            return
        if self._keep("exited_cgroups", cgroup, self._exited.pack(released, path)):
            self._kept_exited[cgroup] = released

    def _keep(self, name: str, cgroup: tuple[int, int], value: bytes) -> bool:
        try:
            self.map(name).update(self._key_of(cgroup), value)
        except BpfError as error:
            if not self._cannot_keep:
                log.warning("%s; after a restart some cgroups will count as other", error)
            self._cannot_keep = True
            return False
        return True

    def _keep_labels(self) -> None:
        """Writes down which label was given or taken since the last time."""
        labelled = self._cgroups.labelled()
        for cgroup in labelled.keys() - self._kept_labels:
            why = self._whys.get(labelled[cgroup])  # none of what a rule made OTHER
            if why is not None and self._keep(
                "cgroup_labels", cgroup, why.to_bytes(4, sys.byteorder)
            ):
                self._kept_labels.add(cgroup)
        for cgroup in self._kept_labels - labelled.keys():
            self.map("cgroup_labels").delete(self._key_of(cgroup))
            self._kept_labels.remove(cgroup)

    def _follow(self) -> None:
        """Empties the ring buffer between scrapes, so that it does not overflow."""
        assert self._ring is not None
        poll = select.poll()
        poll.register(self._ring.fileno(), select.POLLIN)
        poll.register(self._stop_read, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._stop_read in ready:
                return
            try:
                with self._lock:
                    self._ring.consume()
            except BpfError as error:
                log.warning("%s; names of new cgroups wait for the next scrape", error)
                return
            # Events come in bursts: one wakeup takes many.
            time.sleep(0.05)

    def read(self) -> None:
        if self._ring is None:
            # Events are refused here, IO is not: names from the tree alone are better than none.
            self._cgroups.walk(time.monotonic())
            return
        self._ring.consume()
        dropped = sum(self.drops().values())
        if dropped != self._dropped:
            self._cgroups.walk(time.monotonic())
            self._dropped = dropped
            if self._keeps:
                for cgroup in self._cgroups.exited():
                    self._keep_exited(cgroup)

    def fill(self, snapshot: Snapshot, host: Host) -> None:
        cgroups = host.cgroups
        live, exited = cgroups.counts
        collapsed = (((reason,), count) for reason, count in cgroups.collapsed.items())
        snapshot.families += [
            family(catalogue.EXPORTER_CGROUPS, [(("live",), live), (("exited",), exited)]),
            family(catalogue.EXPORTER_COLLAPSED_CGROUPS, collapsed),
            family(catalogue.EXPORTER_CGROUP_LABELS, [((), cgroups.shown)]),
            family(catalogue.EXPORTER_CGROUP_LIMIT, [((), cgroups.rules.limit)]),
        ]
        self._warn_before(cgroups)

    def _warn_before(self, cgroups: Cgroups) -> None:
        """Says once that the limit is near, and once more when it was not in between."""
        limit = cgroups.rules.limit
        if cgroups.shown >= NEAR * limit and not self._warned:
            log.warning(
                "%d of at most %d cgroups are exported; what the others do counts as other: "
                "collapse or exclude some, or raise --cgroup.limit",
                cgroups.shown,
                limit,
            )
        self._warned = cgroups.shown >= NEAR * limit

    def forget(self, gone: set[tuple[int, int]], host: Host, now: float) -> None:
        host.cgroups.forget(gone, now)
        if self._keeps:
            for cgroup in gone:
                self._keep_exited(cgroup)
            self._keep_labels()

    def stop_following(self) -> None:
        """Ends the thread; whoever calls this must not hold the lock."""
        if self._follower:
            os.write(self._stop_write, b"\0")
            self._follower.join()
            self._follower = None
            os.close(self._stop_read)
            os.close(self._stop_write)

    def close(self) -> None:
        if self._ring:
            self._ring.close()
            self._ring = None
        super().close()
