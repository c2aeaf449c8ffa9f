# SPDX-License-Identifier: Apache-2.0
"""What stays of cgroups' files: descriptors in some number, and for a minute what was in them."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.cgroupfs import V2, Place, remove
from tests.unit.files import no_descriptors
from writeback_exporter.collector import Host
from writeback_exporter.features import Refused
from writeback_exporter.files.cgroup_files import (
    KEPT_LIMIT,
    OTHERS,
    SELDOM_SECONDS,
    CgroupFiles,
    KeptFile,
    Seldom,
    contents,
)

PATHS = [f"/{number}" for number in range(10)]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    made = Place(tmp_path, V2, {})
    made.hierarchy("", {path: {"file": f"{path}\n", "other": "2\n"} for path in PATHS})
    return made


@pytest.fixture
def host(place: Place) -> Iterator[Host]:
    made = place.host()
    yield made
    made.files.close()


@pytest.fixture
def limits() -> Iterator[None]:
    """Of files, which are as they were when the test ends."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def kept_open(place: Place) -> list[str]:
    """Paths of cgroups with a file that is open, as /proc knows them."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}").removesuffix(" (deleted)")
        except FileNotFoundError:  # that of the listing
            continue
        if target.startswith(f"{place.top}/cgroup/"):
            found.append(os.path.dirname(target.removeprefix(f"{place.top}/cgroup")))
    return sorted(found)


def read_all(file: KeptFile, host: Host) -> dict[str, bytes | None]:
    listed = host.cgroups.listed(file.hierarchy)
    return {label: file.read(cgroup, directory) for cgroup, label, directory in listed}


def set_soft_limit(files: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))


def test_a_file_is_read_anew_from_its_descriptor(place: Place, host: Host) -> None:
    file = KeptFile(host.files, host.cgroups.hierarchies.io, b"/file")
    texts: dict[str, bytes | None] = {path: f"{path}\n".encode() for path in PATHS}
    assert read_all(file, host) == {"/": None, **texts}
    assert kept_open(place) == PATHS
    place.hierarchy("", {"/3": {"file": "longer than before\n"}, "/4": {"file": ""}})
    with no_descriptors():
        found = {label: text for label, text in read_all_kept(file, host).items() if label != "/"}
    assert found == {**texts, "/3": b"longer than before\n", "/4": b""}
    host.files.close()
    assert kept_open(place) == []


def read_all_kept(file: KeptFile, host: Host) -> dict[str, bytes | None]:
    """Of those that are there."""
    return {
        label: file.read(cgroup, directory)
        for cgroup, label, directory in host.cgroups.listed(file.hierarchy)
        if label != "/"
    }


@pytest.mark.parametrize("size", [0, 1, 16383, 16384, 16385, 32768, 100_000])
def test_a_file_is_whole(place: Place, host: Host, size: int) -> None:
    text = os.urandom(size)
    (place.top / "cgroup/0/file").write_bytes(text)
    file = KeptFile(host.files, host.cgroups.hierarchies.io, b"/file")
    for _ in range(2):
        assert read_all(file, host)["/0"] == text
    assert contents(os.fsencode(place.top / "cgroup/0"), [b"/file"]) == [text]


def test_files_of_cgroups_that_are_gone_are_closed(place: Place, host: Host) -> None:
    file = KeptFile(host.files, host.cgroups.hierarchies.io, b"/file")
    read_all(file, host)
    remove(place, "", "/5")
    host.files.settle(host.cgroups)
    assert "/5" in kept_open(place)  # nobody has told
    host.cgroups.walk(1.0)
    host.files.settle(host.cgroups)
    assert kept_open(place) == [path for path in PATHS if path != "/5"]


@pytest.mark.usefixtures("limits")
def test_no_more_are_kept_than_there_is_room_for(place: Place, host: Host) -> None:
    """The others are read all the same, and once there is more room, kept."""
    host.files = CgroupFiles()
    files = [KeptFile(host.files, host.cgroups.hierarchies.io, n) for n in (b"/file", b"/other")]
    for soft, kept in ((OTHERS + 4, 4), (OTHERS + 13, 13), (OTHERS + 2, 2), (OTHERS, 0), (64, 0)):
        set_soft_limit(soft)
        host.files.settle(host.cgroups)
        assert len(kept_open(place)) <= kept
        found = [read_all(file, host) for file in files]
        assert [texts["/7"] for texts in found] == [b"/7\n", b"2\n"]
        assert len(kept_open(place)) == kept
    host.files.close()
    assert kept_open(place) == []


@pytest.mark.usefixtures("limits")
def test_room_where_there_is_no_limit_or_one_beyond_reason() -> None:
    set_soft_limit(2 * KEPT_LIMIT)
    assert CgroupFiles().room == KEPT_LIMIT
    set_soft_limit(64)
    assert CgroupFiles().room == 0


def test_where_no_file_can_be_opened(host: Host) -> None:
    """It is not taken for absent; those that are open go on."""
    file = KeptFile(host.files, host.cgroups.hierarchies.io, b"/file")
    other = KeptFile(host.files, host.cgroups.hierarchies.io, b"/other")
    read_all(file, host)
    with no_descriptors():
        assert len(read_all_kept(file, host)) == len(PATHS)
        with pytest.raises(Refused, match=r"other: Too many open files; raise"):
            read_all_kept(other, host)
        with pytest.raises(Refused, match="Too many open files; raise"):
            contents(b"/", [b"/file"])
    assert read_all(other, host)["/9"] == b"2\n"


def test_contents_of_what_is_not_there(place: Place) -> None:
    directory = os.fsencode(place.top / "cgroup/0")
    assert contents(directory, [b"/file", b"/none", b"/other"]) == [b"/0\n", None, b"2\n"]
    assert contents(directory + b"/none", [b"/file", b"/other"]) == [None, None]
    (place.top / "cgroup/0/directory").mkdir()
    assert contents(directory, [b"/directory"]) == [None]  # opens, but cannot be read


# What seldom changes ------------------------------------------------------------------------------


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("step", [1, 16, 21, 60, 610, 3600, 1 << 32])
def test_each_is_read_once_a_minute_and_scrapes_share_them(host: Host, step: int) -> None:
    clock = Clock()
    ids = range(1, 300 * step, step)
    seldom = Seldom[None](CgroupFiles(clock), host.cgroups.hierarchies.io)

    def scrape() -> list[int]:
        """Those that were read."""
        reads: list[int] = []
        for cgroup in ids:
            seldom.get(cgroup, b"%d" % cgroup, lambda directory: reads.append(int(directory)))
        return reads

    assert scrape() == list(ids)
    assert scrape() == []
    for _ in range(3):
        seen: list[int] = []
        for _ in range(4):
            clock.now += SELDOM_SECONDS / 4
            few = scrape()
            assert 45 <= len(few) <= 105  # of 300
            seen += few
        assert sorted(seen) == list(ids)


def test_a_sign_that_it_has_changed(host: Host) -> None:
    seldom = Seldom[str](CgroupFiles(Clock()), host.cgroups.hierarchies.io)
    assert seldom.get(7, b"first", bytes.decode, 1) == "first"
    assert seldom.get(7, b"second", bytes.decode, 1) == "first"
    assert seldom.get(7, b"third", bytes.decode, 2) == "third"
    assert seldom.get(8, b"another's", bytes.decode, 2) == "another's"
    assert seldom.get(7, b"fourth", bytes.decode, None) == "fourth"


def test_what_is_of_cgroups_that_are_gone_is_forgotten(place: Place, host: Host) -> None:
    hierarchy = host.cgroups.hierarchies.io
    seldom = Seldom[str](host.files, hierarchy)
    (five,) = (c for c, label, _ in host.cgroups.listed(hierarchy) if label == "/5")
    assert seldom.get(five, b"before", bytes.decode) == "before"
    remove(place, "", "/5")
    host.cgroups.walk(1.0)
    host.files.settle(host.cgroups)
    assert seldom.get(five, b"after", bytes.decode) == "after"
