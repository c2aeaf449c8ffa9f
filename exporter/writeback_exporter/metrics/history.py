# SPDX-License-Identifier: Apache-2.0
"""What happened in the last minutes, for the status page: growth between samples of counters.

collectors -> Sample -> History: one sample, and growth by interval -> Recent
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from writeback_exporter.metrics.exposition import Labels

WINDOW_SECONDS = 300.0
"""How far back the figures reach, where they were looked at often enough."""
INTERVAL_SECONDS = 60.0
"""Growth is kept for intervals of this length or longer: by a minute the window moves on."""


@dataclass(slots=True)
class Sample:
    """What the collectors had counted at one time. What is None is not known."""

    time: float
    """Monotonic, in seconds."""
    throttled: Mapping[Hashable, tuple[Labels, int]] | None = None
    """(cgroup, BDI) and time asleep in balance_dirty_pages in ns, by the kernel's ids of the two:
    none is used twice, while under a name another cgroup may begin anew."""
    asleep: Mapping[Labels, int] = field(default_factory=dict)
    """Tasks asleep there now, by (cgroup, BDI)."""
    disks: Mapping[str, str] = field(default_factory=dict)
    """Names of the disks behind BDIs that have one."""
    io: Mapping[Labels, Sequence[int]] | None = None
    """Requests by (device, op) in each bucket of writeback_block_io_device_seconds, of all cgroups,
    also of those that have been forgotten: a sum of what is left could go backwards."""
    waiting: Mapping[str, int] | None = None
    """Time in which some task of the host waited, in microseconds by resource."""


@dataclass(slots=True)
class _Growth:
    """By how much the counters of samples grew between two times. What did not has no entry."""

    begin: float
    end: float
    throttled: Counter[Labels] = field(default_factory=Counter)
    io: dict[Labels, list[int]] = field(default_factory=dict)
    waiting: Counter[str] = field(default_factory=Counter)
    """With an entry also of what did not grow, for that is known then."""

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def extend(self, later: _Growth) -> None:
        self.end = later.end
        self.throttled.update(later.throttled)
        self.waiting.update(later.waiting)
        for labels, counts in later.io.items():
            before = self.io.get(labels)
            if before is not None:
                counts = [a + b for a, b in zip(before, counts, strict=True)]
            self.io[labels] = counts


@dataclass(frozen=True, slots=True)
class Recent:
    """What happened in the last `seconds`. What is None is not observed."""

    seconds: float
    observed_seconds: float
    """For how long the exporter has observed."""
    throttled: Mapping[Labels, int] | None
    asleep: Mapping[Labels, int]
    disks: Mapping[str, str]
    io: Mapping[Labels, Sequence[int]] | None
    waiting: Mapping[str, int]

    @property
    def since_start(self) -> bool:
        """Whether that is all that was observed."""
        return self.seconds == self.observed_seconds


class History:
    """The last minutes, in a bounded number of intervals. Not thread-safe."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._newest = Sample(float("-inf"))
        self._known = Sample(float("-inf"))
        """The newest counters that are known, each: a collector may fail for a while."""
        self._intervals: deque[_Growth] = deque()

    @property
    def due(self) -> float:
        """From when on a scrape is to add a sample, so that there are some when somebody looks."""
        return self._newest.time + INTERVAL_SECONDS

    def add(self, sample: Sample) -> None:
        """Takes in a sample, later than those before."""
        if self._began is None:
            self._began = sample.time
        else:
            self._append(_growth(self._known, sample, self._newest.time))
        self._newest = sample
        if sample.throttled is not None:
            self._known.throttled = sample.throttled
        if sample.io is not None:
            self._known.io = sample.io
        if sample.waiting is not None:
            self._known.waiting = sample.waiting

    def _append(self, growth: _Growth) -> None:
        if self._intervals and self._intervals[-1].seconds < INTERVAL_SECONDS:
            self._intervals[-1].extend(growth)
        else:
            self._intervals.append(growth)
        while len(self._intervals) > 1 and growth.end - self._intervals[0].begin > WINDOW_SECONDS:
            self._intervals.popleft()

    def recent(self) -> Recent:
        """What is known, up to the newest sample, of which there must be one."""
        assert self._began is not None
        newest = self._newest
        grown = _Growth(self._intervals[0].begin if self._intervals else newest.time, newest.time)
        for interval in self._intervals:
            grown.extend(interval)
        return Recent(
            seconds=grown.seconds,
            observed_seconds=newest.time - self._began,
            throttled=None if newest.throttled is None else grown.throttled,
            asleep=newest.asleep,
            disks=newest.disks,
            io=None if newest.io is None else grown.io,
            waiting=grown.waiting,
        )


def _growth(known: Sample, sample: Sample, begin: float) -> _Growth:
    """From what was known at `begin`, or before where a collector failed, to a sample."""
    growth = _Growth(begin, sample.time)
    if known.throttled is not None and sample.throttled is not None:
        for key, (labels, slept) in sample.throttled.items():
            _, before = known.throttled.get(key, (labels, 0))
            if slept != before:
                growth.throttled[labels] += slept - before if slept > before else slept
    if known.io is not None and sample.io is not None:
        for labels, counts in sample.io.items():
            before_counts = known.io.get(labels, [0] * len(counts))
            grown = [now - before for now, before in zip(counts, before_counts, strict=True)]
            if any(grown):
                growth.io[labels] = grown if min(grown) >= 0 else list(counts)
    if known.waiting is not None and sample.waiting is not None:
        for resource in known.waiting.keys() & sample.waiting.keys():
            growth.waiting[resource] = max(0, sample.waiting[resource] - known.waiting[resource])
    return growth
