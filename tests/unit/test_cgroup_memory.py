# SPDX-License-Identifier: Apache-2.0
"""The files of the memory controller, of both versions, whole and in part."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cgroupfs import HYBRID, V1, V2, Opened, Place, by, change_unseen, remove
from writeback_exporter.features import Refused
from writeback_exporter.files import inotify
from writeback_exporter.files.cgroup_files import SELDOM_SECONDS, WATCHED_SECONDS
from writeback_exporter.files.cgroup_memory import CgroupMemory

STAT_V2 = """anon 4096
file 8192
kernel_stack 0
file_mapped 0
file_dirty {dirty}
file_writeback {writeback}
swapcached 0
inactive_anon 0
"""
STAT_V1 = """cache 0
rss 0
dirty 1
writeback 2
inactive_anon 0
hierarchical_memory_limit 9223372036854771712
total_cache 0
total_dirty {dirty}
total_writeback {writeback}
total_unevictable 0
"""
EVENTS = "low 0\nhigh 133\nmax 2\noom 1\noom_kill 1\noom_group_kill 0\nsock_throttled 7\n"
NO_LIMIT_V1 = "9223372036854771712\n"


def v2(dirty: int = 0, writeback: int = 0, **files: str) -> dict[str, str]:
    return {
        "memory.stat": STAT_V2.format(dirty=dirty, writeback=writeback),
        "memory.current": "1048576\n",
        "memory.max": "max\n",
        "memory.high": "max\n",
        "memory.events": EVENTS,
        **{name.replace("_", ".", 1): text for name, text in files.items()},
    }


def v1(dirty: int = 0, writeback: int = 0, **files: str) -> dict[str, str]:
    return {
        "memory.stat": STAT_V1.format(dirty=dirty, writeback=writeback),
        "memory.usage_in_bytes": "2097152\n",
        "memory.limit_in_bytes": NO_LIMIT_V1,
        "memory.soft_limit_in_bytes": NO_LIMIT_V1,
        "memory.failcnt": "0\n",
        "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n",
        **{name.replace("_", ".", 1): text for name, text in files.items()},
    }


def test_v2(tmp_path: Path) -> None:
    place = Place(tmp_path, V2, {})
    root = {"memory.stat": STAT_V2.format(dirty=24576, writeback=16384)}  # and no more
    place.hierarchy(
        "",
        {
            "/": root,
            "/a.slice": v2(20480, 12288, memory_max="536870912\n", memory_high="268435456\n"),
            "/a.slice/b.service": v2(4096),
            "/off.slice": {},  # where the controller is off
        },
    )
    scrape = Opened(CgroupMemory(), place).scrape()
    assert by(scrape, "cgroup_dirty_bytes", "cgroup") == {
        ("/",): 24576,
        ("/a.slice",): 20480,
        ("/a.slice/b.service",): 4096,
    }
    assert by(scrape, "cgroup_writeback_bytes", "cgroup") == {
        ("/",): 16384,
        ("/a.slice",): 12288,
        ("/a.slice/b.service",): 0,
    }
    assert by(scrape, "cgroup_memory_bytes", "cgroup") == {
        ("/a.slice",): 1048576,
        ("/a.slice/b.service",): 1048576,
    }
    assert by(scrape, "cgroup_memory_limit_bytes", "cgroup", "limit") == {
        ("/a.slice", "max"): 536870912,
        ("/a.slice", "high"): 268435456,
    }
    events = by(scrape, "cgroup_memory_events_total", "cgroup", "event")
    assert {event: n for (cgroup, event), n in events.items() if cgroup == "/a.slice"} == {
        "low": 0,
        "high": 133,
        "max": 2,
        "oom": 1,
        "oom_kill": 1,
        "oom_group_kill": 0,
        "sock_throttled": 7,
    }
    assert len(events) == 14


@pytest.mark.parametrize("kind", [HYBRID, V1])
def test_v1(tmp_path: Path, kind: str) -> None:
    place = Place(tmp_path, kind, {})
    place.hierarchy("blkio", {})
    place.hierarchy(
        "memory",
        {
            "/": v1(8192),
            "/docker": v1(4096, 40960),
            "/docker/0123": {
                "memory.memsw.failcnt": "30\n",
                **v1(
                    4096,
                    memory_limit_in_bytes="1073741824\n",
                    memory_soft_limit_in_bytes="536870912\n",
                    memory_failcnt="12\n",
                    memory_oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
                ),
            },
        },
    )
    if kind == HYBRID:
        place.hierarchy("unified", {"/docker": {}})
    scrape = Opened(CgroupMemory(), place).scrape()
    assert by(scrape, "cgroup_dirty_bytes", "cgroup") == {
        ("/",): 8192,
        ("/docker",): 4096,
        ("/docker/0123",): 4096,
    }
    assert by(scrape, "cgroup_writeback_bytes", "cgroup")["/docker",] == 40960
    assert by(scrape, "cgroup_memory_bytes", "cgroup")["/",] == 2097152
    assert by(scrape, "cgroup_memory_limit_bytes", "cgroup", "limit") == {
        ("/docker/0123", "max"): 1073741824,
        ("/docker/0123", "soft"): 536870912,
    }
    events = by(scrape, "cgroup_memory_events_total", "cgroup", "event")
    assert events["/docker/0123", "max"] == 42
    assert events["/docker/0123", "oom_kill"] == 3
    assert len(events) == 6  # the switches in memory.oom_control are no events


def test_events_of_v1_where_no_limit_is_set(tmp_path: Path) -> None:
    """None but that a task was killed, which the host counts too."""
    place = Place(tmp_path, V1, {})
    place.hierarchy("blkio", {})
    place.hierarchy("memory", {"/a": v1()})
    opened = Opened(CgroupMemory(), place)
    vmstat = tmp_path / "proc/vmstat"

    def events() -> dict[str, float]:
        series = opened.scrape().select("cgroup_memory_events_total", cgroup="/a")
        return {dict(labels)["event"]: count for labels, count in series.items()}

    def killed(count: int) -> None:
        text = f"oom_kill_disable 0\nunder_oom 0\noom_kill {count}\n"
        place.hierarchy("memory", {"/a": {"memory.oom_control": text}})

    vmstat.write_text("nr_dirty 7\noom_kill 5\n")
    opened.scrape()
    opened.now += SELDOM_SECONDS  # it is no longer new
    assert events() == {"max": 0, "oom_kill": 0}
    killed(1)
    assert events() == {"max": 0, "oom_kill": 0}  # which cannot be
    vmstat.write_text("nr_dirty 7\noom_kill 6\n")
    assert events() == {"max": 0, "oom_kill": 1}
    killed(2)
    assert events() == {"max": 0, "oom_kill": 1}
    opened.now += 600
    assert events() == {"max": 0, "oom_kill": 2}
    vmstat.unlink()
    for count in (3, 4):
        killed(count)
        assert events() == {"max": 0, "oom_kill": count}


def test_a_limit_whose_write_is_not_over_is_shown_when_it_is_met(tmp_path: Path) -> None:
    place = Place(tmp_path, V2, {})
    place.hierarchy("", {"/a": v2(), "/b": v2()})
    opened = Opened(CgroupMemory(), place)

    def limits() -> dict[tuple[str, ...], float]:
        return by(opened.scrape(), "cgroup_memory_limit_bytes", "cgroup", "limit")

    assert limits() == {}
    for group in ("/a", "/b"):
        change_unseen(place, "", group, {"memory.max": "1048576\n"})
    assert limits() == {}
    place.hierarchy("", {"/a": {"memory.events": "low 0\nhigh 0\nmax 1\noom 0\noom_kill 0\n"}})
    assert limits() == {("/a", "max"): 1048576}
    opened.now += WATCHED_SECONDS
    assert limits() == {("/a", "max"): 1048576, ("/b", "max"): 1048576}


def test_limits_are_shown_when_they_are_written_and_their_events_with_them(tmp_path: Path) -> None:
    place = Place(tmp_path, V1, {})
    place.hierarchy("blkio", {})
    place.hierarchy("memory", {"/a": v1()})
    opened = Opened(CgroupMemory(), place)
    opened.scrape()
    for name, limit in (("memory.limit_in_bytes", "max"), ("memory.soft_limit_in_bytes", "soft")):
        for size in (1048576, 2097152):
            place.hierarchy("memory", {"/a": {name: f"{size}\n", "memory.failcnt": f"{size}\n"}})
            scrape = opened.scrape()
            assert scrape.sum("cgroup_memory_limit_bytes", limit=limit) == size
            assert scrape.sum("cgroup_memory_events_total", event="max") == size


def test_limits_are_read_again_within_a_minute_and_their_events_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inotify, "WATCHES_LIMIT", 0)
    place = Place(tmp_path, V1, {})
    place.hierarchy("blkio", {})
    place.hierarchy("memory", {"/a": v1()})
    opened = Opened(CgroupMemory(), place)

    def limit_and_events() -> tuple[float, float]:
        scrape = opened.scrape()
        return (
            scrape.sum("cgroup_memory_limit_bytes", limit="max"),
            scrape.sum("cgroup_memory_events_total", event="max"),
        )

    for size in (7340032, 1048576):  # while it is new
        place.hierarchy("memory", {"/a": {"memory.limit_in_bytes": f"{size}\n"}})
        assert limit_and_events() == (size, 0)
    opened.now += SELDOM_SECONDS
    assert limit_and_events() == (1048576, 0)
    changed = {"memory.limit_in_bytes": "2097152\n", "memory.failcnt": "3\n"}
    place.hierarchy("memory", {"/a": changed})
    assert limit_and_events() == (1048576, 3)
    opened.now += SELDOM_SECONDS
    assert limit_and_events() == (2097152, 3)
    lifted = {"memory.limit_in_bytes": NO_LIMIT_V1, "memory.failcnt": "4\n"}
    place.hierarchy("memory", {"/a": lifted})
    opened.now += SELDOM_SECONDS
    assert limit_and_events() == (0, 4)
    for limit, events in ((2097152, 5), (0, 5), (1048576, 7), (0, 8)):
        text = f"{limit}\n" if limit else NO_LIMIT_V1
        changed = {"memory.limit_in_bytes": text, "memory.failcnt": f"{events}\n"}
        place.hierarchy("memory", {"/a": changed})
        opened.now += SELDOM_SECONDS
        assert limit_and_events() == (limit, events)


def test_one_missing_line_or_file_leaves_the_rest(tmp_path: Path) -> None:
    place = Place(tmp_path, V2, {})
    without_events = v2(1)
    del without_events["memory.events"]
    place.hierarchy(
        "",
        {
            "/no-dirty": {**v2(), "memory.stat": "file 0\nfile_writeback 4096\nswapcached 0\n"},
            "/junk": {
                "memory.stat": "\n \nfile_dirty many\nfile_writeback 12k\nfile_dirty \n",
                "memory.current": "\n",
                "memory.max": "",
                "memory.high": "-1\n",
                "memory.events": "low\nhigh x\n\n=\nmax 4\n",
            },
            "/below-zero": {
                **v2((1 << 64) - 4096, (1 << 64) - 1),
                "memory.current": "18446744073709547520\n",
            },
            "/no-events": without_events,
        },
    )
    with open(tmp_path / "cgroup/junk/memory.events", "ab") as stream:
        stream.write(b"\xff 5\n")
    scrape = Opened(CgroupMemory(), place).scrape()
    assert by(scrape, "cgroup_dirty_bytes", "cgroup") == {("/no-events",): 1}
    assert by(scrape, "cgroup_writeback_bytes", "cgroup") == {
        ("/no-dirty",): 4096,
        ("/no-events",): 0,
    }
    assert by(scrape, "cgroup_memory_bytes", "cgroup") == {
        ("/no-dirty",): 1048576,
        ("/no-events",): 1048576,
    }
    assert by(scrape, "cgroup_memory_limit_bytes", "cgroup", "limit") == {}
    events = by(scrape, "cgroup_memory_events_total", "cgroup", "event")
    assert {event: n for (cgroup, event), n in events.items() if cgroup == "/junk"} == {
        "max": 4,
        r"\xff": 5,
    }


def test_a_cgroup_that_goes_and_comes_back_under_its_path(tmp_path: Path) -> None:
    place = Place(tmp_path, V2, {})
    place.hierarchy("", {"/a": v2(4096), "/b": v2(8192)})
    opened = Opened(CgroupMemory(), place)
    remove(place, "", "/a")  # and no event has told of it yet
    assert by(opened.scrape(), "cgroup_dirty_bytes", "cgroup") == {("/b",): 8192}
    place.hierarchy("", {"/a": v2(12288)})
    opened.host.cgroups.walk(1.0)
    scrape = opened.scrape()
    assert by(scrape, "cgroup_dirty_bytes", "cgroup") == {("/a",): 12288, ("/b",): 8192}


def test_names_that_are_no_utf_8(tmp_path: Path) -> None:
    place = Place(tmp_path, V2, {})
    place.hierarchy("", {"/caf\udce9": v2(4096), "/ünï": v2(8192)})
    scrape = Opened(CgroupMemory(), place).scrape()
    assert by(scrape, "cgroup_dirty_bytes", "cgroup") == {(r"/caf\xe9",): 4096, ("/ünï",): 8192}


def test_no_memory_controller(tmp_path: Path) -> None:
    place = Place(tmp_path, HYBRID, {})
    place.hierarchy("blkio", {})
    place.hierarchy("unified", {})
    with pytest.raises(Refused) as refused:
        Opened(CgroupMemory(), place)
    assert refused.value.reason == "no memory controller"
