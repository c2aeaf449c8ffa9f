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
# 16 us to 68 s: a wait that io.max imposes grows with its queue.
_LIMIT = (14, 16, 18, 20, 21, 22, 23, 24, 25, 26, 27, 28, 30, 32, 34, 36)
# 1 ms to 18 min: NCCL gives up after 10.
_WORK = (20, 22, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 36, 38, 40)
# 65 us to 137 s: the kernel calls a task hung after 120.
_WAIT = (16, 18, 20, 21, 22, 23, 24, 25, 26, 27, 28, 30, 32, 34, 36, 37)
# 65 us to 9 min.
_SYNC = (16, 18, 20, 21, 22, 23, 24, 25, 26, 27, 28, 30, 32, 34, 37, 39)
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
BLOCK_IO_LIMIT_SECONDS = _metric(
    "block_io_limit_seconds",
    Kind.HISTOGRAM,
    "Time that IO of the cgroup was held back by a limit before it became a request: max (io.max "
    "or blkio.throttle) or qos (io.latency, iocost, wbt). Only IO that was held is observed. Not "
    "counted are the sleeps on return to user space by which io.latency and iocost collect debts.",
    ("cgroup", "device", "limit"),
    "seconds",
    _LIMIT,
    NANOSECONDS,
)

# Flusher work -------------------------------------------------------------------------------------

WORK_SECONDS = _metric(
    "work_seconds",
    Kind.HISTOGRAM,
    "Duration of a piece of writeback work, by BDI and by why it was done: from when it was "
    "queued, or where the flusher began by itself from its begin, until all of it was sent to the "
    "device. Periodic work that finds nothing to write is observed too.",
    ("bdi", "reason"),
    "seconds",
    _WORK,
    NANOSECONDS,
)
WORK_BYTES = _metric(
    "work_bytes",
    Kind.COUNTER,
    "Bytes that flushers wrote, by BDI and by why. What tasks write themselves, as in fsync, is "
    "not among them.",
    ("bdi", "reason"),
    "bytes",
)
WORK_OLDEST_SECONDS = _metric(
    "work_oldest_seconds",
    Kind.GAUGE,
    "Age of the oldest writeback work that is queued or being done now; 0 where there is none.",
    ("bdi", "reason"),
    "seconds",
)
PAGE_WAIT_SECONDS = _metric(
    "page_wait_seconds",
    Kind.HISTOGRAM,
    "Time tasks of the cgroup waited for pages that were under writeback, one observation a page "
    "that they waited for.",
    ("cgroup",),
    "seconds",
    _WAIT,
    NANOSECONDS,
)
PAGE_DIRTIED_BYTES = _metric(
    "page_dirtied_bytes",
    Kind.COUNTER,
    "Page cache that tasks of the cgroup made dirty. A page that writeback could not write and "
    "made dirty again counts again, for the flusher.",
    ("cgroup",),
    "bytes",
)
PAGE_WRITTEN_BYTES = _metric(
    "page_written_bytes",
    Kind.COUNTER,
    "Page cache that was written back of inodes that the cgroup owns, without swap. Where fentry "
    "is not allowed only what flushers wrote: fsync and reclaim are then missing.",
    ("cgroup",),
    "bytes",
)

# Sync calls ---------------------------------------------------------------------------------------

SYNC_SECONDS = _metric(
    "sync_seconds",
    Kind.HISTOGRAM,
    "Duration of system calls by which tasks of the cgroup waited for their data: fsync, "
    "fdatasync, sync, syncfs, msync, sync_file_range.",
    ("cgroup", "call"),
    "seconds",
    _SYNC,
    NANOSECONDS,
)
SYNC_OPEN_SECONDS = _metric(
    "sync_open_seconds",
    Kind.GAUGE,
    "Age of the oldest such call that has not returned; 0 where there is none.",
    ("cgroup", "call"),
    "seconds",
)
SYNC_ERRORS = _metric(
    "sync_errors",
    Kind.COUNTER,
    "Such calls that returned an error.",
    ("cgroup", "call"),
)

# Pressure -----------------------------------------------------------------------------------------

