# SPDX-License-Identifier: Apache-2.0
"""IO through layers of disks, and writeback to a file system that has no disk: what is counted
where, and that devices' and BDIs' infos join it."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import lab
from tests.lab import DIRECT_READER, DIRECT_WRITER, Disk
from tests.waiting import PATIENCE_SECONDS, wait_for

from . import fuse
from .kernel import dirty_limits, ftrace, pauses, write_until_throttled
from .test_main_signals import FAST, MIB, SLOW, io_stat

COLLECTORS = lab.only("block_io", "dirty_throttle", "devices")


@contextmanager
def mapped(*disks: Disk, target: str = "linear {path} 0") -> Iterator[Disk]:
    """A device mapper's disk over these, one after the other."""
    lab.sh("modprobe", "dm-mod")
    start, table = 0, []
    for disk in disks:
        sectors = int(Path("/sys/block", disk.name, "size").read_text())
        table.append(f"{start} {sectors} {target.format(path=disk.path)}")
        start += sectors
    # There is no udev that would make a link in /dev/mapper.
    lab.sh("dmsetup", "create", "joined", "--noudevsync", "--table", "\n".join(table))
    number = lab.sh("dmsetup", "info", "-c", "--noheadings", "-o", "minor", "joined")
    try:
        yield Disk(f"/dev/dm-{number}")
    finally:
        lab.sh("dmsetup", "remove", "--noudevsync", "--retry", "joined")


_ARRAYS = itertools.count()
"""Each has a name of its own: one that is gone keeps it for a while (7.3)."""


