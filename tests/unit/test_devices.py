# SPDX-License-Identifier: Apache-2.0
"""Devices, BDIs and mounts from trees of files that look as the kernel's."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from writeback_exporter.collector import Host
from writeback_exporter.features import Refused
from writeback_exporter.files.devices import DeviceInfo
from writeback_exporter.metrics.exposition import Snapshot, negotiate, render
from writeback_exporter.names.cgroups import Cgroups, Hierarchies, Hierarchy
from writeback_exporter.names.devices import Devices, lowest
from writeback_exporter.names.mounts import Mount, parse, swaps
from writeback_exporter.settings import Settings

from ..lab import Scrape


class Machine:
    """A sysfs and a procfs below a directory, links and all."""

    def __init__(self, root: Path) -> None:
        self.sysfs, self.procfs = root / "sys", root / "proc"
        for directory in ("block", "class/bdi", "dev/block", "devices/virtual/bdi", "fs/btrfs"):
            (self.sysfs / directory).mkdir(parents=True)
        (self.procfs / "1").mkdir(parents=True)
        self.mount_lines: list[str] = []
        self.swap_lines = ["Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority"]

    def disk(
        self, name: str, dev: str = "", above: str = "virtual/block", **attributes: str
    ) -> Path:
        """A disk; attributes such as queue__scheduler are files."""
        directory = self.sysfs / "devices" / above / name
        queue = {"queue__rotational": "0", "queue__scheduler": "none", "queue__iostats": "1"}
        for attribute, value in {**queue, **attributes}.items():
            file = directory / attribute.replace("__", "/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{value}\n")
        for part in ("slaves", "holders"):
            (directory / part).mkdir()
        (self.sysfs / "block" / name).symlink_to(f"../devices/{above}/{name}")
        if dev:
            self._number(dev, directory)
            self.bdi(dev)
        return directory

    def partition(self, disk: str, name: str, dev: str) -> None:
        directory = (self.sysfs / "block" / disk).resolve() / name
        (directory / "holders").mkdir(parents=True)
        (directory / "partition").write_text("1\n")
        self._number(dev, directory)

    def _number(self, dev: str, directory: Path) -> None:
        (directory / "dev").write_text(f"{dev}\n")
        target = os.path.relpath(directory, self.sysfs / "dev/block")
        (self.sysfs / "dev/block" / dev).symlink_to(target)

    def lies_on(self, name: str, *parents: str) -> None:
        upper = (self.sysfs / "block" / name).resolve()
        for parent in parents:
            lower = next((self.sysfs / "devices").rglob(parent))
            (upper / "slaves" / parent).symlink_to(os.path.relpath(lower, upper / "slaves"))
            (lower / "holders" / name).symlink_to(os.path.relpath(upper, lower / "holders"))

    def unplug(self, name: str) -> None:
        (self.sysfs / "block" / name).unlink()
        for link in (self.sysfs / "dev/block").iterdir():
            if name in os.readlink(link).split("/"):
                link.unlink()

    def bdi(self, name: str) -> None:
        directory = self.sysfs / "devices/virtual/bdi" / name
        directory.mkdir()
        (self.sysfs / "class/bdi" / name).symlink_to(f"../../devices/virtual/bdi/{name}")

    def btrfs(self, uuid: str, bdi: str, *devices: str) -> None:
        directory = self.sysfs / "fs/btrfs" / uuid
        (directory / "devices").mkdir(parents=True)
        for device in devices:
            (directory / "devices" / device).symlink_to(f"/nowhere/{device}")
        if bdi:
            (directory / "bdi").symlink_to(f"../../../devices/virtual/bdi/{bdi}")

    def mount(self, dev: str, root: str, point: str, fstype: str, source: str) -> None:
        self.mount_lines.append(
            f"{len(self.mount_lines) + 20} 1 {dev} {root} {point} rw,relatime shared:1 - {fstype} "
            f"{source} rw,data=ordered"
        )

    def swap(self, path: str, kind: str = "partition") -> None:
        self.swap_lines.append(f"{path}\t{kind}\t1048572\t\t0\t\t-2")

    def devices(self) -> Devices:
        return Devices(str(self.sysfs))

    def scrape(self, process: str = "1") -> Scrape:
        mountinfo = self.procfs / process / "mountinfo"
        mountinfo.write_text("".join(f"{line}\n" for line in self.mount_lines))
        (self.procfs / "swaps").write_text("".join(f"{line}\n" for line in self.swap_lines))
        hierarchy = Hierarchy(0, "/nowhere")
        host = Host(Cgroups(Hierarchies(hierarchy, hierarchy)), self.devices())
        settings = Settings(
            (), "/metrics", frozenset(), str(self.procfs), str(self.sysfs), "/nowhere"
        )
        collector, snapshot = DeviceInfo(), Snapshot()
        assert collector.open(settings, host, threading.Lock()) == []
        collector.fill(snapshot, host)
        collector.close()
        return Scrape(b"".join(render(snapshot, negotiate(""))).decode())


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def device(scrape: Scrape, name: str) -> dict[str, str]:
    """The labels of the device's one series that have a value, without its name."""
    (series,) = scrape.select("device_info", device=name)
    return {label: value for label, value in series if value and label != "device"}


