# SPDX-License-Identifier: Apache-2.0
"""Hosts with cgroup v1, alone or beside v2: block IO and throttling are named by two hierarchies,
whose ids are two spaces. In a guest of its own, that has booted so (init.sh)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import lab
from tests.lab import DIRECT_WRITER

from .kernel import dirty_limits, ftrace, pauses, write_until_throttled
from .test_main_signals import FAST, MIB, SLOW

TOP = Path("/sys/fs/cgroup")
HAS_MEMORY = (TOP / "memory").exists()


@pytest.mark.skipif(not HAS_MEMORY, reason="no v1 memory controller in Debian's kernels since 6.12")
def test_each_signal_by_its_own_hierarchy(tmp_path: Path) -> None:
    found = lab.hierarchies()
    assert (found.io.mount, found.task.mount) == (str(TOP / "blkio"), str(TOP / "memory"))
    assert found.io.id != found.task.id != 0
    with (
        lab.ext4(SLOW, tmp_path) as mount,
        lab.Exporter("--collector.page_flow") as exporter,
        lab.cgroup(found.io, "by-io") as io,
        # Ids count up in each: the second one here has the number of another cgroup there.
        lab.cgroup(found.task, "first"),
        lab.cgroup(found.task, "by-memory") as task,
        dirty_limits(MIB, 2 * MIB),
    ):
        lab.run_in([io, task], DIRECT_WRITER, FAST.path, 4096, 10, 0)
        size = write_until_throttled(
            [io, task],
            mount / "file",
            6 * MIB,
            lambda: exporter.scrape().sum("dirty_throttle_seconds_count", bdi=SLOW.dev),
        )
        lab.sh("sync", "-f", mount)
        scrape = exporter.scrape()
        io_counts = {
            name: (io.directory / f"blkio.throttle.{name}").read_text()
            for name in ("io_serviced", "io_service_bytes")
        }
    assert scrape.values("dirty_throttle_seconds_count", "cgroup", bdi=SLOW.dev) == {"/by-memory"}
    writes = {"device": FAST.name, "op": "write"}
    assert scrape.values("block_io_size_bytes_count", "cgroup", **writes) == {"/by-io"}
    assert scrape.sum("block_io_size_bytes_count", **writes) == 10
    # The kernel's own counts are by the same hierarchies; 6.1 counts none before the first limit.
    for name, file in (("operations", "io_serviced"), ("bytes", "io_service_bytes")):
        lines = io_counts[file].splitlines()
        counts = {tuple(words[:2]): int(words[2]) for words in map(str.split, lines[:-1])}
        count = counts[FAST.dev, "Write"]
        assert count in (0, {"operations": 10, "bytes": 10 * 4096}[name])
        assert scrape.sum(f"cgroup_io_{name}_total", cgroup="/by-io", **writes) == count
    assert scrape.values("cgroup_memory_bytes", "cgroup") == {"/", "/first", "/by-memory"}
    # Written back, its file is page cache still; without use_hierarchy, as 5.10 begins, too.
    assert scrape.sum("cgroup_memory_bytes", cgroup="/by-memory") >= 6 * MIB
    assert scrape.sum("cgroup_dirty_bytes", cgroup="/by-memory") < MIB
    # v1 charges buffered writeback to the root, and doctor says so.
    written = {"device": SLOW.name, "op": "write"}
    assert scrape.sum("block_io_size_bytes_sum", cgroup="/", **written) >= size
    assert scrape.sum("page_dirtied_bytes_total", cgroup="/by-memory") == size
    assert scrape.values("page_written_bytes_total", "cgroup") == {"/"}
    features = scrape.select("exporter_feature_available", feature="writeback_attribution")
    assert [(dict(labels)["reason"], value) for labels, value in features.items()] == [
        ("cgroup v1", 0.0)
    ]


@contextmanager
def unified() -> Iterator[None]:
    """v2 beside v1, where systemd had it; with the memory controller if v1 has it not."""
    mount = TOP / "unified"
    mount.mkdir()
    lab.sh("mount", "-t", "cgroup2", "cgroup2", mount)
    try:
        if not HAS_MEMORY:
            (mount / "cgroup.subtree_control").write_text("+memory")
        yield
    finally:
        lab.sh("umount", mount)
        mount.rmdir()


def test_v2_beside_v1(tmp_path: Path) -> None:
    """Throttling is named by v2, block IO by v1, which charges buffered writeback to its root."""
    with (
        unified(),
        lab.ext4(SLOW, tmp_path) as mount,
        lab.Exporter(*lab.only("block_io", "dirty_throttle")) as exporter,
        lab.cgroup(lab.hierarchies().io, "by-io") as io,
        lab.cgroup(lab.hierarchies().task, "by-task") as task,
        dirty_limits(MIB, 2 * MIB),
    ):
        found = lab.hierarchies()
        assert (found.io.mount, found.task.mount) == (str(TOP / "blkio"), str(TOP / "unified"))
        before = FAST.settled()
        lab.run_in([io, task], DIRECT_WRITER, FAST.path, 4096, 10, 0)
        lab.run_in([], DIRECT_WRITER, FAST.path, 8192, 5, 0)
        truth = FAST.settled() - before
        with ftrace("writeback/balance_dirty_pages") as trace:
            size = write_until_throttled([io, task], mount / "file", 6 * MIB, lambda: pauses(trace))
        lab.sh("sync", "-f", mount)
        scrape = exporter.scrape()
        paused = pauses(trace)
    throttled = scrape.select("dirty_throttle_seconds_count", bdi=SLOW.dev)
    assert [(dict(series)["cgroup"], n) for series, n in throttled.items()] == [
        ("/by-task", paused)
    ]
    direct = {
        dict(series)["cgroup"]: count
        for series, count in scrape.select(
            "block_io_size_bytes_count", device=FAST.name, op="write"
        ).items()
    }
    assert direct == {"/by-io": 10, "/": 5}
    assert sum(direct.values()) == truth.writes
    written = {"device": SLOW.name, "op": "write"}
    assert scrape.values("block_io_size_bytes_sum", "cgroup", **written) == {"/"}
    assert scrape.sum("block_io_size_bytes_sum", **written) >= size
    reasons = scrape.values("exporter_feature_available", "reason", feature="writeback_attribution")
    assert reasons == {"cgroup v1"}
