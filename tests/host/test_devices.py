# SPDX-License-Identifier: Apache-2.0
"""The devices of this machine, as lsblk and the kernel's other files have them."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from tests import lab
from tests.lab import Disk
from writeback_exporter.names.devices import Devices

MIB = 1 << 20


def labels(scrape: lab.Scrape, disk: str) -> dict[str, str]:
    (series,) = scrape.select("device_info", device=disk)
    return dict(series)


def lsblk() -> dict[str, dict[str, str]]:
    """What util-linux knows of each device, by its kernel name."""
    columns = "KNAME,MAJ:MIN,TYPE,PKNAME,ROTA,SCHED,MOUNTPOINT"
    found = {}
    for line in lab.sh("lsblk", "--all", "--pairs", "--output", columns).splitlines():
        # util-linux 2.39 writes MAJ_MIN.
        row = dict(field.split("=", 1) for field in shlex.split(line.replace("MAJ_MIN", "MAJ:MIN")))
        found[row["KNAME"]] = row
    return found


def test_devices_are_those_of_lsblk(exporter: lab.Exporter, disk: Disk) -> None:
    for number in map(str, range(1, 11)):  # another partition is why it looks again at all disks
        lab.sh("addpart", disk.path, number, "2048", "65536")
        try:
            before = lsblk()
            text = Path("/proc/diskstats").read_text()
            scrape = exporter.scrape()
            after = lsblk()
        finally:
            lab.sh("delpart", disk.path, number)
        # Else a disk did not tell of its queue in time.
        if all(dict(series)["rotational"] for series in scrape.select("device_info")):
            break
    partition = f"{disk.name}p{number}"
    numbered = re.findall(r"^ +(\d+) +(\d+) (\S+)", text, re.M)
    stats = {name: f"{major}:{minor}" for major, minor, name in numbered}
    # Others may plug and mount their own meanwhile.
    steady = {name: row for name, row in before.items() if after.get(name) == row}
    assert {disk.name, partition} <= steady.keys()
    for name, row in steady.items():
        one = labels(scrape, name)
        assert stats[name] == one["dev"] == row["MAJ:MIN"]
        assert (one["kind"] == "partition") == (row["TYPE"] == "part")
        assert (one["kind"] == "loop") == (row["TYPE"] == "loop")
        if row["TYPE"] == "part":
            assert one["disk"] == row["PKNAME"]
        assert (one["rotational"], one["scheduler"]) == (row["ROTA"], row["SCHED"]), name
        assert one["mountpoint"] == row["MOUNTPOINT"]
    assert scrape.values("device_info", "device") >= steady.keys()
    assert labels(scrape, partition)["disk"] == disk.name
    assert scrape.values("device_disk_info", "disk", device=partition) == {disk.name}
    assert scrape.values("bdi_info", "device", bdi=disk.dev) == {disk.name}


def test_each_bdi_has_a_series(exporter: lab.Exporter) -> None:
    before = set(os.listdir("/sys/class/bdi"))
    scrape = exporter.scrape()
    steady = before & set(os.listdir("/sys/class/bdi"))
    series = [dict(labels)["bdi"] for labels in scrape.select("bdi_info")]
    assert len(series) == len(set(series))
    assert steady <= set(series)


def test_a_file_system_comes_and_goes(exporter: lab.Exporter, disk: Disk, tmp_path: Path) -> None:
    def where(name: str, **wanted: str) -> set[tuple[str, str]]:
        return {
            (dict(series)["fstype"], dict(series)["mountpoint"])
            for series in exporter.scrape().select(name, **wanted)
        }

    def both() -> list[set[tuple[str, str]]]:
        return [where("device_info", device=disk.name), where("bdi_info", bdi=disk.dev)]

    assert both() == [{("", "")}] * 2
    directory = tmp_path / "a b\\c"
    directory.mkdir()
    with lab.ext4(disk, directory) as mount:
        assert both() == [{("ext4", str(mount))}] * 2
        bind = tmp_path / "b"  # shorter, but a part of it
        bind.mkdir()
        lab.sh("mount", "--bind", mount / "lost+found", bind)
        try:
            assert both() == [{("ext4", str(mount))}] * 2
        finally:
            lab.sh("umount", bind)
    assert both() == [{("", "")}] * 2


def test_the_file_of_a_loop_device(disk: Disk, tmp_path: Path) -> None:
    """The exporter starts after it came: else it is known after half a minute."""
    with lab.Exporter() as exporter:
        assert labels(exporter.scrape(), disk.name)["name"] == str(tmp_path / "image")


def test_names_of_numbers(disk: Disk) -> None:
    devices = Devices("/sys")
    assert devices.name(disk.dev) == disk.name
    assert devices.name("511:511") is None
