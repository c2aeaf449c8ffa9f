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
pressure and dirty memory, up to 2 s old, nothing of v1, and is not in 5.10.
"""

from __future__ import annotations

import errno
import os
import resource
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, Generic, TypeVar

from writeback_exporter.features import raise_if_exhausted
from writeback_exporter.files.inotify import Watches
from writeback_exporter.names.cgroups import Cgroups, Hierarchy

KEPT_LIMIT = 8192
"""Files kept open at most: those of 1,000 cgroups. Each takes 5.6 KB of the kernel's memory, 46 MB
in all, which count as the exporter's cgroup's."""
OTHERS = 2048
"""Descriptors left for all else: 512 connections, 1,000 PSI triggers, some 100 of BPF and pins."""

SELDOM_SECONDS = 60
"""How old what seldom changes may be where there is no watch for it."""
WATCHED_SECONDS = 300
"""And where there is one, for what the kernel changes by itself, or whose writer does not close the
file."""

_CHUNK = 1 << 14
"""More than a file of a cgroup has, but for io.stat with hundreds of disks."""

T = TypeVar("T")


class KeptFile:
    """A file of each cgroup, kept open where there is room."""

    def __init__(self, files: CgroupFiles, hierarchy: Hierarchy, name: bytes) -> None:
        self.hierarchy = hierarchy
        self._name = name
        self._files = files
        self._descriptors: dict[int, int] = {}

    def read(self, cgroup: int, directory: bytes) -> bytes | None:
        """Its content now; None where there is none, as where the cgroup has gone.

        Raises Refused where no file can be opened at all.
        """
        descriptor = self._descriptors.get(cgroup)
        if descriptor is not None:
            try:
                text = os.pread(descriptor, _CHUNK, 0)
                return text if len(text) < _CHUNK else _whole(descriptor, text)
            except OSError as error:
                self._close(cgroup)
                # The cgroup has gone; or its controller has, and may be back, without a limit.
                if error.errno == errno.ENODEV:
                    self._files.forget(self.hierarchy, cgroup)
        try:
            if self._files.room == 0:
                return self._files.content(directory + b"/" + self._name)
            descriptor = self._files.open(cgroup, directory, self._name)
            self._descriptors[cgroup] = descriptor
            self._files.room -= 1
            return _whole(descriptor)
        except OSError:
            return None

    def keep_to(self, live: Collection[int]) -> None:
        """Closes those of all other cgroups."""
        for cgroup in self._descriptors.keys() - live:
            self._close(cgroup)

    def _close(self, cgroup: int) -> None:
        os.close(self._descriptors.pop(cgroup))
        self._files.room += 1


class Seldom(Generic[T]):
    """What was found in files of each cgroup that seldom change. It is read again when somebody has
    written to one that is watched, and now and then: each cgroup has a second of its own for that,
    so that scrapes share the work. Where there is no room for a watch, it is read at each scrape of
    the cgroup's first minute, too, in which its limits are set."""

    def __init__(
        self, files: CgroupFiles, hierarchy: Hierarchy, watched: Collection[bytes], seconds: int
    ) -> None:
        self.hierarchy = hierarchy
        self.watched = watched
        """Names of files."""
        self._seconds = seconds
        self._files = files
        self._found: dict[int, tuple[float, float, object, T]] = {}
        """When it was first read and is to be read again; what was found, under which sign."""

    def get(
        self, cgroup: int, directory: bytes, read: Callable[[int, bytes], T], sign: object = None
    ) -> T:
        """What `read` finds, or has found within that time while `sign` was the same. What it
        raises comes out, and nothing is remembered then."""
        now = self._files.clock()
        found = self._found.get(cgroup)
        if found is not None and now < found[1] and sign == found[2]:
            return found[3]
        # Before it is read, or what is written meanwhile would not be told.
        told = bool(self.watched) and self._files.watch(self.hierarchy, cgroup, directory)
        value = read(cgroup, directory)
        first = found[0] if found else now
        if self.watched and not told and now < first + SELDOM_SECONDS:
            due = now
        else:
            due = _its_second(cgroup, now, WATCHED_SECONDS if told else self._seconds)
        self._found[cgroup] = first, due, sign, value
        return value

    def hurry(self) -> None:
        """All is read again within the time for what is not watched."""
        now = self._files.clock()
        for cgroup, (first, due, sign, value) in self._found.items():
            due = min(due, _its_second(cgroup, now, self._seconds))
            self._found[cgroup] = first, due, sign, value

    def forget(self, cgroup: int) -> None:
        """It is as if it was new."""
        self._found.pop(cgroup, None)

    def keep_to(self, live: Collection[int]) -> None:
        """Forgets all other cgroups."""
        for cgroup in self._found.keys() - live:
            del self._found[cgroup]


def _its_second(cgroup: int, now: float, seconds: int) -> float:
    """When its turn is next, within that time."""
    own = hash((cgroup,)) % seconds  # of a tuple: that of a number is itself
    return now + seconds - (now + own) % seconds


