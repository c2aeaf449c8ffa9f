# SPDX-License-Identifier: Apache-2.0
"""One host: its dirty memory against its limits, who is throttled, its disks, its flushers."""

from __future__ import annotations

from typing import Any

from grafanalib.core import Templating

from alerts.promql import buckets, counter, counts, gauge, sums
from alerts.records import bdi_dirty, bdi_written, host_dirty
from dashboards.grafana import (
    RATE,
    TO_CGROUP,
    Dashboard,
    Graph,
    Heatmap,
    Panel,
    Row,
    here,
    max_by,
    quantile,
    queries,
    rate,
    sum_by,
    table,
    top,
)
from dashboards.variables import DEVICE, ON_DEVICE, ROOT, TARGETS
from writeback_exporter.metrics import catalogue as c
from writeback_exporter.metrics.catalogue import Metric


def heatmap(metric: Metric, *matchers: str, **options: Any) -> Heatmap:
    expr = f"sum by (le) (increase({here(buckets(metric), *matchers)}[{RATE}]))"
    return Heatmap(targets=queries([(expr, "{{le}}")], format="heatmap"), **options)


def dashboard() -> Dashboard:
    return Dashboard(
        title="Writeback: node",
        uid="writeback-node",
        description="One host: why its writers sleep, and which disk is behind it.",
        templating=Templating([*TARGETS, DEVICE]),
        panels=[
            *_memory(),
            *_throttling(),
            *_disks(),
            *_flusher(),
            *_pressure(),
            *_settings(),
        ],
    )


def _memory() -> list[Panel | Row]:
    dirty, writeback = gauge(c.HOST_DIRTY_BYTES), gauge(c.HOST_WRITEBACK_BYTES)
    # A day where nothing is written: Grafana does not draw what is infinite.
    drain = f"clamp_max(({bdi_dirty(here)}) / ({bdi_written(RATE, here)}), 86400)"
    return [
        Row(title="How full is dirty memory?"),
        Graph(
            title="Dirty memory and its thresholds",
            description="Writers are throttled once dirty and writeback memory together are above "
            "freerun; at the hard threshold they stop. Above freerun for long: go on to who is "
            "throttled. Below it and writers sleep all the same: a BDI's or a cgroup's own limit, "
            "see which limit decided.",
            unit="bytes",
            targets=[
                (host_dirty(here), "dirty and writeback {{instance}}"),
                (str(here(dirty)), "dirty {{instance}}"),
                (str(here(writeback)), "writeback {{instance}}"),
                (
                    str(here(gauge(c.HOST_DIRTY_BACKGROUND_THRESHOLD_BYTES))),
                    "background threshold {{instance}}",
                ),
                (str(here(gauge(c.HOST_DIRTY_FREERUN_BYTES))), "freerun {{instance}}"),
                (str(here(gauge(c.HOST_DIRTY_THRESHOLD_BYTES))), "hard threshold {{instance}}"),
            ],
        ),
        Graph(
            title="Time to drain, by BDI",
            description="How long flushers would need for what is dirty, at the rate at which "
            "they write now. This is what an fsync of everything, or an unmount, would take. More "
            "than a minute: lower vm.dirty_bytes, or find why the disk is slow.",
            unit="s",
            log=True,
            targets=[(drain, "{{bdi}} {{instance}}")],
        ),
    ]


