# SPDX-License-Identifier: Apache-2.0
"""Where Prometheus, Alertmanager and their tools are, which `make` unpacks but does not install."""

from __future__ import annotations

import subprocess
from pathlib import Path

UNPACKED = Path(__file__).parents[1] / "build/monitoring/usr/bin"


def tool(name: str) -> Path:
    """Of prometheus, promtool, prometheus-alertmanager and amtool."""
    path = UNPACKED / name
    assert path.exists(), f"{path} is missing: run the tests by make, which fetches it"
    return path


def ask(name: str, *arguments: str | Path, input: str | None = None) -> str:
    """Runs a tool that must succeed; all that it printed."""
    said = subprocess.run(
        [tool(name), *arguments],
        input=input,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
        check=False,
    )
    assert said.returncode == 0, said.stdout
    return said.stdout
