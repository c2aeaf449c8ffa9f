# SPDX-License-Identifier: Apache-2.0
"""What comes and goes around an exporter in a long life: cgroups, disks, pressure files, clients.

Each churner is a thread; what has to run in a cgroup is done by a process (`Doer`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from tests import lab
from tests.lab import Disk
from writeback_exporter.names.cgroups import Hierarchy

_LOOP_CTL_ADD, _LOOP_CTL_REMOVE = 0x4C80, 0x4C81  # include/uapi/linux/loop.h


# The world ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class Life:
    """What is known of a label: several cgroups may have it, at once or one after the other."""

    there: int = 0
    """Cgroups that have it now."""
    made_at: float = 0.0
    """When the youngest was made, in seconds of the monotonic clock."""
    gone_at: float = 0.0
    """When the last one went; the kernel may have kept it until then, though it was removed."""


class World:
    """The cgroups of the soak: a subtree in each hierarchy, all of one name."""

    def __init__(self, stack: contextlib.ExitStack, share: float) -> None:
        """`share` is of the usual pace at which things come and go."""
        self.share = share
        hierarchies = lab.hierarchies()
        self.label = f"/wbx-soak-{os.getpid()}"
        self.io, self.task = hierarchies.io, hierarchies.task
        self.memory = hierarchies.memory or hierarchies.task
        self.all = sorted({self.io, self.task, self.memory}, key=lambda h: h.id)
        self.lives: dict[str, Life] = {}
        self.made = 0
        self.lock = threading.Lock()
        self.quiet = threading.Event()
        """While it is set the churners make and remove nothing."""
        stack.callback(self._sweep)
        for path in ("", "/job", "/service", "/writer", "/dying", "/pressure", "/burst", "/fill"):
            self.make(path, *self.all)
            # With its controllers a cgroup of v2 takes ten times as long to make.
            if self.io.id == 0 and path != "/fill":
                control = self.directory(self.io, path) / "cgroup.subtree_control"
                control.write_text("+io +memory")

    def _sweep(self) -> None:
        """Removes all, also what a churner that failed has left."""
        for hierarchy in self.all:
            for directory, _, _ in os.walk(self.directory(hierarchy, ""), topdown=False):
                _rmdir(directory)

    def directory(self, hierarchy: Hierarchy, path: str) -> Path:
        return Path(f"{hierarchy.mount}{self.label}{path}")

    def make(self, path: str, *hierarchies: Hierarchy) -> None:
        for hierarchy in set(hierarchies):
            with self.lock:
                life = self.lives.setdefault(self.label + path, Life())
                life.there += 1
                life.made_at = time.monotonic()
                self.made += 1
            os.mkdir(self.directory(hierarchy, path))

    def remove(self, path: str, *hierarchies: Hierarchy) -> None:
        for hierarchy in set(hierarchies):
            _rmdir(self.directory(hierarchy, path))
            with self.lock:
                life = self.lives[self.label + path]
                life.there -= 1
                life.gone_at = time.monotonic()

    def kept_until_now(self, path: str) -> None:
        """The kernel had a removed cgroup until now, because of its page cache."""
        with self.lock:
            self.lives[self.label + path].gone_at = time.monotonic()


def _rmdir(directory: str | Path) -> None:
    """Of a cgroup: a process that has just ended may still be in it."""
    _patiently(lambda: os.rmdir(directory))


def _patiently(step: Callable[[], object]) -> None:
    """Does what may be refused for a moment because something is still busy."""
    end = time.monotonic() + 60
    while True:
        try:
            step()
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > end:
                raise
            time.sleep(0.02)


_DOER = """
import json, mmap, os, sys
buffer = mmap.mmap(-1, 65536)
for line in sys.stdin:
    task = json.loads(line)
    child = os.fork()
    if child == 0:
        try:
            for directory in task["cgroups"]:
                with open(directory + "/cgroup.procs", "w") as procs:
                    procs.write("0")
            flags = os.O_DIRECT if task["direct"] else os.O_CREAT | os.O_TRUNC
            fd = os.open(task["path"], os.O_RDWR | flags, 0o600)
            size, block = task["size"], memoryview(buffer)[: task["size"]]
            for i in range(task["count"]):
                assert os.pwrite(fd, block, i * size) == size
                if task["direct"]:
                    assert os.preadv(fd, [block], i * size) == size
            if task["sync"]:
                os.fsync(fd)
        except BaseException as error:
            sys.stderr.write(f"doer: {task}: {error!r}\\n")
            os._exit(1)
        os._exit(0)
    print(os.waitpid(child, 0)[1], flush=True)
