# SPDX-License-Identifier: Apache-2.0
"""What malloc keeps, each in a process of its own, for the setting stays."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# Prints whether a block has a mapping, which goes back to the kernel with it, after a larger one
# was freed, as the kernel's BTF is at start. mallinfo(3) counts mappings in its fourth number.
CODE = """
import ctypes, sys
from writeback_exporter import cli

class Info(ctypes.Structure):
    _fields_ = [("numbers", ctypes.c_int * 10)]

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
libc.mallinfo.restype = Info

if sys.argv[1:]:
    cli.main(sys.argv[1:])
libc.free(libc.malloc(16 << 20))
before = libc.mallinfo().numbers[3]
libc.malloc(1 << 20)
print(libc.mallinfo().numbers[3] - before)
"""
ENDS_AT_ONCE = ("serve", "--path.cgroupfs=/nowhere")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc's malloc")
@pytest.mark.parametrize(("arguments", "mappings"), [((), 0), (ENDS_AT_ONCE, 1)])
def test_large_blocks_have_mappings(arguments: tuple[str, ...], mappings: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == mappings, done.stderr