def bdi(scrape: Scrape, name: str) -> tuple[str, str, str]:
    """(device, fstype, mountpoint)."""
    (series,) = scrape.select("bdi_info", bdi=name)
    labels = dict(series)
    return labels["device"], labels["fstype"], labels["mountpoint"]


def disks(scrape: Scrape, name: str) -> set[str]:
    return scrape.values("device_disk_info", "disk", device=name)


SCSI = "pci0000:00/0000:00:1f.2/ata1/host0/target0:0:0/0:0:0:0/block"


# Disks on disks ----------------------------------------------------------------------------------


def test_a_disk_and_its_partitions(machine: Machine) -> None:
    machine.disk(
        "sda", "8:0", SCSI, queue__rotational="1", queue__scheduler="none [mq-deadline] bfq"
    )
    machine.partition("sda", "sda1", "8:1")
    machine.partition("sda", "sda2", "8:2")
    machine.mount("8:1", "/", "/boot", "ext4", "/dev/sda1")
    machine.mount("8:2", "/", "/", "xfs", "/dev/sda2")
    scrape = machine.scrape()
    queue = {"rotational": "1", "scheduler": "mq-deadline"}
    assert device(scrape, "sda") == {"dev": "8:0", "kind": "disk", "disk": "sda", **queue}
    assert device(scrape, "sda1") == {
        "dev": "8:1",
        "kind": "partition",
        "disk": "sda",
        "fstype": "ext4",
        "mountpoint": "/boot",
        **queue,
    }
    assert disks(scrape, "sda") == disks(scrape, "sda1") == disks(scrape, "sda2") == {"sda"}
    # They have one BDI.
    assert bdi(scrape, "8:0") == ("sda", "ext4,xfs", "/,/boot")


def test_a_logical_volume(machine: Machine) -> None:
    machine.disk("sda", "8:0", SCSI)
    machine.partition("sda", "sda1", "8:1")
    machine.disk("sdb", "8:16", SCSI)
    machine.disk("dm-0", "252:0", dm__name="vg-data", dm__uuid="LVM-abcdef")
    machine.lies_on("dm-0", "sda1", "sdb")
    machine.mount("252:0", "/", "/data", "ext4", "/dev/mapper/vg-data")
    scrape = machine.scrape()
    assert device(scrape, "dm-0") == {
        "dev": "252:0",
        "kind": "lvm",
        "name": "vg-data",
        "disk": "dm-0",
        "parents": "sda1,sdb",
        "fstype": "ext4",
        "mountpoint": "/data",
        "rotational": "0",
        "scheduler": "none",
    }
    assert device(scrape, "sda1")["holders"] == device(scrape, "sdb")["holders"] == "dm-0"
    assert disks(scrape, "dm-0") == {"sda", "sdb"}
    assert bdi(scrape, "252:0") == ("dm-0", "ext4", "/data")
    assert bdi(scrape, "8:0") == ("sda", "", "")


