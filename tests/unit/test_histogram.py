# SPDX-License-Identifier: Apache-2.0
"""bpf/histogram.h, compiled for this machine, and what exposition makes of its slots."""

from __future__ import annotations

import ctypes
import os
import subprocess
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from writeback_exporter.kernel.loader import open_file
from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.catalogue import Kind, Metric
from writeback_exporter.metrics.exposition import HistogramFamily, Snapshot, negotiate, render

BPF = Path(__file__).parents[2] / "bpf"
SOURCE = """
typedef unsigned int __u32;
typedef unsigned long long __u64;
#define __always_inline inline __attribute__((always_inline))
#include "histogram.h"
__u32 call_log2_ceil(__u64 v) { return log2_ceil(v); }
__u32 call_slot_of(__u64 v, __u32 first, __u32 last) { return slot_of(v, first, last); }
__u32 call_slots(__u32 first, __u32 last) { return SLOTS(first, last); }
void call_add(__u64 *counter, __u64 n) { add(counter, n); }
void call_observe(__u64 *sum, __u64 *slots, __u64 v, __u32 first, __u32 last)
{
	observe(sum, slots, v, first, last);
}
__u64 call_ns_between(__u64 from, __u64 to) { return ns_between(from, to); }
"""

LARGEST = 2**64 - 1
EDGES = sorted(
    {0, LARGEST} | {(1 << e) + d for e in range(64) for d in (-1, 0, 1) if (1 << e) + d <= LARGEST}
)
U64 = st.one_of(st.sampled_from(EDGES), st.integers(0, LARGEST))
LATENCY = ("block_io", "io_latency_exponents", "IO_LATENCY")
SLOTS_OF = {
    catalogue.BLOCK_IO_DEVICE_SECONDS: LATENCY,
    catalogue.BLOCK_IO_QUEUE_SECONDS: LATENCY,
    catalogue.BLOCK_IO_SIZE_BYTES: ("block_io", "io_size_exponents", "IO_SIZE"),
    catalogue.BLOCK_IO_DEPTH: ("block_io", "io_depth_exponents", "IO_DEPTH"),
    catalogue.BLOCK_IO_LIMIT_SECONDS: ("block_io_limit", "limit_exponents", "LIMIT"),
    catalogue.DIRTY_THROTTLE_SECONDS: ("dirty_throttle", "pause_exponents", "PAUSE"),
    catalogue.WORK_SECONDS: ("work", "work_exponents", "WORK"),
    catalogue.PAGE_WAIT_SECONDS: ("page_wait", "page_wait_exponents", "PAGE_WAIT"),
    catalogue.SYNC_SECONDS: ("sync", "sync_exponents", "SYNC"),
    catalogue.MEMORY_STALL_SECONDS: ("memory_stall", "stall_exponents", "STALL"),
}
"""Object, enum, and what the names of the enum's first and last exponent begin with."""
OBJECTS = {name: open_file(name) for name, _, _ in SLOTS_OF.values()}
EXACT_SCALE = {"seconds": Fraction(1, 10**9), "bytes": Fraction(1), "": Fraction(1)}
"""The kernel's unit in the metric's, by unit."""


