# SPDX-License-Identifier: Apache-2.0
"""The oldest libraries that pyproject.toml admits: those of Debian 12, and 13's isal."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

from tests import lab
from tests.guest.vm import CHECKOUT

# All that calls them.
TESTS = (
    *("exposition", "catalogue", "histogram", "status", "server", "layout", "cli"),
    *("web_config", "secure_server"),
)


def test_unit_tests_pass_with_the_oldest_libraries(tmp_path: Path) -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    oldest = [requirement.replace(">=", "==") for requirement in project["dependencies"]]
    lab.sh(sys.executable, "-m", "pip", "install", "-q", "--target", tmp_path, *oldest)
    environment = {**os.environ, "PYTHONPATH": os.fspath(tmp_path)}
    show = "import prometheus_client; print(prometheus_client.__file__)"
    where = [sys.executable, "-c", show]
    used = subprocess.run(where, env=environment, capture_output=True, text=True, check=True)
    assert used.stdout.startswith(f"{tmp_path}/")
    tests = [f"tests/unit/test_{name}.py" for name in TESTS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=CHECKOUT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
