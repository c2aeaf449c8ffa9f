# SPDX-License-Identifier: Apache-2.0
"""What stays of cgroups' files from one scrape to the next: descriptors of those that each scrape
reads, and what was found in those that seldom change.

CPU of one file, in us, on 6.18, of 1,000 cgroups four levels deep (tests/bench/bench_files.py
compares):

| | memory.stat | usage | v1 io counts | io.pressure |
|---|---|---|---|---|
| open by path, read, close | 16.7 | 9.1 | 11.3 | 10.7 |
| open relative to a directory | 13.3 | 5.8 | 8.0 | 7.5 |
| read again from a kept file | 8.9 | 0.8 | 3.2 | 2.8 |

A BPF iterator (iter/cgroup) takes a twentieth of open and read (guests, 6.1 to 7.3), but has only
pressure and dirty memory, up to 2 s old, nothing of v1, and is not in 5.10. inotify would tell of a
limit that is written, but not of one written in a cgroup namespace, which has a mount of its own;
and its watches are few, and shared by all that a user runs.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, Generic, TypeVar

from writeback_exporter.features import raise_if_exhausted
from writeback_exporter.names.cgroups import Cgroups, Hierarchy

KEPT_LIMIT = 8192
"""Files kept open at most: those of 1,000 cgroups. Each takes 4.4 KB of the kernel's memory, 36 MB
in all, which count as the exporter's cgroup's."""
OTHERS = 1024
"""Descriptors left for all else: connections, which are 512 at most, maps, programs, pins."""

SELDOM_SECONDS = 60
"""How old what seldom changes may be."""
_CHUNK = 1 << 14
"""More than a file of a cgroup has, but for io.stat with hundreds of disks."""

T = TypeVar("T")


class KeptFile:
    """A file of each cgroup, kept open where there is room."""

    def __init__(self, files: CgroupFiles, hierarchy: Hierarchy, name: bytes) -> None:
        """`name` with the slash before it."""
        self.hierarchy, self.name = hierarchy, name
        self._files = files
        self._descriptors: dict[int, int] = {}
        files.each.append(self)

    def read(self, cgroup: int, directory: bytes) -> bytes | None:
        """Its content now; None where there is none, as where the cgroup has gone.

        Raises Refused where no file can be opened at all.
        """
        descriptor = self._descriptors.get(cgroup)
        if descriptor is not None:
            try:
                text = os.pread(descriptor, _CHUNK, 0)
                return text if len(text) < _CHUNK else _whole(descriptor, text)
            except OSError:
                # ENODEV: the cgroup has gone, or its controller has, and may be back.
                self._close(cgroup)
        descriptor = _open(directory + self.name)
        if descriptor is None:
            return None
        try:
            text = _whole(descriptor)
        except OSError:
            os.close(descriptor)
            return None
        if self._files.room > 0:
            self._files.room -= 1
            self._descriptors[cgroup] = descriptor
        else:
            os.close(descriptor)
        return text

    def keep_to(self, live: Collection[int]) -> None:
        """Closes those of all other cgroups, and as many more as there is no room for."""
        for cgroup in self._descriptors.keys() - live:
            self._close(cgroup)
        while self._files.room < 0 and self._descriptors:
            self._close(next(reversed(self._descriptors)))

    def _close(self, cgroup: int) -> None:
        os.close(self._descriptors.pop(cgroup))
        self._files.room += 1


class Seldom(Generic[T]):
    """What was found in files of each cgroup that seldom change. Each has a second of its own at
    which it is read again, so that scrapes share the work."""

    def __init__(
        self, files: CgroupFiles, hierarchy: Hierarchy, seconds: int = SELDOM_SECONDS
    ) -> None:
        self.hierarchy = hierarchy
        self._seconds = seconds
        self._files = files
        files.each.append(self)
        self._found: dict[int, tuple[float, object, T]] = {}
        """When it is to be read again, and what was found under which sign."""

    def get(
        self, cgroup: int, directory: bytes, read: Callable[[bytes], T], sign: object = None
    ) -> T:
        """What `read` finds in the directory, or found within that time while `sign` was the
        same."""
        now = self._files.clock()
        found = self._found.get(cgroup)
        if found is None or now >= found[0] or sign != found[1]:
            its_second = hash((cgroup,)) % self._seconds  # of a tuple: that of a number is itself
            due = now + self._seconds - (now + its_second) % self._seconds
            found = self._found[cgroup] = due, sign, read(directory)
        return found[2]

    def forget(self, cgroup: int) -> None:
        """It is read the next time."""
        self._found.pop(cgroup, None)

    def keep_to(self, live: Collection[int]) -> None:
        """Forgets all other cgroups."""
        for cgroup in self._found.keys() - live:
            del self._found[cgroup]


class CgroupFiles:
    """All that stays, of all readers. `settle` after each scrape, `close` at the end."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.each: list[KeptFile | Seldom[Any]] = []
        self.room = 0
        """How many more files may be kept; below 0 where the limit has been lowered."""
        self._limit = 0
        self._generation = 0
        self._set_limit()

    def settle(self, cgroups: Cgroups) -> None:
        """Drops what is of cgroups that are gone."""
        self._set_limit()
        if self.room < 0 or cgroups.generation != self._generation:
            self._generation = cgroups.generation
            for stays in self.each:
                stays.keep_to(cgroups.live(stays.hierarchy))

    def _set_limit(self) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = min(KEPT_LIMIT, max(0, soft - OTHERS))
        self.room += limit - self._limit
        self._limit = limit

    def close(self) -> None:
        """Closes all files."""
        for stays in self.each:
            stays.keep_to(())


def contents(directory: bytes, names: Iterable[bytes]) -> list[bytes | None]:
    """Of these files, None for each that is not there: half the CPU of opening each by path.

    Raises Refused where no file can be opened at all.
    """
    above = _open(directory, os.O_PATH)
    if above is None:
        return [None for _ in names]
    try:
        return [_read(name[1:], above) for name in names]
    finally:
        os.close(above)


def _read(path: bytes, above: int) -> bytes | None:
    descriptor = _open(path, os.O_RDONLY, above)
    if descriptor is None:
        return None
    try:
        return _whole(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _open(path: bytes, flags: int = os.O_RDONLY, above: int | None = None) -> int | None:
    try:
        return os.open(path, flags | os.O_CLOEXEC, dir_fd=above)
    except OSError as error:
        raise_if_exhausted(error)
        return None


def _whole(descriptor: int, text: bytes = b"") -> bytes:
    """A file of cgroups, of which `text` has been read. The kernel writes it all when a read begins
    at 0, and gives as much of it as is asked for (fs/seq_file.c, seq_read_iter, and one record a
    file): what is less is the end."""
    while len(text) % _CHUNK == 0 and (more := os.pread(descriptor, _CHUNK, len(text))):
        text += more
    return text
