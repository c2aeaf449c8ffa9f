# SPDX-License-Identifier: Apache-2.0
"""What an operator may want otherwise: thresholds, and where things are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def _setting(default: float | str, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, slots=True)
class Settings:
    """Each is an option of `python -m alerts`. Ratios are 0 to 1; a rate of seconds per second that
    tasks sleep is the mean number of tasks asleep."""

    job: str = _setting("writeback-exporter", "regular expression of the exporters' job")
    runbooks: str = _setting("docs/runbooks", "where the runbooks are, better as URL")
    window: str = _setting("5m", "over which rates are taken: four scrape intervals or more")
    patience: float = _setting(
        1.0, "factor of how long a condition must last before an alert fires"
    )

    throttled_tasks: float = _setting(0.5, "tasks asleep in balance_dirty_pages that are too many")
    drain_seconds: float = _setting(60, "how long a BDI may need to write what is dirty")
    spike_ratio: float = _setting(0.4, "share of the dirty limit that is a spike within 10 minutes")
    memory_use_ratio: float = _setting(0.95, "share of its limit at which a cgroup is near it")
    unwritten_ratio: float = _setting(
        0.3, "share of its limit that may be dirty or under writeback"
    )
    slow_io_seconds: float = _setting(0.5, "p99 of device time that is slow")
    slow_io_rate: float = _setting(1, "operations per second below which p99 says nothing")
    collective_timeout: float = _setting(600, "seconds after which a training job's watchdog kills")
    timeout_ratio: float = _setting(0.5, "share of that after which a stall is near it")
    training_cgroups: str = _setting(
        "(.*/)?(job_[0-9]+|kubepods[^/]*|training)(/.*)?", "regular expression of jobs' cgroups"
    )
    sync_seconds: float = _setting(60, "age at which a sync call that has not returned is stuck")
    fragment_bytes: float = _setting(16384, "size up to which a write is small; a bucket's edge")
    fragment_ratio: float = _setting(0.9, "share of small writes that is fragmentation")
    fragment_rate: float = _setting(200, "writes per second below which sizes do not matter")
    stalled_ratio: float = _setting(0.4, "share of time with all tasks stalled that is too much")
    hog_ratio: float = _setting(0.7, "share of a disk's written bytes that makes a cgroup the hog")
    hog_bytes: float = _setting(10_000_000, "bytes per second below which nobody is a hog")
    waiting_ratio: float = _setting(
        0.3, "share of time in which some task of the host waits for IO"
    )
    map_ratio: float = _setting(0.9, "share of a BPF map's entries at which it is nearly full")
    missed_rate: float = _setting(1, "events per second that a BPF program may miss")
