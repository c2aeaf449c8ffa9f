# SPDX-License-Identifier: Apache-2.0
"""The page at `/`: what this is, where the metrics are, and what works on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, slots=True)
class Landing:
    """What the page shows. `features` are rows of (name, available, reason)."""

    version: str
    features: Sequence[tuple[str, bool, str]]


def page(landing: Landing, telemetry_path: str) -> bytes:
    """The page as UTF-8 HTML: no script and nothing to fetch, so that it works behind anything."""
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{'yes' if available else '<b>no</b>'}</td>"
        f"<td>{escape(reason)}</td></tr>\n"
        for name, available, reason in landing.features
    )
    return _PAGE.format(
        version=escape(landing.version), metrics=escape(telemetry_path), rows=rows
    ).encode()


_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>writeback-exporter</title>
<style>
body {{ font-family: sans-serif; margin: 2em; max-width: 60em }}
td, th {{ text-align: left; padding: 0.2em 1em 0.2em 0; vertical-align: top }}
</style>
</head>
<body>
<h1>writeback-exporter {version}</h1>
<p>Per-cgroup dirty throttling and block IO latency from eBPF, for Prometheus.</p>
<p><a href="{metrics}">Metrics</a> &middot; <a href="/-/healthy">Health</a>
&middot; <a href="/-/ready">Readiness</a></p>
<h2>Features on this machine</h2>
<table>
<tr><th>Feature</th><th>Available</th><th>Reason</th></tr>
{rows}</table>
</body>
</html>
"""
