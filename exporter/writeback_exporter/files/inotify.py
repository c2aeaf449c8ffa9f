# SPDX-License-Identifier: Apache-2.0
"""Which files in directories of cgroups somebody has written to: inotify(7).

A write is told once the file is closed, to those who watch in any cgroup namespace and container,
for all mounts of a hierarchy share one superblock (5.10 to 7.3). What the kernel changes by itself
is not told, as when a controller is switched off and on again.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import termios
import weakref
from collections.abc import Collection, Iterator

WATCHES_LIMIT = 8192
"""Directories at most, each of which takes about 1 KB of the kernel's memory."""
_SHARE = 8
"""Of what the sysctl lets a user watch we take an eighth, which is 1,024 directories before 5.11,
and since then from 1,024 to 131,072 by the size of memory. Who finds none left fails, be it kubelet
or an editor."""
_LIMIT_BEFORE_5_11 = 8192

# linux/inotify.h. Not IN_MODIFY: the kernel's own notifications, as of memory.events, are that too,
# a hundred times a second of a cgroup that is at its limit.
_IN_CLOSE_WRITE = 0x8
_IN_Q_OVERFLOW = 0x4000
_IN_IGNORED = 0x8000
_IN_ONLYDIR = 0x01000000
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name
_BUFFER = 1 << 16
_INT = struct.Struct("i")

_libc = ctypes.CDLL(None, use_errno=True)

Key = tuple[int, int]
"""A hierarchy's id and a cgroup's."""


def _allowed() -> int:
    """How many we take."""
    try:
        with open("/proc/sys/fs/inotify/max_user_watches") as stream:
            limit = int(stream.read())
    except (OSError, ValueError):
        limit = _LIMIT_BEFORE_5_11
    return min(WATCHES_LIMIT, limit // _SHARE)


class Watches:
    """Those of one exporter."""

    def __init__(self) -> None:
        """Raises OSError where there is no inotify or, of 128 instances a user, none left."""
        self._watches: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self.room = _allowed()
        """How many more there may be."""
        self._descriptor = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._descriptor < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._close = weakref.finalize(self, os.close, self._descriptor)

    def __contains__(self, key: Key) -> bool:
        return key in self._watches

    def add(self, key: Key, directory: int) -> None:
        """Tells from now on of writes in the directory of this descriptor, which is the key's.

        Raises OSError where there is no room.
        """
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        path = f"/proc/self/fd/{directory}".encode()
        watch = _libc.inotify_add_watch(self._descriptor, path, _IN_CLOSE_WRITE | _IN_ONLYDIR)
        if watch < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._watches[key] = watch
        self._keys[watch] = key
        self.room -= 1

    def written(self) -> Iterator[tuple[Key, bytes] | None]:
        """Since the last call: whose file was written to, and its name. None for what the kernel
        had no room to tell (fs.inotify.max_queued_events)."""
        # What is there now, and not until there is no more: whoever owns a cgroup can write as fast
        # as this is read.
        (size,) = _INT.unpack(fcntl.ioctl(self._descriptor, termios.FIONREAD, bytes(_INT.size)))
        while size > 0:
            events = os.read(self._descriptor, _BUFFER)
            size -= len(events)
            at = 0
            while at < len(events):
                watch, mask, _, length = _EVENT.unpack_from(events, at)
                at += _EVENT.size + length
                key = self._keys.get(watch)
                if mask & _IN_Q_OVERFLOW:
                    yield None
                elif key is None:
                    continue
                elif mask & _IN_IGNORED:  # unmounted; of a cgroup's removal nothing is told (6.18)
                    self._drop(key)
                else:
                    yield key, events[at - length : at].rstrip(b"\0")

    def keep_to(self, hierarchy: int, live: Collection[int]) -> None:
        """Ends those of the hierarchy's other cgroups."""
        for key in [key for key in self._watches if key[0] == hierarchy and key[1] not in live]:
            _libc.inotify_rm_watch(self._descriptor, self._watches[key])
            self._drop(key)

    def _drop(self, key: Key) -> None:
        del self._keys[self._watches.pop(key)]
        self.room += 1

    def close(self) -> None:
        """Ends all, for good."""
        self._close()
