# SPDX-License-Identifier: Apache-2.0
"""All hosts: which lose most time to storage now, and whether many do at once."""

from __future__ import annotations

from grafanalib.core import Templating

from alerts.promql import buckets, counter, gauge
from alerts.settings import Settings
from dashboards.grafana import (
    GREEN,
    RED,
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
    table,
    top,
)
from dashboards.variables import TARGETS
from writeback_exporter.metrics import catalogue as c

LIMITS = Settings()

# What the kernel asked for, not what was slept: hosts that measure sleep and hosts that cannot are
# then compared alike. A wait of one tick, as many are, takes nearly two.
_THROTTLED = sum_by([], rate(counter(c.DIRTY_THROTTLE_REQUESTED_SECONDS)))
_IO_WAITS = sum_by([], rate(counter(c.PRESSURE_WAITING_SECONDS), 'cgroup="/"', 'resource="io"'))
_IO_STALLS = sum_by([], rate(counter(c.PRESSURE_STALLED_SECONDS), 'cgroup="/"', 'resource="io"'))
_LOST = sum_by(
    [],
    f'label_replace({_THROTTLED}, "of", "throttling", "", "") or '
    f'label_replace({_IO_STALLS}, "of", "io", "", "")',
)
_OLDEST_SYNC = max_by([], here(gauge(c.SYNC_OPEN_SECONDS)))
_P99 = quantile(0.99, buckets(c.BLOCK_IO_DEVICE_SECONDS), ["device"]) + " >= 0"


def _how_many(condition: str) -> str:
    return f"count({condition}) or vector(0)"


def dashboard() -> Dashboard:
    return Dashboard(
        title="Writeback: fleet",
        uid="writeback-fleet",
        description="Which hosts lose most seconds to throttling and IO pressure now.",
        templating=Templating(TARGETS),
        panels=[*_now(), *_since_when()],
    )


def _now() -> list[Panel | Row]:
    return [
        Row(title="Is anything wrong, and on how many hosts at once?"),
        Number(
            title="Hosts seen",
            description="Hosts whose exporter answers. Fewer than you have: see alert "
            "ExporterDown.",
            unit="none",
            targets=now(_how_many(str(here(gauge(c.EXPORTER_BUILD_INFO))))),
        ),
        Number(
            title="Hosts that throttle writers now",
            description="Hosts on which more tasks sleep in balance_dirty_pages than the alerts "
            "allow. Many at once: look for what they share, as a storage network, an NFS server "
            "or a checkpoint of one job.",
            unit="none",
            steps=((GREEN, None), (YELLOW, 1), (RED, 5)),
            targets=now(_how_many(f"{_THROTTLED} > {LIMITS.throttled_tasks}")),
        ),
        Number(
            title="Tasks asleep in throttling, all hosts",
            description="Seconds that the kernel had tasks sleep in balance_dirty_pages per "
            "second, which is how many tasks are asleep at any time, or up to twice as many.",
            unit="none",
            steps=((GREEN, None), (YELLOW, 1), (RED, 10)),
            targets=now(f"sum({_THROTTLED}) or vector(0)"),
        ),
        Number(
            title="Oldest sync call that is open",
            description="Age of the oldest fsync, sync or the like that has not returned, on any "
            "host. At 120 s the kernel calls a task hung; a training job's collective gives up "
            "after 600 s.",
            unit="s",
            steps=((GREEN, None), (YELLOW, 10), (RED, LIMITS.sync_seconds)),
            targets=now(f"max({_OLDEST_SYNC}) or vector(0)"),
        ),
        Row(title="Which hosts lose most?"),
        table(
            [
                (_LOST, "Lost", "none"),
                (_THROTTLED, "Tasks throttled", "none"),
                (_IO_STALLS, "All tasks wait for IO", "percentunit"),
                (_IO_WAITS, "Some task waits for IO", "percentunit"),
                (_OLDEST_SYNC, "Oldest open sync", "s"),
                (max_by([], _P99), "Slowest disk, p99", "s"),
            ],
            sort="Lost",
            hide=["job"],
            title="Hosts by time lost",
            description="One line a host, worst first: seconds lost per second by tasks that are "
            "throttled, and in which all tasks wait for IO. Take the first one and click on it.",
            see=link("writeback-node", data="data.fields"),
            lines=9,
        ),
    ]


def _since_when() -> list[Panel | Row]:
    return [
        Row(title="Since when, and all together?"),
        Graph(
            title="Tasks asleep in throttling, by host",
            description="Rises on many hosts at one time are a storm with one cause. A click "
            "leads to the host.",
            unit="none",
            see=TO_NODE,
            targets=[(top(_THROTTLED), "{{instance}}")],
        ),
        Graph(
            title="Hosts that throttle at once",
            description="A storm shows as a step here. Compare it with deployments and with the "
            "checkpoint interval of large jobs.",
            unit="none",
            targets=[
                (_how_many(f"{_THROTTLED} > {LIMITS.throttled_tasks}"), "throttle writers"),
                (_how_many(f"{_IO_WAITS} > {LIMITS.waiting_ratio}"), "wait for IO"),
            ],
        ),
        Graph(
            title="Some task waits for IO, by host",
            description="Share of time in which at least one task of the host waits for IO (PSI "
            "some).",
            unit="percentunit",
            see=TO_NODE,
            targets=[(top(_IO_WAITS), "{{instance}}")],
        ),
        Graph(
            title="Slowest disks, p99 of device time",
            description="Time in the device alone, without this host's queues. One disk that "
            "stands out is broken or out of credits; all disks of one kind point to their common "
            "back end.",
            unit="s",
            log=True,
            see=TO_NODE,
            targets=[(top(_P99), "{{instance}} {{device}}")],
        ),
        Graph(
            title="Oldest open sync call, by host",
            description="A line that rises at 45 degrees is a call that does not return.",
            unit="s",
            see=TO_NODE,
            targets=[(top(_OLDEST_SYNC), "{{instance}}")],
        ),
        Graph(
            title="Written back, by host",
            description="All that was written back, by flushers, sync calls and reclaim. "
            "Throttling with a rate that falls is a back end that does not keep up; with a high "
            "one it is a writer that is too fast.",
            unit="Bps",
            see=TO_NODE,
            targets=[(top(sum_by([], rate(counter(c.HOST_WRITTEN_BYTES)))), "{{instance}}")],
        ),
    ]
