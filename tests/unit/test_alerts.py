# SPDX-License-Identifier: Apache-2.0
"""Rules in Prometheus' own hands: promtool evaluates them over series that are written here.

Series are spelt out as they are in a scrape; nothing of the generator is used to name them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from alerts.__main__ import HERE, files, main
from alerts.alerts import Alert, alerts
from alerts.records import Records
from alerts.settings import Settings
from tests.monitoring import ask
from tests.promql import EXPORTED, RECORDED, TARGET, faults

HOST = 'job="writeback-exporter",instance="node7"'
INTERVALS = (15, 60)
"""Seconds from scrape to scrape."""
ASKED, END = 35, 60
"""Minutes: long enough for every `for` and range, and for a condition to come and go."""


@dataclass(frozen=True)
class Level:
    """What a series is while something is the case: a gauge's value, or a counter's rate a second,
    by the minute."""

    at: Callable[[float], float]
    counts: bool


def gauge(value: float) -> Level:
    return Level(lambda minute: value, counts=False)


def rate(value: float) -> Level:
    return Level(lambda minute: value, counts=True)


def slows(before: float, after: float) -> Level:
    """A counter, in the last minutes before it is asked for."""
    return Level(lambda minute: before if minute < ASKED - 15 else after, counts=True)


def rises(before: float, after: float) -> Level:
    """A gauge, a few minutes before it is asked for."""
    return Level(lambda minute: before if minute < ASKED - 5 else after, counts=False)


Situation = Mapping[str, Level]


def of(name: str, **labels: str) -> str:
    inside = ",".join([HOST, *(f'{label}="{value}"' for label, value in labels.items())])
    return f"writeback_{name}{{{inside}}}"


def latency(name: str, seconds: float, per_second: float, **labels: str) -> dict[str, Level]:
    """A histogram all of whose values lie in the bucket that ends at `seconds` or the one above."""
    edges = (0.001048576, 0.033554432, 0.268435456, 1.073741824, 8.589934592)
    found = {
        of(f"{name}_bucket", **labels, le=str(edge)): rate(per_second if edge >= seconds else 0)
        for edge in edges
    }
    found[of(f"{name}_bucket", **labels, le="+Inf")] = rate(per_second)
    found[of(f"{name}_count", **labels)] = rate(per_second)
    return found


@dataclass(frozen=True)
class Case:
    """A situation in which the alert fires, changes of it in which it does not, and what the alert
    is called and labelled."""

    alert: str
    fires: Situation
    labels: Mapping[str, str]
    quiet: Mapping[str, Situation] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    """Series without which it fires all the same."""
    again: Situation = field(default_factory=dict)
    """What makes it fire time and again, where that is another situation."""
    host: bool = True
    """Whether it is about one."""

    @property
    def name(self) -> str:
        return "-".join(
            [
                self.alert,
                *(self.labels[k] for k in KINDS if k in self.labels),
            ]
        )


THROTTLED = of("dirty_throttle_seconds_sum", cgroup="/backup", bdi="8:0")
DIRTY = of("bdi_dirty_bytes", bdi="8:0")
THRESHOLD = of("bdi_dirty_threshold_bytes", bdi="8:0")
WRITTEN = of("work_bytes_total", bdi="8:0", reason="background")
HOST_LIMIT = of("dirty_throttle_domain_total", bdi="8:0", domain="global")
OWN_LIMIT = of("dirty_throttle_domain_total", bdi="8:0", domain="memcg")
FREERUN, HARD = of("host_dirty_freerun_bytes"), of("host_dirty_threshold_bytes")
HOST_DIRTY, HOST_WRITEBACK = of("host_dirty_bytes"), of("host_writeback_bytes")
DISK = of("device_disk_info", device="sda", disk="sda")
DEVICE_SECONDS = "block_io_device_seconds"
SIZE = {"cgroup": "/backup", "device": "sda", "op": "write"}
JOB_CGROUP = "/system.slice/slurmstepd.scope/job_17/step_0"
BACKLOG: Situation = {THRESHOLD: gauge(20e9), FREERUN: gauge(15e9), HARD: gauge(20e9)}
SLOW = {"problem": "slow", "severity": "warning"}
NEAR_LIMIT = {
    of("cgroup_memory_bytes", cgroup="/pod"): gauge(0.99e9),
    of("cgroup_memory_limit_bytes", cgroup="/pod", limit="max"): gauge(1e9),
    of("cgroup_writeback_bytes", cgroup="/pod"): gauge(0.1e9),
    of("cgroup_memory_events_total", cgroup="/pod", event="max"): rate(5),
}

CONGESTION = Case(
    "WritebackCongestion",
    {THROTTLED: rate(3), DIRTY: gauge(17e9), WRITTEN: slows(150e6, 50e6), **BACKLOG},
    {"bdi": "8:0", "severity": "critical"},
    {
        "hardly anybody sleeps": {THROTTLED: rate(0.1)},
        "a fast disk, and a healthy writer": {THROTTLED: rate(0.9), WRITTEN: rate(2e9)},
        # 113 s to drain, as it has been all day.
        "a slow disk, much memory, and a healthy writer": {WRITTEN: rate(150e6)},
        "a BDI below its freerun point": {DIRTY: gauge(14e9)},
    },
    again={WRITTEN: slows(150e6, 50e6)},
)
RECLAIMABLE = of("wb_reclaimable_bytes", bdi="8:0", cgroup="/a")
UNDER_WRITEBACK = of("wb_writeback_bytes", bdi="8:0", cgroup="/a")
WB_WRITTEN = of("wb_written_bytes_total", bdi="8:0", cgroup="/a")
BY_CGROUP = of("exporter_feature_available", feature="bdi_debugfs_cgroups", reason="")

CASES = [
    CONGESTION,
    Case(
        "WritebackCongestion",
        {
            THROTTLED: rate(1),
            DIRTY: gauge(19e9),
            **BACKLOG,
            # debugfs is there, and knows all cgroups of the BDI.
            BY_CGROUP: gauge(1),
            RECLAIMABLE: gauge(10e9),
            UNDER_WRITEBACK: gauge(5e9),
            WB_WRITTEN: rate(1e6),
            WRITTEN: rate(2e9),
        },
        {"bdi": "8:0", "severity": "critical"},
        {"it drains": {WB_WRITTEN: rate(1e9)}},
        optional=frozenset({WRITTEN, RECLAIMABLE, UNDER_WRITEBACK}),
    ),
    Case(
        "WritebackCongestion",
        {
            THROTTLED: rate(1),
            DIRTY: gauge(19e9),
            **BACKLOG,
            WRITTEN: rate(1e6),
            # Before 6.10 debugfs knows the root cgroup's part, which is well.
            BY_CGROUP.replace('reason=""', 'reason="not in this kernel"'): gauge(0),
            RECLAIMABLE: gauge(1e3),
            UNDER_WRITEBACK: gauge(0),
            WB_WRITTEN: rate(1e9),
        },
        {"bdi": "8:0", "severity": "critical"},
        {"it drains": {WRITTEN: rate(1e9)}},
        optional=frozenset(
            {
                BY_CGROUP.replace('reason=""', 'reason="not in this kernel"'),
                *(RECLAIMABLE, UNDER_WRITEBACK, WB_WRITTEN),
            }
        ),
    ),
    Case(
        "CgroupDirtyThrottled",
        {THROTTLED: rate(0.8), OWN_LIMIT: rate(20), HOST_LIMIT: rate(5)},
        {"bdi": "8:0", "cgroup": "/backup", "severity": "warning"},
        {
            "hardly asleep": {THROTTLED: rate(0.2)},
            "as fast as the disk": {HOST_LIMIT: rate(90), WRITTEN: rate(2e9), DIRTY: gauge(9e9)},
        },
        optional=frozenset({HOST_LIMIT}),
    ),
    Case(
        "CgroupDirtyThrottled",
        {THROTTLED: rate(0.8), WRITTEN: slows(90e6, 9e6), HOST_LIMIT: rate(90)},
        {"bdi": "8:0", "cgroup": "/backup", "severity": "warning"},
        {"as fast as ever": {WRITTEN: rate(90e6)}},
        optional=frozenset({HOST_LIMIT}),
        again={WRITTEN: slows(90e6, 9e6)},
    ),
    Case(
        "CgroupDirtyThrottled",
        {THROTTLED: rate(0.8), WRITTEN: rate(90e6), DIRTY: gauge(9e9)},
        {"bdi": "8:0", "cgroup": "/backup", "severity": "warning"},
        {"soon written": {DIRTY: gauge(1e9)}},
    ),
    Case(
        "DirtyPageSpike",
        {
            HOST_DIRTY: rises(1e9, 15e9),
            HOST_WRITEBACK: gauge(2e9),
            FREERUN: gauge(15e9),
            HARD: gauge(20e9),
        },
        {"severity": "warning"},
        {
            # Where a healthy streaming writer settles, for ever.
            "high and steady": {HOST_DIRTY: gauge(15.5e9)},
            "below where anybody is throttled": {HOST_DIRTY: rises(1e9, 11e9)},
        },
        again={HOST_DIRTY: gauge(15e9)},
    ),
    Case(
        "CgroupOOMRisk",
        NEAR_LIMIT | {of("cgroup_dirty_bytes", cgroup="/pod"): gauge(0.3e9)},
        {"cgroup": "/pod", "severity": "warning"},
        {
            "full of clean page cache": {of("cgroup_dirty_bytes", cgroup="/pod"): gauge(1e6)},
            "far from its limit": {of("cgroup_memory_bytes", cgroup="/pod"): gauge(0.7e9)},
            "never at its limit": {
                of("cgroup_memory_events_total", cgroup="/pod", event="max"): rate(0)
            },
        },
    ),
    Case(
        "CgroupOOMRisk",
        NEAR_LIMIT
        | {
            of("cgroup_dirty_bytes", cgroup="/pod"): gauge(0.1e9),
            of("pressure_waiting_seconds_total", cgroup="/pod", resource="memory"): rate(0.5),
        },
        {"cgroup": "/pod", "severity": "warning"},
        {
            "a writer in a limit, as it should be": {
                of("pressure_waiting_seconds_total", cgroup="/pod", resource="memory"): rate(0.01)
            },
        },
    ),
    Case(
        "BlockIOSlow",
        {
            **latency(DEVICE_SECONDS, 1.073741824, 20, cgroup="/a", device="sda", op="read"),
            DISK: gauge(1),
        },
        {
            "device": "sda",
            "disk": "sda",
            "op": "read",
            "severity": "warning",
            "layer": "disk",
            "problem": "slow",
        },
        {
            "fast": latency(DEVICE_SECONDS, 0.033554432, 20, cgroup="/a", device="sda", op="read"),
            "one request in ten seconds": latency(
                DEVICE_SECONDS, 1.073741824, 0.1, cgroup="/a", device="sda", op="read"
            ),
        },
        optional=frozenset(
            s
            for s in latency(DEVICE_SECONDS, 1.073741824, 20, cgroup="/a", device="sda", op="read")
            if "0.268435456" not in s and "_count" not in s
        ),
    ),
    Case(
        "BlockIOSlow",
        {
            of("device_disk_info", device="sdb", disk="sdb"): gauge(1),
            **latency(DEVICE_SECONDS, 8.589934592, 20, cgroup="/a", device="sda", op="read"),
        },
        {"device": "sda", "op": "read", "layer": "disk", **SLOW},
        {"fast": latency(DEVICE_SECONDS, 0.001048576, 20, cgroup="/a", device="sda", op="read")},
        optional=frozenset(
            {
                of("device_disk_info", device="sdb", disk="sdb"),
                *(
                    s
                    for s in latency(
                        DEVICE_SECONDS, 8.589934592, 20, cgroup="/a", device="sda", op="read"
                    )
                    if "0.268435456" not in s and "_count" not in s
                ),
            }
        ),
    ),
    Case(
        "BlockIOSlow",
        {
            **latency(DEVICE_SECONDS, 1.073741824, 20, cgroup="/a", device="dm-0", op="read"),
            of("device_disk_info", device="dm-0", disk="sda"): gauge(1),
            DISK: gauge(1),
        },
        {
            "device": "dm-0",
            "disk": "sda",
            "severity": "warning",
            "layer": "stacked",
            "problem": "slow",
        },
        {"fast": latency(DEVICE_SECONDS, 0.001048576, 20, cgroup="/a", device="dm-0", op="read")},
        optional=frozenset(
            {
                DISK,
                *(
                    s
                    for s in latency(
                        DEVICE_SECONDS, 1.073741824, 20, cgroup="/a", device="dm-0", op="read"
                    )
                    if "0.268435456" not in s and "_count" not in s
                ),
            }
        ),
    ),
    Case(
        "BlockIOSlow",
        {
            **latency(DEVICE_SECONDS, 8.589934592, 20, cgroup="/a", device="sda", op="write"),
            DISK: gauge(1),
        },
        {"device": "sda", "disk": "sda", "op": "write", "layer": "disk", **SLOW},
        {
            # Half a second is nothing for a queue full of writeback.
            "half a second": latency(
                DEVICE_SECONDS, 1.073741824, 20, cgroup="/a", device="sda", op="write"
            ),
        },
        optional=frozenset(
            s
            for s in latency(DEVICE_SECONDS, 1, 1, cgroup="/a", device="sda", op="write")
            if "1.073741824" not in s and "_count" not in s
        ),
    ),
    *(
        Case(
            "BlockIOSlow",
            {
                of("block_io_inflight", device=device): gauge(32),
                of("block_io_device_seconds_count", cgroup="/", device=device, op="read"): rate(0),
                of("pressure_waiting_seconds_total", cgroup="/", resource="io"): rate(0.9),
                of("device_disk_info", device=device, disk="sda"): gauge(1),
                DISK: gauge(1),
            },
            {
                "device": device,
                "disk": "sda",
                "layer": layer,
                "problem": "stuck",
                "severity": "critical",
            },
            {
                "it answers": {
                    of("block_io_device_seconds_count", cgroup="/", device=device, op="read"): rate(
                        2
                    )
                },
                "nothing is asked of it": {of("block_io_inflight", device=device): gauge(0)},
                "nobody waits": {
                    of("pressure_waiting_seconds_total", cgroup="/", resource="io"): rate(0)
                },
            },
            optional=frozenset(
                {
                    of("block_io_device_seconds_count", cgroup="/", device=device, op="read"),
                    *({DISK} if device != "sda" else ()),
                }
            ),
        )
        for device, layer in (("sda", "disk"), ("dm-0", "stacked"))
    ),
    Case(
        "FragmentedWrites",
        {
            of("block_io_size_bytes_bucket", **SIZE, le="16384.0"): rate(970),
            of("block_io_size_bytes_count", **SIZE): rate(1000),
            of("block_io_size_bytes_sum", **SIZE): rate(10e6),
            of("block_io_device_seconds_count", **SIZE): rate(1000),
            THROTTLED.replace("8:0", "253:0"): rate(1),
            # The file system is on a logical volume, the requests are the disk's.
            of("bdi_info", bdi="253:0", device="dm-0", fstype="ext4", mountpoint="/data"): gauge(1),
            of("device_disk_info", device="dm-0", disk="sda"): gauge(1),
        },
        {"device": "sda", "op": "write", "severity": "warning"},
        {
            "large writes": {of("block_io_size_bytes_bucket", **SIZE, le="16384.0"): rate(100)},
            "small ones beside a copy": {of("block_io_size_bytes_sum", **SIZE): rate(100e6)},
            "nobody is throttled for it": {THROTTLED.replace("8:0", "253:0"): rate(0)},
            "few writes": {of("block_io_device_seconds_count", **SIZE): rate(20)},
        },
    ),
    *(
        Case(
            "ContainerWriteHog",
            {
                of("block_io_size_bytes_sum", cgroup="/hog", device="sda", op="write"): rate(90e6),
                of("block_io_size_bytes_sum", cgroup="/db", device="sda", op="write"): rate(10e6),
                **latency(DEVICE_SECONDS, 0.001048576, 20, cgroup="/db", device="sda", op="read"),
                **latency(stage, 0.268435456, 20, cgroup="/db", device="sda", op="read"),
                **latency(DEVICE_SECONDS, 8.589934592, 9, cgroup="/hog", device="sda", op="write"),
            },
            {"cgroup": "/hog", "device": "sda", "severity": "warning"},
            {
                "only its journal and its own flushes are slow": {
                    series.replace("/db", cgroup): level
                    for cgroup in ("/", "unattributed")
                    for series, level in latency(
                        stage, 8.589934592, 20, cgroup="/db", device="sda", op="read"
                    ).items()
                }
                | latency(stage, 0.001048576, 20, cgroup="/db", device="sda", op="read"),
                "its neighbour hardly asks for anything": latency(
                    DEVICE_SECONDS, 0.268435456, 0.1, cgroup="/db", device="sda", op="read"
                )
                | latency(stage, 0.268435456, 0.1, cgroup="/db", device="sda", op="read"),
                "its neighbour is well": latency(
                    stage, 0.001048576, 20, cgroup="/db", device="sda", op="read"
                ),
                "shared fairly": {
                    of("block_io_size_bytes_sum", cgroup="/db", device="sda", op="write"): rate(8e7)
                },
                "a trickle": {
                    of("block_io_size_bytes_sum", cgroup="/hog", device="sda", op="write"): rate(
                        9e3
                    ),
                    of("block_io_size_bytes_sum", cgroup="/db", device="sda", op="write"): rate(0),
                },
            },
            optional=frozenset(
                {
                    of("block_io_size_bytes_sum", cgroup="/db", device="sda", op="write"),
                    *latency(DEVICE_SECONDS, 1, 9, cgroup="/hog", device="sda", op="write"),
                    *latency(DEVICE_SECONDS, 1, 1, cgroup="/db", device="sda", op="read"),
                    *latency(stage, 1, 1, cgroup="/db", device="sda", op="read"),
                }
                - {
                    of(f"{DEVICE_SECONDS}_count", cgroup="/db", device="sda", op="read"),
                    of(f"{stage}_bucket", cgroup="/db", device="sda", op="read", le="+Inf"),
                }
            ),
        )
        for stage in (DEVICE_SECONDS, "block_io_queue_seconds")
    ),
    Case(
        "IocostVrateFloor",
        {
            of("iocost_vrate_ratio", device="sda"): gauge(0.5),
            of("iocost_qos_ratio", device="sda", parameter="min"): gauge(0.5),
            of("iocost_qos_ratio", device="sda", parameter="max"): gauge(1.5),
            of("iocost_enabled", device="sda"): gauge(1),
            of("block_io_device_seconds_count", cgroup="/a", device="sda", op="read"): rate(90),
        },
        {"device": "sda", "severity": "warning"},
        {
            "above the floor": {of("iocost_vrate_ratio", device="sda"): gauge(0.9)},
            "switched off": {of("iocost_enabled", device="sda"): gauge(0)},
            "a fixed rate": {of("iocost_qos_ratio", device="sda", parameter="max"): gauge(0.5)},
            "an idle disk": {
                of("block_io_device_seconds_count", cgroup="/a", device="sda", op="read"): rate(0)
            },
        },
    ),
    Case(
        "CheckpointStallApproachesTimeout",
        {of("sync_open_seconds", cgroup=JOB_CGROUP, call="fsync"): gauge(340)},
        {"cgroup": JOB_CGROUP, "call": "fsync", "stall": "sync", "severity": "critical"},
        {"it returns": {of("sync_open_seconds", cgroup=JOB_CGROUP, call="fsync"): gauge(20)}},
    ),
    Case(
        "CheckpointStallApproachesTimeout",
        {
            of("dirty_throttle_seconds_sum", cgroup=JOB_CGROUP, bdi="8:0"): rate(3.8),
            of("dirty_throttled_tasks", cgroup=JOB_CGROUP, bdi="8:0"): gauge(4),
        },
        {"cgroup": JOB_CGROUP, "stall": "throttling", "severity": "critical"},
        {
            "asleep half of the time": {
                of("dirty_throttle_seconds_sum", cgroup=JOB_CGROUP, bdi="8:0"): rate(0.5),
                of("dirty_throttled_tasks", cgroup=JOB_CGROUP, bdi="8:0"): Level(
                    lambda minute: minute % 2 < 1, counts=False
                ),
            },
            "for a short time": {
                of("dirty_throttle_seconds_sum", cgroup=JOB_CGROUP, bdi="8:0"): rate(0.01),
            },
            "many writers, each a little": {
                of("dirty_throttled_tasks", cgroup=JOB_CGROUP, bdi="8:0"): gauge(16)
            },
        },
    ),
    Case(
        "SyncCallStuck",
        {of("sync_open_seconds", cgroup="/db", call="fdatasync"): gauge(90)},
        {"cgroup": "/db", "call": "fdatasync", "severity": "warning"},
        {"slow": {of("sync_open_seconds", cgroup="/db", call="fdatasync"): gauge(30)}},
    ),
    *(
        Case(
            "PressureStall",
            {
                of("pressure_stalled_seconds_total", cgroup=cgroup, resource=resource): rate(0.7),
                **witness,
            },
            {"cgroup": cgroup, "resource": resource, "severity": "warning"},
            {
                "a microsecond a second": {
                    of("pressure_stalled_seconds_total", cgroup=cgroup, resource=resource): rate(
                        1e-6
                    )
                },
                "a batch job that does nothing but IO": {
                    of("pressure_stalled_seconds_total", cgroup=cgroup, resource=resource): rate(0),
                    of("pressure_stalled_seconds_total", cgroup="/job", resource="io"): rate(0.9),
                },
            },
        )
        for cgroup, resource, witness in (
            ("/", "io", {THROTTLED: rate(0.9)}),
            ("/", "io", {of("sync_open_seconds", cgroup="/db", call="fsync"): gauge(40)}),
            ("/db", "memory", {}),
        )
    ),
    Case(
        "ExporterDegraded",
        {of("exporter_feature_available", feature="block_io", reason="no BTF"): gauge(0)},
        {"feature": "block_io", "reason": "no BTF", "problem": "feature", "severity": "warning"},
        {
            "what this host never had": {
                of("exporter_feature_available", feature="block_io", reason="no BTF"): gauge(1),
                of("exporter_feature_available", feature="wb", reason="no debugfs"): gauge(0),
            }
        },
    ),
    Case(
        "ExporterDegraded",
        {
            of("exporter_feature_available", feature="sync", reason=""): Level(
                lambda minute: float(minute < 15) or float("nan"), counts=False
            ),
            of("exporter_feature_available", feature="sync", reason="no right"): gauge(0),
        },
        {"feature": "sync", "reason": "no right", "problem": "feature", "severity": "warning"},
        {"never had": {of("exporter_feature_available", feature="sync", reason=""): gauge(0)}},
    ),
    Case(
        "ExporterDegraded",
        {of("exporter_collector_success", collector="sync"): gauge(0)},
        {"collector": "sync", "problem": "collector", "severity": "warning"},
        {"well": {of("exporter_collector_success", collector="sync"): gauge(1)}},
    ),
    Case(
        "ExporterDegraded",
        {
            of("exporter_map_entries", map="sync/sync"): gauge(8000),
            of("exporter_map_capacity", map="sync/sync"): gauge(8192),
        },
        {"map": "sync/sync", "problem": "map_full", "severity": "warning"},
        {"half full": {of("exporter_map_entries", map="sync/sync"): gauge(4000)}},
    ),
    Case(
        "ExporterDegraded",
        {of("exporter_map_dropped_total", map="sync/sync"): rate(0.5)},
        {"map": "sync/sync", "problem": "events_dropped", "severity": "warning"},
        {"one": {of("exporter_map_dropped_total", map="sync/sync"): rate(0.003)}},
    ),
    Case(
        "ExporterDegraded",
        {of("exporter_program_missed_total", program="block_io/complete"): rate(30)},
        {"program": "block_io/complete", "problem": "events_missed", "severity": "warning"},
        {"a few": {of("exporter_program_missed_total", program="block_io/complete"): rate(0.01)}},
    ),
    Case(
        "ExporterDown",
        {f"up{{{HOST}}}": gauge(0)},
        {"problem": "unreachable", "severity": "warning"},
        {"up": {f"up{{{HOST}}}": gauge(1), of("exporter_build_info", version="1"): gauge(1)}},
    ),
    Case(
        "ExporterDown",
        {f"up{{{HOST}}}": gauge(1), of("exporter_collector_success", collector="sync"): gauge(1)},
        {"problem": "empty", "severity": "warning"},
        {"full": {of("exporter_build_info", version="1"): gauge(1)}},
        optional=frozenset({of("exporter_collector_success", collector="sync")}),
    ),
    Case(
        "ExporterDown",
        {'up{job="node",instance="node7"}': gauge(1)},
        {"problem": "unknown", "severity": "warning"},
        {"scraped": {f"up{{{HOST}}}": gauge(1), of("exporter_build_info", version="1"): gauge(1)}},
        optional=frozenset({'up{job="node",instance="node7"}'}),
        host=False,
    ),
]


def samples(
    series: str, situations: Callable[[float], Situation], interval: int, reset: float | None
) -> str:
    """Values of a series, scrape by scrape; `_` where it is absent. Counters are 0 at `reset`."""
    said: list[str] = []
    total = 0.0
    for scrape in range(60 * END // interval + 1):
        minute = scrape * interval / 60
        level = situations(minute).get(series)
        if level is None:
            said.append("_")
        elif not level.counts:
            said.append(repr(float(level.at(minute))))
        else:
            total = 0.0 if minute == reset else total + level.at(minute) * interval
            said.append(repr(total))
    return " ".join(said)


def always(situation: Situation) -> Callable[[float], Situation]:
    return lambda minute: situation


def trial(
    situations: Callable[[float], Situation],
    names: Iterable[str],
    interval: int = 15,
    reset: float | None = None,
    **expected: list[dict[str, Any]],
) -> dict[str, Any]:
    """One of promtool's tests: series, and what is expected of them."""
    values = {name: samples(name, situations, interval, reset) for name in sorted(set(names))}
    return {
        "interval": f"{interval}s",
        "input_series": [{"series": name, "values": text} for name, text in values.items()],
        **expected,
    }


