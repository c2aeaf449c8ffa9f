# SPDX-License-Identifier: Apache-2.0
"""The catalogue keeps Prometheus' rules, and asks of the kernel side only what it gives."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from fractions import Fraction

import pytest
from prometheus_client.metrics_core import Metric as PrometheusMetric
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families

from tests.monitoring import ask
from writeback_exporter.kernel.loader import open_file
from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.catalogue import ALL, PREFIX, Kind, Metric
from writeback_exporter.metrics.exposition import (
    HistogramFamily,
    Labels,
    Snapshot,
    family,
    negotiate,
    render,
)
from writeback_exporter.probes.block_io import BlockIo
from writeback_exporter.probes.block_io_limit import BlockIoLimit
from writeback_exporter.probes.dirty_throttle import DirtyThrottle
from writeback_exporter.probes.memory_stall import MemoryStall
from writeback_exporter.probes.page_wait import PageWait
from writeback_exporter.probes.sync import Sync
from writeback_exporter.probes.work import Work

HISTOGRAMS = [metric for metric in ALL if metric.kind is Kind.HISTOGRAM]
KERNEL_UNIT = {"seconds": Fraction(1, 10**9), "bytes": Fraction(1), "": Fraction(1)}
"""What BPF counts in, in the metric's unit."""
BASE_UNITS = {"seconds", "bytes", "ratio"}
EXPONENTS = {
    "block_io_device_seconds": ("block_io", "io_latency_exponents"),
    "block_io_queue_seconds": ("block_io", "io_latency_exponents"),
    "block_io_size_bytes": ("block_io", "io_size_exponents"),
    "block_io_depth": ("block_io", "io_depth_exponents"),
    "block_io_limit_seconds": ("block_io_limit", "limit_exponents"),
    "dirty_throttle_seconds": ("dirty_throttle", "pause_exponents"),
    "work_seconds": ("work", "work_exponents"),
    "page_wait_seconds": ("page_wait", "page_wait_exponents"),
    "sync_seconds": ("sync", "sync_exponents"),
    "memory_stall_seconds": ("memory_stall", "stall_exponents"),
}
"""Object and enum that tell the range of the kernel's slots."""

each = pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.name)
each_histogram = pytest.mark.parametrize("metric", HISTOGRAMS, ids=lambda metric: metric.name)


def snapshot() -> Snapshot:
    """Every metric with a row."""
    families, histograms = [], []
    for metric in ALL:
        labels = tuple(f"some {label}" for label in metric.labels)
        if metric.kind is Kind.HISTOGRAM:
            histograms.append(row(metric, labels))
        else:
            families.append(family(metric, [(labels, 1.0)]))
    return Snapshot(families, histograms)


def row(metric: Metric, labels: Labels) -> HistogramFamily:
    slots = [1] * (metric.exponents[-1] - metric.exponents[0] + 2)
    return HistogramFamily(metric, metric.exponents[0], lambda: [(labels, slots, 12345)])


def text(accept: str) -> str:
    return b"".join(render(snapshot(), negotiate(accept))).decode()


# Names -------------------------------------------------------------------------------------------


def test_names_are_unique() -> None:
    names = [metric.name for metric in ALL]
    assert len(set(names)) == len(names)


def test_no_name_is_another_ones_sample() -> None:
    """x_sum beside a histogram x, or x_total beside a counter x, would be two things at once."""
    names = {metric.name for metric in ALL}
    suffixes = ("_total", "_created", "_bucket", "_sum", "_count", "_info")
    for name in names:
        assert not {name + suffix for suffix in suffixes} & names


def test_constants_are_called_as_their_metrics() -> None:
    constants = {
        PREFIX + name.lower(): value
        for name, value in vars(catalogue).items()
        if isinstance(value, Metric)
    }
    assert constants == {metric.name: metric for metric in ALL}


@each
def test_name(metric: Metric) -> None:
    assert re.fullmatch(r"writeback_[a-z][a-z0-9]*(_[a-z0-9]+)*", metric.name)
    # The suffixes belong to the types, and prometheus-client or exposition adds them.
    assert not metric.name.endswith(("_total", "_bucket", "_sum", "_count", "_created"))


@each
def test_unit_is_the_names_last_word(metric: Metric) -> None:
    last = metric.name.rsplit("_", 1)[1]
    assert metric.unit == (last if last in BASE_UNITS else "")


