# SPDX-License-Identifier: Apache-2.0
"""Mounts that somebody made to confuse us; those that are usual are in test_devices.py."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from writeback_exporter.names.mounts import Mount, parse, swaps


def test_a_carriage_return_ends_no_line() -> None:
    lines = (
        b"22 1 0:30 / /a\rb rw,relatime - fuse.evil \rsource rw\n"
        b"23 1 8:1 / /data rw - ext4 /dev/sda1 rw\n"
    )
    assert parse(lines) == {
        "0:30": Mount("fuse.evil", "\rsource", "/a\rb"),
        "8:1": Mount("ext4", "/dev/sda1", "/data"),
    }


@given(text=st.binary())
def test_anything_is_read(text: bytes) -> None:
    parse(text)
    parse(b"22 1 0:30 / /a rw - ext4 /dev/sda rw\n" + text)


def test_swaps_of_any_name(tmp_path: Path) -> None:
    (tmp_path / "swaps").write_bytes(
        b"Filename\tType\tSize\tUsed\tPriority\n/swap\\040file\tfile\t9\t0\t-2\n\r\n"
        b"/dev/zram0\tpartition\t9\t0\t-3\n"
    )
    assert swaps(str(tmp_path)) == ["/dev/zram0"]
