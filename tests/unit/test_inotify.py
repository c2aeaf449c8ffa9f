# SPDX-License-Identifier: Apache-2.0
"""Watches of directories, by the kernel's inotify."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.unit.files import no_descriptors
from writeback_exporter.files import inotify
from writeback_exporter.files.inotify import Watches


@pytest.fixture
def watches() -> Iterator[Watches]:
    made = Watches()
    yield made
    made.close()


@contextmanager
def directory(path: Path) -> Iterator[int]:
    """With a file named file."""
    path.mkdir()
    (path / "file").touch()
    descriptor = os.open(path, os.O_PATH)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def add(watches: Watches, path: Path) -> bool:
    """As the cgroup that its name says; whether there was room."""
    with directory(path) as descriptor, suppress(OSError):
        watches.add((0, int(path.name)), descriptor)
    return (0, int(path.name)) in watches


def instances() -> int:
    """Of inotify, of this process."""
    count = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the listing
            count += os.readlink(f"/proc/self/fd/{descriptor}") == "anon_inode:inotify"
    return count


def test_a_file_that_is_written(tmp_path: Path, watches: Watches) -> None:
    for number in range(3):
        assert add(watches, tmp_path / str(number))
    assert list(watches.written()) == []
    (tmp_path / "1/file").write_text("new")
    (tmp_path / "2/another, of a longer name").write_text("new")
    (tmp_path / "0/file").read_text()
    assert list(watches.written()) == [
        ((0, 1), b"file"),
        ((0, 2), b"another, of a longer name"),
    ]
    assert list(watches.written()) == []


def test_more_than_is_read_at_once(tmp_path: Path, watches: Watches) -> None:
    names = [f"file {number}" for number in range(5_000)]
    add(watches, tmp_path / "1")
    for name in names:
        (tmp_path / "1" / name).touch()
    assert list(watches.written()) == [((0, 1), name.encode()) for name in names]


def test_there_is_an_end_of_it(tmp_path: Path, watches: Watches) -> None:
    """Though somebody goes on writing while it is read."""
    add(watches, tmp_path / "1")
    files = [tmp_path / "1" / name for name in ("file", "other")]
    for expected in (2, 4):
        for file in files:
            file.write_text("new")
        found = 0
        for _ in watches.written():
            found += 1
            if found <= 2:
                files[found - 1].write_text("new")
        assert found == expected


def test_a_directory_that_goes_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inotify, "WATCHES_LIMIT", 2)
    watches = Watches()
    assert [add(watches, tmp_path / str(i)) for i in range(3)] == [True, True, False]
    (tmp_path / "0/file").unlink()
    (tmp_path / "0").rmdir()  # of which a cgroup would say nothing
    assert list(watches.written()) == []
    assert add(watches, tmp_path / "3")
    assert not add(watches, tmp_path / "4")
    watches.keep_to(1, ())
    assert not add(watches, tmp_path / "5")
    watches.keep_to(0, {3})
    assert add(watches, tmp_path / "6")
    for number in (1, 3, 6):
        (tmp_path / str(number) / "file").write_text("new")
    assert list(watches.written()) == [((0, 3), b"file"), ((0, 6), b"file")]
    watches.close()


def test_an_eighth_of_what_a_user_may_have(watches: Watches) -> None:
    allowed = int(Path("/proc/sys/fs/inotify/max_user_watches").read_text())
    assert watches.room == min(inotify.WATCHES_LIMIT, allowed // 8)
    assert watches.room > 0


def test_what_is_no_directory(tmp_path: Path, watches: Watches) -> None:
    (tmp_path / "file").touch()
    descriptor = os.open(tmp_path / "file", os.O_PATH)
    with pytest.raises(OSError, match="Not a directory"):
        watches.add((0, 1), descriptor)
    os.close(descriptor)
    assert (0, 1) not in watches


def test_without_an_instance() -> None:
    with no_descriptors(), pytest.raises(OSError, match="Too many open files"):
        Watches()


def test_no_instance_is_left() -> None:
    before = instances()
    watches = Watches()
    assert instances() == before + 1
    watches.close()
    watches.close()
    assert instances() == before
    forgotten = Watches()
    del forgotten
    assert instances() == before
