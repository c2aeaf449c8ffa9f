# SPDX-License-Identifier: Apache-2.0
"""The page at `/`: who was throttled, how the disks answered, and what works on this machine.

HTML and SVG without script and with nothing to fetch, so that it works behind anything.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise
from math import sqrt

from writeback_exporter import __version__
from writeback_exporter.features import Feature
from writeback_exporter.metrics.catalogue import BLOCK_IO_DEVICE_SECONDS
from writeback_exporter.metrics.exposition import Labels
from writeback_exporter.metrics.history import Recent

THROTTLED_ROWS = 10
HEATMAP_ROWS = 16

_NOT_OBSERVED = "<p>Not observed: the collector is off, or not available here (see below).</p>\n"


def page(recent: Recent, features: Sequence[Feature], telemetry_path: str) -> bytes:
    """The page as UTF-8; names in `recent` may be any text."""
    return _PAGE.format(
        style=_STYLE,
        version=escape(__version__),
        metrics=escape(telemetry_path),
        window=_window(recent),
        throttled=_throttled(recent),
        latency=_latency(recent),
        pressure=_pressure(recent),
        missing=sum(not feature.available for feature in features),
        features="".join(map(_feature, sorted(features, key=lambda f: f.available))),
        count=len(features),
        # Paths that a user gave need not be UTF-8.
    ).encode(errors="backslashreplace")


def _window(recent: Recent) -> str:
    until = time.strftime("%H:%M:%S UTC", time.gmtime())
    seconds = _span(recent.seconds)
    if recent.since_start:
        return f"Since the exporter started, <b>{seconds}</b> ago, until {until}."
    observed = _span(recent.observed_seconds)
    return f"In the last <b>{seconds}</b>, until {until}. Observing for {observed}."


# Throttled cgroups --------------------------------------------------------------------------------


def _throttled(recent: Recent) -> str:
    if recent.throttled is None:
        return _NOT_OBSERVED
    slept = dict(recent.throttled)
    for labels, tasks in recent.asleep.items():
        if tasks:  # a pause that is its first counts when it is over
            slept.setdefault(labels, 0)
    if not slept:
        return "<p>No task was throttled.</p>\n"
    ranked = sorted(slept, key=lambda labels: (-slept[labels], labels))
    shown = ranked[:THROTTLED_ROWS]
    longest = slept[shown[0]] or 1
    rows = "".join(
        _throttled_row(recent, labels, slept[labels], slept[labels] / longest) for labels in shown
    )
    return f"{_THROTTLED_HEAD}{rows}</table></div>\n{_left_out(len(ranked) - len(shown))}"


_THROTTLED_HEAD = """<div class="scroll"><table>
<tr><th>Cgroup</th><th>BDI</th><th class="number">Seconds asleep</th><th class="bars"></th>
<th class="number">Tasks asleep</th><th class="number">Asleep now</th></tr>
"""


def _throttled_row(recent: Recent, labels: Labels, nanoseconds: int, share: float) -> str:
    cgroup, bdi = labels
    disk = f" <small>{escape(recent.disks[bdi])}</small>" if bdi in recent.disks else ""
    seconds = nanoseconds / 1e9
    average = seconds / recent.seconds if recent.seconds else 0
    return (
        f'<tr><td class="name">{escape(cgroup)}</td><td class="bdi">{escape(bdi)}{disk}</td>'
        f'<td class="number">{seconds:,.2f}</td><td class="bars">{_bar(share)}</td>'
        f'<td class="number">{average:.2f}</td>'
        f'<td class="number">{recent.asleep.get(labels, 0)}</td></tr>\n'
    )


# Latency ------------------------------------------------------------------------------------------

# In pixels.
_NAMES, _COLUMN, _COUNTS = 168, 46, 88
_HEAD, _ROW = 26, 26
_CELL = f'width="{_COLUMN - 1}" height="{_ROW - 2}"'
_NAME_LENGTH = 22

_EDGES = BLOCK_IO_DEVICE_SECONDS.edges
_COLUMNS = len(_EDGES) + 1
_WIDTH = _NAMES + _COLUMNS * _COLUMN + _COUNTS


def _latency(recent: Recent) -> str:
    if recent.io is None:
        return _NOT_OBSERVED
    totals = {labels: sum(counts) for labels, counts in recent.io.items()}
    if not totals:
        return "<p>No request was completed.</p>\n"
    ranked = sorted(totals, key=lambda labels: (-totals[labels], labels))
    shown = ranked[:HEATMAP_ROWS]
    height = _HEAD + len(shown) * _ROW
    rows = "".join(
        _latency_row(labels, recent.io[labels], _HEAD + i * _ROW) for i, labels in enumerate(shown)
    )
    return (
        '<div class="scroll">'
        f'<svg class="heatmap" role="img" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" aria-label="Heatmap of {len(shown)} rows, one a device '
        f"and operation, and {_COLUMNS} columns, from up to {_time(_EDGES[0])} to over "
        f'{_time(_EDGES[-1])}">\n{_axis()}{rows}</svg></div>\n'
        f"{_left_out(len(ranked) - len(shown))}"
    )


def _axis() -> str:
    edges = "".join(
        f'<text x="{_NAMES + (i + 1) * _COLUMN}" y="16" class="edge">{_time(edge)}</text>'
        for i, edge in enumerate(_EDGES)
    )
    return (
        f'<text x="0" y="16">Device, operation</text>{edges}'
        f'<text x="{_WIDTH}" y="16" class="count">Requests</text>\n'
    )


def _latency_row(labels: Labels, counts: Sequence[int], top: int) -> str:
    device, op = labels
    total = sum(counts)
    middle = top + _ROW // 2 + 4
    name = _shortened(device, _NAME_LENGTH - len(op))
    cells = "".join(
        _cell(f"{device} {op}, {bucket}", count, total, _NAMES + i * _COLUMN, top)
        for i, (bucket, count) in enumerate(zip(_BUCKETS, counts, strict=True))
    )
    return (
        f"<g><title>{escape(device)} {escape(op)}, requests: {total:,}</title>"
        f'<text x="0" y="{middle}">{escape(name)} <tspan>{escape(op)}</tspan></text>'
        f'<rect x="{_NAMES}" y="{top}" width="{_COLUMNS * _COLUMN - 1}" height="{_ROW - 2}" '
        f'class="empty"/>'
        f'<text x="{_WIDTH}" y="{middle}" class="count">{total:,}</text></g>\n{cells}'
    )


def _cell(what: str, count: int, total: int, left: int, top: int) -> str:
    if not count:
        return ""
    share = count / total
    # The root sets a tenth apart from nothing, and a single slow request still shows.
    opacity = 0.1 + 0.9 * sqrt(share)
    kind = "cell strong" if opacity > 0.7 else "cell"
    return (
        f'<g class="{kind}">'
        f"<title>{escape(what)}: {count:,} of {total:,} requests ({share:.2%})</title>"
        f'<rect x="{left}" y="{top}" {_CELL} fill-opacity="{opacity:.2f}"/>'
        f'<text x="{left + _COLUMN // 2}" y="{top + _ROW // 2 + 3}">{_percent(share)}</text></g>\n'
    )


def _buckets() -> Iterator[str]:
    yield f"up to {_time(_EDGES[0])}"
    for lower, upper in pairwise(_EDGES):
        yield f"{_time(lower)} to {_time(upper)}"
    yield f"over {_time(_EDGES[-1])}"


# Pressure and features ----------------------------------------------------------------------------


def _pressure(recent: Recent) -> str:
    if not recent.waiting:
        return _NOT_OBSERVED
    shares = {
        resource: min(1.0, microseconds / 1e6 / recent.seconds)
        for resource, microseconds in sorted(recent.waiting.items())
    }
    tiles = "".join(
        f"<div><dt>{escape(resource)}</dt><dd>{share:.1%}</dd>{_bar(share)}</div>\n"
        for resource, share in shares.items()
    )
    return f"<dl>\n{tiles}</dl>\n"


def _feature(feature: Feature) -> str:
    name = escape(feature.name)
    if feature.available:
        return f"<tr><td>{name}</td><td>yes</td><td></td><td></td></tr>\n"
    return (
        f"<tr><td>{name}</td><td><b>no</b></td>"
        f'<td class="text"><b>{escape(feature.reason)}</b><br>{escape(feature.detail)}</td>'
        f'<td class="text">{escape(feature.remedy)}</td></tr>\n'
    )


# Numbers and names --------------------------------------------------------------------------------


def _bar(share: float) -> str:
    return (
        '<svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="{100 * share:.1f}" height="8"/></svg>'
    )


def _left_out(rows: int) -> str:
    return f"<p>{rows:,} more with less are left out.</p>\n" if rows else ""


def _time(seconds: float) -> str:
    """Of a bucket's edge: 16 us, 2.1 ms, 1.1 s."""
    for unit, length in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= length:
            return f"{_two_digits(seconds / length)} {unit}"
    return f"{_two_digits(seconds / 1e-6)} \N{MICRO SIGN}s"


