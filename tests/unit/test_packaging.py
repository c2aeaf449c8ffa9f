# SPDX-License-Identifier: Apache-2.0
"""What packaging/ says is what the program is. The package itself is tested in tests/matrix."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml

from writeback_exporter.privileges import (
    CGROUP_TRIGGERS,
    CONTAINERS,
    DEBUGFS,
    PROGRAMS,
    RINGS,
    TRACEFS,
)

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"
SYSTEMD = PACKAGING / "systemd"
UNIT = "writeback-exporter.service"
DROP_INS = sorted(SYSTEMD.glob("*.conf"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@cache
def flags() -> frozenset[str]:
    program = Path(sys.executable).with_name("writeback-exporter")
    text = subprocess.run([program, "--help"], capture_output=True, text=True, check=True).stdout
    return frozenset(re.findall(r"--[a-z][a-z._-]+[a-z]", text))


def test_package_depends_on_what_the_project_does() -> None:
    """Or recommends it; what a release does not have it cannot depend on (tests/matrix)."""
    control = (PACKAGING / "debian/control").read_text()
    depends = dict(re.findall(r"^ ([a-z0-9-]+) \(>= ([0-9.:]+)\),$", control, re.MULTILINE))
    assert depends.pop("libbpf1") == "1:1.1"  # Debian's has an epoch
    assert depends.pop("python3") == PROJECT["requires-python"].removeprefix(">=")
    requirements = (required.partition(";")[0].lower() for required in PROJECT["dependencies"])
    wanted = (requirement.split(">=") for requirement in requirements)
    named = {name.replace("pyyaml", "yaml"): least for name, least in wanted}
    assert depends == {f"python3-{name}": least for name, least in named.items()}


@pytest.mark.parametrize("path", ["debian/writeback-exporter.default", "writeback-exporter.1"])
def test_examples_name_options_that_exist(path: str) -> None:
    text = (PACKAGING / path).read_text().replace("\\-", "-")
    assert set(re.findall(r"--[a-z][a-z._-]+[a-z]", text)) <= flags()


def test_installation_names_every_drop_in() -> None:
    text = (ROOT / "docs/installation.md").read_text()
    assert set(re.findall(r"`([a-z-]+\.conf)`", text)) == {path.name for path in DROP_INS}


@pytest.mark.parametrize("path", DROP_INS, ids=lambda path: path.stem)
def test_drop_ins_bound_what_they_grant(path: Path) -> None:
    """A capability that is not in the bounding set is not held either."""
    settings = dict(re.findall(r"^(\w+)=(.*)$", path.read_text(), re.MULTILINE))
    ambient = settings.get("AmbientCapabilities", "")
    assert ambient == settings.get("CapabilityBoundingSet", "")
    granted = ambient.replace("CAP_", "").split()
    (row,) = re.findall(
        rf"`{path.name}` \| (.*) \|$", (ROOT / "docs/installation.md").read_text(), re.MULTILINE
    )
    assert re.findall(r"[A-Z]+_[A-Z_]+", row) == granted


def test_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((PACKAGING / "helm/writeback-exporter/Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == PROJECT["version"]


def test_socket_drop_in_only_adds_its_option() -> None:
    (start,) = re.findall(r"^ExecStart=(.+)$", (SYSTEMD / UNIT).read_text(), re.MULTILINE)
    (with_socket,) = re.findall(
        r"^ExecStart=(.+)$", (SYSTEMD / "socket.conf").read_text(), re.MULTILINE
    )
    assert with_socket.replace(" --web.systemd-socket", "", 1) == start
    assert with_socket != start


def test_units_name_options_that_exist() -> None:
    for path in SYSTEMD.iterdir():
        named = set(re.findall(r"--[a-z]+\.[a-z._-]+[a-z]", path.read_text()))
        assert named <= flags(), path


def test_daemonset_names_options_and_ports_that_exist() -> None:
    daemonset = yaml.safe_load((PACKAGING / "kubernetes/daemonset.yml").read_text())
    monitor = yaml.safe_load((PACKAGING / "kubernetes/podmonitor.yml").read_text())
    pod = daemonset["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert {argument.partition("=")[0] for argument in container["args"]} <= flags()
    assert container["image"] == f"writeback-exporter:{PROJECT['version']}"
    assert {m["name"] for m in container["volumeMounts"]} == {
        volume["name"] for volume in pod["spec"]["volumes"]
    }
    assert all(mount["readOnly"] for mount in container["volumeMounts"])
    user = container["securityContext"]["runAsUser"]
    assert f"\nUSER {user}:{user}\n" in (PACKAGING / "Containerfile").read_text()
    assert daemonset["spec"]["selector"] == monitor["spec"]["selector"]
    assert monitor["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in container["ports"]}


SERVICE = PACKAGING / "systemd/writeback-exporter.service"
GRANTS = {
    SERVICE: (PROGRAMS,),
    SERVICE.with_name("files-of-others.conf"): (RINGS, DEBUGFS, CONTAINERS),
    SERVICE.with_name("pressure-triggers.conf"): (CGROUP_TRIGGERS,),
    SERVICE.with_name("sync-tracepoints.conf"): (TRACEFS,),
    SERVICE.with_name("socket.conf"): (),
}


@pytest.mark.parametrize("path", [SERVICE, *DROP_INS], ids=lambda path: path.stem)
def test_units_grant_what_is_needed(path: Path) -> None:
    granted = re.findall(r"^AmbientCapabilities=(.*)$", path.read_text(), re.MULTILINE)
    needed = {str(capability) for need in GRANTS[path] for capability in need.capabilities}
    assert [set(line.split()) for line in granted] == ([needed] if needed else [])
