# SPDX-License-Identifier: Apache-2.0
"""The alerts: what is compared with which threshold, for how long, and what the page says.

Symptoms, by BDI, disk or cgroup, each with the time that it must last: a healthy writer that runs
as fast as its disk is throttled too, and nobody is to be woken for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from alerts.promql import HOST, TARGET, Series, counter, counts, gauge
from alerts.records import Records
from alerts.settings import Settings
from writeback_exporter.metrics import catalogue as c

NAMED = 'cgroup!~"/|other|unattributed"'
CRITICAL, WARNING = "critical", "warning"
"""critical pages somebody; warning is for working hours."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One alerting rule. Several may have one name: `labels` then tell them apart."""

    name: str
    expr: str
    severity: str
    summary: str
    description: str
    minutes: float = 0
    """How long it must be true before it fires."""
    keep_minutes: float = 0
    """How long it goes on firing after it was true last."""
    labels: dict[str, str] = field(default_factory=dict)


def alerts(settings: Settings, records: Records) -> list[Alert]:
    return [
        *_throttling(settings, records),
        *_memory(settings, records),
        *_block_io(settings, records),
        *_stalls(settings, records),
        *_exporter(settings),
    ]


def _worst(series: Series, *same: str) -> str:
    """A sentence that names the three cgroups of which `series` is largest when the alert is sent;
    `same` are labels that must be the alert's."""
    labels = (*TARGET, *same)
    matchers = ", ".join(f"{label}='%s'" for label in labels)
    values = " ".join(f".Labels.{label}" for label in labels)
    query = f"topk(3, sum by (cgroup) ({series}{{{matchers}}}) > 0)"
    return (
        f'{{{{ with printf "{query}" {values} | query }}}}'
        "Most throttled: {{ range $i, $found := . }}{{ if $i }}, {{ end }}"
        '{{ $found.Labels.cgroup }} ({{ $found.Value | printf "%.1f" }} tasks asleep)'
        "{{ end }}. {{ end }}"
    )


def _throttling(s: Settings, r: Records) -> list[Alert]:
    slowed = f"{r.bdi_written} < {s.slowed_ratio} * {r.bdi_written_best}"
    return [
        Alert(
            "WritebackCongestion",
            f"{r.bdi_throttled} > {s.throttled_tasks}\n"
            # That of each wb in turn: some may be below.
            f"and max_over_time({r.bdi_freerun}[{s.window}]) > 1\n"
            f"and (\n"
            f"  {r.bdi_drain} > {s.drain_seconds}\n"
            f"  and {slowed}\n"
            f"  or {r.bdi_drain} > {s.drain_limit}\n"
            f")",
            CRITICAL,
            "Writeback to BDI {{ $labels.bdi }} of {{ $labels.instance }} does not keep up",
            'On average {{ $value | printf "%.1f" }} tasks sleep in balance_dirty_pages for BDI '
            "{{ $labels.bdi }}, its dirty memory is above the freerun point, and it is written so "
            f"slowly that it would take more than {s.drain_seconds:g} s. "
            + _worst(r.cgroup_throttled, "bdi")
            + "See which disk is slow, and stop or limit who writes.",
            minutes=5,
            keep_minutes=5,
        ),
        Alert(
            "CgroupDirtyThrottled",
            f"{r.cgroup_throttled} > {s.throttled_tasks}\n"
            # Else it is a healthy writer that runs as fast as its disk.
            f"and on ({HOST}, bdi) (\n"
            f"  {r.bdi_own_limit} > 0.5\n"
            f"  or {r.bdi_drain} > {s.drain_seconds}\n"
            f"  or {slowed}\n"
            f")",
            WARNING,
            "{{ $labels.cgroup }} on {{ $labels.instance }} is throttled for its dirty pages",
            'On average {{ $value | printf "%.1f" }} tasks of cgroup {{ $labels.cgroup }} sleep in '
            "balance_dirty_pages for BDI {{ $labels.bdi }}, which has slowed down, or has more "
            "dirty than it can write soon, or whose limit or the cgroup's own it has reached.",
            minutes=10,
            keep_minutes=5,
        ),
    ]