PRESSURE_WAITING_SECONDS = _metric(
    "pressure_waiting_seconds",
    Kind.COUNTER,
    "Time in which some task of the cgroup waited for the resource (PSI some): the total of its "
    "pressure file. Cgroup / is the whole host. Begins anew with a new cgroup of the same name.",
    ("cgroup", "resource"),
    "seconds",
)
PRESSURE_STALLED_SECONDS = _metric(
    "pressure_stalled_seconds",
    Kind.COUNTER,
    "Time in which all tasks of the cgroup that had work waited for the resource at once (PSI "
    "full): the total of its pressure file. Cgroup / is the whole host, which has no "
    "such cpu pressure: 0. Begins anew with a new cgroup of the same name.",
    ("cgroup", "resource"),
    "seconds",
)
PRESSURE_EVENTS = _metric(
    "pressure_events",
    Kind.COUNTER,
    "Firings of a PSI trigger: within the window tasks waited (kind some) or all were stalled "
    "(kind full) for the threshold or longer. At most one a window.",
    ("cgroup", "resource", "kind", "threshold"),
)
PRESSURE_TRIGGERS = _metric(
    "pressure_triggers",
    Kind.GAUGE,
    "PSI triggers, one a cgroup and --pressure.trigger: armed, refused by the kernel (the log says "
    "why), or over_limit, beyond what the exporter arms.",
    ("state",),
)
MEMORY_STALL_SECONDS = _metric(
    "memory_stall_seconds",
    Kind.HISTOGRAM,
    "Time tasks of the cgroup were stalled for memory (reclaim, refault, swap-in), one "
    "observation a stall.",
    ("cgroup",),
    "seconds",
    _WAIT,
    NANOSECONDS,
)

# The host's memory --------------------------------------------------------------------------------

HOST_DIRTY_BYTES = _metric(
    "host_dirty_bytes",
    Kind.GAUGE,
    "Dirty page cache.",
    (),
    "bytes",
)
HOST_WRITEBACK_BYTES = _metric(
    "host_writeback_bytes",
    Kind.GAUGE,
    "Memory under writeback: page cache and swap.",
    (),
    "bytes",
)
HOST_DIRTY_THRESHOLD_BYTES = _metric(
    "host_dirty_threshold_bytes",
    Kind.GAUGE,
    "Dirty and writeback memory at which writers are throttled to the speed of the disk, as the "
    "kernel calculates it now.",
    (),
    "bytes",
)
HOST_DIRTY_BACKGROUND_THRESHOLD_BYTES = _metric(
    "host_dirty_background_threshold_bytes",
    Kind.GAUGE,
    "Dirty memory at which the flusher begins, as the kernel calculates it now.",
    (),
    "bytes",
)
HOST_DIRTY_FREERUN_BYTES = _metric(
    "host_dirty_freerun_bytes",
    Kind.GAUGE,
    "Dirty and writeback memory below which the host's limits throttle no writer: the mean of the "
    "two thresholds.",
    (),
    "bytes",
)
HOST_DIRTIED_BYTES = _metric(
    "host_dirtied_bytes",
    Kind.COUNTER,
    "Page cache made dirty.",
    (),
    "bytes",
)
HOST_WRITTEN_BYTES = _metric(
    "host_written_bytes",
    Kind.COUNTER,
    "Memory written back: page cache and swap.",
    (),
    "bytes",
)
HOST_THROTTLED_WRITTEN_BYTES = _metric(
    "host_throttled_written_bytes",
    Kind.COUNTER,
    "Written back, by whomever, while tasks were throttled in reclaim (since 5.16).",
    (),
    "bytes",
)
HOST_PAGE_IN_BYTES = _metric(
    "host_page_in_bytes",
    Kind.COUNTER,
    "Read from block devices, by whomever: page cache, direct IO, swap. Of stacked devices only "
    "the uppermost counts, but both a loop device and the disk that its file is on.",
    (),
    "bytes",
)
HOST_PAGE_OUT_BYTES = _metric(
    "host_page_out_bytes",
    Kind.COUNTER,
    "Written to block devices, by whomever: page cache, direct IO, swap. Of stacked devices "
    "only the uppermost counts, but both a loop device and the disk that its file is on.",
    (),
    "bytes",
)
HOST_SWAP_IN_BYTES = _metric(
    "host_swap_in_bytes",
    Kind.COUNTER,
    "Read from swap.",
    (),
    "bytes",
)
HOST_SWAP_OUT_BYTES = _metric(
    "host_swap_out_bytes",
    Kind.COUNTER,
    "Written to swap.",
    (),
    "bytes",
)
HOST_RECLAIMED_BYTES = _metric(
    "host_reclaimed_bytes",
    Kind.COUNTER,
    "Memory reclaimed, by whom: kswapd, direct (the task that wanted memory), and where the kernel "
    "tells them apart khugepaged and proactive (memory.reclaim).",
    ("by",),
    "bytes",
)
HOST_ALLOCATION_STALLS = _metric(
    "host_allocation_stalls",
    Kind.COUNTER,
    "Allocations that had to reclaim memory themselves, by zone.",
    ("zone",),
)
HOST_DIRTY_RATIO = _metric(
    "host_dirty_ratio",
    Kind.GAUGE,
    "Setting vm.dirty_ratio, a share of available memory; 0 where vm.dirty_bytes rules.",
    (),
    "ratio",
)
HOST_DIRTY_BACKGROUND_RATIO = _metric(
    "host_dirty_background_ratio",
    Kind.GAUGE,
    "Setting vm.dirty_background_ratio, a share of available memory; 0 where "
    "vm.dirty_background_bytes rules.",
    (),
    "ratio",
)
HOST_DIRTY_LIMIT_BYTES = _metric(
    "host_dirty_limit_bytes",
    Kind.GAUGE,
    "Setting vm.dirty_bytes; 0 where vm.dirty_ratio rules.",
    (),
    "bytes",
)
HOST_DIRTY_BACKGROUND_LIMIT_BYTES = _metric(
    "host_dirty_background_limit_bytes",
    Kind.GAUGE,
    "Setting vm.dirty_background_bytes; 0 where vm.dirty_background_ratio rules.",
    (),
    "bytes",
)
HOST_DIRTY_EXPIRE_SECONDS = _metric(
    "host_dirty_expire_seconds",
    Kind.GAUGE,
    "Setting vm.dirty_expire_centisecs: age at which dirty pages are written.",
    (),
    "seconds",
)
HOST_DIRTY_WRITEBACK_INTERVAL_SECONDS = _metric(
    "host_dirty_writeback_interval_seconds",
    Kind.GAUGE,
    "Setting vm.dirty_writeback_centisecs: how often the flusher looks for old dirty pages; 0 "
    "where it does not.",
    (),
    "seconds",
)

