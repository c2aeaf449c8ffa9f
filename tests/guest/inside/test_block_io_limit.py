# SPDX-License-Identifier: Apache-2.0
"""Waits that limits impose, against ftrace's count of the bios that the kernel held, against the
writer's own clock, and against what the limit's rate demands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import lab
from tests.guest.inside.kernel import NEVER, Call, Calls, dirty_limits, vm
from tests.guest.inside.test_main_signals import FAST, MIB, SLOW
from tests.lab import BUFFERED_WRITER, DIRECT_READER, DIRECT_WRITER, Cgroup, Disk, Scrape
from tests.waiting import PATIENCE_SECONDS, wait_for
from writeback_exporter.exporter import Exporter
from writeback_exporter.metrics.exposition import negotiate, render
from writeback_exporter.settings import Settings

ROOT = Path("/sys/fs/cgroup")
CLOCK = "import time\nbegin = time.monotonic()\n"
TIMED_WRITER = CLOCK + DIRECT_WRITER + "print(time.monotonic() - begin)\n"
SIZE, COUNT = 65536, 40
RATE = MIB
"""Bytes per second: COUNT writes of SIZE take 2.5 s."""


@pytest.fixture(scope="module")
def exporter() -> Iterator[Exporter]:
    """One for all: in this process, for a new one takes seconds here."""
    Path("/proc/sys/kernel/bpf_stats_enabled").write_text("1")
    made = Exporter(
        Settings(
            listen=(),
            telemetry_path="/metrics",
            collectors=frozenset({"block_io_limit"}),
            procfs="/proc",
            sysfs="/sys",
            cgroupfs=str(ROOT),
        )
    )
    try:
        made.start()
        yield made
    finally:
        made.close()


@dataclass
class Seen:
    """What the exporter exports now."""

    scrape: Scrape

    def waits(self, cgroup: str, limit: str, disk: Disk = FAST) -> tuple[int, float]:
        """Their number and seconds."""
        labels = {"cgroup": cgroup, "limit": limit, "device": disk.name}
        count = self.scrape.sum("block_io_limit_seconds_count", **labels)
        return int(count), self.scrape.sum("block_io_limit_seconds_sum", **labels)

    @property
    def cgroups(self) -> set[str]:
        return self.scrape.values("block_io_limit_seconds_count", "cgroup")

    @property
    def held(self) -> float:
        """Bios and tasks that are held now."""
        return self.scrape.sum("exporter_map_entries", map="block_io_limit/limit_held")

    @property
    def runs(self) -> dict[str, float]:
        """Runs of each of the collector's programs."""
        return {
            program: value
            for series, value in self.scrape.select("exporter_program_runs_total").items()
            if (program := dict(series)["program"]).startswith("block_io_limit/")
        }

    def check(self) -> None:
        """Nothing was lost, and nothing is held any more."""
        assert self.held == 0
        assert not any(self.scrape.select("exporter_map_dropped_total").values())
        assert not any(self.scrape.select("exporter_program_missed_total").values())


def see(exporter: Exporter) -> Seen:
    return Seen(Scrape(b"".join(render(exporter.collect(), negotiate(""))).decode()))


THROTTLE = ("throtl_add_bio_tg", "blk_throtl_dispatch_work_fn")
SUBMIT = ("blk_throtl_bio", "__blk_throtl_bio")
"""That calls throtl_add_bio_tg() for a bio that is held, its name up to 5.17 and since."""


def held(calls: Calls) -> float:
    """Seconds from each bio's hold until it is let go, where there is one at a time."""
    seconds, since = 0.0, 0.0
    for call in calls.all:
        if call.function == "throtl_add_bio_tg" and call.caller.startswith(SUBMIT):
            since = call.at
        elif call.function == "blk_throtl_dispatch_work_fn" and since:
            seconds += call.at - since
            since = 0
    return seconds


def io_max(group: Cgroup, **limits: object) -> None:
    text = " ".join(f"{name}={value}" for name, value in limits.items())
    (group.directory / "io.max").write_text(f"{FAST.dev} {text}")


