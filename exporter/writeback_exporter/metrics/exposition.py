# SPDX-License-Identifier: Apache-2.0
"""Writes what one collection found, in the text format that the scraper asks for.

prometheus-client is the model: it chooses the format, and its writer decides every byte. But for
thousands of cgroups it is too slow: 7 s for the block IO of 10,000, 13 s in OpenMetrics. So it
writes a single series of each family, with marks where label values and numbers belong: a stencil,
into which all other series are filled. Names, order of labels, edges, units, escaping schemes and
name[] are therefore its decisions, and the bytes are equal to its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial
from itertools import accumulate, chain, pairwise
from operator import itemgetter
from typing import Any

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric as PrometheusMetric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

from writeback_exporter.metrics.catalogue import Kind, Metric

# ISA-L compresses a scrape of 1,000 cgroups, 23 MB, in 6 ms of CPU, zlib in 35, and to 8 % more; to
# import it takes 0.7 ms and 0.5 MB. Debian 12 does not have it, nor has pip on all architectures.
try:
    from isal import isal_zlib as zlib
except ImportError:
    import zlib  # type: ignore[no-redef]

Labels = tuple[str, ...]
"""Label values in the order of the metric's labels."""

Samples = list[tuple[Labels, float]]
"""Of a counter or gauge, values in the metric's unit."""

HistogramRow = tuple[Labels, Sequence[int], int]
"""One series: labels, the kernel's slots (not cumulative), sum in the kernel's unit (ns, bytes)."""


@dataclass(frozen=True, slots=True)
class HistogramFamily:
    """A histogram metric and where its series come from.

    Slot i of a row counts values v with 2^(F+i-1) < v <= 2^(F+i), F being `first_exponent`; slot 0
    also all that is smaller, and the last slot all above the last edge (+Inf). `rows` is called at
    most once in a rendering and read lazily, so that it can be a generator over a map dump.

    Raises ValueError where the metric's edges cannot be made of such slots.
    """

    metric: Metric
    first_exponent: int
    rows: Callable[[], Iterable[HistogramRow]]
    count: int = 0
    """How many rows there will be, for `Snapshot.series`."""

    def __post_init__(self) -> None:
        if self.metric.kind is not Kind.HISTOGRAM:
            raise ValueError(f"{self.metric.name} is a {self.metric.kind.value}, not a histogram")
        if self.first_exponent > min(self.metric.exponents):
            raise ValueError(
                f"{self.metric.name} has an edge at 2^{min(self.metric.exponents)}, "
                f"but the kernel's slots begin at 2^{self.first_exponent}"
            )


def bucket_counts(metric: Metric, first_exponent: int, slots: Sequence[int]) -> list[int]:
    """The values in each of a histogram's buckets, not cumulative; the last is above all edges."""
    ends = [exponent - first_exponent + 1 for exponent in metric.exponents]
    return [sum(slots[begin:end]) for begin, end in pairwise([0, *ends, len(slots)])]


@dataclass(frozen=True, slots=True)
class Family:
    """A counter or gauge with its samples, values in the metric's unit."""

    metric: Metric
    rows: Samples

    def model(self) -> PrometheusMetric:
        """The family as prometheus-client holds it."""
        metric = self.metric
        kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
        result = kind(metric.name, metric.help, labels=metric.labels, unit=metric.unit)
        for labels, value in self.rows:
            result.add_metric([_encodable(label) for label in labels], value)
        return result


@dataclass
class Snapshot:
    """The whole result of one collection; `others` are families of prometheus-client's own."""

    families: list[Family] = field(default_factory=list)
    histograms: list[HistogramFamily] = field(default_factory=list)
    others: list[PrometheusMetric] = field(default_factory=list)

    @property
    def series(self) -> int:
        """Number of series, which is that of lines with a value."""
        return (
            sum(len(f.rows) for f in self.families)
            # A bucket for each edge and for +Inf, sum and count.
            + sum(h.count * (len(h.metric.edges) + 3) for h in self.histograms)
            + sum(len(metric.samples) for metric in self.others)
        )


