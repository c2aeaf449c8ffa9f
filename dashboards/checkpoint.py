# SPDX-License-Identifier: Apache-2.0
"""A training job: what its checkpoints lose to storage, and how near its watchdog that comes."""

from __future__ import annotations

from grafanalib.core import Templating

from alerts.promql import HOST, buckets, counter, gauge, sums
from alerts.records import host_dirty
from dashboards.grafana import (
    GREEN,
    RED,
    TO_CGROUP,
    TO_NODE,
    YELLOW,
    Dashboard,
    Graph,
    Number,
    Panel,
    Row,
    here,
    link,
    max_by,
    now,
    quantile,
    rate,
    sum_by,
)
from dashboards.variables import CGROUP, ITSELF, TARGETS, TIMEOUT, TREE
from writeback_exporter.metrics import catalogue as c

DEADLINE = ("vector($timeout)", "collective timeout")
WINDOW = "${timeout}s"

_OPEN = here(gauge(c.SYNC_OPEN_SECONDS), TREE)
_ASLEEP = here(gauge(c.DIRTY_THROTTLED_TASKS), TREE)
_THROTTLED = rate(sums(c.DIRTY_THROTTLE_SECONDS), TREE)
_IO_WAITS = rate(counter(c.PRESSURE_WAITING_SECONDS), ITSELF, 'resource="io"')
_MEMORY_WAITS = rate(counter(c.PRESSURE_WAITING_SECONDS), ITSELF, 'resource="memory"')
_MINE = sum_by(["device"], rate(sums(c.BLOCK_IO_SIZE_BYTES), TREE)) + " > 0"


def dashboard() -> Dashboard:
    return Dashboard(
        title="Writeback: checkpoint",
        uid="writeback-checkpoint",
        description="A training job: time that its checkpoints lose to storage, against the "
        "timeout of its collectives.",
        templating=Templating([*TARGETS, *CGROUP, TIMEOUT]),
        panels=[*_verdict(), *_stall(), *_writers()],
    )


def _below(expr: str, limit: float) -> str:
    """1 where the largest is below the limit, or there is none."""
    return f"((max({expr}) or vector(0)) < bool {limit})"


def _innocent() -> str:
    """1 innocent, 0 not, -1 where that cannot be told: nothing is known of the cgroup now, or a
    signal is missing on one of its hosts."""
    ops = 'op=~"read|flush"'
    on_its_disks = f"and on ({HOST}, device) ({_MINE})"
    stages = (c.BLOCK_IO_DEVICE_SECONDS, c.BLOCK_IO_QUEUE_SECONDS)
    slow = " or ".join(
        f"label_replace({quantile(0.99, buckets(stage), ['device'], ops)} >= 0 {on_its_disks}, "
        f'"stage", "{number}", "", "")'
        for number, stage in enumerate(stages)
    )
    verdict = " * ".join(
        (
            _below(sum_by([], _THROTTLED), 0.05),
            _below(str(_OPEN), 5),
            _below(_IO_WAITS, 0.1),
            _below(_MEMORY_WAITS, 0.1),
            _below(rate(sums(c.PAGE_WAIT_SECONDS), TREE), 0.05),
            _below(slow, 0.25),
        )
    )
    features = here(
        gauge(c.EXPORTER_FEATURE_AVAILABLE),
        'feature=~"dirty_throttle|block_io|sync|page_wait|pressure"',
    )
    its_hosts = (
        sum_by([], here(gauge(c.CGROUP_MEMORY_BYTES), ITSELF)) + " or " + sum_by([], _IO_WAITS)
    )
    seen = f"min({features} and on ({HOST}) ({its_hosts})) == 1"
    return f"({verdict}) and on () ({seen}) or vector(-1)"


def _verdict() -> list[Panel | Row]:
    return [
        Row(title="Is it storage at all?"),
        Number(
            title="Storage is innocent",
            description="Innocent: of the chosen cgroups and those below nobody is throttled, no "
            "sync call is open for more than 5 s, tasks wait for IO, for memory and for pages "
            "under writeback less than a tenth of the time, and no disk that they use takes a "
            "quarter of a second for reads or flushes, queue included. Look at the network, the "
            "data and the GPUs then. Not innocent: the panels below say what it is. Cannot tell: "
            "the job is gone, or a signal is missing, see the exporter dashboard.",
            unit="none",
            words={
                1: ("innocent", GREEN),
                0: ("not innocent", RED),
                -1: ("cannot tell", YELLOW),
            },
            targets=now(_innocent()),
        ),
        Number(
            title="Tasks throttled now",
            description="Tasks of the job asleep in balance_dirty_pages, on all of its hosts.",
            unit="none",
            steps=((GREEN, None), (YELLOW, 0.3), (RED, 2)),
            targets=now(f"sum({_THROTTLED}) or vector(0)"),
        ),
        Number(
            title="Oldest open sync call",
            description="Of the job, on any host. One rank that waits here makes all others wait "
            "in their collective.",
            unit="s",
            steps=((GREEN, None), (YELLOW, 30), (RED, 300)),
            targets=now(f"max({_OPEN}) or vector(0)"),
        ),
        Number(
            title="Some task waits for IO",
            description="Share of time, on the worst host.",
            unit="percentunit",
            steps=((GREEN, None), (YELLOW, 0.1), (RED, 0.5)),
            targets=now(f"max({_IO_WAITS}) or vector(0)"),
        ),
    ]


