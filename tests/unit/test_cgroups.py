# SPDX-License-Identifier: Apache-2.0
"""Names of cgroups: from trees of every kind, through every order of events."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.unit.files import no_descriptors
from writeback_exporter.kernel.loader import open_file
from writeback_exporter.names import cgroups as module
from writeback_exporter.names.cgroups import (
    DYING_SECONDS,
    OTHER,
    OTHER_ID,
    RETENTION_SECONDS,
    UNATTRIBUTED,
    CgroupfsError,
    Cgroups,
    EventKind,
    Hierarchies,
    Hierarchy,
    find_hierarchies,
    printable,
)
from writeback_exporter.names.rules import EVERY_CGROUP, CgroupRules

V2 = "0::/init.scope\n"
V1 = "12:hugetlb:/\n7:blkio:/a\n4:memory:/b:c\n2:cpu,cpuacct:/\n1:name=systemd:/init.scope\n"
MKDIR, RENAME, RMDIR, RELEASE = EventKind


def procfs(place: Path, text: str | bytes = V2) -> str:
    """A procfs whose /proc/self/cgroup is `text`."""
    directory = place / "proc/self"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "cgroup").write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(place / "proc")


def tree(top: Path, *paths: str, v2: bool = False) -> Path:
    """A mounted hierarchy with these cgroups, and the files by which it is known."""
    for path in ("", *paths):
        directory = top / path
        directory.mkdir(parents=True)
        (directory / "cgroup.procs").touch()
        if v2:
            (directory / "cgroup.controllers").touch()
    return top


def walked(hierarchies: Hierarchies) -> Cgroups:
    cgroups = Cgroups(hierarchies)
    cgroups.walk(0.0)
    return cgroups


def successor(cgroups: Cgroups, now: float, rules: CgroupRules = EVERY_CGROUP) -> Cgroups:
    """Those of another process, which knows of the first one's what it has written down."""
    exited = [
        (*cgroup, *known) for cgroup in cgroups.exited() if (known := cgroups.exit_of(*cgroup))
    ]
    after = Cgroups(cgroups.hierarchies, rules)
    after.walk(now)
    after.recall(exited, cgroups.labelled(), now)
    return after


def names(cgroups: Cgroups, hierarchy: Hierarchy) -> dict[str, str]:
    """The name of each directory of a hierarchy, by its path, through its inode number."""
    top = hierarchy.mount
    return {
        "/" + os.path.relpath(directory, top).removeprefix("."): cgroups.name(
            hierarchy, os.stat(directory).st_ino
        )
        for directory, _, _ in os.walk(top)
    }


def only(hierarchy: Hierarchy) -> Hierarchies:
    return Hierarchies(hierarchy, hierarchy)


# Hierarchies --------------------------------------------------------------------------------------


def test_v2(tmp_path: Path) -> None:
    top = tree(tmp_path / "cgroup", "system.slice/a.service", "user.slice", v2=True)
    found = find_hierarchies(str(top), procfs(tmp_path))
    assert found == only(Hierarchy(0, str(top)))
    assert (found.all, found.memory_v1) == ({Hierarchy(0, str(top))}, False)
    assert names(walked(found), found.io) == {
        path: path for path in ("/", "/system.slice", "/system.slice/a.service", "/user.slice")
    }


def test_hybrid(tmp_path: Path) -> None:
    top = tmp_path / "cgroup"
    for controller in ("memory", "cpu,cpuacct", "systemd", "blkio"):
        tree(top / controller, "a")
    (top / "cpu").symlink_to("cpu,cpuacct")
    tree(top / "unified", "b", v2=True)
    found = find_hierarchies(str(top), procfs(tmp_path, V1 + V2))
    memory = Hierarchy(4, f"{top}/memory")
    v2 = Hierarchy(0, f"{top}/unified")
    assert found == Hierarchies(Hierarchy(7, f"{top}/blkio"), v2, memory)
    assert found.v2 == v2
    assert not found.memory_v1
    cgroups = walked(found)
    assert names(cgroups, found.io) == {"/": "/", "/a": "/a"}
    assert names(cgroups, found.task) == {"/": "/", "/b": "/b"}
    assert names(cgroups, memory) == {"/": "/", "/a": "/a"}
    assert cgroups.counts == (6, 0)


def test_hybrid_whose_io_controller_is_in_v2(tmp_path: Path) -> None:
    top = tmp_path / "cgroup"
    tree(top / "memory")
    tree(top / "unified", v2=True)
    found = find_hierarchies(str(top), procfs(tmp_path, "4:memory:/\n0::/\n"))
    v2 = Hierarchy(0, f"{top}/unified")
    assert found == Hierarchies(v2, v2, Hierarchy(4, f"{top}/memory"))


def test_v1(tmp_path: Path) -> None:
    top = tmp_path / "cgroup"
    for controller in ("blkio", "cpu,cpuacct", "memory", "systemd"):
        tree(top / controller)
    found = find_hierarchies(str(top), procfs(tmp_path, V1))
    memory = Hierarchy(4, f"{top}/memory")
    assert found == Hierarchies(Hierarchy(7, f"{top}/blkio"), memory, memory)
    assert found.memory_v1
    assert found.v2 is None