def family(metric: Metric, rows: Iterable[tuple[Labels, float]]) -> Family:
    """A counter or gauge of the catalogue; `rows` are read at once.

    Raises ValueError for a histogram, or where a row has more or fewer labels than the metric.
    """
    if metric.kind is Kind.HISTOGRAM:
        raise ValueError(f"{metric.name} is a histogram: use HistogramFamily")
    kept = list(rows)
    if set(map(len, map(itemgetter(0), kept))) - {len(metric.labels)}:
        wrong = next(labels for labels, _ in kept if len(labels) != len(metric.labels))
        raise ValueError(f"{metric.name} has labels {metric.labels}, not {wrong}")
    return Family(metric, kept)


# Format -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """A text format: what the Content-Type header says, and prometheus-client's writer of it."""

    content_type: str
    openmetrics: bool
    encode: Callable[[Collector], bytes] = field(repr=False, compare=False)


def negotiate(accept: str) -> Format:
    """The format for an Accept header; text 0.0.4 where it is empty or asks for nothing we write.

    prometheus-client chooses, from among the entries whose version we can honour.
    """
    entries = filter(_can_honour, accept.split(","))
    encode, content_type = choose_encoder(",".join(entries))
    return Format(content_type, content_type.startswith("application/openmetrics-text"), encode)


_VERSION = re.compile(r";\s*version=([^;]*)")
_VERSION_WE_WRITE = re.compile(r"[01]\.[0-9]+\.[0-9]+")


def _can_honour(entry: str) -> bool:
    # prometheus-client 0.26 answers any OpenMetrics version >= 1.0.0 under that very version, yet
    # OpenMetrics 2.0 (2.0.0-rc0) writes a classic histogram as one composite value, which it does
    # not; and it raises TypeError where a version is no row of numbers, such as "1.0.0" in quotes.
    version = _VERSION.search(entry)
    return version is None or _VERSION_WE_WRITE.fullmatch(version[1].strip()) is not None


# Rendering ----------------------------------------------------------------------------------------

_CHUNK_BYTES = 64 * 1024
_END_OF_OPENMETRICS = b"# EOF\n"


def render(snapshot: Snapshot, format: Format, names: Collection[str] = ()) -> Iterator[bytes]:
    """The snapshot in chunks of about 64 KiB, byte for byte what prometheus-client would write.

    `names` are those of name[]: of the samples (x_bucket, x_total), not of families; none means
    all. What `rows` raises comes out of this iterator, when part of the answer may have been sent:
    break the connection then, since text 0.0.4 that just ends looks complete.
    """
    return _chunked(_pieces(snapshot, format, frozenset(names)))


