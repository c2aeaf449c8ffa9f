# SPDX-License-Identifier: Apache-2.0
"""This checkout as the other Debian release builds it."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.guest import vm
from writeback_exporter.kernel.loader import OBJECTS

from . import releases

Run = Callable[[str], subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return releases.clone(tmp_path_factory.mktemp("release"))


@pytest.fixture(scope="session")
def there(checkout: Path) -> Run:
    """Runs a command in the checkout in the other release, where it has been built."""
    try:
        root = releases.root(releases.other_release())
    except releases.ReleaseUnavailable as error:
        failure = str(error)
    else:

        def run(command: str) -> subprocess.CompletedProcess[str]:
            return releases.enter(root, checkout, command)

        built = run("make build CLANG='clang -Werror'")
        assert built.returncode == 0, built.stdout + built.stderr
        return run
    pytest.fail(failure, pytrace=False)


@pytest.fixture(scope="session")
def other_objects(there: Run, checkout: Path) -> Path:
    """The BPF objects as the other release's compiler made them."""
    return checkout / OBJECTS.relative_to(vm.CHECKOUT)