def _memory(s: Settings, r: Records) -> list[Alert]:
    at_limit = counter(c.CGROUP_MEMORY_EVENTS).where('event="max"')
    return [
        Alert(
            "DirtyPageSpike",
            f"{r.node_dirty_rise} > {s.spike_ratio} * {gauge(c.HOST_DIRTY_THRESHOLD_BYTES)}\n"
            f"and {r.node_dirty} > {gauge(c.HOST_DIRTY_FREERUN_BYTES)}",
            WARNING,
            "Dirty memory of {{ $labels.instance }} has shot up",
            "Dirty memory rose by {{ $value | humanize1024 }}B within 10 minutes, and is where "
            "writers of the whole host are throttled. "
            + _worst(r.cgroup_throttled)
            + "See who wrote, and whether it was one burst, as a checkpoint is, or goes on.",
            minutes=1,
            keep_minutes=5,
        ),
        Alert(
            "CgroupOOMRisk",
            f"{r.cgroup_memory} > {s.memory_use_ratio}\n"
            # Cgroup v2 lets no cgroup have more dirty than vm.dirty_ratio of its memory.
            f"and (\n"
            f"  {r.cgroup_unwritten} > {s.unwritten_ratio} "
            f"and {r.memory_some} > {s.reclaim_ratio}\n"
            f"  or {r.cgroup_unwritten} > {s.unwritten_limit}\n"
            f")\n"
            f"and ignoring (event) rate({at_limit}[{s.window}]) > 0",
            WARNING,
            "{{ $labels.cgroup }} on {{ $labels.instance }} is at its memory limit with pages that "
            "are not written",
            "Cgroup {{ $labels.cgroup }} uses {{ $value | humanizePercentage }} of memory.max, "
            f"meets the limit again and again, and more than {s.unwritten_ratio:.0%} of it is "
            "dirty or under writeback, which reclaim must wait for. If the disk does not keep up, "
            "the OOM killer comes.",
            minutes=2,
            keep_minutes=5,
        ),
    ]


def _by_layer(
    condition: str, severity: str, minutes: float, problem: str, summary: str, description: str
) -> list[Alert]:
    """BlockIOSlow where `condition` is true of a device: of the disks at the bottom, and of what
    lies on them, once for each disk below it, so that the disk's own alert silences it."""
    lies_on = gauge(c.DEVICE_DISK_INFO)
    # As devices the disks at the bottom of something, if only of themselves.
    disks = (
        f'label_replace(\n  max by ({HOST}, disk) ({lies_on}),\n  "device", "$1", "disk", "(.+)"\n)'
    )
    layers = {
        "disk": f"({condition})\n* on ({HOST}, device) group_left (disk) {disks}\n"
        # What nothing is known of is a disk.
        f"or ({condition})\nunless on ({HOST}, device) {lies_on}",
        "stacked": f"{lies_on} * on ({HOST}, device) group_left ()\nmax by ({HOST}, device) (\n"
        f"({condition})\nunless on ({HOST}, device) {disks}\n)",
    }
    return [
        Alert(
            "BlockIOSlow",
            expr,
            severity,
            summary,
            description,
            minutes=minutes,
            keep_minutes=5,
            labels={"layer": layer, "problem": problem},
        )
        for layer, expr in layers.items()
    ]


