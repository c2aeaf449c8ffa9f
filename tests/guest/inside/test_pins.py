# SPDX-License-Identifier: Apache-2.0
"""Pins with all that a kernel offers: programs of functions, and of classic tracepoints."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import lab
from tests.waiting import PATIENCE_SECONDS, wait_for

from .kernel import dirty_limits, ftrace, missed, pauses
from .test_main_signals import FAST, MIB, SLOW

PINS = Path("/sys/fs/bpf/writeback-exporter")
KILLS = 4
ROUNDS = """
import time
path, stop = arguments
fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
calls = 0
while not os.path.exists(stop):
    os.pwrite(fd, b"x" * 4096, 4096 * (calls % 256))
    os.fsync(fd)
    calls += 1
    time.sleep(0.01)
print(calls)
"""
WRITES = """
path, stop = arguments
fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
calls = 0
while not os.path.exists(stop):
    os.pwrite(fd, bytes(65536), 65536 * (calls % 384))
    calls += 1
"""


@pytest.fixture(autouse=True)
def _no_pins() -> Iterator[None]:
    yield
    shutil.rmtree(PINS, ignore_errors=True)


def test_kills_while_tasks_call_fsync_and_are_throttled(tmp_path: Path) -> None:
    """fexit programs go on measuring who is asleep, or in a call, when the exporter dies."""
    flags = (f"--bpf.pin={PINS}", *lab.only("block_io", "dirty_throttle", "sync"))
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    fast.mkdir()
    slow.mkdir()
    hierarchy = lab.hierarchies().task
    with (
        lab.ext4(FAST, fast) as calm,
        lab.ext4(SLOW, slow) as busy,
        lab.cgroup(hierarchy, "syncs") as syncs,
        lab.cgroup(hierarchy, "throttled") as throttled,
        dirty_limits(MIB, 2 * MIB),
    ):
        with lab.Exporter(*flags) as first:
            first.scrape()
            first.kill()
        before = FAST.settled()
        stop = tmp_path / "stop"
        with ftrace("writeback/balance_dirty_pages") as trace:
            caller = lab.spawn_in([syncs], ROUNDS, calm / "file", stop)
            writer = lab.spawn_in([throttled], WRITES, busy / "file", stop)
            for _ in range(KILLS):
                with lab.Exporter(*flags) as running:
                    log = "".join(running.log)
                    assert "going on with the counts of the last run: " in log
                    assert "anew" not in log
                    time.sleep(0.3)
                    running.kill()
            wait_for(lambda: pauses(trace) > 20, what="more than 20 pauses")
            stop.touch()
            writer.communicate(timeout=PATIENCE_SECONDS)
            assert writer.returncode == 0
            calls = int(caller.communicate(timeout=PATIENCE_SECONDS)[0])
            demanded = pauses(trace)
        lab.sh("sync")
        truth = FAST.settled() - before
        with lab.Exporter(*flags) as last:
            scrape = last.scrape()
    assert calls > 20
    counted = scrape.sum("sync_seconds_count", cgroup="/syncs", call="fsync")
    assert calls - missed(scrape, "sync/") <= counted <= calls
    assert demanded > 20
    counted = scrape.sum("dirty_throttle_seconds_count")
    assert demanded - missed(scrape, "dirty_throttle/") <= counted <= demanded
    assert scrape.sum("dirty_throttle_seconds_count", cgroup="/throttled") > 0
    written = sum(
        scrape.sum("block_io_size_bytes_sum", device=FAST.name, op=op) for op in ("write", "other")
    )
    # No request here is of more than 64 KiB.
    least = truth.written_bytes - (missed(scrape, "block_io/") << 16)
    assert least <= written <= truth.written_bytes
    assert scrape.sum("exporter_feature_available", feature="bpf_pin") == 1
    for name in ("sync_fentry", "dirty_throttle_measured_sleep"):
        assert scrape.sum("exporter_feature_available", feature=name) == 1


def test_tracepoints_of_system_calls(tmp_path: Path) -> None:
    """They are perf events; since 5.15 such a link can be pinned, before it is told."""
    code = "fd, _ = os.pipe()\nfor _ in range(10):\n    try: os.fsync(fd)\n    except OSError: pass"
    # Without fentry: as where the kernel has none.
    flags = (f"--bpf.pin={PINS}", "--sync.tracepoints", *lab.only("sync"))
    hide = "import writeback_exporter.probes.sync as s; s._FUNCTIONS.clear(); "
    run = "import sys; sys.argv.pop(1); from writeback_exporter.cli import main; sys.exit(main())"
    prefix = (str(lab.PROGRAM.with_name("python")), "-c", hide + run)
    with lab.cgroup(lab.hierarchies().task, "syncs") as group:
        with lab.Exporter(*flags, prefix=prefix) as first:
            lab.run_in([group], code)
            scrape = first.scrape()
            log = "".join(first.log)
            first.kill()
        assert scrape.sum("sync_seconds_count", cgroup="/syncs") == 10
        pinned = scrape.sum("exporter_feature_available", feature="bpf_pin") == 1
        release = tuple(map(int, re.findall(r"\d+", lab.sh("uname", "-r"))[:2]))
        assert pinned == (release >= (5, 15))
        assert pinned or "sync is not pinned" in log
        lab.run_in([group], code)
        with lab.Exporter(*flags, prefix=prefix) as second:
            lab.run_in([group], code)
            counted = second.scrape().sum("sync_seconds_count", cgroup="/syncs")
    assert counted == (30 if pinned else 10)
