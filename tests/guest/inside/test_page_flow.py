# SPDX-License-Identifier: Apache-2.0
"""Page cache dirtied and written, against a writer of known size and the kernel's own counts."""

from __future__ import annotations

import mmap
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import lab
from tests.lab import Disk, Scrape, exporter_in_process
from writeback_exporter.features import Refused
from writeback_exporter.kernel import loader
from writeback_exporter.kernel.layout import ObjectFile
from writeback_exporter.kernel.libbpf import Object
from writeback_exporter.kernel.loader import load

from .kernel import NEVER, dirty_limits, ftrace, vmstat

MIB = 1 << 20
FAST = Disk("/dev/vdb")
WRITER = """
path, size, call = arguments[0], int(arguments[1]), arguments[2]
fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
for i in range(size >> 16):
    os.write(fd, b"x" * 65536)
if call == "fsync":
    os.fsync(fd)
"""


def by_cgroup(scrape: Scrape, what: str) -> dict[str, int]:
    return {
        dict(series)["cgroup"]: int(value)
        for series, value in scrape.select(f"page_{what}_bytes_total").items()
    }


@pytest.mark.parametrize("way", ["all", "flushers"])
def test_two_writers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    def without_fentry(file: ObjectFile, programs: Sequence[str], *rest: Any) -> Object:
        if programs[0] != "written_inode":
            raise Refused("not permitted", "for this test", "do without")
        return load(file, programs, *rest)

    if way == "flushers":
        monkeypatch.setattr(loader, "load", without_fentry)
    hierarchy = lab.hierarchies().task
    with (
        lab.ext4(FAST, tmp_path) as mount,
        dirty_limits(400 * MIB, 500 * MIB, interval=NEVER),
        lab.cgroup(hierarchy, "syncs") as syncs,
        lab.cgroup(hierarchy, "leaves") as leaves,
    ):
        lab.sh("sync")
        with exporter_in_process("page_flow") as exporter:
            before = vmstat("nr_dirtied"), vmstat("nr_written")
            with ftrace("writeback/writeback_single_inode") as trace:
                lab.run_in([syncs], WRITER, mount / "one", 5 * MIB, "fsync")
                lab.run_in([leaves], WRITER, mount / "two", 3 * MIB, "")
                lab.sh("sync", "-f", mount)
            after = vmstat("nr_dirtied"), vmstat("nr_written")
            by_flushers = Counter[int]()
            for pages, owner in re.findall(r" wrote=(\d+) cgroup_ino=(\d+)", trace.read_text()):
                by_flushers[int(owner)] += int(pages) * mmap.PAGESIZE
            scrape = lab.scrape(exporter)
            owners = {syncs.id: "/syncs", leaves.id: "/leaves", 1: "/"}

    dirtied, written = by_cgroup(scrape, "dirtied"), by_cgroup(scrape, "written")
    kernel = [(b - a) * mmap.PAGESIZE for a, b in zip(before, after, strict=True)]
    assert dirtied["/syncs"] == 5 * MIB
    assert dirtied["/leaves"] == 3 * MIB
    assert sum(dirtied.values()) == kernel[0]
    assert written["/leaves"] == 3 * MIB
    if way == "all":
        assert written["/syncs"] == 5 * MIB
        assert sum(written.values()) == kernel[1]
    else:
        # Most of it fsync wrote, which no tracepoint shows.
        assert written == {owners[owner]: size for owner, size in by_flushers.items() if size}
        assert written.get("/syncs", 0) < 5 * MIB
    assert not any(scrape.select("exporter_map_dropped_total").values())