def test_an_encrypted_volume_on_a_partition_of_a_multipath_disk(machine: Machine) -> None:
    machine.disk("sda", "8:0", SCSI)
    machine.disk("sdb", "8:16", SCSI)
    machine.disk("dm-0", "252:0", dm__name="mpatha", dm__uuid="mpath-3600a098")
    machine.disk("dm-1", "252:1", dm__name="mpatha1", dm__uuid="part1-mpath-3600a098")
    machine.disk("dm-2", "252:2", dm__name="secret", dm__uuid="CRYPT-LUKS2-0a-secret")
    machine.disk("dm-3", "252:3", dm__name="mine")
    machine.lies_on("dm-0", "sda", "sdb")
    machine.lies_on("dm-1", "dm-0")
    machine.lies_on("dm-2", "dm-1")
    scrape = machine.scrape()
    kinds = {name: device(scrape, name)["kind"] for name in ("dm-0", "dm-1", "dm-2", "dm-3")}
    assert kinds == {"dm-0": "mpath", "dm-1": "dm", "dm-2": "crypt", "dm-3": "dm"}
    assert disks(scrape, "dm-2") == disks(scrape, "dm-1") == {"sda", "sdb"}
    assert disks(scrape, "dm-3") == {"dm-3"}


def test_an_array_of_partitions_with_partitions(machine: Machine) -> None:
    machine.disk("sda", "8:0", SCSI)
    machine.disk("sdb", "8:16", SCSI)
    machine.partition("sda", "sda3", "8:3")
    machine.partition("sdb", "sdb3", "8:19")
    machine.disk("md127", "9:127", md__level="raid1")
    machine.partition("md127", "md127p1", "259:0")
    machine.lies_on("md127", "sda3", "sdb3")
    machine.mount("259:0", "/", "/srv", "ext4", "/dev/md127p1")
    scrape = machine.scrape()
    array = device(scrape, "md127")
    assert (array["kind"], array["name"], array["parents"]) == ("md", "raid1", "sda3,sdb3")
    assert device(scrape, "md127p1")["disk"] == "md127"
    assert disks(scrape, "md127p1") == {"sda", "sdb"}
    assert bdi(scrape, "9:127") == ("md127", "ext4", "/srv")


def test_disks_of_many_kinds(machine: Machine) -> None:
    machine.disk("loop0", "7:0", loop__backing_file="/var/lib/images/a b.img (deleted)")
    machine.disk("loop1", "7:1")
    machine.disk("nbd0", "43:0")
    machine.disk("ram0", "1:0")
    machine.disk("sr0", "11:0", SCSI)
    machine.disk("vda", "254:0", "pci0000:00/0000:00:02.0/virtio1/block")
    machine.disk("zram0", "253:0")
    machine.swap("/dev/zram0")
    scrape = machine.scrape()
    kinds = {dict(s)["device"]: dict(s)["kind"] for s in scrape.select("device_info")}
    assert kinds == {
        "loop0": "loop",
        "loop1": "loop",
        "nbd0": "nbd",
        "ram0": "ram",
        "sr0": "rom",
        "vda": "disk",
        "zram0": "zram",
    }
    assert device(scrape, "loop0")["name"] == "/var/lib/images/a b.img (deleted)"
    assert "name" not in device(scrape, "loop1")
    assert device(scrape, "zram0")["mountpoint"] == "[SWAP]"
    # What is swapped out is not written back through the disk's BDI.
    assert bdi(scrape, "253:0") == ("zram0", "", "")


