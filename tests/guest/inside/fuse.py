# SPDX-License-Identifier: Apache-2.0
"""A FUSE file system of one file that forgets what is written to it, slowly.

The kernel's protocol (include/uapi/linux/fuse.h) without libfuse, with the writeback cache that few
FUSE file systems have. It is a process of its own, as that of any FUSE file system.

    python fuse.py DIRECTORY SECONDS   # mounts, serves until it is unmounted, prints bytes written
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import stat
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT, FILE = 1, 2
MAX_WRITE = 128 << 10
BIG_WRITES, WRITEBACK_CACHE = 1 << 5, 1 << 16

LOOKUP, FORGET, GETATTR, SETATTR, OPEN, READ, WRITE = 1, 2, 3, 4, 14, 15, 16
STATFS, RELEASE, FSYNC, FLUSH, INIT, DESTROY = 17, 18, 20, 25, 26, 38
OPENDIR, RELEASEDIR, INTERRUPT, BATCH_FORGET = 27, 29, 36, 42

IN_HEADER = struct.Struct("=IIQQIIII")  # length, opcode, unique, node, uid, gid, pid, padding
OUT_HEADER = struct.Struct("=IiQ")  # length, -errno, unique
ATTRIBUTES = struct.Struct("=6Q10I")
TRANSFER = struct.Struct("=QQII")  # handle, offset, size, flags
SETATTR_IN = struct.Struct("=IIQQ")  # valid, padding, handle, size
SIZE_VALID = 1 << 3


class Served:
    """A mounted file system."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Who asks it for something waits, as for an NFS server that is gone."""
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def written(self) -> int:
        """How many bytes it was given; waits for its end, after umount."""
        output, _ = self._process.communicate(timeout=180)
        return int(output)


@contextmanager
def mounted(directory: Path, seconds: float) -> Iterator[Served]:
    """One that takes that long for each write, of 128 KiB at most."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, directory, str(seconds)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout
        assert process.stdout.readline() == "mounted\n"
        yield Served(process)
    finally:
        process.kill()  # which ends the connection: who waits gets ENOTCONN
        process.communicate()
        if os.path.ismount(directory):
            subprocess.run(["umount", "--lazy", directory], check=True)


class Server:
    """Answers the kernel's requests."""

    def __init__(self, device: int, seconds: float) -> None:
        self._device, self._seconds = device, seconds
        self._size = 0
        self.written = 0

    def serve(self) -> None:
        """Until it is unmounted."""
        while True:
            try:
                request = os.read(self._device, MAX_WRITE + 4096)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                if error.errno in (errno.EINTR, errno.ENOENT):  # it was given up meanwhile
                    continue
                raise
            _, opcode, unique, node, *_ = IN_HEADER.unpack_from(request)
            if opcode in (FORGET, BATCH_FORGET, INTERRUPT):
                continue  # they want no answer
            answer = self._answer(opcode, node, request[IN_HEADER.size :])
            code, body = (answer, b"") if isinstance(answer, int) else (0, answer)
            header = OUT_HEADER.pack(OUT_HEADER.size + len(body), -code, unique)
            os.write(self._device, header + body)

    def _answer(self, opcode: int, node: int, body: bytes) -> bytes | int:
        """What an answer has after its header, or an error number."""
        if opcode == INIT:
            _, minor, readahead, _ = struct.unpack_from("=4I", body)
            flags = BIG_WRITES | WRITEBACK_CACHE
            return struct.pack(
                "=4IHHIIHHI28x", 7, min(minor, 31), readahead, flags, 4, 3, MAX_WRITE, 1, 0, 0, 0
            )
        if opcode == LOOKUP:
            if body != b"file\0":
                return errno.ENOENT
            return struct.pack("=QQQQII", FILE, 0, 60, 60, 0, 0) + self._attributes(FILE)
        if opcode == SETATTR:
            valid, _, _, size = SETATTR_IN.unpack_from(body)
            if valid & SIZE_VALID:
                self._size = size
        if opcode in (GETATTR, SETATTR):
            return struct.pack("=QII", 60, 0, 0) + self._attributes(node)
        if opcode in (OPEN, OPENDIR):
            return struct.pack("=QII", 0, 0, 0)
        if opcode == READ:
            _, offset, size, _ = TRANSFER.unpack_from(body)
            return bytes(max(0, min(size, self._size - offset)))
        if opcode == WRITE:
            _, offset, size, _ = TRANSFER.unpack_from(body)
            time.sleep(self._seconds)
            self.written += size
            self._size = max(self._size, offset + size)
            return struct.pack("=II", size, 0)
        if opcode == STATFS:
            return bytes(80)
        if opcode in (RELEASE, RELEASEDIR, FLUSH, FSYNC, DESTROY):
            return b""
        return errno.ENOSYS

    def _attributes(self, node: int) -> bytes:
        mode = stat.S_IFDIR | 0o755 if node == ROOT else stat.S_IFREG | 0o644
        size = 0 if node == ROOT else self._size
        times = (0,) * 6
        return ATTRIBUTES.pack(node, size, 0, *times, mode, 1, 0, 0, 0, 4096, 0)


def main() -> None:
    directory, seconds = sys.argv[1], float(sys.argv[2])
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"forgetful", os.fsencode(directory), b"fuse", 0, options.encode()):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    print("mounted", flush=True)
    server = Server(device, seconds)
    server.serve()
    print(server.written)


if __name__ == "__main__":
    main()