def _throttling() -> list[Panel | Row]:
    asleep = sums(c.DIRTY_THROTTLE_SECONDS)
    return [
        Row(title="Who is throttled, for how long, by which limit?"),
        Graph(
            title="Tasks asleep in balance_dirty_pages, by cgroup",
            description="Seconds asleep per second. The one on top writes most, or has the "
            "smallest limit; a click leads to it.",
            unit="none",
            see=TO_CGROUP,
            targets=[
                (
                    top(sum_by(["cgroup"], rate(asleep))),
                    "{{cgroup}} {{instance}}",
                )
            ],
        ),
        heatmap(
            c.DIRTY_THROTTLE_SECONDS,
            title="Pauses in balance_dirty_pages",
            description="How long each single pause took. Many at 0.27 s, the bucket of the "
            "longest pause that the kernel asks for, mean that the limit is exceeded by far.",
            unit="s",
        ),
        Graph(
            title="Which limit decided",
            description="global: vm.dirty_ratio or vm.dirty_bytes of the host. bdi: strict limit "
            "of the device (FUSE, or its max_ratio). memcg: memory limit of the cgroup, which "
            "raises nothing else than that limit.",
            unit="ops",
            targets=[
                (
                    sum_by(["bdi", "domain"], rate(counter(c.DIRTY_THROTTLE_DOMAIN))),
                    "{{domain}} {{bdi}} {{instance}}",
                )
            ],
        ),
        Graph(
            title="Dirty memory of a BDI against its limit, when last throttled",
            description="Of the writeback domain that was throttled last. At its limit: this BDI "
            "is what does not keep up. Far below: another one has filled the host's dirty memory.",
            unit="bytes",
            targets=[
                (str(here(gauge(c.BDI_DIRTY_BYTES))), "dirty {{bdi}} {{instance}}"),
                (str(here(gauge(c.BDI_DIRTY_THRESHOLD_BYTES))), "limit {{bdi}} {{instance}}"),
            ],
        ),
        Graph(
            title="What the kernel believes of a BDI, when last throttled",
            description="Its estimate of write bandwidth, and the rate that it grants each "
            "dirtying task. A bandwidth far below what the disk can do is a disk in trouble, or "
            "one that reads or direct IO use too.",
            unit="Bps",
            targets=[
                (
                    str(here(gauge(c.BDI_WRITE_BANDWIDTH_BYTES))),
                    "bandwidth {{bdi}} {{instance}}",
                ),
                (
                    str(here(gauge(c.BDI_DIRTY_RATELIMIT_BYTES))),
                    "granted to a task {{bdi}} {{instance}}",
                ),
            ],
        ),
    ]