def test_a_name_with_a_slash(machine: Machine) -> None:
    machine.disk("cciss!c0d0", "104:0", "pci0000:00/0000:00:03.0/cciss0/c0d0/block")
    machine.partition("cciss!c0d0", "cciss!c0d0p1", "104:1")
    machine.disk("dm-0", "252:0", dm__name="root", dm__uuid="LVM-x")
    machine.lies_on("dm-0", "cciss!c0d0p1")
    machine.swap("/dev/cciss/c0d0p1")
    scrape = machine.scrape()
    assert device(scrape, "cciss/c0d0")["dev"] == "104:0"
    partition = device(scrape, "cciss/c0d0p1")
    assert (partition["disk"], partition["holders"]) == ("cciss/c0d0", "dm-0")
    assert partition["mountpoint"] == "[SWAP]"
    assert device(scrape, "dm-0")["parents"] == "cciss/c0d0p1"
    assert disks(scrape, "dm-0") == {"cciss/c0d0"}
    assert machine.devices().name("104:1") == "cciss/c0d0p1"
    assert machine.devices().has_disk("cciss/c0d0", "104:0")


@pytest.mark.parametrize("above", ["virtual/nvme-subsystem/nvme-subsys1", "virtual/block"])
@pytest.mark.parametrize("linked", [True, False], ids=["6.15", "5.10"])
def test_paths_of_an_nvme_disk(machine: Machine, above: str, linked: bool) -> None:
    head = machine.disk("nvme1n2", "259:3", above)
    machine.partition("nvme1n2", "nvme1n2p1", "259:4")
    for controller in (0, 3):
        path = f"pci0000:00/0000:00:0{controller}.0/nvme/nvme{controller}"
        name = f"nvme1c{controller}n2"
        directory = machine.disk(name, "", path)
        if linked:
            (head / "multipath").mkdir(exist_ok=True)
            (head / "multipath" / name).symlink_to(directory)
    machine.disk("nvme5n1", "259:9", "pci0000:00/0000:00:05.0/nvme/nvme5")
    scrape = machine.scrape()
    path_labels = device(scrape, "nvme1c3n2")
    assert (path_labels["kind"], path_labels["disk"]) == ("path", "nvme1n2")
    assert path_labels["holders"] == "nvme1n2"
    assert "dev" not in path_labels
    assert device(scrape, "nvme1n2")["parents"] == "nvme1c0n2,nvme1c3n2"
    assert device(scrape, "nvme1n2p1")["disk"] == "nvme1n2"
    # Requests are those of the paths.
    assert disks(scrape, "nvme1n2") == disks(scrape, "nvme1n2p1") == {"nvme1c0n2", "nvme1c3n2"}
    assert disks(scrape, "nvme5n1") == {"nvme5n1"}
    assert "259:3" in scrape.values("bdi_info", "bdi")


def test_layers_that_change_while_they_are_read_come_to_an_end(machine: Machine) -> None:
    for name, dev in (("dm-0", "252:0"), ("dm-1", "252:1")):
        machine.disk(name, dev, dm__name=name)
    machine.lies_on("dm-0", "dm-1")
    machine.lies_on("dm-1", "dm-0")
    assert lowest("dm-0", machine.devices().block_devices()) == set()


# What is there, and what it is called ------------------------------------------------------------


def test_names_follow_what_is_plugged(machine: Machine) -> None:
    machine.disk("sda", "8:0", SCSI)
    devices = machine.devices()
    assert devices.name("8:0") == "sda"
    assert devices.name("8:16") is None
    machine.disk("sdb", "8:16", SCSI)
    assert devices.name("8:16") == "sdb"
    assert set(devices.block_devices()) == {"sda", "sdb"}
    machine.unplug("sda")
    assert set(devices.block_devices()) == {"sdb"}
    assert devices.name("8:0") is None


def test_a_number_that_another_disk_gets(machine: Machine) -> None:
    machine.disk("nvme0n1", "259:0", "pci0000:00/0000:00:04.0/nvme/nvme0")
    devices = machine.devices()
    assert devices.name("259:0") == "nvme0n1"
    (machine.sysfs / "keeps_the_inode").hardlink_to(machine.sysfs / "dev/block/259:0")
    machine.unplug("nvme0n1")
    (machine.sysfs / "devices/virtual/bdi/259:0").rmdir()
    (machine.sysfs / "class/bdi/259:0").unlink()
    machine.disk("pmem0", "259:0")
    assert devices.name("259:0") == "pmem0"
    assert set(devices.block_devices()) == {"pmem0"}


