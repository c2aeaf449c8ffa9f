# SPDX-License-Identifier: Apache-2.0
"""What stays of cgroups' files: descriptors in some number, and what was in them until somebody
writes there or, without a watch, for a minute."""

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
from writeback_exporter.files import inotify
from writeback_exporter.files.cgroup_files import (
    KEPT_LIMIT,
    OTHERS,
    SELDOM_SECONDS,
    WATCHED_SECONDS,
    CgroupFiles,
    KeptFile,
    Seldom,
)

PATHS = [f"/{number}" for number in range(10)]
QUEUED = Path("/proc/sys/fs/inotify/max_queued_events")


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


def read_all(file: KeptFile, host: Host, *but: str) -> dict[str, bytes | None]:
    """Of all cgroups but these."""
    return {
        label: file.read(cgroup, directory)
        for cgroup, label, directory in host.cgroups.listed(file.hierarchy)
        if label not in but
    }


def set_soft_limit(files: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))


def test_a_file_is_read_anew_from_its_descriptor(place: Place, host: Host) -> None:
    file = host.files.kept(host.cgroups.hierarchies.io, b"file")
    texts: dict[str, bytes | None] = {path: f"{path}\n".encode() for path in PATHS}
    assert read_all(file, host) == {"/": None, **texts}
    assert kept_open(place) == PATHS
    place.hierarchy("", {"/3": {"file": "longer than before\n"}, "/4": {"file": ""}})
    with no_descriptors():
        found = read_all(file, host, "/")
    assert found == {**texts, "/3": b"longer than before\n", "/4": b""}
    host.files.close()
    assert kept_open(place) == []


@pytest.mark.parametrize("size", [0, 1, 16383, 16384, 16385, 32768, 100_000])
def test_a_file_is_whole(place: Place, host: Host, size: int) -> None:
    text = os.urandom(size)
    (place.top / "cgroup/0/file").write_bytes(text)
    file = host.files.kept(host.cgroups.hierarchies.io, b"file")
    for _ in range(2):
        assert read_all(file, host)["/0"] == text
    directory = place.top / "cgroup/0"
    found = host.files.contents(directory.stat().st_ino, os.fsencode(directory), [b"file"])
    assert found == [text]


def test_files_of_cgroups_that_are_gone_are_closed(place: Place, host: Host) -> None:
    file = host.files.kept(host.cgroups.hierarchies.io, b"file")
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
    files = [host.files.kept(host.cgroups.hierarchies.io, n) for n in (b"file", b"other")]
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
    """It is not taken for absent."""
    other = host.files.kept(host.cgroups.hierarchies.io, b"other")
    with no_descriptors():
        with pytest.raises(Refused, match=r"Too many open files; raise"):
            read_all(other, host, "/")
        with pytest.raises(Refused, match="Too many open files; raise"):
            host.files.contents(os.stat("/").st_ino, b"/", [b"file"])
    assert read_all(other, host)["/9"] == b"2\n"


def test_contents_of_what_is_not_there(place: Place, host: Host) -> None:
    path = place.top / "cgroup/0"
    cgroup, directory = path.stat().st_ino, os.fsencode(path)
    names = [b"file", b"none", b"other"]
    assert host.files.contents(cgroup, directory, names) == [b"/0\n", None, b"2\n"]
    (path / "directory").mkdir()
    for number, where, name in (
        (cgroup, directory + b"/none", b"file"),
        (cgroup + 1, directory, b"file"),  # by now another's path
        (cgroup, directory, b"directory"),  # opens, but cannot be read
    ):
        with pytest.raises(OSError, match=r"\[Errno"):
            host.files.contents(number, where, [name])


def test_a_file_of_another_cgroup_is_not_kept(place: Place, host: Host) -> None:
    """Of two that have changed names, of which no event has told yet (v1)."""
    file = host.files.kept(host.cgroups.hierarchies.io, b"file")
    top = place.top / "cgroup"
    for old, new in (("1", "was 1"), ("2", "1"), ("was 1", "2")):
        (top / old).rename(top / new)
    found = read_all(file, host)
    assert (found["/1"], found["/2"]) == (None, None)
    assert found["/3"] == b"/3\n"
    host.cgroups.walk(1.0)
    host.files.settle(host.cgroups)
    found = read_all(file, host)
    assert (found["/1"], found["/2"]) == (b"/2\n", b"/1\n")


def test_kept_files_are_given_back_where_descriptors_run_out(place: Place, host: Host) -> None:
    file = host.files.kept(host.cgroups.hierarchies.io, b"file")
    other = host.files.kept(host.cgroups.hierarchies.io, b"other")
    read_all(file, host)
    # Directories that were opened first have left gaps among their numbers.
    fillers = [os.open("/dev/null", os.O_RDONLY) for _ in range(2 * len(PATHS))]
    try:
        with no_descriptors():
            assert read_all(other, host)["/9"] == b"2\n"
            assert kept_open(place) == []
            assert read_all(file, host)["/9"] == b"/9\n"
            assert kept_open(place) == []
    finally:
        for descriptor in fillers:
            os.close(descriptor)
    host.files.settle(host.cgroups)
    read_all(file, host)
    assert kept_open(place) == PATHS


