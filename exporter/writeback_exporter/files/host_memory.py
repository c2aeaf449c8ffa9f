# SPDX-License-Identifier: Apache-2.0
"""The host's dirty memory, thresholds, paging and reclaim (/proc/vmstat), and vm.dirty_*."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator

from writeback_exporter.collector import Host
from writeback_exporter.features import Feature, Refused
from writeback_exporter.files.base import Reader, content, is_count, keyed, number
from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.catalogue import Metric
from writeback_exporter.metrics.exposition import Labels, Snapshot, family
from writeback_exporter.settings import Settings

_PAGE = mmap.PAGESIZE
_KIB = 1024

# The thresholds are calculated when the file is read (vmstat_start(), mm/vmstat.c), never stale;
# for a reader with a real-time priority they would be a quarter higher (domain_dirty_limits()).
_GAUGES = {
    b"nr_dirty": catalogue.HOST_DIRTY_BYTES,
    b"nr_writeback": catalogue.HOST_WRITEBACK_BYTES,
    b"nr_dirty_threshold": catalogue.HOST_DIRTY_THRESHOLD_BYTES,
    b"nr_dirty_background_threshold": catalogue.HOST_DIRTY_BACKGROUND_THRESHOLD_BYTES,
}

# pgpgin and pgpgout count sectors and are printed in KiB (vmstat_start()), all others are pages.
_COUNTERS = {
    b"nr_dirtied": (catalogue.HOST_DIRTIED_BYTES, _PAGE),
    b"nr_written": (catalogue.HOST_WRITTEN_BYTES, _PAGE),
    b"nr_throttled_written": (catalogue.HOST_THROTTLED_WRITTEN_BYTES, _PAGE),
    b"pgpgin": (catalogue.HOST_PAGE_IN_BYTES, _KIB),
    b"pgpgout": (catalogue.HOST_PAGE_OUT_BYTES, _KIB),
    b"pswpin": (catalogue.HOST_SWAP_IN_BYTES, _PAGE),
    b"pswpout": (catalogue.HOST_SWAP_OUT_BYTES, _PAGE),
}

# pgsteal_anon and pgsteal_file are the same pages by another division.
_RECLAIMERS = ("kswapd", "direct", "khugepaged", "proactive")
_STALLS = b"allocstall_"

_SETTINGS = {
    "dirty_ratio": (catalogue.HOST_DIRTY_RATIO, 100),
    "dirty_background_ratio": (catalogue.HOST_DIRTY_BACKGROUND_RATIO, 100),
    "dirty_bytes": (catalogue.HOST_DIRTY_LIMIT_BYTES, 1),
    "dirty_background_bytes": (catalogue.HOST_DIRTY_BACKGROUND_LIMIT_BYTES, 1),
    "dirty_expire_centisecs": (catalogue.HOST_DIRTY_EXPIRE_SECONDS, 100),
    "dirty_writeback_centisecs": (catalogue.HOST_DIRTY_WRITEBACK_INTERVAL_SECONDS, 100),
}


class HostMemory(Reader):
    """Dirty memory, its thresholds, paging and reclaim of the whole host, and vm.dirty_*."""

    name = "host_memory"

    def __init__(self) -> None:
        self._procfs = ""
        self._highest: dict[bytes, int] = {}

    def open(self, settings: Settings, host: Host, lock: threading.Lock) -> list[Feature]:
        self._procfs = settings.procfs
        if not self._vmstat():
            raise Refused(
                "no vmstat",
                f"cannot read {settings.procfs}/vmstat",
                "mount procfs there, or say where it is with --path.procfs",
            )
        return []

    def fill(self, snapshot: Snapshot, host: Host) -> None:
        vmstat = self._vmstat()
        snapshot.families += [
            family(metric, [((), vmstat[name] * _PAGE)] if name in vmstat else [])
            for name, metric in _GAUGES.items()
        ]
        snapshot.families.append(family(catalogue.HOST_DIRTY_FREERUN_BYTES, _freerun(vmstat)))
        self._fill_counters(snapshot, vmstat)
        snapshot.families += [
            family(metric, self._setting(name, parts))
            for name, (metric, parts) in _SETTINGS.items()
        ]

    def _fill_counters(self, snapshot: Snapshot, vmstat: dict[bytes, int]) -> None:
        counters: list[tuple[Metric, int, dict[bytes, Labels]]] = [
            (metric, unit, {name: ()}) for name, (metric, unit) in _COUNTERS.items()
        ]
        reclaimed: dict[bytes, Labels] = {f"pgsteal_{by}".encode(): (by,) for by in _RECLAIMERS}
        stalls: dict[bytes, Labels] = {
            name: (name.removeprefix(_STALLS).decode(),)
            for name in vmstat
            if name.startswith(_STALLS)
        }
        counters += [
            (catalogue.HOST_RECLAIMED_BYTES, _PAGE, reclaimed),
            (catalogue.HOST_ALLOCATION_STALLS, 1, stalls),
        ]
        for metric, unit, names in counters:
            rows = (
                (labels, self._counted(name, vmstat[name]) * unit)
                for name, labels in names.items()
                if name in vmstat
            )
            snapshot.families.append(family(metric, rows))

    def _counted(self, name: bytes, count: int) -> int:
        """The count, or the highest before: a page that could not be written and is dirty again is
        taken off nr_dirtied (folio_account_redirty(), mm/page-writeback.c)."""
        self._highest[name] = max(count, self._highest.get(name, 0))
        return self._highest[name]

    def _vmstat(self) -> dict[bytes, int]:
        text = content(f"{self._procfs}/vmstat") or b""
        return {name: count for name, count in keyed(text).items() if is_count(count)}

    def _setting(self, name: str, parts: int) -> Iterator[tuple[Labels, float]]:
        value = number(f"{self._procfs}/sys/vm/{name}")
        if value is not None:
            yield (), value / parts


def _freerun(vmstat: dict[bytes, int]) -> Iterator[tuple[Labels, int]]:
    """dirty_freerun_ceiling(), mm/page-writeback.c."""
    thresholds = [
        vmstat[name]
        for name in (b"nr_dirty_threshold", b"nr_dirty_background_threshold")
        if name in vmstat
    ]
    if len(thresholds) == 2:
        yield (), sum(thresholds) // 2 * _PAGE
