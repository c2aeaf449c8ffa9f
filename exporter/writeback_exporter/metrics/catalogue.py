# SPDX-License-Identifier: Apache-2.0
"""Every metric, once: name, type, help, labels, unit and buckets.

Probes fill these, exposition writes them, the reference in docs/ is generated from them; later
the dashboards and alert rules are too, so that a name that is not here cannot be used anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

PREFIX = "writeback_"


class Kind(Enum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family.

    `name` is the family's full name without the `_total` that counters get when they are written.
    `unit` is the name's last word where that is a base unit, else empty. `exponents` are, for a
    histogram, the powers of two of the kernel's slots that are exported as bucket edges; `scale`
    converts a kernel unit to the metric's (1e-9 for nanoseconds to seconds).
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    exponents: tuple[int, ...] = ()
    scale: float = 1.0
    edges: tuple[float, ...] = field(init=False)
    """Upper bucket bounds in the metric's unit, ascending, +Inf not included."""

    def __post_init__(self) -> None:
        # Divided once, as sums are (exposition): both are the nearest float to the true value.
        divisor = round(1 / self.scale)
        object.__setattr__(self, "edges", tuple((1 << e) / divisor for e in self.exponents))


ALL: list[Metric] = []


def _metric(
    name: str,
    kind: Kind,
    help: str,
    labels: tuple[str, ...] = (),
    unit: str = "",
    exponents: tuple[int, ...] = (),
    scale: float = 1.0,
) -> Metric:
    metric = Metric(PREFIX + name, kind, help, labels, unit, exponents, scale)
    ALL.append(metric)
    return metric


NANOSECONDS = 1e-9

# The kernel counts in every power of two (bpf/histogram.h); at most 16 of them are exported.
# 16 us to 8.6 s: factor 2 where devices live, wider where only "very slow" matters.
_IO_LATENCY = (14, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 30, 33)
# 1 ms to 1.07 s; one pause is at most 200 ms (MAX_PAUSE, mm/page-writeback.c) and a tick or more,
# and the task may wait for a CPU.
_PAUSE = (20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30)
_SIZE = (9, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 27, 30)
_DEPTH = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10)

# Dirty throttling -------------------------------------------------------------------------------

DIRTY_THROTTLE_SECONDS = _metric(
    "dirty_throttle_seconds",
    Kind.HISTOGRAM,
    "Time tasks of the cgroup slept in balance_dirty_pages, one observation a pause. Measured, or "
    "the pause that the kernel requested: see writeback_dirty_throttle_method_info.",
    ("cgroup", "bdi"),
    "seconds",
    _PAUSE,
    NANOSECONDS,
)
DIRTY_THROTTLE_REQUESTED_SECONDS = _metric(
    "dirty_throttle_requested_seconds",
    Kind.COUNTER,
    "Pauses that balance_dirty_pages requested for tasks of the cgroup. A lower bound of the time "
    "slept, and comparable between hosts whatever their method; without measured sleep it counts "
    "also pauses of nowait writes, which do not sleep.",
    ("cgroup", "bdi"),
    "seconds",
)
DIRTY_THROTTLED_TASKS = _metric(
    "dirty_throttled_tasks",
    Kind.GAUGE,
    "Tasks of the cgroup asleep in balance_dirty_pages now.",
    ("cgroup", "bdi"),
)
DIRTY_THROTTLE_DOMAIN = _metric(
    "dirty_throttle_domain",
    Kind.COUNTER,
    "Pauses by the limit that decided: global (vm.dirty_*), bdi (strict limit of the device) or "
    "memcg (memory limit of the cgroup).",
    ("bdi", "domain"),
)
DIRTY_THROTTLE_METHOD_INFO = _metric(
    "dirty_throttle_method_info",
    Kind.GAUGE,
    "How sleep is known: fexit (measured around io_schedule_timeout) or requested (the pause asked "
    "for; real sleep is about one tick longer).",
    ("method",),
)
BDI_DIRTY_BYTES = _metric(
    "bdi_dirty_bytes",
    Kind.GAUGE,
    "Dirty and writeback memory of the writeback domain that was throttled last on the BDI, then.",
    ("bdi",),
    "bytes",
)
BDI_DIRTY_THRESHOLD_BYTES = _metric(
    "bdi_dirty_threshold_bytes",
    Kind.GAUGE,
    "Dirty limit of the writeback domain that was throttled last on the BDI, then.",
    ("bdi",),
    "bytes",
)
BDI_DIRTY_RATELIMIT_BYTES = _metric(
    "bdi_dirty_ratelimit_bytes",
    Kind.GAUGE,
    "Bytes per second that each dirtying task is allowed, base rate, at the last throttling.",
    ("bdi",),
    "bytes",
)
BDI_WRITE_BANDWIDTH_BYTES = _metric(
    "bdi_write_bandwidth_bytes",
    Kind.GAUGE,
    "Bytes per second written back, the kernel's smoothed estimate, at the last throttling.",
    ("bdi",),
    "bytes",
)

