# SPDX-License-Identifier: Apache-2.0
"""What a real Alertmanager, with the example, holds back of each pair of alerts."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

import pytest

from alerts.alerts import Alert, alerts
from alerts.records import Records
from alerts.settings import Settings
from tests.e2e.stack import Alertmanager, alertmanager, webhook
from tests.waiting import PATIENCE_SECONDS, wait_for

HOST = {"job": "writeback-exporter", "bdi": "8:0", "cgroup": "/job", "device": "sda"}
ALL = alerts(Settings(), Records(Settings()))
PAIRS = {f"host{n}": pair for n, pair in enumerate(combinations(ALL, 2))}


def labels(alert: Alert, instance: str) -> dict[str, str]:
    disk = {"disk": "sda"} if "layer" in alert.labels else {}
    return {
        **HOST,
        **disk,
        **alert.labels,
        "alertname": alert.name,
        "severity": alert.severity,
        "instance": instance,
    }


def tell(manager: Alertmanager, pairs: Mapping[str, tuple[Alert, ...]]) -> None:
    told = [{"labels": labels(each, host)} for host, pair in pairs.items() for each in pair]
    request = urllib.request.Request(
        f"{manager.url}/api/v2/alerts",
        json.dumps(told).encode(),
        {"Content-Type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=PATIENCE_SECONDS).close()


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[bool]]:
    """Of each pair, both held back or not: each on a host of its own, told at once."""
    directory = tmp_path_factory.mktemp("alertmanager")
    last = tuple(a for a in ALL if a.name in ("WritebackCongestion", "CgroupDirtyThrottled"))

    def held() -> dict[str, bool]:
        return {
            json.dumps(alert["labels"], sort_keys=True): bool(alert["status"]["inhibitedBy"])
            for alert in manager.alerts()
        }

    def last_is_held() -> bool:
        now = held()
        return any(now.get(json.dumps(labels(each, "last"), sort_keys=True)) for each in last)

    with webhook() as hook, alertmanager(Path(directory), hook) as manager:
        # What holds back takes in one alert after the other, later than the list of all does: once
        # it has the pair that was told last it has had all.
        tell(manager, PAIRS)
        tell(manager, {"last": last})
        wait_for(last_is_held, what="that the last alert is held back")
        found = held()
    return {
        host: [found[json.dumps(labels(each, host), sort_keys=True)] for each in pair]
        for host, pair in PAIRS.items()
    }


def test_somebody_is_told_of_each_pair(states: dict[str, list[bool]]) -> None:
    for host, pair in PAIRS.items():
        assert not all(states[host]), [each.name for each in pair]


def test_no_warning_holds_back_a_page(states: dict[str, list[bool]]) -> None:
    for host, pair in PAIRS.items():
        for each, other, held in zip(pair, reversed(pair), states[host], strict=True):
            if held and each.severity == "critical":
                assert other.severity == "critical", (each.name, other.name)


def test_what_is_held_back(states: dict[str, list[bool]]) -> None:
    found = {
        (other.name, *other.labels.values(), "holds back", each.name, *each.labels.values())
        for host, pair in PAIRS.items()
        for each, other, held in zip(pair, reversed(pair), states[host], strict=True)
        if held
    }
    degraded = ("feature", "collector", "map_full", "events_dropped", "events_missed")
    assert found == {
        ("WritebackCongestion", "holds back", "CgroupDirtyThrottled"),
        ("WritebackCongestion", "holds back", "DirtyPageSpike"),
        ("WritebackCongestion", "holds back", "PressureStall", "io"),
        ("CheckpointStallApproachesTimeout", "sync", "holds back", "SyncCallStuck"),
        ("CheckpointStallApproachesTimeout", "throttling", "holds back", "SyncCallStuck"),
        ("BlockIOSlow", "disk", "slow", "holds back", "BlockIOSlow", "stacked", "slow"),
        ("BlockIOSlow", "disk", "stuck", "holds back", "BlockIOSlow", "stacked", "stuck"),
        ("BlockIOSlow", "disk", "stuck", "holds back", "BlockIOSlow", "disk", "slow"),
        ("BlockIOSlow", "disk", "stuck", "holds back", "BlockIOSlow", "stacked", "slow"),
        ("BlockIOSlow", "stacked", "stuck", "holds back", "BlockIOSlow", "stacked", "slow"),
        *(
            ("ExporterDown", down, "holds back", "ExporterDegraded", problem)
            for down in ("unreachable", "empty", "unknown")
            for problem in degraded
        ),
    }
