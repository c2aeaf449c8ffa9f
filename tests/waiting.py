# SPDX-License-Identifier: Apache-2.0
"""For what happens by itself, a moment later: on a busy machine, in a guest, many moments."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE_SECONDS = 180
"""For what must end, where a test asks nothing of how long it takes: guests are emulated, several
of them on two CPUs, and a task at its memory limit sleeps for two seconds a call."""


def wait_for(
    happened: Callable[[], T | None], seconds: float = PATIENCE_SECONDS, what: str = "it"
) -> T:
    """What `happened` returns once that is true; AssertionError where `what` does not happen."""
    end = time.monotonic() + seconds
    while not (answer := happened()):
        assert time.monotonic() < end, f"{what} did not happen within {seconds:g} s"
        time.sleep(0.01)
    return answer
