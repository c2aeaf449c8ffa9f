# SPDX-License-Identifier: Apache-2.0
"""What must hold of an exporter at each scrape of a long life, and at its end.

Each check sees all moments and has rows for the report. It notes what fails and goes on: a soak
that stopped at the first fault would hide the others.
"""

from __future__ import annotations

import os
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from tests import lab
from tests.soak.churners import Disks, Truth, World
from writeback_exporter.names.cgroups import OTHER, RETENTION_SECONDS, UNATTRIBUTED

GOOD, BAD, TOLD = "good", "FAILED", ""


# Moments ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Series:
    """What a line's text before its value says."""

    name: str
    labels: Mapping[str, str]


_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def _series(text: str) -> Series:
    name, _, labels = text.partition("{")
    return Series(name, dict(_LABEL.findall(labels)))


class Samples:
    """The samples of a scrape by their text, which is the same in each. prometheus-client's parser
    takes 1 s for 30,000 lines, this one 0.1."""

    def __init__(self, text: str, before: Samples | None = None) -> None:
        known = before.series if before else {}
        self.counters: set[str] = set()
        self.values: dict[str, float] = {}
        self.series: dict[str, Series] = {}
        for line in text.splitlines():
            if line.startswith("# TYPE "):
                _, _, name, kind = line.split(" ")
                if kind == "counter":
                    self.counters |= {name}
                elif kind == "histogram":
                    self.counters |= {f"{name}_bucket", f"{name}_count", f"{name}_sum"}
            elif not line.startswith("#"):
                key, _, value = line.rpartition(" ")
                assert key not in self.values, f"{key} is there twice"
                self.values[key] = float(value)
                self.series[key] = known.get(key) or _series(key)
        self._by_name: dict[str, list[str]] = {}
        for key, series in self.series.items():
            self._by_name.setdefault(series.name, []).append(key)

    @property
    def names(self) -> set[str]:
        return set(self._by_name)

    def select(self, name: str, **labels: str) -> dict[str, float]:
        """By text, the samples of a metric (without its prefix) that have these labels."""
        wanted = labels.items()
        return {
            key: self.values[key]
            for key in self._by_name.get(f"writeback_{name}", ())
            if wanted <= self.series[key].labels.items()
        }

    def by(self, label: str, name: str) -> dict[str, float]:
        """By one label's value, the sum of a metric's samples."""
        sums: dict[str, float] = {}
        for key, value in self.select(name).items():
            of = self.series[key].labels[label]
            sums[of] = sums.get(of, 0) + value
        return sums

    def sum(self, name: str, **labels: str) -> float:
        return sum(self.select(name, **labels).values())


@dataclass(frozen=True, slots=True)
class Moment:
    """A scrape, and how the process was right after it."""

    at: float
    """When it began, in seconds of the monotonic clock."""
    seconds: float
    samples: Samples
    rss: int
    """Bytes."""
    threads: int
    files: Counter[str]
    """Open descriptors by kind; sockets are the clients', files of cgroups as many as these are."""
    exhausted: bool
    """It can open no further file, on purpose."""


def process_files(pid: int) -> Counter[str]:
    kinds: Counter[str] = Counter()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(entry.path)
        except FileNotFoundError:
            continue
        is_cgroups = target.startswith("/sys/fs/cgroup/")
        kinds["cgroup" if is_cgroups else target.partition(":[")[0]] += 1
    return kinds


# Checks -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    what: str
    begin: str
    end: str
    verdict: str = TOLD
    note: str = ""


