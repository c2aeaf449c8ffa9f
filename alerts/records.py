# SPDX-License-Identifier: Apache-2.0
"""Recording rules: what alerts compare, and what is too slow to ask for afresh on a dashboard.

Aggregations are `without`, so that labels which a Prometheus adds to its targets stay. Names are
level:what; a record is used by its Python name, so that none can be misspelt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from alerts.promql import HOST, Series, buckets, counter, counts, gauge, sums, up_to
from alerts.settings import Settings
from writeback_exporter.metrics import catalogue as c
from writeback_exporter.metrics.catalogue import Metric

Where = Callable[[Series], Series]
"""Chooses hosts."""


def everywhere(series: Series) -> Series:
    return series


# debugfs tells of all of a BDI's cgroups, since 6.10; before, it is not asked.
def _by_cgroup(where: Where) -> str:
    known = gauge(c.EXPORTER_FEATURE_AVAILABLE).where('feature="bdi_debugfs_cgroups"')
    return f"and on ({HOST}) {where(known)} == 1"


def host_dirty(where: Where = everywhere) -> str:
    """What counts against the host's limits, in bytes."""
    return f"{where(gauge(c.HOST_DIRTY_BYTES))} + {where(gauge(c.HOST_WRITEBACK_BYTES))}"


def bdi_dirty(where: Where = everywhere) -> str:
    """A BDI's backlog in bytes; without debugfs that of the cgroup that was throttled last."""
    reclaimable, writeback = (
        where(gauge(c.WB_RECLAIMABLE_BYTES)),
        where(gauge(c.WB_WRITEBACK_BYTES)),
    )
    return (
        f"sum without (cgroup) ({reclaimable} + {writeback})\n{_by_cgroup(where)}\n"
        f"or {where(gauge(c.BDI_DIRTY_BYTES))}"
    )


def bdi_written(window: str, where: Where = everywhere) -> str:
    """Bytes a second written back to a BDI; without debugfs those that flushers wrote."""
    return (
        f"sum without (cgroup) (rate({where(counter(c.WB_WRITTEN_BYTES))}[{window}]))\n"
        f"{_by_cgroup(where)}\n"
        f"or sum without (reason) (rate({where(counter(c.WORK_BYTES))}[{window}]))"
    )


@dataclass(frozen=True, slots=True)
class Record:
    series: Series
    expr: str


