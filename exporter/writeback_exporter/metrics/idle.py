# SPDX-License-Identifier: Apache-2.0
"""Leaves out the series of cgroups that have been idle for long: --series.idle-timeout."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import partial

from writeback_exporter.metrics.catalogue import Kind, Metric
from writeback_exporter.metrics.exposition import Family, Labels, Snapshot


class Idle:
    """Counters and histograms by cgroup leave when they have not changed for `timeout` seconds, and
    come back with their whole count when they do: they never go backwards."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._last: dict[tuple[str, Labels], tuple[Hashable, float]] = {}
        """What a series was, and when it became that."""

    def leave_out(self, snapshot: Snapshot, now: float) -> None:
        """Takes idle series out of a snapshot; `now` is a monotonic time in seconds."""
        seen: dict[tuple[str, Labels], tuple[Hashable, float]] = {}

        def active(metric: Metric, labels: Labels, state: Hashable) -> bool:
            key = metric.name, labels
            last = self._last.get(key)
            seen[key] = last if last and last[0] == state else (state, now)
            return now - seen[key][1] < self._timeout

        snapshot.families = [
            Family(f.metric, [row for row in f.rows if active(f.metric, row[0], row[1])])
            if f.metric.kind is Kind.COUNTER and "cgroup" in f.metric.labels
            else f
            for f in snapshot.families
        ]
        histograms = []
        for histogram in snapshot.histograms:
            if "cgroup" in histogram.metric.labels:
                # The count alone tells of a change: each observation adds one.
                rows = [r for r in histogram.rows() if active(histogram.metric, r[0], sum(r[1]))]
                histogram = replace(histogram, rows=partial(iter, rows), count=len(rows))
            histograms.append(histogram)
        snapshot.histograms = histograms
        self._last = seen
