# SPDX-License-Identifier: Apache-2.0
"""What an operator may want otherwise: thresholds, and where things are."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from typing import Any

_DURATION = re.compile(r"(\d+(ms|[smhdwy]))+")
_EXPRESSIONS = ("job", "training_cgroups", "io_stall_cgroups")


def _setting(default: float | str, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class Settings:
    """Each is an option of `python -m alerts`. Ratios are 0 to 1; a rate of seconds per second that
    tasks sleep is the mean number of tasks asleep. Raises ValueError for what no rule can be made
    of."""

    job: str = _setting("writeback-exporter", "regular expression of the exporters' job")
    runbooks: str = _setting("docs/runbooks", "where the runbooks are, better as URL")
    window: str = _setting("5m", "over which rates are taken: four scrape intervals or more")
    patience: float = _setting(
        1.0, "factor of how long a condition must last before an alert fires"
    )

    # Where sleep is not measured (writeback_dirty_throttle_method_info) a task that does nothing
    # but sleep counts as half a one: the kernel asks for a tick, and the timer makes two of it.
    throttled_tasks: float = _setting(0.3, "tasks asleep in balance_dirty_pages that are too many")
    drain_seconds: float = _setting(60, "how long a BDI that has slowed down may need to drain")
    slowed_ratio: float = _setting(0.5, "share of its best rate of the day that is slowed down")
    drain_limit: float = _setting(600, "how long any BDI may need to write what is dirty")
    spike_ratio: float = _setting(0.4, "share of the dirty limit that is a spike within 10 minutes")
    memory_use_ratio: float = _setting(0.95, "share of its limit at which a cgroup is near it")
    unwritten_ratio: float = _setting(0.1, "share of it not written that is a risk under pressure")
    unwritten_limit: float = _setting(0.3, "share of it not written that is a risk by itself")
    reclaim_ratio: float = _setting(0.2, "share of time in which a cgroup's tasks wait for memory")
    slow_seconds: float = _setting(2**28 / 1e9, "device time of a slow read or flush; an edge")
    slow_write_seconds: float = _setting(2**30 / 1e9, "device time of a slow write; an edge")
    slow_ratio: float = _setting(0.01, "share of slow requests that is too much")
    slow_rate: float = _setting(1, "operations per second below which that says nothing")
    neighbour_seconds: float = _setting(
        0.1, "p99 of a disk's other users that a hog must answer for"
    )
    collective_timeout: float = _setting(600, "seconds after which a training job's watchdog kills")
    timeout_ratio: float = _setting(0.5, "share of that after which a stall is near it")
    training_cgroups: str = _setting(
        "/(.*/)?(slurmstepd[^/]*|slurm(_[^/]*)?|job_[0-9]+|training)(/.*)?",
        "regular expression of jobs' cgroups",
    )
    sync_seconds: float = _setting(60, "age at which a sync call that has not returned is stuck")
    fragment_bytes: float = _setting(16384, "size up to which a write is small; an edge")
    fragment_ratio: float = _setting(0.9, "share of small writes that is fragmentation")
    fragment_rate: float = _setting(200, "writes per second below which sizes do not matter")
    stalled_ratio: float = _setting(0.4, "share of time with all tasks stalled that is too much")
    io_stall_cgroups: str = _setting(
        "/", "regular expression of cgroups that must not stand still for IO, as batch jobs do"
    )
    hog_ratio: float = _setting(0.7, "share of a disk's written bytes that makes a cgroup the hog")
    hog_bytes: float = _setting(10_000_000, "bytes per second below which nobody is a hog")
    waiting_ratio: float = _setting(
        0.3, "share of time in which some task of the host waits for IO"
    )
    map_ratio: float = _setting(0.9, "share of a BPF map's entries at which it is nearly full")
    dropped_events: float = _setting(10, "events that may find no room in a BPF map in a window")
    missed_rate: float = _setting(1, "events per second that a BPF program may miss")

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            option = f"--{setting.name.replace('_', '-')} {value}"
            if isinstance(value, float | int) and not 0 <= value < float("inf"):
                raise ValueError(f"{option}: must be 0 or more")
            if setting.name.endswith("_ratio") and value > 1:
                raise ValueError(f"{option}: a ratio is 0 to 1, as 0.3 for 30 %")
            if setting.name in _EXPRESSIONS:
                _check_expression(option, value)
        if not _DURATION.fullmatch(self.window) or not int(re.sub(r"\D", "", self.window)):
            raise ValueError(f"--window {self.window}: must be a duration of Prometheus, as 5m")
        if self.timeout_ratio * self.collective_timeout < 1:
            raise ValueError("--collective-timeout by --timeout-ratio: must be a second or more")


def _check_expression(option: str, expression: str) -> None:
    try:
        re.compile(expression)
    except re.error as error:
        raise ValueError(f"{option}: is no regular expression: {error}") from error
    if '"' in expression or "\\" in expression:
        raise ValueError(f"{option}: write [.] for a dot, without quotes or backslashes")