# BDIs ---------------------------------------------------------------------------------------------

BDI_MIN_RATIO = _metric(
    "bdi_min_ratio",
    Kind.GAUGE,
    "Setting min_ratio of the BDI: share of the dirty limit that it is given at least.",
    ("bdi",),
    "ratio",
)
BDI_MAX_RATIO = _metric(
    "bdi_max_ratio",
    Kind.GAUGE,
    "Setting max_ratio of the BDI: share of the dirty limit that it is given at most.",
    ("bdi",),
    "ratio",
)
BDI_MAX_BYTES = _metric(
    "bdi_max_bytes",
    Kind.GAUGE,
    "The same as writeback_bdi_max_ratio in bytes, of the dirty limit of now (since 6.2).",
    ("bdi",),
    "bytes",
)
BDI_MIN_BYTES = _metric(
    "bdi_min_bytes",
    Kind.GAUGE,
    "The same as writeback_bdi_min_ratio in bytes, of the dirty limit of now (since 6.2).",
    ("bdi",),
    "bytes",
)
BDI_STRICT_LIMIT = _metric(
    "bdi_strict_limit",
    Kind.GAUGE,
    "1 where the BDI's own limits throttle below the global freerun point (since 6.2).",
    ("bdi",),
)
BDI_READ_AHEAD_BYTES = _metric(
    "bdi_read_ahead_bytes",
    Kind.GAUGE,
    "Read-ahead of the BDI.",
    ("bdi",),
    "bytes",
)
WB_RECLAIMABLE_BYTES = _metric(
    "wb_reclaimable_bytes",
    Kind.GAUGE,
    "Dirty memory, not yet under writeback, of the cgroup's inodes on the BDI. From debugfs.",
    ("bdi", "cgroup"),
    "bytes",
)
WB_WRITEBACK_BYTES = _metric(
    "wb_writeback_bytes",
    Kind.GAUGE,
    "Memory under writeback of the cgroup's inodes on the BDI. From debugfs.",
    ("bdi", "cgroup"),
    "bytes",
)
WB_DIRTY_THRESHOLD_BYTES = _metric(
    "wb_dirty_threshold_bytes",
    Kind.GAUGE,
    "Dirty limit of the cgroup on the BDI, 0 where it has not written of late. From debugfs.",
    ("bdi", "cgroup"),
    "bytes",
)
WB_DIRTIED_BYTES = _metric(
    "wb_dirtied_bytes",
    Kind.COUNTER,
    "Page cache of the cgroup's inodes on the BDI made dirty. From debugfs.",
    ("bdi", "cgroup"),
    "bytes",
)
WB_WRITTEN_BYTES = _metric(
    "wb_written_bytes",
    Kind.COUNTER,
    "Page cache of the cgroup's inodes on the BDI written back. From debugfs.",
    ("bdi", "cgroup"),
    "bytes",
)
WB_WRITE_BANDWIDTH_BYTES = _metric(
    "wb_write_bandwidth_bytes",
    Kind.GAUGE,
    "Bytes per second written back for the cgroup on the BDI, the kernel's smoothed estimate. "
    "From debugfs.",
    ("bdi", "cgroup"),
    "bytes",
)

