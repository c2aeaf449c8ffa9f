# SPDX-License-Identifier: Apache-2.0
"""Processes with io_urings whose submission queue a kernel thread polls (SQPOLL), by raw system
calls, and what the kernel itself says of that thread."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests import lab

# include/uapi/linux/io_uring.h; both system calls have one number on all architectures.
_CODE = """
import ctypes, json, mmap, os, signal, struct, time

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
SETUP, ENTER = 425, 426
SQPOLL, ATTACH_WQ = 1 << 1, 1 << 5
ENTRIES = 64
MIB = 1 << 20
# opcode IORING_OP_READ, file, offset, address, length. Long enough that the kernel, which takes
# samples of where a thread spends its time, finds it at work.
zero, buffer = os.open("/dev/zero", os.O_RDONLY), mmap.mmap(-1, MIB)
address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
READ = struct.pack("=BxxxiQQI36x", 22, zero, 0, address, MIB)


class Ring:
    def __init__(self, flags, shared=None):
        params = (ctypes.c_uint32 * 30)()
        params[2], params[4] = flags, 20  # flags, sq_thread_idle in ms
        if shared:
            params[2] |= ATTACH_WQ
            params[6] = shared.fd
        self.polled = bool(flags & SQPOLL)
        self.fd = libc.syscall(SETUP, ENTRIES, params)
        assert self.fd >= 0, os.strerror(ctypes.get_errno())
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        rings = libc.mmap(None, 4096, protection, mmap.MAP_SHARED, self.fd, 0)
        sqes = libc.mmap(None, 4096, protection, mmap.MAP_SHARED, self.fd, 0x10000000)
        assert ctypes.c_void_p(-1).value not in (rings, sqes), os.strerror(ctypes.get_errno())
        ctypes.memmove(sqes, READ * ENTRIES, 4096)
        word = lambda index: ctypes.c_uint32.from_address(rings + params[index])
        self.head, self.tail, self.flags = word(10), word(11), word(14)
        self.array = (ctypes.c_uint32 * ENTRIES).from_address(rings + params[16])
        self.done, self.seen = word(21), word(20)

    def work(self):
        while self.tail.value - self.head.value < ENTRIES:
            self.array[self.tail.value % ENTRIES] = self.tail.value % ENTRIES
            self.tail.value += 1
        if self.flags.value & 1:  # IORING_SQ_NEED_WAKEUP
            libc.syscall(ENTER, self.fd, 1, 0, 1 << 1, None, 0)  # IORING_ENTER_SQ_WAKEUP
        self.seen.value = self.done.value


rings = []
for kind in arguments[0].split(","):
    if kind == "plain":
        rings.append(Ring(0))
    elif kind == "own":
        rings.append(Ring(SQPOLL))
    elif kind == "attached":
        rings.append(Ring(SQPOLL, shared=rings[0]))
fds = [ring.fd for ring in rings] + [os.dup(rings[0].fd)]


def worked(ring):
    # Whether the kernel says that the ring's thread has, or has no such count (6.9); it says
    # nothing while the ring is in use.
    while ring.head.value != ring.tail.value:
        time.sleep(0.001)
    with open(f"/proc/self/fdinfo/{ring.fd}") as fdinfo:
        fields = dict(line.split(":", 1) for line in fdinfo if line.startswith("Sq"))
    return int(fields.get("SqThread", -1)) > 0 and int(fields.get("SqWorkTime", 1)) > 0


end = time.monotonic() + float(arguments[1])
polled = [ring for ring in rings if ring.polled]
while time.monotonic() < end or not all(map(worked, polled)):
    for ring in rings:
        ring.work()
print(json.dumps(fds), flush=True)
signal.pause()
"""


@dataclass(frozen=True, slots=True)
class Times:
    """What fdinfo says of a thread: microseconds."""

    total: int
    busy: int


@dataclass(slots=True)
class Rings:
    """A process that has made rings, has had them work, and does nothing any more."""

    process: subprocess.Popen[str]
    fds: list[int]
    """Of the rings in the order that they were asked for, then a copy of the first."""

    def fields(self, fd: int) -> dict[str, int]:
        for _ in range(200):
            text = Path(f"/proc/{self.process.pid}/fdinfo/{fd}").read_text()
            found = re.findall(r"^(Sq\w+):\s+(-?\d+)$", text, re.MULTILINE)
            if any(key == "SqThread" for key, _ in found):  # else the ring's lock was held just now
                break
            time.sleep(0.01)
        return {key: int(number) for key, number in found}

    def at_rest(self, fd: int) -> Times:
        """The thread's times, once it sleeps and they stand still. It never sleeps at work, for
        it reads zeros; when it does not run it may as well have no CPU."""
        last = None
        for _ in range(200):
            fields = self.fields(fd)
            if "SqTotalTime" in fields and fields["SqThread"] > 0:
                now = Times(fields["SqTotalTime"], fields["SqWorkTime"])
                if not self._sleeps(fields["SqThread"]):
                    last = None
                elif now == last:
                    return now
                else:
                    last = now
            time.sleep(0.1)
        raise AssertionError("the SQPOLL thread does not come to rest")

    def _sleeps(self, thread: int) -> bool:
        stat = Path(f"/proc/{self.process.pid}/task/{thread}/stat").read_text()
        return stat.rpartition(") ")[2].startswith("S")

    def thread_ns(self, fd: int) -> int:
        """CPU time of the ring's thread, as the scheduler has it."""
        thread = self.fields(fd)["SqThread"]
        schedstat = Path(f"/proc/{self.process.pid}/task/{thread}/schedstat").read_text()
        return int(schedstat.split()[0])

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def rings(cgroups: Sequence[lab.Cgroup], *kinds: str, seconds: float = 0.5) -> Iterator[Rings]:
    """A process in these cgroups with such rings: "own" thread, "attached" to the first ring's, or
    "plain", without a thread. It has them read zeros for `seconds`."""
    process = lab.spawn_in(cgroups, _CODE, ",".join(kinds), seconds)
    assert process.stdout is not None
    made = Rings(process, [])
    try:
        made.fds = json.loads(process.stdout.readline() or "[]")
        assert made.fds, "the process could not make its rings"
        yield made
    finally:
        made.end()
