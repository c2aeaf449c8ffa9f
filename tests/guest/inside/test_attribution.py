# SPDX-License-Identifier: Apache-2.0
"""Whose IO it is. What is counted of each cgroup equals the kernel's io.stat, and all together,
the root's own IO and flushes too, equals /proc/diskstats: in requests and in bytes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests import lab
from tests.lab import BUFFERED_WRITER, DIRECT_READER, DIRECT_WRITER, Cgroup, Disk, Scrape
from tests.waiting import wait_for

from .kernel import NEVER, TRACING, Calls, again_if_missed, dirty_limits, ftrace, missed, pauses
from .test_main_signals import FAST, MIB, SLOW, io_stat

ROOT = Path("/sys/fs/cgroup")
FSYNC = "\nos.fsync(fd)\n"
NOTHING = (0, 0)
IN_IO_STAT = {"rbytes": ("read",), "wbytes": ("write", "other"), "dbytes": ("discard",)}


@pytest.fixture(scope="module")
def exporter() -> Iterator[lab.Exporter]:
    """One for all: it takes seconds to start here."""
    with lab.Exporter(*lab.only("block_io", "dirty_throttle")) as running:
        yield running


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Iterator[Cgroup]:
    """Each test's own."""
    name = re.sub(r"\W+", "-", request.node.name).strip("-")
    with lab.cgroup(lab.hierarchies().io, name) as made:
        yield made


def scrape(exporter: lab.Exporter) -> Scrape:
    """Without buckets, which are most of the text: to parse them takes seconds here."""
    lines = exporter.get("/metrics").decode().splitlines(keepends=True)
    return Scrape("".join(line for line in lines if "_bucket{" not in line))


@dataclass
class Books:
    """What the exporter counted, by device, op and cgroup, and the kernel by disk."""

    counts: dict[tuple[str, str, str], tuple[int, int]] = field(default_factory=dict)
    truth: dict[Disk, lab.DiskStats] = field(default_factory=dict)

    def of(self, disk: Disk, *ops: str) -> dict[str, tuple[int, int]]:
        """(requests, bytes) by cgroup."""
        found: dict[str, tuple[int, int]] = {}
        for (device, op, cgroup), (requests, size) in self.counts.items():
            if device == disk.name and op in ops and requests:
                before = found.get(cgroup, NOTHING)
                found[cgroup] = before[0] + requests, before[1] + size
        return found

    def all(self, disk: Disk, *ops: str) -> tuple[int, int]:
        found = self.of(disk, *ops).values()
        return sum(requests for requests, _ in found), sum(size for _, size in found)


@contextmanager
def books(
    exporter: lab.Exporter,
    *disks: Disk,
    groups: Sequence[Cgroup] = (),
    lower: Sequence[Disk] = (),
) -> Iterator[Books]:
    """Filled at the end, and compared with what the kernel counted meanwhile on these disks: by
    `groups`, which are all that do IO there but for the root. Disks that are `lower` are as much at
    rest as these at both ends, and it is for the test to compare them."""

    def at_rest() -> tuple[list[lab.DiskStats], list[dict[str, int]], Scrape]:
        lab.sh("sync")
        for _ in range(30):
            stats = [disk.settled() for disk in (*disks, *lower)]
            files = [io_stat(group, disk) for disk in disks for group in groups]
            seen = scrape(exporter)
            # ext4 reads bitmaps for a while after it was mounted.
            if stats == [disk.settled() for disk in (*disks, *lower)]:
                return stats, files, seen
        raise AssertionError("the disks are never at rest")

    made = Books()
    stats_before, files_before, before = at_rest()
    with bios_without_data() as empty:
        yield made
        stats, files, after = at_rest()
    for series, requests in after.select("block_io_size_bytes_count").items():
        labels = dict(series)
        size = after.select("block_io_size_bytes_sum")[series]
        made.counts[labels["device"], labels["op"], labels["cgroup"]] = (
            int(requests - before.select("block_io_size_bytes_count").get(series, 0)),
            int(size - before.select("block_io_size_bytes_sum").get(series, 0)),
        )
    assert missed(after, "") == missed(before, "")
    assert not any(after.select("exporter_map_dropped_total").values())
    for disk, earlier, now in zip((*disks, *lower), stats_before, stats, strict=True):
        made.truth[disk] = now - earlier
    for disk in disks:
        truth = made.truth[disk]
        assert made.all(disk, "read") == (truth.reads, truth.read_bytes)
        # A bio that is nothing but a flush is a write there; here what it brings about is a flush.
        writes = truth.writes - empty.count(disk.dev)
        assert made.all(disk, "write", "other") == (writes, truth.written_bytes)
        assert made.all(disk, "discard") == (truth.discards, truth.discarded_bytes)
        assert made.all(disk, "flush") == (truth.flushes, 0)
        assert set(made.of(disk, "flush")) <= {"unattributed"}
        owners = made.of(disk, "read", "write", "other", "discard").keys()
        assert {"/"} | owners == {"/"}.union(*(below(group, owners) for group in groups))
        for group in groups:
            earlier_file, file = files_before.pop(0), files.pop(0)
            for key, ops in IN_IO_STAT.items():
                found = made.of(disk, *ops)
                size = sum(found[label][1] for label in below(group, found))
                assert size == file.get(key, 0) - earlier_file.get(key, 0), (disk, group, key)


