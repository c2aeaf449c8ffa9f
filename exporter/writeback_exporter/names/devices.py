# SPDX-License-Identifier: Apache-2.0
"""Disks, partitions and BDIs: which are there, and how disks lie on disks. All of it from sysfs.

The names of what is counted come from the kernel with the first IO (bpf/block_io.bpf.c,
bpf/dirty_throttle.bpf.c), so that a disk that is unplugged before anybody looks has its name too;
sysfs tells when they are gone.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from writeback_exporter.features import raise_if_exhausted
from writeback_exporter.names.cgroups import printable

_PAGE = 1 << 16  # what an attribute of sysfs has at most

# How long what can change while the disks stay the same is believed: who holds them, schedulers,
# the files of loop devices.
_REFRESH_SECONDS = 30.0
# How long one disk, and all of them, may take to tell about their queues.
_PATIENCE_SECONDS = 0.25
_LONGEST_SECONDS = 1.0

# Of disks whose names say what they are; all others are just disks.
_KINDS = {kind: kind for kind in ("bcache", "drbd", "loop", "md", "nbd", "ram", "rbd", "zram")}
_KINDS["sr"] = "rom"
# Device mapper: its users begin the UUID with what they are.
_MAPPER_KINDS = {"LVM": "lvm", "CRYPT": "crypt", "mpath": "mpath"}
# A path to an NVMe namespace, subsystem 0, controller 1, namespace 2: "nvme0c1n2"; its head is
# "nvme0n2" (nvme_mpath_set_disk_name(), drivers/nvme/host/multipath.c; 5.10 has the same names).
_NVME_PATH = re.compile(r"(nvme\d+)c\d+(n\d+)")


class SysfsError(Exception):
    """sysfs is not where it was looked for; the message says what to do."""


@dataclass(frozen=True, slots=True)
class BlockDevice:
    """A disk or a partition. Names are the kernel's, such as "sda1" and "cciss/c0d0"."""

    name: str
    dev: str
    """MAJOR:MINOR; empty for a path to an NVMe disk, which is hidden."""
    kind: str
    alias: str
    """The device mapper's name, the level of md, the file of a loop device."""
    disk: str
    """The whole disk: of a partition that one, of a path its head, else the device itself."""
    parents: tuple[str, ...]
    """What it lies on, except a partition, which is part of `disk`."""
    holders: tuple[str, ...]
    """What lies on it."""
    rotational: str
    scheduler: str