class Records:
    """The rules by name; `all` in the order in which they need each other."""

    def __init__(self, settings: Settings) -> None:
        self.all: list[Record] = []
        w = settings.window

        # Throttling: seconds asleep per second, which is tasks asleep.
        slept = sums(c.DIRTY_THROTTLE_SECONDS)
        self.cgroup_throttled = self._add(
            "cgroup:dirty_throttled_seconds_rate",
            ("cgroup", "bdi"),
            f"rate({slept}[{w}])",
        )
        self.bdi_throttled = self._add(
            "bdi:dirty_throttled_seconds_rate",
            ("bdi",),
            f"sum without (cgroup) ({self.cgroup_throttled})",
        )
        self.node_throttled = self._add(
            "node:dirty_throttled_seconds_rate",
            (),
            f"sum without (bdi) ({self.bdi_throttled})",
        )

        self.bdi_dirty = self._add("bdi:dirty_bytes", ("bdi",), bdi_dirty())
        self.bdi_written = self._add("bdi:written_bytes_rate", ("bdi",), bdi_written(w))
        self.bdi_written_best = self._add(
            "bdi:written_bytes_rate_best", ("bdi",), f"max_over_time({self.bdi_written}[7d])"
        )
        # Of the domain that was throttled last; its freerun point is in the same proportion to its
        # limit as the host's (domain_dirty_limits and wb_dirty_limits, mm/page-writeback.c).
        self.bdi_freerun = self._add(
            "bdi:dirty_freerun_ratio",
            ("bdi",),
            f"{gauge(c.BDI_DIRTY_BYTES)}\n"
            f"/ ({gauge(c.BDI_DIRTY_THRESHOLD_BYTES)} * on ({HOST}) group_left ()\n"
            f"  ({gauge(c.HOST_DIRTY_FREERUN_BYTES)} / {gauge(c.HOST_DIRTY_THRESHOLD_BYTES)}))",
        )
        self.bdi_drain = self._add(
            "bdi:drain_seconds", ("bdi",), f"{self.bdi_dirty} / {self.bdi_written}"
        )
        # Pauses that a limit of the BDI or of the cgroup decided, not the host's.
        domains = counter(c.DIRTY_THROTTLE_DOMAIN)
        own = domains.where('domain!="global"')
        self.bdi_own_limit = self._add(
            "bdi:dirty_throttled_own_limit_ratio",
            ("bdi",),
            f"sum without (domain) (rate({own}[{w}]))\n"
            f"/ sum without (domain) (rate({domains}[{w}]))",
        )
        # The disks at the bottom of a BDI's device, whatever lies between.
        bdi_info = gauge(c.BDI_INFO).where('device!=""')
        self.device_throttled = self._add(
            "device:dirty_throttled_seconds_rate",
            ("device",),
            f"""label_replace(
  sum by ({HOST}, disk) (
    {gauge(c.DEVICE_DISK_INFO)} * on ({HOST}, device) group_left ()
    sum by ({HOST}, device) (
      {self.bdi_throttled} * on ({HOST}, bdi) group_left (device) {bdi_info}
    )
  ),
  "device", "$1", "disk", "(.+)"
)""",
        )

        # Dirty memory of the host.
        self.node_dirty = self._add("node:dirty_bytes", (), host_dirty())
        self.node_dirty_rise = self._add(
            "node:dirty_rise_bytes",
            (),
            f"{self.node_dirty} - min_over_time({self.node_dirty}[10m])",
        )
        self._add(
            "node:pgsteal_kswapd_rate",
            (),
            "sum without (by) (rate("
            + str(counter(c.HOST_RECLAIMED_BYTES).where('by="kswapd"'))
            + f"[{w}]))",
        )

        # Block IO by disk, which is what is slow, and by owner.
        self.device_rate = self._add(
            "device:block_io_operations_rate",
            ("device", "op"),
            f"sum without (cgroup) (rate({counts(c.BLOCK_IO_DEVICE_SECONDS)}[{w}]))",
        )
        self.device_slow = self._add(
            "device:block_io_slow_ratio",
            ("device", "op"),
            _slower(c.BLOCK_IO_DEVICE_SECONDS, settings.slow_seconds, 'op=~"read|flush"', w)
            + "\nor "
            + _slower(c.BLOCK_IO_DEVICE_SECONDS, settings.slow_write_seconds, 'op="write"', w),
        )
        self.cgroup_device_p99 = self._p99("device", c.BLOCK_IO_DEVICE_SECONDS, w)
        self.cgroup_queue_p99 = self._p99("queue", c.BLOCK_IO_QUEUE_SECONDS, w)
        written = sums(c.BLOCK_IO_SIZE_BYTES).where('op="write"')
        writes = counts(c.BLOCK_IO_SIZE_BYTES).where('op="write"')
        self.cgroup_written = self._add(
            "cgroup:block_io_written_bytes_rate",
            ("cgroup", "device"),
            f"sum without (op) (rate({written}[{w}]))",
        )
        self.cgroup_share = self._add(
            "cgroup:block_io_written_bytes_share",
            ("cgroup", "device"),
            f"{self.cgroup_written} / ignoring (cgroup) group_left ()\n"
            f"sum without (cgroup) ({self.cgroup_written})",
        )
        self.device_write_size = self._add(
            "device:block_io_write_size_bytes",
            ("device", "op"),
            f"sum without (cgroup) (rate({written}[{w}]))\n"
            f"/ sum without (cgroup) (rate({writes}[{w}]))",
        )
        small = up_to(c.BLOCK_IO_SIZE_BYTES, settings.fragment_bytes).where('op="write"')
        self.device_small_writes = self._add(
            "device:block_io_small_writes_ratio",
            ("device", "op"),
            f"sum without (cgroup, le) (rate({small}[{w}]))\n"
            f"/ sum without (cgroup) (rate({writes}[{w}]))",
        )

        # Pressure: shares of time.
        some, full = c.PRESSURE_WAITING_SECONDS, c.PRESSURE_STALLED_SECONDS
        self.memory_some = self._pressure("mem_pressure_some", some, "memory", w)
        self.memory_full = self._pressure("mem_pressure_full", full, "memory", w)
        self.io_some = self._pressure("io_pressure_some", some, "io", w)
        self.io_full = self._pressure("io_pressure_full", full, "io", w)

        # A cgroup and its memory limit; what is not written yet cannot be dropped.
        limit = gauge(c.CGROUP_MEMORY_LIMIT_BYTES).where('limit="max"')
        self.cgroup_memory = self._add(
            "cgroup:memory_limit_use_ratio",
            ("cgroup",),
            f"{gauge(c.CGROUP_MEMORY_BYTES)} / ignoring (limit) {limit}",
        )
        self.cgroup_unwritten = self._add(
            "cgroup:memory_limit_unwritten_ratio",
            ("cgroup",),
            f"({gauge(c.CGROUP_DIRTY_BYTES)} + {gauge(c.CGROUP_WRITEBACK_BYTES)})\n"
            f"/ ignoring (limit) {limit}",
        )

        # Of the time after which a job's watchdog is near: seconds asleep, in the mean of as many
        # tasks as slept at once, and what share of these slept whenever one looked.
        jobs = f'cgroup=~"{settings.training_cgroups}"'
        self.deadline = settings.timeout_ratio * settings.collective_timeout
        asleep = gauge(c.DIRTY_THROTTLED_TASKS).where(jobs)
        window = f"{self.deadline:.0f}s"
        most = f"clamp_min(sum without (bdi) (max_over_time({asleep}[{window}])), 1)"
        self.cgroup_stall = self._add(
            "cgroup:throttle_stall_seconds",
            ("cgroup",),
            f"sum without (bdi) (increase({slept.where(jobs)}[{window}]))\n/ {most}",
        )
        self.cgroup_stalled = self._add(
            "cgroup:throttle_stalled_ratio",
            ("cgroup",),
            f"sum without (bdi) (avg_over_time({asleep}[{window}]))\n/ {most}",
        )

        self._add(
            "io_uring:sq_busy_ratio",
            ("cgroup",),
            f"rate({counter(c.IO_URING_SQ_BUSY_SECONDS)}[{w}])\n"
            f"/ rate({counter(c.IO_URING_SQ_SECONDS)}[{w}])",
        )

    def _p99(self, stage: str, metric: Metric, window: str) -> Series:
        """By disk, and by owner, which it returns."""
        name, slots = f"block_io_{stage}_seconds_p99", f"rate({buckets(metric)}[{window}])"
        of_all = f"histogram_quantile(0.99, sum without (cgroup) ({slots}))"
        self._add(f"device:{name}", ("device", "op"), of_all)
        of_each = f"histogram_quantile(0.99, {slots})"
        return self._add(f"cgroup:{name}", ("cgroup", "device", "op"), of_each)

    def _pressure(self, name: str, metric: Metric, resource: str, window: str) -> Series:
        waited = counter(metric).where(f'resource="{resource}"')
        expr = f"sum without (resource) (rate({waited}[{window}]))"
        return self._add(f"cgroup:{name}_rate", ("cgroup",), expr)

    def _add(self, name: str, labels: tuple[str, ...], expr: str) -> Series:
        series = Series(name, labels)
        self.all.append(Record(series, expr))
        return series


def _slower(metric: Metric, edge: float, matcher: str, window: str) -> str:
    """Share of requests that took longer than an edge of the histogram: no estimate, as a quantile
    within a bucket is."""
    up_to_edge, all_of_them = up_to(metric, edge).where(matcher), counts(metric).where(matcher)
    return (
        f"1 - sum without (cgroup, le) (rate({up_to_edge}[{window}]))\n"
        f"/ sum without (cgroup) (rate({all_of_them}[{window}]))"
    )
