# SPDX-License-Identifier: Apache-2.0
"""Which disks and BDIs are still there.

Their names come from the kernel with the first IO (bpf/block_io.bpf.c, bpf/dirty_throttle.bpf.c),
so that a disk that is unplugged before anybody looks has its name too; sysfs tells when they are
gone.
"""

from __future__ import annotations

from pathlib import Path


class Devices:
    """Disks and BDIs of this host, by sysfs."""

    def __init__(self, sysfs: str) -> None:
        self._sysfs = Path(sysfs)

    def has_disk(self, name: str, dev: str) -> bool:
        """Whether the disk of that name is there with that "MAJOR:MINOR".

        Paths of an NVMe multipath disk are hidden and have no number.
        """
        disk = self._sysfs / "block" / name.replace("/", "!")
        try:
            return (disk / "dev").read_text().strip() == dev
        except OSError:
            return disk.exists()

    def has_bdi(self, name: str) -> bool:
        return (self._sysfs / "class/bdi" / name).exists()