"""


class Doer:
    """A process whose children do IO in cgroups: a fork takes 1 ms, a Python 20."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __enter__(self) -> Doer:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _DOER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def do(
        self,
        label: str,
        hierarchies: Sequence[Hierarchy],
        path: str | Path,
        size: int = 4096,
        count: int = 1,
        direct: bool = True,
        sync: bool = False,
    ) -> None:
        """In a child that is in these cgroups, writes COUNT times SIZE bytes to PATH and, where it
        is direct, reads each again."""
        directories = [str(self._world.directory(h, label)) for h in hierarchies]
        task = {
            "cgroups": directories,
            "path": str(path),
            "size": size,
            "count": count,
            "direct": direct,
            "sync": sync,
        }
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer == "0\n", f"the doer's child ended with {answer!r}: {task}"


# Churners -----------------------------------------------------------------------------------------


class Churner(threading.Thread):
    """Does `turn` again and again until it is stopped, then `end`."""

    pause: ClassVar[float] = 0.0
    """Seconds between turns, at the usual pace."""

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(name=type(self).__name__, daemon=True)
        self.world = world
        self.random = random.Random(f"{seed} {self.name}")
        self.turns = 0
        self.failure: BaseException | None = None
        self._stopped = threading.Event()
        self._turning = threading.Lock()

    def turn(self) -> None:
        raise NotImplementedError

    def end(self) -> None:
        """Removes what is left."""

    def run(self) -> None:
        try:
            with Doer(self.world) as self.doer:
                while not self._stopped.wait(self.pause / self.world.share):
                    with self._turning:
                        if not self.world.quiet.is_set():
                            self.turn()
                            self.turns += 1
                self.end()
        except BaseException as error:
            self.failure = error

    def stop(self) -> None:
        self._stopped.set()

    def wait_for_quiet(self) -> None:
        """Until the turn is over in which `world.quiet` was set."""
        with self._turning:
            pass


class Jobs(Churner):
    """Cgroups of names that are never used again. Most live for moments, some until scrapes have
    seen them; each tenth does IO."""

    def __init__(self, world: World, seed: int, disk: Disk, rate: float) -> None:
        """`rate` is of cgroups a second."""
        super().__init__(world, seed)
        self._disk, self._rate = disk, rate
        self._begin = time.monotonic()
        self._quiet = 0.0
        self._number = 0
        self._pending: list[tuple[float, str, list[Hierarchy]]] = []

    pause = 0.05

    def turn(self) -> None:
        now = time.monotonic()
        while self._number < (now - self._begin) * self._rate:
            self._make(now)
        due = [life for life in self._pending if life[0] <= now]
        self._pending = [life for life in self._pending if life[0] > now]
        for _, path, hierarchies in due:
            self.world.remove(path, *hierarchies)

    def _make(self, now: float) -> None:
        self._number += 1
        path = f"/job/{self._number}-{self.random.getrandbits(128):032x}"
        busy = self._number % 10 == 0
        hierarchies = [self.world.io, self.world.task] if busy else [self.world.task]
        self.world.make(path, *hierarchies)
        self._number += len(set(hierarchies)) - 1
        if busy:
            count = self.random.randint(1, 4)
            self.doer.do(path, hierarchies, self._disk.path, count=count)
        if self.random.random() < 0.8:
            self.world.remove(path, *hierarchies)
        else:
            self._pending.append((now + self.random.expovariate(1 / 4), path, hierarchies))

    def end(self) -> None:
        for _, path, hierarchies in self._pending:
            self.world.remove(path, *hierarchies)


