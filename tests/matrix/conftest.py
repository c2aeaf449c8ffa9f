# SPDX-License-Identifier: Apache-2.0
"""This checkout as the other Debian release builds it, and its Debian package."""

import re
from pathlib import Path

import pytest

from tests import lab
from tests.guest.vm import CHECKOUT

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


@pytest.fixture(scope="session")
def package() -> Path:
    lab.sh("make", "-sC", CHECKOUT, "deb")
    (made,) = (CHECKOUT / "dist").glob("*.deb")
    return made


@pytest.fixture(scope="session", params=releases.OTHER)
def clean(request: pytest.FixtureRequest, package: Path) -> releases.Release:
    """A release with systemd and, as apt would have it, what the package depends on and what it
    recommends; of that Debian 12 has nothing."""
    fields = ("Depends",) if request.param == "bookworm" else ("Depends", "Recommends")
    needed = [lab.sh("dpkg-deb", "--field", package, field) for field in fields]
    names = sorted(set(re.findall(r"(?:^|, )([a-z0-9.+-]+)", ", ".join(needed))))
    # The other one is what Debian 12's bcrypt asks for by names that it provides, which debootstrap
    # does not know.
    names += ["systemd", "python3-cffi-backend"]
    try:
        return releases.clean_release(request.param, "clean", names)
    except releases.ReleaseUnavailable as error:
        failure = str(error)
    pytest.fail(failure, pytrace=False)