# Cgroups ------------------------------------------------------------------------------------------

CGROUP_DIRTY_BYTES = _metric(
    "cgroup_dirty_bytes",
    Kind.GAUGE,
    "Dirty page cache charged to the cgroup and those below it.",
    ("cgroup",),
    "bytes",
)
CGROUP_WRITEBACK_BYTES = _metric(
    "cgroup_writeback_bytes",
    Kind.GAUGE,
    "Memory under writeback, page cache and swap, charged to the cgroup and those below it.",
    ("cgroup",),
    "bytes",
)
CGROUP_MEMORY_BYTES = _metric(
    "cgroup_memory_bytes",
    Kind.GAUGE,
    "Memory charged to the cgroup and those below it.",
    ("cgroup",),
    "bytes",
)
CGROUP_MEMORY_LIMIT_BYTES = _metric(
    "cgroup_memory_limit_bytes",
    Kind.GAUGE,
    "Memory limit of the cgroup: max (beyond it the OOM killer comes), high (beyond it tasks are "
    "slowed) or soft (cgroup v1: reclaim of the host's memory takes what is beyond it first); "
    "absent where there is none.",
    ("cgroup", "limit"),
    "bytes",
)
CGROUP_MEMORY_EVENTS = _metric(
    "cgroup_memory_events",
    Kind.COUNTER,
    "Times that the cgroup or one below it met a limit of its memory: low, high, max, oom, "
    "oom_kill and so on. On cgroup v1 max (memory, or memory and swap) and oom_kill, of the cgroup "
    "alone.",
    ("cgroup", "event"),
)
CGROUP_IO_BYTES = _metric(
    "cgroup_io_bytes",
    Kind.COUNTER,
    "Bytes of block IO of the cgroup and those below it, counted by the kernel (io.stat). On "
    "cgroup v1 of the cgroup alone, and newer kernels (6.18) count on a disk only once some cgroup "
    "has had a limit of it.",
    ("cgroup", "device", "op"),
    "bytes",
)
CGROUP_IO_OPERATIONS = _metric(
    "cgroup_io_operations",
    Kind.COUNTER,
    "Block IO operations of the cgroup and those below it, counted by the kernel (io.stat). On "
    "cgroup v1 of the cgroup alone, and newer kernels (6.18) count on a disk only once some cgroup "
    "has had a limit of it.",
    ("cgroup", "device", "op"),
)
CGROUP_IO_MAX_BYTES = _metric(
    "cgroup_io_max_bytes",
    Kind.GAUGE,
    "Bytes per second that io.max (v1: blkio.throttle) allows the cgroup; absent where there "
    "is no limit.",
    ("cgroup", "device", "op"),
    "bytes",
)
CGROUP_IO_MAX_OPERATIONS = _metric(
    "cgroup_io_max_operations",
    Kind.GAUGE,
    "Operations per second that io.max (v1: blkio.throttle) allows the cgroup; absent where "
    "there is no limit.",
    ("cgroup", "device", "op"),
)
CGROUP_IO_WEIGHT = _metric(
    "cgroup_io_weight",
    Kind.GAUGE,
    "Weight of the cgroup's IO among its siblings, by the policy that heeds it: iocost or bfq. "
    "Device default is for disks without one of their own.",
    ("cgroup", "device", "policy"),
)
CGROUP_IO_LATENCY_TARGET_SECONDS = _metric(
    "cgroup_io_latency_target_seconds",
    Kind.GAUGE,
    "Latency that io.latency promises the cgroup.",
    ("cgroup", "device"),
    "seconds",
)
IOCOST_VRATE_RATIO = _metric(
    "iocost_vrate_ratio",
    Kind.GAUGE,
    "How fast iocost lets its virtual time run: below 1 it holds the device back to meet its "
    "latency target.",
    ("device",),
    "ratio",
)
IOCOST_USAGE_SECONDS = _metric(
    "iocost_usage_seconds",
    Kind.COUNTER,
    "Device time that iocost charged to the cgroup and those below it.",
    ("cgroup", "device"),
    "seconds",
)
IOCOST_WAIT_SECONDS = _metric(
    "iocost_wait_seconds",
    Kind.COUNTER,
    "Time that IO of the cgroup and those below it waited for iocost (where "
    "blk_cgroup.blkcg_debug_stats is set).",
    ("cgroup", "device"),
    "seconds",
)
IOCOST_ENABLED = _metric(
    "iocost_enabled",
    Kind.GAUGE,
    "1 where iocost controls the device.",
    ("device",),
)
IOCOST_QOS_LATENCY_SECONDS = _metric(
    "iocost_qos_latency_seconds",
    Kind.GAUGE,
    "Latency beyond which iocost slows a device down, by op.",
    ("device", "op"),
    "seconds",
)
IOCOST_QOS_RATIO = _metric(
    "iocost_qos_ratio",
    Kind.GAUGE,
    "Settings of io.cost.qos: rpct and wpct, the shares of requests that must keep the "
    "latency; min and max, the bounds of vrate.",
    ("device", "parameter"),
    "ratio",
)
IOCOST_MODEL_BYTES = _metric(
    "iocost_model_bytes",
    Kind.GAUGE,
    "Bytes per second that iocost's model believes the device to do.",
    ("device", "op"),
    "bytes",
)
IOCOST_MODEL_OPERATIONS = _metric(
    "iocost_model_operations",
    Kind.GAUGE,
    "Operations per second that iocost's model believes the device to do, by pattern: "
    "sequential or random.",
    ("device", "op", "pattern"),
)

