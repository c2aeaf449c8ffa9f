# SPDX-License-Identifier: Apache-2.0
"""Cgroups that live a few milliseconds, come again under their old name, or were there before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests import lab
from tests.host.witness import Witness, unless_hidden
from tests.lab import DIRECT_WRITER, Cgroup, Disk, Scrape

SHORT_LIVES = """
import mmap
root, name, count, path, mode = arguments
buffer = mmap.mmap(-1, 4096)
for i in range(int(count)):
    group = f"{root}/{name}-{i}"
    os.mkdir(group)
    child = os.fork()
    if child == 0:
        with open(group + "/cgroup.procs", "w") as procs:
            procs.write("0")
        if mode == "direct":
            fd = os.open(path, os.O_WRONLY | os.O_DIRECT)
            assert os.pwrite(fd, buffer, i * 4096) == 4096
        else:
            fd = os.open(path + str(i), os.O_WRONLY | os.O_CREAT, 0o600)
            for j in range(8):
                os.write(fd, b"x" * 65536)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    os.rmdir(group)
"""
LIVES = 500


def by_cgroup(scrape: Scrape, name: str, **labels: str) -> dict[str, int]:
    return {
        dict(series)["cgroup"]: int(count)
        for series, count in scrape.select(name, **labels).items()
    }


def test_io_of_short_lives(exporter: lab.Exporter, disk: Disk, witness: Witness) -> None:
    root = lab.hierarchies().io.mount

    def attempt() -> int:
        name = f"wbx-short-{os.getpid()}-{os.urandom(4).hex()}"
        hidden = witness.hidden(disk)
        lab.run_in([], SHORT_LIVES, root, name, LIVES, disk.path, "direct")
        hidden = witness.hidden(disk) - hidden
        counts = by_cgroup(
            exporter.scrape(), "block_io_size_bytes_count", device=disk.name, op="write"
        )
        assert "other" not in counts
        if hidden == 0:
            expected = {f"/{name}-{i}": 1 for i in range(LIVES)}
            assert {c: n for c, n in counts.items() if c.startswith(f"/{name}-")} == expected
        return hidden

    unless_hidden(attempt)


def test_throttling_of_short_lives(
    exporter: lab.Exporter, disk: Disk, witness: Witness, tmp_path: Path
) -> None:
    root, name = lab.hierarchies().task.mount, f"wbx-short-{os.getpid()}"
    with lab.ext4(disk, tmp_path) as mount, lab.strict_limit(disk, 65536):
        lab.run_in([], SHORT_LIVES, root, name, 40, mount / "file", "buffered")
        scrape = exporter.scrape()
        seen = witness.pauses(disk.dev)
    counts = by_cgroup(scrape, "dirty_throttle_seconds_count", bdi=disk.dev)
    assert "other" not in counts
    short = {label: count for label, count in counts.items() if label.startswith(f"/{name}-")}
    # The witness has ids, each of which lived once: their number and pauses are the same.
    assert sorted(counts.values()) == sorted(count for count, _ in seen.values())
    assert len(short) >= 30, "most of 40 writers of 512 KiB behind a limit of 64 KiB are throttled"


def test_a_cgroup_that_was_there_before_the_exporter(tmp_path: Path) -> None:
    with (
        lab.cgroup(lab.hierarchies().io, f"wbx-early-{os.getpid()}") as early,
        lab.Exporter() as exporter,
        lab.loop_disk(tmp_path) as disk,
    ):
        lab.run_in([early], DIRECT_WRITER, disk.path, 4096, 3, 0)
        counts = by_cgroup(exporter.scrape(), "block_io_size_bytes_count", device=disk.name)
        assert counts.keys() == {early.label}


def test_a_service_that_is_started_again(exporter: lab.Exporter, disk: Disk) -> None:
    """Its new cgroup has the old path and another id: one series, that goes on counting."""
    name = f"wbx-again-{os.getpid()}"
    counts = []
    for _ in range(3):
        with lab.cgroup(lab.hierarchies().io, name) as group:
            lab.run_in([group], DIRECT_WRITER, disk.path, 4096, 10, 0)
            scrape = exporter.scrape()
            counts.append(
                scrape.sum("block_io_size_bytes_count", device=disk.name, cgroup=f"/{name}")
            )
    assert counts[0] <= 10
    assert counts[0] < counts[1] < counts[2] <= 30


def test_a_renamed_cgroup(exporter: lab.Exporter, disk: Disk, io_cgroup: Cgroup) -> None:
    hierarchy = lab.hierarchies().io
    if hierarchy.id == 0:
        pytest.skip("cgroup v2 cannot rename")
    with lab.cgroup(hierarchy, f"{io_cgroup.label[1:]}/inner") as inner:
        renamed = inner.directory.with_name("renamed")
        inner.directory.rename(renamed)
        try:
            moved = Cgroup(renamed, f"{io_cgroup.label}/renamed")
            lab.run_in([moved], DIRECT_WRITER, disk.path, 4096, 5, 0)
            counts = by_cgroup(exporter.scrape(), "block_io_size_bytes_count", device=disk.name)
            assert counts.keys() == {moved.label}
        finally:
            renamed.rename(inner.directory)
