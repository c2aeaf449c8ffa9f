# SPDX-License-Identifier: Apache-2.0
"""Which files in directories of cgroups somebody has written to: inotify(7).

A write is told to those who watch in any cgroup namespace and container, since all mounts of a
hierarchy share one superblock (6.18). What the kernel changes by itself is not told, as when a
controller is switched off and on again.
"""

from __future__ import annotations

import ctypes
import os
import struct
import weakref
from collections.abc import Collection, Iterator

WATCHES_LIMIT = 8192
"""Directories at most, each of which takes about 1 KB of the kernel's memory."""
_SHARE = 8
"""Of what the sysctl lets a user watch we take an eighth: 1,024 directories before 5.11, later one
a megabyte or more. Who finds none left fails, be it kubelet or an editor."""
_LIMIT_BEFORE_5_11 = 8192

# linux/inotify.h. Not IN_MODIFY: the kernel's own notifications, as of memory.events, are that too,
# a hundred times a second of a cgroup that is at its limit. All that sets limits closes the file.
_IN_CLOSE_WRITE = 0x8
_IN_Q_OVERFLOW = 0x4000
_IN_IGNORED = 0x8000
_IN_ONLYDIR = 0x01000000
_EVENT = struct.Struct("iIII")  # watch, mask, cookie, length of the name
_BUFFER = 1 << 16

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
    """Those of one exporter. Where the kernel or its limits allow none, there is no room."""

    def __init__(self) -> None:
        self._watches: dict[Key, int] = {}
        self._keys: dict[int, Key] = {}
        self._descriptor = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._room = _allowed() if self._descriptor >= 0 else 0
        # Of these there are 128 a user, so that none may be left behind.
        self._close = weakref.finalize(self, os.close, self._descriptor)
        if self._descriptor < 0:
            self._close.detach()

    def add(self, key: Key, directory: bytes) -> bool:
        """Whether writes there will be told of from now on."""
        if key in self._watches:
            return True
        if not self._room:
            return False
        mask = _IN_CLOSE_WRITE | _IN_ONLYDIR
        watch = _libc.inotify_add_watch(self._descriptor, directory, mask)
        if watch < 0:  # others have taken the rest, or it has gone
            return False
        self._drop(self._keys.get(watch))  # the same directory, by another name
        self._watches[key] = watch
        self._keys[watch] = key
        self._room -= 1
        return True

    def written(self) -> Iterator[tuple[Key, bytes] | None]:
        """Since the last call: whose file was written to, and its name. None for what the kernel
        had no room to tell."""
        while events := self._read():
            at = 0
            while at < len(events):
                watch, mask, _, length = _EVENT.unpack_from(events, at)
                at += _EVENT.size + length
                key = self._keys.get(watch)
                if mask & _IN_Q_OVERFLOW:
                    yield None
                elif key is None:
                    continue
                elif mask & _IN_IGNORED:  # its directory has gone
                    self._drop(key)
                else:
                    yield key, events[at - length : at].rstrip(b"\0")

    def _read(self) -> bytes:
        try:
            return os.read(self._descriptor, _BUFFER) if self._watches else b""
        except BlockingIOError:
            return b""

    def keep_to(self, hierarchy: int, live: Collection[int]) -> None:
        """Ends those of the hierarchy's other cgroups."""
        for key in [key for key in self._watches if key[0] == hierarchy and key[1] not in live]:
            _libc.inotify_rm_watch(self._descriptor, self._watches[key])
            self._drop(key)

    def _drop(self, key: Key | None) -> None:
        if key is not None:
            del self._keys[self._watches.pop(key)]
            self._room += 1

    def close(self) -> None:
        """Ends all, for good."""
        self._close()
        self._room = 0
        self._watches.clear()
        self._keys.clear()
