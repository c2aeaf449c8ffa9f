# SPDX-License-Identifier: Apache-2.0
"""Sync calls on a kernel that refuses fentry: only when asked for, by tracepoints, and exact."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import lab
from tests.calls import COUNTS, ERRORS, HANGING, SYNC_CALLS, stuck_disk
from tests.lab import Cgroup
from tests.waiting import wait_for

FENTRY = "this kernel allows fentry: the guests' tests prove that way"


@pytest.fixture
def traced() -> Iterator[lab.Exporter]:
    """An exporter that may use tracepoints, with a tracefs of its own."""
    mount = "mount -t tracefs tracefs /sys/kernel/tracing"
    with lab.Exporter("--sync.tracepoints", prefix=lab.with_mounts(mount)) as exporter:
        yield exporter


def test_refused_by_default(exporter: lab.Exporter) -> None:
    scrape = exporter.scrape()
    if scrape.select("exporter_feature_available", feature="sync_fentry"):
        pytest.skip(FENTRY)
    features = scrape.select("exporter_feature_available", feature="sync")
    assert [(dict(labels)["reason"], value) for labels, value in features.items()] == [
        ("not permitted", 0.0)
    ]
    assert not [name for name in scrape.samples if name.startswith("writeback_sync_")]
    assert re.search(r"sync is not available: .*--sync\.tracepoints", "".join(exporter.log))


def test_no_tracefs() -> None:
    hide = [
        f"{{ ! test -d {path} || mount -t tmpfs none {path}; }}"
        for path in ("/sys/kernel/debug", "/sys/kernel/tracing")
    ]
    report = lab.doctor("--sync.tracepoints", prefix=lab.with_mounts(*hide))
    if report.reasons.get("sync_fentry") == "":
        pytest.skip(FENTRY)
    assert report.reasons["sync"] == "no tracefs"
    assert "mount -t tracefs tracefs /sys/kernel/tracing" in report.text


def test_calls_are_counted_exactly_by_tracepoints(
    traced: lab.Exporter, task_cgroup: Cgroup, tmp_path: Path
) -> None:
    scrape = traced.scrape()
    available = {
        feature: scrape.sum("exporter_feature_available", feature=feature)
        for feature in ("sync", "sync_fentry")
    }
    if available["sync_fentry"]:
        pytest.skip(FENTRY)
    assert available["sync"]
    took = lab.run_in([task_cgroup], SYNC_CALLS, tmp_path / "file")
    seconds = dict(line.split() for line in took.splitlines())
    scrape = traced.scrape()
    for call, count in COUNTS.items():
        labels = {"cgroup": task_cgroup.label, "call": call}
        assert scrape.sum("sync_seconds_count", **labels) == count, call
        assert scrape.sum("sync_errors_total", **labels) == ERRORS[call], call
        assert scrape.sum("sync_open_seconds", **labels) == 0
        assert len(scrape.select("sync_open_seconds", **labels)) == 1
        # What the program measured around the calls has all of them in it.
        assert 0 < scrape.sum("sync_seconds_sum", **labels) <= float(seconds[call])
    assert scrape.values("sync_seconds_count", "call", cgroup=task_cgroup.label) == {*COUNTS}


def test_an_open_call_and_its_end(
    traced: lab.Exporter, task_cgroup: Cgroup, tmp_path: Path
) -> None:
    if traced.scrape().sum("exporter_feature_available", feature="sync_fentry"):
        pytest.skip(FENTRY)
    labels = {"cgroup": task_cgroup.label, "call": "fsync"}
    with lab.loop_disk(tmp_path) as disk, stuck_disk(disk, tmp_path) as (stuck, release):
        process = lab.spawn_in([task_cgroup], HANGING, stuck.path, tmp_path / "go")
        assert process.stdout is not None
        assert process.stdout.readline() == "calls\n"

        def while_open() -> lab.Scrape | None:
            scrape = traced.scrape()
            return scrape if scrape.sum("sync_open_seconds", **labels) > 0 else None

        first, between = wait_for(while_open, what="the call"), time.monotonic()
        time.sleep(2.2)  # and then it is looked at whether it really is
        waited = time.monotonic() - between
        second = traced.scrape()
        grown = second.sum("sync_open_seconds", **labels) - first.sum("sync_open_seconds", **labels)
        assert grown >= waited
        assert not second.select("sync_seconds_count", **labels)
        release()
        assert process.stdout.readline() == "returned\n"
        scrape = traced.scrape()
        assert scrape.sum("sync_open_seconds", **labels) == 0
        assert scrape.sum("sync_seconds_count", **labels) == 1
        assert scrape.sum("sync_seconds_sum", **labels) > 2.2