@dataclass(slots=True)
class Faults:
    """What went wrong: how often, and the first of it in words."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, fault: str) -> None:
        self.count += 1
        if len(self.first) < 5:
            self.first.append(fault)
            print(f"FAULT {time.strftime('%H:%M:%S')} {fault}", flush=True)

    @property
    def verdict(self) -> str:
        return BAD if self.count else GOOD

    def note(self, otherwise: str = "") -> str:
        if not self.count:
            return otherwise
        return f"{self.count} times; " + "; ".join(self.first)


class Check:
    def see(self, moment: Moment) -> None:
        """Called at each scrape, in order."""

    def rows(self) -> Iterable[Row]:
        """For the report, after the last scrape."""
        return ()


class Growth(Check):
    """Memory, threads and descriptors are flat once warm.

    Moments are warm once what has gone is forgotten as fast as more goes: then the median of the
    first third of the warm moments and that of the last must be alike.
    """

    RSS_SHARE = 0.03
    """By how much the last third's median may be above the first's: 1 to 2 MB. A leak of 50 bytes a
    cgroup is 3 MB in 60,000."""
    BYTES_A_NAME = 1000
    """What a cgroup costs whose name is kept, with its rows (57.7 MB with 240, 65.5 with 8,260):
    others on this machine may have more of them later than earlier, and what Python once had it
    rarely gives back."""

    def __init__(self, warm_from: float) -> None:
        self._warm_from = warm_from
        self._first: Moment | None = None
        self._warm: list[Moment] = []
        self.until = float("inf")
        """When the churn ended: what comes after is shown, not compared."""
        self._last: Moment | None = None

    def see(self, moment: Moment) -> None:
        self._first = self._first or moment
        if self._warm_from <= moment.at < self.until and not moment.exhausted:
            self._warm.append(moment)
        self._last = moment

    def rows(self) -> Iterable[Row]:
        assert self._first
        assert self._last
        third = len(self._warm) // 3
        if not third:
            yield Row("memory, threads, descriptors", "", "", BAD, "too short: nothing was warm")
            return
        early, late = self._warm[:third], self._warm[-third:]

        def medians(figure: Callable[[Moment], float]) -> tuple[float, float]:
            return statistics.median(map(figure, early)), statistics.median(map(figure, late))

        def kept(moment: Moment, *but: str) -> int:
            return sum(n for kind, n in moment.files.items() if kind not in ("socket", *but))

        a, b = medians(lambda moment: moment.rss)
        names = [moment.samples.sum("exporter_cgroups") for moment in self._warm]
        more = max(names) - max(names[:third])
        allowed = a * (1 + self.RSS_SHARE) + more * self.BYTES_A_NAME
        slope, _ = statistics.linear_regression(
            [m.at for m in self._warm], [m.rss for m in self._warm]
        )
        yield Row(
            "resident memory, warm",
            _mb(a),
            _mb(b),
            GOOD if b <= allowed else BAD,
            f"medians of first and last {third} of {len(self._warm)} scrapes, the latter at most "
            f"{_mb(allowed)}; trend {slope * 3600 / 1e6:+.1f} MB/h; cold {_mb(self._first.rss)}, "
            f"most {_mb(max(m.rss for m in self._warm))}, when all was quiet "
            f"{_mb(self._last.rss)}; most names kept {max(names):,.0f}, "
            f"in the first third {max(names[:third]):,.0f}",
        )
        a, b = medians(lambda moment: moment.threads)
        most = max(m.threads for m in self._warm)
        yield Row("threads, warm", f"{a:g}", f"{b:g}", GOOD if b <= a else BAD, f"most {most}")
        a, b = medians(lambda moment: kept(moment, "cgroup"))
        # With those of cgroups, and pressure triggers, when all is quiet.
        what = "descriptors but sockets and cgroups' files, warm"
        yield Row(what, f"{a:g}", f"{b:g}", GOOD if b <= a else BAD)
        first, last = kept(self._first), kept(self._last)
        yield Row(
            "descriptors but sockets, quiet", str(first), str(last), GOOD if last <= first else BAD
        )
        sockets = [m.files["socket"] for m in self._warm]
        yield Row("sockets, warm", str(sockets[0]), str(sockets[-1]), TOLD, f"most {max(sockets)}")


def _mb(size: float) -> str:
    return f"{size / 1e6:.1f} MB"


class Successes(Check):
    """All collectors succeed at each scrape, except while no file can be opened: then those that
    need one say so, and are well again at the next scrape after it."""

    def __init__(self) -> None:
        self._collectors: set[str] | None = None
        self._faults, self._scrapes = Faults(), 0
        self._missing, self._failed = Faults(), 0
        self._families: set[str] = set()

    def see(self, moment: Moment) -> None:
        values = moment.samples.by("collector", "exporter_collector_success")
        failed = {collector for collector, value in values.items() if value != 1}
        if self._collectors is None:
            self._collectors = set(values)
        if set(values) != self._collectors:
            self._faults.add(f"collectors are {sorted(values)}")
        if moment.exhausted:
            self._failed += 1
            # Those that read files of cgroups, sysfs and procfs: each has nothing, or all.
            if not {"pressure", "cgroup_memory", "cgroup_io", "devices"} <= failed:
                self._missing.add(f"only {sorted(failed)} failed without descriptors")
            for name in ("pressure_waiting_seconds_total", "cgroup_io_bytes_total"):
                if moment.samples.select(name):
                    self._missing.add(f"{name} is there though no file could be opened")
        else:
            self._scrapes += 1
            if failed:
                self._faults.add(f"{sorted(failed)} failed")

    def rows(self) -> Iterable[Row]:
        assert self._collectors
        yield Row(
            "collectors that succeed",
            str(len(self._collectors)),
            "all" if not self._faults.count else "not all",
            self._faults.verdict,
            self._faults.note(f"at each of {self._scrapes} scrapes"),
        )
        yield Row(
            "scrapes without descriptors",
            "",
            str(self._failed),
            self._missing.verdict if self._failed else BAD,
            self._missing.note("what read no file failed, and was well at the next scrape"),
        )


class Times(Check):
    """No time is negative, and none is longer than the exporter has lived, whatever the clock is
    set to."""

    def __init__(self) -> None:
        self._faults, self._seen = Faults(), 0
        self._first: Moment | None = None
        self._before: Moment | None = None

    def see(self, moment: Moment) -> None:
        before, self._before = self._before, moment
        self._first = self._first or moment
        lived = moment.at + moment.seconds - self._first.at + 60  # it was started before
        for key, value in moment.samples.values.items():
            series = moment.samples.series[key]
            if series.name.endswith(("_open_seconds", "_oldest_seconds")):
                self._seen += 1
                if not 0 <= value <= lived:
                    self._faults.add(f"{key} is {value:g}")
            elif before and series.name.endswith("_seconds_sum"):
                self._seen += 1
                count = key.replace("_sum", "_count", 1)
                events = moment.samples.values[count] - before.samples.values.get(count, 0)
                seconds = value - before.samples.values.get(key, 0)
                if events >= 0 and seconds > events * lived:
                    self._faults.add(f"{key} grew by {seconds:g} s in {events:g} events")

    def rows(self) -> Iterable[Row]:
        note = self._faults.note("none was negative or longer than the exporter lived")
        yield Row("times looked at", "", f"{self._seen:,}", self._faults.verdict, note)


OF_FILES = (
    "writeback_pressure_waiting_",
    "writeback_pressure_stalled_",
    "writeback_cgroup_",
    "writeback_wb_",
    "writeback_iocost_",
    "writeback_io_uring_",
)
"""Counters that are the kernel's own: that of a new cgroup begins anew under an old path."""