@pytest.mark.parametrize("links", [False, True])
def test_v1_with_joined_controllers(tmp_path: Path, links: bool) -> None:
    top = tmp_path / "cgroup"
    tree(top / "cpu,blkio,memory", "a/b")
    if links:
        for controller in ("cpu", "blkio", "memory"):
            (top / controller).symlink_to("cpu,blkio,memory")
    found = find_hierarchies(str(top), procfs(tmp_path, "9:cpu,blkio,memory:/\n"))
    assert (found.io.id, found.task.id, found.memory_v1) == (9, 9, True)
    for hierarchy in (found.io, found.task):
        assert os.path.realpath(hierarchy.mount) == f"{top}/cpu,blkio,memory"
        cgroups = walked(found)
        assert names(cgroups, hierarchy) == {"/": "/", "/a": "/a", "/a/b": "/a/b"}
        assert cgroups.counts == (3, 0)


def test_docker_on_v1(tmp_path: Path) -> None:
    container = "docker/" + 64 * "0f"
    top = tmp_path / "cgroup"
    for controller in ("blkio", "memory"):
        tree(top / controller, container)
    found = find_hierarchies(str(top), procfs(tmp_path, V1))
    for hierarchy in (found.io, found.task):
        assert f"/{container}" in names(walked(found), hierarchy).values()


def nothing(top: Path) -> None:
    top.mkdir()


def files(top: Path) -> None:
    top.mkdir()
    for name in ("blkio", "memory", "unified"):
        (top / name).touch()


def directories(top: Path) -> None:
    for name in ("blkio", "memory", "unified"):
        (top / name).mkdir(parents=True)


def blkio_alone(top: Path) -> None:
    tree(top / "blkio")


def memory_alone(top: Path) -> None:
    tree(top / "memory")


def other_controllers(top: Path) -> None:
    for name in ("cpu,cpuacct", "xblkio", "memoryx", "systemd"):
        tree(top / name)


@pytest.mark.parametrize(
    "build", [nothing, files, directories, blkio_alone, memory_alone, other_controllers]
)
def test_no_cgroup_file_system(tmp_path: Path, build: Callable[[Path], None]) -> None:
    top = tmp_path / "cgroup"
    build(top)
    with pytest.raises(CgroupfsError, match=rf"^{top} is no cgroup file .*--path\.cgroupfs$"):
        find_hierarchies(str(top), procfs(tmp_path, V1))


def test_cgroup_path_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, answer in (("file", "Not a directory"), ("missing", "No such file or directory")):
        expected = rf"{tmp_path}/{name}: {answer}; .*--path\.cgroupfs$"
        with pytest.raises(CgroupfsError, match=expected):
            find_hierarchies(str(tmp_path / name), procfs(tmp_path))


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """Without root's right to read everything."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.fixture
def open_path() -> Iterator[Path]:
    """As tmp_path, but not for the user's own eyes alone."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def test_cgroup_path_without_permission(open_path: Path) -> None:
    top = tree(open_path / "cgroup", v2=True)
    proc = procfs(open_path)
    top.chmod(0)
    try:
        with as_nobody(), pytest.raises(CgroupfsError, match=f"{top}: Permission denied; "):
            find_hierarchies(str(top), proc)
    finally:
        top.chmod(0o700)


@pytest.mark.parametrize("name", ["missing", "file"])
def test_procfs_that_is_none(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    top = tree(tmp_path / "cgroup", v2=True)
    with pytest.raises(CgroupfsError, match=rf"{tmp_path}/{name}/self/cgroup: .*--path\.procfs$"):
        find_hierarchies(str(top), str(tmp_path / name))


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=8).filter(lambda path: not set(path) & set(b"\n\0")))
def test_any_path_in_procfs(tmp_path: Path, path: bytes) -> None:
    """The kernel writes the path as it is, and refuses only names with a newline in it."""
    top = tmp_path / "cgroup"
    if not top.exists():
        tree(top / "blkio")
        tree(top / "memory")
    text = b"7:blkio:/" + path + b"\n4:memory:/" + path + b"\n"
    found = find_hierarchies(str(top), procfs(tmp_path, text))
    assert (found.io.id, found.task.id) == (7, 4)


# Walking ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "label"),
    [
        (b"plain.service", "plain.service"),
        ("größe-日本".encode(), "größe-日本"),
        (b'quo"te', 'quo"te'),
        (b"new\nline", "new\nline"),
        (b"back\\slash", "back\\slash"),
        (b"\xff\xfe.scope", "\\xff\\xfe.scope"),
        (b"half\xc3", "half\\xc3"),
        (b"dev-disk-by\\x2dpartuuid.swap", "dev-disk-by\\x2dpartuuid.swap"),
    ],
)
def test_names_of_any_bytes(tmp_path: Path, name: bytes, label: str) -> None:
    top = tree(tmp_path / "cgroup")
    directory = os.fsencode(top) + b"/" + name + b"/inner"
    os.makedirs(directory)
    hierarchy = Hierarchy(0, str(top))
    cgroups = walked(only(hierarchy))
    assert cgroups.name(hierarchy, os.stat(directory).st_ino) == f"/{label}/inner"
    assert printable(b"/" + name) == f"/{label}"
    # An event says the same.
    cgroups.apply(MKDIR, 0, 1, b"/" + name, 0.0)
    assert cgroups.name(hierarchy, 1) == f"/{label}"