def below(group: Cgroup, labels: Iterable[str]) -> set[str]:
    """Itself and its children, whose IO is in its io.stat."""
    return {label for label in labels if f"{label}/".startswith(f"{group.label}/")}


@contextmanager
def bios_without_data() -> Iterator[list[str]]:
    """The "MAJOR:MINOR" of each one's disk, in the end, from a trace of its own."""
    trace = TRACING / "instances/bios"
    trace.mkdir()
    try:
        event = trace / "events/block/block_bio_queue"
        (event / "filter").write_text("nr_sector == 0")
        (event / "enable").write_text("1")
        disks: list[str] = []
        yield disks
        for disk in re.findall(r" block_bio_queue: (\d+,\d+) ", (trace / "trace").read_text()):
            disks.append(disk.replace(",", ":"))
    finally:
        trace.rmdir()


def throttles(exporter: lab.Exporter, disk: Disk) -> dict[str, int]:
    counts = scrape(exporter).select("dirty_throttle_seconds_count", bdi=disk.dev)
    return {dict(series)["cgroup"]: int(count) for series, count in counts.items()}


@pytest.mark.parametrize("control", ["+memory -io", "+io -memory"])
@again_if_missed
def test_controllers(exporter: lab.Exporter, tmp_path: Path, control: str) -> None:
    """The io controller decides whose IO it is, and brings memory along, which writeback needs.
    Throttling is the task's in any case, and what the root's tasks do is the root's."""
    with (
        controllers(control),
        lab.cgroup(lab.hierarchies().io, control.replace(" ", "")) as group,
        lab.ext4(SLOW, tmp_path) as mount,
        dirty_limits(MIB // 2, MIB),
    ):
        groups = [group] if "+io" in control else []
        throttled = throttles(exporter, SLOW)
        with books(exporter, SLOW, FAST, groups=groups) as counted:
            with ftrace("writeback/balance_dirty_pages") as trace:
                lab.run_in([group], BUFFERED_WRITER, mount / "group", 4 * MIB)
                by_group = pauses(trace)
                lab.run_in([], BUFFERED_WRITER, mount / "root", 4 * MIB)
                by_all = pauses(trace)
            lab.run_in([group], DIRECT_WRITER, FAST.path, 4096, 20, 0)
            lab.run_in([], DIRECT_WRITER, FAST.path, 8192, 10, 0)
        now = throttles(exporter, SLOW)
    grown = {cgroup: count - throttled.get(cgroup, 0) for cgroup, count in now.items()}
    assert grown.pop("/") == by_all - by_group > 0
    assert grown.pop(group.label) == by_group > 0
    assert not any(grown.values())
    if groups:
        direct = {group.label: (20, 20 * 4096), "/": (10, 10 * 8192)}
        assert counted.of(SLOW, "write")[group.label][1] == 4 * MIB
        assert counted.of(SLOW, "write")["/"][1] >= 4 * MIB
    else:
        direct = {"/": (30, 20 * 4096 + 10 * 8192)}
    assert counted.of(FAST, "write") == direct


@contextmanager
def controllers(control: str) -> Iterator[None]:
    file = ROOT / "cgroup.subtree_control"
    file.write_text(control)
    try:
        yield
    finally:
        file.write_text("+io +memory")


IN_A_NAMESPACE = """
import ctypes
CLONE_NEWCGROUP = 0x02000000
assert ctypes.CDLL(None).unshare(CLONE_NEWCGROUP) == 0
print(open("/proc/self/cgroup").read())
"""


@again_if_missed
def test_a_writer_in_a_cgroup_namespace(exporter: lab.Exporter, group: Cgroup) -> None:
    """To itself it is in the root."""
    with books(exporter, FAST, groups=[group]) as counted:
        code = IN_A_NAMESPACE + DIRECT_WRITER
        assert lab.run_in([group], code, FAST.path, 4096, 20, 0).split() == ["0::/"]
    assert counted.of(FAST, "write") == {group.label: (20, 20 * 4096)}


@again_if_missed
def test_writeback_for_a_cgroup_that_is_gone(
    exporter: lab.Exporter, group: Cgroup, tmp_path: Path
) -> None:
    """It is still the owner of the inode. Its parent's io.stat is all that shows it."""
    (group.directory / "cgroup.subtree_control").write_text("+io +memory")
    gone = Cgroup(group.directory / "gone", f"{group.label}/gone")
    gone.directory.mkdir()
    with (
        lab.ext4(FAST, tmp_path) as mount,
        dirty_limits(400 * MIB, 500 * MIB, interval=NEVER),
        books(exporter, FAST, groups=[group]) as counted,
    ):
        lab.run_in([gone], BUFFERED_WRITER, mount / "file", 4 * MIB)
        owner, inode = gone.id, (mount / "file").stat().st_ino
        wait_for(lambda: lab.removed(gone.directory))
        with ftrace("writeback/writeback_single_inode") as trace:
            lab.sh("sync")
        # The journal's commit has made other inodes dirty, for the root.
        of_file = rf" ino={inode} .* cgroup_ino=(\d+)"
        assert set(re.findall(of_file, trace.read_text())) == {str(owner)}
    assert counted.of(FAST, "write")[gone.label][1] == 4 * MIB
    assert group.label not in counted.of(FAST, "write")


APPENDER = """
fd = os.open(arguments[0], os.O_WRONLY | os.O_APPEND)
for _ in range(int(arguments[1])):
    os.write(fd, bytes(1 << 20))
    os.fsync(fd)
"""


@again_if_missed
def test_a_file_of_two_cgroups(exporter: lab.Exporter, group: Cgroup, tmp_path: Path) -> None:
    """All of an inode's writeback is its owner's: the cgroup that made it dirty first, until most
    of what is written has been another's for a while."""
    with (
        lab.cgroup(lab.hierarchies().io, "first") as first,
        lab.ext4(FAST, tmp_path) as mount,
        dirty_limits(400 * MIB, 500 * MIB, interval=NEVER),
    ):
        groups, file = [first, group], mount / "file"
        with books(exporter, FAST, groups=groups) as owned:
            lab.run_in([first], BUFFERED_WRITER + FSYNC, file, MIB)
            lab.run_in([group], APPENDER, file, 1)
        assert owned.of(FAST, "write")["/first"][1] == 2 * MIB
        assert group.label not in owned.of(FAST, "write")
        with (
            ftrace("writeback/inode_switch_wbs") as trace,
            books(exporter, FAST, groups=groups) as switched,
        ):
            lab.run_in([group], APPENDER, file, 16)
        assert re.findall(r" new_cgroup_ino=(\d+)", trace.read_text()) == [str(group.id)]
    written = switched.of(FAST, "write")
    assert written["/first"][1] + written[group.label][1] == 16 * MIB
    assert written["/first"][1] > 0 < written[group.label][1]


@contextmanager
def disk_for(kind: str, directory: Path) -> Iterator[Disk]:
    """xfs does with no less than 300 MB, btrfs with 110."""
    if kind == "ext4":
        yield FAST
    else:
        with lab.loop_disk(directory, {"xfs": 300 * MIB, "btrfs": 128 * MIB}[kind]) as disk:
            yield disk


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
@again_if_missed
def test_file_systems(exporter: lab.Exporter, group: Cgroup, tmp_path: Path, kind: str) -> None:
    """Data is the writer's, whoever sends it to the disk; of metadata and the journal what io.stat
    says, from mount to unmount."""
    with disk_for(kind, tmp_path) as disk, lab.file_system(disk, tmp_path, kind) as mount:
        with books(exporter, disk, groups=[group]) as counted:
            lab.run_in([group], BUFFERED_WRITER, mount / "flushed", 2 * MIB)
            lab.run_in([group], BUFFERED_WRITER + FSYNC, mount / "synced", 2 * MIB)
            lab.run_in([group], DIRECT_WRITER, mount / "synced", 65536, 8, 0)
            lab.run_in([group], DIRECT_READER, mount / "synced", 65536, 8, 0)
        assert counted.of(disk, "write")[group.label][1] >= 4 * MIB + 8 * 65536
        assert counted.of(disk, "read")[group.label][1] >= 8 * 65536
        assert counted.of(disk, "write")["/"][1] > 0


NOWAIT_WRITER = """
import errno
path, rounds = arguments[0], int(arguments[1])
fd = os.open(path, os.O_RDWR)
block = b"x" * 16384
written = 0
for i in range(rounds):
    os.pwrite(fd, b"x", 0)  # may sleep, and updates the time stamp, which the others may not
    for j in range(8):
        try:
            written += os.pwritev(fd, [block], (i * 8 + j) * len(block), os.RWF_NOWAIT)
        except BlockingIOError:
            pass
        except OSError as error:
            assert error.errno == errno.EOPNOTSUPP
            sys.exit()
print(written)
"""


def test_nowait_writers_do_not_sleep(exporter: lab.Exporter, group: Cgroup, tmp_path: Path) -> None:
    """btrfs demands pauses of them as well, and they fail instead. A throttle is what slept."""

    def throttled() -> float:
        return scrape(exporter).sum("dirty_throttle_seconds_count", cgroup=group.label)

    with (
        disk_for("btrfs", tmp_path) as disk,
        lab.file_system(disk, tmp_path, "btrfs") as mount,
        dirty_limits(MIB // 2, MIB),
    ):
        file = mount / "file"
        file.touch()
        lab.sh("chattr", "+C", file)  # copies on write would have to wait
        # The group's own writeback, for the limit to hold it.
        lab.run_in([group], BUFFERED_WRITER + FSYNC, file, 8 * MIB)
        before = throttled()
        (group.directory / "io.max").write_text(f"{disk.dev} wbps={4 * MIB}")
        with (
            ftrace("writeback/balance_dirty_pages") as trace,
            Calls("io_schedule_timeout") as calls,
        ):
            written = lab.run_in([group], NOWAIT_WRITER, file, 60)
            demanded = pauses(trace)
        if not written:
            assert os.uname().release.startswith("5.10.")
            pytest.skip("this kernel's file systems have no nowait buffered writes (6.0)")
        assert int(written) > 0
        slept = calls.count("io_schedule_timeout", "balance_dirty_pages")
        assert 0 < slept < demanded
        assert throttled() - before == slept


@pytest.mark.parametrize("direct", [True, False])
@again_if_missed
def test_a_loop_device(exporter: lab.Exporter, group: Cgroup, tmp_path: Path, direct: bool) -> None:
    """The cgroup is kept on the disk below if the file's page cache is passed by. Else the file's
    owner is who made it dirty first: here the root, that made it."""
    with lab.ext4(FAST, tmp_path) as mount, lab.loop_disk(mount, 32 * MIB) as disk:
        lab.sh("losetup", f"--direct-io={'on' if direct else 'off'}", disk.path)
        with books(exporter, disk, FAST, groups=[group]) as counted:
            lab.run_in([group], DIRECT_WRITER, disk.path, 65536, 16, 0)
            lab.run_in([group], DIRECT_READER, disk.path, 65536, 16, 0)
        own = {group.label: (16, MIB)}
        assert counted.of(disk, "read") == counted.of(disk, "write") == own
        written, read = counted.of(FAST, "write"), counted.of(FAST, "read")
        if direct:
            assert written[group.label] == (16, MIB)
            assert read[group.label][1] >= MIB  # and the block that maps the file
        else:
            assert written.keys() == {"/"}
            assert written["/"][1] >= MIB
            assert group.label not in read


@contextmanager
def multipath(disk: Disk) -> Iterator[Disk]:
    """A dm-multipath disk with this one path, whose requests go down as requests."""
    lab.sh("modprobe", "--all", "dm-multipath", "dm-round-robin")
    sectors = Path("/sys/block", disk.name, "size").read_text().strip()
    table = f"0 {sectors} multipath 0 0 1 1 round-robin 0 1 1 {disk.dev} 1"
    lab.sh("dmsetup", "create", "paths", "--noudevsync", "--table", table)
    number = lab.sh("dmsetup", "info", "-c", "--noheadings", "-o", "minor", "paths")
    try:
        yield Disk(f"/dev/dm-{number}")
    finally:
        lab.sh("dmsetup", "remove", "--noudevsync", "--retry", "paths")


@again_if_missed
def test_device_mapper_with_requests_of_its_own(
    exporter: lab.Exporter, group: Cgroup, tmp_path: Path
) -> None:
    """They are counted on both devices. io.stat has bios, which are the upper one's alone."""
    with multipath(FAST) as volume, lab.ext4(volume, tmp_path) as mount:
        with books(exporter, volume, groups=[group], lower=[FAST]) as counted:
            lab.run_in([group], BUFFERED_WRITER + FSYNC, mount / "file", MIB)
            lab.run_in([group], DIRECT_WRITER, mount / "file", 4096, 20, 0)
            lab.run_in([group], DIRECT_READER, mount / "file", 4096, 20, 0)
        truth = counted.truth[FAST]
        for op in ("read", "write", "other", "discard", "flush"):
            assert counted.of(FAST, op) == counted.of(volume, op)
        assert counted.of(FAST, "write")[group.label] == (21, MIB + 20 * 4096)
        assert counted.all(FAST, "write", "other") == (truth.writes, truth.written_bytes)
        # A flush that came down as a request is a read of nothing in diskstats.
        assert counted.all(FAST, "read", "flush") == (truth.reads, truth.read_bytes)
        assert truth.flushes == 0 < counted.all(FAST, "flush")[0]
