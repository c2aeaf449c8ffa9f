# SPDX-License-Identifier: Apache-2.0
"""Waits for pages under writeback against a second hook, the witness' raw tracepoint."""

from __future__ import annotations

from pathlib import Path

from tests import lab
from tests.host.witness import Witness
from tests.lab import Cgroup, Disk, exporter_in_process
from writeback_exporter.names.cgroups import OTHER

MIB = 1 << 20
FSYNC = """
import time
path, size = arguments[0], int(arguments[1])
fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
total = 0.0
for i in range(20):
    os.pwrite(fd, b"x" * size, i * size)
    begin = time.monotonic()
    os.fsync(fd)
    total += time.monotonic() - begin
print(total)
"""


def test_a_task_that_calls_fsync(
    exporter: lab.Exporter, disk: Disk, task_cgroup: Cgroup, witness: Witness, tmp_path: Path
) -> None:
    with lab.ext4(disk, tmp_path) as mount:
        duration = float(lab.run_in([task_cgroup], FSYNC, mount / "file", MIB))
        scrape = exporter.scrape()
        truth = witness.page_waits()[task_cgroup.id]
    # The task has exited: what it did not sleep for is counted, at the latest then.
    assert scrape.sum("page_wait_seconds_count", cgroup=task_cgroup.label) == truth > 0
    assert 0 < scrape.sum("page_wait_seconds_sum", cgroup=task_cgroup.label) <= duration
    for name in ("page_wait", "page_waiters"):
        assert scrape.sum("exporter_map_dropped_total", map=f"page_wait/{name}") == 0


def test_full_page_wait_map_collapses_into_other(
    small: dict[str, int], plugged: Disk, task_cgroup: Cgroup, witness: Witness, tmp_path: Path
) -> None:
    small["page_wait"] = 1
    with lab.ext4(plugged, tmp_path) as mount:
        before = sum(witness.page_waits().values())
        with exporter_in_process("page_wait") as exporter:
            lab.run_in([task_cgroup], FSYNC, mount / "file", MIB)
            scrape, later = lab.scrape(exporter), lab.scrape(exporter)
        waits = sum(witness.page_waits().values()) - before
    counts = scrape.select("page_wait_seconds_count")
    assert {dict(series)["cgroup"] for series in counts} == {OTHER}
    # Others may wait as well, and be just about to.
    assert witness.page_waits()[task_cgroup.id] <= sum(counts.values()) <= waits
    # Which are read later than what is counted, and others go on waiting.
    dropped = scrape.sum("exporter_map_dropped_total", map="page_wait/page_wait")
    assert sum(counts.values()) <= dropped <= later.sum("page_wait_seconds_count")


def test_full_page_waiters_map(
    small: dict[str, int], plugged: Disk, task_cgroup: Cgroup, witness: Witness, tmp_path: Path
) -> None:
    small["page_waiters"] = 0
    with lab.ext4(plugged, tmp_path) as mount, exporter_in_process("page_wait") as exporter:
        lab.run_in([task_cgroup], FSYNC, mount / "file", MIB)
        scrape = lab.scrape(exporter)
        truth = witness.page_waits()[task_cgroup.id]
    assert scrape.sum("exporter_map_dropped_total", map="page_wait/page_waiters") >= truth > 0
    assert scrape.sum("page_wait_seconds_count", cgroup=task_cgroup.label) == 0
