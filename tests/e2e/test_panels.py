# SPDX-License-Identifier: Apache-2.0
"""Every query of every dashboard, as Grafana would send it, to a Prometheus that has seen all."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dashboards.__main__ import files
from tests import grafana, lab
from tests.e2e.stack import WINDOW
from tests.e2e.story import Story
from tests.grafana import panels, queries_of, with_values
from tests.monitoring import Series
from tests.promql import selectors

BOARDS: dict[str, dict[str, Any]] = {
    name: json.loads(text) for name, text in sorted(files().items())
}
ALL = grafana.ALL | {"__rate_interval": WINDOW, "__range": "5m"}

TARGETS = [
    pytest.param(
        panel, target, id=f"{name.removesuffix('.json')}-{panel['title']}-{target['refId']}"
    )
    for name, board in BOARDS.items()
    for panel in panels(board)
    for target in panel["targets"]
]


def answer(story: Story, target: dict[str, Any], values: dict[str, str]) -> list[Series]:
    expr = with_values(target["expr"], values)
    server = story.stack.prometheus
    if target["instant"]:  # while nothing came back from the disks, or before
        return server.query(expr, story.relieved) or server.query(expr, story.stuck)
    return server.query_range(expr, story.began, story.resolved)


# What this machine may not have, and how it is told without the exporter -----------------------


def _unavailable(feature: str) -> Callable[[Story], bool]:
    return lambda story: bool(
        story.stack.prometheus.query(
            f'writeback_exporter_feature_available{{feature="{feature}"}} == 0'
        )
    )


def _nobody_stalled_for_memory(story: Story) -> bool:
    grown = story.stack.prometheus.query(
        'increase(writeback_pressure_waiting_seconds_total{cgroup="/",resource="memory"}[2m]) > 0'
    )
    return _unavailable("memory_stall")(story) or not grown


def _no_file(name: str) -> Callable[[Story], bool]:
    """No cgroup has that file, or anything in it."""
    root = Path(lab.hierarchies().io.mount)
    return lambda story: not any(path.read_text().strip() for path in root.rglob(name))


ABSENT = {
    "writeback_block_io_limit_seconds": _unavailable("block_io_limit"),
    "writeback_memory_stall_seconds": _nobody_stalled_for_memory,
    "writeback_cgroup_io_latency_target_seconds": _no_file("io.latency"),
    "writeback_cgroup_io_weight": _no_file("io.*weight"),
    "writeback_iocost_usage_seconds": _no_file("io.cost.qos"),
    "writeback_iocost_vrate_ratio": _no_file("io.cost.qos"),
    "writeback_wb_": _unavailable("bdi_debugfs"),
    "writeback_io_uring_": _unavailable("io_uring"),
}


@pytest.mark.parametrize(("panel", "target"), TARGETS)
def test_a_query_returns_data(story: Story, panel: dict[str, Any], target: dict[str, Any]) -> None:
    found = answer(story, target, ALL)
    if not found and "$cgroup" in target["expr"]:
        # One cgroup chosen, so that there are others.
        found = answer(story, target, ALL | {"cgroup": story.io_cgroup.label})
    if not found:
        names = {s.name or "" for s in selectors(with_values(target["expr"], ALL))}
        proofs = [
            absent for metric, absent in ABSENT.items() for n in names if n.startswith(metric)
        ]
        assert proofs, f"no data, and no reason to have none: {target['expr']}"
        assert all(proof(story) for proof in proofs), f"no data: {target['expr']}"
        return
    if panel["type"] == "heatmap":
        # Edges that Grafana can sort, and cells that add up.
        edges = [float(labels["le"]) for labels, _ in found]
        assert len(edges) == len(set(edges)) > 2
        assert float("inf") in edges
    for labels, _ in found:
        for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
            assert label in labels, "the legend names a label that is not there"


@pytest.mark.parametrize("name", BOARDS)
def test_variables_have_values(story: Story, name: str) -> None:
    for query in queries_of(BOARDS[name]):
        identity = re.search(r'(pod|slurm_job)!=""', query)
        if identity:  # no such workload runs on a machine that tests
            continue
        assert story.stack.prometheus.query(with_values(query, ALL), story.relieved), query


def test_cgroups_are_chosen_by_unit(story: Story) -> None:
    """The one whose unit it is, and none of those that have none."""
    (query,) = {q for q in queries_of(BOARDS["cgroup.json"]) if q.startswith("sum by (cgroup)")}
    unit = story.cgroup.label.removeprefix("/")
    server = story.stack.prometheus

    def cgroups(**chosen: str) -> set[str]:
        found = server.query(with_values(query, ALL | chosen), story.relieved)
        return {labels["cgroup"] for labels, _ in found}

    assert cgroups(unit=unit) == {story.cgroup.label}
    assert cgroups(unit="none.service") == set()
    assert {story.cgroup.label, story.io_cgroup.label, "/"} <= cgroups()


def verdict(story: Story, at: float, **chosen: str) -> float:
    (expr,) = (
        target["expr"]
        for panel in panels(BOARDS["checkpoint.json"])
        if panel["title"] == "Storage is innocent"
        for target in panel["targets"]
    )
    ((_, ((_, value),)),) = story.stack.prometheus.query(with_values(expr, ALL | chosen), at)
    return value


def test_storage_is_innocent_until_it_is_not(story: Story) -> None:
    """0 is not, 1 is, -1 where it cannot be told."""
    writer = story.cgroup.label.removeprefix("/")
    assert verdict(story, story.relieved, cgroup=f"/{writer}") == 0
    assert verdict(story, story.relieved, instance="nobody") == -1
    assert verdict(story, story.relieved, cgroup="/no/such.service") == -1


def test_the_drain_time_is_that_of_the_alert(story: Story) -> None:
    (target,) = (
        target
        for panel in panels(BOARDS["node.json"])
        if panel["title"].startswith("Time to drain")
        for target in panel["targets"]
    )
    bdi = story.disk.dev
    shown = {labels["bdi"]: values for labels, values in answer(story, target, ALL)}
    recorded = story.stack.prometheus.query_range(
        f'clamp_max(bdi:drain_seconds{{bdi="{bdi}"}}, 86400)', story.began, story.resolved
    )
    ((_, values),) = recorded
    # Rules are evaluated between the seconds that are asked for here.
    assert max(v for _, v in shown[bdi]) == max(v for _, v in values) == 86400


def test_hosts_that_throttle_are_counted(story: Story) -> None:
    (target,) = (
        target
        for panel in panels(BOARDS["fleet.json"])
        if panel["title"] == "Hosts that throttle writers now"
        for target in panel["targets"]
    )
    expr = with_values(target["expr"], ALL)
    for at, hosts in ((story.well, 0), (story.relieved, 1)):
        ((_, ((_, count),)),) = story.stack.prometheus.query(expr, at)
        assert count == hosts
