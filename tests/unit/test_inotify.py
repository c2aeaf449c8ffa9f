# SPDX-License-Identifier: Apache-2.0
"""Watches of directories, by the kernel's inotify."""

from __future__ import annotations

import os
from collections.abc import Iterator
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


def directories(place: Path, count: int) -> list[bytes]:
    for number in range(count):
        (place / str(number)).mkdir()
        (place / str(number) / "file").touch()
    return [os.fsencode(place / str(number)) for number in range(count)]


def instances() -> int:
    """Of inotify, of this process."""
    links = (os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if entry.is_symlink())
    return sum(link == "anon_inode:inotify" for link in _those_that_are_there(links))


def _those_that_are_there(links: Iterator[str]) -> Iterator[str]:
    while True:
        try:
            yield next(links)
        except StopIteration:
            return
        except FileNotFoundError:  # that of the listing
            return


def test_a_file_that_is_written(tmp_path: Path, watches: Watches) -> None:
    for number, directory in enumerate(directories(tmp_path, 3)):
        assert watches.add((0, number), directory)
        assert watches.add((0, number), directory)
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
    (directory,) = directories(tmp_path, 1)
    watches.add((0, 1), directory)
    for name in names:
        (tmp_path / "0" / name).touch()
    assert list(watches.written()) == [((0, 1), name.encode()) for name in names]


def test_a_directory_that_goes_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inotify, "WATCHES_LIMIT", 2)
    watches = Watches()
    made = directories(tmp_path, 4)
    assert [watches.add((0, i), each) for i, each in enumerate(made)] == [True, True, False, False]
    assert not watches.add((0, 9), b"/none")
    (tmp_path / "0/file").unlink()
    (tmp_path / "0").rmdir()
    assert list(watches.written()) == []
    assert watches.add((0, 2), made[2])
    assert not watches.add((0, 3), made[3])
    watches.keep_to(1, ())
    assert not watches.add((0, 3), made[3])
    watches.keep_to(0, {2})
    assert watches.add((0, 3), made[3])
    for number in (1, 2, 3):
        (tmp_path / str(number) / "file").write_text("new")
    assert list(watches.written()) == [((0, 2), b"file"), ((0, 3), b"file")]
    watches.close()


def test_a_directory_that_is_anothers(tmp_path: Path, watches: Watches) -> None:
    """Cgroups of v1 can change names: it is told of whom it is now."""
    (directory,) = directories(tmp_path, 1)
    assert watches.add((0, 1), directory)
    assert watches.add((0, 2), directory)
    (tmp_path / "0/file").write_text("new")
    assert list(watches.written()) == [((0, 2), b"file")]
    watches.keep_to(0, {2})
    (tmp_path / "0/file").write_text("newer")
    assert list(watches.written()) == [((0, 2), b"file")]


def test_an_eighth_of_what_a_user_may_have() -> None:
    allowed = int(Path("/proc/sys/fs/inotify/max_user_watches").read_text())
    watches = Watches()
    assert watches._room == min(inotify.WATCHES_LIMIT, allowed // 8)
    watches.close()


def test_without_an_instance(tmp_path: Path) -> None:
    (directory,) = directories(tmp_path, 1)
    with no_descriptors():
        watches = Watches()
    assert not watches.add((0, 1), directory)
    assert list(watches.written()) == []
    watches.keep_to(0, ())
    watches.close()


def test_no_instance_is_left(tmp_path: Path) -> None:
    (directory,) = directories(tmp_path, 1)
    before = instances()
    watches = Watches()
    watches.add((0, 1), directory)
    assert instances() == before + 1
    watches.close()
    watches.close()
    assert instances() == before
    assert not watches.add((0, 1), directory)
    assert list(watches.written()) == []
    forgotten = Watches()
    del forgotten
    assert instances() == before
