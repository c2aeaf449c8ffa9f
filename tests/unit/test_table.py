# SPDX-License-Identifier: Apache-2.0
"""Rows by label set."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.exposition import Labels
from writeback_exporter.probes.base import Table

WIDTH = 3
"""Counters in a row here."""
ROW = struct.Struct(f"={WIDTH}Q")
COUNTERS = st.tuples(*[st.integers(0, 2**40)] * WIDTH)
LABELS = st.sampled_from([("/a", "sda"), ("/a", "sdb"), ("/b", "sda"), ("other", "sda")])


def unpacked(table: Table) -> dict[Labels, tuple[int, ...]]:
    return {labels: ROW.unpack(row) for labels, row in table.rows.items()}


def summed(rows: Sequence[tuple[Labels, tuple[int, ...]]]) -> dict[Labels, tuple[int, ...]]:
    totals: dict[Labels, tuple[int, ...]] = {}
    for labels, counters in rows:
        before = totals.get(labels, (0,) * WIDTH)
        totals[labels] = tuple(map(sum, zip(before, counters, strict=True)))
    return totals


@pytest.mark.parametrize("kind", [bytes, memoryview])
@given(rows=st.lists(st.tuples(LABELS, COUNTERS)))
def test_rows_of_equal_labels_are_summed(
    kind: type[bytes] | type[memoryview], rows: list[tuple[Labels, tuple[int, ...]]]
) -> None:
    table = Table()
    for labels, counters in rows:
        table.add(labels, kind(ROW.pack(*counters)))
    assert unpacked(table) == summed(rows)


def test_a_family_of_a_table() -> None:
    table = Table()
    table.add(("/a", "8:0"), ROW.pack(10, 1, 2))
    table.add(("/a", "8:0"), ROW.pack(100, 3, 4))
    table.add(("/b", "8:0"), ROW.pack(7, 0, 1))
    family = table.histogram(catalogue.DIRTY_THROTTLE_SECONDS, 20, ROW)
    assert (family.metric, family.first_exponent) == (catalogue.DIRTY_THROTTLE_SECONDS, 20)
    assert list(family.rows()) == [(("/a", "8:0"), [4, 6], 110), (("/b", "8:0"), [0, 1], 7)]
