# SPDX-License-Identifier: Apache-2.0
"""Page cache dirtied and written, for a writer of known size; the guests' tests compare sums."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import lab
from tests.lab import BUFFERED_WRITER, Cgroup, Disk, exporter_in_process
from writeback_exporter.names.cgroups import OTHER

MIB = 1 << 20


@pytest.mark.parametrize("full", [(), ("page_dirtied", "page_written")])
def test_a_writer(
    small: dict[str, int],
    plugged: Disk,
    task_cgroup: Cgroup,
    tmp_path: Path,
    full: tuple[str, ...],
) -> None:
    small |= dict.fromkeys(full, 1)
    with lab.ext4(plugged, tmp_path) as mount, exporter_in_process("page_flow") as exporter:
        lab.run_in([task_cgroup], BUFFERED_WRITER, mount / "file", 4 * MIB)
        lab.sh("sync", "-f", mount)
        scrape = lab.scrape(exporter)
    if full:
        for name in ("page_dirtied_bytes_total", "page_written_bytes_total"):
            assert scrape.values(name, "cgroup") == {OTHER}
            assert scrape.sum(name) >= 4 * MIB
        for name in full:
            assert scrape.sum("exporter_map_dropped_total", map=f"page_flow/{name}") > 0
    else:
        dirtied = scrape.sum("page_dirtied_bytes_total", cgroup=task_cgroup.label)
        assert dirtied == 4 * MIB
        # Of whom depends on the hierarchies here; cgroup v1 has all inodes in the root.
        assert scrape.sum("page_written_bytes_total") >= 4 * MIB
        assert not any(scrape.select("exporter_map_dropped_total").values())