@given(st.binary())
def test_printable_can_be_exported(path: bytes) -> None:
    printable(path).encode()


def test_walk_does_not_leave_the_tree(tmp_path: Path) -> None:
    top = tree(tmp_path / "cgroup", "a")
    outside = tree(tmp_path / "outside", "b")
    (top / "out").symlink_to(outside)
    (top / "a/up").symlink_to("..")
    hierarchy = Hierarchy(0, str(top))
    cgroups = walked(only(hierarchy))
    assert cgroups.counts == (2, 0)
    assert cgroups.name(hierarchy, outside.stat().st_ino) == OTHER


def test_walk_while_directories_vanish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cgroup is there when its parent is listed, and gone when it is listed itself."""
    top = tree(tmp_path / "cgroup", "a/inner", "b/inner", "c")
    scandir = os.scandir

    def after_removal(path: bytes) -> Iterator[os.DirEntry[bytes]]:
        if path.endswith(b"/b"):
            os.rename(path, os.fsencode(tmp_path / "removed"))
        return scandir(path)

    inner = (top / "a/inner").stat().st_ino
    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", after_removal)
        hierarchy = Hierarchy(0, str(top))
        cgroups = walked(only(hierarchy))
    assert not (top / "b").exists()
    assert cgroups.name(hierarchy, inner) == "/a/inner"
    assert cgroups.labels_in_use(hierarchy, set()) >= {"/", "/a", "/a/inner", "/b", "/c"}


def test_walk_while_cgroups_come_and_go(tmp_path: Path) -> None:
    top = tree(tmp_path / "cgroup", "stays/inner")
    done = threading.Event()

    def churn() -> None:
        while not done.is_set():
            for i in range(20):
                (top / f"{i}/a/b").mkdir(parents=True)
            for i in range(20):
                shutil.rmtree(top / f"{i}")

    hierarchy = Hierarchy(0, str(top))
    cgroups = Cgroups(only(hierarchy))
    inner = (top / "stays/inner").stat().st_ino
    thread = threading.Thread(target=churn)
    thread.start()
    try:
        for now in range(200):
            cgroups.walk(float(now))
            assert cgroups.name(hierarchy, inner) == "/stays/inner"
    finally:
        done.set()
        thread.join()


def test_walk_past_a_cgroup_without_permission(open_path: Path) -> None:
    """Whoever has a cgroup delegated to him may close it, which must not close all others too."""
    top = tree(open_path / "cgroup", "a/b", "closed/c", "d")
    hierarchy = Hierarchy(0, str(top))
    (top / "closed").chmod(0)
    try:
        with as_nobody():
            cgroups = walked(only(hierarchy))
    finally:
        (top / "closed").chmod(0o700)
    expected = {"/", "/a", "/a/b", "/closed", "/d"}
    assert cgroups.labels_in_use(hierarchy, set()) - {OTHER, UNATTRIBUTED} == expected


def test_walk_without_file_descriptors(tmp_path: Path) -> None:
    """What could not be listed has not exited."""
    top = tree(tmp_path / "cgroup", "a/b", "c")
    cgroups = walked(only(Hierarchy(0, str(top))))
    with no_descriptors(), pytest.raises(CgroupfsError, match="Too many open files"):
        cgroups.walk(1.0)
    assert cgroups.counts == (4, 0)


def test_walk_of_a_hierarchy_that_is_gone(tmp_path: Path) -> None:
    cgroups = Cgroups(only(Hierarchy(0, str(tmp_path / "cgroup"))))
    with pytest.raises(CgroupfsError, match=rf"{tmp_path}/cgroup: No such .*--path\.cgroupfs$"):
        cgroups.walk(0.0)


def test_walk_after_lost_events(tmp_path: Path) -> None:
    top = tree(tmp_path / "cgroup", "a", "b")
    hierarchy = Hierarchy(0, str(top))
    cgroups = walked(only(hierarchy))
    a, b = ((top / name).stat().st_ino for name in "ab")
    (top / "a").rename(tmp_path / "exited")  # so that its number is not used again
    (top / "b").rename(top / "moved")
    (top / "new").mkdir()
    cgroups.walk(10.0)
    assert cgroups.name(hierarchy, a) == "/a", "it keeps its name"
    assert cgroups.name(hierarchy, b) == "/moved"
    assert cgroups.name(hierarchy, (top / "new").stat().st_ino) == "/new"
    assert cgroups.counts == (3, 1)
    assert cgroups.expired(10.0) == set()
    assert cgroups.expired(10.0 + RETENTION_SECONDS) == {(0, a)}


def test_walk_finds_again_what_it_missed(tmp_path: Path) -> None:
    """As where a rename moves a cgroup past the walk: what is there is not about to go."""
    top = tree(tmp_path / "cgroup", "a")
    hierarchy = Hierarchy(0, str(top))
    cgroups = walked(only(hierarchy))
    a = (top / "a").stat().st_ino
    (top / "a").rename(tmp_path / "elsewhere")
    cgroups.walk(1.0)
    (tmp_path / "elsewhere").rename(top / "a")
    cgroups.walk(2.0)
    cgroups.expired(2.0)
    assert cgroups.expired(2 * RETENTION_SECONDS) == set()
    assert (cgroups.name(hierarchy, a), cgroups.counts) == ("/a", (2, 0))


def test_release_that_was_lost(tmp_path: Path) -> None:
    """Events are lost together; a walk follows, and it cannot see what was removed before."""
    cgroups = walked(only(Hierarchy(0, str(tree(tmp_path / "cgroup")))))
    cgroups.apply(MKDIR, 0, 5, b"/a", 0.0)
    cgroups.apply(RMDIR, 0, 5, b"/a", 0.0)
    cgroups.walk(1.0)  # RELEASE is among the lost
    cgroups.expired(2.0)
    assert cgroups.expired(2 * RETENTION_SECONDS) == {(0, 5)}, "else it is kept for ever"


def test_removed_cgroup_that_the_kernel_keeps(tmp_path: Path) -> None:
    """Its page cache may hold a v2 cgroup for days: its series go before, its name stays."""
    hierarchy = Hierarchy(0, str(tree(tmp_path / "cgroup")))
    cgroups = walked(only(hierarchy))
    cgroups.apply(MKDIR, 0, 5, b"/a", 0.0)
    cgroups.apply(RMDIR, 0, 5, b"/a", 0.0)
    assert cgroups.expired(DYING_SECONDS - 1) == set()
    gone = cgroups.expired(DYING_SECONDS)
    assert gone == {(0, 5)}
    assert cgroups.labels_in_use(hierarchy, gone) == {"/", OTHER, UNATTRIBUTED}
    cgroups.forget(gone, DYING_SECONDS)
    assert cgroups.name(hierarchy, 5) == "/a", "it may have IO again"
    assert cgroups.expired(2 * DYING_SECONDS - 1) == set()
    assert cgroups.expired(2 * DYING_SECONDS) == {(0, 5)}
    cgroups.apply(RELEASE, 0, 5, b"/a", 2 * DYING_SECONDS)
    assert cgroups.expired(2 * DYING_SECONDS) == set()
    gone = cgroups.expired(2 * DYING_SECONDS + RETENTION_SECONDS)
    cgroups.forget(gone, 0.0)
    assert (gone, cgroups.counts) == ({(0, 5)}, (1, 0))


# Events -------------------------------------------------------------------------------------------

ONE = Hierarchy(0, "/nowhere")


@pytest.fixture
def cgroups() -> Cgroups:
    return Cgroups(only(ONE))


def test_kinds_are_those_of_the_object() -> None:
    enum = open_file("cgroup_lifecycle").enum("cgroup_event_kind")
    assert {f"CGROUP_{kind.name}": kind.value for kind in EventKind} == enum


def test_life_of_a_cgroup(cgroups: Cgroups) -> None:
    cgroups.apply(MKDIR, 0, 5, b"/a", 0.0)
    assert (cgroups.name(ONE, 5), cgroups.counts) == ("/a", (1, 0))
    cgroups.apply(RMDIR, 0, 5, b"/a", 1.0)
    assert (cgroups.name(ONE, 5), cgroups.counts) == ("/a", (0, 1))
    # Its dirty pages may still be written: nothing expires soon.
    for now in (1.0, 100.0, 599.0):
        assert cgroups.expired(now) == set()
    cgroups.apply(RELEASE, 0, 5, b"/a", 600.0)
    assert (cgroups.name(ONE, 5), cgroups.counts) == ("/a", (0, 1))
    assert cgroups.expired(600.0) == set()
    assert cgroups.expired(600.0 + RETENTION_SECONDS - 0.1) == set()
    gone = cgroups.expired(600.0 + RETENTION_SECONDS)
    assert gone == {(0, 5)}
    assert cgroups.name(ONE, 5) == "/a", "until it is forgotten"
    cgroups.forget(gone, 0.0)
    assert cgroups.counts == (0, 0)
    assert cgroups.expired(1e9) == set()


def test_exited_cgroup_is_kept_until_it_was_scraped(cgroups: Cgroups) -> None:
    cgroups.apply(MKDIR, 0, 5, b"/a", 0.0)
    cgroups.apply(RELEASE, 0, 5, b"/a", 0.0)
    # Nobody has scraped for long; this scrape is the first that has its last samples.
    assert cgroups.expired(10 * RETENTION_SECONDS) == set()
    assert cgroups.expired(10 * RETENTION_SECONDS + 1) == {(0, 5)}


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("kinds", [(RMDIR, RELEASE), (RELEASE,), (RELEASE, RMDIR)])
def test_exit_when_events_were_lost(
    cgroups: Cgroups, known: bool, kinds: tuple[EventKind, ...]
) -> None:
    if known:
        cgroups.apply(MKDIR, 0, 5, b"/a", 0.0)
    for kind in kinds:
        cgroups.apply(kind, 0, 5, b"/a", 0.0)
    assert (cgroups.name(ONE, 5), cgroups.counts) == ("/a", (0, 1))
    cgroups.expired(1.0)
    assert cgroups.expired(2 * RETENTION_SECONDS) == {(0, 5)}


def test_rename_moves_what_is_below(cgroups: Cgroups) -> None:
    paths = [b"/a", b"/a/x", b"/a/x/y", b"/ab", b"/ab/x", b"/c/a", b"/c/a/x"]
    for number, path in enumerate(paths, 1):
        cgroups.apply(MKDIR, 0, number, path, 0.0)
    cgroups.apply(MKDIR, 0, 99, b"/a/old", 0.0)
    cgroups.apply(RMDIR, 0, 99, b"/a/old", 0.0)
    cgroups.apply(RENAME, 0, 1, b"/renamed", 1.0)
    assert [cgroups.name(ONE, number) for number in range(1, 8)] == [
        *("/renamed", "/renamed/x", "/renamed/x/y", "/ab", "/ab/x", "/c/a", "/c/a/x")
    ]
    assert cgroups.name(ONE, 99) == "/a/old", "what has exited keeps its name"


def test_rename_of_an_unknown_cgroup(cgroups: Cgroups) -> None:
    cgroups.apply(RENAME, 0, 5, b"/a", 0.0)
    assert cgroups.name(ONE, 5) == "/a"


def test_no_owner(cgroups: Cgroups) -> None:
    assert cgroups.name(ONE, 0) == UNATTRIBUTED
    assert not UNATTRIBUTED.startswith("/")
    assert not OTHER.startswith("/")


def test_unknown_cgroup_is_other_from_then_on(cgroups: Cgroups) -> None:
    assert cgroups.name(ONE, 5) == OTHER
    cgroups.apply(MKDIR, 0, 5, b"/a", 0.0)
    assert cgroups.name(ONE, 5) == OTHER, "or the counters of OTHER would go backwards"
    cgroups.apply(RMDIR, 0, 5, b"/a", 0.0)
    cgroups.apply(RELEASE, 0, 5, b"/a", 0.0)
    cgroups.expired(1.0)
    assert cgroups.name(ONE, 5) == OTHER
    cgroups.forget(cgroups.expired(2 * RETENTION_SECONDS), 0.0)
    assert cgroups.counts == (0, 0)


def test_cgroup_that_came_and_went_while_events_were_lost(cgroups: Cgroups) -> None:
    """Nothing will ever tell that it went: its rows may not stay in the maps for ever."""
    hierarchy = cgroups.hierarchies.io
    assert cgroups.name(hierarchy, 77) == OTHER
    assert cgroups.expired(0.0) == cgroups.expired(RETENTION_SECONDS - 1) == set()
    assert cgroups.collapsed["no name"] == 1
    gone = cgroups.expired(RETENTION_SECONDS)
    assert gone == {(0, 77)}
    cgroups.forget(gone, RETENTION_SECONDS)
    assert cgroups.collapsed["no name"] == 0
    assert cgroups.counts[1] == 0
    # If it is there after all, as above the root of a cgroup namespace, it is other's again.
    assert cgroups.name(hierarchy, 77) == OTHER
    assert cgroups.collapsed["no name"] == 1


def test_hierarchies_number_their_cgroups_each_on_its_own() -> None:
    io, task = Hierarchy(7, "/blkio"), Hierarchy(0, "/unified")
    cgroups = Cgroups(Hierarchies(io, task))
    cgroups.apply(MKDIR, 7, 5, b"/io", 0.0)
    cgroups.apply(MKDIR, 0, 5, b"/task", 0.0)
    cgroups.apply(MKDIR, 3, 5, b"/of-another-hierarchy", 0.0)
    assert (cgroups.name(io, 5), cgroups.name(task, 5)) == ("/io", "/task")
    cgroups.apply(RELEASE, 7, 5, b"/io", 0.0)
    cgroups.expired(0.0)
    gone = cgroups.expired(RETENTION_SECONDS)
    assert gone == {(7, 5)}
    cgroups.forget(gone, 0.0)
    assert cgroups.name(task, 5) == "/task"
    assert cgroups.name(io, 5) == OTHER


def test_restart_under_the_same_path(cgroups: Cgroups) -> None:
    for number in (5, 6):
        cgroups.apply(MKDIR, 0, number, b"/a", 0.0)
        if number == 5:
            cgroups.apply(RMDIR, 0, 5, b"/a", 0.0)
            cgroups.apply(RELEASE, 0, 5, b"/a", 0.0)
    assert cgroups.name(ONE, 5) == cgroups.name(ONE, 6) == "/a"
    cgroups.expired(0.0)
    gone = cgroups.expired(RETENTION_SECONDS)
    assert gone == {(0, 5)}
    assert "/a" in cgroups.labels_in_use(ONE, gone)
    cgroups.forget(gone, 0.0)
    assert cgroups.name(ONE, 6) == "/a"

    cgroups.apply(RELEASE, 0, 6, b"/a", 1000.0)
    cgroups.expired(1000.0)
    gone = cgroups.expired(1000.0 + RETENTION_SECONDS)
    assert "/a" in cgroups.labels_in_use(ONE, set())
    assert "/a" not in cgroups.labels_in_use(ONE, gone)


def test_labels_in_use(cgroups: Cgroups) -> None:
    assert cgroups.labels_in_use(ONE, set()) == {OTHER, UNATTRIBUTED}
    cgroups.apply(MKDIR, 0, 5, b"/live", 0.0)
    cgroups.apply(RMDIR, 0, 6, b"/being-written", 0.0)
    cgroups.apply(RELEASE, 0, 7, b"/released", 0.0)
    everything = {OTHER, UNATTRIBUTED, "/live", "/being-written", "/released"}
    assert cgroups.labels_in_use(ONE, set()) == everything
    assert cgroups.labels_in_use(ONE, {(0, 7)}) == everything - {"/released"}
    assert cgroups.labels_in_use(ONE, {(3, 7)}) == everything, "7 of another hierarchy"


def test_heirs(cgroups: Cgroups) -> None:
    nobodys = {UNATTRIBUTED: 0, OTHER: OTHER_ID}
    cgroups.apply(MKDIR, 0, 5, b"/a", 0.0)
    assert cgroups.heirs(ONE, set()) == {**nobodys, "/a": 5}
    cgroups.apply(RMDIR, 0, 5, b"/a", 0.0)
    assert cgroups.heirs(ONE, set()) == {**nobodys, "/a": 5}
    cgroups.apply(MKDIR, 0, 6, b"/a", 0.0)
    assert cgroups.heirs(ONE, set()) == {**nobodys, "/a": 6}, "one that lives rather"
    assert cgroups.heirs(ONE, {(0, 5)}) == {**nobodys, "/a": 6}
    cgroups.apply(MKDIR, 0, 7, b"/" + b"x" * 1023, 0.0)
    assert cgroups.heirs(ONE, set()) == {**nobodys, "/a": 6}, "OTHER's are no single cgroup's"


def test_names_of_exited_cgroups_are_bounded(
    cgroups: Cgroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert module._EXITED_LIMIT >= 10_000
    monkeypatch.setattr(module, "_EXITED_LIMIT", 3)
    for number in range(1, 6):
        cgroups.apply(MKDIR, 0, number, b"/%d" % number, 0.0)
        cgroups.apply(RMDIR, 0, number, b"/%d" % number, 0.0)
        cgroups.apply(RELEASE, 0, number, b"/%d" % number, 0.0)
        assert cgroups.counts[1] <= 3
    assert [cgroups.name(ONE, number) for number in range(1, 6)] == [
        *(OTHER, OTHER, "/3", "/4", "/5")
    ]
    cgroups.expired(1.0)
    cgroups.forget(cgroups.expired(2 * RETENTION_SECONDS), 0.0)
    assert cgroups.counts == (0, 0)


# Everything in any order --------------------------------------------------------------------------

NAMES = st.sampled_from([b"a", b"ab", b"b", b"a.service", b'"', b"\xff", "ü".encode(), b"\\"])
LOST = st.sampled_from([False] * 3 + [True])


def one_of(data: st.DataObject, cgroups: Collection[int]) -> int:
    # By place: inode numbers differ from run to run, and a run must be repeatable.
    return [*cgroups][data.draw(st.integers(0, len(cgroups) - 1))]


class Host(RuleBasedStateMachine):
    """A host whose cgroups come, move and go, with their events, of which some are lost.

    The tree is a real one. What is removed moves to another directory, so that inode numbers are
    never used twice, as cgroupfs sees to.
    """

    @initialize(events=st.booleans(), hierarchy=st.sampled_from([0, 7]))
    def start(self, events: bool, hierarchy: int) -> None:
        self.place = tempfile.mkdtemp()
        top = os.fsencode(f"{self.place}/cgroup")
        os.makedirs(self.place + "/exited")
        os.mkdir(top)
        self.top = top
        self.hierarchy = Hierarchy(hierarchy, os.fsdecode(top))
        self.cgroups = walked(only(self.hierarchy))
        self.events = events
        """False: the kernel refuses them, and the tree is walked at each scrape."""
        self.now = 0.0
        self.live = {os.stat(top).st_ino: b""}
        self.dying: dict[int, bytes] = {}
        """Removed, but not released."""
        self.lost = False
        """Since the last scrape."""
        self.known = set(self.live)
        """Ids of which the exporter was told, by an event or a walk, and that it may not forget."""
        self.last: dict[int, bytes] = {}
        """Path at its end, of each that ended when no event was lost since the last walk."""
        self.exits: dict[int, float] = {}
        """When the exporter was told that they may go."""
        self.scraped: set[int] = set()
        """Those of `exits` that were scraped since."""

    def teardown(self) -> None:
        if hasattr(self, "place"):
            shutil.rmtree(self.place)

    def tell(self, kind: EventKind, cgroup: int, path: bytes, lost: bool) -> bool:
        """Whether the exporter is told."""
        if lost or not self.events:
            self.lost = True
            return False
        self.cgroups.apply(kind, self.hierarchy.id, cgroup, path, self.now)
        self.known.add(cgroup)
        return True

    @rule(data=st.data(), name=NAMES, lost=LOST)
    def mkdir(self, data: st.DataObject, name: bytes, lost: bool) -> None:
        parent = one_of(data, self.live)
        path = self.live[parent] + b"/" + name
        if path in self.live.values():
            return
        os.mkdir(self.top + path)
        cgroup = os.stat(self.top + path).st_ino
        self.live[cgroup] = path
        self.tell(MKDIR, cgroup, path, lost)

    @rule(data=st.data(), name=NAMES, lost=LOST)
    def rename(self, data: st.DataObject, name: bytes, lost: bool) -> None:
        cgroup = one_of(data, self.live)
        old = self.live[cgroup]
        new = os.path.dirname(old).removesuffix(b"/") + b"/" + name
        if not old or new in self.live.values():
            return
        os.rename(self.top + old, self.top + new)
        for other, path in self.live.items():
            if (path + b"/").startswith(old + b"/"):
                self.live[other] = new + path[len(old) :]
        self.tell(RENAME, cgroup, new, lost)

    @rule(data=st.data(), lost=LOST)
    def rmdir(self, data: st.DataObject, lost: bool) -> None:
        leaves = [
            cgroup
            for cgroup, path in self.live.items()
            if path and not any(other.startswith(path + b"/") for other in self.live.values())
        ]
        if not leaves:
            return
        cgroup = one_of(data, leaves)
        path = self.live.pop(cgroup)
        os.rename(self.top + path, f"{self.place}/exited/{cgroup}")
        self.dying[cgroup] = path
        faithful = not self.lost
        if self.tell(RMDIR, cgroup, path, lost) and faithful:
            self.last[cgroup] = path

    @rule(data=st.data(), lost=LOST)
    def release(self, data: st.DataObject, lost: bool) -> None:
        if not self.dying:
            return
        cgroup = one_of(data, self.dying)
        if self.tell(RELEASE, cgroup, self.dying.pop(cgroup), lost):
            # A walk after lost events may have taken it for released already.
            self.exits.setdefault(cgroup, self.now)

    @rule(seconds=st.sampled_from([0.0, 15.0, 60.0, RETENTION_SECONDS, 1000.0]))
    def scrape(self, seconds: float) -> None:
        self.now += seconds
        if self.lost:
            self.walk()
        for cgroup, path in self.live.items():
            assert self.cgroups.name(self.hierarchy, cgroup) == printable(path or b"/")
        assert self.cgroups.counts[0] == len(self.live)
        for cgroup in self.known - self.live.keys():
            name = self.cgroups.name(self.hierarchy, cgroup)
            assert name.startswith("/"), "an exited cgroup that was known keeps its name"
            if cgroup in self.last:
                assert name == printable(self.last[cgroup])

        gone = self.cgroups.expired(self.now)
        assert gone == {
            (self.hierarchy.id, cgroup)
            for cgroup in self.exits.keys() & self.scraped
            if self.now - self.exits[cgroup] >= RETENTION_SECONDS
        }
        self.scraped |= self.exits.keys()
        labels = self.cgroups.labels_in_use(self.hierarchy, gone)
        assert labels >= {printable(path or b"/") for path in self.live.values()}
        self.cgroups.forget(gone, self.now)
        for _, cgroup in gone:
            self.known.remove(cgroup)
            self.scraped.remove(cgroup)
            del self.exits[cgroup]
        assert self.cgroups.counts == (len(self.live), len(self.known - self.live.keys()))

    @rule()
    def killed(self) -> None:
        """The exporter, which knew all, and another one comes."""
        if self.lost:
            return
        self.cgroups = successor(self.cgroups, self.now)
        self.known |= self.live.keys()
        # Their last samples may not have been scraped.
        self.exits = dict.fromkeys(self.exits, self.now)
        self.scraped.clear()

    def walk(self) -> None:
        self.cgroups.walk(self.now)
        self.lost = False
        for cgroup in self.known - self.live.keys() - self.exits.keys():
            # Either it was seen to go just now, or its release may be among the lost events.
            self.exits[cgroup] = self.now
        self.known |= self.live.keys()


@pytest.fixture
def no_early_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the model, which knows release alone."""
    monkeypatch.setattr("writeback_exporter.names.cgroups.DYING_SECONDS", math.inf)


