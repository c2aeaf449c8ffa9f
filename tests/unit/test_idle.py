# SPDX-License-Identifier: Apache-2.0
"""Idle series leave and come back whole."""

from __future__ import annotations

from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.exposition import (
    HistogramFamily,
    Labels,
    Snapshot,
    family,
    negotiate,
    render,
)
from writeback_exporter.metrics.idle import Idle

TIMEOUT = 100.0
THROTTLE = catalogue.DIRTY_THROTTLE_SECONDS
SLOTS = len(range(THROTTLE.exponents[0], THROTTLE.exponents[-1])) + 2


def snapshot(counts: dict[str, int]) -> Snapshot:
    """One histogram, counter and gauge by cgroup, and metrics that have no cgroup."""

    def histogram(labels: Labels, count: int) -> tuple[Labels, list[int], int]:
        return labels, [count, *[0] * (SLOTS - 1)], 7

    rows = [histogram((cgroup, "8:0"), count) for cgroup, count in counts.items()]
    depth = catalogue.BLOCK_IO_DEPTH
    return Snapshot(
        [
            family(catalogue.PRESSURE_WAITING_SECONDS, [((c, "io"), n) for c, n in counts.items()]),
            family(catalogue.CGROUP_MEMORY_BYTES, [((c,), 5) for c in counts]),
            family(catalogue.HOST_WRITTEN_BYTES, [((), 9)]),
        ],
        [
            HistogramFamily(THROTTLE, THROTTLE.exponents[0], lambda: rows, len(rows)),
            HistogramFamily(depth, 0, lambda: [(("sda",), [1] * 12, 7)], 1),
        ],
    )


def shown(idle: Idle, counts: dict[str, int], now: float) -> dict[str, set[str]]:
    """The cgroups of each metric that has some, after idle ones were left out."""
    found = snapshot(counts)
    idle.leave_out(found, now)
    lines = b"".join(render(found, negotiate(""))).decode().splitlines()
    assert found.series == sum(not line.startswith("#") for line in lines)
    assert {f.metric for f in found.families} == {f.metric for f in snapshot({}).families}
    assert [f.rows for f in found.families if not f.metric.labels] == [[((), 9)]]
    assert [len(list(h.rows())) for h in found.histograms if h.metric.labels == ("device",)] == [1]
    return {
        "counter": {labels[0] for labels, _ in found.families[0].rows},
        "gauge": {labels[0] for labels, _ in found.families[1].rows},
        "histogram": {labels[0] for labels, *_ in found.histograms[0].rows()},
    }


def both(*cgroups: str) -> dict[str, set[str]]:
    return {"counter": set(cgroups), "gauge": {"/a", "/b"}, "histogram": set(cgroups)}


def test_idle_series_leave_and_come_back() -> None:
    idle = Idle(TIMEOUT)
    assert shown(idle, {"/a": 1, "/b": 1}, 0.0) == both("/a", "/b")
    assert shown(idle, {"/a": 1, "/b": 2}, 99.0) == both("/a", "/b")
    assert shown(idle, {"/a": 1, "/b": 2}, 100.0) == both("/b")
    assert shown(idle, {"/a": 1, "/b": 2}, 198.0) == both("/b")
    # Back with all that it ever counted.
    found = snapshot({"/a": 2, "/b": 2})
    idle.leave_out(found, 199.0)
    assert found.families[0].rows == [(("/a", "io"), 2)]
    assert [labels[0] for labels, *_ in found.histograms[0].rows()] == ["/a"]
    assert next(iter(found.histograms[0].rows()))[1][0] == 2


def test_what_is_gone_is_forgotten() -> None:
    idle = Idle(TIMEOUT)
    shown(idle, {"/a": 1, "/b": 1}, 0.0)
    shown(idle, {"/b": 1}, 50.0)
    # A new cgroup under the old name, with the count that the old one had.
    assert shown(idle, {"/a": 1, "/b": 1}, 120.0) == both("/a")
