# SPDX-License-Identifier: Apache-2.0
"""PSI triggers: how they are written, whose they are, and which of their events count.

Regular files stand for the kernel's, which never fire: tests/host and tests/guest have those.
"""

from __future__ import annotations

import logging
import os
import re
import select
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.test_cgroups import MKDIR, RELEASE, RMDIR, V1, procfs, tree
from tests.unit.test_pressure import CGROUP, HOST, available, host, psi, put, settings, v2_host
from tests.waiting import wait_for
from writeback_exporter import privileges
from writeback_exporter.collector import Host
from writeback_exporter.features import Feature, Refused
from writeback_exporter.files import pressure_triggers as module
from writeback_exporter.files.pressure_triggers import PressureTriggers
from writeback_exporter.metrics.exposition import Labels, Snapshot
from writeback_exporter.names.cgroups import RETENTION_SECONDS
from writeback_exporter.privileges import Capability
from writeback_exporter.settings import (
    PressureTrigger,
    Settings,
    pressure_trigger,
    regular_expression,
)

IO = "io some 150ms/2s"
MEMORY = "memory full 1s/10s"


# How they are written -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (IO, PressureTrigger("io", "some", 150_000, 2_000_000)),
        (MEMORY, PressureTrigger("memory", "full", 1_000_000, 10_000_000)),
        ("cpu some 1ms/1ms", PressureTrigger("cpu", "some", 1000, 1000)),
        ("irq full 1500ms/10000ms", PressureTrigger("irq", "full", 1_500_000, 10_000_000)),
        ("io some 1000ms/2s", PressureTrigger("io", "some", 1_000_000, 2_000_000)),
    ],
)
def test_text(text: str, expected: PressureTrigger) -> None:
    assert pressure_trigger(text) == expected
    assert pressure_trigger(str(expected)) == expected


def test_limits_are_written_in_one_way() -> None:
    """Else one trigger could be there twice."""
    assert pressure_trigger("io some 1000ms/2000ms").limits == "1s/2s"
    assert str(pressure_trigger("irq full 1500ms/10s")) == "irq full 1500ms/10s"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no pressure trigger, such as 'io some 150ms/2s'"),
        ("io", "is no pressure trigger"),
        ("disk some 150ms/2s", "is no pressure trigger"),
        ("io any 150ms/2s", "is no pressure trigger"),
        ("io some 150ms", "is no pressure trigger"),
        ("io some 150ms/2s/3s", "is no pressure trigger"),
        ("io  some 150ms/2s", "is no pressure trigger"),
        ("io some 150ms/2s\n", "is no duration"),
        (" io some 150ms/2s", "is no pressure trigger"),
        ("io some 150/2s", "'150' is no duration"),
        ("io some 150us/2s", "'150us' is no duration"),
        ("io some 1.5s/2s", "'1.5s' is no duration"),
        ("io some -1s/2s", "'-1s' is no duration"),
        ("io some 150ms/2 s", "'2 s' is no duration"),
        ("irq some 150ms/2s", "irq pressure is only full"),
        ("io some 1s/11s", "the window is longer than 10s"),
        ("io some 1s/10001ms", "the window is longer than 10s"),
        ("io some 3s/2s", "the threshold is not between 1ms and the window"),
        ("io some 0ms/2s", "the threshold is not between 1ms and the window"),
        ("io some 0s/0s", "the threshold is not between 1ms and the window"),
    ],
)
def test_text_that_is_none(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        pressure_trigger(text)


@pytest.mark.parametrize("text", ["(", "[[]", "a{99999999999}", "(" * 5000 + ")" * 5000])
def test_expression_that_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="is no regular expression"):
        regular_expression(text)


# Whose they are -----------------------------------------------------------------------------------


