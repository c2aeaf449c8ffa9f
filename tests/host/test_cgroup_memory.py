# SPDX-License-Identifier: Apache-2.0
"""The memory controller's files against writers, limits and kills of our own."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import lab
from tests.lab import BUFFERED_WRITER, Cgroup, Disk, Scrape
from tests.waiting import PATIENCE_SECONDS, wait_for

MIB = 1 << 20

ALLOCATE = """
import mmap
buffer = mmap.mmap(-1, int(arguments[0]))
for offset in range(0, len(buffer), 4096):
    buffer[offset] = 1
"""


@pytest.fixture
def memory_cgroup() -> Iterator[Cgroup]:
    """A cgroup of the v1 memory hierarchy."""
    hierarchy = lab.hierarchies().memory
    if hierarchy is None or hierarchy.id == 0:
        pytest.skip("the memory controller is not v1's here; the guests' tests prove v2's")
    with lab.cgroup(hierarchy, f"wbx-memory-{os.getpid()}") as made:
        yield made


@contextmanager
def kept(group: Cgroup, name: str) -> Iterator[int]:
    """A descriptor of a file from before anything happened: another way to it than the reader's."""
    descriptor = os.open(group.directory / f"memory.{name}", os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def number(descriptor: int, key: str = "") -> int:
    text = os.pread(descriptor, 1 << 16, 0).decode()
    match = re.search(rf"^{key} ?(\d+)$", text, re.MULTILINE)
    assert match, text
    return int(match[1])


def test_dirty_memory(
    exporter: lab.Exporter, disk: Disk, memory_cgroup: Cgroup, tmp_path: Path
) -> None:
    """A writer's pages are dirty until somebody has them written; anybody may on this host."""
    with lab.ext4(disk, tmp_path) as mount, kept(memory_cgroup, "stat") as stat:

        def all_dirty() -> tuple[Scrape, int] | None:
            lab.run_in([memory_cgroup], BUFFERED_WRITER, mount / "file", 8 * MIB)
            before = number(stat, "total_dirty")
            scrape = exporter.scrape()
            return (scrape, before) if number(stat, "total_dirty") == before >= 8 * MIB else None

        scrape, truth = wait_for(all_dirty, what="a scrape while nothing is written back")
        dirty = scrape.select("cgroup_dirty_bytes", cgroup=memory_cgroup.label)
        assert list(dirty.values()) == [truth]
        assert truth < 9 * MIB
        lab.sh("sync", "-f", mount)
        scrape = exporter.scrape()
        assert scrape.sum("cgroup_dirty_bytes", cgroup=memory_cgroup.label) < MIB
        usage = scrape.sum("cgroup_memory_bytes", cgroup=memory_cgroup.label)
        assert usage >= 8 * MIB  # they are page cache still


def test_limits_and_what_comes_of_them(exporter: lab.Exporter, memory_cgroup: Cgroup) -> None:
    labels = {"cgroup": memory_cgroup.label}
    # Of what failed by the limit of memory and swap, 6.18 has lost count: so it is a larger one.
    for name, size in (("limit", 32 * MIB), ("memsw.limit", 40 * MIB), ("soft_limit", 16 * MIB)):
        (memory_cgroup.directory / f"memory.{name}_in_bytes").write_text(str(size))
    limits = exporter.scrape().select("cgroup_memory_limit_bytes", **labels)
    assert {dict(series)["limit"]: value for series, value in limits.items()} == {
        "max": 32 * MIB,
        "soft": 16 * MIB,
    }
    with (
        kept(memory_cgroup, "failcnt") as failcnt,
        kept(memory_cgroup, "memsw.failcnt") as memsw_failcnt,
        kept(memory_cgroup, "oom_control") as control,
    ):
        process = lab.spawn_in([memory_cgroup], ALLOCATE, 64 * MIB)
        process.communicate(timeout=PATIENCE_SECONDS)
        assert process.returncode == -signal.SIGKILL
        events = exporter.scrape().select("cgroup_memory_events_total", **labels)
        assert {dict(series)["event"]: value for series, value in events.items()} == {
            "max": number(failcnt) + number(memsw_failcnt),
            "oom_kill": number(control, "oom_kill"),
        }
        assert number(failcnt) > 0
        assert number(control, "oom_kill") == 1
