# SPDX-License-Identifier: Apache-2.0
"""A training job: what its checkpoints lose to storage, and how near its watchdog that comes."""

from __future__ import annotations

from grafanalib.core import Templating

from alerts.promql import buckets, counter, counts, gauge, sums
from dashboards.cgroup import MINE
from dashboards.grafana import (
    GREEN,
    RED,
    YELLOW,
    Dashboard,
    Graph,
    Number,
    Panel,
    Row,
    here,
    max_by,
    quantile,
    queries,
    rate,
    sum_by,
)
from dashboards.variables import CGROUP, TARGETS, TIMEOUT
from writeback_exporter.metrics import catalogue as c

DEADLINE = ("vector($timeout)", "collective timeout")

_WAITS = [sums(c.DIRTY_THROTTLE_SECONDS), sums(c.SYNC_SECONDS), sums(c.PAGE_WAIT_SECONDS)]
_OPEN = here(gauge(c.SYNC_OPEN_SECONDS), MINE)
_ASLEEP = f"sum({rate(sums(c.DIRTY_THROTTLE_SECONDS), MINE)})"
_DISK_P99 = (
    "max(histogram_quantile(0.99, sum by (le, instance, device) ("
    + rate(buckets(c.BLOCK_IO_DEVICE_SECONDS))
    + ")))"
)
_IO_WAITS = "max(" + rate(counter(c.PRESSURE_WAITING_SECONDS), MINE, 'resource="io"') + ")"


def dashboard() -> Dashboard:
    return Dashboard(
        title="Writeback: checkpoint",
        uid="writeback-checkpoint",
        description="A training job: time that its checkpoints lose to storage, against the "
        "timeout of its collectives.",
        templating=Templating([*TARGETS, *CGROUP, TIMEOUT]),
        panels=[*_verdict(), *_stall(), *_writers()],
    )


def _verdict() -> list[Panel | Row]:
    # Each is 0 where there is nothing of it: an idle job is a case for innocence too.
    innocent = (
        f"(({_ASLEEP} or vector(0)) < bool 0.05) * "
        f"((max({_OPEN}) or vector(0)) < bool 5) * "
        f"(({_IO_WAITS} or vector(0)) < bool 0.1) * "
        f"(({_DISK_P99} >= 0 or vector(0)) < bool 0.25)"
    )
    return [
        Row(title="Is it storage at all?"),
        Number(
            title="Storage is innocent",
            description="Innocent: the job is not throttled, has no sync call open for more than "
            "5 s, waits for IO less than a tenth of the time, and no disk of its hosts takes a "
            "quarter of a second. Look at the network, the data and the GPUs then. Not innocent: "
            "the panels below say what it is.",
            unit="none",
            words={1: ("innocent", GREEN), 0: ("not innocent", RED)},
            targets=queries([(innocent, "")]),
        ),
        Number(
            title="Tasks throttled now",
            description="Tasks of the job asleep in balance_dirty_pages, on all of its hosts.",
            unit="none",
            steps=((GREEN, None), (YELLOW, 0.5), (RED, 2)),
            targets=queries([(f"{_ASLEEP} or vector(0)", "")]),
        ),
        Number(
            title="Oldest open sync call",
            description="Of the job, on any host. One rank that waits here makes all others wait "
            "in their collective.",
            unit="s",
            steps=((GREEN, None), (YELLOW, 30), (RED, 300)),
            targets=queries([(f"max({_OPEN}) or vector(0)", "")]),
        ),
        Number(
            title="Some task waits for IO",
            description="Share of time, on the worst host.",
            unit="percentunit",
            steps=((GREEN, None), (YELLOW, 0.1), (RED, 0.5)),
            targets=queries([(f"{_IO_WAITS} or vector(0)", "")]),
        ),
    ]


