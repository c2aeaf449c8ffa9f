# SPDX-License-Identifier: Apache-2.0
"""Exposition writes what prometheus-client would write, byte for byte, in every format."""

from __future__ import annotations

import random
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec
from itertools import accumulate
from types import ModuleType
from unittest import mock

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric as PrometheusMetric
from prometheus_client.openmetrics import parser as openmetrics_parser
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from writeback_exporter.metrics import catalogue, exposition
from writeback_exporter.metrics.catalogue import Kind, Metric
from writeback_exporter.metrics.exposition import (
    HistogramFamily,
    HistogramRow,
    Snapshot,
    bucket_counts,
    family,
    negotiate,
    render,
)

TEXT = ""
OPENMETRICS = "application/openmetrics-text;version=1.0.0"
TEXT_0_0_4 = "text/plain; version=0.0.4; charset=utf-8"
ACCEPT = [
    TEXT,
    "text/plain;version=1.0.0",
    "text/plain;version=1.0.0;escaping=allow-utf-8",
    "text/plain;version=1.0.0;escaping=dots",
    "text/plain;version=1.0.0;escaping=values",
    "application/openmetrics-text",
    OPENMETRICS,
    OPENMETRICS + ";escaping=allow-utf-8",
    OPENMETRICS + ";escaping=dots",
    OPENMETRICS + ";escaping=values",
]
ACCEPT_PARTS = [*'=;,. \t"', "version=", "1.0.0", "2", "x", "escaping=dots", "text/plain"]
ACCEPT_PARTS += ["application/openmetrics-text", "application/openmetrics-text;version="]
in_all_formats = pytest.mark.parametrize("accept", ACCEPT)

HISTOGRAMS = [metric for metric in catalogue.ALL if metric.kind is Kind.HISTOGRAM]
COUNT = st.one_of(st.just(0), st.integers(0, 2_000_000), st.integers(0, 2**63))
SUM = st.integers(0, 2**64 - 1)

# Help that needs escaping, labels out of order and on both sides of `le`, a percent sign.
ODD = Metric(
    "writeback_odd_seconds",
    Kind.HISTOGRAM,
    'A "quoted" back\\slash, a\nnewline, 100 %s and \x01 0 \x02.',
    ("zone", "cgroup", "op"),
    "seconds",
    (3, 5, 6),
    1e-9,
)
PLAIN = Metric("writeback_plain", Kind.HISTOGRAM, "No label and one edge.", exponents=(4,))
GAUGE = Metric("writeback_gauge_bytes", Kind.GAUGE, "A\ngauge.", ("cgroup",), "bytes")
COUNTER = Metric("writeback_counter_seconds", Kind.COUNTER, "A counter.", ("op",), "seconds")


def histogram(
    metric: Metric, rows: Iterable[HistogramRow], first: int | None = None
) -> HistogramFamily:
    kept = list(rows)
    return HistogramFamily(metric, metric.exponents[0] if first is None else first, lambda: kept)


def go_float(value: float) -> str:
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


def slot_count(metric: Metric, first: int | None = None) -> int:
    """SLOTS() of bpf/histogram.h, for slots that end at the metric's last edge."""
    return metric.exponents[-1] - (metric.exponents[0] if first is None else first) + 2


def model(source: HistogramFamily) -> PrometheusMetric:
    """The family as prometheus-client holds it, summed up slot by slot."""
    metric = source.metric
    result = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels, unit=metric.unit)
    for labels, slots, total in source.rows():
        buckets: list[tuple[str, float]] = [
            (go_float(edge), sum(slots[: exponent - source.first_exponent + 1]))
            for exponent, edge in zip(metric.exponents, metric.edges, strict=True)
        ]
        buckets.append(("+Inf", sum(slots)))
        result.add_metric(labels, buckets, total / round(1 / metric.scale))
    return result


