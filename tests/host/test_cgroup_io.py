# SPDX-License-Identifier: Apache-2.0
"""The io controller's counts against writers of known size and /proc/diskstats."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import lab
from tests.lab import DIRECT_READER, DIRECT_WRITER, Cgroup, Disk, Scrape

V1_FILES = {"bytes": "io_service_bytes", "operations": "io_serviced"}


@pytest.fixture(autouse=True)
def _v1() -> None:
    if lab.hierarchies().io.id == 0:
        pytest.skip("the io controller is v2's here, which the guests' tests prove")


def limit(group: Cgroup, disk: Disk, name: str, rate: int) -> None:
    """A limit beyond what is done here: v1 counts on a disk only once it has had one (6.18)."""
    (group.directory / f"blkio.throttle.{name}_device").write_text(f"{disk.dev} {rate}")


def counts(scrape: Scrape, group: Cgroup, disk: Disk) -> dict[tuple[str, str], int]:
    labels = {"cgroup": group.label, "device": disk.name}
    return {
        (what, op): int(scrape.sum(f"cgroup_io_{what}_total", op=op, **labels))
        for what in V1_FILES
        for op in ("read", "write", "discard")
    }


def own_counts(group: Cgroup, disk: Disk) -> dict[tuple[str, str], int]:
    """From descriptors, at their start again: another way to the same files than the reader's."""
    found = {}
    for what, name in V1_FILES.items():
        descriptor = os.open(group.directory / f"blkio.throttle.{name}", os.O_RDONLY)
        try:
            for _ in range(2):
                text = os.pread(descriptor, 1 << 16, 0).decode()
        finally:
            os.close(descriptor)
        for line in text.splitlines():
            if line.startswith(f"{disk.dev} "):
                _, op, count = line.split()
                found[what, op.lower()] = int(count)
    return {(w, op): found[w, op] for w in V1_FILES for op in ("read", "write", "discard")}


def test_counts_equal_the_writers_and_the_disks(
    exporter: lab.Exporter, disk: Disk, io_cgroup: Cgroup
) -> None:
    limit(io_cgroup, disk, "write_bps", 1 << 40)
    before = disk.settled()
    sizes = {512: 33, 4096: 500, 65536: 100}
    for size, count in sizes.items():
        lab.run_in([io_cgroup], DIRECT_WRITER, disk.path, size, count, 0)
    lab.run_in([io_cgroup], DIRECT_READER, disk.path, 16384, 70, 0)
    lab.run_in([io_cgroup], "lab = os.open(arguments[0], os.O_WRONLY); os.fsync(lab)", disk.path)
    lab.sh("blkdiscard", "-f", "-o", "1M", "-l", "4M", disk.path)  # from another cgroup
    truth = disk.settled() - before
    ours = counts(exporter.scrape(), io_cgroup, disk)
    assert ours == own_counts(io_cgroup, disk)
    assert ours["bytes", "write"] == sum(s * n for s, n in sizes.items()) == truth.written_bytes
    assert ours["bytes", "read"] == 70 * 16384 == truth.read_bytes
    assert ours["operations", "read"] == 70 == truth.reads
    # The fsync is one of no bytes, as it is for diskstats.
    assert ours["operations", "write"] == sum(sizes.values()) + 1 == truth.writes
    assert ours["bytes", "discard"] == 0


def test_a_parents_counts_stay_when_a_child_goes(
    exporter: lab.Exporter, disk: Disk, io_cgroup: Cgroup
) -> None:
    child = Cgroup(io_cgroup.directory / "child", f"{io_cgroup.label}/child")
    child.directory.mkdir()
    try:
        limit(io_cgroup, disk, "write_bps", 1 << 40)
        lab.run_in([io_cgroup], DIRECT_WRITER, disk.path, 4096, 5, 0)
        lab.run_in([child], DIRECT_WRITER, disk.path, 4096, 11, 0)
        scrape = exporter.scrape()
        assert counts(scrape, child, disk)["operations", "write"] == 11
        assert counts(scrape, io_cgroup, disk)["operations", "write"] == 5
    finally:
        child.directory.rmdir()
    scrape = exporter.scrape()
    assert counts(scrape, io_cgroup, disk)["operations", "write"] == 5
    assert not scrape.select("cgroup_io_bytes_total", cgroup=child.label)


def test_limits_are_shown_as_they_are_set(
    exporter: lab.Exporter, disk: Disk, io_cgroup: Cgroup
) -> None:
    rates = {"read_bps": 1 << 31, "write_bps": 3 << 20, "read_iops": 1234, "write_iops": 567}
    for name, rate in rates.items():
        limit(io_cgroup, disk, name, rate)

    def shown(what: str) -> dict[str, float]:
        series = exporter.scrape().select(f"cgroup_io_max_{what}", cgroup=io_cgroup.label)
        assert {dict(labels)["device"] for labels in series} <= {disk.name}
        return {dict(labels)["op"]: value for labels, value in series.items()}

    assert shown("bytes") == {"read": 1 << 31, "write": 3 << 20}
    assert shown("operations") == {"read": 1234, "write": 567}
    limit(io_cgroup, disk, "write_bps", 0)
    limit(io_cgroup, disk, "read_bps", 0)
    assert shown("bytes") == {}
    assert shown("operations") == {"read": 1234, "write": 567}


def test_a_disk_that_goes(exporter: lab.Exporter, io_cgroup: Cgroup, tmp_path: Path) -> None:
    with lab.loop_disk(tmp_path) as disk:
        limit(io_cgroup, disk, "write_bps", 1 << 40)
        lab.run_in([io_cgroup], DIRECT_WRITER, disk.path, 4096, 5, 0)
        assert counts(exporter.scrape(), io_cgroup, disk)["operations", "write"] == 5
    success = exporter.scrape().select("exporter_collector_success", collector="cgroup_io")
    assert list(success.values()) == [1.0]
