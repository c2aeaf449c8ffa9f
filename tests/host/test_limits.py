# SPDX-License-Identifier: Apache-2.0
"""Full maps, requests without a slot, kernels without cmpxchg: counted all the same, and said."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import struct
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import lab
from tests.host.test_cgroup_lifecycle import by_cgroup
from tests.host.witness import Witness, unless_hidden
from tests.lab import BUFFERED_WRITER, DIRECT_WRITER, Cgroup, Disk, exporter_in_process, scrape
from tests.waiting import PATIENCE_SECONDS
from writeback_exporter import __version__
from writeback_exporter.exporter import Exporter
from writeback_exporter.kernel import loader
from writeback_exporter.kernel.loader import OBJECTS, Kernel
from writeback_exporter.names import cgroups
from writeback_exporter.probes import base
from writeback_exporter.probes.block_io import BlockIo


def test_full_block_io_map_collapses_into_other(
    small: dict[str, int], plugged: Disk, io_cgroup: Cgroup, witness: Witness
) -> None:
    small["block_io"] = 1

    def attempt() -> int:
        hidden = witness.hidden(plugged)
        with exporter_in_process("dirty_throttle", "block_io") as exporter:
            for group in ([io_cgroup], []):
                lab.run_in(group, DIRECT_WRITER, plugged.path, 4096, 50, 0)
            seen = scrape(exporter)
        hidden = witness.hidden(plugged) - hidden
        if hidden == 0:
            counts = by_cgroup(seen, "block_io_size_bytes_count", device=plugged.name, op="write")
            # Whoever came first, perhaps another disk's writer, has the one entry.
            assert sum(counts.values()) == 100
            assert counts["other"] >= 50
            size = seen.sum("block_io_size_bytes_sum", device=plugged.name, op="write")
            assert size == 100 * 4096
        assert seen.sum("exporter_map_dropped_total", map="block_io/block_io") >= 50
        assert seen.sum("exporter_map_entries", map="block_io/block_io") == 1
        assert seen.sum("exporter_map_capacity", map="block_io/block_io") == 1
        return hidden

    unless_hidden(attempt)


def test_full_dirty_throttle_map_collapses_into_other(
    small: dict[str, int],
    plugged: Disk,
    task_cgroup: Cgroup,
    witness: Witness,
    tmp_path: Path,
) -> None:
    small["dirty_throttle"] = 1
    with (
        exporter_in_process("dirty_throttle", "block_io") as exporter,
        lab.ext4(plugged, tmp_path) as mount,
    ):
        with lab.strict_limit(plugged, 65536):
            for group in ([], [task_cgroup]):
                lab.run_in(group, BUFFERED_WRITER, mount / f"file{len(group)}", 2 << 20)
        counts = by_cgroup(scrape(exporter), "dirty_throttle_seconds_count", bdi=plugged.dev)
        seen = witness.pauses(plugged.dev)
        pauses = sum(count for count, _ in seen.values())
        dropped = scrape(exporter).sum(
            "exporter_map_dropped_total", map="dirty_throttle/dirty_throttle"
        )
    # Whoever came first, perhaps a writer to another disk, has the one entry.
    assert sum(counts.values()) == pauses
    assert task_cgroup.label not in counts
    assert counts["other"] >= seen[task_cgroup.id][0] > 0
    assert dropped >= counts["other"]


@pytest.mark.parametrize("way", ["spilled", "hash"])
def test_requests_without_a_slot(
    small: dict[str, int],
    plugged: Disk,
    io_cgroup: Cgroup,
    witness: Witness,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    """The hash map beside the slots, and the one that kernels without cmpxchg have alone."""
    if way == "spilled":
        small["requests"] = 1  # nearly all requests then hash to no slot
    else:
        monkeypatch.setattr(Kernel, "has_cmpxchg", lambda self: False)

    def attempt() -> int:
        hidden, before = witness.hidden(plugged), plugged.settled()
        with exporter_in_process("dirty_throttle", "block_io") as exporter:
            lab.run_in([io_cgroup], DIRECT_WRITER, plugged.path, 4096, 500, 0)
            truth = plugged.settled() - before
            seen = scrape(exporter)
            assert exporter.features
        own = {"cgroup": io_cgroup.label, "device": plugged.name, "op": "write"}
        assert seen.sum("block_io_inflight", device=plugged.name) <= 1
        hidden = witness.hidden(plugged) - hidden
        if hidden == 0:
            assert seen.sum("block_io_size_bytes_count", **own) == truth.writes == 500
            assert seen.sum("block_io_size_bytes_sum", **own) == truth.written_bytes
            assert seen.sum("block_io_depth_count", device=plugged.name) == 500
        return hidden

    unless_hidden(attempt)


@pytest.fixture
def two_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects as installed, but block_io's with two slots for requests: nearly all collide."""
    objects = tmp_path / "objects"
    shutil.copytree(OBJECTS, objects)
    source = Path(__file__).parents[2] / "bpf/block_io.bpf.c"
    lab.sh(
        *("clang", "-target", "bpf", "-mcpu=v3", "-O2", "-g", "-DREQUESTS_LOG2=1"),
        *("-idirafter", f"/usr/include/{platform.machine()}-linux-gnu"),
        *(f'-DEXPORTER_VERSION="{__version__}"', "-c", source, "-o", objects / "block_io.bpf.o"),
    )
    monkeypatch.setattr(loader, "OBJECTS", objects)


