# SPDX-License-Identifier: Apache-2.0
"""Programs that make sync calls, for lab.run_in(): a known number of each, or one that hangs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests import lab
from tests.lab import Disk

COUNTS = {
    "fsync": 7,
    "fdatasync": 6,
    "sync": 2,
    "syncfs": 5,
    "msync": 9,
    "sync_file_range": 8,
}
ERRORS = {
    "fsync": 2,  # EINVAL: a pipe
    "fdatasync": 1,  # EBADF: no descriptor
    "sync": 0,  # it has none
    "syncfs": 2,  # EBADF
    "msync": 3,  # EINVAL: an address within a page
    "sync_file_range": 4,  # ESPIPE: a pipe
}

SYNC_CALLS = f"""
import ctypes, mmap, time
libc = ctypes.CDLL(None, use_errno=True)
fd = os.open(arguments[0], os.O_RDWR | os.O_CREAT, 0o600)
os.write(fd, bytes(65536))
pipe, _ = os.pipe()
shared = mmap.mmap(fd, 4096)
address = ctypes.addressof(ctypes.c_char.from_buffer(shared))
i64 = ctypes.c_int64
RANGE = 7  # SYNC_FILE_RANGE_WAIT_BEFORE | _WRITE | _WAIT_AFTER
calls = {{
    "fsync": (lambda: libc.fsync(fd), lambda: libc.fsync(pipe)),
    "fdatasync": (lambda: libc.fdatasync(fd), lambda: libc.fdatasync(-1)),
    "sync": (lambda: libc.sync() * 0, None),
    "syncfs": (lambda: libc.syncfs(fd), lambda: libc.syncfs(-1)),
    "msync": (
        lambda: libc.msync(ctypes.c_void_p(address), 4096, 4),
        lambda: libc.msync(ctypes.c_void_p(address + 1), 4096, 4),
    ),
    "sync_file_range": (
        lambda: libc.sync_file_range(fd, i64(0), i64(4096), RANGE),
        lambda: libc.sync_file_range(pipe, i64(0), i64(4096), RANGE),
    ),
}}
counts, errors = {COUNTS!r}, {ERRORS!r}
for name, (good, bad) in calls.items():
    begin = time.perf_counter()
    for _ in range(counts[name] - errors[name]):
        assert good() == 0, (name, ctypes.get_errno())
    for _ in range(errors[name]):
        assert bad() == -1, name
    print(name, time.perf_counter() - begin)
"""
"""Prints each call and the seconds that all of its kind took, this program's own work included."""

HANGING = """
import time
device, go = arguments
fd = os.open(device, os.O_WRONLY)
for _ in range(2):
    os.write(fd, bytes(65536))
    print("calls", flush=True)
    os.fsync(fd)
    print("returned", flush=True)
    while not os.path.exists(go):
        time.sleep(0.01)
"""
"""Writes to a device and calls fsync, and once more when there is a file of that name."""


@contextmanager
def frozen(mount: Path) -> Iterator[Callable[[], None]]:
    """Freezes a file system, so that writes to loop devices over its files wait, until the function
    is called."""
    lab.sh("fsfreeze", "-f", mount)
    with ExitStack() as thaw:
        thaw.callback(lab.sh, "fsfreeze", "-u", mount)
        yield thaw.close


@contextmanager
def stuck_disk(disk: Disk, directory: Path) -> Iterator[tuple[Disk, Callable[[], None]]]:
    """A loop device over a file on `disk` whose writes wait until the function is called. Comes
    after a caller's cgroup, for nobody who waits for it ends before it is released."""
    with (
        lab.ext4(disk, directory) as mount,
        lab.loop_disk(mount, 4 << 20) as stuck,
        frozen(mount) as release,
    ):
        yield stuck, release