@contextmanager
def limited(name: str, **limits: object) -> Iterator[Cgroup]:
    with lab.cgroup(lab.hierarchies().io, name) as group:
        io_max(group, **limits)
        yield group


def test_all_is_available(exporter: Exporter) -> None:
    available = {f.name: (f.available, f.detail) for f in exporter.features}
    for name in ("", "_max", "_iocost", "_wbt"):
        assert available[f"block_io_limit{name}"] == (True, "")
    assert available["block_io_limit_iolatency"][0] == has_io_latency()


@pytest.mark.parametrize("limit", [{"wbps": RATE}, {"wiops": RATE // SIZE}], ids=["wbps", "wiops"])
def test_a_direct_writer_over_io_max(exporter: Exporter, limit: dict[str, int]) -> None:
    """Each held bio once. One write at a time: its waits together are no longer than the writer
    took, and most of what the rate demands."""
    (name,) = limit
    with limited(name, **limit) as group:
        with Calls(*THROTTLE) as calls:
            took = float(lab.run_in([group], TIMED_WRITER, FAST.path, SIZE, COUNT, 0))
        seen = see(exporter)
        count, seconds = seen.waits(f"/{name}", "max")
        assert count == calls.count("throtl_add_bio_tg", *SUBMIT)
        # The first ones go on credit.
        assert COUNT / 2 < count <= COUNT
        assert 0.5 * COUNT * SIZE / RATE < seconds < took
        # ftrace stamps the end a little before we do, and the begin perhaps.
        assert seconds > held(calls) - 0.001 * count
        assert seen.waits(f"/{name}", "qos") == (0, 0)
        seen.check()


def test_io_that_no_limit_holds_costs_nothing(exporter: Exporter) -> None:
    """Not one run of a program: in a cgroup without a limit beside one that has, in one that stays
    below its limits, and on a disk where wbt is on, as it is by default."""
    assert int(Path(f"/sys/block/{FAST.name}/queue/wbt_lat_usec").read_text()) > 0
    with (
        limited("held", wbps=RATE) as held,
        limited("below", wbps=1 << 40, rbps=1 << 40, wiops=1 << 30) as below,
        lab.cgroup(lab.hierarchies().io, "free") as free,
    ):
        lab.run_in([held], DIRECT_WRITER, FAST.path, SIZE, 10, 0)
        before = see(exporter)
        assert before.runs["block_io_limit/throttle_hold"] > 0
        assert before.runs["block_io_limit/throttle_release"] > 0
        for group in (free, below):
            lab.run_in([group], DIRECT_WRITER, FAST.path, 4096, 200, 0)
            lab.run_in([group], DIRECT_READER, FAST.path, 4096, 200, 0)
        after = see(exporter)
        assert after.runs == before.runs
        assert not {"/free", "/below"} & after.cgroups


@contextmanager
def inner(above: Cgroup) -> Iterator[Cgroup]:
    """A cgroup below another."""
    (above.directory / "cgroup.subtree_control").write_text("+io")
    group = Cgroup(above.directory / "inner", f"{above.label}/inner")
    group.directory.mkdir()
    try:
        yield group
    finally:
        wait_for(lambda: lab.removed(group.directory))


def test_nested_limits_are_one_wait(exporter: Exporter) -> None:
    """The bio waits for its own cgroup's limit, then for the one above: from the first on."""
    with limited("above", wbps=RATE) as above, inner(above) as group:
        io_max(group, wbps=2 * RATE)
        with Calls(*THROTTLE) as calls:
            took = float(lab.run_in([group], TIMED_WRITER, FAST.path, SIZE, COUNT, 0))
        seen = see(exporter)
        count, seconds = seen.waits(group.label, "max")
        assert count == calls.count("throtl_add_bio_tg", *SUBMIT)
        assert calls.count("throtl_add_bio_tg", "tg_dispatch_one_bio") > count / 2
        assert COUNT / 2 < count <= COUNT
        assert held(calls) - 0.001 * count < seconds < took
        assert "/above" not in seen.cgroups
        seen.check()


def test_a_buffered_writer(exporter: Exporter, tmp_path: Path) -> None:
    """The flusher submits, and the bios that are held are the writer's."""
    with lab.ext4(FAST, tmp_path) as mount, limited("buffered", wbps=RATE) as group:
        before = see(exporter)
        with Calls(*THROTTLE) as calls:
            lab.run_in([group], BUFFERED_WRITER, mount / "file", 2 * MIB)
            lab.sh("sync", "-f", mount)
        seen = see(exporter)
        count, seconds = seen.waits("/buffered", "max")
        assert count == calls.count("throtl_add_bio_tg", *SUBMIT) > 0
        assert seconds > 0.5
        assert seen.cgroups == before.cgroups | {"/buffered"}
        seen.check()


def test_a_limit_that_is_lifted(exporter: Exporter) -> None:
    with limited("lifted", wbps=4096) as group:
        with Calls(*THROTTLE) as calls:
            # 16 s a write.
            writer = lab.spawn_in([group], TIMED_WRITER, FAST.path, SIZE, 4, 0)
            wait_for(lambda: see(exporter).held == 1)
            io_max(group, wbps="max")
            output, _ = writer.communicate(timeout=PATIENCE_SECONDS)
        assert writer.returncode == 0
        seen = see(exporter)
        count, seconds = seen.waits("/lifted", "max")
        assert count == calls.count("throtl_add_bio_tg", *SUBMIT) > 0
        assert 0 < seconds < float(output)
        seen.check()


def test_a_cgroup_that_is_removed(exporter: Exporter, tmp_path: Path) -> None:
    """Its bios are held when its last task has gone, and the cgroup too."""
    with lab.ext4(FAST, tmp_path) as mount, vm(dirty_writeback_centisecs=str(NEVER)):
        # What is held takes 8 s, in which it is to be seen and the cgroup removed.
        with limited("removed", wbps=RATE // 16) as group, Calls(*THROTTLE) as calls:
            lab.run_in([group], BUFFERED_WRITER, mount / "file", MIB // 2)
            sync = lab.spawn_in([], "os.sync()")
            wait_for(lambda: see(exporter).held > 0)
            group.directory.rmdir()
            sync.communicate(timeout=PATIENCE_SECONDS)
            group.directory.mkdir()  # for those who clean up
        seen = see(exporter)
        count, seconds = seen.waits("/removed", "max")
        assert count == calls.count("throtl_add_bio_tg", *SUBMIT) > 0
        assert seconds > 0
        seen.check()


@contextmanager
def iocost(**rates: int) -> Iterator[None]:
    """A model of the disk with these rates for reads and writes alike."""
    model = " ".join(f"{op}{name}={rate}" for op in "rw" for name, rate in rates.items())
    (ROOT / "io.cost.qos").write_text(f"{FAST.dev} enable=1 ctrl=user min=100 max=100")
    (ROOT / "io.cost.model").write_text(f"{FAST.dev} ctrl=user model=linear {model}")
    try:
        yield
    finally:
        (ROOT / "io.cost.qos").write_text(f"{FAST.dev} enable=0")


def test_iocost(exporter: Exporter) -> None:
    with (
        lab.cgroup(lab.hierarchies().io, "iocost") as group,
        iocost(bps=RATE, seqiops=1000, randiops=1000),
    ):
        with Calls("iocg_kick_waitq") as calls:
            took = float(lab.run_in([group], TIMED_WRITER, FAST.path, SIZE, COUNT, 0))
        seen = see(exporter)
        count, seconds = seen.waits("/iocost", "qos")
        # By a timer, or else by a task that has queued itself.
        assert count == calls.count("iocg_kick_waitq", "ioc_rqos", "iocg_handle")
        assert COUNT / 2 < count <= COUNT
        assert 0.5 * COUNT * SIZE / RATE < seconds < took
        assert seen.waits("/iocost", "max") == (0, 0)
        seen.check()


def test_io_within_iocosts_budget_costs_nothing(exporter: Exporter) -> None:
    with (
        lab.cgroup(lab.hierarchies().io, "budget") as group,
        iocost(bps=1 << 40, seqiops=1 << 30, randiops=1 << 30),
    ):
        before = see(exporter)
        lab.run_in([group], DIRECT_WRITER, FAST.path, 4096, 200, 0)
        lab.run_in([group], DIRECT_READER, FAST.path, 4096, 200, 0)
        after = see(exporter)
        assert after.runs == before.runs
        assert "/budget" not in after.cgroups


def sleeps(calls: list[Call], task: str) -> int:
    """How many of the matching tasks' calls of rq_qos_wait() led to a sleep."""
    last: dict[str, str] = {}
    count = 0
    for call in calls:
        if call.function == "io_schedule" and call.caller.startswith("rq_qos_wait"):
            count += re.match(task, call.task) is not None and last.get(call.task) == "rq_qos_wait"
        last[call.task] = call.function
    return count


def test_wbt_holds_the_flusher(exporter: Exporter) -> None:
    """On a slow disk, with requests so small that many are in flight: the flusher waits, and the
    wait is that of the cgroup whose pages it writes."""
    with (
        lab.cgroup(lab.hierarchies().io, "flushed") as group,
        SLOW.queue(max_sectors_kb="4", nomerges="2"),
        dirty_limits(65536, 64 * MIB),
    ):
        before = see(exporter)
        with Calls("rq_qos_wait", "prepare_to_wait_exclusive", "rq_qos_wake_function") as calls:
            lab.run_in([group], BUFFERED_WRITER, SLOW.path, MIB)
            lab.sh("sync")
        seen = see(exporter)
        counts = {
            dict(series)["cgroup"]: count
            for series, count in seen.scrape.select(
                "block_io_limit_seconds_count", device=SLOW.name, limit="qos"
            ).items()
        }
        held = calls.count("prepare_to_wait_exclusive", "rq_qos_wait")
        assert "/flushed" in counts
        # One that gets room after all before it sleeps is in ftrace's count, and not in ours.
        assert 0 < sum(counts.values()) <= held
        # Programs run for IO that is held, and for other waits of that kind.
        assert held < calls.count("rq_qos_wait", "")
        for program, function in (
            ("wbt_hold", "prepare_to_wait_exclusive"),
            ("wbt_release", "rq_qos_wake_function"),
        ):
            name = f"block_io_limit/{program}"
            assert seen.runs[name] - before.runs[name] == calls.count(function, "")
        seen.check()


def qos_runs(seen: Seen, before: Seen) -> list[float]:
    """Of each program on rq_qos_wait(), where the kernel has io.latency."""
    programs = {"iolatency_enter", "iolatency_exit"}
    return [
        runs - before.runs[program]
        for program, runs in seen.runs.items()
        if program.removeprefix("block_io_limit/") in programs
    ]


def runs_of_a_write(exporter: Exporter, group: Cgroup) -> float:
    before = see(exporter)
    lab.run_in([group], DIRECT_WRITER, FAST.path, 4096, 1, 0)
    return sum(qos_runs(see(exporter), before))


def has_io_latency() -> bool:
    """Whether the kernel has it: only in cgroups below the root."""
    with lab.cgroup(lab.hierarchies().io, "any") as group:
        return (group.directory / "io.latency").exists()


NO_IO_LATENCY = "the kernel has no io.latency (CONFIG_BLK_CGROUP_IOLATENCY)"
THREADS = 4
THREADED_WRITER = """
import mmap, threading, time
path, threads, size, count = arguments[0], *map(int, arguments[1:4])
buffer = mmap.mmap(-1, size)
fd = os.open(path, os.O_WRONLY | os.O_DIRECT)
def write(thread):
    for i in range(count):
        os.pwrite(fd, buffer, (thread * count + i) * size)
writers = [threading.Thread(target=write, args=(i,)) for i in range(threads)]
begin = time.monotonic()
for writer in writers:
    writer.start()
for writer in writers:
    writer.join()
print(time.monotonic() - begin)
"""
ENDLESS_READER = """
import mmap
buffer = mmap.mmap(-1, 4096)
fd = os.open(arguments[0], os.O_RDONLY | os.O_DIRECT)
while True:
    os.preadv(fd, [buffer], 0)
"""


@contextmanager
def io_latency() -> Iterator[Cgroup]:
    """A cgroup that reads from the slow disk all the time, and is promised a latency that no disk
    has. All others there are held for it, soon to a single request at a time."""
    if not has_io_latency():
        pytest.skip(NO_IO_LATENCY)
    with (
        lab.cgroup(lab.hierarchies().io, "promised") as group,
        # As few requests as can be: the kernel halves them twice a second. And not wbt.
        SLOW.queue(nr_requests="4", wbt_lat_usec="0"),
    ):
        (group.directory / "io.latency").write_text(f"{SLOW.dev} target=1")
        lab.spawn_in([group], ENDLESS_READER, SLOW.path)
        yield group


@pytest.mark.parametrize("nested", [False, True])
def test_io_latency_holds_direct_writers(exporter: Exporter, nested: bool) -> None:
    """The waits are the writers', also where it is the cgroup above that is held."""
    with (
        io_latency() as promised,
        lab.cgroup(lab.hierarchies().io, f"held-{nested}") as held,
        inner(held) if nested else nullcontext(held) as group,
    ):
        before = see(exporter)
        with Calls("rq_qos_wait", "io_schedule") as calls:
            output = lab.run_in([group], THREADED_WRITER, SLOW.path, THREADS, SIZE, COUNT)
        seen = see(exporter)
        count, seconds = seen.waits(group.label, "qos", SLOW)
        slept = sleeps(calls.all, "")
        # A task that was woken before it slept is in ftrace's count, and not in ours.
        assert slept / 2 < count <= slept
        assert 0 < seconds < THREADS * float(output)
        # Nobody else has waited: neither who was promised something nor the cgroup above.
        assert seen.cgroups - before.cgroups == {group.label}
        assert promised.label not in seen.cgroups
        assert seen.waits(group.label, "max", SLOW) == (0, 0)
        seen.check()


def test_io_latency_holds_who_writes_back(exporter: Exporter) -> None:
    """The flusher's waits are those of the cgroup whose pages it writes, and so are those of sync,
    which is in another one."""
    with (
        io_latency(),
        lab.cgroup(lab.hierarchies().io, "dirtied") as group,
        SLOW.queue(max_sectors_kb="16", nomerges="2"),
        dirty_limits(65536, 64 * MIB),
    ):
        before = see(exporter)
        with Calls("rq_qos_wait", "io_schedule") as calls:
            lab.run_in([group], BUFFERED_WRITER, SLOW.path, 8 * MIB)
            lab.sh("sync")
        seen = see(exporter)
        count, seconds = seen.waits(group.label, "qos", SLOW)
        assert sleeps(calls.all, "kworker") > 0
        assert 0 < count <= sleeps(calls.all, "")
        assert seconds > 0
        assert seen.cgroups - before.cgroups == {group.label}
        seen.check()


def test_io_latency_that_holds_nothing(exporter: Exporter) -> None:
    """2 runs a bio while a cgroup has it on the disk, and none any more when it has not."""
    if not has_io_latency():
        pytest.skip(NO_IO_LATENCY)
    with lab.cgroup(lab.hierarchies().io, "latency") as group:
        target = group.directory / "io.latency"
        target.write_text(f"{FAST.dev} target=10000000")
        before = see(exporter)
        with Calls("rq_qos_wait") as calls:
            lab.run_in([group], DIRECT_WRITER, FAST.path, 4096, 100, 0)
            lab.run_in([group], DIRECT_READER, FAST.path, 4096, 100, 0)
        seen = see(exporter)
        assert qos_runs(seen, before) == [calls.count("rq_qos_wait", "")] * 2
        assert calls.count("rq_qos_wait", "") == 200
        target.write_text(f"{FAST.dev} target=max")
        wait_for(lambda: not runs_of_a_write(exporter, group))
        before = see(exporter)
        lab.run_in([group], DIRECT_WRITER, FAST.path, 4096, 100, 0)
        lab.run_in([group], DIRECT_READER, FAST.path, 4096, 100, 0)
        after = see(exporter)
        assert after.runs == before.runs
        assert group.label not in after.cgroups