def test_requests_whose_slots_collide(two_slots: None, tmp_path: Path, witness: Witness) -> None:
    """Some in the slots and some spilled beside them, in any order, and none counted wrongly."""
    directories = [tmp_path / "first", tmp_path / "second"]
    with ExitStack() as stack:
        disks = []
        for directory in directories:
            directory.mkdir()
            disks.append(stack.enter_context(lab.loop_disk(directory)))

        def attempt() -> int:
            hidden = sum(witness.hidden(disk) for disk in disks)
            before = [disk.settled() for disk in disks]
            with exporter_in_process("dirty_throttle", "block_io") as exporter:
                writers = [
                    lab.spawn_in([], DIRECT_WRITER, disk.path, 4096, 800, i * 800 * 4096)
                    for i in range(4)
                    for disk in disks
                ]
                for writer in writers:
                    writer.communicate(timeout=PATIENCE_SECONDS)
                    assert writer.returncode == 0
                truth = [disk.settled() - stats for disk, stats in zip(disks, before, strict=True)]
                seen = scrape(exporter)
                (probe,) = (p for p in exporter.running if isinstance(p, BlockIo))
                assert probe.bpf
                slots, spilled = (
                    probe.bpf.maps[name].dump() for name in ("requests", "requests_spilled")
                )
            hidden = sum(witness.hidden(disk) for disk in disks) - hidden
            if hidden == 0:
                for disk, stats in zip(disks, truth, strict=True):
                    labels = {"device": disk.name, "op": "write"}
                    count = seen.sum("block_io_size_bytes_count", **labels)
                    assert count == stats.writes == 3200
                    size = seen.sum("block_io_size_bytes_sum", **labels)
                    assert size == stats.written_bytes
                own = {disk.name for disk in disks}
                assert all(
                    count == 0
                    for series, count in seen.select("block_io_inflight").items()
                    if dict(series)["device"] in own
                )
                overflow = probe.file.struct("request_state").pick("overflow")
                counts = [count for (count,) in overflow.iter_unpack(slots[1])]
                # Others' disks may have requests in flight just now.
                assert len(counts) == 2
                assert sum(counts) == len(spilled[0]) // 8 <= 4
            return hidden

        unless_hidden(attempt)


WAITING_WRITER = f"""
import time
print("ready", flush=True)
while not os.path.exists(arguments[4]):
    time.sleep(0.001)
{DIRECT_WRITER}"""
"""Begins when a file is there: for writers that are to write at the same time."""


