# SPDX-License-Identifier: Apache-2.0
"""What a dashboard asks its Prometheus, as Grafana would send it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

ALL = {
    "job": ".+",
    "instance": ".+",
    "device": ".+",
    "cgroup": ".+",  # what it expands to: each one
    "unit": ".*",
    "pod": ".*",
    "slurm_job": ".*",
    "timeout": "600",
    "__rate_interval": "5m",
    "__range": "1h",
}
"""Nothing chosen."""


def with_values(text: str, values: Mapping[str, str] = ALL) -> str:
    """A query with its variables in place. KeyError for one that is not known."""
    return re.sub(r"\$\{?([a-z_]+)\}?", lambda found: values[found[1]], text)


def panels(board: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All but the headlines."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def expressions(board: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(title of the panel, expression)"""
    for panel in panels(board):
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


_ASKED = re.compile(r"label_values\((.+), \w+\)|query_result\((.+)\)")


def queries_of(board: Mapping[str, Any]) -> Iterator[str]:
    """What variables ask: a selector, or an expression."""
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            found = _ASKED.fullmatch(variable["definition"])
            assert found, variable["definition"]
            yield found[1] or found[2]
