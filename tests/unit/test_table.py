# SPDX-License-Identifier: Apache-2.0
"""Rows by label set: summed, carried, and never going backwards."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.exposition import Labels
from writeback_exporter.probes.base import Table, carry

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
@given(rows=st.lists(st.tuples(LABELS, COUNTERS)), carried=st.dictionaries(LABELS, COUNTERS))
def test_rows_of_equal_labels_are_summed(
    kind: type[bytes] | type[memoryview],
    rows: list[tuple[Labels, tuple[int, ...]]],
    carried: dict[Labels, tuple[int, ...]],
) -> None:
    before = {labels: ROW.pack(*counters) for labels, counters in carried.items()}
    table = Table(before)
    for labels, counters in rows:
        table.add(labels, kind(ROW.pack(*counters)))
    assert unpacked(table) == summed([*carried.items(), *rows])
    # What is carried is carried again: a table must not change it.
    assert before == {labels: ROW.pack(*counters) for labels, counters in carried.items()}


@given(
    leaving=st.lists(st.tuples(LABELS, COUNTERS)),
    carried=st.dictionaries(LABELS, COUNTERS),
    in_use=st.sets(LABELS),
)
def test_carry_keeps_the_sums_of_what_is_in_use(
    leaving: list[tuple[Labels, tuple[int, ...]]],
    carried: dict[Labels, tuple[int, ...]],
    in_use: set[Labels],
) -> None:
    kept = carry(
        {labels: ROW.pack(*counters) for labels, counters in carried.items()},
        [(labels, ROW.pack(*counters)) for labels, counters in leaving],
        in_use.__contains__,
    )
    totals = summed([*carried.items(), *leaving])
    assert {labels: ROW.unpack(row) for labels, row in kept.items()} == {
        labels: totals[labels] for labels in totals.keys() & in_use
    }


def test_a_family_of_a_table() -> None:
    table = Table({("/a", "8:0"): ROW.pack(10, 1, 2)})
    table.add(("/a", "8:0"), ROW.pack(100, 3, 4))
    table.add(("/b", "8:0"), ROW.pack(7, 0, 1))
    family = table.histogram(catalogue.DIRTY_THROTTLE_SECONDS, 20, ROW)
    assert (family.metric, family.first_exponent) == (catalogue.DIRTY_THROTTLE_SECONDS, 20)
    assert list(family.rows()) == [(("/a", "8:0"), [4, 6], 110), (("/b", "8:0"), [0, 1], 7)]


class Life(RuleBasedStateMachine):
    """Entries of a map that come, count and leave, while their label sets are in use or not.

    The model counts events by label set. It starts again from nothing for a label set that is not
    in use when something leaves, as a series then ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self.map: dict[int, tuple[Labels, list[int]]] = {}
        self.next_key = 0
        self.users: Counter[Labels] = Counter()
        """How many cgroups or disks stand for a label set, with an entry in the map or without."""
        self.carried: dict[Labels, bytes] = {}
        self.total: dict[Labels, list[int]] = {}
        self.seen: dict[Labels, tuple[int, ...]] = {}

    def table(self) -> Table:
        table = Table(self.carried)
        for labels, counters in self.map.values():
            table.add(labels, memoryview(ROW.pack(*counters)))
        return table

    @rule(labels=LABELS)
    def starts(self, labels: Labels) -> None:
        self.users[labels] += 1
        self.map[self.next_key] = labels, [0] * WIDTH
        self.total.setdefault(labels, [0] * WIDTH)
        self.next_key += 1

    @rule(labels=LABELS)
    def starts_without_an_event(self, labels: Labels) -> None:
        self.users[labels] += 1

    @rule(data=st.data(), counters=COUNTERS)
    def counts(self, data: st.DataObject, counters: tuple[int, ...]) -> None:
        if not self.map:
            return
        labels, row = self.map[data.draw(st.sampled_from(sorted(self.map)))]
        for i, number in enumerate(counters):
            row[i] += number
            self.total[labels][i] += number

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        keys = data.draw(st.sets(st.sampled_from(sorted(self.map)))) if self.map else set()
        leaving = [self.map.pop(key) for key in sorted(keys)]
        self.users -= Counter(labels for labels, _ in leaving)
        self.carried = carry(
            self.carried,
            [(labels, ROW.pack(*counters)) for labels, counters in leaving],
            lambda labels: self.users[labels] > 0,
        )
        for labels in [*self.total]:
            if not self.users[labels]:
                del self.total[labels]
                self.seen.pop(labels, None)

    @rule(labels=LABELS)
    def user_without_an_entry_leaves(self, labels: Labels) -> None:
        if self.users[labels] > sum(one == labels for one, _ in self.map.values()):
            self.users[labels] -= 1

    @invariant()
    def nothing_is_lost(self) -> None:
        found = unpacked(self.table())
        in_use = {labels: tuple(total) for labels, total in self.total.items()}
        assert {labels: found[labels] for labels in in_use} == in_use

    @invariant()
    def no_counter_goes_backwards(self) -> None:
        found = unpacked(self.table())
        for labels, before in self.seen.items():
            assert all(a >= b for a, b in zip(found[labels], before, strict=True)), labels
        self.seen = {labels: row for labels, row in found.items() if self.users[labels]}


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)
