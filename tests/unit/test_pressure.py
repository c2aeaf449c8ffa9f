# SPDX-License-Identifier: Apache-2.0
"""Pressure files of every kind of host and kernel, from fixture trees."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_cgroups import V1, V2, procfs, tree
from writeback_exporter.collector import Host
from writeback_exporter.features import Feature, Refused
from writeback_exporter.files.pressure import Pressure, totals
from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.exposition import Snapshot
from writeback_exporter.metrics.history import Sample
from writeback_exporter.names.cgroups import Cgroups, find_hierarchies
from writeback_exporter.names.devices import Devices
from writeback_exporter.settings import Settings

Series = dict[tuple[str, str], float]


def psi(some: int | None = None, full: int | None = None) -> str:
    """A pressure file of these totals in microseconds."""
    return "".join(
        f"{kind} avg10=1.25 avg60=0.00 avg300=0.07 total={total}\n"
        for kind, total in (("some", some), ("full", full))
        if total is not None
    )


def put(directory: Path, files: Mapping[str, str]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text)


HOST = {"cpu": psi(5_000_001, 0), "memory": psi(1, 0), "io": psi(1234567, 999999)}
CGROUP = {
    "cpu.pressure": psi(17, 3),
    "memory.pressure": psi(0, 0),
    "io.pressure": psi(10**13 + 1, 2),
}


def settings(place: Path) -> Settings:
    return Settings(
        listen=(),
        telemetry_path="/metrics",
        collectors=frozenset(),
        procfs=str(place / "proc"),
        sysfs="/sys",
        cgroupfs=str(place / "cgroup"),
    )


def host(place: Path) -> Host:
    found = find_hierarchies(str(place / "cgroup"), str(place / "proc"))
    cgroups = Cgroups(found)
    cgroups.walk(0.0)
    return Host(cgroups, Devices("/sys"))


def v2_host(place: Path, *paths: str, files: Mapping[str, str] = CGROUP) -> Path:
    """A host of cgroup v2 with pressure files in these cgroups; the hierarchy's root."""
    procfs(place, V2)
    put(place / "proc/pressure", HOST)
    top = tree(place / "cgroup", *paths, v2=True)
    for path in ("", *paths):
        put(top / path, files)
    return top


def opened(place: Path) -> tuple[Pressure, Host, list[Feature]]:
    collector, its_host = Pressure(), host(place)
    return collector, its_host, collector.open(settings(place), its_host, threading.Lock())


def series(collector: Pressure, its_host: Host) -> tuple[Series, Series]:
    """What is exported as waiting and as stalled."""
    snapshot = Snapshot()
    collector.fill(snapshot, its_host)
    waiting, stalled = snapshot.families
    assert waiting.metric is catalogue.PRESSURE_WAITING_SECONDS
    assert stalled.metric is catalogue.PRESSURE_STALLED_SECONDS
    results: list[Series] = []
    for family in (waiting, stalled):
        found = {(cgroup, resource): value for (cgroup, resource), value in family.rows}
        assert len(found) == len(family.rows), "a series is there twice"
        results.append(found)
    return results[0], results[1]


def available(features: list[Feature]) -> dict[str, str]:
    """The reason of each feature, empty where it is available."""
    return {feature.name: feature.reason for feature in features}


NO_IRQ = {"pressure_irq": "not in this kernel"}
HOST_WAITING = {("/", "cpu"): 5.000001, ("/", "memory"): 1e-06, ("/", "io"): 1.234567}
HOST_STALLED = {("/", "cpu"): 0, ("/", "memory"): 0, ("/", "io"): 0.999999}


def test_v2(tmp_path: Path) -> None:
    v2_host(tmp_path, "a", "a/b")
    collector, its_host, features = opened(tmp_path)
    assert available(features) == {**NO_IRQ, "pressure_cgroups": ""}
    waiting, stalled = series(collector, its_host)
    assert waiting == HOST_WAITING | {
        (cgroup, resource): seconds
        for cgroup in ("/a", "/a/b")
        for resource, seconds in (("cpu", 1.7e-05), ("memory", 0), ("io", 10000000.000001))
    }
    assert stalled == HOST_STALLED | {
        (cgroup, resource): seconds
        for cgroup in ("/a", "/a/b")
        for resource, seconds in (("cpu", 3e-06), ("memory", 0), ("io", 2e-06))
    }