class Services(Churner):
    """Services that are restarted: their cgroup goes and comes again under the same path. They have
    pressure triggers."""

    pause = 0.5
    NUMBER = 8
    TRIGGERS = r"/wbx-soak-\d+/service/.*"

    def __init__(self, world: World, seed: int, disk: Disk) -> None:
        super().__init__(world, seed)
        self._disk = disk
        self._hierarchies = [world.io, world.task]
        self._running: set[str] = set()

    def turn(self) -> None:
        path = f"/service/{self.turns % self.NUMBER}.service"
        if path in self._running:
            self.world.remove(path, *self._hierarchies)
        self.world.make(path, *self._hierarchies)
        self._running.add(path)
        self.doer.do(path, self._hierarchies, self._disk.path, count=2)

    def end(self) -> None:
        for path in self._running:
            self.world.remove(path, *self._hierarchies)


class Writers(Churner):
    """Buffered writers behind a strict limit of the disk, who are put to sleep and call fsync."""

    pause = 2.0

    def __init__(self, world: World, seed: int, mount: Path) -> None:
        super().__init__(world, seed)
        self._file = mount / "written"
        self._hierarchies = [world.io, world.task]

    def turn(self) -> None:
        path = f"/writer/{self.turns}"
        self.world.make(path, *self._hierarchies)
        self.doer.do(
            path, self._hierarchies, self._file, size=65536, count=8, direct=False, sync=True
        )
        self.world.remove(path, *self._hierarchies)
        # What it wrote stayed in the page cache until this one began its file anew.
        if self.turns:
            self.world.kept_until_now(f"/writer/{self.turns - 1}")

    def end(self) -> None:
        if self.turns:
            self._file.unlink()
            self.world.kept_until_now(f"/writer/{self.turns - 1}")


class Dying(Churner):
    """Cgroups that the kernel keeps after they are removed, for there is page cache of theirs; they
    are released when that goes, a quarter of a minute later."""

    pause = 5.0
    KEPT = 3

    def __init__(self, world: World, seed: int, directory: Path) -> None:
        super().__init__(world, seed)
        self._directory = directory
        self._hierarchies = list({world.memory, world.io})
        self._kept: deque[tuple[str, Path]] = deque()

    def turn(self) -> None:
        path = f"/dying/{self.turns}"
        file = self._directory / f"dying-{self.turns}"
        self.world.make(path, *self._hierarchies)
        self.doer.do(path, self._hierarchies, file, size=65536, count=2, direct=False)
        self.world.remove(path, *self._hierarchies)
        self._kept.append((path, file))
        if len(self._kept) > self.KEPT:
            self._let_go()

    def _let_go(self) -> None:
        path, file = self._kept.popleft()
        file.unlink()
        self.world.kept_until_now(path)

    def end(self) -> None:
        while self._kept:
            self._let_go()


class PressureFiles(Churner):
    """Cgroups whose pressure files vanish and come back (cgroup.pressure, 6.1), also in the middle
    of a scrape."""

    pause = 0.02
    NUMBER = 10

    def __init__(self, world: World, seed: int) -> None:
        super().__init__(world, seed)
        self._paths = [f"/pressure/{i}" for i in range(self.NUMBER)]

    def turn(self) -> None:
        if self.turns == 0:
            for path in self._paths:
                self.world.make(path, self.world.task)
        path = self.random.choice(self._paths)
        switch = self.world.directory(self.world.task, path) / "cgroup.pressure"
        switch.write_text(self.random.choice("01"))

    def end(self) -> None:
        if self.turns:
            for path in self._paths:
                self.world.remove(path, self.world.task)