class Devices:
    """Disks and BDIs of this host, by sysfs. Not thread-safe."""

    def __init__(self, sysfs: str) -> None:
        """Raises SysfsError where it is not there: all disks would seem to be unplugged."""
        self._sysfs = Path(sysfs)
        for directory in (self._sysfs / "block", self._sysfs / "class/bdi"):
            if not directory.is_dir():
                raise SysfsError(
                    f"{sysfs} is no sysfs ({directory} is not there); mount sysfs there, or say "
                    "where it is with --path.sysfs"
                )
        self._queues = _Queues(f"{sysfs}/block")
        self._queue_attributes: dict[str, list[str]] = {}
        self._links: dict[str, tuple[int, str]] = {}
        """By number: the link's inode, which is never used twice, and where it points to."""
        self._block_devices: dict[str, BlockDevice] = {}
        self._read_at = float("-inf")

    def has_disk(self, name: str, dev: str) -> bool:
        """Whether the disk of that name is there with that "MAJOR:MINOR".

        Paths of an NVMe multipath disk are hidden and have no number.
        """
        disk = self._sysfs / "block" / _entry(name)
        number = _read(f"{disk}/dev")
        return number == dev if number else disk.exists()

    def has_disk_without_iostats(self) -> bool:
        """Whether some disk's requests are not stamped with their arrival by the kernel."""
        queues = self._queues.read(_list(f"{self._sysfs}/block"), ("iostats",))
        return any(iostats == "0" for (iostats,) in queues.values())

    def has_bdi(self, name: str) -> bool:
        return (self._sysfs / "class/bdi" / name).exists()

    def bdis(self) -> list[str]:
        """The names of all BDIs, in order."""
        return sorted(_list(f"{self._sysfs}/class/bdi"))

    def name(self, dev: str) -> str | None:
        """The kernel's name of the block device that has that "MAJOR:MINOR", if one has it."""
        return _name(os.path.basename(_link(f"{self._sysfs}/dev/block/{dev}"))) or None

    def block_devices(self) -> Mapping[str, BlockDevice]:
        """All disks and partitions by name: who is there now, described as of 30 s ago or later.
        Raises Refused."""
        now = time.monotonic()
        if self._list_numbers() or now - self._read_at >= _REFRESH_SECONDS:
            self._block_devices = {device.name: device for device in self._read_devices()}
            self._read_at = now
        return self._block_devices

    def btrfs(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """(BDI, devices) of each btrfs; the BDI's name is empty where the kernel does not tell."""
        for entry in _list(f"{self._sysfs}/fs/btrfs"):
            directory = f"{self._sysfs}/fs/btrfs/{entry}"
            devices = _names(f"{directory}/devices")
            if devices:  # else it is "features" and the like
                yield os.path.basename(_link(f"{directory}/bdi")), devices

    def _list_numbers(self) -> bool:
        """Looks which numbers there are; whether that changed. Raises Refused where no file can
        be opened at all: without numbers all disks would seem to have gone."""
        links: dict[str, tuple[int, str]] = {}
        try:
            with os.scandir(f"{self._sysfs}/dev/block") as entries:
                for entry in entries:
                    known = self._links.get(entry.name)
                    if known is None or known[0] != entry.inode():
                        known = (entry.inode(), _link(entry.path))
                    if known[1]:
                        links[entry.name] = known
        except OSError as error:
            raise_if_exhausted(error)
        changed = links != self._links
        self._links = links
        return changed

    def _read_devices(self) -> Iterator[BlockDevice]:
        entries = _list(f"{self._sysfs}/block")
        disks = {_name(entry): f"{self._sysfs}/block/{entry}" for entry in entries}
        # What does not answer is believed to be as it was.
        known = self._queue_attributes | self._queues.read(entries, ("rotational", "scheduler"))
        queues = {entry: known.get(entry, ["", ""]) for entry in entries}
        self._queue_attributes = queues
        numbers, partitions = {}, {}
        for dev, (_, link) in self._links.items():
            above, name = map(_name, link.split("/")[-2:])
            numbers[name] = dev
            if name not in disks and above in disks:
                partitions[name] = above
        paths = _nvme_paths(disks)
        for name, directory in disks.items():
            kind, alias = _kind(name, directory)
            head = _nvme_head(name, disks)
            rotational, scheduler = queues[_entry(name)]
            yield BlockDevice(
                name=name,
                dev=numbers.get(name, ""),
                kind="path" if head else kind,
                alias=alias,
                disk=head or name,
                parents=paths.get(name) or _names(f"{directory}/slaves"),
                holders=(head,) if head else _names(f"{directory}/holders"),
                rotational=rotational,
                scheduler=_chosen(scheduler),
            )
        for name, disk in partitions.items():
            rotational, scheduler = queues[_entry(disk)]
            yield BlockDevice(
                name=name,
                dev=numbers[name],
                kind="partition",
                alias="",
                disk=disk,
                parents=(),
                holders=_names(f"{disks[disk]}/{_entry(name)}/holders"),
                rotational=rotational,
                scheduler=_chosen(scheduler),
            )


def lowest(name: str, devices: Mapping[str, BlockDevice]) -> set[str]:
    """The whole disks at the bottom of a device: those whose requests carry its IO."""
    disks, seen, pending = set(), {name}, [name]
    while pending:
        current = pending.pop()
        device = devices.get(current)
        if device is None:
            below: tuple[str, ...] = ()
        else:
            below = (device.disk,) if device.kind == "partition" else device.parents
        if not below:
            disks.add(current)
        pending += [one for one in below if one not in seen]
        seen.update(below)
    return disks


class _Queues:
    """Attributes of disks' queues (block/blk-sysfs.c).

    Reading one may never end: who switches the scheduler holds the queue's lock, for which the
    attributes wait, while he waits for the disk's requests, and those of a dead disk do not end.
    No signal ends such a read: an exporter that has one under way ends when the read does.
    So a thread reads, and a disk that it hangs at is let alone until it comes back.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._hung: dict[str, threading.Thread] = {}

    def read(self, disks: Iterable[str], attributes: tuple[str, ...]) -> dict[str, list[str]]:
        """The attributes by disk, by its entry in sysfs; without disks that do not answer."""
        self._hung = {disk: thread for disk, thread in self._hung.items() if thread.is_alive()}
        pending = [disk for disk in disks if disk not in self._hung]
        values: dict[str, list[str]] = {}
        ends = time.monotonic() + _LONGEST_SECONDS
        while pending and time.monotonic() < ends:
            part: dict[str, list[str]] = {}
            arguments = (pending, attributes, part)
            thread = threading.Thread(target=self._read, args=arguments, daemon=True)
            thread.start()
            thread.join(_PATIENCE_SECONDS)
            done = dict(part)  # the thread may come back at any moment
            values |= done
            if len(done) < len(pending):
                self._hung[pending[len(done)]] = thread
            pending = pending[len(done) + 1 :]
        return values

    def _read(
        self, disks: list[str], attributes: tuple[str, ...], into: dict[str, list[str]]
    ) -> None:
        for disk in disks:
            into[disk] = [_read(f"{self._directory}/{disk}/queue/{name}") for name in attributes]


def _kind(name: str, directory: str) -> tuple[str, str]:
    """(kind, alias) of a disk."""
    if name.startswith("dm-"):
        uuid = _read(f"{directory}/dm/uuid")
        user = uuid.partition("-")[0]
        return _MAPPER_KINDS.get(user, "dm"), _read(f"{directory}/dm/name")
    kind = _KINDS.get(re.split("[^a-z]", name, maxsplit=1)[0], "disk")
    if kind == "md":
        return kind, _read(f"{directory}/md/level")
    if kind == "loop":
        return kind, _read(f"{directory}/loop/backing_file")
    return kind, ""


def _nvme_head(name: str, disks: Iterable[str]) -> str:
    """The head of a path to an NVMe disk; empty for others."""
    path = _NVME_PATH.fullmatch(name)
    head = path[1] + path[2] if path else ""
    return head if head in disks else ""


def _nvme_paths(disks: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The paths of each NVMe disk that has some."""
    paths: dict[str, tuple[str, ...]] = {}
    for name in sorted(disks):
        head = _nvme_head(name, disks)
        if head:
            paths[head] = (*paths.get(head, ()), name)
    return paths


def _chosen(scheduler: str) -> str:
    # "[none] mq-deadline", or just "none" of what has no requests, such as md.
    return scheduler.partition("[")[2].partition("]")[0] or scheduler


def _name(entry: str) -> str:
    """The kernel's name of a device; sysfs has no "/" in the names of its entries."""
    return entry.replace("!", "/")


def _entry(name: str) -> str:
    return name.replace("/", "!")


def _names(directory: str) -> tuple[str, ...]:
    return tuple(sorted(map(_name, _list(directory))))


def _list(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _read(file: str) -> str:
    """Its content; empty where there is none, or no such file any more."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return printable(os.read(descriptor, _PAGE)).strip()
    except OSError:
        return ""
    finally:
        os.close(descriptor)
