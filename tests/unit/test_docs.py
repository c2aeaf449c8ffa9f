# SPDX-License-Identifier: Apache-2.0
"""Documents say what the program does."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.test_workloads import LAYOUTS
from writeback_exporter.metrics.catalogue import ALL, CGROUP_INFO
from writeback_exporter.metrics.reference import reference
from writeback_exporter.names.rules import EVERY_CGROUP
from writeback_exporter.privileges import NEEDS
from writeback_exporter.web.server import Limits

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "exporter/writeback_exporter"
README = (ROOT / "README.md").read_text()
CHINESE = (ROOT / "README.zh-CN.md").read_text()
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def test_metrics_reference_is_up_to_date() -> None:
    assert (ROOT / "docs/metrics.md").read_text() == reference(), "run `make docs`"


DOCUMENTS = [
    *("README.md", "README.zh-CN.md", "CONTRIBUTING.md", "CHANGELOG.md", "bpf/README.md"),
    *("docs/operating.md", "docs/architecture.md"),
    *("docs/identity.md", "docs/cardinality.md", "docs/installation.md", "docs/troubleshooting.md"),
    *("docs/security.md", "docs/performance.md"),
    *("docs/runbooks/README.md", "alerts/README.md", "dashboards/README.md"),
]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_name_only_metrics_that_exist(name: str) -> None:
    known = {metric.name for metric in ALL}
    # Without the kernel's tracepoints, which begin as our metrics do.
    pattern = r"(?<!tp_btf/)\b(writeback_[a-z_]+)(\*?)"
    for used, star in re.findall(pattern, (ROOT / name).read_text()):
        base = re.sub(r"_(total|bucket|sum|count)$", "", used)
        if star:
            assert any(metric.startswith(used) for metric in known), used
        else:
            assert base in known or used == "writeback_exporter", used


RUNBOOKS = [f"docs/runbooks/{path.name}" for path in (ROOT / "docs/runbooks").glob("*.md")]


@pytest.mark.parametrize("name", sorted({*DOCUMENTS, *RUNBOOKS, "docs/kernels.md"}))
def test_links_lead_somewhere(name: str) -> None:
    path = ROOT / name
    for target, anchor in re.findall(r"\]\(([^)#:]+)(?:#([^)]+))?\)", path.read_text()):
        found = path.parent / target
        assert found.is_file(), target
        assert not anchor or anchor in _anchors(found), anchor


def _anchors(path: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_each_dashboard_is_told_by_its_title() -> None:
    text = (ROOT / "dashboards/README.md").read_text()
    assert dict(re.findall(r"^\| `(\w+\.json)` \| (.+?) \|", text, re.MULTILINE)) == {
        path.name: json.loads(path.read_text())["title"]
        for path in (ROOT / "dashboards").glob("*.json")
    }


def test_identity_tells_of_every_label_and_runtime() -> None:
    text = (ROOT / "docs/identity.md").read_text()
    for label in CGROUP_INFO.labels:
        assert re.search(rf"\b{label}\b", text), label
    for runtime in {workload.runtime for workload in LAYOUTS.values()} - {""}:
        assert f"| {runtime} |" in text, runtime


def test_readme_is_one_screen() -> None:
    assert len(README.splitlines()) <= 70


def test_documents_name_only_flags_that_exist() -> None:
    program = Path(sys.executable).with_name("writeback-exporter")
    text = subprocess.run([program, "--help"], capture_output=True, text=True, check=True).stdout
    documents = ("cardinality", "security", "operating", "architecture")
    for name in ("README.md", "README.zh-CN.md", *(f"docs/{name}.md" for name in documents)):
        for flag in re.findall(r"--[a-z][a-z._-]+[a-z]", (ROOT / name).read_text()):
            assert flag in text, flag


@pytest.mark.parametrize(
    ("text", "least"), [(README, {"run", "test"}), (CONTRIBUTING, {"test", "lint"})]
)
def test_documents_name_targets_that_exist(text: str, least: set[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    # Not "make these", in a sentence.
    targets = re.findall(r"(?:`|^    )make ([a-z0-9-]+)", text, re.MULTILINE)
    assert least <= set(targets)
    for target in targets:
        assert re.search(rf"^([a-z0-9 -]* )?{target}( [a-z0-9 -]*)?:", makefile, re.MULTILINE), (
            target
        )


def _said(text: str) -> dict[str, list[str]]:
    """What is the same in each language."""
    commands = re.findall(r"^    (?!#)(.+?)(?: +#.*)?$", text, re.MULTILINE)
    outside = re.sub(r"^    .*$", "", text, flags=re.MULTILINE).replace("\n", " ")
    return {
        "headings": re.findall(r"^(#+) ", text, re.MULTILINE),
        "commands": commands,
        "links": sorted(set(re.findall(r"\]\(([^)]+)\)", text)) - {"README.md", "README.zh-CN.md"}),
        "code": sorted(re.findall(r"`([^`]+)`", outside)),
    }


def test_the_chinese_readme_says_the_same() -> None:
    """Of commands, links, code and queries; and each leads to the other."""
    assert _said(CHINESE) == _said(README)
    assert "](README.md)" in CHINESE
    assert "](README.zh-CN.md)" in README


def test_operating_has_the_server_s_limits() -> None:
    text = (ROOT / "docs/operating.md").read_text()
    limits = Limits()
    assert f"| connections | {limits.connections} |" in text
    assert f"| scrapes at once | {limits.scrapes} |" in text
    assert f"or {limits.collect} s |" in text
    request = f"headers {limits.header_bytes >> 10} KiB, {limits.first_request} s for the first"
    assert f"{request}, {limits.next_request} s idle" in text
    assert f"{EVERY_CGROUP.limit:,} a hierarchy" in text


def test_ci_runs_the_readme_test_command() -> None:
    assert "exec make test" in (ROOT / ".ci/run").read_text()
    assert "make test" in README


def test_security_has_every_need_of_a_capability() -> None:
    table = (ROOT / "docs/security.md").read_text().partition("## Capabilities\n")[2]
    rows = re.findall(r"^\| (.+) \| ([A-Z_, ]+) \| (kept|given up) \|$", table, re.MULTILINE)
    assert rows == [
        (
            need.feature,
            ", ".join(capability.name for capability in need.capabilities),
            "kept" if need.after_start else "given up",
        )
        for need in NEEDS
    ]


def test_troubleshooting_has_every_reason_and_no_other() -> None:
    """Each value of the label `reason` of writeback_exporter_feature_available."""
    table = (ROOT / "docs/troubleshooting.md").read_text().partition("## Reasons\n")[2]
    cells = re.findall(r"^\| (`.*?`) \|", table.partition("\n## ")[0], re.MULTILINE)
    documented = [reason for cell in cells for reason in re.findall("`([^`]+)`", cell)]
    assert len(documented) == len(set(documented))
    assert set(documented) == set(_reasons())


def _reasons() -> Iterator[str]:
    """What the source calls Refused and Feature with."""
    modules = {path: ast.parse(path.read_text()) for path in SOURCE.rglob("*.py")}
    # A constant has its name once; what is not one is assigned in the module that uses it.
    texts: dict[str, set[str]] = defaultdict(set)
    for path, module in modules.items():
        for name, value in _assignments(module):
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                texts[name if name.strip("_").isupper() else f"{path}:{name}"].add(value.value)
            elif isinstance(value, ast.Name) and value.id.strip("_").isupper():
                texts[f"{path}:{name}"].add(value.id)
    for path, module in modules.items():
        for call in ast.walk(module):
            for reason in _reason_of(call):
                if isinstance(reason, ast.Constant):
                    yield str(reason.value)
                    continue
                if isinstance(reason, ast.Attribute):  # another refusal's
                    continue
                assert isinstance(reason, ast.Name), f"{path}:{reason.lineno}"
                found = texts[reason.id] or texts[f"{path}:{reason.id}"]
                assert found, f"{path}:{reason.lineno}: {reason.id} is nowhere a text"
                for text in found:
                    yield from texts.get(text, {text})


def _assignments(module: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    for node in ast.walk(module):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            yield from ((t.id, value) for t, value in pairs if isinstance(t, ast.Name))


def _reason_of(node: ast.AST) -> Iterator[ast.expr]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        position = {"Refused": 0, "Feature": 2}.get(node.func.id, len(node.args))
        yield from node.args[position : position + 1]
        yield from (k.value for k in node.keywords if k.arg == "reason")
