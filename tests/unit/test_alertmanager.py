# SPDX-License-Identifier: Apache-2.0
"""The example for Alertmanager, by amtool. What it does with real alerts is in tests/e2e."""

from __future__ import annotations

import pytest
import yaml

from alerts.__main__ import HERE, files
from alerts.settings import Settings
from tests.monitoring import ask
from tests.promql import EXPORTED, RECORDED

CONFIG = HERE / "alertmanager.yml"
ALERTS = [
    rule
    for group in yaml.safe_load(files(Settings())["rules.yml"])["groups"]
    for rule in group["rules"]
    if "alert" in rule
]


def test_amtool_finds_no_fault() -> None:
    ask("amtool", "check-config", CONFIG)


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_who_is_told(rule: dict[str, dict[str, str]]) -> None:
    labels = [f"{name}={value}" for name, value in rule["labels"].items()]
    receiver = "pager" if rule["labels"]["severity"] == "critical" else "tickets"
    ask(
        "amtool",
        *("config", "routes", "test", "--config.file", CONFIG),
        *("--verify.receivers", receiver, f"alertname={rule['alert']}", *labels),
    )


def test_a_storm_is_one_notification() -> None:
    assert yaml.safe_load(CONFIG.read_text())["route"]["group_by"] == ["alertname"]


def test_what_it_names_exists() -> None:
    names = {rule["alert"] for rule in ALERTS}
    labels = set().union(*EXPORTED.values(), *RECORDED.values(), *(r["labels"] for r in ALERTS))
    for rule in yaml.safe_load(CONFIG.read_text())["inhibit_rules"]:
        assert set(rule["equal"]) <= labels
        for matcher in rule["source_matchers"] + rule["target_matchers"]:
            label, _, value = matcher.split(" ", 2)
            if label == "alertname":
                assert set(value.strip('"').split("|")) <= names
            else:
                assert label in labels
