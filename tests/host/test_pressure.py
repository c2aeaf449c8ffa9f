# SPDX-License-Identifier: Apache-2.0
"""This host's pressure: what the kernel's files say, to the microsecond."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import lab
from tests.psi import CONTENTION, totals

METRICS = {"some": "pressure_waiting_seconds_total", "full": "pressure_stalled_seconds_total"}
HOST = Path("/proc/pressure")


@pytest.fixture
def cgroup() -> Iterator[lab.Cgroup]:
    hierarchy = lab.hierarchies().v2
    if hierarchy is None or not HOST.exists():
        pytest.skip("this host has no cgroup v2, or PSI is off")
    with lab.cgroup(hierarchy, f"wbx-psi-{os.getpid()}") as made:
        yield made


def exported(scrape: lab.Scrape, cgroup: str) -> dict[tuple[str, str], float]:
    """Seconds by resource and kind."""
    return {
        (dict(labels)["resource"], kind): value
        for kind, metric in METRICS.items()
        for labels, value in scrape.select(metric, cgroup=cgroup).items()
    }


def in_files(cgroup: lab.Cgroup) -> dict[tuple[str, str], int]:
    """Microseconds by resource and kind."""
    return {
        (path.name.removesuffix(".pressure"), kind): total
        for path in cgroup.directory.glob("*.pressure")
        if path.name != "cgroup.pressure"
        for kind, total in totals(path).items()
    }


def test_a_cgroup_that_stands_still(cgroup: lab.Cgroup) -> None:
    lab.run_in([cgroup], CONTENTION, 1)
    before = in_files(cgroup)
    assert before["cpu", "some"] > 0
    with lab.Exporter() as exporter:
        scrape = exporter.scrape()
        assert exported(scrape, cgroup.label) == {k: total / 1e6 for k, total in before.items()}
        assert in_files(cgroup) == before, "it did not stand still"
        # It grows by as much as the file says, in the same exporter.
        lab.run_in([cgroup], CONTENTION, 0.3)
        after = in_files(cgroup)
        assert after["cpu", "some"] > before["cpu", "some"]
        scrape = exporter.scrape()
        assert exported(scrape, cgroup.label) == {k: total / 1e6 for k, total in after.items()}


def test_the_host(cgroup: lab.Cgroup) -> None:
    """It never stands still: before, the scrape, after."""

    def files() -> dict[tuple[str, str], float]:
        return {
            (path.name, kind): total / 1e6
            for path in HOST.iterdir()
            for kind, total in totals(path).items()
        }

    with lab.Exporter() as exporter:
        before, scrape, after = files(), exporter.scrape(), files()
    host = exported(scrape, "/")
    assert host.keys() == before.keys()
    for key, seconds in host.items():
        assert before[key] <= seconds <= after[key]


def test_a_cgroup_that_is_not_there_has_no_series(cgroup: lab.Cgroup) -> None:
    with lab.Exporter() as exporter:
        made = lab.Cgroup(cgroup.directory / "child", f"{cgroup.label}/child")
        made.directory.mkdir()
        assert exported(exporter.scrape(), made.label) == dict.fromkeys(in_files(made), 0)
        made.directory.rmdir()
        assert exported(exporter.scrape(), made.label) == {}
        assert exporter.scrape().sum("exporter_collector_success", collector="pressure") == 1