def _stall() -> list[Panel | Row]:
    lost = " + ".join(
        f"(sum by (instance, cgroup) ({rate(series, MINE)}) or on (instance, cgroup) "
        f"0 * sum by (instance, cgroup) ({rate(counter(c.PRESSURE_WAITING_SECONDS), MINE)}))"
        for series in _WAITS
    )
    return [
        Row(title="How much time is lost, and how near is the timeout?"),
        Graph(
            title="Seconds lost per hour, by host",
            description="Task seconds in throttling, sync calls and waits for pages, at the rate "
            "of now, for one hour. Multiply by the number of GPUs that wait for the job's slowest "
            "rank.",
            unit="s",
            targets=queries([(f"3600 * ({lost})", "{{instance}} {{cgroup}}")]),
        ),
        Graph(
            title="Open sync calls against the collective timeout",
            description="A call that reaches the line kills the job: ranks that wait for this one "
            "give up. At half of it see alert CheckpointStallApproachesTimeout.",
            unit="s",
            targets=queries(
                [
                    (
                        max_by("instance, cgroup, call", _OPEN),
                        "{{call}} {{instance}} {{cgroup}}",
                    ),
                    DEADLINE,
                ]
            ),
        ),
        Graph(
            title="Sync calls, p99",
            description="What writing a checkpoint out takes once its data are in the page cache. "
            "Writing as one goes along (sync_file_range, direct IO) makes this short.",
            unit="s",
            log=True,
            targets=queries(
                [
                    (
                        quantile(0.99, buckets(c.SYNC_SECONDS), "instance, call", MINE),
                        "{{call}} {{instance}}",
                    ),
                    DEADLINE,
                ]
            ),
        ),
        Graph(
            title="Pauses in throttling, p99",
            description="200 ms is the longest pause there is: at it writers are stopped rather "
            "than slowed.",
            unit="s",
            targets=queries(
                [
                    (
                        quantile(0.99, buckets(c.DIRTY_THROTTLE_SECONDS), "instance, bdi", MINE),
                        "{{bdi}} {{instance}}",
                    )
                ]
            ),
        ),
    ]


def _writers() -> list[Panel | Row]:
    return [
        Row(title="Who writes at the same time?"),
        Graph(
            title="Tasks throttled at once",
            description="As seen at each scrape. Many ranks that write to one volume at once: "
            "stagger them, or let one rank a host write.",
            unit="none",
            stacked=True,
            targets=queries(
                [
                    (
                        sum_by("instance, cgroup", str(here(gauge(c.DIRTY_THROTTLED_TASKS), MINE))),
                        "{{instance}} {{cgroup}}",
                    )
                ]
            ),
        ),
        Graph(
            title="Concurrent writers, by disk",
            description="Cgroups that write more than 1 MB/s to a disk, this job or not.",
            unit="none",
            targets=queries(
                [
                    (
                        "count by (instance, device) (sum by (instance, device, cgroup) ("
                        + rate(sums(c.BLOCK_IO_SIZE_BYTES), 'op="write"')
                        + ") > 1e6) or 0 * sum by (instance, device) ("
                        + rate(counts(c.BLOCK_IO_SIZE_BYTES), 'op="write"')
                        + ")",
                        "{{device}} {{instance}}",
                    )
                ]
            ),
        ),
        Graph(
            title="Written by the job",
            description="To disk, whoever flushes it. A checkpoint of known size divided by this "
            "is how long it must take at least.",
            unit="Bps",
            stacked=True,
            targets=queries(
                [
                    (
                        sum_by(
                            "instance, device",
                            rate(sums(c.BLOCK_IO_SIZE_BYTES), MINE, 'op="write"'),
                        ),
                        "{{device}} {{instance}}",
                    )
                ]
            ),
        ),
        Graph(
            title="Dirty memory of the hosts",
            description="A checkpoint that fits below freerun is not throttled at all.",
            unit="bytes",
            targets=queries(
                [
                    (
                        f"{here(gauge(c.HOST_DIRTY_BYTES))} + "
                        f"{here(gauge(c.HOST_WRITEBACK_BYTES))}",
                        "dirty and writeback {{instance}}",
                    ),
                    (str(here(gauge(c.HOST_DIRTY_FREERUN_BYTES))), "freerun {{instance}}"),
                ]
            ),
        ),
    ]