TestHost = pytest.mark.usefixtures("no_early_end")(Host.TestCase)
TestHost.settings = settings(max_examples=40, stateful_step_count=30)


# Another process --------------------------------------------------------------------------------


def test_recalled(tmp_path: Path) -> None:
    hierarchy = Hierarchy(0, str(tree(tmp_path / "cgroup", "stays", "goes", "dies")))
    cgroups = walked(only(hierarchy))
    ids = {name: (tmp_path / "cgroup" / name).stat().st_ino for name in ("stays", "goes", "dies")}
    for name in ("goes", "dies"):
        (tmp_path / "cgroup" / name / "cgroup.procs").unlink()
        (tmp_path / "cgroup" / name).rmdir()
        cgroups.apply(RMDIR, 0, ids[name], f"/{name}".encode(), 5.0)
    cgroups.apply(RELEASE, 0, ids["goes"], b"/goes", 6.0)
    assert {cgroup: cgroups.exit_of(0, cgroup) for _, cgroup in cgroups.exited()} == {
        ids["goes"]: (b"/goes", True),
        ids["dies"]: (b"/dies", False),
    }
    assert cgroups.exit_of(0, ids["stays"]) is None
    assert cgroups.exit_of(3, ids["goes"]) is None, "of another hierarchy"

    after = successor(cgroups, 100.0)
    assert after.counts == (2, 2)
    for name, cgroup in ids.items():
        assert after.name(hierarchy, cgroup) == f"/{name}"
    after.expired(101.0)
    assert after.expired(100.0 + RETENTION_SECONDS) == {(0, ids["goes"])}
    assert (0, ids["dies"]) in after.expired(100.0 + DYING_SECONDS)