def promtool(tmp_path: Path, alert: str, *trials: dict[str, Any]) -> None:
    """All in one run of it, with the rules of that alert: half of the time is that of rules."""
    records, every = yaml.safe_load(RULES)["groups"]
    named = [rule for rule in every["rules"] if rule["alert"] == alert]
    groups = {"groups": [records, {"name": "alerts", "rules": named}]}
    (tmp_path / "rules.yml").write_text(json.dumps(groups))
    test = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": list(trials)}
    (tmp_path / "test.yml").write_text(json.dumps(test))  # which is YAML, and quick
    ask("promtool", "test", "rules", tmp_path / "test.yml")


def firing(case: Case) -> str:
    labels = {"alertname": case.alert, "alertstate": "firing", **case.labels}
    return (
        "ALERTS{"
        + ",".join(f'{k}="{v}"' for k, v in labels.items())
        + (f",{HOST}}}" if case.host else "}")
    )


def fires(case: Case) -> list[dict[str, Any]]:
    """It, as often as it should, with all of its labels."""
    return [
        {
            "expr": firing(case),
            "eval_time": f"{ASKED}m",
            "exp_samples": [{"labels": firing(case), "value": 1}],
        }
    ]


def nothing(selector: str) -> list[dict[str, Any]]:
    """None of it, at any time."""
    return [
        {"expr": selector, "eval_time": f"{m}m", "exp_samples": []} for m in range(0, ASKED + 10, 5)
    ]


