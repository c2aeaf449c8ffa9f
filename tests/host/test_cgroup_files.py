# SPDX-License-Identifier: Apache-2.0
"""Files of this host's cgroups that are kept open: they hold up nothing, and are no others'."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests import lab
from tests.lab import DIRECT_WRITER, Cgroup, Disk
from tests.waiting import wait_for

READERS = ("pressure", "cgroup_io", "cgroup_memory")


@pytest.fixture(scope="module")
def exporter() -> Iterator[lab.Exporter]:
    with lab.Exporter(*lab.only(*READERS)) as running:
        yield running


def kept(exporter: lab.Exporter, name: str) -> set[str]:
    """Names of the open files in cgroups of that name, of all hierarchies."""
    directory = f"/proc/{exporter.process.pid}/fd"
    targets = set()
    for descriptor in os.listdir(directory):
        with suppress(FileNotFoundError):  # it may have been closed meanwhile
            targets.add(os.readlink(f"{directory}/{descriptor}"))
    return {os.path.basename(target) for target in targets if f"/{name}/" in target}


def test_descriptors_stay_and_go_with_their_cgroup(exporter: lab.Exporter) -> None:
    name = f"wbx-kept-{os.getpid()}"
    for hierarchy in lab.hierarchies().all:
        with lab.cgroup(hierarchy, name):
            exporter.scrape()
            files = kept(exporter, name)
            exporter.scrape()
            assert kept(exporter, name) == files != set()
        exporter.scrape()
        assert kept(exporter, name) == set()


def test_a_removed_cgroup_is_not_held_by_its_open_files(exporter: lab.Exporter) -> None:
    hierarchy = lab.hierarchies().v2
    if hierarchy is None:
        pytest.skip("v1 does not say how many are dying")
    with lab.cgroup(hierarchy, f"wbx-above-{os.getpid()}") as above:
        child = above.directory / "child"
        child.mkdir()
        exporter.scrape()
        assert kept(exporter, "child")
        child.rmdir()

        def dying() -> str:
            return (above.directory / "cgroup.stat").read_text().split("nr_dying_descendants ")[1]

        wait_for(lambda: dying().startswith("0\n"), what="the cgroup's release")
        assert kept(exporter, "child")


def test_another_cgroup_under_the_same_path(exporter: lab.Exporter, disk: Disk) -> None:
    """Each scrape shows the counts of the one that is there, which begin anew."""
    hierarchy = lab.hierarchies().io
    name = f"wbx-again-{os.getpid()}"
    for count in (25, 7, 11):
        with lab.cgroup(hierarchy, name) as group:
            if hierarchy.id != 0:  # v1 counts on a disk only once it has had a limit (6.18)
                limit = group.directory / "blkio.throttle.write_bps_device"
                limit.write_text(f"{disk.dev} {1 << 40}")
            exporter.scrape()
            lab.run_in([group], DIRECT_WRITER, disk.path, 4096, count, 0)
            assert written(exporter, group, disk) == count


def written(exporter: lab.Exporter, group: Cgroup, disk: Disk) -> float:
    labels = {"cgroup": group.label, "device": disk.name, "op": "write"}
    return exporter.scrape().sum("cgroup_io_operations_total", **labels)