@dataclass(slots=True)
class Truth:
    """What the kernel counted on the disks that had one name."""

    requests: dict[str, int] = field(default_factory=dict)
    """By op."""
    bytes: dict[str, int] = field(default_factory=dict)
    hidden: int = 0
    """Completions that it showed to no tracepoint (tests/host/witness.py)."""

    def add(self, stats: lab.DiskStats) -> None:
        for op, requests, size in (
            ("read", stats.reads, stats.read_bytes),
            ("write", stats.writes, stats.written_bytes),
            ("discard", stats.discards, stats.discarded_bytes),
        ):
            self.requests[op] = self.requests.get(op, 0) + requests
            self.bytes[op] = self.bytes.get(op, 0) + size


class Loop:
    """A loop device that is added to the kernel and, unlike losetup's, removed from it."""

    def __init__(self, number: int, image: Path, size: int = 64 << 20) -> None:
        self.disk = Disk(f"/dev/loop{number}")
        self._number, self._image, self._size = number, image, size

    def __enter__(self) -> Loop:
        with self._image.open("wb") as stream:
            stream.truncate(self._size)
        self._control(_LOOP_CTL_ADD)
        lab.sh("losetup", self.disk.path, self._image)
        # udev leaves a locked disk alone, and else reads it after each writer.
        self._lock = os.open(self.disk.path, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)
        lab.sh("losetup", "-d", self.disk.path)
        _patiently(lambda: self._control(_LOOP_CTL_REMOVE))
        self._image.unlink()

    def _control(self, request: int) -> None:
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.ioctl(control, request, self._number)
        finally:
            os.close(control)


class Disks(Churner):
    """Loop devices that are plugged and unplugged: two names that come again before their series
    have left, and names that never come again."""

    pause = 3.0
    FIRST = 1000 + os.getpid() % 500 * 1000
    """Of the numbers of these devices: far from losetup's, and from another soak's."""

    def __init__(
        self, world: World, seed: int, directory: Path, hidden: Callable[[Disk], int]
    ) -> None:
        super().__init__(world, seed)
        self._directory, self._hidden = directory, hidden
        self.truth: dict[str, Truth] = {}
        """By name, of the disks that were unplugged."""
        self.gone_at: dict[str, float] = {}

    def turn(self) -> None:
        number = self.FIRST + self.turns % 2
        if self.turns % 4 == 3:
            number = self.FIRST + 2 + self.turns // 4
        with Loop(number, self._directory / f"image-{number}", 1 << 20) as loop:
            self.gone_at.pop(loop.disk.name, None)
            path = f"/job/disk-{self.turns}"
            hierarchies = [self.world.io, self.world.task]
            self.world.make(path, *hierarchies)
            self.doer.do(
                path, hierarchies, loop.disk.path, size=16384, count=self.random.randint(1, 20)
            )
            self.world.remove(path, *hierarchies)
            truth = self.truth.setdefault(loop.disk.name, Truth())
            truth.add(loop.disk.settled())
            truth.hidden = self._hidden(loop.disk)  # of all that had its number
        self.gone_at[loop.disk.name] = time.monotonic()


class Clients(Churner):
    """Clients that connect and say nothing, half a request, or requests whose answers they do not
    read; some hang up, most hang until the server has enough of them."""

    pause = 0.5
    LIMIT = 60
    SAID = (
        b"",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Slow: ",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00nonsense\r\n\r\n",
    )

    def __init__(self, world: World, seed: int, url: str) -> None:
        super().__init__(world, seed)
        host, port = url.removeprefix("http://").rsplit(":", 1)
        self._address = host, int(port)
        self._open: deque[socket.socket] = deque()

    def turn(self) -> None:
        client = socket.create_connection(self._address, timeout=5)
        self._open.append(client)
        said = self.SAID[self.turns % len(self.SAID)]
        if self.turns % 40 == 0:
            # Rarely: as many as the server has places for scrapes (8) would keep us out.
            said = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 2
        with contextlib.suppress(OSError):
            client.sendall(said)
        if len(self._open) > self.LIMIT:
            self._open.popleft().close()
        if self.turns % 7 == 0:
            self._open.pop().close()

    def end(self) -> None:
        while self._open:
            self._open.popleft().close()