def never(case: Case) -> list[dict[str, Any]]:
    """Not with all of its labels."""
    return nothing(firing(case))


def is_quiet(case: Case) -> list[dict[str, Any]]:
    """Not of that kind, whatever its labels."""
    same = "".join(f',{k}="{case.labels[k]}"' for k in KINDS if k in case.labels)
    return nothing(f'ALERTS{{alertname="{case.alert}",alertstate="firing"{same}}}')


RULES = files(Settings())["rules.yml"]

KINDS = ("problem", "layer", "resource", "stall")
"""What tells alerts of one name apart."""

each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
at_each_interval = pytest.mark.parametrize("interval", INTERVALS)


def quiet_ones(case: Case) -> Iterator[tuple[Situation, list[dict[str, Any]]]]:
    for change in case.quiet.values():
        yield {**case.fires, **change}, is_quiet(case)


@each
@at_each_interval
def test_fires_and_is_quiet(tmp_path: Path, case: Case, interval: int) -> None:
    """Quiet in each situation that a worse rule would fire for."""
    told = [(case.fires, fires(case)), *quiet_ones(case)]
    promtool(
        tmp_path,
        case.alert,
        *(trial(always(now), now, interval, promql_expr_test=expected) for now, expected in told),
    )


@each
def test_is_quiet_without_a_series(tmp_path: Path, case: Case) -> None:
    trials = []
    for series in case.fires:
        now = {name: level for name, level in case.fires.items() if name != series}
        expected = fires(case) if series in case.optional else never(case)
        trials.append(trial(always(now), case.fires, promql_expr_test=expected))
    promtool(tmp_path, case.alert, *trials)


