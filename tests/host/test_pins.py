# SPDX-License-Identifier: Apache-2.0
"""Pins in a BPF file system: exporters that are killed or stopped, and the ones after them."""

from __future__ import annotations

import errno
import http.client
import json
import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import lab
from tests.host.witness import Witness
from tests.lab import DIRECT_WRITER, PROGRAM, Cgroup, Disk, Scrape
from tests.waiting import PATIENCE_SECONDS, wait_for

KILLS = 50
RUN = "import sys; sys.argv.pop(1); from writeback_exporter.cli import main; sys.exit(main())"
"""Runs the exporter where its program is the first argument."""
FOR_EVER = """
import mmap, random
path, stop = arguments
buffer = mmap.mmap(-1, 65536)
fd = os.open(path, os.O_RDWR | os.O_DIRECT)
while not os.path.exists(stop):
    for _ in range(20):
        size = random.choice((512, 4096, 65536))
        place = random.randrange(500) * 65536
        if random.random() < 0.5:
            assert os.pwrite(fd, memoryview(buffer)[:size], place) == size
        else:
            assert os.preadv(fd, [memoryview(buffer)[:size]], place) == size
"""
"""Reads and writes PATH until STOP exists, one IO at a time."""


@pytest.fixture
def bpffs(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "bpf"
    directory.mkdir()
    lab.sh("mount", "-t", "bpf", "-o", "mode=755", "bpf", directory)
    try:
        yield directory
    finally:
        lab.sh("umount", directory)


@pytest.fixture
def pins(bpffs: Path) -> Path:
    return bpffs / "writeback-exporter"


@pytest.fixture
def write(plugged: Disk, witness: Witness) -> Callable[..., int]:
    """Writes to the disk so many times, in cgroups; how many of the writes the kernel showed."""

    def write(count: int, *groups: Cgroup) -> int:
        before, _ = witness.completed(plugged)
        lab.run_in(groups, DIRECT_WRITER, plugged.path, 4096, count, 0)
        return witness.completed(plugged)[0] - before

    return write


def pinning(pins: Path, *flags: str) -> lab.Exporter:
    return lab.Exporter(f"--bpf.pin={pins}", *flags)


def refused(pins: Path, *flags: str) -> str:
    """What an exporter that does not start says."""
    command = [str(PROGRAM), "--web.listen-address=127.0.0.1:0", f"--bpf.pin={pins}", *flags]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


def directory_of(pins: Path, name: str) -> Path:
    (found,) = pins.glob(f"{name}-*")
    return found


def totals(scrape: Scrape, device: str) -> tuple[int, int, int, int]:
    """Reads, bytes of them, writes, bytes of them."""
    reads, read_bytes, writes, written = (
        int(scrape.sum(f"block_io_size_bytes_{what}", device=device, op=op))
        for op in ("read", "write")
        for what in ("count", "sum")
    )
    return reads, read_bytes, writes, written


def test_fifty_kills_in_a_counted_load(
    pins: Path, plugged: Disk, io_cgroup: Cgroup, witness: Witness, tmp_path: Path
) -> None:
    """At any time: while it opens, loads, takes over, waits or is scraped."""
    disk = plugged
    before = disk.settled()
    with pinning(pins) as first:
        assert totals(first.scrape(), disk.name) == (0, 0, 0, 0)
        first.kill()
    seen, hidden = witness.completed(disk), witness.hidden(disk)
    stop = tmp_path / "stop"
    load = lab.spawn_in([io_cgroup], FOR_EVER, disk.path, stop)
    counted = (0, 0, 0, 0)
    for kill in range(KILLS):
        exporter = subprocess.Popen(
            [PROGRAM, "--web.listen-address=127.0.0.1:0", f"--bpf.pin={pins}"],
            stderr=subprocess.DEVNULL,
        )
        # It needs half a second until it is ready.
        time.sleep(random.uniform(0, 0.8))
        exporter.kill()
        exporter.wait()
        if kill % 10 == 9:
            with pinning(pins) as running:
                now = totals(running.scrape(), disk.name)
                assert all(a > b for a, b in zip(now, counted, strict=True))
                counted = now
                running.kill()
    stop.touch()
    load.communicate(timeout=PATIENCE_SECONDS)
    assert load.returncode == 0
    truth = disk.settled() - before
    with pinning(pins) as last:
        scrape = last.scrape()
    ours = totals(scrape, disk.name)
    requests, size = witness.completed(disk)
    assert (ours[0] + ours[2], ours[1] + ours[3]) == (requests - seen[0], size - seen[1])
    hidden = witness.hidden(disk) - hidden
    if hidden == 0:
        assert ours == (truth.reads, truth.read_bytes, truth.writes, truth.written_bytes)
    assert truth.reads + truth.writes - ours[0] - ours[2] == hidden
    owners = scrape.values("block_io_size_bytes_count", "cgroup", device=disk.name)
    assert io_cgroup.label in owners
    for name in ("block_io_device_seconds", "block_io_queue_seconds"):
        assert scrape.sum(f"{name}_count", device=disk.name) == ours[0] + ours[2]
    assert scrape.sum("block_io_inflight", device=disk.name) <= hidden


def test_what_happened_in_the_absence_is_there_with_its_names(
    pins: Path, plugged: Disk, write: Callable[..., int]
) -> None:
    """A cgroup that came and went meanwhile, and one whose end the one before had seen."""
    root, name = lab.hierarchies().io, f"wbx-absent-{os.getpid()}"

    def life(which: str) -> int:
        with lab.cgroup(root, f"{name}-{which}") as group:
            return write(10, group)

    with pinning(pins) as before:
        shown = {f"/{name}-before": life("before")}
        before.scrape()
        before.kill()
    shown[f"/{name}-absent"] = life("absent")
    with pinning(pins) as after:
        scrape = after.scrape()
    assert {
        dict(series)["cgroup"]: count
        for series, count in scrape.select(
            "block_io_size_bytes_count", device=plugged.name, op="write"
        ).items()
    } == shown
    assert scrape.sum("exporter_collapsed_cgroups", reason="no name") == 0


QUICK = (
    "import writeback_exporter.names.cgroups as c; c.RETENTION_SECONDS = c.DYING_SECONDS = 0.0; "
)
"""Forgets a cgroup once it was scraped twice."""


def forgetful(pins: Path) -> lab.Exporter:
    python = (str(PROGRAM.with_name("python")), "-c", QUICK + RUN)
    return lab.Exporter(f"--bpf.pin={pins}", prefix=python)


def written(scrape: Scrape, device: str) -> dict[str, float]:
    return {
        dict(series)["cgroup"]: count
        for series, count in scrape.select(
            "block_io_size_bytes_count", device=device, op="write"
        ).items()
    }


def rows_of(disk: Disk, directory: Path) -> int:
    """Cgroups with writes to the disk in a pinned map, by bpftool."""

    def entries(name: str) -> list[dict[str, Any]]:
        dump = json.loads(lab.sh("bpftool", "-j", "map", "dump", "pinned", directory / name))
        return [entry.get("formatted", entry) for entry in dump]

    major, minor = map(int, disk.dev.split(":"))
    (index,) = (
        entry["value"]
        for entry in entries("map-disk_index")
        if entry["key"]["dev"] == major << 32 | minor
    )
    return sum(
        (entry["key"]["disk"], entry["key"]["op"]) in ((index, 1), (index, "IO_WRITE"))
        for entry in entries("map-block_io")
    )


def test_service_restarted_again_and_again_with_the_exporter(
    pins: Path, plugged: Disk, write: Callable[..., int]
) -> None:
    """Each of its cgroups is forgotten after a while; what they counted is not."""
    root, name = lab.hierarchies().io, f"wbx-service-{os.getpid()}"
    rows, shown = [], 0
    for _ in range(4):
        with forgetful(pins) as exporter:
            with lab.cgroup(root, name) as group:
                shown += write(10, group)
                for _ in range(4):  # forgets the life before
                    scrape = exporter.scrape()
                    assert written(scrape, plugged.name) == {group.label: shown}
                rows.append(rows_of(plugged, directory_of(pins, "block_io")))
            exporter.kill()
    assert rows[0] == 1
    assert rows[-1] <= 2, "the rows of lives before have gone"


def test_kills_while_cgroups_are_forgotten(
    pins: Path, plugged: Disk, witness: Witness, tmp_path: Path
) -> None:
    """Rows go from the dead to the living at each scrape; a kill comes at any time."""
    root, name = lab.hierarchies().io, f"wbx-churn-{os.getpid()}"
    with forgetful(pins) as first:
        first.kill()
    seen, _ = witness.completed(plugged)
    before, lives = 0.0, 0
    for _ in range(15):
        with forgetful(pins) as exporter:
            killer = threading.Timer(random.uniform(0.2, 1.0), exporter.process.kill)
            killer.start()
            try:
                while True:
                    with lab.cgroup(root, name) as group:
                        lab.run_in([group], DIRECT_WRITER, plugged.path, 4096, 10, 0)
                        lives += 1
                        counts = written(exporter.scrape(), plugged.name)
                        assert set(counts) == {group.label}
                        assert counts[group.label] >= before
                        before = counts[group.label]
            except (OSError, http.client.HTTPException):  # it is gone, perhaps in an answer
                pass
            finally:
                killer.join()
                exporter.kill()
    with forgetful(pins) as last, lab.cgroup(root, name) as group:
        lab.run_in([group], DIRECT_WRITER, plugged.path, 4096, 10, 0)
        lives += 1
        counts = written(last.scrape(), plugged.name)
    completed, _ = witness.completed(plugged)
    assert counts == {group.label: completed - seen}
    assert completed - seen <= lives * 10


def test_stopped_in_order_and_started_again(
    pins: Path, plugged: Disk, write: Callable[..., int]
) -> None:
    with pinning(pins) as first:
        shown = write(5)
        assert first.stop() == 0
    shown += write(6)
    with pinning(pins) as second:
        assert totals(second.scrape(), plugged.name)[2] == shown
        assert second.scrape().sum("exporter_feature_available", feature="bpf_pin") == 1
        log = "".join(second.log)
    assert "going on with the counts of the last run: " in log
    assert "anew" not in log


def test_root_with_two_capabilities(pins: Path, plugged: Disk, write: Callable[..., int]) -> None:
    """As in a container, in a directory that the kubelet has made."""
    pins.mkdir(mode=0o755)
    shown = 0
    for _ in range(2):
        with lab.Exporter(f"--bpf.pin={pins}", prefix=lab.TWO_CAPABILITIES) as exporter:
            assert totals(exporter.scrape(), plugged.name)[2] == shown
            shown += write(5)
            scrape = exporter.scrape()
            assert totals(scrape, plugged.name)[2] == shown
            assert scrape.sum("exporter_feature_available", feature="bpf_pin") == 1
            exporter.stop()


def test_without_the_flag_nothing_is_left_or_taken(pins: Path, plugged: Disk) -> None:
    with pinning(pins) as first:
        lab.run_in([], DIRECT_WRITER, plugged.path, 4096, 5, 0)
        first.stop()
    left = sorted(pins.rglob("*"))
    with lab.Exporter() as other:
        assert totals(other.scrape(), plugged.name) == (0, 0, 0, 0)
    assert sorted(pins.rglob("*")) == left


def test_removing_the_directory_ends_the_programs(pins: Path) -> None:
    with pinning(pins) as first:
        first.stop()
    program = lab.sh("bpftool", "-j", "prog", "show", "pinned", next(pins.rglob("program-issue_*")))
    number = program.split('"id":')[1].split(",")[0]
    shutil.rmtree(pins)

    def is_gone() -> bool:
        command = ["bpftool", "prog", "show", "id", number]
        return subprocess.run(command, capture_output=True, check=False).returncode != 0

    wait_for(is_gone, what="the end of the program")


# Who may not -------------------------------------------------------------------------------------


def test_second_instance(pins: Path) -> None:
    with pinning(pins) as first:
        message = refused(pins)
        assert message == (
            f"writeback-exporter: another writeback-exporter (process {first.process.pid}) has its "
            f"pins in {pins}; stop it, or give this one another --bpf.pin"
        )
        assert first.scrape().sum("exporter_collector_success", collector="block_io") == 1


def test_doctor_looks_and_leaves_nothing(pins: Path, tmp_path: Path) -> None:
    report = lab.doctor(f"--bpf.pin={pins}")
    assert report.reasons["bpf_pin"] == ""
    assert not pins.exists()
    with pinning(pins) as running:
        before = sorted(pins.rglob("*"))
        assert lab.doctor(f"--bpf.pin={pins}").reasons["bpf_pin"] == "", "not taken for its own"
        assert sorted(pins.rglob("*")) == before
        assert running.scrape().sum("exporter_feature_available", feature="bpf_pin") == 1
    report = lab.doctor(f"--bpf.pin={tmp_path}/pins")
    assert report.reasons["bpf_pin"] == "no bpffs"
    assert "mount -t bpf -o mode=700 bpf /sys/fs/bpf" in report.text


def test_no_bpffs(tmp_path: Path) -> None:
    message = refused(tmp_path / "pins")
    assert f"{tmp_path} is not in a BPF file system; mount one" in message
    assert not (tmp_path / "pins").exists()
    message = refused(tmp_path / "nowhere" / "pins")
    assert "No such file or directory" in message


def test_directory_of_somebody_else(pins: Path) -> None:
    pins.mkdir(mode=0o700)
    os.chown(pins, 12345, 12345)
    assert (
        f"{pins} belongs to user 12345 and has mode 700; have it and all in it belong to"
        in refused(pins)
    )
    os.chown(pins, 0, 0)
    pins.chmod(0o777)
    assert f"{pins} belongs to user 0 and has mode 777; have it and all in it belong to" in refused(
        pins
    )


def test_read_only(bpffs: Path, pins: Path, plugged: Disk) -> None:
    lab.sh("mount", "-o", "remount,ro", bpffs)
    assert f"pins cannot be made in {pins}: Read-only file system" in refused(pins)


def test_no_room_for_pins(pins: Path, plugged: Disk, write: Callable[..., int]) -> None:
    """bpffs has no limit of its own, so that it is never full of itself."""
    prefix = lab.denied(lab.BPF_CALL, errno.ENOSPC, lab.BPF_OBJ_PIN)
    with lab.Exporter(f"--bpf.pin={pins}", prefix=prefix) as exporter:
        shown = write(5)
        scrape = exporter.scrape()
        assert totals(scrape, plugged.name)[2] == shown
        log = "".join(exporter.log)
        exporter.stop()
    features = scrape.select("exporter_feature_available", feature="bpf_pin")
    assert {dict(series)["reason"]: on for series, on in features.items()} == {"not all pinned": 0}
    assert "block_io is not pinned, so that a restart resets its counts: pin " in log
    assert "No space left on device" in log
    assert [*pins.iterdir()] == []


def test_a_file_at_its_place(pins: Path) -> None:
    with pinning(pins) as first:
        first.stop()
    shutil.move(next(pins.rglob("map-drops")), pins.parent / "foreign")
    assert "Not a directory" in refused(pins.parent / "foreign")


# What cannot be taken over ------------------------------------------------------------------------


def test_foreign_files_are_left_alone(pins: Path, plugged: Disk, write: Callable[..., int]) -> None:
    with pinning(pins) as first:
        first.stop()
    map_of_others = pins / "others_map"
    os.link(next(pins.rglob("map-block_io_errors")), map_of_others)
    (pins / "others").mkdir()
    with pinning(pins) as second:
        log = "".join(second.log)
        shown = write(5)
        assert totals(second.scrape(), plugged.name)[2] == shown
    for name in ("others_map", "others"):
        assert f"{pins}/{name} is none of the exporter's and stays" in log
        assert (pins / name).exists()


FAULTS = ["map is absent", "other map", "no link", "other link", "program of our own is absent"]


@pytest.mark.parametrize("fault", FAULTS)
def test_pins_that_are_not_whole(
    pins: Path, plugged: Disk, write: Callable[..., int], fault: str
) -> None:
    """A map or link of others' under our names, or none: that object begins anew, and says so."""
    with pinning(pins) as first:
        lab.run_in([], DIRECT_WRITER, plugged.path, 4096, 5, 0)
        first.stop()
    directory = directory_of(pins, "block_io")
    (link,) = directory.glob("link-issue_*")
    if fault == "map is absent":
        (directory / "map-drops").unlink()
    elif fault == "other map":
        (directory / "map-drops").unlink()
        os.link(directory / "map-disk_index", directory / "map-drops")
    elif fault == "program of our own is absent":
        (directory / "program-drop_disk").unlink()
    elif fault == "no link":
        link.unlink()
    else:
        link.unlink()
        os.link(next(directory.glob("link-complete_*")), link)
    with pinning(pins) as second:
        shown = write(7)
        assert totals(second.scrape(), plugged.name)[2] == shown
        log = "".join(second.log)
        second.stop()
    assert f"the pins in {directory} cannot be taken over" in log
    assert f"removed the pins in {directory}: block_io begins anew" in log
    with pinning(pins) as third:
        assert totals(third.scrape(), plugged.name)[2] == shown


def test_pins_that_cannot_be_had_now_stay(
    pins: Path, plugged: Disk, write: Callable[..., int]
) -> None:
    """They are somebody else's, which is told; once that is mended the counts go on."""
    with pinning(pins) as first:
        shown = write(5)
        first.stop()
    directory = directory_of(pins, "block_io")
    os.chown(directory, 12345, 12345)
    with pinning(pins) as second:
        scrape = second.scrape()
        log = "".join(second.log)
        second.stop()
    features = scrape.select("exporter_feature_available", feature="block_io")
    assert {dict(series)["reason"]: on for series, on in features.items()} == {"not ours": 0}
    assert f"{directory} belongs to user 12345" in log
    os.chown(directory, 0, 0)
    with pinning(pins) as third:
        assert totals(third.scrape(), plugged.name)[2] == shown


def test_pins_removed_under_an_exporter(
    pins: Path, plugged: Disk, write: Callable[..., int]
) -> None:
    """It counts on while it runs, whether it has loaded the programs or taken them over."""
    for taken_over in (False, True):
        with pinning(pins) as running:
            if taken_over:
                shutil.rmtree(pins)
            before = totals(running.scrape(), plugged.name)[2]
            shown = write(5)
            assert totals(running.scrape(), plugged.name)[2] == before + shown
            running.stop()


def test_left_by_a_crash_while_pinning(
    pins: Path, plugged: Disk, write: Callable[..., int]
) -> None:
    with pinning(pins) as first:
        first.stop()
    whole = directory_of(pins, "block_io")
    unfinished = whole.with_name(f"{whole.name}-new")
    whole.rename(unfinished)
    next(unfinished.glob("link-*")).unlink()
    with pinning(pins) as second:
        shown = write(7)
        assert totals(second.scrape(), plugged.name)[2] == shown
        log = "".join(second.log)
    assert f"removed the pins in {unfinished}" in log
    assert whole.exists()
    assert not unfinished.exists()


def test_another_configuration_begins_anew(pins: Path, plugged: Disk) -> None:
    """What is not collected any more goes, with what it counted."""
    with pinning(pins) as first:
        lab.run_in([], DIRECT_WRITER, plugged.path, 4096, 5, 0)
        first.stop()
    directory = directory_of(pins, "block_io")
    with pinning(pins, "--no-collector.block_io") as second:
        log = "".join(second.log)
        second.stop()
    assert f"removed the pins in {directory}: nobody uses them any more" in log
    with pinning(pins) as third:
        assert totals(third.scrape(), plugged.name) == (0, 0, 0, 0)


def other_version(tmp_path: Path, version: str, *define: str) -> tuple[str, ...]:
    """A command that runs the exporter as that version: built elsewhere, from sources in which all
    lines have moved."""
    top = Path(__file__).parents[2]
    package = tmp_path / "site" / "writeback_exporter"
    shutil.copytree(top / "exporter/writeback_exporter", package)
    shutil.copytree(top / "bpf", tmp_path / "sources")
    init = package / "__init__.py"
    *lines, _ = init.read_text().splitlines()
    init.write_text("\n".join([*lines, f'__version__ = "{version}"', ""]))
    flags = ("-target", "bpf", "-mcpu=v3", "-O2", "-g", f'-DEXPORTER_VERSION="{version}"', *define)
    includes = ("-idirafter", f"/usr/include/{os.uname().machine}-linux-gnu")
    for header in (tmp_path / "sources").glob("*.[ch]"):
        header.write_text("/* A comment. */\n\n" + header.read_text())
    for source in (tmp_path / "sources").glob("*.bpf.c"):
        made = package / "objects" / f"{source.stem}.o"
        lab.sh("clang", *flags, *includes, "-c", source, "-o", made)
        lab.sh("llvm-strip", "-g", made)
    return ("env", f"PYTHONPATH={tmp_path / 'site'}", str(PROGRAM.with_name("python")), "-c", RUN)


def test_upgrade_with_the_same_bpf_goes_on(
    pins: Path, plugged: Disk, write: Callable[..., int], tmp_path: Path
) -> None:
    with pinning(pins) as first:
        shown = write(5)
        first.stop()
    command = other_version(tmp_path, "17.0.10")
    with lab.Exporter(f"--bpf.pin={pins}", prefix=command) as second:
        scrape = second.scrape()
        assert scrape.sum("exporter_build_info", version="17.0.10") == 1
        assert totals(scrape, plugged.name)[2] == shown


def test_upgrade_with_another_layout_begins_anew(pins: Path, plugged: Disk, tmp_path: Path) -> None:
    with pinning(pins) as first:
        lab.run_in([], DIRECT_WRITER, plugged.path, 4096, 5, 0)
        first.stop()
    old = directory_of(pins, "block_io")
    command = other_version(tmp_path, "17.0.10", "-DREQUESTS_LOG2=12")
    with lab.Exporter(f"--bpf.pin={pins}", prefix=command) as second:
        assert totals(second.scrape(), plugged.name) == (0, 0, 0, 0)
        log = "".join(second.log)
    assert f"removed the pins in {old}: block_io begins anew" in log
    assert directory_of(pins, "block_io") != old
