# SPDX-License-Identifier: Apache-2.0
"""The status page of a real exporter, of a writer that is throttled, as Chromium shows it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests import lab
from tests.host.chromium import Chromium, Opened, chromium
from tests.lab import BUFFERED_WRITER, Cgroup, Disk, Scrape

MIB = 1 << 20

ROWS = """[...document.querySelectorAll('table:first-of-type tr')].map(
    row => [...row.cells].map(cell => cell.textContent))"""
TITLES = "[...document.querySelectorAll('.heatmap title')].map(title => title.textContent)"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
INLINE_SCRIPT = """{
    const script = document.createElement('script');
    script.textContent = 'document.title = "changed"';
    document.body.append(script);
    document.title
}"""


@pytest.fixture(name="chromium")
def _chromium(tmp_path: Path) -> Iterator[Chromium]:
    with chromium(tmp_path / "profile") as running:
        yield running


@pytest.fixture
def odd_cgroup() -> Iterator[Cgroup]:
    """One whose name is long and looks like HTML."""
    name = f"wbx-<img src=x>&amp;{'x' * 180}-{os.getpid()}"
    with lab.cgroup(lab.hierarchies().task, name) as made:
        yield made


def test_a_throttled_writer(
    chromium: Chromium, exporter: lab.Exporter, disk: Disk, odd_cgroup: Cgroup, tmp_path: Path
) -> None:
    """Chromium starts first: the page's average is over all the time since the exporter did."""
    with lab.ext4(disk, tmp_path) as mount, lab.strict_limit(disk, 65536):
        lab.run_in([odd_cgroup], BUFFERED_WRITER, mount / "file", 8 * MIB)
        lab.sh("sync", "-f", mount)
    disk.settled()
    opened = chromium.open(f"{exporter.url}/", ROWS, TITLES, OVERFLOW, BACKGROUND)
    scrape = exporter.scrape()
    rows, titles, overflow, background = opened.results
    assert opened.problems == []
    assert overflow <= 0

    (row,) = (row for row in rows if row[0] == odd_cgroup.label)
    slept = scrape.sum("dirty_throttle_seconds_sum", cgroup=odd_cgroup.label, bdi=disk.dev)
    assert slept > 0
    assert row[1:4] == [f"{disk.dev} {disk.name}", f"{slept:,.2f}", ""]
    assert float(row[4]) > 0
    assert row[5] == "0"
    assert shown(titles, disk) == expected(scrape, disk)
    assert sum(expected(scrape, disk)["write"]) > 10

    # As others see it, and with a name that is longer than their window is wide.
    for width, dark in ((320, False), (320, True), (800, False)):
        other = chromium.open(f"{exporter.url}/", OVERFLOW, BACKGROUND, width=width, dark=dark)
        assert other.problems == []
        assert other.results[0] <= 0
        assert (other.results[1] != background) is dark


def shown(titles: list[str], disk: Disk) -> dict[str, list[int]]:
    """The numbers of requests in the cells of a disk's rows, by operation."""
    cells: dict[str, list[int]] = {}
    for title in titles:
        match = re.fullmatch(rf"{disk.name} (\w+), .*: ([0-9,]+) of [0-9,]+ requests .*", title)
        if match:
            cells.setdefault(match[1], []).append(int(match[2].replace(",", "")))
    return cells


def expected(scrape: Scrape, disk: Disk) -> dict[str, list[int]]:
    """The numbers above zero in the buckets of a disk's histograms, by operation."""
    counts: dict[str, list[int]] = {}
    for op in scrape.values("block_io_device_seconds_count", "op", device=disk.name):
        cumulative = scrape.buckets("block_io_device_seconds", device=disk.name, op=op)
        sums = [0, *(int(cumulative[edge]) for edge in sorted(cumulative))]
        counts[op] = [after - before for before, after in pairwise(sums) if after > before]
    return counts


def test_no_script_can_run(exporter: lab.Exporter, chromium: Chromium) -> None:
    """Else a test that finds no violation of the policy would tell nothing."""
    opened = chromium.open(f"{exporter.url}/", INLINE_SCRIPT)
    assert opened.results == ["writeback-exporter"]
    assert violations(opened) == ["security"]


def violations(opened: Opened) -> list[str]:
    return [
        event["params"]["entry"]["source"]
        for event in opened.problems
        if event["method"] == "Log.entryAdded"
    ]