def _block_io(s: Settings, r: Records) -> list[Alert]:
    hog = (
        f"{r.cgroup_share} > {s.hog_ratio}\nand {r.cgroup_written.where(NAMED)} > {s.hog_bytes:.0f}"
    )
    root_waits = r.io_some.where('cgroup="/"')
    floor, ceiling = (
        gauge(c.IOCOST_QOS_RATIO).where(f'parameter="{parameter}"') for parameter in ("min", "max")
    )
    return [
        *_by_layer(
            f"{r.device_slow} > {s.slow_ratio}\nand {r.device_rate} > {s.slow_rate}",
            WARNING,
            10,
            "slow",
            "{{ $labels.device }} of {{ $labels.instance }} is slow",
            "{{ $value | humanizePercentage }} of{{ with $labels.op }} {{ . }}{{ end }} requests "
            f"take {{{{ $labels.device }}}} more than {s.slow_seconds:.2g} s, or "
            f"{s.slow_write_seconds:.2g} s to write. This is time in the device, not in a queue "
            "of this host.",
        ),
        *_by_layer(
            f"{gauge(c.BLOCK_IO_INFLIGHT)} > 0\n"
            f"unless on ({HOST}, device) sum by ({HOST}, device) ({r.device_rate}) > 0\n"
            f"and on ({HOST}) {root_waits} > {s.waiting_ratio}",
            CRITICAL,
            2,
            "stuck",
            "{{ $labels.device }} of {{ $labels.instance }} does not answer",
            "{{ $value }} requests are with {{ $labels.device }}, none has come back for "
            f"{s.window}, and tasks wait for it.",
        ),
        Alert(
            "FragmentedWrites",
            f"{r.device_small_writes} > {s.fragment_ratio}\n"
            f"and {r.device_rate} > {s.fragment_rate}\n"
            f"and {r.device_write_size} < {2 * s.fragment_bytes:.0f}\n"
            f"and on ({HOST}, device) {r.device_throttled} > {s.throttled_tasks}",
            WARNING,
            "{{ $labels.device }} of {{ $labels.instance }} gets its writes in small pieces",
            "{{ $value | humanizePercentage }} of the writes to {{ $labels.device }} have at most "
            f"{s.fragment_bytes / 1024:g} KiB, while tasks are throttled for it: its bandwidth "
            "goes into pieces.",
            minutes=15,
            keep_minutes=5,
        ),
        Alert(
            "ContainerWriteHog",
            f"{hog}\nand on ({HOST}, device) (\n"
            f"  (\n"
            f"    {r.cgroup_device_p99.where(NAMED)} > {s.neighbour_seconds}\n"
            f"    or {r.cgroup_queue_p99.where(NAMED)} > {s.neighbour_seconds}\n"
            f"  )\n"
            f"  and rate({counts(c.BLOCK_IO_DEVICE_SECONDS)}[{s.window}]) > {s.slow_rate}\n"
            f"  unless on ({HOST}, device, cgroup) ({hog})\n"
            f")",
            WARNING,
            "{{ $labels.cgroup }} writes most of {{ $labels.device }} on {{ $labels.instance }} "
            "while others wait",
            "Cgroup {{ $labels.cgroup }} writes {{ $value | humanizePercentage }} of all bytes "
            "that go to {{ $labels.device }}, and IO of other cgroups on it is slow.",
            minutes=10,
            keep_minutes=5,
        ),
        Alert(
            "IocostVrateFloor",
            f"{gauge(c.IOCOST_VRATE_RATIO)} <= ignoring (parameter) {floor} * 1.05\n"
            f"and ignoring (parameter) {ceiling} > ignoring (parameter) {floor}\n"
            f"and {gauge(c.IOCOST_ENABLED)} == 1\n"
            f"and on ({HOST}, device) "
            f"sum by ({HOST}, device) ({r.device_rate}) > {s.slow_rate}",
            WARNING,
            "iocost holds {{ $labels.device }} of {{ $labels.instance }} at its lowest rate",
            "iocost runs {{ $labels.device }} at {{ $value | humanizePercentage }}, the least that "
            "io.cost.qos allows: the device does not meet its latency whatever iocost does, or the "
            "model promises more than it has.",
            minutes=10,
            keep_minutes=5,
        ),
    ]