# io_uring -----------------------------------------------------------------------------------------

IO_URING_SQ_SECONDS = _metric(
    "io_uring_sq_seconds",
    Kind.COUNTER,
    "CPU time of the SQPOLL threads of the cgroup's processes (since 6.9).",
    ("cgroup",),
    "seconds",
)
IO_URING_SQ_BUSY_SECONDS = _metric(
    "io_uring_sq_busy_seconds",
    Kind.COUNTER,
    "CPU time in which the SQPOLL threads of the cgroup's processes had work; the rest they spent "
    "polling (since 6.9).",
    ("cgroup",),
    "seconds",
)

# Who is who ---------------------------------------------------------------------------------------

CGROUP_INFO = _metric(
    "cgroup_info",
    Kind.GAUGE,
    "Who the cgroup is, as its path and the files of its runtime tell (docs/identity.md): one "
    "series of each cgroup of which something is known. What is not known is an empty label.",
    (
        "cgroup",
        "runtime",
        "container_id",
        "container",
        "pod",
        "namespace",
        "pod_uid",
        "qos_class",
        "slice",
        "unit",
        "user",
        "slurm_job",
        "slurm_step",
    ),
)
DEVICE_INFO = _metric(
    "device_info",
    Kind.GAUGE,
    "What a disk or partition is: its number, kind and name (of device mapper, level of md, file "
    "of a loop device), the whole disk that it is part of or a path to, what it lies on (parents) "
    "and what lies on it (holders), what is mounted from it, and its queue.",
    (
        "device",
        "dev",
        "kind",
        "name",
        "disk",
        "parents",
        "holders",
        "fstype",
        "mountpoint",
        "rotational",
        "scheduler",
    ),
)
DEVICE_DISK_INFO = _metric(
    "device_disk_info",
    Kind.GAUGE,
    "The disks at the bottom of each device, whose requests carry its IO: of a logical volume or "
    "an array those that it lies on, through all layers; one series for each.",
    ("device", "disk"),
)
BDI_INFO = _metric(
    "bdi_info",
    Kind.GAUGE,
    "What writes back through the BDI: a disk (device) with the file systems on it, or a file "
    "system without one, as NFS or FUSE.",
    ("bdi", "device", "fstype", "mountpoint"),
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
    "Entries in the BPF map, which is named OBJECT/MAP.",
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
EXPORTER_SERIES = _metric(
    "exporter_series",
    Kind.GAUGE,
    "Series in this scrape.",
)
EXPORTER_CGROUP_LIMIT = _metric(
    "exporter_cgroup_limit",
    Kind.GAUGE,
    "Cgroups of a hierarchy that are exported by name at most; others count as other.",
)
EXPORTER_CGROUP_LABELS = _metric(
    "exporter_cgroup_labels",
    Kind.GAUGE,
    "Cgroups that are exported by name, of the hierarchy that has the most.",
)
EXPORTER_COLLAPSED_CGROUPS = _metric(
    "exporter_collapsed_cgroups",
    Kind.GAUGE,
    "Cgroups that are exported as other: by a rule, beyond the limit, or without a name.",
    ("reason",),
)
