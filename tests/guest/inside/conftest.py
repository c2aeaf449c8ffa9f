# SPDX-License-Identifier: Apache-2.0
"""For tests in a guest: what they change of the kernel's settings is gone with the guest."""

from pathlib import Path

import pytest

from ..vm import MARKER

_PARAMETERS = dict(
    parameter.partition("=")[::2] for parameter in Path("/proc/cmdline").read_text().split()
)

if MARKER not in _PARAMETERS:
    raise pytest.UsageError("these tests run in a guest: run pytest tests/guest instead")


@pytest.fixture(scope="session")
def expected_release() -> str:
    """The release of the kernel that this guest was to boot."""
    return _PARAMETERS[MARKER]
