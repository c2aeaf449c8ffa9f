# SPDX-License-Identifier: Apache-2.0
"""PSI triggers of this kernel, beside one of the test's own."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import lab
from tests.host.test_cgroup_files import kept
from tests.psi import CONTENTION, WITHOUT_SYS_RESOURCE, totals, witness
from tests.waiting import wait_for

COLLECTORS = ("--no-collector.block_io", "--no-collector.dirty_throttle")


@pytest.fixture
def cgroup() -> Iterator[lab.Cgroup]:
    hierarchy = lab.hierarchies().v2
    if hierarchy is None or not Path("/proc/pressure").exists():
        pytest.skip("this host has no cgroup v2, or PSI is off")
    with lab.cgroup(hierarchy, f"wbx-trigger-{os.getpid()}") as made:
        yield made


UNPRIVILEGED = pytest.mark.skipif(
    os.path.exists("/proc/pressure") and not os.stat("/proc/pressure/io").st_mode & 0o002,
    reason="this kernel has no unprivileged triggers (6.4)",
)


def exporter_of(trigger: str, cgroups: str) -> lab.Exporter:
    return lab.Exporter(
        *COLLECTORS,
        f"--pressure.trigger={trigger}",
        f"--pressure.trigger.cgroups={cgroups}",
        prefix=WITHOUT_SYS_RESOURCE,  # as some hosts of these tests are themselves
    )


def events(exporter: lab.Exporter, cgroup: lab.Cgroup) -> dict[tuple[tuple[str, str], ...], float]:
    return exporter.scrape().select("pressure_events_total", cgroup=cgroup.label)


def armed(exporter: lab.Exporter) -> float:
    return exporter.scrape().sum("pressure_triggers", state="armed")


def test_waiting_for_a_cpu(cgroup: lab.Cgroup) -> None:
    """As many events as another trigger on the same file has: one every two seconds."""
    labels = (
        ("cgroup", cgroup.label),
        ("kind", "some"),
        ("resource", "cpu"),
        ("threshold", "100ms/2s"),
    )
    file = cgroup.directory / "cpu.pressure"
    with exporter_of("cpu some 100ms/2s", cgroup.label) as exporter:
        with witness(file, "some 100000 2000000", WITHOUT_SYS_RESOURCE) as w:
            assert events(exporter, cgroup) == {labels: 0}
            lab.run_in([cgroup], CONTENTION, 7)
            time.sleep(2.5)  # until the kernel has looked for the last time
        # What both were told the exporter may take in a little later.
        wait_for(lambda: events(exporter, cgroup) == {labels: w.events}, what="all events")
        assert events(exporter, cgroup) == {labels: w.events}
    assert w.events >= 2


@UNPRIVILEGED
def test_an_event_of_what_was_before_is_false(cgroup: lab.Cgroup) -> None:
    """The kernel takes for growth what had been waited for before an unprivileged trigger."""
    lab.run_in([cgroup], CONTENTION, 4)
    file = cgroup.directory / "cpu.pressure"
    assert totals(file)["some"] > 1_900_000
    with (
        exporter_of("cpu some 1900ms/2s", cgroup.label) as exporter,
        witness(file, "some 1900000 2000000", WITHOUT_SYS_RESOURCE) as w,
    ):
        before = totals(file)["some"]
        for _ in range(3):
            lab.run_in([cgroup], CONTENTION, 0.2)
            time.sleep(1)
        assert totals(file)["some"] - before < 1_900_000, "it was true"
        assert set(events(exporter, cgroup).values()) == {0}
    assert w.events > 0, "the kernel does so no longer: the check may go"


def test_cgroups_come_and_go(cgroup: lab.Cgroup) -> None:
    """Between scrapes, with triggers that the kernel ends at rmdir."""
    child = lab.Cgroup(cgroup.directory / "child", f"{cgroup.label}/child")
    with exporter_of("cpu some 100ms/2s", f"{cgroup.label}/.*") as exporter:
        assert armed(exporter) == 1
        counts = []
        for _ in range(2):
            child.directory.mkdir()
            # Without a scrape, so that nothing else opens it.
            wait_for(lambda: "cpu.pressure" in kept(exporter, "child"), what="a trigger")
            wait_for(lambda: armed(exporter) == 2)
            lab.run_in([child], CONTENTION, 4.5)
            wait_for(lambda: lab.removed(child.directory))
            wait_for(lambda: armed(exporter) == 1)
            counts.append(sum(events(exporter, child).values()))
            assert sum(events(exporter, child).values()) == counts[-1]
        assert 1 <= counts[0] < counts[1]
        # One that the kernel ended counts as refused until the cgroup is known to be gone.
        wait_for(lambda: exporter.scrape().sum("pressure_triggers", state="refused") == 0)
        assert exporter.stop() == 0
    assert not [line for line in exporter.log if "level=ERROR" in line or "Traceback" in line]


@UNPRIVILEGED
def test_windows_without_privilege(cgroup: lab.Cgroup) -> None:
    """Multiples of two seconds; another is refused, once in the log, and leaves the others."""
    with lab.Exporter(
        *COLLECTORS,
        "--pressure.trigger=cpu some 100ms/1s",
        "--pressure.trigger=io some 100ms/4s",
        f"--pressure.trigger.cgroups={cgroup.label}",
        prefix=WITHOUT_SYS_RESOURCE,
    ) as exporter:
        scrape = exporter.scrape()
        states = {
            state: scrape.sum("pressure_triggers", state=state) for state in ("armed", "refused")
        }
        features = scrape.select("exporter_feature_available")
    assert states == {"armed": 2, "refused": 2}
    found = {dict(labels)["feature"]: dict(labels)["reason"] for labels in features}
    assert found["pressure_trigger cpu some 100ms/1s"] == "no right"
    assert found["pressure_trigger io some 100ms/4s"] == ""
    (line,) = (line for line in exporter.log if "cpu some 100ms/1s" in line)
    assert "grant CAP_SYS_RESOURCE (" in line
    assert ", or take a window that is a multiple of 2s" in line
