# SPDX-License-Identifier: Apache-2.0
"""What happens: a writer that is throttled but well, then storage that takes no more, then relief.

The writer's disk is a loop device over a file on another one. A strict limit of its BDI throttles
its writers and nobody else's. Freezing the lower file system stops all that the loop device writes,
as a storage network that is gone does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests import lab
from tests.calls import frozen
from tests.e2e.stack import Stack, stack
from tests.sqpoll import rings
from tests.waiting import wait_for
from writeback_exporter.kernel.libbpf import enable_stats

FLAGS = ("--collector.page_flow", "--collector.memory_stall", "--sync.tracepoints")
MOUNTS = (
    "mount -t tracefs tracefs /sys/kernel/tracing",
    "mount -t debugfs debugfs /sys/kernel/debug",
)
"""What the exporter finds mounted, and nobody else."""
MIB = 1 << 20
LIMIT = 1 << 20
CALM, WELL = 5, 20
"""Seconds without anything, and of a writer that is throttled but well."""

# Its file is there already, so that nothing has to be allocated for it to go on.
WRITER = """
fd = os.open(arguments[0], os.O_WRONLY)
block = b"x" * 65536
while True:
    for at in range(0, 32 << 20, len(block)):
        os.pwrite(fd, block, at)
"""
PREPARED = """
fd = os.open(arguments[0], os.O_WRONLY | os.O_CREAT, 0o600)
os.write(fd, bytes(32 << 20))
os.fsync(fd)
"""
SYNCER = """
import time
while True:
    fd = os.open(arguments[0], os.O_WRONLY | os.O_CREAT, 0o600)
    os.write(fd, b"x" * 4096)
    os.fsync(fd)
    os.close(fd)
    time.sleep(0.1)
"""


NEIGHBOUR = """
import mmap, time
fd = os.open(arguments[0], os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
failing = os.open(arguments[1], os.O_RDONLY | os.O_DIRECT)
block = mmap.mmap(-1, 65536)
while True:
    os.pwrite(fd, block, 0)
    try:
        os.preadv(failing, [block], 8 << 20)
    except OSError:
        time.sleep(0.05)
"""
"""Shares the lower disk, and reads what another one does not have."""


@dataclass(frozen=True)
class Story:
    """Times are of the machine's clock, as Prometheus has them."""

    stack: Stack
    disk: lab.Disk
    lower: lab.Disk
    cgroup: lab.Cgroup
    """Of the writer, by which throttling is told; it has a name that systemd would give."""
    io_cgroup: lab.Cgroup
    """Of another one, by which block IO is told."""
    began: float
    well: float
    stuck: float
    paged: float
    suppressed: list[str]
    """Alerts that Alertmanager held back while it paged."""
    relieved: float
    resolved: float


@contextmanager
def story(directory: Path) -> Iterator[Story]:
    """Runs it all, and leaves the servers up for what is to be asked."""
    below, above = directory / "below", directory / "above"
    below.mkdir()
    above.mkdir()
    with ExitStack() as open_:
        lower = open_.enter_context(lab.loop_disk(below, 256 * MIB))
        lower_mount = open_.enter_context(lab.ext4(lower, below))
        disk = open_.enter_context(lab.loop_disk(lower_mount, 128 * MIB))
        # Behind a journal that cannot be written the writer would sleep there, not where it is
        # throttled, from the journal's next commit on.
        mount = open_.enter_context(lab.file_system(disk, above, "ext4", "-O", "^has_journal"))
        cgroup = open_.enter_context(
            lab.cgroup(lab.hierarchies().task, f"checkpoint-{os.getpid()}.service")
        )
        neighbours = [open_.enter_context(each) for each in _neighbours()]
        lab.run_in([cgroup], PREPARED, mount / "checkpoint")
        open_.enter_context(lab.strict_limit(disk, LIMIT))
        scratch = open_.enter_context(lab.loop_disk(directory))
        os.truncate(directory / "image", 4 * MIB)
        for neighbour in neighbours:
            _limit(neighbour, lower)
        open_.callback(os.close, enable_stats())
        running = open_.enter_context(stack(directory, *FLAGS, mounts=MOUNTS))

        began = time.time()
        lab.spawn_in([cgroup], SYNCER, lower_mount / "log")
        lab.spawn_in(neighbours, NEIGHBOUR, lower_mount / "neighbour", scratch.path)
        open_.enter_context(rings([cgroup], "own", seconds=CALM))
        well = _scraped(running)
        writer = lab.spawn_in([cgroup], WRITER, mount / "checkpoint")
        time.sleep(WELL)

        def paged() -> bool:
            return bool(running.webhook.alerts("pager", "WritebackCongestion", "firing"))

        def resolved() -> bool:
            return bool(running.webhook.alerts("pager", "WritebackCongestion", "resolved"))

        assert not paged(), "a throttled writer whose disk keeps up paged somebody"
        stuck = _scraped(running)  # what is being written while it freezes may page already
        with frozen(lower_mount):
            wait_for(paged, what="the page")
            at_page = time.time()
            suppressed = wait_for(
                lambda: held if "CgroupDirtyThrottled" in (held := _suppressed(running)) else None,
                what="that the alert of the writer's cgroup is held back",
            )
            time.sleep(5)
            relieved = _scraped(running)
        writer.kill()
        writer.communicate()
        wait_for(resolved, what="the end of the page")
        yield Story(
            stack=running,
            disk=disk,
            lower=lower,
            cgroup=cgroup,
            io_cgroup=neighbours[0],
            began=began,
            well=well,
            stuck=stuck,
            paged=at_page,
            suppressed=suppressed,
            relieved=relieved,
            resolved=time.time(),
        )


def _scraped(running: Stack) -> float:
    """A time to ask about: the scrapes before it worked. After one that took too long, as any may
    on a busy machine, nothing has a value."""

    def all_worked() -> float | None:
        now = time.time()
        time.sleep(2)  # until also the scrape of that time is over
        return now if running.prometheus.query("min_over_time(up[3s]) == 1", now) else None

    return wait_for(all_worked, what="a row of scrapes")


def _suppressed(running: Stack) -> list[str]:
    return [
        alert["labels"]["alertname"]
        for alert in running.alertmanager.alerts()
        if alert["status"]["state"] == "suppressed"
    ]


def _neighbours() -> list[AbstractContextManager[lab.Cgroup]]:
    """A cgroup of each hierarchy that has block IO or memory, that of block IO first."""
    found = lab.hierarchies()
    trees = {tree.id: tree for tree in (found.io, found.memory) if tree}.values()
    return [lab.cgroup(tree, f"neighbour-{os.getpid()}") for tree in trees]


def _limit(group: lab.Cgroup, disk: lab.Disk) -> None:
    """Limits, of what its hierarchy has: one of bytes that is reached, others that are not."""
    for name, value in {
        "memory.limit_in_bytes": 1 << 40,
        "memory.max": 1 << 40,
        "blkio.throttle.write_bps_device": f"{disk.dev} {MIB}",
        "blkio.throttle.write_iops_device": f"{disk.dev} 1000000",
        "io.max": f"{disk.dev} wbps={MIB} wiops=1000000",
    }.items():
        if (group.directory / name).exists():
            (group.directory / name).write_text(str(value))