def gzip_chunks(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The chunks as one gzip stream, itself in chunks of about 64 KiB.

    Of a scrape of 1,000 cgroups level 1 leaves 1.19 MB, zlib's 1.28; prometheus-client's 9 takes
    164 ms for 1.18. ISA-L's levels are others, from 0 to 3: 2 is no better, 3 as slow as zlib.
    """
    # memLevel 5, for zlib: a hash table of 8 KiB instead of 64 leaves the first-level cache to
    # others. 11 % faster than the default on an idle host, 22 % on a busy one, for 1 % more output.
    # For ISA-L it is how much makes a block: 220 KB a stream, by default 350 for nothing more; 150
    # are zlib's.
    compressor = zlib.compressobj(1, zlib.DEFLATED, 16 + zlib.MAX_WBITS, memLevel=5)

    def pieces() -> Iterator[bytes]:
        yield from map(compressor.compress, chunks)
        yield compressor.flush()

    return _chunked(pieces())


def _chunked(pieces: Iterable[bytes]) -> Iterator[bytes]:
    chunk: list[bytes] = []
    size = 0
    for piece in pieces:
        chunk.append(piece)
        size += len(piece)
        if size >= _CHUNK_BYTES:
            yield b"".join(chunk)
            chunk.clear()
            size = 0
    if size:
        yield b"".join(chunk)


def _pieces(snapshot: Snapshot, format: Format, names: frozenset[str]) -> Iterator[bytes]:
    for metric in snapshot.others:
        yield _encode(metric, format, names)
    escape = cache(_escape)  # a cgroup is in some twenty lines and histograms: a third of a line
    for scalars in snapshot.families:
        yield from _scalars(scalars, format, names, escape)
    for histogram in snapshot.histograms:
        yield from _histogram(histogram, format, names, escape)
    if format.openmetrics:
        yield _END_OF_OPENMETRICS


class _Single(Collector):
    """One family as a collector; describe() is how a restricted registry knows what it has."""

    def __init__(self, metric: PrometheusMetric) -> None:
        self._metric = metric

    def collect(self) -> Iterable[PrometheusMetric]:
        return [self._metric]

    describe = collect


def _encode(metric: PrometheusMetric, format: Format, names: frozenset[str]) -> bytes:
    """The family as prometheus-client writes it, without the end of an exposition."""
    registry = CollectorRegistry()
    registry.register(_Single(metric))
    text = format.encode(registry.restricted_registry(names) if names else registry)
    return text.removesuffix(_END_OF_OPENMETRICS) if format.openmetrics else text


Escape = Callable[[str], str]
"""Of a label's value. Remembers for one rendering what it has given."""


# Stencils -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stencil:
    """A family's header and the lines of one series, in which marks stand for what differs."""

    header: bytes
    body: str
    """Marks: \\x01i\\x02 for the value of the metric's i-th label, \\x01\\x02 for the number."""
    columns: list[int]
    """For each line its number, as an index of (count of each edge..., total, sum)."""


_MARK = re.compile("\x01([0-9]*)\x02")


def _marks(metric: Metric) -> Labels:
    return tuple(f"\x01{i}\x02" for i in range(len(metric.labels)))


@lru_cache(maxsize=1024)  # 0.04 ms each, 3 of a scrape
def _stencil(metric: Metric, format: Format, names: frozenset[str]) -> _Stencil | None:
    """Of a family with one series, whose labels are marks and whose numbers say which column they
    stand for. None where `names` has none of the metric's samples."""
    if metric.kind is Kind.HISTOGRAM:
        series = _histogram_series(metric)
    else:
        series = Family(metric, [(_marks(metric), 0)]).model()
    header, body, columns = "", "", []
    for line in _encode(series, format, names).decode().split("\n")[:-1]:
        if line.startswith("#"):
            header += f"{line}\n"
        else:
            text, _, number = line.rpartition(" ")
            body += f"{text} \x01\x02\n"
            columns.append(int(float(number)))
    return _Stencil(header.encode(), body, columns) if columns else None


def _parts(body: str, other_labels: Labels) -> list[str]:
    """The body with all labels but the first, which varies most, filled in; cut at other marks.

    Constant text is at even places; at odd ones are, line by line, the holes for the first label
    (where the metric has one) and for the number.
    """
    parts = [""]
    for i, piece in enumerate(_MARK.split(body)):
        if i % 2 == 0:
            parts[-1] += piece
        elif piece in ("", "0"):
            parts += ["", ""]
        else:
            parts[-1] += _escape(other_labels[int(piece) - 1])
    return parts


# Counters and gauges ------------------------------------------------------------------------------

_BATCH = 256


def _scalars(
    scalars: Family, format: Format, names: frozenset[str], escape: Escape
) -> Iterator[bytes]:
    """The lines of a family, 1 us each; prometheus-client takes 6-12."""
    metric = scalars.metric
    stencil = _stencil(metric, format, names)
    if stencil is None or (names and not scalars.rows):
        return
    yield stencil.header
    parts_of = lru_cache(maxsize=1024)(partial(_parts, stencil.body))
    for start in range(0, len(scalars.rows), _BATCH):
        lines: list[str] = []
        for labels, value in scalars.rows[start : start + _BATCH]:
            parts = parts_of(labels[1:])
            text = _value_text(value)
            if labels:
                lines.append(f"{parts[0]}{escape(labels[0])}{parts[2]}{text}{parts[4]}")
            else:
                lines.append(f"{parts[0]}{text}{parts[2]}")
        yield "".join(lines).encode()


# Histograms ---------------------------------------------------------------------------------------


def _histogram_series(metric: Metric) -> PrometheusMetric:
    les = [*map(_go_float, metric.edges), "+Inf"]
    series = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels, unit=metric.unit)
    buckets = [(le, float(column)) for column, le in enumerate(les)]
    series.add_metric(_marks(metric), buckets, len(les))
    return series


def _histogram(
    histogram: HistogramFamily, format: Format, names: frozenset[str], escape: Escape
) -> Iterator[bytes]:
    stencil = _stencil(histogram.metric, format, names)
    if stencil is None:
        return
    rows = iter(histogram.rows())
    first = next(rows, None)
    if first is None:
        # Only its header, or where names are given nothing, as prometheus-client has it.
        yield b"" if names else stencil.header
        return
    yield stencil.header
    yield from _series(histogram, stencil, chain((first,), rows), escape)


