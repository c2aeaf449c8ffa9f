# SPDX-License-Identifier: Apache-2.0
"""Limits of BDIs (/sys/class/bdi), and what each cgroup has dirty on them (debugfs)."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from writeback_exporter.collector import Host
from writeback_exporter.features import Feature, Refused
from writeback_exporter.files.base import Reader, content, is_count, number
from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.catalogue import Metric
from writeback_exporter.metrics.exposition import Labels, Snapshot, family
from writeback_exporter.names.cgroups import Hierarchy
from writeback_exporter.privileges import DEBUGFS, refusal
from writeback_exporter.settings import Settings

log = logging.getLogger(__name__)

BDIS_LIMIT = 1024
"""Each network file system and each FUSE mount has a BDI, and a host may have thousands; the limits
of this many take 35 ms a scrape. Disks come first."""

# The finer file of the same setting, where there is one (6.2), counts parts of a million
# (BDI_RATIO_SCALE, include/linux/backing-dev-defs.h).
_SETTINGS: tuple[tuple[Metric, tuple[tuple[str, float], ...]], ...] = (
    (catalogue.BDI_MIN_RATIO, (("min_ratio_fine", 1_000_000), ("min_ratio", 100))),
    (catalogue.BDI_MAX_RATIO, (("max_ratio_fine", 1_000_000), ("max_ratio", 100))),
    (catalogue.BDI_MIN_BYTES, (("min_bytes", 1),)),
    (catalogue.BDI_MAX_BYTES, (("max_bytes", 1),)),
    (catalogue.BDI_STRICT_LIMIT, (("strict_limit", 1),)),
    (catalogue.BDI_READ_AHEAD_BYTES, (("read_ahead_kb", 1 / 1024),)),
)

# Keys of wb_stats and, with another prefix, of stats; all in KiB (mm/backing-dev.c).
_GAUGES = {
    "Reclaimable": catalogue.WB_RECLAIMABLE_BYTES,
    "Writeback": catalogue.WB_WRITEBACK_BYTES,
    "DirtyThresh": catalogue.WB_DIRTY_THRESHOLD_BYTES,
    "WriteBandwidth": catalogue.WB_WRITE_BANDWIDTH_BYTES,
}
_COUNTERS = {
    "Dirtied": catalogue.WB_DIRTIED_BYTES,
    "Written": catalogue.WB_WRITTEN_BYTES,
}
_LINE = re.compile(rb"^(?:Bdi|Wb)(\w+): +(\d+)", re.MULTILINE)
_ROOT = 1  # inode of every hierarchy's root

Stats = Counter[str]
"""Bytes, and bytes per second, by key."""


@dataclass(slots=True)
class _Wb:
    """A BDI's part of one cgroup, as it was last read."""

    stats: Stats
    forgotten: bool = False
    """Its cgroup is removed and was exported for the last time, though the kernel keeps it."""