class CgroupFiles:
    """All that stays, of all readers. `settle` before they read, `close` at the end."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.room = 0
        """How many more files may be kept."""
        self._limit = 0
        self._kept: list[KeptFile] = []
        self._seldom: list[Seldom[Any]] = []
        self._generation = 0
        self._watches: Watches | None = None
        self._set_limit()

    def kept(self, hierarchy: Hierarchy, name: bytes) -> KeptFile:
        """The file of that name in each cgroup."""
        self._kept.append(KeptFile(self, hierarchy, name))
        return self._kept[-1]

    def seldom(
        self,
        hierarchy: Hierarchy,
        watched: Collection[bytes] = (),
        seconds: int = SELDOM_SECONDS,
    ) -> Seldom[Any]:
        """Room for what is found in each cgroup, and is read again when a file of those names was
        written to, or after so long."""
        self._seldom.append(Seldom(self, hierarchy, watched, seconds))
        return self._seldom[-1]

    def settle(self, cgroups: Cgroups) -> None:
        """Drops what is of cgroups that are gone, and what there is no room for any more."""
        self._set_limit()
        self._forget_written()  # before more is told, of watches that end
        if cgroups.generation != self._generation:
            self._generation = cgroups.generation
            stays: list[KeptFile | Seldom[Any]] = [*self._kept, *self._seldom]
            for each in stays:
                each.keep_to(cgroups.live(each.hierarchy))
            if self._watches:
                for hierarchy in {each.hierarchy for each in self._seldom}:
                    self._watches.keep_to(hierarchy.id, cgroups.live(hierarchy))

    def _forget_written(self) -> None:
        for told in self._watches.written() if self._watches else ():
            for each in self._seldom:
                if told is None:
                    each.hurry()
                    continue
                (hierarchy, cgroup), name = told
                if each.hierarchy.id == hierarchy and name in each.watched:
                    each.forget(cgroup)

    def watch(self, hierarchy: Hierarchy, cgroup: int, directory: bytes) -> bool:
        """Whether `settle` will notice what is written in that directory."""
        key = hierarchy.id, cgroup
        if self._watches and (key in self._watches or not self._watches.room):
            return key in self._watches
        try:
            above = self._directory(cgroup, directory)
            try:
                self._watches = self._watches or Watches()
                self._watches.add(key, above)
            finally:
                os.close(above)
        except OSError:  # others have all instances or watches, or it has gone
            return False
        return True

    def forget(self, hierarchy: Hierarchy, cgroup: int) -> None:
        """Nothing that was found there is true any more."""
        for each in self._seldom:
            if each.hierarchy.id == hierarchy.id:
                each.forget(cgroup)

    def _set_limit(self) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = min(KEPT_LIMIT, max(0, soft - OTHERS))
        self.room += limit - self._limit
        self._limit = limit
        if self.room < 0:  # it has been lowered
            self._close_kept()

    def close(self) -> None:
        """Closes all files, and ends all watches."""
        self._close_kept()
        if self._watches:
            self._watches.close()
            self._watches = None

    def _close_kept(self) -> None:
        for file in self._kept:
            file.keep_to(())

    def contents(self, cgroup: int, directory: bytes, names: Iterable[bytes]) -> list[bytes | None]:
        """Of files that are not kept; None for each that there is not. Raises OSError where the
        cgroup has gone, or cannot be read now, and Refused where no file can be opened at all."""
        above = self._directory(cgroup, directory)
        try:
            return [self._content_if_there(name, above) for name in names]
        finally:
            os.close(above)

    def _content_if_there(self, name: bytes, above: int) -> bytes | None:
        try:
            return self.content(name, above)
        except FileNotFoundError:
            return None

    def content(self, path: bytes, above: int | None = None) -> bytes:
        """Of a file that is not kept. Raises as `contents` does, also where it is not there."""
        descriptor = self._open(path, os.O_RDONLY, above)
        try:
            return _whole(descriptor)
        finally:
            os.close(descriptor)

    def open(self, cgroup: int, directory: bytes, name: bytes) -> int:
        """A descriptor of a file of that cgroup. Raises as `content` does."""
        above = self._directory(cgroup, directory)
        try:
            return self._open(name, os.O_RDONLY, above)
        finally:
            os.close(above)

    def _directory(self, cgroup: int, path: bytes) -> int:
        descriptor = self._open(path, os.O_PATH)
        if os.fstat(descriptor).st_ino == cgroup:
            return descriptor
        # Its name is another's, of which no event has told yet: what is kept would stay wrong.
        os.close(descriptor)
        raise FileNotFoundError(errno.ENOENT, "another cgroup has this path", path)

    def _open(self, path: bytes, flags: int, above: int | None = None) -> int:
        try:
            return os.open(path, flags | os.O_CLOEXEC, dir_fd=above)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or self.room == self._limit:
                raise_if_exhausted(error)
                raise
        # Others need those that are kept more.
        self._close_kept()
        self.room = self._limit = 0
        return self._open(path, flags, above)


def _whole(descriptor: int, text: bytes = b"") -> bytes:
    """A file of cgroups, of which `text` has been read. The kernel writes it all when a read begins
    at 0, and gives as much of it as is asked for (fs/seq_file.c, seq_read_iter, and one record a
    file): what is less is the end."""
    while len(text) % _CHUNK == 0 and (more := os.pread(descriptor, _CHUNK, len(text))):
        text += more
    return text
