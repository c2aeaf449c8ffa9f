# SPDX-License-Identifier: Apache-2.0
"""One pod, unit or job: what storage costs it, and whether that is its own limit or a neighbour."""

from __future__ import annotations

from grafanalib.core import Templating

from alerts.promql import HOST, Series, buckets, counter, gauge, sums
from dashboards.grafana import (
    TO_NODE,
    Dashboard,
    Graph,
    Panel,
    Row,
    here,
    link,
    max_by,
    quantile,
    rate,
    sum_by,
    table,
    top,
)
from dashboards.variables import (
    CGROUP,
    DEVICE,
    ITSELF,
    ON_DEVICE,
    OTHERS,
    ROOT,
    TARGETS,
    TREE,
)
from writeback_exporter.metrics import catalogue as c
from writeback_exporter.metrics.catalogue import Metric


def of_cgroup(metric: Metric, *matchers: str) -> Series:
    return here(gauge(metric), ITSELF, *matchers)


def dashboard() -> Dashboard:
    return Dashboard(
        title="Writeback: cgroup / workload",
        uid="writeback-cgroup",
        description="One pod, unit or job: what storage costs it, and why.",
        templating=Templating([*TARGETS, *CGROUP, DEVICE]),
        panels=[*_cost(), *_latency(), *_limits(), *_neighbours(), *_identity()],
    )


def _cost() -> list[Panel | Row]:
    per_stage = [
        ("throttled for dirty pages", sums(c.DIRTY_THROTTLE_SECONDS)),
        ("in fsync and the like", sums(c.SYNC_SECONDS)),
        ("waiting for pages under writeback", sums(c.PAGE_WAIT_SECONDS)),
    ]
    return [
        Row(title="How much time does it lose to storage?"),
        Graph(
            title="Tasks that wait, by what they wait for",
            description="Seconds lost per second, which is tasks that wait at any time. The "
            "largest one says where to look: throttling is writes that the disk does not take, "
            "sync calls are its latency. Waits for pages are part of sync calls, and of writers "
            "that change a page again.",
            unit="none",
            targets=[
                (
                    sum_by(["cgroup"], rate(series, TREE)),
                    f"{what} {{{{cgroup}}}} {{{{instance}}}}",
                )
                for what, series in per_stage
            ],
        ),
        Graph(
            title="Throttled, by BDI",
            description="Where it writes when it is throttled. The node dashboard tells which "
            "limit decides for that BDI.",
            unit="none",
            see=TO_NODE,
            targets=[
                (
                    sum_by(["cgroup", "bdi"], rate(sums(c.DIRTY_THROTTLE_SECONDS), TREE)),
                    "{{bdi}} {{cgroup}} {{instance}}",
                )
            ],
        ),
        Graph(
            title="Pressure",
            description="Share of time in which some task of the cgroup waited, or all did, and "
            "for comparison some task of the host. Where only the cgroup waits it is its own "
            "limit, where the host does too it is contention.",
            unit="percentunit",
            targets=[
                (
                    sum_by(
                        ["cgroup", "resource"],
                        rate(counter(c.PRESSURE_WAITING_SECONDS), ITSELF),
                    ),
                    "some wait for {{resource}} {{cgroup}} {{instance}}",
                ),
                (
                    sum_by(
                        ["cgroup", "resource"],
                        rate(counter(c.PRESSURE_STALLED_SECONDS), ITSELF),
                    ),
                    "all wait for {{resource}} {{cgroup}} {{instance}}",
                ),
                (
                    sum_by(["resource"], rate(counter(c.PRESSURE_WAITING_SECONDS), ROOT)),
                    "some of the host wait for {{resource}} {{instance}}",
                ),
            ],
        ),
        Graph(
            title="Oldest sync call that is open",
            description="A call that has not returned is in no histogram. A rising line: see "
            "alert SyncCallStuck.",
            unit="s",
            see=link("writeback-checkpoint", "cgroup"),
            targets=[
                (
                    max_by(["cgroup", "call"], here(gauge(c.SYNC_OPEN_SECONDS), TREE)),
                    "{{call}} {{cgroup}} {{instance}}",
                )
            ],
        ),
    ]