@each
def test_info_metrics_are_gauges(metric: Metric) -> None:
    if metric.name.endswith("_info"):
        assert metric.kind is Kind.GAUGE
        assert metric.labels


@each
def test_help(metric: Metric) -> None:
    assert metric.help.endswith(".")
    assert "\n" not in metric.help
    assert metric.help == " ".join(metric.help.split()), "as of strings joined without care"
    assert metric.help[0].isupper() or metric.help[0].isdigit()


@each
def test_help_names_metrics_that_there_are(metric: Metric) -> None:
    names = {m.name for m in ALL}
    assert set(re.findall(rf"\b{PREFIX}\w+", metric.help)) <= names


@each
def test_labels(metric: Metric) -> None:
    assert len(set(metric.labels)) == len(metric.labels)
    for label in metric.labels:
        assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", label)
        # Prometheus' own, or a type's: a scrape renames them or drops the sample.
        assert label not in ("le", "quantile", "job", "instance")


# Buckets -----------------------------------------------------------------------------------------


@each
def test_only_histograms_have_buckets(metric: Metric) -> None:
    assert bool(metric.exponents) == (metric.kind is Kind.HISTOGRAM)
    assert len(metric.exponents) <= 16
    assert list(metric.exponents) == sorted(set(metric.exponents))
    assert len(metric.edges) == len(metric.exponents)


@each_histogram
def test_edges_are_powers_of_two_of_the_kernels_unit(metric: Metric) -> None:
    """Exactly, as decimals that a person and Prometheus read."""
    unit = KERNEL_UNIT[metric.unit]
    assert [Fraction(repr(edge)) for edge in metric.edges] == [
        2**exponent * unit for exponent in metric.exponents
    ]


@each_histogram
def test_edges_are_slots_of_the_kernels(metric: Metric) -> None:
    name, enum = EXPONENTS[metric.name.removeprefix(PREFIX)]
    values = open_file(name).enum(enum)
    (first,) = (value for member, value in values.items() if member.endswith("_FIRST"))
    (last,) = (value for member, value in values.items() if member.endswith("_LAST"))
    assert len(values) == 2
    assert first <= min(metric.exponents)
    assert max(metric.exponents) <= last


def test_probes_have_slots_for_every_histogram() -> None:
    """The maps' rows, as the object lays them out, have a slot beyond each last edge."""
    block_io, throttle = BlockIo().file, DirtyThrottle().file
    limit = BlockIoLimit().file
    fields = {
        "block_io_device_seconds": block_io.struct("io_histograms").fields["device_slots"],
        "block_io_queue_seconds": block_io.struct("io_histograms").fields["queue_slots"],
        "block_io_size_bytes": block_io.struct("io_histograms").fields["size_slots"],
        "block_io_depth": block_io.struct("io_depth").fields["slots"],
        "block_io_limit_seconds": limit.struct("limit_histogram").fields["slots"],
        "dirty_throttle_seconds": throttle.struct("throttle").fields["slept_slots"],
        "work_seconds": Work().file.struct("work").fields["slots"],
        "page_wait_seconds": PageWait().file.struct("page_wait").fields["slots"],
        "sync_seconds": Sync().file.struct("sync_calls").fields["slots"],
        "memory_stall_seconds": MemoryStall().file.struct("stalls").fields["slots"],
    }
    assert {PREFIX + name for name in fields} == {metric.name for metric in HISTOGRAMS}
    for name, field in fields.items():
        file, enum = EXPONENTS[name]
        first, last = sorted(open_file(file).enum(enum).values())
        assert field.count == last - first + 2, name


# What reads it -----------------------------------------------------------------------------------


def names_of(families: Iterable[PrometheusMetric]) -> list[tuple[str, str, str]]:
    return [(found.name, found.type, found.unit) for found in families]


def test_openmetrics_parser_accepts_all() -> None:
    parse: Callable[[str], Iterable[PrometheusMetric]] = (
        openmetrics_parser.text_string_to_metric_families
    )
    found = names_of(parse(text("application/openmetrics-text;version=1.0.0")))
    assert sorted(found) == sorted((m.name, m.kind.value, m.unit) for m in ALL)


def test_text_parser_accepts_all() -> None:
    found = names_of(text_string_to_metric_families(text("")))
    assert sorted(found) == sorted((m.name, m.kind.value, "") for m in ALL)


def test_promtool_accepts_all() -> None:
    assert ask("promtool", "check", "metrics", input=text("")) == ""
