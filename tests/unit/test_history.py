# SPDX-License-Identifier: Apache-2.0
"""The last minutes: growth between samples, whatever comes, goes, fails or begins anew."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from writeback_exporter.metrics.exposition import Labels
from writeback_exporter.metrics.history import (
    INTERVAL_SECONDS,
    WINDOW_SECONDS,
    History,
    Recent,
    Sample,
)

A: Labels = ("/a", "8:0")
B: Labels = ("/b", "8:0")
SDA: Labels = ("sda", "read")


def throttled(time: float, **slept: int) -> Sample:
    """What cgroups had slept; the first letter is the name, and the whole the kernel's id."""
    return Sample(time, {key: ((f"/{key[0]}", "8:0"), ns) for key, ns in slept.items()})


def after(*samples: Sample) -> Recent:
    history = History()
    for sample in samples:
        history.add(sample)
    return history.recent()


def test_the_first_sample_is_where_it_begins() -> None:
    recent = after(throttled(100, a=7))
    assert (recent.seconds, recent.since_start) == (0, True)
    assert recent.throttled == {}


def test_growth_since_the_start() -> None:
    recent = after(throttled(100, a=7), throttled(110, a=9, b=5), throttled(130, a=9, b=6))
    assert (recent.seconds, recent.observed_seconds, recent.since_start) == (30, 30, True)
    assert recent.throttled == {A: 2, B: 6}


def test_growth_in_the_window() -> None:
    samples = [throttled(15.0 * i, a=10 * i) for i in range(100)]
    recent = after(*samples)
    assert WINDOW_SECONDS - INTERVAL_SECONDS <= recent.seconds <= WINDOW_SECONDS
    assert recent.throttled == {A: recent.seconds / 15 * 10}
    assert (recent.observed_seconds, recent.since_start) == (99 * 15, False)


def test_who_looks_seldom_sees_what_happened_since_and_then_the_last_seconds() -> None:
    samples = [throttled(0), throttled(60, a=1), throttled(4000, a=5)]
    recent = after(*samples)
    assert (recent.seconds, recent.throttled) == (3940, {A: 4})
    recent = after(*samples, throttled(4015, a=7))
    assert (recent.seconds, recent.throttled) == (15, {A: 2})


@given(st.lists(st.floats(0.001, 5000), min_size=1, max_size=300))
def test_intervals_are_bounded(gaps: Sequence[float]) -> None:
    history, time, slept = History(), 0.0, 0
    history.add(throttled(time, a=slept))
    totals = {time: slept}
    for gap in gaps:
        time, slept = time + gap, slept + 3
        totals[time] = slept
        history.add(throttled(time, a=slept))
        recent = history.recent()
        assert len(history._intervals) <= WINDOW_SECONDS / INTERVAL_SECONDS + 2
        assert recent.throttled is not None
        grown = recent.throttled[A]
        begin = next(at for at, total in totals.items() if total == slept - grown)
        assert recent.seconds == time - begin
        assert recent.seconds <= max(WINDOW_SECONDS, gap + INTERVAL_SECONDS)


def test_a_cgroup_that_has_gone_keeps_what_was_seen_of_it() -> None:
    recent = after(throttled(0, a=5), throttled(60, a=8), throttled(120))
    assert recent.throttled == {A: 3}


def test_another_cgroup_of_the_name_counts_from_nothing() -> None:
    """However soon it comes, and however much more it has slept."""
    for slept in (1, 5, 100):
        recent = after(throttled(0, a=5), throttled(60, a2=slept))
        assert recent.throttled == {A: slept}


def test_counters_of_one_name_are_summed() -> None:
    recent = after(throttled(0, a=5), throttled(60, a=6, a2=10))
    assert recent.throttled == {A: 11}


def test_a_counter_that_begins_anew() -> None:
    """The kernel keeps a removed cgroup whose entry was deleted (DYING_SECONDS)."""
    assert after(throttled(0, a=5), throttled(60, a=2)).throttled == {A: 2}


def test_requests() -> None:
    def io(time: float, *counts: int) -> Sample:
        return Sample(time, io={SDA: counts} if counts else {})

    assert after(io(0, 1, 2), io(15, 1, 5), io(70, 2, 5), io(80, 2, 6)).io == {SDA: [1, 4]}
    assert after(io(0, 1, 2), io(15, 1, 2)).io == {}
    # Another disk of the name.
    assert after(io(0, 1, 2), io(15), io(30, 4, 0)).io == {SDA: [4, 0]}
    assert after(io(0, 1, 2), io(15, 4, 0)).io == {SDA: [4, 0]}


def test_pressure_is_known_by_two_samples() -> None:
    def waiting(time: float, **totals: int) -> Sample:
        return Sample(time, waiting=totals)

    assert after(waiting(0, io=500)).waiting == {}
    recent = after(waiting(0, io=500, cpu=3), waiting(10, io=700, cpu=3, irq=9))
    assert recent.waiting == {"io": 200, "cpu": 0}
    assert after(waiting(0, io=500), waiting(10, io=400)).waiting == {"io": 0}


@pytest.mark.parametrize("name", ["throttled", "io"])
def test_what_is_not_observed_is_not_nothing(name: str) -> None:
    recent = after(Sample(0), Sample(10))
    assert getattr(recent, name) is None


def test_a_collector_that_fails_for_a_while() -> None:
    """What was counted meanwhile shows when it works again; what was counted before does not."""
    known = throttled(0, a=5)
    assert after(known, Sample(10)).throttled is None
    recent = after(known, Sample(10), throttled(20, a=7))
    assert recent.throttled == {A: 2}
    assert after(Sample(0), throttled(20, a=7), throttled(30, a=8)).throttled == {A: 1}


def test_now_is_of_the_newest_sample() -> None:
    recent = after(
        Sample(0, asleep={A: 1}, disks={"8:0": "sda"}),
        Sample(10, asleep={B: 2}, disks={"8:16": "sdb"}),
    )
    assert (recent.asleep, recent.disks) == ({B: 2}, {"8:16": "sdb"})


def test_scrapes_add_a_sample_a_minute() -> None:
    history = History()
    assert history.due < 0
    history.add(Sample(100))
    assert history.due == 160