def test_hybrid(tmp_path: Path) -> None:
    """v2 is beside v1, which has no such files, whatever is called so there."""
    procfs(tmp_path, V1 + V2)
    put(tmp_path / "proc/pressure", HOST)
    for controller in ("blkio", "memory"):
        put(tree(tmp_path / "cgroup" / controller, "a") / "a", CGROUP)
    top = tree(tmp_path / "cgroup/unified", "b", v2=True)
    for directory in (top, top / "b"):
        put(directory, CGROUP)
    collector, its_host, features = opened(tmp_path)
    assert available(features) == {**NO_IRQ, "pressure_cgroups": ""}
    assert {cgroup for cgroup, _ in series(collector, its_host)[0]} == {"/", "/b"}


def test_v1(tmp_path: Path) -> None:
    procfs(tmp_path, V1)
    put(tmp_path / "proc/pressure", HOST)
    for controller in ("blkio", "memory"):
        put(tree(tmp_path / "cgroup" / controller, "a") / "a", CGROUP)
    collector, its_host, features = opened(tmp_path)
    assert available(features) == {**NO_IRQ, "pressure_cgroups": "cgroup v1"}
    assert series(collector, its_host) == (HOST_WAITING, HOST_STALLED)


def test_no_full_of_cpu(tmp_path: Path) -> None:
    """As in 5.10."""
    top = v2_host(tmp_path, "a", files=CGROUP | {"cpu.pressure": psi(17)})
    put(tmp_path / "proc/pressure", {"cpu": psi(5)})
    collector, its_host, _ = opened(tmp_path)
    waiting, stalled = series(collector, its_host)
    assert {key for key in waiting if key[1] == "cpu"} == {("/", "cpu"), ("/a", "cpu")}
    assert not {key for key in stalled if key[1] == "cpu"}
    assert (top / "a/cpu.pressure").exists()


def test_irq_is_only_full(tmp_path: Path) -> None:
    v2_host(tmp_path, "a", files=CGROUP | {"irq.pressure": psi(full=4)})
    put(tmp_path / "proc/pressure", {"irq": psi(full=8)})
    collector, its_host, features = opened(tmp_path)
    assert available(features) == {"pressure_cgroups": ""}
    waiting, stalled = series(collector, its_host)
    assert not {key for key in waiting if key[1] == "irq"}
    assert {key: value for key, value in stalled.items() if key[1] == "irq"} == {
        ("/", "irq"): 8e-06,
        ("/a", "irq"): 4e-06,
    }


def test_files_that_the_kernel_lacks_are_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    v2_host(tmp_path, "a")
    collector, its_host, _ = opened(tmp_path)
    asked: list[str] = []
    there: list[str] = []
    os_open = os.open

    def watched(path: str | bytes, *arguments: Any, **more: Any) -> int:
        asked.append(os.fsdecode(path))
        descriptor = os_open(path, *arguments, **more)
        there.append(asked[-1])
        return descriptor

    monkeypatch.setattr(os, "open", watched)
    series(collector, its_host)
    assert asked == there
    assert sorted(
        os.path.basename(path) for path in there if path != str(tmp_path / "cgroup/a")
    ) == [*("cpu", "cpu.pressure", "io", "io.pressure", "memory", "memory.pressure")]


def test_pressure_of_a_cgroup_switched_off_and_on(tmp_path: Path) -> None:
    """0 in cgroup.pressure removes the other files (6.1): its counters end, others' go on."""
    top = v2_host(tmp_path, "a", "b")
    collector, its_host, _ = opened(tmp_path)
    for name in CGROUP:
        (top / "a" / name).unlink()
    assert {cgroup for cgroup, _ in series(collector, its_host)[0]} == {"/", "/b"}
    put(top / "a", CGROUP)
    assert {cgroup for cgroup, _ in series(collector, its_host)[0]} == {"/", "/a", "/b"}


