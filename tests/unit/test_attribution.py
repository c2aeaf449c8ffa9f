# SPDX-License-Identifier: Apache-2.0
"""Whose IO is whose, by what a cgroup v2 tree has and has switched on."""

from __future__ import annotations

from pathlib import Path

import pytest

from writeback_exporter.features import NO_DESCRIPTOR
from writeback_exporter.names import attribution as module
from writeback_exporter.names.attribution import attribution
from writeback_exporter.names.cgroups import Hierarchies, Hierarchy, find_hierarchies


def found(top: Path, controllers: str, on: str) -> tuple[str, str]:
    """The reasons of block_io_attribution and writeback_attribution."""
    (top / "proc/self").mkdir(parents=True)
    (top / "proc/self/cgroup").write_text("0::/\n")
    (top / "cgroup").mkdir()
    (top / "cgroup/cgroup.controllers").write_text(controllers + "\n")
    (top / "cgroup/cgroup.subtree_control").write_text(on + "\n")
    reasons = {
        feature.name: feature.reason
        for feature in attribution(find_hierarchies(str(top / "cgroup"), str(top / "proc")))
    }
    return reasons["block_io_attribution"], reasons["writeback_attribution"]


@pytest.mark.parametrize(
    ("controllers", "on", "reasons"),
    [
        ("cpu io memory", "cpu io memory", ("", "")),
        ("cpu io memory", "io", ("", "")),  # which brings memory along
        ("cpu io memory", "memory", ("io controller off", "io controller off")),
        ("cpu io", "io", ("", "no memory controller")),
        ("cpu io", "", ("io controller off", "no memory controller")),
    ],
)
def test_v2(tmp_path: Path, controllers: str, on: str, reasons: tuple[str, str]) -> None:
    assert found(tmp_path, controllers, on) == reasons


def test_memory_of_v1_beside_io_of_v2(tmp_path: Path) -> None:
    v2 = Hierarchy(0, str(tmp_path))
    (tmp_path / "cgroup.subtree_control").write_text("io\n")
    features = attribution(Hierarchies(v2, v2, Hierarchy(4, str(tmp_path))))
    assert features[2].reason == "no memory controller"


def test_controllers_that_cannot_be_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of descriptors the controllers are not off."""

    class Exhausted(type(tmp_path)):  # type: ignore[misc]
        def read_text(self, *_: object, **__: object) -> str:
            raise OSError(24, "Too many open files", str(self))

    v2 = Hierarchy(0, str(tmp_path))
    monkeypatch.setattr(module, "Path", Exhausted)
    features = attribution(Hierarchies(v2, v2, v2))
    assert [feature.reason for feature in features[1:]] == [NO_DESCRIPTOR] * 2