class Counters(Check):
    """No counter goes backwards for a label set that stays."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._faults, self._compared = Faults(), 0
        self._before: Moment | None = None

    def see(self, moment: Moment) -> None:
        before, self._before = self._before, moment
        if before is None:
            return
        values = moment.samples.values
        for key, was in before.samples.values.items():
            now = values.get(key)
            if now is None:
                continue
            if before.samples.series[key].name in moment.samples.counters:
                self._compared += 1
                if now < was and not self._is_anew(moment.samples.series[key], before.at):
                    self._faults.add(f"{key} went from {was:g} to {now:g}")

    def _is_anew(self, series: Series, since: float) -> bool:
        cgroup = series.labels.get("cgroup", "")
        if cgroup in ("", "/") or not series.name.startswith(OF_FILES):
            return False
        life = self._world.lives.get(cgroup)
        return life is not None and life.made_at >= since

    def rows(self) -> Iterable[Row]:
        yield Row(
            "counters compared",
            "",
            f"{self._compared:,}",
            self._faults.verdict,
            self._faults.note("none went backwards"),
        )


class Names(Check):
    """Each label is of a cgroup that is or was there, and leaves some time after it."""

    SLACK = 150.0
    """Seconds: two scrapes, and what the kernel takes to release a cgroup that wrote to a loop
    device, whose driver has a worker for each cgroup and looks every minute which of them has been
    idle for one (LOOP_IDLE_WORKER_TIMEOUT, drivers/block/loop.c)."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._unknown, self._stale, self._collapsed = Faults(), Faults(), Faults()
        self._withheld = 0.0
        self._before: Moment | None = None
        self._no_name = 0.0
        self._explained: list[tuple[float, int]] = []
        self._most_no_name = 0.0
        self._labels: set[str] = set()
        self._limit = 0.0

    def expect_no_name(self, number: int) -> None:
        """From now on so many may have no name, as they came and went while events were lost."""
        self._explained.append((time.monotonic(), number))

    def see(self, moment: Moment) -> None:
        if self._before and self._before.exhausted:
            self._withheld += moment.at - self._before.at  # nothing is forgotten while one fails
        self._before = moment
        samples = moment.samples
        cgroups = {s.labels["cgroup"] for s in samples.series.values() if "cgroup" in s.labels}
        self._labels |= {c for c in cgroups if c.startswith(self._world.label)}
        kept = RETENTION_SECONDS + self.SLACK + self._withheld
        for cgroup in cgroups - {OTHER, UNATTRIBUTED, "/"}:
            life = self._world.lives.get(cgroup)
            if life is None:
                self._unknown.add(f"cgroup {cgroup!r} never existed")
            elif not life.there and moment.at - life.gone_at > kept:
                self._stale.add(f"{cgroup} is there {moment.at - life.gone_at:.0f} s after it went")
        collapsed = samples.by("reason", "exporter_collapsed_cgroups")
        may = sum(n for at, n in self._explained if moment.at - at <= kept)
        self._most_no_name = max(self._most_no_name, collapsed["no name"])
        if collapsed["no name"] > may:
            self._collapsed.add(
                f"{collapsed['no name']:g} have no name, {may} of them for a reason"
            )
        if collapsed["limit"]:
            self._collapsed.add(f"{collapsed['limit']:g} are beyond the limit")
        self._no_name = collapsed["no name"]

    def rows(self) -> Iterable[Row]:
        yield Row(
            "labels of cgroups",
            "",
            f"{len(self._labels):,}",
            self._unknown.verdict,
            self._unknown.note("each was there, other or unattributed"),
        )
        yield Row(
            "labels of cgroups that went",
            "",
            f"{self._stale.count} stayed",
            self._stale.verdict,
            self._stale.note(f"gone within {RETENTION_SECONDS + self.SLACK:g} s"),
        )
        lost = sum(n for _, n in self._explained)
        yield Row(
            "cgroups without a name",
            "0",
            f"{self._no_name:g}",
            BAD if self._collapsed.count or self._no_name else GOOD,
            self._collapsed.note(
                f"{lost} came and went in provoked overflows; most at once {self._most_no_name:g}"
            ),
        )