def _stalls(s: Settings, r: Records) -> list[Alert]:
    jobs, stalled = (f'cgroup=~"{each}"' for each in (s.training_cgroups, s.io_stall_cgroups))
    open_calls = gauge(c.SYNC_OPEN_SECONDS)
    stalls = {
        "sync": (
            f"{open_calls.where(jobs)} > {r.deadline:g}",
            "has been in {{ $labels.call }}",
        ),
        # Half of it, where sleep is not measured (Settings.throttled_tasks).
        "throttling": (
            f"{r.cgroup_stall} > {0.45 * r.deadline:g}\nand {r.cgroup_stalled} > 0.9",
            "has done hardly anything but sleep in throttling, at least",
        ),
    }
    return [
        *(
            Alert(
                "CheckpointStallApproachesTimeout",
                expr,
                CRITICAL,
                "{{ $labels.cgroup }} on {{ $labels.instance }} is held up by storage, near its "
                "timeout",
                f"A task of cgroup {{{{ $labels.cgroup }}}} {what} for "
                "{{ $value | humanizeDuration }}; its peers give up after "
                f"{s.collective_timeout:g} s.",
                keep_minutes=5,
                labels={"stall": stall},
            )
            for stall, (expr, what) in stalls.items()
        ),
        Alert(
            "SyncCallStuck",
            f"{open_calls} > {s.sync_seconds}",
            WARNING,
            "{{ $labels.call }} of {{ $labels.cgroup }} on {{ $labels.instance }} does not return",
            "A task of cgroup {{ $labels.cgroup }} has been in {{ $labels.call }} for "
            "{{ $value | humanizeDuration }}.",
            minutes=1,
            keep_minutes=5,
        ),
        *(
            Alert(
                "PressureStall",
                expr,
                WARNING,
                "{{ $labels.cgroup }} on {{ $labels.instance }} stands still for " + resource,
                "All tasks of cgroup {{ $labels.cgroup }} that had work waited for "
                f"{resource} at once for {{{{ $value | humanizePercentage }}}} of the time.",
                minutes=10,
                keep_minutes=5,
                labels={"resource": resource},
            )
            for resource, expr in (
                # A host's only job may wait all the time, and nothing is wrong: unless it is slow.
                (
                    "io",
                    f"{r.io_full.where(stalled)} > {s.stalled_ratio}\nand on ({HOST}) (\n"
                    f"  {r.node_throttled} > {s.throttled_tasks}\n"
                    f"  or max by ({HOST}) ({open_calls}) > {s.sync_seconds / 2:g}\n"
                    f"  or max by ({HOST}) ({r.device_slow}) > {s.slow_ratio}\n)",
                ),
                ("memory", f"{r.memory_full} > {s.stalled_ratio}"),
            )
        ),
    ]


def _exporter(s: Settings) -> list[Alert]:
    up = Series("up", ()).where(f'job=~"{s.job}"')
    features = gauge(c.EXPORTER_FEATURE_AVAILABLE)
    main = features.where('feature=~"dirty_throttle|block_io"')
    degraded = {
        "feature": (
            f"{features} == 0\n"
            f"and on ({HOST}, feature) (\n"
            f"  {main} == 0\n"
            f"  or max without (reason) (max_over_time({features}[7d])) == 1\n)",
            "{{ $labels.feature }} is not available: {{ $labels.reason }}. `writeback-exporter "
            "doctor` on the host says what to do.",
            10,
        ),
        "collector": (
            f"{gauge(c.EXPORTER_COLLECTOR_SUCCESS)} == 0",
            "Collector {{ $labels.collector }} fails: its metrics are absent. The log says why.",
            10,
        ),
        "map_full": (
            f"{gauge(c.EXPORTER_MAP_ENTRIES)} / {gauge(c.EXPORTER_MAP_CAPACITY)} > {s.map_ratio}",
            "BPF map {{ $labels.map }} is full to {{ $value | humanizePercentage }}; what finds no "
            "room counts as other.",
            10,
        ),
        "events_dropped": (
            f"increase({counter(c.EXPORTER_MAP_DROPPED)}[{s.window}]) > {s.dropped_events}",
            "{{ $value | humanize }} events found no room in BPF map {{ $labels.map }}.",
            0,
        ),
        "events_missed": (
            f"rate({counter(c.EXPORTER_PROGRAM_MISSED)}[{s.window}]) > {s.missed_rate}",
            "BPF program {{ $labels.program }} misses {{ $value | humanize }} events a second.",
            10,
        ),
    }
    down = {
        "unreachable": (f"{up} == 0", "Prometheus cannot scrape it."),
        "empty": (
            f"{up} == 1\nunless on ({HOST}) {gauge(c.EXPORTER_BUILD_INFO)}",
            "What answers there is not the exporter, or it answers with nothing.",
        ),
        "unknown": (f"absent({up})", "Prometheus has no target of that job at all."),
    }
    return [
        *(
            Alert(
                "ExporterDegraded",
                expr,
                WARNING,
                "The writeback exporter of {{ $labels.instance }} does not see all",
                description,
                minutes=minutes,
                keep_minutes=10,
                labels={"problem": problem},
            )
            for problem, (expr, description, minutes) in degraded.items()
        ),
        *(
            Alert(
                "ExporterDown",
                expr,
                WARNING,
                "The writeback exporter{{ with $labels.instance }} of {{ . }}{{ end }} is not seen",
                description + " Nothing else alerts for what it watches.",
                minutes=5,
                labels={"problem": problem},
            )
            for problem, (expr, description) in down.items()
        ),
    ]