@dataclass(frozen=True)
class Slots:
    """A histogram's first and last exponent in the object."""

    first: int
    last: int

    @classmethod
    def of(cls, metric: Metric) -> Slots:
        name, enum, prefix = SLOTS_OF[metric]
        values = OBJECTS[name].enum(enum)
        return cls(values[f"{prefix}_FIRST"], values[f"{prefix}_LAST"])

    def count(self, native: ctypes.CDLL, values: Sequence[int]) -> list[int]:
        """The slots that the C code counts `values` in."""
        slots = [0] * native.call_slots(self.first, self.last)
        for value in values:
            slots[native.call_slot_of(value, self.first, self.last)] += 1
        return slots


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The header as a shared library, by the compiler of the BPF objects."""
    place = tmp_path_factory.mktemp("histogram")
    (place / "native.c").write_text(SOURCE)
    options = ["-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-nostdlib", f"-I{BPF}"]
    subprocess.run(
        [os.environ.get("CLANG", "clang"), *options, "-o", place / "native.so", place / "native.c"],
        check=True,
    )
    library = ctypes.CDLL(str(place / "native.so"))
    u32, u64 = ctypes.c_uint32, ctypes.c_uint64
    library.call_log2_ceil.argtypes, library.call_log2_ceil.restype = (u64,), u32
    library.call_slot_of.argtypes, library.call_slot_of.restype = (u64, u32, u32), u32
    library.call_slots.argtypes, library.call_slots.restype = (u32, u32), u32
    counter = ctypes.POINTER(u64)
    library.call_add.argtypes, library.call_add.restype = (counter, u64), None
    library.call_observe.argtypes = (counter, counter, u64, u32, u32)
    library.call_observe.restype = None
    library.call_ns_between.argtypes, library.call_ns_between.restype = (u64, u64), u64
    return library


def smallest_exponent(value: int) -> int:
    return next(e for e in range(65) if value <= 2**e)


def slot(value: int, slots: Slots) -> int:
    """By definition: as many edges as the value exceeds."""
    return bisect_left([2**e for e in range(slots.first, slots.last + 1)], value)


# The header ---------------------------------------------------------------------------------------


def test_log2_ceil_at_every_edge(native: ctypes.CDLL) -> None:
    assert [native.call_log2_ceil(v) for v in EDGES] == [smallest_exponent(v) for v in EDGES]


@given(U64)
def test_log2_ceil(native: ctypes.CDLL, value: int) -> None:
    assert native.call_log2_ceil(value) == smallest_exponent(value)


@pytest.mark.parametrize("metric", SLOTS_OF, ids=lambda metric: metric.name)
def test_slot_at_every_edge(native: ctypes.CDLL, metric: Metric) -> None:
    slots = Slots.of(metric)
    found = [native.call_slot_of(value, slots.first, slots.last) for value in EDGES]
    assert found == [slot(value, slots) for value in EDGES]


@pytest.mark.parametrize("metric", SLOTS_OF, ids=lambda metric: metric.name)
def test_slots_that_the_definition_names(native: ctypes.CDLL, metric: Metric) -> None:
    slots = Slots.of(metric)
    first, last = slots.first, slots.last
    number = native.call_slots(first, last)
    for e in range(first, last + 1):
        assert native.call_slot_of(2**e, first, last) == e - first, "an edge is in its own slot"
        assert native.call_slot_of(2**e + 1, first, last) == e - first + 1
    assert {native.call_slot_of(v, first, last) for v in (0, 1, 2**first)} == {0}
    above = (2**last + 1, 2**63, LARGEST)
    assert {native.call_slot_of(v, first, last) for v in above} == {number - 1}


@given(U64, st.integers(0, 63), st.integers(0, 63))
def test_slot(native: ctypes.CDLL, value: int, one: int, other: int) -> None:
    slots = Slots(min(one, other), max(one, other))
    found = native.call_slot_of(value, slots.first, slots.last)
    assert found == slot(value, slots)
    # An index that the verifier is told of nowhere: it must be within the array.
    assert 0 <= found < native.call_slots(slots.first, slots.last)


@given(U64, U64)
def test_add_wraps_as_the_kernel_does(native: ctypes.CDLL, counter: int, n: int) -> None:
    cell = ctypes.c_uint64(counter)
    native.call_add(ctypes.byref(cell), n)
    assert cell.value == (counter + n) % 2**64


@pytest.mark.parametrize("metric", SLOTS_OF, ids=lambda metric: metric.name)
def test_observe_counts_each_value_once(native: ctypes.CDLL, metric: Metric) -> None:
    slots = Slots.of(metric)
    total = ctypes.c_uint64()
    counts = (ctypes.c_uint64 * native.call_slots(slots.first, slots.last))()
    for value in EDGES:
        native.call_observe(ctypes.byref(total), counts, value, slots.first, slots.last)
    assert list(counts) == slots.count(native, EDGES)
    assert total.value == sum(EDGES) % 2**64


@given(U64, st.integers(1 - 2**63, 2**63 - 1))
def test_a_clock_that_is_behind_measures_nothing(
    native: ctypes.CDLL, since: int, elapsed: int
) -> None:
    now = (since + elapsed) % 2**64
    assert native.call_ns_between(since, now) == max(elapsed, 0)


# From the header to the scrape --------------------------------------------------------------------


def test_every_histogram_is_here() -> None:
    assert {m for m in catalogue.ALL if m.kind is Kind.HISTOGRAM} == SLOTS_OF.keys()


def scraped(metric: Metric, slots: Slots, counts: Sequence[int], total: int) -> dict[str, Fraction]:
    """Value by `le`, and of the sum and count, as a scraper reads them."""
    labels = tuple(f"{label} of it" for label in metric.labels)
    family = HistogramFamily(metric, slots.first, lambda: [(labels, counts, total)])
    text = b"".join(render(Snapshot(histograms=[family]), negotiate(""))).decode()
    (parsed,) = text_string_to_metric_families(text)
    return {
        sample.labels.get("le", sample.name.removeprefix(metric.name)): Fraction(sample.value)
        for sample in parsed.samples
    }


@given(metric=st.sampled_from([*SLOTS_OF]), data=st.data())
def test_buckets_equal_a_plain_histogram(
    native: ctypes.CDLL, metric: Metric, data: st.DataObject
) -> None:
    """Each bucket counts just the values that do not exceed its `le`, exactly."""
    slots = Slots.of(metric)
    near = [2**e + d for e in range(slots.first, slots.last + 1) for d in (-1, 0, 1)]
    values = data.draw(st.lists(st.one_of(st.sampled_from(near), U64), max_size=30))
    total = sum(values) % 2**64
    found = scraped(metric, slots, slots.count(native, values), total)

    scale = EXACT_SCALE[metric.unit]
    edges = [le for le in found if le not in ("+Inf", "_sum", "_count")]
    assert len(edges) == len(metric.exponents)
    for le in edges:
        assert found[le] == sum(value * scale <= Fraction(le) for value in values), le
    assert found["+Inf"] == found["_count"] == len(values)
    assert found["_sum"] == Fraction(float(total * scale))


@pytest.mark.parametrize("metric", SLOTS_OF, ids=lambda metric: metric.name)
def test_values_around_each_exported_edge(native: ctypes.CDLL, metric: Metric) -> None:
    """A value at an edge and the next one differ in the bucket of that edge, and in no other."""
    slots = Slots.of(metric)
    for e in metric.exponents:
        at, above = (
            scraped(metric, slots, slots.count(native, [value]), 0) for value in (2**e, 2**e + 1)
        )
        (differs,) = (le for le in at if at[le] != above[le])
        assert Fraction(differs) == 2**e * EXACT_SCALE[metric.unit]
