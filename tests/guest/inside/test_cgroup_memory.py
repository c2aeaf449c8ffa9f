# SPDX-License-Identifier: Apache-2.0
"""The v2 memory controller's files against writers of known size, limits and kills."""

from __future__ import annotations

import os
import platform
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import lab
from tests.lab import BUFFERED_WRITER, Cgroup, Scrape
from tests.waiting import PATIENCE_SECONDS, wait_for

from .kernel import NEVER, vm
from .test_main_signals import FAST, MIB, io_stat


@pytest.fixture(scope="module")
def exporter() -> Iterator[lab.Exporter]:
    """One for all: it takes seconds to start here."""
    with lab.Exporter(*lab.only("cgroup_memory")) as running:
        yield running


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[Cgroup]:
    """Each test's own."""
    with lab.cgroup(lab.hierarchies().io, request.node.name) as made:
        yield made


# What CPUs keep of a count until there is more to add; since 5.13 it is summed by and by.
HELD_BACK = (os.cpu_count() or 1) * 32 * os.sysconf("SC_PAGESIZE")
if tuple(map(int, re.findall(r"\d+", platform.release())[:2])) >= (5, 13):
    HELD_BACK = 0
NOBODY_WRITES_BACK = {
    "dirty_writeback_centisecs": str(NEVER),  # the flusher does not look for old pages
    "dirty_background_ratio": "80",  # nor does it find too many
    "dirty_ratio": "90",
}


def stat(group: Cgroup, key: str) -> int:
    for line in (group.directory / "memory.stat").read_text().splitlines():
        name, value = line.split()
        if name == key:
            return int(value)
    raise AssertionError(f"no {key}")


def own(scrape: Scrape, metric: str, group: Cgroup) -> float:
    (value,) = scrape.select(metric, cgroup=group.label).values()
    return value


def events(scrape: Scrape, group: Cgroup) -> dict[str, float]:
    return {
        dict(series)["event"]: value
        for series, value in scrape.select("cgroup_memory_events_total", cgroup=group.label).items()
    }


def events_file(group: Cgroup) -> dict[str, float]:
    lines = (group.directory / "memory.events").read_text().splitlines()
    return {name: float(count) for name, count in map(str.split, lines)}


def test_dirty_memory(exporter: lab.Exporter, group: Cgroup, tmp_path: Path) -> None:
    with lab.ext4(FAST, tmp_path) as mount, vm(**NOBODY_WRITES_BACK):
        lab.run_in([group], BUFFERED_WRITER, mount / "file", 8 * MIB)
        scrape, files = settled(
            exporter,
            group,
            lambda files: (
                files.dirty + files.written >= 8 * MIB - HELD_BACK and files.writeback <= HELD_BACK
            ),
        )
        assert own(scrape, "cgroup_dirty_bytes", group) == files.dirty
        assert files.dirty > 4 * MIB
        assert files.dirty + files.written < 9 * MIB  # with some blocks of the file system's
        assert own(scrape, "cgroup_writeback_bytes", group) == files.writeback
        assert 8 * MIB <= own(scrape, "cgroup_memory_bytes", group) < 64 * MIB
        lab.sh("sync", "-f", mount)
        scrape, files = settled(
            exporter, group, lambda files: max(files.dirty, files.writeback) <= HELD_BACK
        )
        assert own(scrape, "cgroup_dirty_bytes", group) == files.dirty
        assert own(scrape, "cgroup_writeback_bytes", group) == files.writeback


class Files(NamedTuple):
    """What the kernel says of a cgroup, in bytes."""

    dirty: int
    writeback: int
    written: int


def settled(
    exporter: lab.Exporter, group: Cgroup, condition: Callable[[Files], bool]
) -> tuple[Scrape, Files]:
    """A scrape with the files as they were before and after it: the kernel sums what CPUs counted
    every two seconds, and that may be in between."""

    def files() -> Files:
        written = io_stat(group, FAST).get("wbytes", 0)
        return Files(stat(group, "file_dirty"), stat(group, "file_writeback"), written)

    def scraped() -> tuple[Scrape, Files] | None:
        before, scrape = files(), exporter.scrape()
        return (scrape, before) if condition(before) and files() == before else None

    return wait_for(scraped, what="an end of the files' changes")


def test_high_and_max(exporter: lab.Exporter, group: Cgroup, tmp_path: Path) -> None:
    with lab.ext4(FAST, tmp_path) as mount:
        (group.directory / "memory.high").write_text(str(16 * MIB))
        lab.run_in([group], BUFFERED_WRITER, mount / "file", 24 * MIB)
        (group.directory / "memory.max").write_text(str(24 * MIB))
        scrape = exporter.scrape()
        limits = scrape.select("cgroup_memory_limit_bytes", cgroup=group.label)
        assert {dict(series)["limit"]: value for series, value in limits.items()} == {
            "high": 16 * MIB,
            "max": 24 * MIB,
        }
        assert scrape.values("cgroup_memory_limit_bytes", "cgroup") == {group.label}
        assert events(scrape, group) == events_file(group)
        assert events(scrape, group)["high"] > 0
        assert events(scrape, group)["oom_kill"] == 0
        # Its own share of memory is now mostly page cache that could go: anonymous memory cannot.
        (group.directory / "memory.high").write_text("max")
        code = "block = bytearray(b'x') * int(arguments[0])"
        process = lab.spawn_in([group], code, 48 * MIB)
        process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == -signal.SIGKILL
        counts = events(exporter.scrape(), group)
        assert counts == events_file(group)
        assert counts["max"] > 0
        assert counts["oom"] >= 1
        assert counts["oom_kill"] == 1


def test_events_and_dirty_memory_are_the_parents_too(
    exporter: lab.Exporter, group: Cgroup, tmp_path: Path
) -> None:
    (group.directory / "cgroup.subtree_control").write_text("+memory")
    child = Cgroup(group.directory / "child", f"{group.label}/child")
    child.directory.mkdir()
    try:
        (child.directory / "memory.max").write_text(str(8 * MIB))
        process = lab.spawn_in([child], "block = bytearray(b'x') * (16 << 20)")
        process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == -signal.SIGKILL
        scrape = exporter.scrape()
        assert events(scrape, child)["oom_kill"] == events(scrape, group)["oom_kill"] == 1
    finally:
        child.directory.rmdir()
    scrape = exporter.scrape()
    assert events(scrape, group)["oom_kill"] == 1  # it has not gone back
    assert not events(scrape, child)