class Model(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        simple = [family.model() for family in snapshot.families]
        self.metrics = [*snapshot.others, *simple, *map(model, snapshot.histograms)]

    def collect(self) -> Iterable[PrometheusMetric]:
        return self.metrics


def expected(snapshot: Snapshot, accept: str, names: Sequence[str] = ()) -> bytes:
    registry = CollectorRegistry(auto_describe=True)
    registry.register(Model(snapshot))
    encode, _ = choose_encoder(accept)
    return encode(registry.restricted_registry(names) if names else registry)


def rendered(snapshot: Snapshot, accept: str = TEXT, names: Sequence[str] = ()) -> bytes:
    return b"".join(render(snapshot, negotiate(accept), names))


def parsed(text: bytes, accept: str) -> dict[str, PrometheusMetric]:
    parse: Callable[[str], Iterable[PrometheusMetric]] = (
        openmetrics_parser.text_string_to_metric_families
        if accept.startswith("application/")
        else text_string_to_metric_families
    )
    return {metric.name: metric for metric in parse(text.decode())}


@st.composite
def histograms(draw: st.DrawFn) -> HistogramFamily:
    metric = draw(st.sampled_from([*HISTOGRAMS, ODD, PLAIN]))
    first = draw(st.integers(0, metric.exponents[0]))
    size = slot_count(metric, first) + draw(st.integers(0, 3))
    row = st.tuples(
        st.tuples(*[st.text(max_size=20)] * len(metric.labels)),
        st.lists(COUNT, min_size=size, max_size=size),
        SUM,
    )
    return histogram(metric, draw(st.lists(row, max_size=4)), first)


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    value = st.one_of(st.floats(), st.integers(0, 2**63))
    row = st.tuples(st.tuples(st.text(max_size=20)), value)
    simple = [family(metric, draw(st.lists(row, max_size=4))) for metric in (GAUGE, COUNTER)]
    return Snapshot(simple, draw(st.lists(histograms(), max_size=3)))


# Equality with prometheus-client -----------------------------------------------------------------


@in_all_formats
@given(source=histograms())
def test_histograms_equal_prometheus_client(accept: str, source: HistogramFamily) -> None:
    snapshot = Snapshot([], [source])
    assert rendered(snapshot, accept) == expected(snapshot, accept)


@given(snapshot=snapshots(), accept=st.sampled_from(ACCEPT))
def test_snapshots_equal_prometheus_client(snapshot: Snapshot, accept: str) -> None:
    assert rendered(snapshot, accept) == expected(snapshot, accept)


@given(count=st.integers(0, 2**64))
@example(count=9_999)
@example(count=10_000)
@example(count=999_999)
@example(count=1_000_000)
@example(count=1_234_567)
@example(count=10**15)
@example(count=2**53 - 1)
@example(count=2**53)
@example(count=2**53 + 1)
@example(count=10**16)
def test_numbers_equal_prometheus_client(count: int) -> None:
    rows: list[HistogramRow] = [(("", "", ""), [count, 0, 0, 0, 0], count * 10**9)]
    snapshot = Snapshot([], [histogram(PLAIN, [((), [count, 0], count)]), histogram(ODD, rows)])
    assert rendered(snapshot) == expected(snapshot, TEXT)


@pytest.mark.parametrize(
    "value",
    [
        *(0, True, 0.1, 1e-9, 999_999.5, 1e6, 1e6 + 0.5, 12_345_678, 2**53 - 1, 2**53, 1e300),
        *(-0.0, -1, -1e6, -1e16, -1e300, float("inf"), float("-inf"), float("nan")),
    ],
)
def test_values_equal_prometheus_client(value: float) -> None:
    snapshot = Snapshot([family(GAUGE, [(("",), value)])])
    assert rendered(snapshot) == expected(snapshot, TEXT)


@in_all_formats
def test_catalogue_equals_prometheus_client(accept: str) -> None:
    snapshot = Snapshot(
        [
            family(metric, [(tuple(f"{label}{i}" for label in metric.labels), i) for i in range(3)])
            for metric in catalogue.ALL
            if metric.kind is not Kind.HISTOGRAM
        ],
        [
            histogram(metric, [(metric.labels, [7] * slot_count(metric), 12_345_678_901)])
            for metric in HISTOGRAMS
        ],
    )
    text = rendered(snapshot, accept)
    assert text == expected(snapshot, accept)
    if "escaping=" not in accept:
        assert len(parsed(text, accept)) == len(catalogue.ALL)


@in_all_formats
@pytest.mark.parametrize("names", [(), ("writeback_odd_seconds_count",)])
def test_families_without_rows_equal_prometheus_client(accept: str, names: Sequence[str]) -> None:
    snapshot = Snapshot([family(GAUGE, []), family(COUNTER, [])], [histogram(ODD, [])])
    assert rendered(snapshot, accept, names) == expected(snapshot, accept, names)


@in_all_formats
def test_empty_snapshot_equals_prometheus_client(accept: str) -> None:
    assert rendered(Snapshot(), accept) == expected(Snapshot(), accept)


def test_families_carry_the_catalogue() -> None:
    snapshot = Snapshot([family(GAUGE, [(("/",), 1)]), family(COUNTER, [(("sync",), 2.5)])])
    assert rendered(snapshot, OPENMETRICS).decode().splitlines() == [
        r"# HELP writeback_gauge_bytes A\ngauge.",
        "# TYPE writeback_gauge_bytes gauge",
        "# UNIT writeback_gauge_bytes bytes",
        'writeback_gauge_bytes{cgroup="/"} 1.0',
        "# HELP writeback_counter_seconds A counter.",
        "# TYPE writeback_counter_seconds counter",
        "# UNIT writeback_counter_seconds seconds",
        'writeback_counter_seconds_total{op="sync"} 2.5',
        "# EOF",
    ]


# Buckets -----------------------------------------------------------------------------------------


def slot_of(value: int, first: int, last: int) -> int:
    """slot_of() of bpf/histogram.h."""
    exponent = max(value - 1, 0).bit_length()
    return min(max(exponent - first, 0), last - first + 1)


@pytest.mark.parametrize("metric", HISTOGRAMS, ids=lambda metric: metric.name)
@pytest.mark.parametrize("below", [0, 1, 8])
def test_value_is_in_the_buckets_whose_edge_it_does_not_exceed(metric: Metric, below: int) -> None:
    first, last = max(metric.exponents[0] - below, 0), metric.exponents[-1]
    values = [2**e + d for e in range(63) for d in (-1, 0, 1)]

    def row(value: int) -> HistogramRow:
        slots = [0] * (last - first + 2)
        slots[slot_of(value, first, last)] = 1
        return (str(value), *metric.labels[1:]), slots, value

    text = rendered(Snapshot([], [histogram(metric, map(row, sorted(set(values))), first)]))
    edges = {go_float(edge): 2**e for edge, e in zip(metric.edges, metric.exponents, strict=True)}
    buckets = 0
    for sample in parsed(text, TEXT)[metric.name].samples:
        if sample.name.endswith("_bucket"):
            value, le = int(sample.labels[metric.labels[0]]), sample.labels["le"]
            assert sample.value == (le == "+Inf" or value <= edges[le])
            buckets += 1
    assert buckets == len(set(values)) * (len(metric.edges) + 1)


@pytest.mark.parametrize("metric", HISTOGRAMS, ids=lambda metric: metric.name)
def test_counts_of_buckets_are_those_that_are_written(metric: Metric) -> None:
    first = max(metric.exponents[0] - 3, 0)
    slots = [7 * i + 1 for i in range(metric.exponents[-1] - first + 2)]
    text = rendered(Snapshot([], [histogram(metric, [(metric.labels, slots, 0)], first)]))
    samples = parsed(text, TEXT)[metric.name].samples
    cumulative = [s.value for s in samples if s.name.endswith("_bucket")]
    assert [*accumulate(bucket_counts(metric, first, slots))] == cumulative


def test_overflow_counts_only_in_inf() -> None:
    overflow = [*[0] * (slot_count(ODD) - 1), 5]
    lines = rendered(Snapshot([], [histogram(ODD, [(("a", "b", "c"), overflow, 0)])])).decode()
    assert [line.split()[-1] for line in lines.splitlines() if 'zone="a"' in line] == [
        *["0.0"] * len(ODD.edges),
        "5.0",  # +Inf
        "5.0",  # _count
        "0.0",  # _sum
    ]


def test_le_is_sorted_among_the_labels() -> None:
    rows = [(("/", "sda", "read"), [1] * 23, 9)]
    text = rendered(Snapshot([], [histogram(catalogue.BLOCK_IO_SIZE_BYTES, rows)]))
    assert b'_bucket{cgroup="/",device="sda",le="1.048576e+06",op="read"} 12.0\n' in text


# Labels ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accept", [TEXT, OPENMETRICS])
@given(value=st.text())
def test_labels_survive_parsing(accept: str, value: str) -> None:
    rows = [((value, "x", "y"), [1, 2, 3, 4, 5], 6)]
    metrics = parsed(rendered(Snapshot([], [histogram(ODD, rows)]), accept), accept)
    assert {sample.labels["zone"] for sample in metrics[ODD.name].samples} == {value}


@in_all_formats
def test_lone_surrogate_is_spelled_out(accept: str) -> None:
    name = b"/a\x80\xff.slice".decode(errors="surrogateescape")
    text = rendered(
        Snapshot(
            [family(GAUGE, [((name,), 1)])],
            [histogram(ODD, [((name, name, name), [1, 2, 3, 4, 5], 6)])],
        ),
        accept,
    )
    assert text.count(rb'"/a\\udc80\\udcff.slice"') == 1 + 3 * 6


# name[] ------------------------------------------------------------------------------------------


@in_all_formats
@pytest.mark.parametrize(
    "names",
    [
        ("writeback_odd_seconds_count",),
        ("writeback_odd_seconds_sum",),
        ("writeback_odd_seconds_bucket",),
        ("writeback_odd_seconds_sum", "writeback_gauge_bytes", "writeback_plain_count"),
        ("writeback_counter_seconds_total", "writeback_plain_bucket"),
        ("writeback_odd_seconds",),  # a family's name is no sample's name
        ("nothing",),
    ],
    ids="+".join,
)
def test_names_select_samples(accept: str, names: Sequence[str]) -> None:
    snapshot = Snapshot(
        [family(GAUGE, [(("a",), 1), (("b",), 2)]), family(COUNTER, [(("read",), 3)])],
        [
            histogram(ODD, [(("a", "b", "c"), [1, 2, 3, 4, 5], 6)]),
            histogram(PLAIN, [((), [1, 2], 3)]),
        ],
    )
    assert rendered(snapshot, accept, names) == expected(snapshot, accept, names)


def test_names_spare_the_rows_of_other_histograms() -> None:
    def unread() -> Iterable[HistogramRow]:
        raise AssertionError("the rows were asked for")

    snapshot = Snapshot([], [HistogramFamily(ODD, 3, unread)])
    assert rendered(snapshot, TEXT, ["writeback_gauge_bytes"]) == b""


# Streaming ---------------------------------------------------------------------------------------


def test_chunks_are_written_while_rows_are_read() -> None:
    read = []

    def rows() -> Iterator[HistogramRow]:
        for i in range(2000):
            read.append(i)
            yield (f"/{i}", "b", "c"), (1, 2, 3, 4, 5), 6

    chunks = render(Snapshot([], [HistogramFamily(ODD, 3, rows)]), negotiate(TEXT))
    assert not read
    first = next(chunks)
    assert len(read) < 300
    rest = list(chunks)
    assert read == list(range(2000))
    assert all(2**16 <= len(chunk) < 2**16 + 1000 for chunk in [first, *rest[:-1]])


def test_error_of_rows_passes_through() -> None:
    def rows() -> Iterator[HistogramRow]:
        yield ("a", "b", "c"), (1, 2, 3, 4, 5), 6
        raise OSError("map lookup failed")

    with pytest.raises(OSError, match="map lookup failed"):
        rendered(Snapshot([], [HistogramFamily(ODD, 3, rows)]))


def without_isal() -> ModuleType:
    """The module as it is where there is no isal."""
    spec = find_spec(exposition.__name__)
    assert spec
    assert spec.loader
    module = module_from_spec(spec)
    with mock.patch.dict(sys.modules, {"isal": None}):
        spec.loader.exec_module(module)
    return module


COMPRESSING = {"isal.isal_zlib": exposition, "zlib": without_isal()}
with_each_library = pytest.mark.parametrize("library", COMPRESSING)


@with_each_library
def test_isal_compresses_where_it_is(library: str) -> None:
    assert COMPRESSING[library].zlib.__name__ == library


# Text of metrics repeats itself, and for that there are other paths in the libraries.
TEXTS = st.builds(bytes.__mul__, st.binary(max_size=5000), st.sampled_from([1, 50]))


@with_each_library
@given(chunks=st.lists(TEXTS))
@example(chunks=[])
@example(chunks=[b""])
def test_gzip_round_trip(library: str, chunks: list[bytes]) -> None:
    reader = zlib.decompressobj(16 + zlib.MAX_WBITS)
    packed = b"".join(COMPRESSING[library].gzip_chunks(chunks))
    assert reader.decompress(packed) == b"".join(chunks)
    assert reader.eof
    assert reader.unused_data == b""


@with_each_library
def test_gzip_gathers_chunks(library: str) -> None:
    """And gzip(1) takes them."""
    chance = random.Random(1)
    noise = [chance.randbytes(1000) for _ in range(1000)]
    packed = list(COMPRESSING[library].gzip_chunks(noise))
    assert all(2**16 <= len(chunk) < 2**17 + 2000 for chunk in packed[:-1])
    assert len(packed) > 7
    whole = b"".join(packed)
    done = subprocess.run(["gzip", "-d"], input=whole, capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"".join(noise), b"")


# Formats -----------------------------------------------------------------------------------------

CLIENT = tuple(map(int, version("prometheus-client").split(".")[:2]))


def as_spelled(content_type: str) -> str:
    """Older ones know OpenMetrics, as 0.0.1 or 1.0.0, and no version or escaping beside it."""
    return content_type if CLIENT >= (0, 23) else content_type.partition(";")[0]


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", TEXT_0_0_4),
        ("*/*", TEXT_0_0_4),
        ("text/plain;version=0.0.4", TEXT_0_0_4),
        (
            "text/plain;version=1.0.0;escaping=allow-utf-8",
            "text/plain; version=1.0.0; charset=utf-8; escaping=allow-utf-8",
        ),
        (
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
            "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;"
            "escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",  # Prometheus 3
            "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=allow-utf-8",
        ),
        (
            "application/openmetrics-text; version=1.0.0 ; q=0.5",
            "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=underscores",
        ),
    ],
)
def test_prometheus_client_chooses_the_format(accept: str, content_type: str) -> None:
    chosen = negotiate(accept)
    assert chosen.content_type == choose_encoder(accept)[1]
    assert as_spelled(chosen.content_type) == as_spelled(content_type)
    assert chosen.openmetrics == ("openmetrics" in content_type)


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        # OpenMetrics 2.0 has no _bucket lines: the scraper gets the next that it takes.
        (
            "application/openmetrics-text;version=2.0.0;q=0.7,"
            "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.5",
            "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=underscores",
        ),
        ("application/openmetrics-text;version=2.0.0", TEXT_0_0_4),
        ("application/openmetrics-text;version=10.0.0", TEXT_0_0_4),
        # On these prometheus-client 0.26 raises TypeError.
        ('application/openmetrics-text;version="1.0.0"', TEXT_0_0_4),
        ("text/plain;version=x", TEXT_0_0_4),
        ("text/plain;version=1.x,text/plain", TEXT_0_0_4),
    ],
)
def test_versions_that_we_cannot_honour_are_passed_over(accept: str, content_type: str) -> None:
    assert as_spelled(negotiate(accept).content_type) == as_spelled(content_type)


