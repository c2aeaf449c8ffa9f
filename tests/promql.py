# SPDX-License-Identifier: Apache-2.0
"""What is wrong with an expression of PromQL, by a parser and a list of the series that exist."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import promql_parser
from promql_parser import (
    AggModifierType,
    AggregateExpr,
    Call,
    Expr,
    MatrixSelector,
    VectorSelector,
)

from alerts.records import Records
from alerts.settings import Settings
from writeback_exporter.metrics.catalogue import ALL, Kind

TARGET = {"job", "instance"}
OF_COUNTERS = {"rate", "increase"}

_SUFFIXES = {
    Kind.GAUGE: ("",),
    Kind.COUNTER: ("_total",),
    Kind.HISTOGRAM: ("_bucket", "_sum", "_count"),
}

EXPORTED = {
    metric.name + suffix: {*metric.labels, *TARGET, *(("le",) if suffix == "_bucket" else ())}
    for metric in ALL
    for suffix in _SUFFIXES[metric.kind]
}
"""Labels of each series of the exporter, by name."""

RECORDED = {r.series.name: {*r.series.labels, *TARGET} for r in Records(Settings()).all}
"""The same of the recording rules."""

COUNTERS = {
    metric.name + suffix
    for metric in ALL
    if metric.kind is not Kind.GAUGE
    for suffix in _SUFFIXES[metric.kind]
} | {"process_cpu_seconds_total"}


def selectors(expr: str) -> list[VectorSelector]:
    """Each series that the expression asks for. ValueError where it is no PromQL."""
    return [selector for selector, _ in _with_functions(expr)]


def faults(expr: str, known: Mapping[str, set[str]]) -> list[str]:
    """Names and labels that do not exist, counters as they are, rates of what is no counter."""
    found: list[str] = []
    labels: set[str] = set()
    for selector, function in _with_functions(expr):
        name = selector.name or ""
        if name not in known:
            found.append(f"{name} does not exist")
            continue
        labels |= known[name]
        found += [
            f"{name} has no label {matcher.name}"
            for matcher in selector.matchers.matchers
            if matcher.name not in known[name]
        ]
        if (name in COUNTERS) != (function in OF_COUNTERS):
            found.append(f"{name} in {function or 'no function'}")
    for node in _nodes(expr):
        if isinstance(node, AggregateExpr) and node.modifier is not None:
            made = {"by"} if node.modifier.type == AggModifierType.Without else set()
            found += [f"no {x}" for x in node.modifier.labels if x not in labels | made]
    return found


def _nodes(expr: str) -> list[Expr]:
    """All, each before its parts."""
    found: list[Expr] = []
    promql_parser.walk(promql_parser.parse(expr), found.append)
    return found


def _with_functions(expr: str) -> Iterator[tuple[VectorSelector, str]]:
    """Each selector, with the function that it is a range for, if it is one."""
    call, function = "", ""
    for node in _nodes(expr):
        if isinstance(node, Call):
            call = node.func.name
        elif isinstance(node, MatrixSelector):
            function = call
        elif isinstance(node, VectorSelector):
            yield node, function
            function = ""