def test_who_was_over_the_limit_stays_there(tmp_path: Path) -> None:
    """And who comes while nobody looks takes nobody's label."""
    top = tree(tmp_path / "cgroup", *"abcd")
    hierarchy = Hierarchy(0, str(top))
    rules = CgroupRules(limit=3)
    cgroups = Cgroups(only(hierarchy), rules)
    cgroups.walk(0.0)
    ids = [top.stat().st_ino, *((top / name).stat().st_ino for name in "abcd")]
    first = [ids[4], ids[0], ids[2]]
    assert OTHER not in {cgroups.name(hierarchy, cgroup) for cgroup in first}
    assert {cgroups.name(hierarchy, ids[i]) for i in (1, 3)} == {OTHER}
    assert cgroups.labelled() == {
        (0, cgroup): "limit" if i in (1, 3) else "" for i, cgroup in enumerate(ids)
    }
    (top / "e").mkdir()
    after = successor(cgroups, 1.0, rules)
    for cgroup in (*ids, (top / "e").stat().st_ino):
        expected = cgroups.name(hierarchy, cgroup) if cgroup in ids else OTHER
        assert after.name(hierarchy, cgroup) == expected
    assert after.collapsed == {"rule": 0, "limit": 3, "no name": 0}


def test_who_was_nameless_or_went_unheard_goes(tmp_path: Path) -> None:
    """Its events were lost while nobody was there: nothing else will tell."""
    hierarchy = Hierarchy(0, str(tree(tmp_path / "cgroup")))
    after = walked(only(hierarchy))
    after.recall([], {(0, 77): "limit", (0, 78): "no name", (0, 79): ""}, 0.0)
    assert {after.name(hierarchy, cgroup) for cgroup in (77, 78)} == {OTHER}
    after.expired(0.0)
    gone = after.expired(RETENTION_SECONDS)
    assert gone == {(0, 77), (0, 78)}
    after.forget(gone, RETENTION_SECONDS)
    assert after.collapsed == {"rule": 0, "limit": 0, "no name": 0}


