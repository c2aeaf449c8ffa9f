# SPDX-License-Identifier: Apache-2.0
"""Dashboards as Grafana and its users expect them. What their queries return is in tests/e2e."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from dashboards.__main__ import HERE, files
from tests.grafana import ALL, expressions, panels, queries_of, with_values
from tests.promql import EXPORTED, TARGET, faults, selectors

BOARDS: dict[str, dict[str, Any]] = {
    name: json.loads(text) for name, text in sorted(files().items())
}
OF_PROMETHEUS = ("up", "scrape_duration_seconds")
OF_ITS_CLIENT = ("process_resident_memory_bytes", "process_cpu_seconds_total")
OTHERS = dict.fromkeys(OF_PROMETHEUS + OF_ITS_CLIENT, TARGET)

each = pytest.mark.parametrize("name", BOARDS)


def members(value: Any) -> Iterator[Any]:
    """It, and all in it."""
    yield value
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from members(item)


def test_what_is_committed_is_what_is_generated() -> None:
    for name, text in files().items():
        assert (HERE / name).read_text() == text, f"{name} is old: run `make dashboards`"
    assert {path.name for path in HERE.glob("*.json")} == set(files())


@each
def test_for_grafana_of_today(name: str) -> None:
    board = BOARDS[name]
    assert board["schemaVersion"] == 42
    assert board["editable"] is False
    assert re.fullmatch(r"writeback-[a-z]+", board["uid"])
    assert "id" not in board, "Grafana gives it one"
    assert not any(item is None for item in members(board))


@each
def test_variables(name: str) -> None:
    variables = {each["name"]: each for each in BOARDS[name]["templating"]["list"]}
    assert list(variables)[:3] == ["datasource", "job", "instance"]
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    for variable in variables.values():
        if variable["type"] != "query":
            continue
        assert variable["multi"] is True
        assert variable["includeAll"] is True
        # One expression for all would make the choice of a unit or a pod idle.
        narrowed = "$unit" in variable["definition"]
        assert variable.get("allValue") == (None if narrowed else ALL[variable["name"]])
        assert variable["refresh"] == 2, "with the time range"
        assert variable["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    used = set(re.findall(r"\$\{?([a-z_]+)", json.dumps(BOARDS[name])))
    assert used - {name for name in used if name.startswith("__")} <= set(variables)


@each
def test_panels_are_complete(name: str) -> None:
    for panel in panels(BOARDS[name]):
        assert panel["title"]
        assert len(panel["description"]) > 30, panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        assert "value" not in steps[0]
        assert [s["value"] for s in steps[1:]] == sorted(s["value"] for s in steps[1:])


@each
def test_panels_are_modern(name: str) -> None:
    kinds = {panel["type"] for panel in panels(BOARDS[name])}
    assert kinds <= {"timeseries", "heatmap", "stat", "table"}
    for panel in panels(BOARDS[name]):
        if panel["type"] == "timeseries":
            assert panel["options"]["legend"]["showLegend"] is True
        if panel["type"] == "heatmap":
            assert panel["options"]["calculate"] is False
            assert panel["options"]["yAxis"]["unit"] == panel["fieldConfig"]["defaults"]["unit"]
            (target,) = panel["targets"]
            assert (target["format"], target["legendFormat"]) == ("heatmap", "{{le}}")


@each
def test_ids_and_places(name: str) -> None:
    every = BOARDS[name]["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    taken: set[tuple[int, int]] = set()
    for panel in every:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_uids_are_unique_and_links_lead_somewhere() -> None:
    uids = {board["uid"]: board for board in BOARDS.values()}
    assert len(uids) == len(BOARDS)
    linked: set[str] = set()
    for board in BOARDS.values():
        for panel in panels(board):
            for link in panel["fieldConfig"]["defaults"]["links"]:
                uid, _, query = link["url"].removeprefix("/d/").partition("?")
                variables = {each["name"] for each in uids[uid]["templating"]["list"]}
                first, *fields, last = query.split("&")
                assert first == "${datasource:queryparam}"
                assert last == "${__url_time_range}", "the time that one looked at"
                kind = "__data.fields" if panel["type"] == "table" else "__field.labels"
                for field in fields:
                    name, _, value = field.removeprefix("var-").partition("=")
                    assert name in variables
                    assert value == f"${{{kind}.{name}}}"
                    if panel["type"] == "timeseries":
                        for target in panel["targets"]:
                            assert name in by_labels(target["expr"]) or "vector" in target["expr"]
                linked.add(uid)
    assert linked == {"writeback-node", "writeback-cgroup", "writeback-checkpoint"}


def by_labels(expr: str) -> set[str]:
    """Labels that series of the expression are told apart by."""
    found = re.findall(r"\b(?:sum|max|count) by \(([^)]*)\)", expr)
    labels = set().union(*(each.split(", ") for each in found)) if found else set()
    for selector in selectors(with_values(expr)):
        if not found:
            labels |= EXPORTED.get(selector.name or "", TARGET)
    return labels


@each
def test_legends_tell_series_apart(name: str) -> None:
    """Each label that a query groups by, but for the job."""
    for panel in panels(BOARDS[name]):
        for target in panel["targets"]:
            if panel["type"] != "timeseries" or "label_replace" in target["expr"]:
                continue
            groups = re.match(
                r"(?:topk\(10, |histogram_quantile\([\d.]+, )*"
                r"(?:sum|max) by \(([^)]*)\)",
                target["expr"],
            )
            if groups:
                labels = set(groups[1].split(", ")) - {"job", "le"}
                assert labels <= set(re.findall(r"{{(\w+)}}", target["legendFormat"])), panel[
                    "title"
                ]


@each
def test_what_is_asked_for_exists(name: str) -> None:
    """By a parser of its own, and with what counters and gauges are for."""
    for title, expr in expressions(BOARDS[name]):
        assert faults(with_values(expr), EXPORTED | OTHERS) == [], title
    for query in queries_of(BOARDS[name]):  # which ask for labels, not for values
        found = faults(with_values(query), EXPORTED | OTHERS)
        about_labels = ("in no function", "in last_over_time")
        assert [fault for fault in found if not fault.endswith(about_labels)] == [], query


@each
def test_each_selector_is_of_the_chosen_hosts(name: str) -> None:
    for title, expr in expressions(BOARDS[name]):
        for selector in selectors(re.sub(r"\$\{?(timeout\}?s?|__rate_interval)", "600s", expr)):
            matchers = {str(matcher) for matcher in selector.matchers.matchers}
            assert {'job=~"$job"', 'instance=~"$instance"'} <= matchers, (title, selector)


@each
def test_rates_are_over_the_rate_interval(name: str) -> None:
    """Which Grafana makes four scrapes at least, whatever the zoom."""
    for title, expr in expressions(BOARDS[name]):
        ranges = set(re.findall(r"\[([^\]]*)\](?!\+)", expr))
        allowed = {"$__rate_interval"} | ({"${timeout}s"} if "timeout" in title else set())
        assert ranges <= allowed, title
