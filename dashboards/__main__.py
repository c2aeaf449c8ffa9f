# SPDX-License-Identifier: Apache-2.0
"""Writes the dashboards, each as NAME.json beside the module that makes it.

python -m dashboards
"""

from __future__ import annotations

import json
from pathlib import Path

from grafanalib._gen import DashboardEncoder

from dashboards import cgroup, checkpoint, exporter, fleet, node

HERE = Path(__file__).parent


def files() -> dict[str, str]:
    """What is to be written, by file name."""
    made = [module.dashboard() for module in (fleet, node, cgroup, checkpoint, exporter)]
    return {
        f"{dashboard.uid.removeprefix('writeback-')}.json": json.dumps(
            dashboard, cls=DashboardEncoder, indent=2
        )
        + "\n"
        for dashboard in made
    }


def main() -> None:
    for name, text in files().items():
        (HERE / name).write_text(text)


if __name__ == "__main__":
    main()
