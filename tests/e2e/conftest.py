# SPDX-License-Identifier: Apache-2.0
"""One run of the story for all tests: it takes a minute."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.e2e.story import Story
from tests.e2e.story import story as told


@pytest.fixture(scope="session")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    assert os.geteuid() == 0, "these tests load BPF programs and make loop devices: run as root"
    with told(tmp_path_factory.mktemp("story")) as happened:
        yield happened
