# SPDX-License-Identifier: Apache-2.0
"""Documents say what the program does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.test_workloads import LAYOUTS
from writeback_exporter.metrics.catalogue import ALL, CGROUP_INFO
from writeback_exporter.metrics.reference import reference

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_metrics_reference_is_up_to_date() -> None:
    assert (ROOT / "docs/metrics.md").read_text() == reference(), "run `make docs`"


DOCUMENTS = (
    "README.md",
    "bpf/README.md",
    "CHANGELOG.md",
    "docs/identity.md",
    "docs/cardinality.md",
)


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
    for name in ("README.md", "docs/cardinality.md"):
        for flag in re.findall(r"--[a-z][a-z._-]+[a-z]", (ROOT / name).read_text()):
            assert flag in text, flag


def test_readme_names_targets_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = re.findall(r"`?make ([a-z]+)`?", README)
    assert {"run", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^({target}|[a-z ]*\b{target}\b[a-z ]*):", makefile, re.MULTILINE), (
            target
        )


def test_ci_runs_the_readme_test_command() -> None:
    assert "exec make test" in (ROOT / ".ci/run").read_text()
    assert "make test" in README
