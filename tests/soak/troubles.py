# SPDX-License-Identifier: Apache-2.0
"""What breaks in a long life, on purpose: cgroup events that are lost, descriptors that run out, a
clock that is set."""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests import lab
from tests.lab import Disk
from tests.soak.churners import Doer, World

RING = "cgroup_lifecycle/cgroup_events"
RING_BYTES = 1 << 20  # cgroup_events in bpf/cgroup_lifecycle.bpf.c
_EVENT_BYTES = 8 + 16 + 1  # the ring's header, ours, the NUL that ends the path
_EVENTS = 3  # of a cgroup that comes and goes: mkdir, rmdir, release
LOST = 10
"""Cgroups of each overflow that do IO and have gone before anybody could learn their names."""
LOST_WRITES = 4
"""How often each of them writes, and reads as often."""
SURVIVORS = 20
"""Cgroups of each overflow that are made when events are lost, and stay."""


@dataclass(frozen=True, slots=True)
class Overflow:
    """What came of one: labels that must be known after it, and that must not be."""

    survivors: tuple[str, ...]
    removed: tuple[str, ...]
    """Had IO before, were removed while events were lost."""


def overflow(exporter: lab.Exporter, world: World, doer: Doer, disk: Disk, number: int) -> Overflow:
    """Stops the exporter for a moment in which more happens to cgroups than the ring holds."""
    busy = [world.io, world.task]
    removed = [f"/burst/{number}-removed-{i}" for i in range(LOST)]
    for path in removed:
        world.make(path, *busy)
        doer.do(path, busy, disk.path)
    exporter.get("/metrics")  # so that all of these are known
    exporter.process.send_signal(signal.SIGSTOP)
    try:
        for i in range(_cgroups_that_fill(world)):
            path = _filling(number, i)
            world.make(path, world.task)
            world.remove(path, world.task)
        for path in removed:
            world.remove(path, *busy)
        survivors = [f"/burst/{number}-survives-{i}" for i in range(SURVIVORS)]
        for path in survivors:
            world.make(path, world.task)
        for i in range(LOST):
            path = f"/burst/{number}-lost-{i}"
            world.make(path, *busy)
            doer.do(path, busy, disk.path, count=LOST_WRITES)
            world.remove(path, *busy)
        time.sleep(0.5)  # releases come later, and would tell a name
    finally:
        exporter.process.send_signal(signal.SIGCONT)
    return Overflow(
        tuple(world.label + path for path in survivors),
        tuple(world.label + path for path in removed),
    )


def _filling(number: int, i: int) -> str:
    return f"/fill/{number}-{i:064x}"  # as long as a container's


def _cgroups_that_fill(world: World) -> int:
    """Half as many again as the ring has room for."""
    event = _EVENT_BYTES + len(world.label + _filling(0, 0))
    return RING_BYTES * 3 // 2 // (event * _EVENTS)


def cgroups_of_an_overflow(world: World) -> int:
    return _cgroups_that_fill(world) + SURVIVORS + 4 * LOST


def remove_survivors(world: World, happened: Overflow) -> None:
    for label in happened.survivors:
        world.remove(label.removeprefix(world.label), world.task)


@contextmanager
def exhaustion(exporter: lab.Exporter) -> Iterator[None]:
    """The exporter can open no further file, for a while."""
    pid = exporter.process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (16, hard))  # it has more
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


def step_clock(hours: float) -> None:
    """Sets the machine's clock: in a guest."""
    time.clock_settime(time.CLOCK_REALTIME, time.time() + hours * 3600)
