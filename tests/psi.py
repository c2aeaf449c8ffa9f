# SPDX-License-Identifier: Apache-2.0
"""Pressure as tests make it and see it for themselves."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.waiting import PATIENCE_SECONDS

WITHOUT_SYS_RESOURCE = ("setpriv", "--bounding-set=-sys_resource", "--inh-caps=-sys_resource")
"""Runs a command as root whose PSI triggers are unprivileged."""

CONTENTION = """
import time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
parent = os.fork()
end = time.monotonic() + float(arguments[0])
while time.monotonic() < end:
    pass
if parent:
    os.waitpid(parent, 0)
"""
"""Two tasks want one CPU for so many seconds: for `lab.run_in`."""


def totals(path: Path) -> dict[str, int]:
    """Microseconds of some and full, or one of them, in a pressure file."""
    return {
        line.split()[0]: int(line.rpartition("total=")[2]) for line in path.read_text().splitlines()
    }


_WITNESS = """
import os, select, sys
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_NONBLOCK)
os.write(descriptor, sys.argv[2].encode() + b"\\0")
poll = select.poll()
poll.register(descriptor, select.POLLPRI)
poll.register(0, select.POLLIN)
print("armed", flush=True)
events = 0
while True:
    ready = dict(poll.poll())
    if 0 in ready:
        break
    assert ready[descriptor] == select.POLLPRI
    events += 1
print(events)
"""


@dataclass(slots=True)
class Witness:
    """A trigger of the test's own; `events` when it is over."""

    events: int = -1


@contextmanager
def witness(path: Path, trigger: str, prefix: Sequence[str] = ()) -> Iterator[Witness]:
    """Counts what the kernel says of a trigger such as "some 150000 2000000" (microseconds)."""
    process = subprocess.Popen(
        [*prefix, sys.executable, "-I", "-S", "-c", _WITNESS, path, trigger],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    seen = Witness()
    try:
        assert process.stdout.readline() == "armed\n"
        yield seen
        output, _ = process.communicate(timeout=PATIENCE_SECONDS)
        seen.events = int(output)
    finally:
        process.kill()
        process.communicate()