class Ledger(Check):
    """All that was ever counted by (device, op): what is seen to grow from scrape to scrape, for a
    series that leaves takes its count along."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._sums: defaultdict[tuple[str, str, str], float] = defaultdict(float)
        self._other: defaultdict[str, float] = defaultdict(float)
        self._pauses: defaultdict[str, float] = defaultdict(float)

    def see(self, moment: Moment) -> None:
        samples, last = moment.samples, {}
        if not samples.sum("exporter_collector_success", collector="block_io"):
            return  # or its counts would all be growth the next time
        for metric in ("block_io_size_bytes_count", "block_io_size_bytes_sum"):
            for key, value in samples.select(metric).items():
                growth = value - self._last.get(key, 0)
                labels, last[key] = samples.series[key].labels, value
                self._sums[metric, labels["device"], labels["op"]] += growth
                if metric.endswith("_count") and labels["cgroup"] == OTHER:
                    self._other[labels["device"]] += growth
        for key, value in samples.select("dirty_throttle_seconds_count").items():
            self._pauses[samples.series[key].labels["bdi"]] += value - self._last.get(key, 0)
            last[key] = value
        self._last = last

    def requests(self, device: str, op: str) -> tuple[int, int]:
        """Requests of an op and their bytes, as diskstats has them: there write zeroes, of mkfs,
        are writes, while they are other to us."""
        count, size = 0.0, 0.0
        for ours in ("write", "other") if op == "write" else (op,):
            count += self._sums["block_io_size_bytes_count", device, ours]
            size += self._sums["block_io_size_bytes_sum", device, ours]
        return int(count), int(size)

    def other(self, device: str) -> int:
        """Requests of a disk that were counted as other's."""
        return int(self._other[device])

    def pauses(self, bdi: str) -> int:
        return int(self._pauses[bdi])


