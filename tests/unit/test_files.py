# SPDX-License-Identifier: Apache-2.0
"""Small files, whole or not there, and the forms of their lines."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from tests.unit.files import no_descriptors
from writeback_exporter.features import Refused, raise_if_exhausted
from writeback_exporter.files.base import content, keyed, nested


@pytest.mark.parametrize("size", [0, 1, 4095, 65536, 65537, 200_000])
def test_content_is_whole(tmp_path: Path, size: int) -> None:
    text = os.urandom(size)
    (tmp_path / "file").write_bytes(text)
    assert content(tmp_path.as_posix() + "/file") == text
    assert content(os.fsencode(tmp_path) + b"/file") == text


def test_content_of_a_file_that_the_kernel_gives_in_parts() -> None:
    path = "/proc/self/maps"
    descriptor = os.open(path, os.O_RDONLY)
    first = os.read(descriptor, 1 << 16)
    os.close(descriptor)
    whole = content(path)
    assert whole is not None
    assert len(whole) > len(first)
    assert whole.splitlines()[-1] == Path(path).read_bytes().splitlines()[-1]


def test_content_that_is_not_there(tmp_path: Path) -> None:
    assert content(str(tmp_path / "none")) is None
    assert content(str(tmp_path / "none/none")) is None
    assert content(str(tmp_path)) is None  # opens, but cannot be read


def test_content_where_no_file_can_be_opened(tmp_path: Path) -> None:
    """It is not taken for absent, or a scrape would be empty and look well."""
    (tmp_path / "file").write_bytes(b"7")
    with no_descriptors(), pytest.raises(Refused, match=r"file: Too many open files; raise"):
        content(str(tmp_path / "file"))
    assert content(str(tmp_path / "file")) == b"7"


@pytest.mark.parametrize(
    ("number", "remedy"), [(errno.EMFILE, "LimitNOFILE="), (errno.ENFILE, "fs.file-max")]
)
def test_whose_files_have_run_out(number: int, remedy: str) -> None:
    """The process', or the machine's."""
    with pytest.raises(Refused, match=remedy) as refused:
        raise_if_exhausted(OSError(number, os.strerror(number), "/some/file"))
    assert refused.value.reason == "no descriptor"
    raise_if_exhausted(OSError(errno.ENOENT, "not there", "/some/file"))


def test_keyed() -> None:
    text = b"nr_dirty 12\nMemTotal: 99\n\nnr 1 2\nlow\nx y\nneg -1\n 7\nlast 18446744073709551615"
    assert keyed(text) == {
        b"nr_dirty": 12,
        b"MemTotal": 99,
        b"nr 1": 2,
        b"": 7,
        b"last": (1 << 64) - 1,
    }


def test_nested() -> None:
    text = b"8:0 a=1 b=2\n7:7 \n7:1 7:0 259:3 a.b=max c==\nd=\n\n8:16"
    assert list(nested(text)) == [
        (b"8:0", b"a", b"1"),
        (b"8:0", b"b", b"2"),
        (b"259:3", b"a.b", b"max"),
        (b"259:3", b"c", b"="),
        (b"259:3", b"d", b""),
    ]
    assert list(nested(b"a=1")) == [(b"", b"a", b"1")]