def _stall() -> list[Panel | Row]:
    throttled = sum_by(["cgroup"], _THROTTLED)
    syncing = sum_by(["cgroup"], rate(sums(c.SYNC_SECONDS), TREE))
    lost = sum_by(
        ["cgroup"],
        f'label_replace({throttled}, "of", "throttling", "", "") or '
        f'label_replace({syncing}, "of", "sync", "", "")',
    )
    slept = here(sums(c.DIRTY_THROTTLE_SECONDS), TREE)
    stalled = (
        f"{sum_by(['cgroup'], f'increase({slept}[{WINDOW}])')} / "
        f"clamp_min({sum_by(['cgroup'], f'max_over_time({_ASLEEP}[{WINDOW}])')}, 1)"
    )
    return [
        Row(title="How much time is lost, and how near is the timeout?"),
        Graph(
            title="Stall by throttling within the timeout, against it",
            description="Seconds that a task slept within as long as the timeout is, in the mean "
            "of as many as slept at once. At the line tasks have done nothing but sleep for that "
            "long; at half of it where sleep is not measured. See alert "
            "CheckpointStallApproachesTimeout.",
            unit="s",
            see=TO_CGROUP,
            targets=[(stalled, "{{instance}} {{cgroup}}"), DEADLINE],
        ),
        Graph(
            title="Open sync calls against the collective timeout",
            description="A call that reaches the line kills the job: ranks that wait for this one "
            "give up. At half of it see alert CheckpointStallApproachesTimeout.",
            unit="s",
            see=TO_CGROUP,
            targets=[
                (max_by(["cgroup", "call"], _OPEN), "{{call}} {{instance}} {{cgroup}}"),
                DEADLINE,
            ],
        ),
        Graph(
            title="Task seconds lost per hour",
            description="In throttling and in sync calls, of all tasks together, at the rate of "
            "now. What it costs is this by the number of GPUs that wait for each.",
            unit="s",
            see=TO_CGROUP,
            targets=[(f"3600 * {lost}", "{{instance}} {{cgroup}}")],
        ),
        Graph(
            title="Sync calls, p99",
            description="What writing a checkpoint out takes once its data are in the page cache. "
            "Writing as one goes along (sync_file_range, direct IO) makes this short.",
            unit="s",
            log=True,
            targets=[
                (
                    quantile(0.99, buckets(c.SYNC_SECONDS), ["call"], TREE),
                    "{{call}} {{instance}}",
                ),
                DEADLINE,
            ],
        ),
        Graph(
            title="Pauses in throttling, p99",
            description="Up to 0.27 s: the bucket of the longest pause that the kernel asks for, "
            "200 ms. There writers are stopped rather than slowed.",
            unit="s",
            targets=[
                (
                    quantile(0.99, buckets(c.DIRTY_THROTTLE_SECONDS), ["bdi"], TREE),
                    "{{bdi}} {{instance}}",
                )
            ],
        ),
        Graph(
            title="Waits for pages under writeback",
            description="Seconds per second that tasks waited until a page was written. It is "
            "part of what sync calls take, and holds up writers that change a page again.",
            unit="none",
            targets=[
                (
                    sum_by(["cgroup"], rate(sums(c.PAGE_WAIT_SECONDS), TREE)),
                    "{{instance}} {{cgroup}}",
                )
            ],
        ),
    ]


def _writers() -> list[Panel | Row]:
    written = rate(sums(c.BLOCK_IO_SIZE_BYTES), 'op="write"')
    by_cgroup = sum_by(["device", "cgroup"], written)
    return [
        Row(title="Who writes at the same time?"),
        Graph(
            title="Tasks throttled at once",
            description="As seen at each scrape. Many ranks that write to one volume at once: "
            "stagger them, or let one rank a host write.",
            unit="none",
            stacked=True,
            targets=[(sum_by(["cgroup"], _ASLEEP), "{{instance}} {{cgroup}}")],
        ),
        Graph(
            title="Concurrent writers, by disk",
            description="Cgroups that write more than 1 MB/s to a disk, this job or not.",
            unit="none",
            see=link("writeback-node", "device"),
            targets=[
                (
                    f"count by ({HOST}, device) ({by_cgroup} > 1e6) or "
                    f"0 * {sum_by(['device'], written)}",
                    "{{device}} {{instance}}",
                )
            ],
        ),
        Graph(
            title="Written by the job",
            description="To disk, whoever flushes it. A checkpoint of known size divided by this "
            "is how long it must take at least.",
            unit="Bps",
            stacked=True,
            targets=[
                (
                    sum_by(["device"], rate(sums(c.BLOCK_IO_SIZE_BYTES), TREE, 'op="write"')),
                    "{{device}} {{instance}}",
                )
            ],
        ),
        Graph(
            title="Dirty memory of the hosts",
            description="A checkpoint that fits below freerun is not throttled at all.",
            unit="bytes",
            see=TO_NODE,
            targets=[
                (host_dirty(here), "dirty and writeback {{instance}}"),
                (str(here(gauge(c.HOST_DIRTY_FREERUN_BYTES))), "freerun {{instance}}"),
            ],
        ),
    ]
