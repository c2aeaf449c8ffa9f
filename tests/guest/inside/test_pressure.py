# SPDX-License-Identifier: Apache-2.0
"""Pressure of every cgroup, as each kernel tells it, where memory and IO may be made short."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests import lab
from tests.host.test_pressure import exported, in_files
from tests.lab import DIRECT_WRITER
from tests.psi import CONTENTION, totals
from tests.waiting import wait_for

from .test_main_signals import MIB, SLOW

FLAGS = lab.only("pressure")

MEMORY_EATER = """
block = bytearray(int(arguments[0]))
block[::4096] = bytes(len(range(0, len(block), 4096)))
"""
"""Touches so many bytes."""


def scrape_still(exporter: lab.Exporter, *cgroups: lab.Cgroup) -> lab.Scrape:
    """One of the time after their pressure: a task that has ended may be queued a little longer."""

    def stand_still() -> bool:
        before = [in_files(cgroup) for cgroup in cgroups]
        time.sleep(0.05)
        return [in_files(cgroup) for cgroup in cgroups] == before

    wait_for(stand_still, what="the end of the pressure")
    return exporter.scrape()


def assert_files(scrape: lab.Scrape, cgroup: lab.Cgroup) -> dict[tuple[str, str], int]:
    files = in_files(cgroup)
    assert exported(scrape, cgroup.label) == {key: total / 1e6 for key, total in files.items()}
    return files


def test_totals_of_each_resource() -> None:
    """Three cgroups, each short of one thing; and what the host's files have is there as well."""
    hierarchy = lab.hierarchies().task
    with (
        lab.Exporter(*FLAGS) as exporter,
        lab.cgroup(hierarchy, "psi-cpu") as cpu,
        lab.cgroup(hierarchy, "psi-io") as io,
        lab.cgroup(hierarchy, "psi-memory") as memory,
    ):
        lab.run_in([cpu], CONTENTION, 0.3)
        lab.run_in([io], DIRECT_WRITER, SLOW.path, MIB, 3, 0)
        (memory.directory / "memory.high").write_text(str(8 * MIB))
        lab.run_in([memory], MEMORY_EATER, 9 * MIB)
        scrape = scrape_still(exporter, cpu, io, memory)
        assert assert_files(scrape, cpu)["cpu", "some"] > 0
        assert assert_files(scrape, io)["io", "some"] > 0
        assert assert_files(scrape, memory)["memory", "some"] > 0
        host = {
            (path.name, kind) for path in Path("/proc/pressure").iterdir() for kind in totals(path)
        }
        assert exported(scrape, "/").keys() == host
        assert scrape.select("exporter_collector_success", collector="pressure")


def test_a_cgroup_whose_pressure_is_switched_off() -> None:
    """Its counters end and go on; the others' stay (6.1)."""
    hierarchy = lab.hierarchies().task
    with (
        lab.cgroup(hierarchy, "psi-off") as off,
        lab.cgroup(hierarchy, "psi-on") as on,
        lab.Exporter(*FLAGS) as exporter,
    ):
        switch = off.directory / "cgroup.pressure"
        if not switch.exists():
            pytest.skip("this kernel has no cgroup.pressure (6.1)")
        lab.run_in([off], CONTENTION, 0.3)
        before = assert_files(scrape_still(exporter, off), off)
        switch.write_text("0")
        scrape = exporter.scrape()
        assert exported(scrape, off.label) == {}
        assert_files(scrape, on)
        switch.write_text("1")
        after = assert_files(exporter.scrape(), off)
        assert after["cpu", "some"] >= before["cpu", "some"] > 0
