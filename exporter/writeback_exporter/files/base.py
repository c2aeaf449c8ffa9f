# SPDX-License-Identifier: Apache-2.0
"""What the readers of files share: their life, and small files that may not be there."""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import Iterator

from writeback_exporter.collector import Collector, Host
from writeback_exporter.features import Feature, raise_if_exhausted
from writeback_exporter.settings import Settings

_CHUNK = 1 << 16


class Reader(Collector):
    """A collector that needs no BPF: `open` once, then `fill` at each scrape."""

    @abstractmethod
    def open(self, settings: Settings, host: Host, lock: threading.Lock) -> list[Feature]:
        """Looks what is there; the features beside the main one. Raises Refused.

        `lock` is free during the call and is held by whoever uses `host`: by the caller of `fill`,
        and to be taken by a thread of the reader's own.
        """


def content(path: str | bytes) -> bytes | None:
    """A small file's content; None where there is none, or none that can be read, such as that of
    a cgroup that has just gone. Read to its end, as procfs may give less than a page at a time.

    Raises Refused where no file can be opened at all.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise_if_exhausted(error)
        return None
    try:
        text = os.read(descriptor, _CHUNK)
        while more := os.read(descriptor, _CHUNK):
            text += more
        return text
    except OSError:
        return None
    finally:
        os.close(descriptor)


def keyed(text: bytes) -> dict[bytes, int]:
    """Lines of "name number", as in memory.events and vmstat; lines of another form are left
    out."""
    numbers = {}
    for line in text.splitlines():
        name, _, number = line.rpartition(b" ")
        if number.isdigit():
            numbers[name.rstrip(b":")] = int(number)
    return numbers


def number(path: str | bytes) -> int | None:
    """The number that a file holds; None where it holds none, or is not there."""
    text = content(path)
    return int(text) if text and text.strip().isdigit() else None


def is_count(number: int) -> bool:
    """Whether it can be true: a counter of the kernel that ran below zero reads as 2^64 - n."""
    return number < 1 << 63


def nested(text: bytes) -> Iterator[tuple[bytes, bytes, bytes]]:
    """(name, key, value) of lines of "name key=value key=value ...", as in io.stat.

    A name may have no keys, and where the line of such a one is not ended the next one counts.
    """
    name = b""
    for word in text.split():
        key, equals, value = word.partition(b"=")
        if equals:
            yield name, key, value
        else:
            name = word
