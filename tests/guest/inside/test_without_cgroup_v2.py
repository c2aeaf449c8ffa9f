# SPDX-License-Identifier: Apache-2.0
"""A host with cgroup v1 alone: block IO and throttling are named by two hierarchies, whose ids are
two spaces.

Runs last (conftest.py): the kernel gives the memory controller back to v2 only when the last page
of the last v1 cgroup has gone, so what this mounts stays.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests import lab
from tests.lab import BUFFERED_WRITER, DIRECT_WRITER

from .kernel import dirty_limits
from .test_main_signals import FAST, MIB, SLOW

TOP = Path("/sys/fs/cgroup")


@pytest.fixture
def v1() -> None:
    """Unmounts cgroup v2 and mounts blkio and memory as v1, for good."""
    # What was charged to v2 is uncharged from the root of v1, of which 5.10 and 6.1 may warn:
    # test_guest.py reads the kernel's log with that in mind from this line on.
    Path("/dev/kmsg").write_text("tests: memory controller moves to cgroup v1\n")
    (TOP / "cgroup.subtree_control").write_text("-io -memory")
    lab.sh("umount", TOP)
    lab.sh("mount", "-t", "tmpfs", "cgroup", TOP)
    for controller in ("blkio", "memory"):
        (TOP / controller).mkdir()
        _mount(controller)


def _mount(controller: str) -> None:
    # Busy while cgroups of v2 that are gone still have pages.
    command = ["mount", "-t", "cgroup", "-o", controller, controller, str(TOP / controller)]
    for _ in range(100):
        Path("/proc/sys/vm/drop_caches").write_text("3")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        if tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 12):
            pytest.skip(f"Debian's kernels have no v1 {controller} controller since 6.12")
        time.sleep(0.1)
    raise AssertionError(done.stderr)


def test_each_signal_by_its_own_hierarchy(v1: None, tmp_path: Path) -> None:
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
        lab.run_in([io, task], BUFFERED_WRITER, mount / "file", 6 * MIB)
        lab.sh("sync", "-f", mount)
        scrape = exporter.scrape()
        io_counts = {
            name: (io.directory / f"blkio.throttle.{name}").read_text()
            for name in ("io_serviced", "io_service_bytes")
        }
    assert scrape.values("dirty_throttle_seconds_count", "cgroup", bdi=SLOW.dev) == {"/by-memory"}
    assert scrape.sum("dirty_throttle_seconds_count", bdi=SLOW.dev) > 10
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
    assert scrape.sum("block_io_size_bytes_sum", cgroup="/", **written) >= 6 * MIB
    assert scrape.sum("page_dirtied_bytes_total", cgroup="/by-memory") == 6 * MIB
    assert scrape.values("page_written_bytes_total", "cgroup") == {"/"}
    features = scrape.select("exporter_feature_available", feature="writeback_attribution")
    assert [(dict(labels)["reason"], value) for labels, value in features.items()] == [
        ("cgroup v1", 0.0)
    ]
