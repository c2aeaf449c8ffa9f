# SPDX-License-Identifier: Apache-2.0
"""Dirty throttling from maps to families. The maps are in memory; their layout is the object's."""

from __future__ import annotations

import gzip
import mmap
import os
import platform
import re
import struct
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.memory import MachineOfCgroups, Memory, Values, changed, extent, load
from tests.waiting import wait_for
from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.exposition import Labels, Snapshot
from writeback_exporter.metrics.history import Sample
from writeback_exporter.names.cgroups import (
    OTHER,
    RETENTION_SECONDS,
    EventKind,
)
from writeback_exporter.probes.dirty_throttle import DirtyThrottle, ticks_per_second

# The kernel's HZ ----------------------------------------------------------------------------------


def configured_hz() -> int | None:
    """CONFIG_HZ of the running kernel, where its configuration can be read."""
    for path, read in (
        ("/proc/config.gz", lambda p: gzip.decompress(p.read_bytes())),
        (f"/boot/config-{platform.release()}", Path.read_bytes),
        (f"/lib/modules/{platform.release()}/config", Path.read_bytes),
    ):
        try:
            match = re.search(rb"^CONFIG_HZ=(\d+)$", read(Path(path)), re.MULTILINE)
        except OSError:
            continue
        if match:
            return int(match[1])
    return None


def test_ticks_equal_the_kernels_configuration() -> None:
    hz = configured_hz()
    if hz is None:
        pytest.skip("no configuration of the running kernel in /proc/config.gz, /boot or /lib")
    assert ticks_per_second() == hz


def test_ticks_equal_the_rate_of_jiffies() -> None:
    """getconf CLK_TCK would not do: that is USER_HZ, 100 on every kernel."""

    def jiffies() -> tuple[int, int]:
        text = Path("/proc/timer_list").read_text()
        now = re.search(r"^now at (\d+) nsecs$", text, re.MULTILINE)
        ticks = re.search(r"^jiffies: (\d+)$", text, re.MULTILINE)
        if not now or not ticks:
            pytest.skip("/proc/timer_list of this kernel has no jiffies")
        return int(now[1]), int(ticks[1])

    if not os.access("/proc/timer_list", os.R_OK):
        pytest.skip("/proc/timer_list is for root")
    begin = jiffies()
    time.sleep(0.5)

    def rate() -> float:
        end = jiffies()
        return (end[1] - begin[1]) * 1e9 / (end[0] - begin[0])

    # The text's two times are not the same: the longer it lasts, the less that matters.
    wait_for(lambda: ticks_per_second() == pytest.approx(rate(), rel=0.05), what="that rate")