class Triggers:
    """A collector on a fixture tree, until the end of its context."""

    def __init__(self, place: Path, texts: tuple[str, ...], cgroups: str = "") -> None:
        self.lock = threading.Lock()
        self.host: Host = host(place)
        self.collector = PressureTriggers()
        self.settings: Settings = replace(
            settings(place),
            pressure_triggers=tuple(map(pressure_trigger, texts)),
            pressure_trigger_cgroups=regular_expression(cgroups) if cgroups else None,
        )

    def __enter__(self) -> Triggers:
        self.features: list[Feature] = self.collector.open(self.settings, self.host, self.lock)
        self.collector.begin()
        return self

    def __exit__(self, *_: object) -> None:
        self.collector.close()

    def counts(self) -> dict[Labels, float]:
        return dict(self._fill().families[0].rows)

    def states(self) -> dict[str, float]:
        return {state: value for (state,), value in self._fill().families[1].rows}

    def _fill(self) -> Snapshot:
        snapshot = Snapshot()
        with self.lock:
            self.collector.fill(snapshot, self.host)
        return snapshot

    def fire(self, path: Path) -> None:
        """As when epoll finds what is armed on a file with EPOLLPRI."""
        (descriptor,) = (
            d for d, armed in self.collector._armed.items() if os.fsdecode(armed.path) == str(path)
        )
        self.collector._take(descriptor, select.EPOLLPRI)


def armed(number: int, refused: int = 0, over_limit: int = 0) -> dict[str, float]:
    return {"armed": number, "refused": refused, "over_limit": over_limit}


class _Epoll:
    """epoll takes no file of a disk, as those of a fixture tree are: these never have an event."""

    def __init__(self) -> None:
        self._poll = select.poll()

    def register(self, descriptor: int, events: int) -> None:
        if events == select.EPOLLIN:
            self._poll.register(descriptor, select.POLLIN)

    def unregister(self, descriptor: int) -> None:
        pass

    def poll(self, seconds: float | None) -> list[tuple[int, int]]:
        return self._poll.poll(None if seconds is None else seconds * 1000)

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _files_of_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "epoll", _Epoll)


@pytest.fixture(autouse=True)
def held(monkeypatch: pytest.MonkeyPatch) -> set[Capability]:
    """The capabilities that the exporter has."""
    held = {Capability.SYS_RESOURCE, Capability.DAC_OVERRIDE}
    monkeypatch.setattr(privileges, "has", held.__contains__)
    return held


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """The root of cgroup v2 on a host where the exporter may all."""
    return v2_host(tmp_path, "a", "b", "b/c")


def test_nothing_is_done_unasked(tmp_path: Path) -> None:
    procfs(tmp_path)
    tree(tmp_path / "cgroup", v2=True)  # without PSI, which then does not matter
    before = threading.active_count()
    with Triggers(tmp_path, (), ".*") as triggers:
        assert triggers.features == []
        assert threading.active_count() == before
        snapshot = Snapshot()
        triggers.collector.fill(snapshot, triggers.host)
        assert snapshot == Snapshot()


def test_psi_off(tmp_path: Path) -> None:
    procfs(tmp_path)
    tree(tmp_path / "cgroup", v2=True)
    with pytest.raises(Refused) as caught:
        Triggers(tmp_path, (IO,)).__enter__()
    assert caught.value.reason == "PSI off"


def test_host(tmp_path: Path, top: Path) -> None:
    with Triggers(tmp_path, (IO, MEMORY)) as triggers:
        assert triggers.features == [
            Feature(f"pressure_trigger {IO}", True),
            Feature(f"pressure_trigger {MEMORY}", True),
        ]
        assert triggers.counts() == {
            ("/", "io", "some", "150ms/2s"): 0,
            ("/", "memory", "full", "1s/10s"): 0,
        }
        assert triggers.states() == armed(2)
    # To its end: /proc would put its NUL in place of the last digit.
    for name, text in (("io", "some 150000 2000000\n"), ("memory", "full 1000000 10000000\n")):
        assert (tmp_path / "proc/pressure" / name).read_text().startswith(text)
    assert (top / "a/io.pressure").read_text() == CGROUP["io.pressure"]


