# SPDX-License-Identifier: Apache-2.0
"""Exporters come and go on a busy machine, and cgroups by the thousand: nothing is left in the
kernel, and nothing is counted twice or not at all."""

from __future__ import annotations

import errno
import gc
import itertools
import json
import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tests import lab
from tests.lab import DIRECT_WRITER
from tests.waiting import PATIENCE_SECONDS
from writeback_exporter.kernel.libbpf import BpfError, Object
from writeback_exporter.kernel.loader import Kernel
from writeback_exporter.probes.base import Probe

from .kernel import NEVER, PREEMPTS, dirty_limits, missed, vm
from .test_block_io import REQUESTS, missing
from .test_dirty_throttle import throttle
from .test_main_signals import FAST, MIB, SLOW

ROUNDS = 200
# Emulated, a round of what only has tracepoints takes some 30 ms, with fentry 130-860, and `sync`
# 2,100 ms.
TRACEPOINTS = ("block_io", "work")
FENTRY = ("dirty_throttle", "page_wait", "memory_stall", "page_flow", "block_io_limit")
SYNC_EVERY = 40
LOAD = """
import mmap
path, disk = arguments
files = [os.open(path + str(i), os.O_WRONLY | os.O_CREAT) for i in range(2)]
raw = os.open(disk, os.O_RDWR | os.O_DIRECT)
block, page = b"x" * 65536, mmap.mmap(-1, 4096)
rounds = 0
while not os.path.exists(path + ".end"):
    rounds += 1
    for fd in files:
        os.pwrite(fd, block, rounds % 8 * len(block))
        os.fsync(fd)
    for i in range(20):
        assert os.pwrite(raw, page, i * 4096) == os.preadv(raw, [page], i * 4096) == 4096
print(rounds)
"""


def bpf_in_kernel() -> dict[str, set[int]]:
    """Ids of all programs, maps and links, as bpftool has them."""
    return {
        kind: {entry["id"] for entry in json.loads(lab.sh("bpftool", "-j", kind, "show"))}
        for kind in ("prog", "map", "link")
    }


def left_since(before: dict[str, set[int]]) -> dict[str, set[int]]:
    """What there is now and was not before; the kernel frees it once all CPUs have moved on."""
    for _ in range(50):
        left = {kind: ids - before[kind] for kind, ids in bpf_in_kernel().items()}
        if not any(left.values()):
            break
        time.sleep(0.2)
    return left