def _latency() -> list[Panel | Row]:
    stages = [
        (
            "device",
            c.BLOCK_IO_DEVICE_SECONDS,
            "What the disk itself takes. Slow here and for its neighbours: the disk. Slow here "
            "only: larger or more random IO than theirs.",
        ),
        (
            "queue",
            c.BLOCK_IO_QUEUE_SECONDS,
            "What it waits for in this host's queue. Slow here while the device is fast: a "
            "scheduler or a neighbour that fills the queue.",
        ),
    ]
    return [
        Row(title="Which stage is slow?"),
        *(
            Graph(
                title=f"Time in the {stage}: p50, p99, p99.9",
                description=description,
                unit="s",
                log=True,
                targets=[
                    (
                        quantile(q, buckets(metric), ["device", "op"], TREE, ON_DEVICE),
                        f"p{q * 100:g} {{{{device}}}} {{{{op}}}} {{{{instance}}}}",
                    )
                    for q in (0.5, 0.99, 0.999)
                ],
            )
            for stage, metric, description in stages
        ),
        Graph(
            title="Sync calls: p50, p99, p99.9",
            description="What a database commit or a checkpoint waits for.",
            unit="s",
            log=True,
            targets=[
                (
                    quantile(q, buckets(c.SYNC_SECONDS), ["call"], TREE),
                    f"p{q * 100:g} {{{{call}}}} {{{{instance}}}}",
                )
                for q in (0.5, 0.99, 0.999)
            ],
        ),
        Graph(
            title="Stalls for memory, p99",
            description="Reclaim, refault, swap-in: single stalls, not shares. Needs "
            "--collector.memory_stall.",
            unit="s",
            log=True,
            targets=[
                (
                    quantile(0.99, buckets(c.MEMORY_STALL_SECONDS), ["cgroup"], TREE),
                    "{{cgroup}} {{instance}}",
                )
            ],
        ),
    ]


def _limits() -> list[Panel | Row]:
    def pair(limit: Metric, used: Series) -> list[tuple[str, str]]:
        by = ["cgroup", "device", "op"]
        return [
            (
                max_by(by, of_cgroup(limit, ON_DEVICE)),
                "allowed {{op}} {{device}} {{cgroup}} {{instance}}",
            ),
            (
                sum_by(by, rate(used, ITSELF, ON_DEVICE)),
                "used {{op}} {{device}} {{cgroup}} {{instance}}",
            ),
        ]

    return [
        Row(title="Is it its own limit?"),
        Graph(
            title="Memory against its limit",
            description="Dirty and writeback memory cannot be dropped until written. Near the "
            "limit with much of it dirty: the OOM killer may come, see alert CgroupOOMRisk. Its "
            "dirty pages are limited by this limit too (domain memcg on the node dashboard).",
            unit="bytes",
            targets=[
                (str(of_cgroup(c.CGROUP_MEMORY_BYTES)), "used {{cgroup}} {{instance}}"),
                (str(of_cgroup(c.CGROUP_DIRTY_BYTES)), "dirty {{cgroup}} {{instance}}"),
                (str(of_cgroup(c.CGROUP_WRITEBACK_BYTES)), "writeback {{cgroup}} {{instance}}"),
                (
                    str(of_cgroup(c.CGROUP_MEMORY_LIMIT_BYTES)),
                    "limit {{limit}} {{cgroup}} {{instance}}",
                ),
            ],
        ),
        Graph(
            title="IO held back by its limits",
            description="Seconds per second. max is its io.max; qos is io.latency, iocost or wbt, "
            "which share the disk among cgroups. Nothing here and slow all the same: contention.",
            unit="none",
            targets=[
                (
                    sum_by(
                        ["cgroup", "device", "limit"],
                        rate(sums(c.BLOCK_IO_LIMIT_SECONDS), TREE, ON_DEVICE),
                    ),
                    "{{limit}} {{device}} {{cgroup}} {{instance}}",
                )
            ],
        ),
        Graph(
            title="Bytes: allowed by io.max, used",
            description="A limit that is not reached does nothing; one on a device that is not "
            "used does not apply: limits are of the disk on which they are set, not of what lies "
            "below.",
            unit="Bps",
            targets=pair(c.CGROUP_IO_MAX_BYTES, counter(c.CGROUP_IO_BYTES)),
        ),
        Graph(
            title="Operations: allowed by io.max, used",
            description="As for bytes: a limit of small requests, not of throughput.",
            unit="iops",
            targets=pair(c.CGROUP_IO_MAX_OPERATIONS, counter(c.CGROUP_IO_OPERATIONS)),
        ),
        Graph(
            title="Latency that io.latency promises, and p90",
            description="The kernel looks whether nine of ten IOs are faster than the target (of "
            "rotational disks at their mean), and if not holds siblings with a larger target back.",
            unit="s",
            log=True,
            targets=[
                (
                    str(of_cgroup(c.CGROUP_IO_LATENCY_TARGET_SECONDS, ON_DEVICE)),
                    "target {{device}} {{cgroup}} {{instance}}",
                ),
                (
                    quantile(
                        0.9,
                        buckets(c.BLOCK_IO_DEVICE_SECONDS),
                        ["cgroup", "device"],
                        TREE,
                        ON_DEVICE,
                    ),
                    "p90 {{device}} {{cgroup}} {{instance}}",
                ),
            ],
        ),
        Graph(
            title="Weight of its IO",
            description="Among its siblings, where iocost or bfq heeds it. Twice the weight is "
            "twice the time of the disk, while both want it.",
            unit="none",
            targets=[
                (
                    str(of_cgroup(c.CGROUP_IO_WEIGHT)),
                    "{{policy}} {{device}} {{cgroup}} {{instance}}",
                )
            ],
        ),
        Graph(
            title="Times that it met a limit of its memory",
            description="max: reclaim at its own limit, again and again: it is its limit that "
            "makes it wait. high: tasks are slowed down on purpose. oom_kill: somebody was killed.",
            unit="ops",
            targets=[
                (
                    sum_by(["cgroup", "event"], rate(counter(c.CGROUP_MEMORY_EVENTS), ITSELF)),
                    "{{event}} {{cgroup}} {{instance}}",
                )
            ],
        ),
        Graph(
            title="iocost: device time charged, and rate of the device",
            description="The device's rate below 1 means that iocost holds all of its users back "
            "to meet its latency; at the least that io.cost.qos allows see alert IocostVrateFloor.",
            unit="none",
            targets=[
                (
                    sum_by(
                        ["cgroup", "device"],
                        rate(counter(c.IOCOST_USAGE_SECONDS), ITSELF, ON_DEVICE),
                    ),
                    "charged {{device}} {{cgroup}} {{instance}}",
                ),
                (
                    str(here(gauge(c.IOCOST_VRATE_RATIO), ON_DEVICE)),
                    "rate of {{device}} {{instance}}",
                ),
            ],
        ),
    ]