def _two_digits(number: float) -> str:
    return f"{number:.0f}" if number >= 9.95 else f"{number:.1f}".removesuffix(".0")


def _span(seconds: float) -> str:
    """In its two largest units."""
    left = round(seconds)
    parts: list[str] = []
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, length)
        if count or (unit == "s" and not parts):
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.01 else "&lt;1%"


def _shortened(name: str, length: int) -> str:
    return name if len(name) <= length else f"{name[: length - 1]}\N{HORIZONTAL ELLIPSIS}"


_BUCKETS = tuple(_buckets())

_STYLE = """
:root {
  color-scheme: light dark;
  --text: #1c2128; --muted: #59636e; --page: #ffffff; --line: #d9dee3; --empty: #f3f5f7;
  --hue: #0a5cba; --bad: #b42318;
}
@media (prefers-color-scheme: dark) {
  :root {
    --text: #e6e9ec; --muted: #9aa4ae; --page: #14181d; --line: #333a42; --empty: #1d232a;
    --hue: #5aa9ff; --bad: #ff8a80;
  }
}
body {
  margin: 0 auto; padding: 1.5rem; max-width: 65rem; background: var(--page); color: var(--text);
  font: 0.9375rem/1.5 system-ui, sans-serif; font-variant-numeric: tabular-nums;
}
h1 { font-size: 1.375rem; margin: 0 }
h2 { font-size: 1.0625rem; margin: 2rem 0 0.25rem }
h1 small, p, small, th, dt { color: var(--muted) }
h1 small { font-weight: normal }
p { margin: 0.25rem 0 }
p b { color: var(--text) }
a { color: var(--hue) }
nav { float: right; display: flex; gap: 1rem }
.scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100% }
th { font-weight: normal; font-size: 0.8125rem; vertical-align: bottom }
td, th {
  text-align: left; padding: 0.375rem 1rem 0.375rem 0; border-bottom: 1px solid var(--line);
}
td { vertical-align: top }
td:last-child, th:last-child { padding-right: 0 }
td b { color: var(--bad) }
.bdi { white-space: nowrap }
.name { overflow-wrap: anywhere; min-width: 12rem }
.text { overflow-wrap: anywhere; min-width: 10rem }
.number { text-align: right; white-space: nowrap }
th.number { white-space: normal }
.bar {
  display: block; width: 8rem; height: 0.5rem; margin-top: 0.4375rem; background: var(--empty);
}
.bar rect { fill: var(--hue) }
dl { display: flex; flex-wrap: wrap; gap: 0.5rem 2.5rem; margin: 0.75rem 0 0 }
dd { margin: 0; font-size: 1.25rem }
.heatmap { display: block; margin-top: 0.5rem; font-size: 0.8125rem }
.heatmap text { fill: var(--text) }
.heatmap tspan, .heatmap > text { fill: var(--muted) }
.heatmap rect { fill: var(--hue) }
.heatmap .empty { fill: var(--empty) }
.heatmap .count { text-anchor: end }
.heatmap .edge { text-anchor: middle; font-size: 0.6875rem }
.heatmap .cell text { text-anchor: middle; font-size: 0.6875rem }
.heatmap .strong text { fill: var(--page) }
@media (max-width: 40rem) {
  body { padding: 1rem }
  nav { float: none }
  td, th { padding-right: 0.5rem }
  .bars { display: none }
  .bdi { white-space: normal }
  .name { min-width: 8rem }
}
"""

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="refresh" content="15">
<title>writeback-exporter</title>
<style>{style}</style>
</head>
<body>
<nav><a href="{metrics}">Metrics</a> <a href="/-/healthy">Health</a>
<a href="/-/ready">Readiness</a></nav>
<h1>writeback-exporter <small>{version}</small></h1>
<p>{window}</p>
<h2>Throttled in balance_dirty_pages</h2>
<p>Time that tasks slept there, how many did on average, and how many do now.</p>
{throttled}<h2>Latency of block IO</h2>
<p>Time in the device, from issue to completion: share of each row's requests.</p>
{latency}<h2>Pressure</h2>
<p>Share of the time in which some task of the host waited for it.</p>
{pressure}<h2>Features on this machine</h2>
<p>{missing} of {count} are not available.</p>
<div class="scroll"><table>
<tr><th>Feature</th><th>Available</th><th>Why not</th><th>Remedy</th></tr>
{features}</table></div>
</body>
</html>
"""