def _disks() -> list[Panel | Row]:
    return [
        Row(title="Is it the disk, or the queue before it?"),
        heatmap(
            c.BLOCK_IO_DEVICE_SECONDS,
            ON_DEVICE,
            title="Time in the device",
            description="From the driver until completion: what the disk, the volume or the "
            "storage network takes. A band that moves up is the back end, not this host.",
            unit="s",
        ),
        heatmap(
            c.BLOCK_IO_QUEUE_SECONDS,
            ON_DEVICE,
            title="Time in the queue",
            description="From arrival in the block layer until the driver. High while device time "
            "is low: a scheduler that holds back, or more requests than the device takes at once.",
            unit="s",
        ),
        Graph(
            title="p99 by disk and operation",
            description="Device and queue next to each other.",
            unit="s",
            log=True,
            targets=[
                (
                    quantile(
                        0.99,
                        buckets(c.BLOCK_IO_DEVICE_SECONDS),
                        ["device", "op"],
                        ON_DEVICE,
                    ),
                    "device {{device}} {{op}} {{instance}}",
                ),
                (
                    quantile(
                        0.99,
                        buckets(c.BLOCK_IO_QUEUE_SECONDS),
                        ["device", "op"],
                        ON_DEVICE,
                    ),
                    "queue {{device}} {{op}} {{instance}}",
                ),
            ],
        ),
        Graph(
            title="Time that limits held IO back",
            description="Seconds per second that IO waited for io.max (max) or for io.latency, "
            "iocost or wbt (qos), before it became a request. It is in no other latency here.",
            unit="none",
            see=TO_CGROUP,
            targets=[
                (
                    top(
                        sum_by(
                            ["cgroup", "device", "limit"],
                            rate(sums(c.BLOCK_IO_LIMIT_SECONDS), ON_DEVICE),
                        )
                    ),
                    "{{limit}} {{device}} {{cgroup}} {{instance}}",
                )
            ],
        ),
        heatmap(
            c.BLOCK_IO_SIZE_BYTES,
            ON_DEVICE,
            'op="write"',
            title="Sizes of writes",
            description="Large writes that arrive as many small ones: fragmented files, or a "
            "queue with a small max_sectors_kb.",
            unit="bytes",
        ),
        heatmap(
            c.BLOCK_IO_DEPTH,
            ON_DEVICE,
            title="Requests in flight",
            description="As each request finds them. At the device's queue depth all the time: it "
            "is full, and what follows waits in the queue. At 1: a workload that waits for each "
            "single request.",
            unit="none",
        ),
        Graph(
            title="Bytes written to disk, by owner",
            description="Buffered writeback is charged to the cgroup that dirtied it, not to the "
            "flusher.",
            unit="Bps",
            see=TO_CGROUP,
            targets=[
                (
                    top(
                        sum_by(
                            ["cgroup", "device"],
                            rate(sums(c.BLOCK_IO_SIZE_BYTES), ON_DEVICE, 'op="write"'),
                        )
                    ),
                    "{{device}} {{cgroup}} {{instance}}",
                )
            ],
        ),
        Graph(
            title="Requests that the device has",
            description="Issued and not back at each scrape. A line that stands still above 0 "
            "while operations are at 0 is a device that does not answer: see alert BlockIOSlow.",
            unit="none",
            targets=[(str(here(gauge(c.BLOCK_IO_INFLIGHT), ON_DEVICE)), "{{device}} {{instance}}")],
        ),
        Graph(
            title="Operations and errors",
            description="Any error is one to look into: dmesg has its sector.",
            unit="ops",
            targets=[
                (
                    sum_by(
                        ["device", "op"],
                        rate(counts(c.BLOCK_IO_DEVICE_SECONDS), ON_DEVICE),
                    ),
                    "{{device}} {{op}} {{instance}}",
                ),
                (
                    sum_by(
                        ["device", "op", "error"],
                        rate(counter(c.BLOCK_IO_ERRORS), ON_DEVICE),
                    ),
                    "error {{error}} {{device}} {{op}} {{instance}}",
                ),
            ],
        ),
    ]


def _flusher() -> list[Panel | Row]:
    return [
        Row(title="Why is the flusher at work, and does it come to an end?"),
        Graph(
            title="Written by flushers, by reason",
            description="background: dirty memory is above the background threshold. periodic: "
            "pages are older than vm.dirty_expire_centisecs. sync: somebody called sync. vmscan: "
            "reclaim needs the memory, which is late.",
            unit="Bps",
            stacked=True,
            targets=[
                (
                    sum_by(["bdi", "reason"], rate(counter(c.WORK_BYTES))) + " > 0",
                    "{{reason}} {{bdi}} {{instance}}",
                )
            ],
        ),
        Graph(
            title="Duration of writeback work, p99",
            description="From when it was queued until all of it was sent to the device.",
            unit="s",
            log=True,
            targets=[
                (
                    quantile(0.99, buckets(c.WORK_SECONDS), ["bdi", "reason"]),
                    "{{reason}} {{bdi}} {{instance}}",
                )
            ],
        ),
        Graph(
            title="Oldest writeback work that is not done",
            description="A line that rises is a flusher that is stuck, most likely in the device "
            "or in a network file system.",
            unit="s",
            targets=[
                (
                    max_by(["bdi"], here(gauge(c.WORK_OLDEST_SECONDS))),
                    "{{bdi}} {{instance}}",
                )
            ],
        ),
        Graph(
            title="Oldest sync call that is open, by cgroup",
            description="Who waits in fsync and the like, and for how long already. Histograms do "
            "not have a call that never returns.",
            unit="s",
            see=TO_CGROUP,
            targets=[
                (
                    top(max_by(["cgroup", "call"], here(gauge(c.SYNC_OPEN_SECONDS)))),
                    "{{call}} {{cgroup}} {{instance}}",
                )
            ],
        ),
    ]