def test_an_old_event_does_not_undo_a_walk(tmp_path: Path) -> None:
    """Made, and then its parent renamed, before an exporter came that finds both events."""
    top = tree(tmp_path / "cgroup", "new/child")
    hierarchy = Hierarchy(7, str(top))
    cgroups = walked(only(hierarchy))
    parent, child = ((top / path).stat().st_ino for path in ("new", "new/child"))
    cgroups.apply(MKDIR, 7, child, b"/old/child", 0.0)
    cgroups.apply(RENAME, 7, parent, b"/new", 0.0)
    assert cgroups.name(hierarchy, child) == "/new/child"


# Paths that are too long -------------------------------------------------------------------------


def test_a_tree_that_is_deeper_than_a_path_can_be(tmp_path: Path) -> None:
    """Whoever has a cgroup delegated to him can make one; it has nobody's walk fail."""
    top = tree(tmp_path / "cgroup", v2=True)
    here = os.getcwd()
    try:
        os.chdir(top)
        for _ in range(20):
            os.mkdir("d" * 250)
            os.chdir("d" * 250)
    finally:
        os.chdir(here)
    cgroups = walked(only(Hierarchy(0, str(top))))
    live, _ = cgroups.counts
    assert 15 < live < 21


def test_a_path_that_an_event_had_to_cut(cgroups: Cgroups) -> None:
    """It would be the name of all below it."""
    whole, cut = b"/" + b"p" * 1021, b"/" + b"p" * 1022
    cgroups.apply(MKDIR, 0, 5, whole, 0.0)
    for cgroup in (6, 7):
        cgroups.apply(MKDIR, 0, cgroup, cut, 0.0)
    hierarchy = cgroups.hierarchies.io
    assert [cgroups.name(hierarchy, c) for c in (5, 6, 7)] == [whole.decode(), OTHER, OTHER]
    assert [cgroup for cgroup, _, _ in cgroups.listed(hierarchy) if cgroup > 1] == [5]
    for kind in (RMDIR, RELEASE):
        cgroups.apply(kind, 0, 6, cut, 0.0)
    assert cgroups.name(hierarchy, 6) == OTHER
    cgroups.expired(1.0)
    gone = cgroups.expired(1.0 + RETENTION_SECONDS)
    assert (0, 6) in gone
    cgroups.forget(gone, 200.0)
    assert cgroups.collapsed["no name"] == 1
