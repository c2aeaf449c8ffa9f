# SPDX-License-Identifier: Apache-2.0
"""File systems by device number: where each is mounted. From mountinfo alone, for to ask a mounted
file system anything may never end, as with NFS when its server is gone."""

from __future__ import annotations

import os
import re
import select
from dataclasses import dataclass

from writeback_exporter.names.cgroups import printable

_CHUNK = 1 << 20
# Of these, hosts of containers have thousands. They have neither a disk nor a BDI: what is written
# to an overlay is written back by the file system of its upper directory.
_LEFT_OUT = (b"overlay ", b"tmpfs ", b"nsfs ")


@dataclass(frozen=True, slots=True)
class Mount:
    """A file system. `source` is what was mounted, such as /dev/sda1 or server:/export."""

    fstype: str
    source: str
    mountpoint: str


class Mounts:
    """The file systems that init sees, which in a container are the host's if its procfs is."""

    def __init__(self, procfs: str) -> None:
        """Raises OSError."""
        try:
            self._file = os.open(f"{procfs}/1/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # it is hidden (hidepid=2)
            self._file = os.open(f"{procfs}/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        self._changes = select.poll()
        # mounts_poll(), fs/namespace.c: POLLERR with POLLPRI when mounts came or went.
        self._changes.register(self._file, select.POLLPRI)
        self._mounts: dict[str, Mount] | None = None

    def by_number(self) -> dict[str, Mount]:
        """All file systems by "MAJOR:MINOR". Read again only when mounts have changed: 15 ms for
        10,000 of them, most of it the kernel's, and 15 us where they have not."""
        # Asked for before the file is read, so that what changes meanwhile is seen the next time.
        if self._changes.poll(0) or self._mounts is None:
            self._mounts = parse(self._content())
        return self._mounts

    def _content(self) -> bytes:
        # From its begin to its end in one go, a page at each read: the kernel goes on after the
        # mount that was the last one, whatever comes and goes meanwhile (since 5.8).
        os.lseek(self._file, 0, os.SEEK_SET)
        return b"".join(iter(lambda: os.read(self._file, _CHUNK), b""))

    def close(self) -> None:
        os.close(self._file)


def parse(mountinfo: bytes) -> dict[str, Mount]:
    """The file systems of a mountinfo (proc_pid_mountinfo(5)) by number, overlays and tmpfs left
    out. Of several mounts of one the first with the shortest path, and before others those that
    are not of a directory in it."""
    best: dict[bytes, tuple[tuple[bool, int], bytes, bytes]] = {}
    # Not splitlines(): a carriage return in a name is no end of a line, and not escaped.
    for line in mountinfo.split(b"\n"):
        mount, separator, system = line.partition(b" - ")
        if not separator or system.startswith(_LEFT_OUT):
            continue
        fields = mount.split(b" ")
        if len(fields) < 6 or system.count(b" ") < 1:
            continue
        _, _, number, root, point, *_ = fields
        rank = root != b"/", len(point)
        known = best.get(number)
        if known is None or rank < known[0]:
            best[number] = rank, point, system
    mounts = {}
    for number, (_, point, system) in best.items():
        fstype, source, *_ = system.split(b" ")
        mounts[number.decode()] = Mount(*map(_unescaped, (fstype, source, point)))
    return mounts


def swaps(procfs: str) -> list[str]:
    """The paths of the devices that are swapped to (/proc/swaps)."""
    try:
        with open(f"{procfs}/swaps", "rb") as stream:
            lines = stream.read().split(b"\n")[1:]
    except OSError:  # a kernel without swap
        return []
    columns = [line.split() for line in lines]
    return [_unescaped(c[0]) for c in columns if len(c) > 1 and c[1] == b"partition"]


def _unescaped(field: bytes) -> str:
    """As a label value: blanks and backslashes are octal there (mangle(), fs/proc_namespace.c)."""
    return printable(re.sub(rb"\\([0-7]{3})", lambda octal: bytes([int(octal[1], 8)]), field))