# What seldom changes ------------------------------------------------------------------------------


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("step", [1, 16, 21, 60, 610, 3600, 1 << 32])
def test_each_is_read_once_a_minute_and_scrapes_share_them(host: Host, step: int) -> None:
    clock = Clock()
    ids = range(1, 300 * step, step)  # in a directory where nothing can be watched
    seldom = CgroupFiles(clock).seldom(host.cgroups.hierarchies.io, [b"file"])

    def scrape() -> list[int]:
        """Those that were read."""
        reads: list[int] = []
        for cgroup in ids:
            seldom.get(cgroup, b"", lambda cgroup, _: reads.append(cgroup))
        return reads

    for _ in range(4):  # in the first minute
        assert scrape() == list(ids)
        clock.now += SELDOM_SECONDS / 4
    assert scrape() == list(ids)
    seen = scrape()
    assert seen == []
    for _ in range(3):
        seen = []
        for _ in range(4):
            clock.now += SELDOM_SECONDS / 4
            few = scrape()
            assert 45 <= len(few) <= 105  # of 300
            seen += few
        assert sorted(seen) == list(ids)


def text(_: int, directory: bytes) -> str:
    return directory.decode()


def fails(_: int, directory: bytes) -> str:
    raise OSError(directory.decode())


def test_a_sign_that_it_has_changed(host: Host) -> None:
    clock = Clock()
    seldom = CgroupFiles(clock).seldom(host.cgroups.hierarchies.io)
    assert seldom.get(7, b"young", text, 1) == "young"
    clock.now += SELDOM_SECONDS
    assert seldom.get(7, b"first", text, 1) == "first"
    assert seldom.get(7, b"second", text, 1) == "first"
    assert seldom.get(7, b"third", text, 2) == "third"
    assert seldom.get(8, b"another's", text, 2) == "another's"
    assert seldom.get(7, b"fourth", text, None) == "fourth"
    assert seldom.get(7, b"fifth", text, None) == "fourth"
    with pytest.raises(OSError, match="gone"):
        seldom.get(7, b"gone", fails, 3)
    assert seldom.get(7, b"sixth", text, None) == "fourth"


def test_what_is_of_cgroups_that_are_gone_is_forgotten(place: Place, host: Host) -> None:
    hierarchy = host.cgroups.hierarchies.io
    clock = Clock()
    seldom = (files := CgroupFiles(clock)).seldom(hierarchy)
    (five,) = (c for c, label, _ in host.cgroups.listed(hierarchy) if label == "/5")
    seldom.get(five, b"young", text)
    clock.now += SELDOM_SECONDS
    assert seldom.get(five, b"before", text) == "before"
    assert seldom.get(five, b"again", text) == "before"
    remove(place, "", "/5")
    host.cgroups.walk(1.0)
    files.settle(host.cgroups)
    assert seldom.get(five, b"after", text) == "after"


# With watches ------------------------------------------------------------------------------------


@pytest.fixture
def clock(host: Host) -> Clock:
    host.files.close()
    host.files = CgroupFiles(made := Clock())
    return made


@pytest.fixture
def seldom(host: Host, clock: Clock) -> Seldom[str]:
    """What files named file hold."""
    return host.files.seldom(host.cgroups.hierarchies.io, [b"file"])


def scrape(host: Host, seldom: Seldom[str]) -> tuple[dict[str, str], set[str]]:
    """Texts by label, and whose were read again."""
    reads = set()

    def read(_: int, directory: bytes) -> str:
        reads.add(label)
        return Path(os.fsdecode(directory), "file").read_text().strip()

    host.files.settle(host.cgroups)
    texts = {}
    for cgroup, label, directory in host.cgroups.listed(seldom.hierarchy):
        if label != "/":
            texts[label] = seldom.get(cgroup, directory, read)
    return texts, reads


def test_what_is_written_is_read_again_at_once(
    place: Place, host: Host, seldom: Seldom[str]
) -> None:
    texts = {path: path for path in PATHS}
    assert scrape(host, seldom) == (texts, set(PATHS))
    assert scrape(host, seldom) == (texts, set())
    for new in ("one", "two"):
        place.hierarchy("", {"/3": {"file": f"{new}\n", "other": "x"}, "/4": {"other": "y"}})
        texts["/3"] = new
        assert scrape(host, seldom) == (texts, {"/3"})
    assert scrape(host, seldom)[1] == set()
    place.hierarchy("", {"/new": {"file": "a"}})
    host.cgroups.walk(1.0)
    assert scrape(host, seldom)[1] == {"/new"}
    place.hierarchy("", {"/new": {"file": "b"}})
    texts["/new"] = "b"
    assert scrape(host, seldom) == (texts, {"/new"})