@each
@at_each_interval
def test_a_reset_changes_nothing(tmp_path: Path, case: Case, interval: int) -> None:
    """The exporter starts anew 3 minutes before, with all counters at 0."""
    told = [(case.fires, fires(case)), *quiet_ones(case)]
    promtool(
        tmp_path,
        case.alert,
        *(
            trial(always(now), now, interval, ASKED - 3, promql_expr_test=expected)
            for now, expected in told
        ),
    )


@each
def test_what_comes_and_goes_is_no_row_of_alerts(tmp_path: Path, case: Case) -> None:
    """Once it fires it goes on until the condition stays away, or never begins."""
    calm = {**case.fires, **next(iter(case.quiet.values()))}
    if case.again:
        calm |= {name: gauge(0) for name in case.again}

    def flapping(minutes: int) -> Callable[[float], Situation]:
        return lambda minute: {**case.fires, **case.again} if minute // minutes % 2 else calm

    alert = f'ALERTS{{alertname="{case.alert}",alertstate="firing"}}'
    stops = f"count_over_time(({alert} offset 1m unless {alert})[{END - 20}m:1m])"
    expected = [{"expr": stops, "eval_time": f"{END}m", "exp_samples": []}]
    promtool(
        tmp_path, case.alert, *(trial(flapping(m), calm, promql_expr_test=expected) for m in (1, 3))
    )