def test_what_changes_while_the_disks_stay(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    disk = machine.disk("sda", "8:0", SCSI)
    devices = machine.devices()
    assert devices.block_devices()["sda"].scheduler == "none"
    (disk / "queue/scheduler").write_text("none [bfq]\n")
    now[0] += 15
    assert devices.block_devices()["sda"].scheduler == "none"
    now[0] += 15
    assert devices.block_devices()["sda"].scheduler == "bfq"


def test_attributes_that_are_not_there(machine: Machine) -> None:
    directory = machine.disk("sda", "8:0", SCSI)
    for attribute in ("rotational", "scheduler", "iostats"):
        (directory / "queue" / attribute).unlink()
    for part in ("slaves", "holders"):
        (directory / part).rmdir()
    assert device(machine.scrape(), "sda") == {"dev": "8:0", "kind": "disk", "disk": "sda"}
    assert not machine.devices().has_disk_without_iostats()


def test_a_disk_without_iostats(machine: Machine) -> None:
    machine.disk("sda", "8:0", SCSI)
    devices = machine.devices()
    assert not devices.has_disk_without_iostats()
    machine.disk("sdb", "8:16", SCSI, queue__iostats="0")
    assert devices.has_disk_without_iostats()


def test_a_disk_whose_attributes_hang(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """To open a pipe that nobody writes to hangs as reading an attribute of a dead disk does."""
    # For those that answer, on a busy machine.
    for limit, seconds in (("_PATIENCE_SECONDS", 2), ("_LONGEST_SECONDS", 60)):
        monkeypatch.setattr(f"writeback_exporter.names.devices.{limit}", seconds)
    for index, name in enumerate(("sda", "sdb", "sdc")):
        machine.disk(name, f"8:{index * 16}", SCSI, queue__scheduler="[bfq] none")
    file = machine.sysfs / "block/sdb/queue/scheduler"
    file.unlink()
    os.mkfifo(file)
    devices = machine.devices()
    before = threading.active_count()
    found = devices.block_devices()
    schedulers = {name: device.scheduler for name, device in found.items()}
    assert schedulers == {"sda": "bfq", "sdb": "", "sdc": "bfq"}
    # It is left alone: no second thread hangs there.
    devices._read_at = float("-inf")
    assert devices.block_devices()["sdc"].scheduler == "bfq"
    assert threading.active_count() == before + 1
    with file.open("w") as pipe:  # it comes back
        pipe.write("[kyber]\n")
    for thread in devices._queues._hung.values():
        thread.join(10)
    file.unlink()
    file.write_text("[kyber] none\n")
    devices._read_at = float("-inf")
    assert devices.block_devices()["sdb"].scheduler == "kyber"
    assert threading.active_count() == before
    # What hangs later is as it was.
    file.unlink()
    os.mkfifo(file)
    devices._read_at = float("-inf")
    assert devices.block_devices()["sdb"].scheduler == "kyber"
    assert threading.active_count() == before + 1
    file.open("w").close()


# File systems ------------------------------------------------------------------------------------


def test_mounts_of_one_file_system() -> None:
    """Its own mount before binds of directories in it, and of these the shortest."""
    text = b"""\
30 1 8:1 /var/lib /a rw - ext4 /dev/sda1 rw
31 1 8:1 / /srv/data rw shared:1 master:2 - ext4 /dev/sda1 rw
32 1 8:1 / /srv/copy rw - ext4 /dev/sda1 rw
33 1 8:1 / /srv rw - ext4 /dev/sda1 rw
34 1 8:2 /only/a/part /in/a/container rw - xfs /dev/sda2 rw
35 1 8:2 /etc/hosts /etc/hosts rw - xfs /dev/sda2 rw
36 1 0:40 /@home /home rw - btrfs /dev/sda3 rw,subvol=/@home
37 1 0:40 /@ / rw - btrfs /dev/sda3 rw,subvol=/@
"""
    assert parse(text) == {
        "8:1": Mount("ext4", "/dev/sda1", "/srv"),
        "8:2": Mount("xfs", "/dev/sda2", "/etc/hosts"),
        "0:40": Mount("btrfs", "/dev/sda3", "/"),
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            r"9 1 0:52 / /mnt/a\040b\011c\012d\134e\043 rw - nfs4 server:/export\040dir rw",
            Mount("nfs4", "server:/export dir", "/mnt/a b\tc\nd\\e#"),
        ),
        ("9 1 8:1 / /caf\u00e9 rw - xfs /dev/sda1 rw", Mount("xfs", "/dev/sda1", "/caf\u00e9")),
        ("9 1 8:1 / /caf\udce9 rw - xfs /dev/sda1 rw", Mount("xfs", "/dev/sda1", "/caf\\xe9")),
        ("9 1 0:55 / /x rw - 9p  rw", Mount("9p", "", "/x")),
        (
            "9 1 8:1 / /m rw,relatime shared:3 master:9 propagate_from:2 - ext4 /dev/sda1 rw",
            Mount("ext4", "/dev/sda1", "/m"),
        ),
        (
            "9 1 0:57 / /net rw shared:7 - autofs /etc/auto.net rw,fd=6,pgrp=1,timeout=0",
            Mount("autofs", "/etc/auto.net", "/net"),
        ),
        (
            "9 1 0:58 / /home/u/.gvfs rw - fuse.gvfsd-fuse gvfsd-fuse rw,user_id=1000",
            Mount("fuse.gvfsd-fuse", "gvfsd-fuse", "/home/u/.gvfs"),
        ),
    ],
)
def test_a_line_of_mountinfo(text: str, expected: Mount) -> None:
    assert list(parse(text.encode("utf-8", "surrogateescape")).values()) == [expected]