def open_files() -> int:
    """This process', without those of objects that wait for the garbage collector."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def load(directory: Path, group: lab.Cgroup) -> Iterator[None]:
    """Throttled writes, fsync and direct IO without a pause, none of which may fail."""
    with lab.ext4(FAST, directory) as mount, dirty_limits(MIB, 2 * MIB):
        task = lab.spawn_in([group], LOAD, mount / "file", SLOW.path)
        try:
            yield
        finally:
            (mount / "file.end").touch()
            rounds, _ = task.communicate(timeout=PATIENCE_SECONDS)
        assert task.returncode == 0
        assert int(rounds) > 0


def detach_and_attach(probe: Probe, kernel: Kernel) -> None:
    assert isinstance(probe.bpf, Object)
    programs = probe.bpf.attached
    probe.bpf.detach()
    try:
        for program in programs:
            probe.bpf.attach(program)
    except BpfError as error:
        if error.errno != errno.ENOENT:
            raise
        probe.close()  # 5.10 attaches an fentry program once, and then no more
        probe.load(kernel, lab.hierarchies())


def test_attached_and_detached_under_load(tmp_path: Path) -> None:
    before, descriptors = bpf_in_kernel(), open_files()
    with (
        lab.cgroup(lab.hierarchies().io, "load") as group,
        load(tmp_path, group),
        lab.exporter_in_process(*TRACEPOINTS, *FENTRY, "sync") as exporter,
        closing(Kernel()) as kernel,
    ):
        probes = {probe.name: probe for probe in exporter.running if isinstance(probe, Probe)}
        turns = itertools.cycle([name for last in FENTRY for name in (*TRACEPOINTS, last)])
        for number in range(1, ROUNDS + 1):
            name = "sync" if number % SYNC_EVERY == 0 else next(turns)
            detach_and_attach(probes[name], kernel)
        assert all(ids - before[kind] for kind, ids in bpf_in_kernel().items())
        assert lab.scrape(exporter).sum("block_io_size_bytes_count", device=SLOW.name) > 0
    assert left_since(before) == {"prog": set(), "map": set(), "link": set()}
    assert open_files() == descriptors


def test_two_exporters(tmp_path: Path) -> None:
    """Each counts all, and the one goes on when the other has gone."""
    lab.sh("sync")
    before, slept, disk = bpf_in_kernel(), 0, FAST.settled()
    collectors = lab.only("dirty_throttle", "block_io", "work")

    def busy() -> tuple[int, int, int]:
        """Pauses so far, and writes to the fast disk with their bytes."""
        nonlocal slept
        slept += len(throttle(tmp_path))
        lab.run_in([], DIRECT_WRITER, FAST.path, 4096, 50, 0)
        truth = FAST.settled() - disk
        return slept, truth.writes, truth.written_bytes

    def check(scrape: lab.Scrape, slept: int, writes: int, written: int) -> None:
        counted = scrape.sum("dirty_throttle_seconds_count")
        assert slept - missed(scrape, "dirty_throttle/") <= counted <= slept
        io = {"device": FAST.name, "op": "write"}
        ours = (
            scrape.sum("block_io_size_bytes_count", **io),
            scrape.sum("block_io_size_bytes_sum", **io),
        )
        assert missing(ours, (writes, written)) <= missed(scrape, *REQUESTS)
        # A request whose end was not shown.
        assert scrape.sum("exporter_map_dropped_total") <= missed(scrape, *REQUESTS)
        # Two writers, flushers and a journal preempt one another, in twice as many programs.
        assert PREEMPTS or not any(scrape.select("exporter_program_missed_total").values())

    def works(scrape: lab.Scrape) -> dict[tuple[tuple[str, str], ...], float]:
        return scrape.select("work_seconds_count", bdi=SLOW.dev)

    # No flusher is at work while one of the two has not begun, or was asked already.
    with vm(dirty_writeback_centisecs=str(NEVER)), lab.Exporter(*collectors) as first:
        with lab.Exporter(*collectors) as second:
            truth = busy()
            scrapes = first.scrape(), second.scrape()
            for scrape in scrapes:
                check(scrape, *truth)
            ours, theirs = map(works, scrapes)
            lost = sum(missed(scrape, "work/") for scrape in scrapes)
            assert ours
            for series in ours.keys() | theirs.keys():
                assert abs(ours.get(series, 0) - theirs.get(series, 0)) <= lost
            assert second.stop() == 0
        truth = busy()
        check(first.scrape(), *truth)
    assert left_since(before) == {"prog": set(), "map": set(), "link": set()}


MAKE_TREE = """
top = arguments[0]
tens = [f"/{i}" for i in range(10)]
for path in ("", *tens, *(f"{ten}/{j}" for ten in tens for j in range(15))):
    os.makedirs(top + path, exist_ok=True)
    with open(top + path + "/cgroup.subtree_control", "w") as control:
        control.write("+io")
    for k in range(20 if path.count("/") == 2 else 0):
        os.mkdir(f"{top}{path}/{k}")
"""
REMOVE_TREE = """
for directory, _, _ in os.walk(arguments[0], topdown=False):
    if directory != arguments[0]:
        os.rmdir(directory)
"""


def test_three_thousand_cgroups() -> None:
    """10 with 15 with 20 each; there before the exporter, then removed, then made again."""
    hierarchy = lab.hierarchies().io
    with lab.cgroup(hierarchy, "many") as many:

        def known(scrape: lab.Scrape) -> float:
            return scrape.sum("exporter_cgroups", state="live")

        def directories() -> int:
            return sum(1 for _ in os.walk(hierarchy.mount))

        def writes(scrape: lab.Scrape) -> dict[str, float]:
            series = scrape.select("block_io_size_bytes_sum", device=FAST.name, op="write")
            return {dict(labels)["cgroup"]: total for labels, total in series.items()}

        lab.run_in([], MAKE_TREE, many.directory)
        assert directories() > 3160
        expected = {}
        with lab.Exporter(*lab.only("block_io")) as exporter:
            assert known(exporter.scrape()) == directories()
            for path in ("0/0/0", "4/7/11", "9/14/19"):
                group = lab.Cgroup(many.directory / path, f"/many/{path}")
                lab.run_in([group], DIRECT_WRITER, FAST.path, 4096, 10, 0)
                expected[group.label] = 40960.0
            assert writes(exporter.scrape()) == expected
            lab.run_in([], REMOVE_TREE, many.directory)
            scrape = exporter.scrape()
            assert known(scrape) == directories() < 100
            assert writes(scrape) == expected  # until somebody has had the time to scrape it
            lab.run_in([], MAKE_TREE, many.directory)
            lab.run_in([group], DIRECT_WRITER, FAST.path, 4096, 5, 0)
            scrape = exporter.scrape()
            assert known(scrape) == directories()
            # One series, of both cgroups that had this path.
            assert writes(scrape) == {**expected, group.label: 61440.0}
            assert not any(scrape.select("exporter_map_dropped_total").values())
            lab.run_in([], REMOVE_TREE, many.directory)