class Maps(Check):
    """Entries in the BPF maps are at the end what they were at the beginning, nothing was dropped
    but on purpose, and no program missed an event."""

    SPARE = 64
    """Entries more than at the beginning that others on this machine may be the reason of; and as
    many for each cgroup that they made since the churn ended as it may have (disks, ops)."""
    OF_A_CGROUP = 4

    def __init__(self) -> None:
        self._live: list[float] = []
        self._first: Moment | None = None
        self._last: Moment | None = None
        self._most: Counter[str] = Counter()

    def see(self, moment: Moment) -> None:
        self._first = self._first or moment
        self._last = moment
        self._live.append(moment.samples.sum("exporter_cgroups", state="live"))
        for name, entries in moment.samples.by("map", "exporter_map_entries").items():
            self._most[name] = max(self._most[name], int(entries))

    def rows(self) -> Iterable[Row]:
        assert self._first
        assert self._last
        begin = self._first.samples.by("map", "exporter_map_entries")
        end = self._last.samples.by("map", "exporter_map_entries")
        quiet = int(RETENTION_SECONDS // 5)  # scrapes
        others = max(0.0, max(self._live[-quiet:]) - self._live[0])
        spare = self.SPARE + self.OF_A_CGROUP * others
        for name, most in sorted(self._most.items()):
            if most > begin[name]:
                good = end[name] <= begin[name] + spare
                yield Row(
                    f"entries in {name}",
                    f"{begin[name]:g}",
                    f"{end[name]:g}",
                    GOOD if good else BAD,
                    f"most {most:,}",
                )
        dropped = self._last.samples.by("map", "exporter_map_dropped_total")
        missed = self._last.samples.sum("exporter_program_missed_total")
        provoked = dropped.pop("cgroup_lifecycle/cgroup_events", 0)
        lost = {name: count for name, count in dropped.items() if count}
        # Requests under way when programs attach end without a beginning.
        yield Row("cgroup events dropped", "0", f"{provoked:,.0f}", GOOD if provoked else BAD)
        yield Row("other events dropped", "", f"{sum(lost.values()):g}", TOLD, str(lost or ""))
        yield Row("runs of programs missed", "0", f"{missed:g}", BAD if missed else GOOD)
        exited = self._last.samples.sum("exporter_cgroups", state="exited")
        yield Row(
            "cgroups exited and kept",
            "0",
            f"{exited:g}",
            GOOD if exited <= spare else BAD,
            f"others on this machine have {others:g} cgroups more" if others else "",
        )


class Durations(Check):
    """How long scrapes take: shown, never asserted."""

    def __init__(self) -> None:
        self._moments: list[Moment] = []
        self._series = 0

    def see(self, moment: Moment) -> None:
        self._moments.append(moment)
        self._series = max(self._series, len(moment.samples.values))

    def rows(self) -> Iterable[Row]:
        third = max(1, len(self._moments) // 3)
        early, late = self._moments[:third], self._moments[-third:]
        yield Row(
            "scrape, median",
            f"{statistics.median(m.seconds for m in early):.3f} s",
            f"{statistics.median(m.seconds for m in late):.3f} s",
            TOLD,
            f"most {max(m.seconds for m in self._moments):.3f} s, of up to {self._series:,} series",
        )
        # prometheus-client leaves it out where it cannot open a file.
        name = "process_cpu_seconds_total"
        cpu = [m.samples.values[name] for m in self._moments if not m.exhausted]
        elapsed = self._moments[-1].at - self._moments[0].at
        yield Row("CPU time", "", f"{(cpu[-1] - cpu[0]) / elapsed:.1%} of a core")


def block_io(ledger: Ledger, truths: Mapping[str, Truth], *stayed: lab.Disk) -> Iterable[Row]:
    """Whether all requests of the disks were counted, exactly: a row for each that stayed, one for
    those that came and went. Of completions that were shown to no tracepoint the bytes are not
    known; then requests alone are compared."""
    faults, totals = Faults(), Counter[str]()
    for name, truth in truths.items():
        ops = ("read", "write", "discard")
        counted = {op: ledger.requests(name, op) for op in ops}
        true = {op: (truth.requests[op], truth.bytes[op]) for op in ops}
        # An fsync with nothing to commit is an empty flush: to diskstats also a write of no bytes
        # (6.18, 7.3), to us a flush alone.
        flushes, _ = ledger.requests(name, "flush")
        requests = sum(n for n, _ in counted.values())
        expected = sum(truth.requests.values()) - truth.hidden
        is_exact = 0 <= expected - requests <= flushes
        if not truth.hidden:
            is_exact &= [size for _, size in counted.values()] == [n for _, n in true.values()]
            is_exact &= all(counted[op] == true[op] for op in ("read", "discard"))
        note = (
            f"counted {counted} and {flushes} flushes, diskstats has {true}, {truth.hidden} were "
            "hidden"
        )
        if any(name == disk.name for disk in stayed):
            yield Row(
                f"block IO of {name}",
                f"{expected:,} true",
                f"{requests:,}",
                GOOD if is_exact else BAD,
                note,
            )
            continue
        if not is_exact:
            faults.add(f"{name}: {note}")
        totals.update(true=expected, counted=requests, hidden=truth.hidden)
    yield Row(
        f"block IO of {len(truths) - len(stayed)} that went",
        f"{totals['true']:,} true",
        f"{totals['counted']:,}",
        faults.verdict,
        faults.note(f"{totals['hidden']} were hidden"),
    )


def pauses(counted: int, true: int) -> Row:
    return Row(
        "pauses of throttled writers",
        f"{true:,} true",
        f"{counted:,}",
        GOOD if counted == true > 0 else BAD,
        "beside a witness of bpftool's",
    )


def other(counted: int, lost: int) -> Row:
    """Whether what is charged to other is what had no name: at most the IO of those that came and
    went while events were lost."""
    return Row(
        "requests of other",
        f"at most {lost}",
        str(counted),
        GOOD if 0 < counted <= lost else BAD,
        "of cgroups that came and went in overflows",
    )


def disks_gone(last: Moment, disks: Disks) -> Row:
    """Whether the series of disks that were unplugged for good have left."""
    stay = sorted(
        {
            series.labels["device"]
            for series in last.samples.series.values()
            if series.labels.get("device") in disks.gone_at
        }
    )
    return Row(
        "disks that went",
        f"{disks.turns} plugged",
        f"{len(stay)} stayed",
        BAD if stay else GOOD,
        " ".join(stay),
    )


def log_lines(lines: Iterable[str], expected: Iterable[str]) -> Row:
    """Whether the exporter's log has errors that nothing was done for, or far too much."""
    lines = list(lines)
    wrong = [
        line.strip()
        for line in lines
        if ("Traceback" in line or "level=ERROR" in line or "level=error" in line)
        and not any(part in line for part in expected)
    ]
    return Row(
        "lines in the log",
        "",
        str(len(lines)),
        BAD if wrong else GOOD,
        "; ".join(wrong[:5]) or "no error but those that were provoked",
    )