@contextmanager
def mirror(*disks: Disk) -> Iterator[Disk]:
    """An md raid1 of these without any metadata, made as mdadm --build does."""
    lab.sh("modprobe", "raid1")
    name = f"md_test{next(_ARRAYS)}"
    Path("/sys/module/md_mod/parameters/new_array").write_text(name)
    md = Path("/sys/block", name, "md")

    def write(name: str, value: str) -> None:
        (md / name).write_text(value)

    write("metadata_version", "none")
    write("level", "raid1")
    write("raid_disks", str(len(disks)))
    sectors = int(Path("/sys/block", disks[0].name, "size").read_text())
    write("component_size", str(sectors // 2))  # in KiB
    for slot, disk in enumerate(disks):
        write("new_dev", disk.dev)
        write(f"dev-{disk.name}/slot", str(slot))
    write("resync_start", "none")  # nothing to copy, which would be IO as well
    write("array_state", "active")
    try:
        os.close(os.open(f"/dev/{name}", os.O_RDONLY))  # who is first reads the partition table
        yield Disk(f"/dev/{name}")
    finally:
        write("array_state", "clear")


def info(scrape: lab.Scrape, name: str, **labels: str) -> dict[str, str]:
    (series,) = scrape.select(name, **labels)
    return dict(series)


def counted(scrape: lab.Scrape, disk: Disk, op: str, cgroup: str) -> tuple[float, float]:
    """(requests, bytes)."""
    labels = {"device": disk.name, "op": op, "cgroup": cgroup}
    return (
        scrape.sum("block_io_size_bytes_count", **labels),
        scrape.sum("block_io_size_bytes_sum", **labels),
    )


def test_direct_io_through_device_mapper() -> None:
    with (
        lab.Exporter(*COLLECTORS) as exporter,
        mapped(SLOW, FAST) as volume,
        lab.cgroup(lab.hierarchies().io, "mapped") as group,
    ):
        before = SLOW.settled(), FAST.settled()
        for offset in (0, 64 * MIB):
            lab.run_in([group], DIRECT_WRITER, volume.path, 4096, 30, offset)
            lab.run_in([group], DIRECT_READER, volume.path, 4096, 20, offset)
        slow, fast = SLOW.settled() - before[0], FAST.settled() - before[1]
        scrape = exporter.scrape()
        for disk, truth in ((SLOW, slow), (FAST, fast)):
            assert counted(scrape, disk, "write", "/mapped") == (30, 30 * 4096)
            assert counted(scrape, disk, "read", "/mapped") == (20, 20 * 4096)
            assert (truth.writes, truth.reads) == (30, 20)
        # It has no requests of its own.
        assert not scrape.select("block_io_size_bytes_count", device=volume.name)
        disks = scrape.values("device_disk_info", "disk", device=volume.name)
        assert disks == {SLOW.name, FAST.name}
        labels = info(scrape, "device_info", device=volume.name)
        assert (labels["kind"], labels["name"]) == ("dm", "joined")
        assert labels["parents"] == f"{SLOW.name},{FAST.name}"
        assert labels["dev"] == volume.dev
        assert info(scrape, "device_info", device=FAST.name)["holders"] == volume.name


def test_a_writer_that_is_throttled_above_the_disk(tmp_path: Path) -> None:
    """The limit is of the BDI of the volume, the requests are those of the disk below."""
    with (
        mapped(SLOW) as volume,
        lab.ext4(volume, tmp_path) as mount,
        lab.Exporter(*COLLECTORS) as exporter,
        lab.cgroup(lab.hierarchies().io, "above") as group,
        dirty_limits(MIB, 2 * MIB),
    ):
        with ftrace("writeback/balance_dirty_pages") as trace:
            size = write_until_throttled([group], mount / "file", 6 * MIB, lambda: pauses(trace))
        lab.sh("sync", "-f", mount)
        scrape = exporter.scrape()
        throttled = {
            (dict(series)["cgroup"], dict(series)["bdi"]): count
            for series, count in scrape.select("dirty_throttle_seconds_count").items()
        }
        assert throttled == {("/above", volume.dev): pauses(trace)}

        joined = info(scrape, "bdi_info", bdi=volume.dev)
        assert (joined["device"], joined["mountpoint"]) == (volume.name, str(mount))
        assert scrape.values("device_disk_info", "disk", device=volume.name) == {SLOW.name}
        own = io_stat(group, SLOW)
        assert own["wbytes"] >= size
        assert counted(scrape, SLOW, "write", "/above")[1] == own["wbytes"]
        assert not scrape.select("block_io_size_bytes_count", device=volume.name)


def test_direct_io_to_a_mirror() -> None:
    with (
        lab.Exporter(*COLLECTORS) as exporter,
        mirror(SLOW, FAST) as array,
        lab.cgroup(lab.hierarchies().io, "mirrored") as group,
    ):
        lab.run_in([group], DIRECT_WRITER, array.path, 4096, 30, 0)
        lab.run_in([group], DIRECT_READER, array.path, 4096, 20, 0)
        scrape = exporter.scrape()
        reads = 0.0
        for disk in (SLOW, FAST):
            assert counted(scrape, disk, "write", "/mirrored") == (30, 30 * 4096)
            reads += counted(scrape, disk, "read", "/mirrored")[0]
        assert reads == 20
        labels = info(scrape, "device_info", device=array.name)
        assert (labels["kind"], labels["name"], labels["dev"]) == ("md", "raid1", array.dev)
        assert labels["parents"] == f"{SLOW.name},{FAST.name}"


def test_buffered_io_to_a_mirror(tmp_path: Path) -> None:
    with (
        mirror(SLOW, FAST) as array,
        lab.ext4(array, tmp_path) as mount,
        lab.Exporter(*COLLECTORS) as exporter,
        lab.cgroup(lab.hierarchies().io, "mirrored") as group,
        dirty_limits(MIB, 2 * MIB),
    ):
        size = write_until_throttled(
            [group],
            mount / "file",
            4 * MIB,
            lambda: exporter.scrape().sum("dirty_throttle_seconds_count", cgroup="/mirrored"),
        )
        lab.sh("sync", "-f", mount)
        scrape = exporter.scrape()
        for disk in (SLOW, FAST):
            assert counted(scrape, disk, "write", "/mirrored")[1] >= size
            own = io_stat(group, disk)["wbytes"]
            assert counted(scrape, disk, "write", "/mirrored")[1] == own
        throttled = scrape.values("dirty_throttle_seconds_count", "bdi", cgroup="/mirrored")
        assert throttled == {array.dev}
        joined = info(scrape, "bdi_info", bdi=array.dev)
        assert (joined["device"], joined["mountpoint"]) == (array.name, str(mount))


def test_a_fuse_file_system_that_is_slow(tmp_path: Path) -> None:
    """Its BDI has a strict limit of its own: 1 % of the global one (fs/fuse/inode.c)."""
    directory = tmp_path / "fuse mount"
    directory.mkdir()
    with lab.Exporter(*COLLECTORS) as exporter, lab.cgroup(lab.hierarchies().io, "fuse") as group:
        assert not exporter.scrape().select("bdi_info", fstype="fuse")
        with fuse.mounted(directory, seconds=0.01) as served:
            status = directory.stat().st_dev
            bdi = f"{os.major(status)}:{os.minor(status)}"
            with ftrace("writeback/balance_dirty_pages") as trace:
                size = write_until_throttled(
                    [group], directory / "file", 8 * MIB, lambda: pauses(trace, bdi)
                )
            lab.sh("sync", "-f", directory / "file")
            scrape = exporter.scrape()
            labels = {"cgroup": "/fuse", "bdi": bdi}
            throttles = scrape.sum("dirty_throttle_seconds_count", **labels)
            assert throttles == pauses(trace, bdi)
            domains = {
                domain: scrape.sum("dirty_throttle_domain_total", bdi=bdi, domain=domain)
                for domain in ("global", "bdi", "memcg")
            }
            assert domains == {"global": 0, "bdi": throttles, "memcg": 0}
            joined = info(scrape, "bdi_info", bdi=bdi)
            assert joined["fstype"] == "fuse"
            assert joined["mountpoint"] == str(directory)
            assert joined["device"] == ""
            lab.sh("umount", directory)
            assert served.written() == size
            assert not exporter.scrape().select("bdi_info", bdi=bdi)


def test_a_disk_whose_attributes_hang(tmp_path: Path) -> None:
    """Who switches the scheduler of a disk whose requests do not end holds its queue's lock: who
    reads an attribute waits for it in vain, and a scrape must not."""
    directory = tmp_path / "mount"
    directory.mkdir()
    with lab.Exporter() as exporter, fuse.mounted(directory, seconds=0) as served:
        (directory / "file").write_bytes(bytes(MIB))
        disk = Disk(lab.sh("losetup", "--find", "--show", directory / "file"))
        queue = Path("/sys/block", disk.name, "queue")
        available = (queue / "scheduler").read_text().split()
        other = next((name for name in available if not name.startswith("[")), None)
        if other is None:
            pytest.skip("this kernel has no second scheduler")
        before = info(exporter.scrape(), "device_info", device=disk.name)
        assert f"[{before['scheduler']}]" in available
        waiting = []

        def start(mode: str, call: str, *arguments: object) -> subprocess.Popen[str]:
            """Returns when only the call is left: a process that starts waits for disks too."""
            code = f"file = open(arguments[0], {mode!r}, 0); print('opened', flush=True); {call}"
            process = lab.spawn_in([], code, *arguments)
            waiting.append(process)
            assert process.stdout
            assert process.stdout.readline() == "opened\n"
            return process

        with served.stopped():
            flush = start("r+b", "os.fsync(file.fileno())", disk.path)
            wait_for(lambda: sleeps(flush))
            switch = start("wb", "file.write(arguments[1].encode())", queue / "scheduler", other)
            wait_for(lambda: sleeps(switch))
            reader = start("rb", "file.read()", queue / "scheduler")
            wait_for(lambda: reader.poll() is not None or sleeps(reader))
            with mapped(FAST) as volume:  # with a new disk all attributes are read again
                for _ in range(2):
                    # Its time limit is 30 s, and what it would wait for comes after them.
                    scrape = exporter.scrape()
                    assert info(scrape, "device_info", device=volume.name)["dev"] == volume.dev
                    assert info(scrape, "device_info", device=disk.name) == before
                    assert all(scrape.select("exporter_collector_success").values())
            hangs = reader.poll() is None
        for process in waiting:
            process.communicate(timeout=PATIENCE_SECONDS)
            assert process.returncode == 0
        print(f"reading a queue's attribute {'hangs' if hangs else 'does not hang'} here")
        lab.sh("losetup", "--detach", disk.path)


def sleeps(process: subprocess.Popen[str]) -> bool:
    """Whether it waits and no signal ends that."""
    state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2]
    return state.startswith("D")
