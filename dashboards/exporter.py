# SPDX-License-Identifier: Apache-2.0
"""The exporter itself: what it sees, what it loses, what it costs."""

from __future__ import annotations

from grafanalib.core import Templating

from alerts.promql import Series, counter, gauge
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
    now,
    rate,
    sum_by,
    table,
    top,
)
from dashboards.variables import TARGETS
from writeback_exporter.metrics import catalogue as c

# Of Prometheus and of each client of it, which other jobs have too.
UP = Series("up", ())
SCRAPE_SECONDS = Series("scrape_duration_seconds", ())
CPU_SECONDS = Series("process_cpu_seconds_total", ())
RESIDENT = Series("process_resident_memory_bytes", ())


def _ours(expr: str | Series) -> str:
    return f"{expr} and on (job) {here(gauge(c.EXPORTER_BUILD_INFO))}"


def dashboard() -> Dashboard:
    return Dashboard(
        title="Writeback: exporter",
        uid="writeback-exporter",
        description="What the exporter sees, what it loses and what it costs.",
        templating=Templating(TARGETS),
        panels=[*_features(), *_losses(), *_cost()],
    )


def _features() -> list[Panel | Row]:
    features = here(gauge(c.EXPORTER_FEATURE_AVAILABLE))
    main = features.where('feature=~"dirty_throttle|block_io"')
    return [
        Row(title="Does it see all?"),
        Number(
            title="Exporters that answer",
            description="Of those that Prometheus scrapes.",
            unit="none",
            targets=now(f"sum({_ours(here(UP))})"),
        ),
        Number(
            title="Main signals missing",
            description="Throttling or block IO that is not available, each host and signal "
            "counted: `writeback-exporter doctor` there says what to do.",
            unit="none",
            steps=((GREEN, None), (RED, 1)),
            targets=now(f"count({main} == 0) or vector(0)"),
        ),
        Number(
            title="Collectors that fail",
            description="Their metrics are absent from scrapes; the exporter's log says why.",
            unit="none",
            steps=((GREEN, None), (RED, 1)),
            targets=now(f"count({here(gauge(c.EXPORTER_COLLECTOR_SUCCESS))} == 0) or vector(0)"),
        ),
        Number(
            title="Series exported",
            description="By all exporters. See docs/cardinality.md for how to bound them.",
            unit="short",
            targets=now(f"sum({here(gauge(c.EXPORTER_SERIES))}) or vector(0)"),
        ),
        table(
            [(str(features), "Available", "none")],
            sort="Available",
            ascending=True,
            hide=["job"],
            title="Features",
            description="0: not available, with the reason; docs/troubleshooting.md says what "
            "each reason means. Some are legitimately absent, such as debugfs where it is not "
            "mounted.",
            lines=10,
        ),
    ]


def _losses() -> list[Panel | Row]:
    return [
        Row(title="Does it lose anything?"),
        Graph(
            title="BPF maps: how full",
            description="Above 90 % what is new finds no room soon, and counts as other. "
            "docs/cardinality.md.",
            unit="percentunit",
            steps=((GREEN, None), (YELLOW, 0.75), (RED, 0.9)),
            lines_at_steps=True,
            targets=[
                (
                    top(
                        f"{here(gauge(c.EXPORTER_MAP_ENTRIES))} / "
                        f"{here(gauge(c.EXPORTER_MAP_CAPACITY))}"
                    ),
                    "{{map}} {{instance}}",
                )
            ],
        ),
        Graph(
            title="Events dropped and missed",
            description="dropped: found no room in a map. missed: the kernel did not show them to "
            "a program that was running on that CPU. bpf/README.md says which numbers suffer.",
            unit="cps",
            targets=[
                (
                    sum_by(["map"], rate(counter(c.EXPORTER_MAP_DROPPED))),
                    "dropped {{map}} {{instance}}",
                ),
                (
                    sum_by(["program"], rate(counter(c.EXPORTER_PROGRAM_MISSED))),
                    "missed {{program}} {{instance}}",
                ),
            ],
        ),
        Graph(
            title="Cgroups",
            description="Known by name, and collapsed into other: by a rule, beyond the limit, or "
            "without a name.",
            unit="none",
            targets=[
                (str(here(gauge(c.EXPORTER_CGROUPS))), "{{state}} {{instance}}"),
                (str(here(gauge(c.EXPORTER_CGROUP_LABELS))), "exported {{instance}}"),
                (str(here(gauge(c.EXPORTER_CGROUP_LIMIT))), "limit {{instance}}"),
                (
                    str(here(gauge(c.EXPORTER_COLLAPSED_CGROUPS))),
                    "collapsed: {{reason}} {{instance}}",
                ),
            ],
        ),
        Graph(
            title="Collectors that fail, over time",
            description="Collectors whose metrics are absent from that scrape; the log says why.",
            unit="none",
            targets=[
                (
                    f"1 - {here(gauge(c.EXPORTER_COLLECTOR_SUCCESS))}",
                    "{{collector}} {{instance}}",
                )
            ],
        ),
    ]


def _cost() -> list[Panel | Row]:
    runs, spent = counter(c.EXPORTER_PROGRAM_RUNS), counter(c.EXPORTER_PROGRAM_RUN_SECONDS)
    return [
        Row(title="What does it cost?"),
        Graph(
            title="Scrapes: how long",
            description="As Prometheus sees it, and by collector. Near scrape_timeout: bound the "
            "series, docs/cardinality.md.",
            unit="s",
            targets=[
                (_ours(here(SCRAPE_SECONDS)), "scrape {{instance}}"),
                (
                    top(here(gauge(c.EXPORTER_COLLECTOR_DURATION_SECONDS))),
                    "{{collector}} {{instance}}",
                ),
            ],
        ),
        Graph(
            title="Time of BPF programs",
            description="CPUs that the programs take, where kernel.bpf_stats_enabled is 1; else "
            "nothing is known here.",
            unit="none",
            targets=[
                (
                    top(sum_by(["program"], rate(spent))),
                    "{{program}} {{instance}}",
                )
            ],
        ),
        Graph(
            title="Time of a run of a BPF program",
            description="The mean, where kernel.bpf_stats_enabled is 1.",
            unit="s",
            targets=[
                (
                    top(
                        sum_by(["program"], rate(spent))
                        + f" / ({sum_by(['program'], rate(runs))} > 0)"
                    ),
                    "{{program}} {{instance}}",
                )
            ],
        ),
        Graph(
            title="CPU of the exporter",
            description="CPUs that its process takes, without its BPF programs.",
            unit="none",
            targets=[(_ours(rate(CPU_SECONDS)), "CPUs {{instance}}")],
        ),
        Graph(
            title="Memory of the exporter",
            description="Resident; BPF maps are the kernel's and not in it.",
            unit="bytes",
            targets=[(_ours(here(RESIDENT)), "{{instance}}")],
        ),
    ]