def test_pressure_of_the_root_switched_off(tmp_path: Path) -> None:
    """Its own files alone have gone, and they are not read."""
    top = v2_host(tmp_path, "a")
    for name in CGROUP:
        (top / name).unlink()
    put(top, {"cgroup.pressure": "0\n"})
    collector, its_host, features = opened(tmp_path)
    assert available(features)["pressure_cgroups"] == ""
    assert {cgroup for cgroup, _ in series(collector, its_host)[0]} == {"/", "/a"}


def test_cgroups_without_pressure(tmp_path: Path) -> None:
    """As with cgroup_disable=pressure."""
    v2_host(tmp_path, "a", files={})
    collector, its_host, features = opened(tmp_path)
    assert available(features)["pressure_cgroups"] == "cgroup pressure off"
    assert series(collector, its_host) == (HOST_WAITING, HOST_STALLED)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("some\nfull\n", {}),
        ("some avg10=0.00 total=\nfull avg10=0.00 total=7\n", {"full": 7}),
        ("some avg10=0.00 total=-1\nfull total=7\n", {"full": 7}),
        (psi(2**64 // 1000, 7), {"full": 7}),
        (psi(1, 7) + "most avg10=0.00 total=3\n", {"some": 1, "full": 7}),
        ("some avg10=0.00 subtotal=5 total=6\n", {"some": 6}),
    ],
)
def test_lines_of_another_form(text: str, expected: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "io").write_text(text)
    assert totals(str(tmp_path / "io")) == expected


def test_cgroup_that_has_gone_meanwhile(tmp_path: Path) -> None:
    top = v2_host(tmp_path, "a", "b")
    collector, its_host, _ = opened(tmp_path)
    for entry in (top / "a").iterdir():
        entry.unlink()
    (top / "a").rmdir()
    assert {cgroup for cgroup, _ in series(collector, its_host)[0]} == {"/", "/b"}


def test_names_that_become_one_label(tmp_path: Path) -> None:
    """The one's byte is written as the other is called: that one has the series."""
    top = v2_host(tmp_path, "\\xff")
    os.mkdir(os.fsencode(top) + b"/\xff")
    for name, text in CGROUP.items():
        file = Path(os.fsdecode(os.fsencode(top) + b"/\xff/" + name.encode()))
        file.write_text(text.replace("=17", "=18"))
    collector, its_host, _ = opened(tmp_path)
    waiting, _ = series(collector, its_host)
    assert waiting[("/\\xff", "cpu")] == 17 / 1e6


def test_psi_off(tmp_path: Path) -> None:
    """Refused, and never zeros."""
    v2_host(tmp_path, "a")
    for file in (tmp_path / "proc/pressure").iterdir():
        file.unlink()
    for _ in range(2):
        with pytest.raises(Refused) as caught:
            opened(tmp_path)
        assert caught.value.reason == "PSI off"
        assert "psi=1" in caught.value.remedy
        if (tmp_path / "proc/pressure").exists():
            (tmp_path / "proc/pressure").rmdir()


def test_unreadable_is_not_unsupported(tmp_path: Path) -> None:
    v2_host(tmp_path, "a")
    (tmp_path / "proc/pressure/io").unlink()
    (tmp_path / "proc/pressure/io").mkdir()  # EISDIR, also for root
    collector, its_host, features = opened(tmp_path)
    assert available(features)["pressure_io"] == "unreadable"
    assert set(series(collector, its_host)[0]) == {
        (cgroup, resource) for cgroup in ("/", "/a") for resource in ("cpu", "memory")
    }
    for resource in ("cpu", "memory"):
        (tmp_path / "proc/pressure" / resource).unlink()
    with pytest.raises(Refused, match="Is a directory") as caught:
        opened(tmp_path)
    assert caught.value.reason == "unreadable"


def test_sample_is_of_the_host_alone(tmp_path: Path) -> None:
    v2_host(tmp_path, "a")
    collector, its_host, _ = opened(tmp_path)
    sample = Sample(0)
    collector.sample(sample, its_host)
    assert sample.waiting == {"cpu": 5_000_001, "memory": 1, "io": 1_234_567}
