# SPDX-License-Identifier: Apache-2.0
"""For what happens by itself, a moment later."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(happened: Callable[[], T | None], seconds: float = 30, what: str = "it") -> T:
    """What `happened` returns once that is true; AssertionError where `what` does not happen."""
    end = time.monotonic() + seconds
    while not (answer := happened()):
        assert time.monotonic() < end, f"{what} did not happen within {seconds:g} s"
        time.sleep(0.01)
    return answer