class Bdis(Reader):
    """Dirty limits and read-ahead of BDIs, and dirty memory by BDI and cgroup."""

    name = "bdi"

    def __init__(self) -> None:
        self._sysfs = ""
        self._hierarchy = Hierarchy(0, "")
        self._file = ""
        self._has_warned = False
        self._bdis: list[str] = []
        self._texts: dict[str, bytes | None] = {}
        self._wbs: dict[tuple[str, int], _Wb] = {}
        self._counted: dict[Labels, Stats] = {}

    def open(self, settings: Settings, host: Host, lock: threading.Lock) -> list[Feature]:
        self._sysfs = settings.sysfs
        hierarchies = host.cgroups.hierarchies
        self._hierarchy = hierarchies.memory or hierarchies.task
        try:
            names = os.listdir(f"{self._sysfs}/class/bdi")
        except OSError as error:
            raise Refused(
                "unreadable",
                f"cannot read {self._sysfs}/class/bdi: {error.strerror}",
                "mount sysfs there, or say where it is with --path.sysfs",
            ) from error
        try:
            self._file = self._debugfs_file(names)
        except Refused as refusal:
            return [Feature.refused("bdi_debugfs", refusal)]
        if self._file == "wb_stats":
            return [Feature("bdi_debugfs", True), Feature("bdi_debugfs_cgroups", True)]
        by_cgroup = Refused(
            "not in this kernel",
            "debugfs has of each BDI only the part of the root cgroup (before 6.10)",
            "use a kernel from 6.10 on, built with CONFIG_CGROUP_WRITEBACK, or do without",
        )
        return [
            Feature("bdi_debugfs", True),
            Feature.refused("bdi_debugfs_cgroups", by_cgroup),
        ]

    def _debugfs_file(self, bdis: list[str]) -> str:
        """The file below debugfs' directory of a BDI to read: wb_stats, or before 6.10 stats."""
        directory = f"{self._sysfs}/kernel/debug/bdi"
        try:
            there = [bdi for bdi in os.listdir(directory) if bdi in bdis]
        except FileNotFoundError as error:
            raise Refused(
                "not mounted",
                f"{directory} is not there",
                f"mount -t debugfs debugfs {self._sysfs}/kernel/debug, in a container from the "
                "host; a kernel without CONFIG_DEBUG_FS has none",
            ) from error
        except PermissionError as error:
            detail = f"cannot read {directory}: {error.strerror}"
            raise refusal(detail, DEBUGFS.capabilities) from error
        except OSError as error:
            raise Refused(
                "unreadable", f"cannot read {directory}: {error.strerror}", "do without"
            ) from error
        for file in ("wb_stats", "stats"):
            if any(content(f"{directory}/{bdi}/{file}") for bdi in there):
                return file
        raise Refused(
            "unreadable",
            f"no file stats in {directory} can be read",
            "allow it in the container's LSM, or do without",
        )

    def read(self) -> None:
        self._bdis = self._listed()
        if self._file:
            directory = f"{self._sysfs}/kernel/debug/bdi"
            # Before the last events of cgroups are taken in: each id has its name by then.
            self._texts = {bdi: content(f"{directory}/{bdi}/{self._file}") for bdi in self._bdis}

    def fill(self, snapshot: Snapshot, host: Host) -> None:
        for metric, files in _SETTINGS:
            rows = (
                ((bdi,), value)
                for bdi in self._bdis
                if (value := self._setting(bdi, files)) is not None
            )
            snapshot.families.append(family(metric, rows))
        if self._file:
            self._fill_wbs(snapshot, host)

    def _setting(self, bdi: str, files: tuple[tuple[str, float], ...]) -> float | None:
        for file, parts in files:
            value = number(f"{self._sysfs}/class/bdi/{bdi}/{file}")
            if value is not None:
                return value / parts
        return None

    def _listed(self) -> list[str]:
        """Names of the BDIs to export: disks, other than loop devices and card readers that have
        nothing in them, then the rest."""
        disks, others = [], []
        for bdi in sorted(os.listdir(f"{self._sysfs}/class/bdi")):
            size = number(f"{self._sysfs}/dev/block/{bdi}/size")
            if size is None:
                others.append(bdi)
            elif size:
                disks.append(bdi)
        bdis = disks + others
        if len(bdis) > BDIS_LIMIT and not self._has_warned:
            log.warning("%d BDIs: only the first %d are exported", len(bdis), BDIS_LIMIT)
            self._has_warned = True
        return bdis[:BDIS_LIMIT]

    def _fill_wbs(self, snapshot: Snapshot, host: Host) -> None:
        now: dict[Labels, Stats] = {}
        wbs: dict[tuple[str, int], _Wb] = {}
        for bdi, text in self._texts.items():
            if text is None:  # whatever the reason, what was counted is not counted again
                wbs |= {key: wb for key, wb in self._wbs.items() if key[0] == bdi}
                continue
            for cgroup, stats in _blocks(text):
                wb = wbs[bdi, cgroup] = self._wbs.get((bdi, cgroup)) or _Wb(Stats())
                idle = all(stats[key] == wb.stats[key] for key in (*_COUNTERS, "Reclaimable"))
                if idle and (wb.forgotten or not wb.stats):  # a BDI that nobody writes to has one
                    continue
                labels = (bdi, host.cgroups.name(self._hierarchy, cgroup))
                counted = self._counted.setdefault(labels, Stats())
                for key in _COUNTERS:
                    # Less than before: the kernel has begun another one for the same cgroup (when
                    # a controller is switched), has freed one of two, or took a page back.
                    counted[key] += max(0, stats[key] - wb.stats[key])
                now.setdefault(labels, Stats()).update(stats)
                wb.stats, wb.forgotten = stats, False
        self._wbs = wbs
        self._counted = {
            labels: counted for labels, counted in self._counted.items() if labels[0] in self._texts
        }
        for key, metric in _GAUGES.items():
            rows = ((labels, stats[key]) for labels, stats in now.items() if key in stats)
            snapshot.families.append(family(metric, rows))
        for key, metric in _COUNTERS.items():
            rows = ((labels, stats[key]) for labels, stats in self._counted.items())
            snapshot.families.append(family(metric, rows))

    def forget(self, gone: set[tuple[int, int]], host: Host, now: float) -> None:
        dead = {cgroup for tree, cgroup in gone if tree == self._hierarchy.id}
        if not dead:
            return
        for (_, cgroup), wb in self._wbs.items():
            wb.forgotten = wb.forgotten or cgroup in dead
        in_use = host.cgroups.labels_in_use(self._hierarchy, gone)
        self._counted = {
            labels: counted for labels, counted in self._counted.items() if labels[1] in in_use
        }


def _blocks(text: bytes) -> Iterator[tuple[int, Stats]]:
    """(cgroup's id, stats) of each part of a BDI. One cgroup may have two for a while, an old one
    that is being given up and a new one: they are one here."""
    parts: dict[int, Stats] = {}
    for block in text.split(b"\n\n"):
        values = {key.decode(): int(value) for key, value in _LINE.findall(block)}
        cgroup = values.pop("CgIno", _ROOT)
        stats = {key: value * 1024 for key, value in values.items() if is_count(value)}
        if stats:
            parts.setdefault(cgroup, Stats()).update(stats)
    yield from parts.items()
