# SPDX-License-Identifier: Apache-2.0
"""Direct IO to a block device from several cgroups, many requests in flight at once.

    python -m tests.bench.workload DEVICE DEPTH CGROUP_DIRECTORY...

One process a cgroup. For each number N on standard input, each process sends N batches of DEPTH
requests and waits for them; then comes a line "done". Half are writes, a quarter is 16 KiB and the
rest 4 KiB, at random offsets. Through Linux AIO, for a thread a request would measure Python.
"""

from __future__ import annotations

import ctypes as C
import mmap
import os
import platform
import random
import sys
from collections.abc import Sequence
from typing import NoReturn

_SETUP, _GETEVENTS, _SUBMIT = {"x86_64": (206, 208, 209), "aarch64": (0, 4, 2)}[platform.machine()]
_PREAD, _PWRITE = 0, 1  # IOCB_CMD_*, include/uapi/linux/aio_abi.h
_EVENT_SIZE = 32  # struct io_event
_PAGE, _LARGE = 4096, 16384

_libc = C.CDLL(None, use_errno=True)
_libc.syscall.restype = C.c_long


class _Iocb(C.Structure):
    """struct iocb of include/uapi/linux/aio_abi.h, little endian."""

    _fields_ = (
        ("data", C.c_uint64),
        ("key", C.c_uint32),
        ("flags_of_request", C.c_uint32),
        ("opcode", C.c_uint16),
        ("priority", C.c_int16),
        ("fd", C.c_uint32),
        ("buffer", C.c_uint64),
        ("size", C.c_uint64),
        ("offset", C.c_int64),
        ("reserved", C.c_uint64),
        ("flags", C.c_uint32),
        ("event_fd", C.c_uint32),
    )


class Requests:
    """As many requests as are in flight at once, prepared once and sent again and again."""

    def __init__(self, device: str, depth: int, seed: int) -> None:
        self._depth = depth
        self._chance = random.Random(seed)
        self._fd = os.open(device, os.O_RDWR | os.O_DIRECT)
        self._pages = os.lseek(self._fd, 0, os.SEEK_END) // _PAGE
        self._buffer = mmap.mmap(-1, _LARGE * depth)  # page aligned
        start = C.addressof(C.c_char.from_buffer(self._buffer))
        self._iocbs = (_Iocb * depth)(
            *(_Iocb(fd=self._fd, buffer=start + i * _LARGE) for i in range(depth))
        )
        self._pointers = (C.c_void_p * depth)(
            *(C.addressof(self._iocbs) + i * C.sizeof(_Iocb) for i in range(depth))
        )
        self._events = C.create_string_buffer(_EVENT_SIZE * depth)
        self._context = C.c_uint64()
        self._call(_SETUP, depth, C.byref(self._context))

    def run(self, batches: int) -> None:
        depth, context = C.c_long(self._depth), self._context
        for _ in range(batches):
            self._choose()
            assert self._call(_SUBMIT, context, depth, self._pointers) == self._depth
            assert self._call(_GETEVENTS, context, depth, depth, self._events, None) == self._depth

    def _choose(self) -> None:
        chance = self._chance.random
        for iocb in self._iocbs:
            iocb.opcode = _PWRITE if chance() < 0.5 else _PREAD
            iocb.size = _LARGE if chance() < 0.25 else _PAGE
            iocb.offset = int(chance() * (self._pages - _LARGE // _PAGE)) * _PAGE

    @staticmethod
    def _call(number: int, *arguments: object) -> int:
        result: int = _libc.syscall(C.c_long(number), *arguments)
        if result < 0:
            error = C.get_errno()
            raise OSError(error, f"AIO system call {number}: {os.strerror(error)}")
        return result


def _serve(requests: Requests, orders: int, done: int) -> NoReturn:
    while order := os.read(orders, 4):
        requests.run(int.from_bytes(order, "little"))
        os.write(done, b".")
    os._exit(0)


def _start(device: str, depth: int, cgroup: str, seed: int, done: int) -> int:
    """Forks a process that does IO in the cgroup; the pipe through which it takes orders."""
    orders, give = os.pipe()
    if os.fork():
        os.close(orders)
        return give
    try:
        os.close(give)
        with open(f"{cgroup}/cgroup.procs", "w") as procs:
            procs.write("0")
        _serve(Requests(device, depth, seed), orders, done)
    finally:
        os._exit(1)


def main(arguments: Sequence[str]) -> None:
    device, depth, *cgroups = arguments
    finished, done = os.pipe()
    pipes: list[int] = []
    for seed, cgroup in enumerate(cgroups):
        pipes.append(_start(device, int(depth), cgroup, seed, done))
    os.close(done)  # so that a process that dies is noticed
    for line in sys.stdin:
        for pipe in pipes:
            os.write(pipe, int(line).to_bytes(4, "little"))
        for _ in pipes:
            assert os.read(finished, 1), "a process of the workload died"
        print("done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