def test_it_resolves(tmp_path: Path) -> None:
    """Ten minutes after writeback is well again, nobody is paged any more."""
    calm = {**CONGESTION.fires, THROTTLED: rate(0)}
    over = {"expr": firing(CONGESTION), "eval_time": "55m", "exp_samples": []}
    promtool(
        tmp_path,
        CONGESTION.alert,
        trial(
            lambda minute: CONGESTION.fires if minute < 40 else calm,
            calm,
            promql_expr_test=[*fires(CONGESTION), over],
        ),
    )


def test_a_page_names_the_culprit(tmp_path: Path) -> None:
    page = {
        "eval_time": f"{ASKED}m",
        "alertname": "WritebackCongestion",
        "exp_alerts": [
            {
                "exp_labels": {
                    "bdi": "8:0",
                    "severity": "critical",
                    "job": "writeback-exporter",
                    "instance": "node7",
                },
                "exp_annotations": {
                    "summary": "Writeback to BDI 8:0 of node7 does not keep up",
                    "description": "On average 3.0 tasks sleep in balance_dirty_pages for BDI 8:0, "
                    "its dirty memory is above the freerun point, and it is written so slowly that "
                    "it would take more than 60 s. Most throttled: "
                    "/backup (3.0 tasks asleep). See which disk is slow, and stop or limit who "
                    "writes.",
                    "runbook_url": "docs/runbooks/WritebackCongestion.md",
                },
            }
        ],
    }
    told = trial(always(CONGESTION.fires), CONGESTION.fires, alert_rule_test=[page])
    promtool(tmp_path, CONGESTION.alert, told)