# Block IO ---------------------------------------------------------------------------------------

BLOCK_IO_DEVICE_SECONDS = _metric(
    "block_io_device_seconds",
    Kind.HISTOGRAM,
    "Time from issue to the driver until completion, by owner of the IO.",
    ("cgroup", "device", "op"),
    "seconds",
    _IO_LATENCY,
    NANOSECONDS,
)
BLOCK_IO_QUEUE_SECONDS = _metric(
    "block_io_queue_seconds",
    Kind.HISTOGRAM,
    "Time from arrival in the block layer, as the kernel stamps it (since 6.12 once for a batch of "
    "requests), until issue to the driver, by owner of the IO.",
    ("cgroup", "device", "op"),
    "seconds",
    _IO_LATENCY,
    NANOSECONDS,
)
BLOCK_IO_SIZE_BYTES = _metric(
    "block_io_size_bytes",
    Kind.HISTOGRAM,
    "Size of completed requests, by owner of the IO.",
    ("cgroup", "device", "op"),
    "bytes",
    _SIZE,
)
BLOCK_IO_DEPTH = _metric(
    "block_io_depth",
    Kind.HISTOGRAM,
    "Requests in flight when one is issued, that one included (1 = the device was idle).",
    ("device",),
    "",
    _DEPTH,
)
BLOCK_IO_INFLIGHT = _metric(
    "block_io_inflight",
    Kind.GAUGE,
    "Requests issued to the driver and not completed now.",
    ("device",),
)
BLOCK_IO_ERRORS = _metric(
    "block_io_errors",
    Kind.COUNTER,
    "Completions with an error, by the block layer's status.",
    ("cgroup", "device", "op", "error"),
)

# The exporter itself ----------------------------------------------------------------------------

EXPORTER_BUILD_INFO = _metric(
    "exporter_build_info",
    Kind.GAUGE,
    "Version of the exporter, of Python and of libbpf.",
    ("version", "pythonversion", "libbpfversion"),
)
EXPORTER_FEATURE_AVAILABLE = _metric(
    "exporter_feature_available",
    Kind.GAUGE,
    "1 where the feature works on this host, else 0 with the reason.",
    ("feature", "reason"),
)
EXPORTER_COLLECTOR_DURATION_SECONDS = _metric(
    "exporter_collector_duration_seconds",
    Kind.GAUGE,
    "Time the collector took in this scrape.",
    ("collector",),
    "seconds",
)
EXPORTER_COLLECTOR_SUCCESS = _metric(
    "exporter_collector_success",
    Kind.GAUGE,
    "1 where the collector succeeded in this scrape.",
    ("collector",),
)
EXPORTER_MAP_ENTRIES = _metric(
    "exporter_map_entries",
    Kind.GAUGE,
    "Entries in the BPF map.",
    ("map",),
)
EXPORTER_MAP_CAPACITY = _metric(
    "exporter_map_capacity",
    Kind.GAUGE,
    "Entries that the BPF map can hold.",
    ("map",),
)
EXPORTER_MAP_DROPPED = _metric(
    "exporter_map_dropped",
    Kind.COUNTER,
    "Events that found no room in the BPF map. What is then done with them is in bpf/README.md.",
    ("map",),
)
EXPORTER_PROGRAM_RUNS = _metric(
    "exporter_program_runs",
    Kind.COUNTER,
    "Runs of the BPF program, counted only while kernel.bpf_stats_enabled is 1.",
    ("program",),
)
EXPORTER_PROGRAM_RUN_SECONDS = _metric(
    "exporter_program_run_seconds",
    Kind.COUNTER,
    "Time in the BPF program, counted only while kernel.bpf_stats_enabled is 1.",
    ("program",),
    "seconds",
)
EXPORTER_PROGRAM_MISSED = _metric(
    "exporter_program_missed",
    Kind.COUNTER,
    "Events that the kernel did not show to the BPF program because it was running on that CPU.",
    ("program",),
)
EXPORTER_CGROUPS = _metric(
    "exporter_cgroups",
    Kind.GAUGE,
    "Cgroups whose name is known, by state: live, or exited and kept until scraped.",
    ("state",),
)
