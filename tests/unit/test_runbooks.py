# SPDX-License-Identifier: Apache-2.0
"""Runbooks: one for each alert, in one form, and they name only what exists."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest
import yaml

from alerts.__main__ import main
from alerts.alerts import Alert, alerts
from alerts.records import Records
from alerts.settings import Settings
from tests.promql import EXPORTED, RECORDED, TARGET, faults

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/runbooks"
SECTIONS = ["What it means", "Who", "What to do", "How to verify"]
KNOWN = EXPORTED | RECORDED | {"up": TARGET}

ALERTS: dict[str, list[Alert]] = {}
for _alert in alerts(Settings(), Records(Settings())):
    ALERTS.setdefault(_alert.name, []).append(_alert)
RULES = ROOT / "alerts/README.md"
FILES = sorted(FOLDER.glob("*.md"))
RUNBOOKS = {path.stem: path.read_text() for path in FILES if path.stem != "README"}

each = pytest.mark.parametrize("name", sorted(RUNBOOKS))
each_file = pytest.mark.parametrize(
    "path", [*FILES, RULES], ids=lambda path: str(path.relative_to(ROOT))
)


def section(name: str, title: str) -> str:
    return RUNBOOKS[name].partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def queries(block: str) -> list[str]:
    """An expression ends where a line begins that continues none: neither indented nor a closing
    bracket. Comments stand between."""
    found: list[str] = []
    for line in block.splitlines():
        if line.startswith("#"):
            found.append("")
        elif found and found[-1] and line.startswith((" ", ")")):
            found[-1] += "\n" + line
        else:
            found.append(line)
    return [query for query in found if query]


def test_each_alert_has_a_runbook_and_each_runbook_an_alert() -> None:
    assert set(RUNBOOKS) == set(ALERTS)


def test_alerts_lead_to_their_runbooks() -> None:
    groups = yaml.safe_load((ROOT / "alerts/rules.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"] if "alert" in rule]
    assert {rule["alert"] for rule in rules} == set(RUNBOOKS)
    for rule in rules:
        assert ROOT / rule["annotations"]["runbook_url"] == FOLDER / f"{rule['alert']}.md"


@each
def test_form(name: str) -> None:
    lines = RUNBOOKS[name].splitlines()
    assert lines[0] == f"# {name}"
    assert [line[3:] for line in lines if line.startswith("## ")] == SECTIONS
    assert len(lines) <= 75, "one screen"
    assert blocks(section(name, "Who"), "promql")
    assert blocks(section(name, "How to verify"), "promql")
    assert re.search(r"^1\. ", section(name, "What to do"), re.MULTILINE)


@each
def test_queries_ask_for_what_exists(name: str) -> None:
    for block in blocks(RUNBOOKS[name], "promql"):
        assert queries(block)
        for query in queries(block):
            assert faults(query, KNOWN) == [], query


def test_queries_are_told_apart() -> None:
    block = "# one\nup\n  == 0\nsum by (job) (\n  up\n)\n# another\nup == 1\n"
    assert queries(block) == ["up\n  == 0", "sum by (job) (\n  up\n)", "up == 1"]


@each_file
def test_names_in_the_text_exist(path: Path) -> None:
    text = path.read_text()
    for metric in re.findall(r"\bwriteback_[a-z_]+\b", text):
        assert metric in EXPORTED, metric
    for record in re.findall(r"\b(?:bdi|cgroup|device|node|io_uring):[a-z][a-z0-9_]+", text):
        assert record in RECORDED, record


@each_file
def test_options_exist_and_have_the_defaults_that_are_told(path: Path) -> None:
    defaults = {f.name.replace("_", "-"): f.default for f in fields(Settings)}
    for option, value in re.findall(r"`--([a-z._-]+)(?: ([^`]+))?`", path.read_text()):
        if "." in option:
            assert f"--{option}" in exporter_help()
            continue
        assert option in defaults
        if re.fullmatch(r"[0-9.]+", value):
            assert float(value) == defaults[option], option


@cache
def exporter_help() -> str:
    program = Path(sys.executable).with_name("writeback-exporter")
    return subprocess.run([program, "--help"], capture_output=True, text=True, check=True).stdout


@each
def test_waits_are_the_rules(name: str) -> None:
    """How long it must be true, and how long the alert then outlasts it."""
    means, verify = section(name, "What it means"), section(name, "How to verify")
    for alert in ALERTS[name]:
        if alert.minutes:
            assert re.search(rf"\bfor\s+{alert.minutes:g}\s+minutes?\b", means), alert.labels
        else:
            assert "at once" in means
        if alert.keep_minutes:
            assert re.search(rf"resolves\s+{alert.keep_minutes:g}\s+minutes\b", verify)
        else:
            assert "next evaluation" in verify


def test_the_table_has_each_alert_with_its_severities() -> None:
    rows = re.findall(
        r"^\| \[(\w+)\]\((\w+)\.md\) \| ([\w, ]+) \| .+ \|$",
        (FOLDER / "README.md").read_text(),
        re.MULTILINE,
    )
    assert all(name == file for name, file, _ in rows)
    assert len(rows) == len(ALERTS)
    assert {name: set(severities.split(", ")) for name, _, severities in rows} == {
        name: {alert.severity for alert in same} for name, same in ALERTS.items()
    }


def test_examples_of_settings_are_taken(tmp_path: Path) -> None:
    commands = RULES.read_text().replace("\\\n", "")
    examples = re.findall(r"^    python -m alerts (.+)$", commands, re.MULTILINE)
    assert examples
    for example in examples:
        arguments = shlex.split(example)
        arguments[arguments.index("--output") + 1] = str(tmp_path)
        assert main(arguments) == 0


def test_the_readme_names_the_files_of_rules() -> None:
    named = set(re.findall(r"\balerts/\w+\.yml\b", RULES.read_text()))
    assert named == {f"alerts/{path.name}" for path in (ROOT / "alerts").glob("*.yml")}