def _pressure() -> list[Panel | Row]:
    def of_host(metric: Metric) -> str:
        return sum_by(["resource"], rate(counter(metric), ROOT))

    return [
        Row(title="What do tasks feel?"),
        Graph(
            title="Pressure of the host",
            description="Share of time in which some task, or all that had work, waited. "
            "Throttling for dirty pages shows as io, not as memory.",
            unit="percentunit",
            targets=[
                (
                    of_host(c.PRESSURE_WAITING_SECONDS),
                    "some wait for {{resource}} {{instance}}",
                ),
                (of_host(c.PRESSURE_STALLED_SECONDS), "all wait for {{resource}} {{instance}}"),
            ],
        ),
        Graph(
            title="Reclaim",
            description="kswapd reclaims in the background; direct is done by the task that wants "
            "memory, and makes it wait. Direct reclaim with much dirty memory waits for the disk.",
            unit="Bps",
            targets=[
                (
                    sum_by(["by"], rate(counter(c.HOST_RECLAIMED_BYTES))),
                    "{{by}} {{instance}}",
                )
            ],
        ),
        Graph(
            title="Waits for pages under writeback, p99 by cgroup",
            description="Tasks that wait until a page is written before they may change or drop "
            "it.",
            unit="s",
            log=True,
            see=TO_CGROUP,
            targets=[
                (
                    top(quantile(0.99, buckets(c.PAGE_WAIT_SECONDS), ["cgroup"])),
                    "{{cgroup}} {{instance}}",
                )
            ],
        ),
    ]


def _settings() -> list[Panel | Row]:
    limits = [
        ("ratio", c.HOST_DIRTY_RATIO, "percentunit"),
        ("background ratio", c.HOST_DIRTY_BACKGROUND_RATIO, "percentunit"),
        ("bytes", c.HOST_DIRTY_LIMIT_BYTES, "bytes"),
        ("background bytes", c.HOST_DIRTY_BACKGROUND_LIMIT_BYTES, "bytes"),
        ("expire", c.HOST_DIRTY_EXPIRE_SECONDS, "s"),
        ("flusher's interval", c.HOST_DIRTY_WRITEBACK_INTERVAL_SECONDS, "s"),
    ]
    of_bdi = [
        (gauge(c.BDI_MAX_RATIO), "At most", "percentunit"),
        (gauge(c.BDI_MIN_RATIO), "At least", "percentunit"),
        (gauge(c.BDI_STRICT_LIMIT), "Strict limit", "none"),
        (gauge(c.BDI_READ_AHEAD_BYTES), "Read-ahead", "bytes"),
    ]
    return [
        Row(title="Which disk is it, and what is set?"),
        table(
            [(str(here(gauge(c.BDI_INFO))), "Known", "none")],
            hide=["Value", "Known", "job"],
            title="BDIs and their disks",
            description="What writes back through each BDI: the disk and the file systems on it, "
            "or one without a disk, as NFS and FUSE.",
            columns=12,
        ),
        table(
            [(str(here(gauge(c.DEVICE_DISK_INFO))), "Known", "none")],
            hide=["Value", "Known", "job"],
            title="Devices and what they lie on",
            description="The disks at the bottom of each device. Latency is told of those; "
            "volumes and arrays above them have no requests of their own.",
            columns=12,
        ),
        table(
            [(str(here(gauge(metric))), name, unit) for name, metric, unit in limits],
            hide=["job"],
            title="Settings of the host (vm.dirty_*)",
            description="Where bytes are set the ratios do not count, and the other way round. "
            "Much memory with ratios is much to write at once: set bytes.",
            columns=12,
            lines=6,
        ),
        table(
            [(max_by(["bdi"], here(series)), name, unit) for series, name, unit in of_bdi],
            hide=["job"],
            title="Settings of BDIs",
            description="Shares of the dirty limit that a BDI gets at least and at most; with a "
            "strict limit they count below the host's freerun point too.",
            columns=12,
            lines=6,
        ),
    ]