@pytest.mark.parametrize("hz", [24, 48, 100, 128, 200, 250, 256, 300, 500, 1000, 1024, 1200])
def test_ticks_of_every_hz(monkeypatch: pytest.MonkeyPatch, hz: int) -> None:
    """TICK_NSEC is rounded to whole nanoseconds (include/linux/jiffies.h)."""
    tick_ns = (10**9 + hz // 2) // hz
    monkeypatch.setattr(time, "clock_getres", lambda _clock: tick_ns / 1e9)
    assert ticks_per_second() == hz


# The machine ------------------------------------------------------------------------------------


class Machine(MachineOfCgroups["Scraped"]):
    """A machine's BDIs and throttled tasks, and the probe that reads them.

    Its methods do to the maps what bpf/dirty_throttle.bpf.c does.
    """

    def __init__(self, sysfs: Path) -> None:
        self.probe = DirtyThrottle()
        super().__init__(sysfs, self.probe, Scraped)
        file = self.probe.file
        throttle, bdi = file.map("dirty_throttle"), file.map("bdis")
        sleeper = file.map("sleepers").value
        assert throttle.key is not None
        assert throttle.value is not None
        assert bdi.value is not None
        assert sleeper is not None
        self.key, self.throttle, self.bdi = throttle.key, throttle.value, bdi.value
        self.sleeper = sleeper
        self.maps = {
            "dirty_throttle": Memory(self.key.size, self.throttle.size, 16384),
            "bdis": Memory(8, self.bdi.size, 1024),
            "sleepers": Memory(4, self.sleeper.size, 16384),
        }
        counters = [
            extent(self.bdi, "pauses"),
            extent(self.bdi, "other.slept_ns", "other.requested_ns"),
        ]
        load(self.probe, self.maps, counters={"bdis": counters})

    def plug(self, bdi: int, name: str, values: Values | None = None) -> None:
        (self.sysfs / "class/bdi" / name).mkdir(parents=True, exist_ok=True)
        self.change_bdi(bdi, {"name": name.encode(), **(values or {})})

    def unplug(self, name: str) -> None:
        (self.sysfs / "class/bdi" / name).rmdir()

    def change_bdi(self, bdi: int, values: Values) -> None:
        key, entries = bdi.to_bytes(8, sys.byteorder), self.maps["bdis"].entries
        entries[key] = changed(self.bdi, entries.get(key), values)

    def throttled(self, cgroup: int, bdi: int, times: int = 1) -> None:
        """Pauses of 2^23 ns that the global limit requested, and that took 2^24."""
        key = changed(self.key, None, {"cgroup": cgroup, "bdi": bdi})
        first = self.probe.file.enum("pause_exponents")["PAUSE_FIRST"]
        entries = self.maps["dirty_throttle"].entries
        row = bytearray(entries.get(key, bytes(self.throttle.size)))
        fields = self.throttle.fields
        for place, number in (
            (fields["slept_ns"].offset, 1 << 24),
            (fields["requested_ns"].offset, 1 << 23),
            (fields["slept_slots"].offset + 8 * (24 - first), 1),
        ):
            (before,) = struct.unpack_from("=Q", row, place)
            struct.pack_into("=Q", row, place, before + times * number)
        entries[key] = bytes(row)
        value = self.maps["bdis"].entries[bdi.to_bytes(8, sys.byteorder)]
        domains = [*self.bdi.pick("pauses").unpack(value)]
        domains[0] += times
        self.change_bdi(bdi, {"pauses": domains})

    def sleeps(self, tid: int, cgroup: int, bdi: int, ago: float, pause: float, at: float) -> None:
        """A thread that met the tracepoint so long ago, in s; it slept from `at`, or never: 0."""
        event_ns = time.monotonic_ns() - int(ago * 1e9)
        values: Values = {
            "key.cgroup": cgroup,
            "key.bdi": bdi,
            "event_ns": event_ns,
            "pause_ns": int(pause * 1e9),
            "sleep_ns": event_ns + int(at * 1e9) if at else 0,
        }
        key = tid.to_bytes(4, sys.byteorder)
        self.maps["sleepers"].entries[key] = changed(self.sleeper, None, values)


class Scraped:
    """What one collection found, read at once as rendering does."""

    def __init__(self, snapshot: Snapshot) -> None:
        (histogram,) = snapshot.histograms
        assert histogram.metric is catalogue.DIRTY_THROTTLE_SECONDS
        self.first = histogram.first_exponent
        self.sleep = {labels: (list(slots), total) for labels, slots, total in histogram.rows()}
        self.samples = {family.metric.name: dict(family.rows) for family in snapshot.families}

    @property
    def counts(self) -> dict[Labels, int]:
        """Pauses by label set."""
        return {labels: sum(slots) for labels, (slots, _) in self.sleep.items()}

    @property
    def pauses(self) -> dict[str, float]:
        """Pauses that the global limit decided, by BDI."""
        found = self.of(catalogue.DIRTY_THROTTLE_DOMAIN)
        return {bdi: count for (bdi, domain), count in found.items() if domain == "global"}

    def of(self, metric: catalogue.Metric) -> dict[tuple[str, ...], float]:
        return self.samples[metric.name]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine with the BDIs 8:0 and 259:0 (1 and 2) and the cgroups /a and /b (5 and 6)."""
    machine = Machine(tmp_path / "sys")
    machine.plug(1, "8:0")
    machine.plug(2, "259:0")
    machine.event(EventKind.MKDIR, 5, "/a")
    machine.event(EventKind.MKDIR, 6, "/b")
    return machine


# Families -----------------------------------------------------------------------------------------


def test_sleep_and_requests(machine: Machine) -> None:
    machine.throttled(5, 1, times=3)
    machine.throttled(6, 2)
    scraped = machine.scrape()
    assert scraped.counts == {("/a", "8:0"): 3, ("/b", "259:0"): 1}
    slots, total = scraped.sleep["/a", "8:0"]
    assert total == 3 << 24
    assert {scraped.first + i: n for i, n in enumerate(slots) if n} == {24: 3}
    assert scraped.of(catalogue.DIRTY_THROTTLE_REQUESTED_SECONDS) == {
        ("/a", "8:0"): (3 << 23) / 1e9,
        ("/b", "259:0"): (1 << 23) / 1e9,
    }


def test_what_found_no_room_is_others(machine: Machine) -> None:
    count = machine.throttle.fields["slept_slots"].count
    machine.change_bdi(1, {"other.slept_ns": 9, "other.slept_slots": [2] + [0] * (count - 1)})
    machine.throttled(99, 1)  # of a cgroup that nobody knows: the same label
    assert machine.scrape().counts == {(OTHER, "8:0"): 3}


def test_domains_are_those_of_the_enum(machine: Machine) -> None:
    enum = machine.probe.file.enum("throttle_domain")
    domains = {value: name for name, value in enum.items() if name != "DOMAINS"}
    assert sorted(domains) == list(range(enum["DOMAINS"]))
    machine.change_bdi(1, {"pauses": [10 + value for value in sorted(domains)]})
    found = machine.scrape().of(catalogue.DIRTY_THROTTLE_DOMAIN)
    assert {key: value for key, value in found.items() if key[0] == "8:0"} == {
        ("8:0", name.removeprefix("DOMAIN_").lower()): 10 + value for value, name in domains.items()
    }
    assert {domain for _, domain in found} == {"global", "bdi", "memcg"}


STATE = {
    "dirty": catalogue.BDI_DIRTY_BYTES,
    "threshold": catalogue.BDI_DIRTY_THRESHOLD_BYTES,
    "dirty_ratelimit": catalogue.BDI_DIRTY_RATELIMIT_BYTES,
    "write_bandwidth": catalogue.BDI_WRITE_BANDWIDTH_BYTES,
}


def test_state_is_in_bytes(machine: Machine) -> None:
    machine.change_bdi(1, {field: 7 + i for i, field in enumerate(STATE)})
    scraped = machine.scrape()
    for i, metric in enumerate(STATE.values()):
        assert scraped.of(metric)[("8:0",)] == (7 + i) * mmap.PAGESIZE


@pytest.mark.parametrize("field", STATE)
def test_state_below_zero_is_left_out(machine: Machine, field: str) -> None:
    """The kernel's per-CPU counters can read a little below zero."""
    machine.change_bdi(1, {**dict.fromkeys(STATE, 3), field: 2**64 - 5})
    scraped = machine.scrape()
    assert {name for name, metric in STATE.items() if ("8:0",) in scraped.of(metric)} == {
        *(STATE.keys() - {field})
    }


def test_state_is_of_the_bdi_that_has_the_name_now(machine: Machine) -> None:
    # Ids count up; in the map the later one may come first.
    machine.plug(30, "0:40", {"dirty": 30, "pauses": [1, 0, 0]})
    machine.plug(7, "0:40", {"dirty": 7, "pauses": [2, 0, 0]})
    scraped = machine.scrape()
    assert scraped.of(catalogue.BDI_DIRTY_BYTES)[("0:40",)] == 30 * mmap.PAGESIZE
    assert scraped.of(catalogue.DIRTY_THROTTLE_DOMAIN)[("0:40", "global")] == 3


@pytest.mark.parametrize(("measured", "method"), [(True, "fexit"), (False, "requested")])
def test_method(machine: Machine, measured: bool, method: str) -> None:
    machine.probe.measured = measured
    assert machine.scrape().of(catalogue.DIRTY_THROTTLE_METHOD_INFO) == {(method,): 1}


# Asleep now ---------------------------------------------------------------------------------------


def asleep(machine: Machine) -> float:
    machine.throttled(5, 1)
    return machine.scrape().of(catalogue.DIRTY_THROTTLED_TASKS)["/a", "8:0"]


@pytest.mark.parametrize(
    ("measured", "ago", "pause", "at", "expected"),
    [
        pytest.param(True, 10, 0.1, 0.01, 1, id="measured: for longer than was asked"),
        pytest.param(True, 0.01, 0.2, 0, 0, id="measured: about to sleep, or a nowait write"),
        pytest.param(True, 70, 0.1, 0.01, 0, id="measured: its end was missed"),
        pytest.param(False, 0.01, 100, 0, 1, id="requested: pause not over"),
        pytest.param(False, 10, 0.1, 0, 0, id="requested: pause over"),
    ],
)
def test_who_sleeps(
    machine: Machine, measured: bool, ago: float, pause: float, at: float, expected: int
) -> None:
    machine.probe.measured = measured
    machine.sleeps(1, 5, 1, ago, pause, at)
    assert asleep(machine) == expected


def test_pause_is_a_tick_longer(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    now, tick = 10**12, 10**9 // ticks_per_second()
    pause = 10**8
    for late, expected in ((-1, 1), (0, 0)):
        monkeypatch.setattr(time, "monotonic_ns", lambda: now)
        machine.sleeps(1, 5, 1, 0, pause / 1e9, 0)
        monkeypatch.setattr(time, "monotonic_ns", lambda late=late: now + pause + tick + late)
        assert asleep(machine) == expected


def test_sleepers_are_summed_by_label(machine: Machine) -> None:
    machine.probe.measured = True
    machine.event(EventKind.MKDIR, 50, "/b")  # as after a restart
    for tid, cgroup in enumerate((5, 5, 6, 50)):
        machine.sleeps(tid, cgroup, 1, 1, 0.1, 0.01)
        machine.throttled(cgroup, 1)
    machine.throttled(6, 2)
    assert machine.scrape().of(catalogue.DIRTY_THROTTLED_TASKS) == {
        ("/a", "8:0"): 2,
        ("/b", "8:0"): 2,
        ("/b", "259:0"): 0,
    }


@pytest.mark.parametrize("measured", [True, False])
def test_stale_entries_are_deleted(machine: Machine, measured: bool) -> None:
    machine.probe.measured = measured
    for tid, ago in ((1, 61), (2, 59)):
        machine.sleeps(tid, 5, 1, ago, 0.1, 0)
    machine.scrape()
    assert [*machine.maps["sleepers"].entries] == [(2).to_bytes(4, sys.byteorder)]


def test_sleep_whose_end_was_missed(machine: Machine) -> None:
    """No run of an fexit program is certain: where it would nest on a CPU, the kernel skips it.

    A sleep lasts MAX_PAUSE (200 ms, mm/page-writeback.c) and a tick at most.
    """
    machine.probe.measured = True
    machine.sleeps(1, 5, 1, 61, 0.1, 0.01)
    machine.scrape()
    assert not machine.maps["sleepers"].entries


def test_sleeper_of_a_bdi_that_was_forgotten(machine: Machine) -> None:
    machine.probe.measured = True
    machine.throttled(5, 2)
    machine.sleeps(1, 5, 1, 61, 0.1, 0.01)
    machine.unplug("8:0")
    scraped = machine.scrape_until_retention_is_over()
    assert scraped.of(catalogue.DIRTY_THROTTLED_TASKS) == {("/a", "259:0"): 0}


# Coming and going ---------------------------------------------------------------------------------


def test_restarted_service_counts_on(machine: Machine) -> None:
    machine.throttled(5, 1, times=4)
    machine.exit(5, "/a")
    machine.event(EventKind.MKDIR, 50, "/a")
    machine.throttled(50, 1)
    assert machine.scrape().counts == {("/a", "8:0"): 5}
    assert machine.scrape_until_retention_is_over().counts == {("/a", "8:0"): 5}
    assert len(machine.maps["dirty_throttle"].entries) == 1
    machine.exit(50, "/a")
    assert machine.scrape_until_retention_is_over().counts == {}


def test_unmounted_bdi_is_exported_and_then_its_entries_go(machine: Machine) -> None:
    machine.throttled(5, 1)
    machine.change_bdi(1, {"pauses": [1, 0, 0]})
    machine.unplug("8:0")
    assert machine.scrape().counts == {("/a", "8:0"): 1}
    scraped = machine.scrape_until_retention_is_over()
    assert scraped.counts == {}
    assert {bdi for bdi, _ in scraped.of(catalogue.DIRTY_THROTTLE_DOMAIN)} == {"259:0"}
    assert not machine.maps["dirty_throttle"].entries
    assert len(machine.maps["bdis"].entries) == 1


def test_bdi_replaced_under_its_name_counts_on(machine: Machine) -> None:
    machine.throttled(5, 1, times=4)
    machine.change_bdi(1, {"pauses": [0, 0, 4]})
    machine.plug(9, "8:0", {"pauses": [0, 0, 1]})
    machine.throttled(5, 9)
    for scraped in (machine.scrape(), machine.scrape_until_retention_is_over()):
        assert scraped.counts == {("/a", "8:0"): 5}
        assert scraped.of(catalogue.DIRTY_THROTTLE_DOMAIN)["8:0", "memcg"] == 5
    assert len(machine.maps["bdis"].entries) == 2


# Steps of a life, in any order; each is (what, which).
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["pause", "pause", "start", "exit", "unplug", "plug", "scrape", "wait"]),
        st.integers(0, 5),
    ),
    max_size=60,
)


