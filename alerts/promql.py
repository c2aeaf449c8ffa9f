# SPDX-License-Identifier: Apache-2.0
"""Pieces of PromQL that cannot name a metric or label which the exporter has not.

Rules and dashboards are written as f-strings over these; whatever else is in the strings is read by
a parser in the tests.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from prometheus_client.utils import floatToGoString

from writeback_exporter.metrics.catalogue import Kind, Metric

TARGET = ("job", "instance")
"""The labels that Prometheus gives each series of one exporter."""

HOST = ", ".join(TARGET)
"""For `on` and `by`: what is about the same host."""

_MATCHER = re.compile(r'(\w+)(=~|!~|!=|=)"((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Series:
    """A name that can be queried, the labels that it has, and which of them are asked for."""

    name: str
    labels: tuple[str, ...]
    matchers: tuple[str, ...] = ()

    def where(self, *matchers: str) -> Series:
        """Only those that match, such as `op="write"`. ValueError for a label that it has not."""
        for matcher in matchers:
            match = _MATCHER.fullmatch(matcher)
            if not match:
                raise ValueError(f"{matcher} is no matcher")
            if match[1] not in (*self.labels, *TARGET):
                raise ValueError(f"{self.name} has no label {match[1]}, only {self.labels}")
        return Series(self.name, self.labels, (*self.matchers, *matchers))

    def __str__(self) -> str:
        return self.name + (f"{{{', '.join(self.matchers)}}}" if self.matchers else "")


def _series(metric: Metric, kind: Kind, suffix: str = "", *labels: str) -> Series:
    if metric.kind is not kind:
        raise ValueError(f"{metric.name} is a {metric.kind.value}, not a {kind.value}")
    return Series(metric.name + suffix, (*metric.labels, *labels))


def gauge(metric: Metric) -> Series:
    return _series(metric, Kind.GAUGE)


def counter(metric: Metric) -> Series:
    return _series(metric, Kind.COUNTER, "_total")


def buckets(metric: Metric) -> Series:
    """Of a histogram, by upper bound `le`."""
    return _series(metric, Kind.HISTOGRAM, "_bucket", "le")


def sums(metric: Metric) -> Series:
    """Of a histogram: of all observed values, in the metric's unit."""
    return _series(metric, Kind.HISTOGRAM, "_sum")


def counts(metric: Metric) -> Series:
    """Of a histogram: how many were observed."""
    return _series(metric, Kind.HISTOGRAM, "_count")


def up_to(metric: Metric, edge: float) -> Series:
    """The one bucket of a histogram that counts values up to `edge`. ValueError for one that is no
    edge."""
    if edge not in metric.edges:
        raise ValueError(f"{metric.name} has no bucket at {edge}, only at {metric.edges}")
    le = floatToGoString(edge)  # type: ignore[no-untyped-call]
    return buckets(metric).where(f'le="{le}"')