def test_full_request_map_is_counted_as_dropped(
    small: dict[str, int], plugged: Disk, tmp_path: Path
) -> None:
    small["requests"] = small["requests_spilled"] = 1
    begin = tmp_path / "begin"
    with exporter_in_process("dirty_throttle", "block_io") as exporter:
        processes = [
            lab.spawn_in([], WAITING_WRITER, plugged.path, 65536, 200, 0, begin) for _ in range(6)
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        begin.touch()
        for process in processes:
            process.communicate(timeout=PATIENCE_SECONDS)
            assert process.returncode == 0
        seen = scrape(exporter)
    counted = seen.sum("block_io_size_bytes_count", device=plugged.name, op="write")
    dropped = seen.sum("exporter_map_dropped_total")
    unended = seen.sum("block_io_inflight", device=plugged.name)
    # Others' disks may be among the dropped; nothing of ours is in none of the three.
    assert dropped > 0
    assert counted <= 1200 <= counted + dropped + unended


def test_a_failed_collector_does_not_fail_the_scrape() -> None:
    with exporter_in_process("dirty_throttle", "block_io") as exporter:
        (probe,) = (p for p in exporter.running if isinstance(p, BlockIo))
        assert probe.bpf
        # Its maps are gone under it, as after a bug of ours.
        probe.bpf.close()
        probe.bpf.maps.clear()
        seen = scrape(exporter)
    assert seen.sum("exporter_collector_success", collector="block_io") == 0
    assert seen.sum("exporter_collector_success", collector="dirty_throttle") == 1
    assert "writeback_dirty_throttle_method_info" in seen.samples
    assert "writeback_block_io_inflight" not in seen.samples


def test_lost_cgroup_events_are_made_up_for_by_a_walk(small: dict[str, int], plugged: Disk) -> None:
    small["cgroup_events"] = 4096  # room for some fifty events
    hierarchy = lab.hierarchies().io
    with exporter_in_process("dirty_throttle", "block_io") as exporter, ExitStack() as stack:
        with exporter.lock:  # so that nobody empties the ring
            groups = [
                stack.enter_context(lab.cgroup(hierarchy, f"wbx-lost-{os.getpid()}-{i}"))
                for i in range(200)
            ]
        lab.run_in([groups[-1]], DIRECT_WRITER, plugged.path, 4096, 5, 0)
        seen = scrape(exporter)
        assert seen.sum("exporter_map_dropped_total", map="cgroup_lifecycle/cgroup_events") > 0
        writers = by_cgroup(seen, "block_io_size_bytes_count", device=plugged.name, op="write")
        assert writers.keys() == {groups[-1].label}
        assert seen.sum("exporter_cgroups", state="live") >= 200


def test_series_leave_with_their_cgroup(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A released cgroup is exported once more, then its entries are deleted; one that came again
    under its path goes on counting."""
    for module in (cgroups, base):
        monkeypatch.setattr(module, "RETENTION_SECONDS", 0)
    monkeypatch.setattr(cgroups, "DYING_SECONDS", 0)
    hierarchy, name = lab.hierarchies().io, f"wbx-gone-{os.getpid()}"
    # On a disk, as a checkout is; /tmp may be in memory.
    file = Path(__file__).parents[2] / "build" / f"{name}.direct"
    file.write_bytes(bytes(10 * 4096))
    lab.sh("sync", file)
    request.addfinalizer(file.unlink)

    def requests(exporter: Exporter) -> float:
        return scrape(exporter).sum("block_io_size_bytes_count", cgroup=f"/{name}")

    def has_entry(exporter: Exporter, cgroup: int) -> bool:
        (probe,) = (p for p in exporter.running if isinstance(p, BlockIo))
        assert probe.bpf
        keys, _ = probe.bpf.maps["block_io"].dump()
        return any(owner == cgroup for owner, _ in struct.iter_unpack("=QQ", keys))

    with exporter_in_process("dirty_throttle", "block_io") as exporter:
        # On the machine's own disk: a loop device keeps its workers' cgroups for a minute.
        with lab.cgroup(hierarchy, name) as group:
            lab.run_in([group], DIRECT_WRITER, file, 4096, 10, 0)
            old = group.id
            first = requests(exporter)
            assert first > 0
            assert has_entry(exporter, old)
        with lab.cgroup(hierarchy, name) as group:
            lab.run_in([group], DIRECT_WRITER, file, 4096, 5, 0)
            last = requests(exporter)
            assert last > first
            for _ in range(200):
                time.sleep(0.05)
                assert requests(exporter) == last
                if not has_entry(exporter, old):
                    break
            assert not has_entry(exporter, old)
            assert has_entry(exporter, group.id)
            assert requests(exporter) == last
        for _ in range(200):
            time.sleep(0.05)
            if requests(exporter) == 0:
                break
        assert requests(exporter) == 0


def test_a_disk_that_is_unplugged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its series stay for the last scrape and go; the next disk of that name starts anew."""
    monkeypatch.setattr(base, "RETENTION_SECONDS", 0)
    number = 200 + os.getpid() % 50
    device = f"loop{number}"

    def control(request: int) -> None:
        file = os.open("/dev/loop-control", os.O_RDWR)
        fcntl.ioctl(file, request, number)
        os.close(file)

    image = tmp_path / "unplugged"
    image.write_bytes(bytes(1 << 20))
    with exporter_in_process("dirty_throttle", "block_io") as exporter:
        for _ in range(2):
            control(0x4C80)  # LOOP_CTL_ADD
            try:
                if not os.path.exists(f"/dev/{device}"):
                    os.mknod(f"/dev/{device}", 0o60600, os.makedev(7, number))
                lab.sh("losetup", f"/dev/{device}", image)
                try:
                    lab.run_in([], DIRECT_WRITER, f"/dev/{device}", 4096, 8, 0)
                    seen = scrape(exporter).sum("block_io_size_bytes_count", device=device)
                    assert 0 < seen <= 8
                finally:
                    lab.sh("losetup", "-d", f"/dev/{device}")
            finally:
                control(0x4C81)  # LOOP_CTL_REMOVE
            assert scrape(exporter).sum("block_io_size_bytes_count", device=device) == seen
            scrape(exporter)
            assert scrape(exporter).sum("block_io_size_bytes_count", device=device) == 0
