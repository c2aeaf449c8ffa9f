# SPDX-License-Identifier: Apache-2.0
"""What devices and BDIs are, to join other metrics with: sysfs, mountinfo and /proc/swaps."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from writeback_exporter.collector import Host
from writeback_exporter.features import Feature, Refused
from writeback_exporter.files.base import Reader
from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.exposition import Labels, Snapshot, family
from writeback_exporter.names.devices import BlockDevice, lowest
from writeback_exporter.names.mounts import Mount, Mounts, swaps
from writeback_exporter.settings import Settings

_SWAP = Mount("swap", "", "[SWAP]")
_NOTHING = Mount("", "", "")
Btrfs = tuple[str, tuple[str, ...], Mount]
"""The BDI's name where the kernel tells it, the devices, and where it is mounted."""
# What a BDI of neither a disk nor a numbered file system is called: "btrfs-1", "9p-2", "mtd-0"
# (super_setup_bdi(), fs/super.c), "ubifs_0_1" (fs/ubifs/super.c).
_NAMED_BDI = re.compile(r"([a-z0-9]*[a-z])[-_][0-9_]+")
# That of a FUSE file system on a disk: "8:1-fuseblk" (fuse_bdi_init(), fs/fuse/inode.c).
_FUSEBLK = "-fuseblk"


class DeviceInfo(Reader):
    """What disks, partitions and BDIs are: their stack, their file systems, where these are."""

    name = "devices"

    def open(self, settings: Settings, host: Host, lock: threading.Lock) -> list[Feature]:
        self._procfs = settings.procfs
        try:
            self._mounts = Mounts(settings.procfs)
        except OSError as error:
            raise Refused(
                "no mountinfo",
                f"cannot open {error.filename}: {error.strerror}",
                "mount procfs there, or say where it is with --path.procfs",
            ) from error
        return []

    def fill(self, snapshot: Snapshot, host: Host) -> None:
        devices = host.devices.block_devices()
        by_number = self._mounts.by_number()
        btrfs = list(_btrfs(host.devices.btrfs(), devices, by_number))
        mounts = {
            name: by_number[device.dev]
            for name, device in devices.items()
            if device.dev in by_number
        }
        for _, members, mount in btrfs:
            mounts |= dict.fromkeys(members, mount)
        for path in swaps(self._procfs):
            mounts[_name_of(path, devices)] = _SWAP
        bdis = _bdi_rows(host.devices.bdis(), devices, by_number, btrfs)
        snapshot.families += [
            family(catalogue.DEVICE_INFO, ((row, 1) for row in _device_rows(devices, mounts))),
            family(
                catalogue.DEVICE_DISK_INFO,
                (((name, disk), 1) for name in devices for disk in sorted(lowest(name, devices))),
            ),
            family(catalogue.BDI_INFO, ((row, 1) for row in bdis)),
        ]

    def close(self) -> None:
        self._mounts.close()


def _device_rows(
    devices: Mapping[str, BlockDevice], mounts: Mapping[str, Mount]
) -> Iterator[Labels]:
    """`mounts` are by device."""
    for device in devices.values():
        mount = mounts.get(device.name, _NOTHING)
        yield (
            device.name,
            device.dev,
            device.kind,
            device.alias,
            device.disk,
            ",".join(device.parents),
            ",".join(device.holders),
            mount.fstype,
            mount.mountpoint,
            device.rotational,
            device.scheduler,
        )


def _bdi_rows(
    bdis: list[str],
    devices: Mapping[str, BlockDevice],
    by_number: Mapping[str, Mount],
    btrfs: Iterable[Btrfs],
) -> Iterator[Labels]:
    names = {device.dev: device.name for device in devices.values()}
    on_disk: dict[str, list[Mount]] = {}  # a disk and its partitions have one BDI
    for device in devices.values():
        if device.dev in by_number:
            on_disk.setdefault(device.disk, []).append(by_number[device.dev])
    named = {bdi: (",".join(members), mount) for bdi, members, mount in btrfs}
    alone = _alone(bdis, by_number)
    for bdi in bdis:
        number = bdi.removesuffix(_FUSEBLK)
        if bdi in names:
            mounts = on_disk.get(names[bdi], [])
            fstypes = ",".join(sorted({mount.fstype for mount in mounts}))
            yield bdi, names[bdi], fstypes, ",".join(sorted(m.mountpoint for m in mounts))
        elif number in by_number:
            mount = by_number[number]
            yield bdi, names.get(number, ""), mount.fstype, mount.mountpoint
        elif bdi in named:
            members, mount = named[bdi]
            yield bdi, members, mount.fstype, mount.mountpoint
        else:
            fstype = _type_of(bdi)
            yield bdi, "", fstype, alone.get(fstype, _NOTHING).mountpoint


def _type_of(bdi: str) -> str:
    match = _NAMED_BDI.fullmatch(bdi)
    return match[1] if match else ""


def _alone(bdis: Iterable[str], by_number: Mapping[str, Mount]) -> dict[str, Mount]:
    """The file system of each type of which there is one, with one BDI: the kernel numbers such
    BDIs as they come, and tells nowhere which is whose."""
    types = Counter(map(_type_of, bdis))
    mounted = Counter(mount.fstype for mount in by_number.values())
    return {
        mount.fstype: mount
        for mount in by_number.values()
        if mounted[mount.fstype] == types[mount.fstype] == 1
    }


def _btrfs(
    found: Iterable[tuple[str, tuple[str, ...]]],
    devices: Mapping[str, BlockDevice],
    by_number: Mapping[str, Mount],
) -> Iterator[Btrfs]:
    """The number of a btrfs is no disk's: one of its devices is what was mounted."""
    mounts = {
        _name_of(mount.source, devices): mount
        for mount in by_number.values()
        if mount.fstype == "btrfs"
    }
    for bdi, members in found:
        mounted = (mounts[member] for member in members if member in mounts)
        yield bdi, members, next(mounted, Mount("btrfs", "", ""))


def _name_of(path: str, devices: Mapping[str, BlockDevice]) -> str:
    """The kernel's name of a device by its path in /dev, where volumes have their own names."""
    name = path.removeprefix("/dev/")
    if name.startswith("mapper/"):
        alias = name.removeprefix("mapper/")
        for device in devices.values():
            if device.alias == alias and device.name.startswith("dm-"):
                return device.name
    return name