def _series(
    histogram: HistogramFamily, stencil: _Stencil, rows: Iterable[HistogramRow], escape: Escape
) -> Iterator[bytes]:
    """The lines of each row.

    5 us a series of 19 lines; prometheus-client takes 120, and 225 in OpenMetrics. What decided for
    a list whose holes are filled and joined, cached for each (device, op): with holes for all
    labels 6 us, `%` with the numbers and then replace() with the labels 9, `%` with all 12.
    """
    metric = histogram.metric
    divisor = round(1 / metric.scale)
    edges = [exponent - histogram.first_exponent for exponent in metric.exponents]
    slots_needed = edges[-1] + 2  # with one less, the overflow would be the last edge's
    counts_of = _picker([*edges, -1])
    numbers_of = _picker(stencil.columns)
    parts_of = lru_cache(maxsize=1024)(partial(_parts, stencil.body))  # 4 KB each
    lines = len(stencil.columns)
    stride = 4 if metric.labels else 2
    for labels, slots, total in rows:
        if len(labels) != len(metric.labels) or len(slots) < slots_needed:
            raise ValueError(
                f"{metric.name} needs labels {metric.labels} and at least {slots_needed} slots, "
                f"not {labels} and {len(slots)}"
            )
        parts = parts_of(labels[1:])
        if labels:
            parts[1::stride] = [escape(labels[0])] * lines
        texts = _count_texts(counts_of(list(accumulate(slots))))
        texts.append(_sum_text(total, divisor))
        parts[stride - 1 :: stride] = numbers_of(texts)
        yield "".join(parts).encode()


def _picker(indices: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """itemgetter, but for one index also a sequence."""
    if len(indices) == 1:
        return lambda row: (row[indices[0]],)
    return itemgetter(*indices)


# Text of label values and numbers -----------------------------------------------------------------


def _encodable(value: str) -> str:
    """`value`, with a lone surrogate, which UTF-8 does not have, spelled out as \\udc80."""
    # isascii() reads a flag of the string: nothing is scanned in the usual case.
    return value if value.isascii() else value.encode(errors="backslashreplace").decode()


def _escape(value: str) -> str:
    value = _encodable(value)
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _go_float(value: float) -> str:
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


_FIRST_INEXACT = 2**53
# By number of digits; asked for, since before 0.26 prometheus-client wrote e+010 for e+10.
_EXPONENT = ("",) * 7 + tuple(_go_float(10.0**exponent)[1:] for exponent in range(6, 16))
_SMALL = tuple(f"{count}.0" for count in range(10_000))


def _count_text(count: int) -> str:
    """As floatToGoString, in 0.3 us instead of 0.9 from 10^6 on."""
    if count < 1_000_000:
        return f"{count}.0"
    if count >= _FIRST_INEXACT:
        return _go_float(count)
    digits = str(count)
    return f"{digits[0]}.{digits[1:]}".rstrip("0.") + _EXPONENT[len(digits)]


def _count_texts(cumulative: Sequence[int]) -> list[str]:
    """As floatToGoString writes each of them; the last is the largest."""
    if cumulative[-1] < len(_SMALL):  # most cgroups are quiet: 0.5 us for 17 counts instead of 1.7
        return [_SMALL[count] for count in cumulative]
    # Latencies of one cgroup lie in few slots, so that half of the counts equal the one before.
    texts = []
    last, text = -1, ""
    for count in cumulative:
        if count != last:
            last, text = count, _count_text(count)
        texts.append(text)
    return texts


def _value_text(value: float) -> str:
    """As floatToGoString writes it."""
    if type(value) is int and value >= 0:
        return _SMALL[value] if value < len(_SMALL) else _count_text(value)
    value = float(value)
    if -_FIRST_INEXACT < value < 1e6:
        return repr(value)
    if 1e6 <= value < _FIRST_INEXACT and value.is_integer():
        return _count_text(int(value))
    return _go_float(value)


def _sum_text(total: int, divisor: int) -> str:
    if divisor == 1:
        return _count_text(total)
    value = total / divisor  # divided, not scaled: correctly rounded, as the edges are
    return repr(value) if value < 1e6 else _go_float(value)