def test_the_mounts_of_a_host_of_containers() -> None:
    lines = ["22 1 8:1 / / rw - ext4 /dev/sda1 rw"]
    for i in range(2500):
        lines += [
            f"{i + 100} 22 0:{i + 60} / /run/overlay/{i}/merged rw - overlay overlay rw",
            f"{i + 4000} 22 0:{i + 9000} / /pods/{i}/token rw shared:{i} - tmpfs tmpfs rw",
            f"{i + 8000} 22 0:4 net:[{i + 4026532281}] /run/netns/{i} rw shared:{i} - nsfs nsfs rw",
            f"{i + 12000} 22 8:1 /v/{i} /pods/{i}/v rw shared:{i} - ext4 /dev/sda1 rw",
        ]
    lines.append("20000 22 0:20000 / /pods/9/nfs rw shared:9 - nfs4 server:/9 rw")
    assert parse("\n".join(lines).encode()) == {
        "8:1": Mount("ext4", "/dev/sda1", "/"),
        "0:20000": Mount("nfs4", "server:/9", "/pods/9/nfs"),
    }


def test_file_systems_without_a_disk(machine: Machine) -> None:
    machine.disk("sda", "8:0", SCSI)
    machine.partition("sda", "sda1", "8:1")
    machine.bdi("0:50")
    machine.mount("0:50", "/", "/mnt/nfs", "nfs4", "server:/export")
    machine.bdi("0:51")
    machine.mount("0:51", "/", "/mnt/fuse", "fuse.sshfs", "host:")
    machine.bdi("0:77")  # of a mount that only another namespace sees
    machine.bdi("8:1-fuseblk")
    machine.mount("8:1", "/", "/mnt/windows", "fuseblk", "/dev/sda1")
    machine.bdi("9p-1")
    machine.mount("0:60", "/", "/mnt/host", "9p", "share")
    for number in (2, 3):
        machine.bdi(f"cifs-{number}")
        machine.mount(f"0:7{number}", "/", f"/mnt/{number}", "cifs", "//server/share")
    machine.bdi("mtd-0")
    machine.bdi("ubifs_0_1")
    machine.mount("0:80", "/", "/flash", "ubifs", "ubi0:data")
    scrape = machine.scrape()
    assert bdi(scrape, "0:50") == ("", "nfs4", "/mnt/nfs")
    assert bdi(scrape, "0:51") == ("", "fuse.sshfs", "/mnt/fuse")
    assert bdi(scrape, "0:77") == ("", "", "")
    assert bdi(scrape, "8:1-fuseblk") == ("sda1", "fuseblk", "/mnt/windows")
    assert bdi(scrape, "9p-1") == ("", "9p", "/mnt/host")
    assert bdi(scrape, "cifs-2") == bdi(scrape, "cifs-3") == ("", "cifs", "")  # which is which?
    assert bdi(scrape, "mtd-0") == ("", "mtd", "")
    assert bdi(scrape, "ubifs_0_1") == ("", "ubifs", "/flash")
    assert bdi(scrape, "8:0") == ("sda", "fuseblk", "/mnt/windows")


