# SPDX-License-Identifier: Apache-2.0
"""The guest is what the other tests take it for."""

import mmap
import os
import subprocess
import time
from pathlib import Path

import pytest

MIB = 1 << 20


def test_release(expected_release: str) -> None:
    assert os.uname().release == expected_release


def test_btf() -> None:
    assert Path("/sys/kernel/btf/vmlinux").read_bytes()[:2] == b"\x9f\xeb"


def test_cgroup_controllers() -> None:
    cgroup = Path("/sys/fs/cgroup/test_guest_itself")
    cgroup.mkdir()
    try:
        assert {"io", "memory"} <= set((cgroup / "cgroup.controllers").read_text().split())
        # Not there in kernels that want psi=1 on the command line.
        assert (cgroup / "io.pressure").read_text().startswith("some avg10=")
    finally:
        cgroup.rmdir()


@pytest.mark.parametrize(
    "path",
    [
        "/sys/fs/bpf",
        "/sys/kernel/debug/bdi",
        "/sys/kernel/security/lsm",
        "/sys/kernel/tracing/events/writeback/balance_dirty_pages",
    ],
)
def test_mounted(path: str) -> None:
    assert Path(path).exists()


def test_bpf_lsm() -> None:
    assert "bpf" in Path("/sys/kernel/security/lsm").read_text().split(",")


def test_modules_load() -> None:
    subprocess.run(["modprobe", "--verbose", "null_blk", "nr_devices=1"], check=True)
    try:
        assert Path("/sys/block/nullb0").exists()
    finally:
        subprocess.run(["modprobe", "--remove", "null_blk"], check=True)


def test_vda_is_throttled() -> None:
    """2 MiB at 4 MiB/s, less what QEMU lets through in a burst (a tenth of a second's worth)."""
    block = mmap.mmap(-1, MIB // 4)  # page-aligned, as O_DIRECT wants it
    descriptor = os.open("/dev/vda", os.O_WRONLY | os.O_DIRECT)
    try:
        start = time.monotonic()
        for index in range(8):
            assert os.pwrite(descriptor, block, index * len(block)) == len(block)
        assert time.monotonic() - start > 0.25
    finally:
        os.close(descriptor)
        block.close()