@given(STEPS)
def test_nothing_is_lost_or_counted_twice(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    """Each series has all of its pauses, and ends only when no cgroup or no BDI has its name."""
    machine = Machine(tmp_path_factory.mktemp("sys"))
    paths = ["/a", "/b", "/a/c"]
    cgroups: dict[str, int] = {}
    bdis: dict[str, int] = {}
    fresh = iter(range(1, 1000))
    done: dict[tuple[str, str], int] = {}
    pauses: dict[str, int] = {}
    for what, which in steps:
        path, bdi = paths[which % 3], ("8:0", "0:40")[which % 2]
        if what == "start" and path not in cgroups:
            cgroups[path] = next(fresh)
            machine.event(EventKind.MKDIR, cgroups[path], path)
        elif what == "exit" and path in cgroups:
            machine.exit(cgroups.pop(path), path)
        elif what == "plug" and bdi not in bdis:
            bdis[bdi] = next(fresh)
            machine.plug(bdis[bdi], bdi)
            pauses.setdefault(bdi, 0)
        elif what == "unplug" and bdi in bdis:
            machine.unplug(bdi)
            del bdis[bdi]
        elif what == "pause" and path in cgroups and bdi in bdis:
            machine.throttled(cgroups[path], bdis[bdi])
            done[path, bdi] = done.get((path, bdi), 0) + 1
            pauses[bdi] += 1
        elif what in ("scrape", "wait"):
            scraped = machine.scrape(15.0 if what == "scrape" else RETENTION_SECONDS)
            assert scraped.counts == done
            assert scraped.pauses == pauses
            rest = machine.peek()
            for key in done.keys() - rest.counts.keys():
                assert key[0] not in cgroups or key[1] not in bdis
                del done[key]
            for name in pauses.keys() - rest.pauses.keys():
                assert name not in bdis
                del pauses[name]


# The status page ----------------------------------------------------------------------------------


def test_sample(machine: Machine) -> None:
    machine.probe.measured = True
    machine.event(EventKind.MKDIR, 50, "/b")  # as after a restart
    (machine.sysfs / "dev/block").mkdir(parents=True)
    (machine.sysfs / "dev/block/8:0").symlink_to("../../devices/pci/block/sda")
    machine.throttled(5, 1, times=3)
    machine.throttled(6, 2)
    machine.throttled(50, 2)
    machine.sleeps(1, 5, 1, 1, 0.1, 0.01)
    machine.change_bdi(2, {"other.slept_ns": 9})
    sample = Sample(0)
    machine.probe.read()
    machine.probe.sample(sample, machine.host)
    assert sample.throttled is not None
    assert sorted(sample.throttled.values()) == [
        (("/a", "8:0"), 3 << 24),
        (("/b", "259:0"), 1 << 24),
        (("/b", "259:0"), 1 << 24),
        ((OTHER, "259:0"), 9),
        ((OTHER, "8:0"), 0),
    ]
    assert sample.asleep == {("/a", "8:0"): 1}
    assert sample.disks == {"8:0": "sda"}