@given(accept=st.lists(st.sampled_from(ACCEPT_PARTS), max_size=12).map("".join))
def test_any_accept_header_gets_a_format(accept: str) -> None:
    assert negotiate(accept).content_type.isprintable()


# Errors ------------------------------------------------------------------------------------------


def test_family_refuses_a_histogram() -> None:
    with pytest.raises(ValueError, match="use HistogramFamily"):
        family(PLAIN, [])


def test_histogram_family_refuses_a_gauge() -> None:
    with pytest.raises(ValueError, match="is a gauge"):
        histogram(GAUGE, [], 0)


def test_histogram_family_refuses_edges_below_the_slots() -> None:
    with pytest.raises(ValueError, match=r"edge at 2\^3, but the kernel's slots begin at 2\^4"):
        histogram(ODD, [], 4)


@pytest.mark.parametrize("labels", [(), ("a", "b")])
def test_wrong_number_of_labels_is_an_error(labels: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="labels"):
        family(GAUGE, [(labels, 1)])
    with pytest.raises(ValueError, match="needs labels"):
        rendered(Snapshot([], [histogram(ODD, [(labels, [0] * 5, 0)])]))


def test_too_few_slots_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"at least 5 slots, not .* and 4$"):
        rendered(Snapshot([], [histogram(ODD, [(("a", "b", "c"), [0] * 4, 0)])]))
