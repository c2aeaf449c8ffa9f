# SPDX-License-Identifier: Apache-2.0
"""Which disks and BDIs are still there.

Their names come from the kernel with the first IO (bpf/block_io.bpf.c, bpf/dirty_throttle.bpf.c),
so that a disk that is unplugged before anybody looks has its name too; sysfs tells when they are
gone.
"""

from __future__ import annotations

from pathlib import Path


class SysfsError(Exception):
    """sysfs is not where it was looked for; the message says what to do."""


class Devices:
    """Disks and BDIs of this host, by sysfs."""

    def __init__(self, sysfs: str) -> None:
        """Raises SysfsError where it is not there: all disks would seem to be unplugged."""
        self._sysfs = Path(sysfs)
        for directory in (self._sysfs / "block", self._sysfs / "class/bdi"):
            if not directory.is_dir():
                raise SysfsError(
                    f"{sysfs} is no sysfs ({directory} is not there); mount sysfs there, or say "
                    "where it is with --path.sysfs"
                )

    def has_disk(self, name: str, dev: str) -> bool:
        """Whether the disk of that name is there with that "MAJOR:MINOR".

        Paths of an NVMe multipath disk are hidden and have no number.
        """
        disk = self._sysfs / "block" / name.replace("/", "!")
        number = _read(disk / "dev")
        return number == dev if number else disk.exists()

    def has_disk_without_iostats(self) -> bool:
        """Whether some disk's requests are not stamped with their arrival by the kernel."""
        return any(
            _read(disk / "queue/iostats") == "0" for disk in (self._sysfs / "block").iterdir()
        )

    def has_bdi(self, name: str) -> bool:
        return (self._sysfs / "class/bdi" / name).exists()


def _read(file: Path) -> str:
    """Its content; empty where there is none, or no such file any more."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
