# SPDX-License-Identifier: Apache-2.0
"""This checkout as the other Debian release builds it."""

from pathlib import Path

import pytest

from tests import lab

from . import releases


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> releases.Checkout:
    """Built there without a warning of the compiler. Fails where the release cannot be had."""
    try:
        release = releases.other_release()
    except releases.ReleaseUnavailable as error:
        failure = str(error)
    else:
        made = releases.copy(tmp_path_factory.mktemp("other"), release)
        lab.sh(*made.prefix(), "make", "build", "CLANG=clang -Werror")
        return made
    pytest.fail(failure, pytrace=False)


@pytest.fixture(scope="session")
def other_objects(other: releases.Checkout) -> Path:
    """The BPF objects as that compiler made them."""
    return other.objects