# The files ---------------------------------------------------------------------------------------


def test_what_is_committed_is_what_is_generated() -> None:
    for name, text in files(Settings()).items():
        assert (HERE / name).read_text() == text, f"{name} is old: run `make rules`"


def test_promtool_finds_no_fault(tmp_path: Path) -> None:
    ask("promtool", "check", "rules", "--lint=all", "--lint-fatal", HERE / "rules.yml")


def test_the_manifest_has_the_same_rules() -> None:
    manifest = yaml.safe_load((HERE / "prometheusrule.yml").read_text())
    assert manifest["kind"] == "PrometheusRule"
    assert manifest["spec"] == yaml.safe_load((HERE / "rules.yml").read_text())


def test_each_alert_is_tried() -> None:
    settings = Settings()
    made = {
        (a.name, *(a.labels.get(k) for k in KINDS)) for a in alerts(settings, Records(settings))
    }
    tried = {(case.alert, *(case.labels.get(k) for k in KINDS)) for case in CASES}
    assert made == tried


def test_thresholds_are_settings(tmp_path: Path) -> None:
    assert main(["--output", str(tmp_path), "--drain-seconds", "5", "--patience", "0"]) == 0
    rules = yaml.safe_load((tmp_path / "rules.yml").read_text())["groups"][1]["rules"]
    assert "bdi:drain_seconds > 5" in rules[0]["expr"]
    assert all(rule.get("for", "0s") == "0s" for rule in rules)
    ask("promtool", "check", "rules", "--lint=all", "--lint-fatal", tmp_path / "rules.yml")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--window", "0"], "--window 0: must be a duration of Prometheus, as 5m"),
        (["--window", "0m"], "--window 0m: must be a duration"),
        (["--window", "5 minutes"], "must be a duration"),
        (["--training-cgroups", "("], "is no regular expression"),
        (["--job", 'a"b'], "without quotes"),
        (["--io-stall-cgroups", r"/db\.service"], "write [.] for a dot"),
        (["--drain-seconds=-1"], "--drain-seconds -1.0: must be 0 or more"),
        (["--drain-seconds", "nan"], "must be 0 or more"),
        (["--hog-ratio", "70"], "a ratio is 0 to 1"),
        (["--collective-timeout", "0"], "a second or more"),
        (["--output", "/nonexistent"], "No such file or directory"),
    ],
)
def test_bad_settings_are_refused(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, and nothing is written."""
    assert main(["--output", str(tmp_path), *options]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_size_that_no_bucket_ends_at_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--output", str(tmp_path), "--fragment-bytes", "10000"]) == 1
    assert "has no bucket at 10000" in capsys.readouterr().err


RULES_BY_NAME = [
    (rule.get("record") or rule["alert"], rule["expr"])
    for group in yaml.safe_load(RULES)["groups"]
    for rule in group["rules"]
]


@pytest.mark.parametrize(("name", "expr"), RULES_BY_NAME)
def test_what_is_asked_for_exists(name: str, expr: str) -> None:
    """By a parser of its own: what f-strings made is not what the generator meant, for sure."""
    assert faults(expr, EXPORTED | RECORDED | {"up": TARGET}) == []


@pytest.mark.parametrize(
    ("expr", "fault"),
    [
        ("writeback_host_drity_bytes", "does not exist"),
        ('writeback_host_dirty_bytes{cgroup="/"}', "has no label cgroup"),
        ("writeback_work_bytes_total > 5", "in no function"),
        ("rate(writeback_host_dirty_bytes[5m])", "in rate"),
        ("sum by (pod) (writeback_cgroup_dirty_bytes)", "no pod"),
    ],
)
def test_faults_are_found(expr: str, fault: str) -> None:
    assert any(fault in found for found in faults(expr, EXPORTED)), expr


@pytest.mark.parametrize("alert", alerts(Settings(), Records(Settings())), ids=lambda a: a.name)
def test_templates_know_their_labels(alert: Alert) -> None:
    """$labels has those of the expression, not those that the rule adds."""
    used = set(re.findall(r"labels\.([a-z_]+)", (alert.summary + alert.description).lower()))
    assert not used & alert.labels.keys()
    known = set().union(*EXPORTED.values(), *RECORDED.values())
    assert used <= known