def test_what_is_written_while_it_is_read_is_read_again(
    place: Place, host: Host, seldom: Seldom[str]
) -> None:
    ((cgroup, directory),) = (
        (c, d) for c, label, d in host.cgroups.listed(seldom.hierarchy) if label == "/3"
    )

    def read(_: int, directory: bytes) -> str:
        place.hierarchy("", {"/3": {"file": "later"}})
        return "before"

    assert seldom.get(cgroup, directory, read) == "before"
    assert scrape(host, seldom)[0]["/3"] == "later"


def test_what_nobody_writes_is_read_again_all_the_same(
    host: Host, clock: Clock, seldom: Seldom[str]
) -> None:
    """What the kernel changes by itself."""
    scrape(host, seldom)
    seen: list[str] = []
    for _ in range(20):
        clock.now += WATCHED_SECONDS / 20
        seen += scrape(host, seldom)[1]
    assert sorted(seen) == PATHS


def test_where_there_is_room_for_few_watches(
    host: Host, clock: Clock, seldom: Seldom[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All others are read at each scrape of their first minute, and then once a minute."""
    monkeypatch.setattr(inotify, "WATCHES_LIMIT", 4)
    scrape(host, seldom)
    _, others = scrape(host, seldom)
    assert len(others) == len(PATHS) - 4
    clock.now += SELDOM_SECONDS
    scrape(host, seldom)
    seen = [label for _ in range(2) for label in scrape(host, seldom)[1]]
    assert seen == []
    for _ in range(4):
        clock.now += SELDOM_SECONDS / 4
        seen += scrape(host, seldom)[1]
    assert sorted(set(seen) & others) == sorted(others)


def test_where_the_kernel_has_lost_what_it_had_to_tell(
    place: Place, host: Host, clock: Clock, seldom: Seldom[str]
) -> None:
    """All is read again within a minute, not at once: it is a machine that has much to do."""
    scrape(host, seldom)
    files = [place.top / "cgroup/1" / name for name in ("other", "file")]
    for _ in range(int(QUEUED.read_text()) // 2 + 1):
        for file in files:  # two of the same are told once
            os.close(os.open(file, os.O_WRONLY))
    place.hierarchy("", {"/3": {"file": "lost\n"}})
    texts, reads = scrape(host, seldom)
    assert (texts["/3"], reads) == ("/3", {"/1"})
    seen: list[str] = []
    for _ in range(4):
        clock.now += SELDOM_SECONDS / 4
        texts, reads = scrape(host, seldom)
        seen += reads
    assert set(seen) >= set(PATHS) - {"/1"}
    assert texts["/3"] == "lost"


def test_a_file_that_is_of_the_past(place: Place, host: Host, seldom: Seldom[str]) -> None:
    """As of a controller that was switched off and on again: the limits are others too."""
    file = host.files.kept(seldom.hierarchy, b"file")
    read_all(file, host)
    scrape(host, seldom)
    host.files.forget(seldom.hierarchy, os.stat(place.top / "cgroup/5").st_ino)
    assert scrape(host, seldom)[1] == {"/5"}
    assert scrape(host, seldom)[1] == set()


def test_where_there_is_no_instance_for_a_while(
    place: Place, host: Host, clock: Clock, seldom: Seldom[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once there is, each is watched when it is read again."""
    with monkeypatch.context() as patched:
        patched.setattr(inotify._libc, "inotify_init1", lambda _: -1)
        for _ in range(2):
            assert scrape(host, seldom)[1] == set(PATHS)
    assert scrape(host, seldom)[1] == set(PATHS)
    assert scrape(host, seldom)[1] == set()
    place.hierarchy("", {"/3": {"file": "new"}})
    assert scrape(host, seldom)[1] == {"/3"}


def test_of_two_that_have_changed_names_each_has_its_own_watch(
    place: Place, host: Host, seldom: Seldom[str]
) -> None:
    """Of which no event has told yet (v1)."""

    def fails_for_another(cgroup: int, directory: bytes) -> str:
        host.files.contents(cgroup, directory, [])
        return ""

    top = place.top / "cgroup"
    those = [c for c, label, _ in host.cgroups.listed(seldom.hierarchy) if label in ("/1", "/2")]
    for old, new in (("1", "was 1"), ("2", "1"), ("was 1", "2")):
        (top / old).rename(top / new)
    for cgroup, label, directory in list(host.cgroups.listed(seldom.hierarchy)):
        if label in ("/1", "/2"):
            with pytest.raises(OSError, match="another cgroup has this path"):
                seldom.get(cgroup, directory, fails_for_another)
            assert not host.files.watch(seldom.hierarchy, cgroup, directory)
    host.cgroups.walk(1.0)
    assert scrape(host, seldom)[1] == set(PATHS)
    for cgroup in those:
        (label,) = (x for c, x, _ in host.cgroups.listed(seldom.hierarchy) if c == cgroup)
        place.hierarchy("", {label: {"file": f"of {cgroup}"}})
        texts, reads = scrape(host, seldom)
        assert (texts[label], reads) == (f"of {cgroup}", {label})