def test_cgroups_whose_whole_path_matches(tmp_path: Path, top: Path) -> None:
    with Triggers(tmp_path, (IO,), "/b|/b/.|.") as triggers:
        assert {labels[0] for labels in triggers.counts()} == {"/", "/b", "/b/c"}
        assert triggers.states() == armed(3)
    assert (top / "io.pressure").read_text() == CGROUP["io.pressure"], "the root is the host"
    assert (top / "b/c/io.pressure").read_text().startswith("some 150000 2000000\n")


def test_v1(tmp_path: Path) -> None:
    procfs(tmp_path, V1)
    put(tmp_path / "proc/pressure", HOST)
    for controller in ("blkio", "memory"):
        tree(tmp_path / "cgroup" / controller, "a")
    with Triggers(tmp_path, (IO,), ".*") as triggers:
        assert available(triggers.features) == {
            f"pressure_trigger {IO}": "",
            "pressure_triggers_of_cgroups": "cgroup v1",
        }
        assert triggers.states() == armed(1)


def test_refusals_leave_the_others(
    tmp_path: Path, top: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """No cpu full of the host, nor of a cgroup in 5.10; no irq; each said once."""
    for cgroup in ("a", "b"):
        (top / cgroup / "cpu.pressure").write_text(psi(1))
    texts = ("cpu full 1s/2s", "irq full 1s/2s", IO)
    with Triggers(tmp_path, texts, "/a|/b|/b/c") as triggers:
        assert available(triggers.features) == {
            "pressure_trigger cpu full 1s/2s": "undefined",
            "pressure_trigger irq full 1s/2s": "not there",
            f"pressure_trigger {IO}": "",
        }
        # The host's and three cgroups' io, and cpu of one of them.
        assert triggers.states() == armed(5, refused=1 + 2 + 4)
    (record,) = (r for r in caplog.records if r.levelno == logging.WARNING)
    assert "cpu full 1s/2s is refused" in record.message
    assert "cpu.pressure has no full; " in record.message


def test_cgroups_come_and_go_between_scrapes(tmp_path: Path, top: Path) -> None:
    series = ("/new", "io", "some", "150ms/2s")
    with Triggers(tmp_path, (IO,), "/n.*") as triggers:
        assert triggers.states() == armed(1)
        cgroups = triggers.host.cgroups
        for number in (1, 2):  # a cgroup of the same name comes again
            put(top / "new", CGROUP)
            with triggers.lock:
                cgroups.apply(MKDIR, 0, 1000 + number, b"/new", 1.0)
            wait_for(lambda: triggers.states() == armed(2))
            triggers.fire(top / "new/io.pressure")
            assert triggers.counts()[series] == number
            with triggers.lock:
                cgroups.apply(RMDIR, 0, 1000 + number, b"/new", 2.0)
                cgroups.apply(RELEASE, 0, 1000 + number, b"/new", 2.0)
            wait_for(lambda: triggers.states() == armed(1))
            assert triggers.counts()[series] == number
        # Its counter goes with its name.
        cgroups.expired(3.0)
        gone = cgroups.expired(2.0 + RETENTION_SECONDS)
        assert gone == {(0, 1001), (0, 1002)}
        triggers.collector.forget(set(), triggers.host, 3.0)
        triggers.collector.forget({(0, 1001)}, triggers.host, 3.0)
        assert triggers.counts()[series] == 2
        triggers.collector.forget(gone, triggers.host, 3.0)
        assert triggers.counts().keys() == {("/", *series[1:])}


def test_a_cgroup_whose_pressure_is_switched_on_again(
    tmp_path: Path, top: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (top / "a/io.pressure").unlink()
    monkeypatch.setattr(module, "_RETRY_SECONDS", 0.0)
    with Triggers(tmp_path, (IO,), "/a") as triggers:
        assert triggers.states() == armed(1, refused=1)
        put(top / "a", CGROUP)
        wait_for(lambda: triggers.states() == armed(2))
    assert not caplog.records


def test_limit(
    tmp_path: Path,
    top: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "LIMIT", 5)
    with Triggers(tmp_path, (IO, MEMORY), "/.*") as triggers:
        assert triggers.states() == armed(5, over_limit=3)
        (record,) = caplog.records
        assert "3 PSI triggers are left out: the limit is 5 at once" in record.message
        gone = next(a for a in triggers.collector._armed.values() if a.key[0])
        with triggers.lock:
            triggers.host.cgroups.apply(RMDIR, 0, gone.key[0], gone.labels[0].encode(), 1.0)
        # Others have its place.
        wait_for(lambda: triggers.states()["over_limit"] < 3)
        assert triggers.states()["armed"] == 5
    assert len(caplog.records) == 1


def test_limit_of_counters_that_nobody_scrapes(
    tmp_path: Path, top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SERIES_LIMIT", 4)
    with Triggers(tmp_path, (IO,), "/.*") as triggers:
        assert triggers.states() == armed(4)
        cgroup = (top / "a").stat().st_ino
        put(top / "new", CGROUP)
        with triggers.lock:
            triggers.host.cgroups.apply(RMDIR, 0, cgroup, b"/a", 1.0)
            triggers.host.cgroups.apply(MKDIR, 0, 1000, b"/new", 1.0)
        wait_for(lambda: triggers.states() == armed(3, over_limit=1))
        assert ("/a", "io", "some", "150ms/2s") in triggers.counts()


def test_a_scrape_holds_nothing_up(tmp_path: Path, top: Path) -> None:
    """Nor does the end wait for one."""
    with Triggers(tmp_path, (IO,), "/a|/new") as triggers:
        put(top / "new", CGROUP)
        with triggers.lock:
            triggers.host.cgroups.apply(MKDIR, 0, 1000, b"/new", 1.0)
            time.sleep(3 * module._LOOK_SECONDS)
            assert len(triggers.collector._armed) == 2
        wait_for(lambda: triggers.states() == armed(3))
        with triggers.lock:
            triggers.collector.close()


def test_close_gives_all_back(tmp_path: Path, top: Path) -> None:
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with Triggers(tmp_path, (IO, MEMORY), "/.*") as triggers:
        assert threading.active_count() == threads + 1
        assert len(os.listdir("/proc/self/fd")) == descriptors + 8 + 1
        triggers.collector.close()
        triggers.collector.close()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == descriptors


# Which of their events count ----------------------------------------------------------------------


@pytest.fixture
def waited(top: Path) -> Callable[[int], None]:
    """Sets what tasks have waited, in microseconds, in /a."""

    def write(microseconds: int) -> None:
        (top / "a/io.pressure").write_text(psi(microseconds, 0))

    write(7_000_000)
    return write


SERIES = ("/a", "io", "some", "150ms/2s")


@pytest.mark.parametrize(
    ("privileged", "mode"),
    [(True, 0o666), (True, 0o444), (False, 0o444)],
    ids=["privileged", "5.10", "5.10 without CAP_SYS_RESOURCE"],
)
def test_the_kernel_is_believed(
    privileged: bool,
    mode: int,
    tmp_path: Path,
    top: Path,
    waited: Callable[[int], None],
    held: set[Capability],
) -> None:
    """These triggers have a total of their own, which may grow by more than that of the file."""
    if not privileged:
        held.clear()
    for file in (tmp_path / "proc/pressure").iterdir():
        file.chmod(mode)
    with Triggers(tmp_path, (IO,), "/a") as triggers:
        waited(7_000_000)
        triggers.fire(top / "a/io.pressure")
        assert triggers.counts()[SERIES] == 1


def test_an_event_of_what_was_before_is_false(
    tmp_path: Path, top: Path, waited: Callable[[int], None], held: set[Capability]
) -> None:
    held.clear()
    for file in (tmp_path / "proc/pressure").iterdir():
        file.chmod(0o666)
    with Triggers(tmp_path, (IO,), "/a") as triggers:
        for total, count in (
            (7_000_000, 0),
            (7_149_999, 0),
            (7_150_000, 1),
            (7_150_000, 2),  # from now on the kernel's windows are right
        ):
            waited(total)
            triggers.fire(top / "a/io.pressure")
            assert triggers.counts()[SERIES] == count