def _neighbours() -> list[Panel | Row]:
    size = sums(c.BLOCK_IO_SIZE_BYTES)
    # Only disks that it uses itself.
    mine = sum_by(["device"], rate(size, TREE, ON_DEVICE)) + " > 0"
    others = sum_by(["cgroup", "device"], rate(size, OTHERS, ON_DEVICE))
    return [
        Row(title="Or a neighbour on the same disk?"),
        Graph(
            title="Bytes to its disks, by others",
            description="Who else uses the disks that it uses. One that rises when this one's "
            "latency does is the cause: give it an io.max, or this one a weight.",
            unit="Bps",
            targets=[
                (
                    top(f"{others} and on ({HOST}, device) {mine}"),
                    "{{device}} {{cgroup}} {{instance}}",
                )
            ],
        ),
        Graph(
            title="Bytes to its disks, by itself",
            description="Its own IO, buffered writeback included.",
            unit="Bps",
            targets=[
                (
                    sum_by(["cgroup", "device", "op"], rate(size, TREE, ON_DEVICE)),
                    "{{op}} {{device}} {{cgroup}} {{instance}}",
                )
            ],
        ),
        Graph(
            title="Page cache dirtied and written back",
            description="Dirtied faster than written: it is building a backlog, and will be "
            "throttled. Needs --collector.page_flow.",
            unit="Bps",
            targets=[
                (
                    sum_by(["cgroup"], rate(counter(c.PAGE_DIRTIED_BYTES), TREE)),
                    "dirtied {{cgroup}} {{instance}}",
                ),
                (
                    sum_by(["cgroup"], rate(counter(c.PAGE_WRITTEN_BYTES), TREE)),
                    "written {{cgroup}} {{instance}}",
                ),
            ],
        ),
        Graph(
            title="CPU of io_uring's polling threads",
            description="Of SQPOLL threads: all, and with work to do. The rest they burn by "
            "polling.",
            unit="none",
            targets=[
                (
                    sum_by(["cgroup"], rate(counter(c.IO_URING_SQ_SECONDS), TREE)),
                    "all {{cgroup}} {{instance}}",
                ),
                (
                    sum_by(["cgroup"], rate(counter(c.IO_URING_SQ_BUSY_SECONDS), TREE)),
                    "with work {{cgroup}} {{instance}}",
                ),
            ],
        ),
    ]


def _identity() -> list[Panel | Row]:
    return [
        Row(title="Who is it?"),
        table(
            [(str(of_cgroup(c.CGROUP_INFO)), "Known", "none")],
            hide=["Value", "job"],
            title="Names of the cgroups shown",
            description="Unit, container, pod, Slurm job, as the path and the runtime's files "
            "tell (docs/identity.md). Empty: a cgroup that nobody named.",
            lines=6,
        ),
    ]
