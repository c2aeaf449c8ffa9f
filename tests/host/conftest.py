# SPDX-License-Identifier: Apache-2.0
"""Real BPF on this machine: root, tracepoints, loop devices, and nothing that is not our own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import lab
from tests.host.witness import Witness, witness
from writeback_exporter.kernel.libbpf import Object

NOBODY = b"\xff"
"""Each byte of the key of an entry that nobody has."""


@pytest.fixture(autouse=True, scope="session")
def _root() -> None:
    assert os.geteuid() == 0, "host tests load BPF programs and make loop devices: run them as root"


@pytest.fixture
def exporter() -> Iterator[lab.Exporter]:
    """A running exporter that has seen nothing of this test yet."""
    with lab.Exporter() as running:
        yield running


@pytest.fixture(name="witness")
def _witness(tmp_path: Path) -> Iterator[Witness]:
    with witness(tmp_path) as attached:
        yield attached


@pytest.fixture
def disk(tmp_path: Path, exporter: lab.Exporter) -> Iterator[lab.Disk]:
    """A loop device that was plugged in while the exporter ran."""
    with lab.loop_disk(tmp_path) as made:
        yield made


@pytest.fixture
def io_cgroup() -> Iterator[lab.Cgroup]:
    """A cgroup of the hierarchy that owns block IO."""
    with lab.cgroup(lab.hierarchies().io, f"wbx-io-{os.getpid()}") as made:
        yield made


@pytest.fixture
def task_cgroup() -> Iterator[lab.Cgroup]:
    """A cgroup of the hierarchy that names throttled tasks."""
    with lab.cgroup(lab.hierarchies().task, f"wbx-task-{os.getpid()}") as made:
        yield made


@pytest.fixture
def plugged(tmp_path: Path) -> Iterator[lab.Disk]:
    """A loop device that no exporter has seen plugged in."""
    with lab.loop_disk(tmp_path) as made:
        yield made


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Capacities of maps, set before they are created; 0 is one entry, which nobody has, from
    before any program is attached."""
    capacities: dict[str, int] = {}
    load = Object.load

    def load_smaller(self: Object) -> None:
        for name, entries in capacities.items():
            if name in self.maps:
                self.maps[name].max_entries = entries or 1
        load(self)
        for name, entries in capacities.items():
            if name in self.maps and entries == 0:
                full = self.maps[name]
                full.update(NOBODY * full.key_size, bytes(full.value_size))

    monkeypatch.setattr(Object, "load", load_smaller)
    return capacities