@pytest.mark.parametrize("linked", [True, False], ids=["link", "no link"])
def test_btrfs_on_several_disks(machine: Machine, linked: bool) -> None:
    for index, name in enumerate(("vdb", "vdc", "vdd")):
        machine.disk(name, f"254:{16 * (index + 1)}")
    machine.disk("dm-0", "252:0", dm__name="vg-b", dm__uuid="LVM-x")
    (machine.sysfs / "fs/btrfs/features").mkdir()
    machine.btrfs("0a1b-2c-3d-4e-5f", "btrfs-1" if linked else "", "vdb", "vdc")
    machine.bdi("btrfs-1")
    # Its number is no disk's; the second device was named when it was mounted.
    machine.mount("0:40", "/@home", "/home", "btrfs", "/dev/vdc")
    machine.mount("0:40", "/@", "/b", "btrfs", "/dev/vdc")
    if linked:
        machine.btrfs("1a1b-2c-3d-4e-5f", "btrfs-2", "dm-0")
        machine.bdi("btrfs-2")
        machine.mount("0:41", "/", "/volume", "btrfs", "/dev/mapper/vg-b")
    scrape = machine.scrape()
    for name in ("vdb", "vdc"):
        labels = device(scrape, name)
        assert (labels["fstype"], labels["mountpoint"]) == ("btrfs", "/b")
    assert "fstype" not in device(scrape, "vdd")
    if linked:
        assert bdi(scrape, "btrfs-1") == ("vdb,vdc", "btrfs", "/b")
        assert bdi(scrape, "btrfs-2") == ("dm-0", "btrfs", "/volume")
    else:
        assert bdi(scrape, "btrfs-1") == ("", "btrfs", "/b")
    # It is not through the BDI of its disk that it writes back.
    assert bdi(scrape, "254:16") == ("vdb", "", "")


def test_swap(machine: Machine) -> None:
    machine.disk("dm-0", "252:0", dm__name="vg-swap", dm__uuid="LVM-x")
    machine.disk("dm-1", "252:1", dm__name="other", dm__uuid="LVM-x")
    machine.swap("/dev/mapper/vg-swap")
    machine.swap("/swap\\040file", "file")
    scrape = machine.scrape()
    assert device(scrape, "dm-0")["fstype"] == "swap"
    assert "fstype" not in device(scrape, "dm-1")
    (machine.procfs / "swaps").unlink()
    assert swaps(str(machine.procfs)) == []


def test_mounts_of_self_where_those_of_init_are_not_to_be_had(machine: Machine) -> None:
    machine.disk("sda", "8:0", SCSI)
    machine.mount("8:0", "/", "/mine", "ext4", "/dev/sda")
    (machine.procfs / "1").rename(machine.procfs / "self")
    assert device(machine.scrape("self"), "sda")["mountpoint"] == "/mine"


def test_without_procfs(machine: Machine) -> None:
    hierarchy = Hierarchy(0, "/nowhere")
    host = Host(Cgroups(Hierarchies(hierarchy, hierarchy)), machine.devices())
    settings = Settings((), "/metrics", frozenset(), "/nowhere", str(machine.sysfs), "/nowhere")
    with pytest.raises(Refused, match="cannot open /nowhere/self/mountinfo: No such file"):
        DeviceInfo().open(settings, host, threading.Lock())
