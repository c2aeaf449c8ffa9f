# SPDX-License-Identifier: Apache-2.0
"""writeback_cgroup_info: one series of each cgroup at any time, and a thread that may hang."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from writeback_exporter.collector import Host
from writeback_exporter.files import workload as module
from writeback_exporter.files.workload import Workloads
from writeback_exporter.metrics.catalogue import CGROUP_INFO
from writeback_exporter.metrics.exposition import Snapshot
from writeback_exporter.names import containers
from writeback_exporter.names.cgroups import Cgroups, EventKind, Hierarchies, Hierarchy
from writeback_exporter.names.devices import Devices
from writeback_exporter.settings import Settings

ID = "0123456789abcdef" * 4
UID = "01234567-89ab-cdef-0123-456789abcdef"
POD = f"/kubepods/burstable/pod{UID}"
CONTAINER = f"{POD}/{ID}"
V2, BLKIO, MEMORY = Hierarchy(0, "/v2"), Hierarchy(7, "/blkio"), Hierarchy(4, "/memory")
CONFIG = f"run/containerd/io.containerd.runtime.v2.task/k8s.io/{ID}/config.json"
ANNOTATIONS = {
    "io.kubernetes.cri.container-name": "nginx",
    "io.kubernetes.cri.sandbox-name": "web-0",
    "io.kubernetes.cri.sandbox-namespace": "shop",
    "io.kubernetes.cri.sandbox-uid": UID,
}

Series = dict[str, dict[str, str]]


class Bench:
    """A collector and the host that it names."""

    def __init__(self, place: Path) -> None:
        for directory in ("block", "class/bdi"):
            (place / "sys" / directory).mkdir(parents=True)
        self.rootfs = place / "root"
        self.cgroups = Cgroups(Hierarchies(BLKIO, V2, MEMORY))
        self.host = Host(self.cgroups, Devices(str(place / "sys")))
        self.collector = Workloads()
        self.lock = threading.Lock()
        self._inode = 1

    def add(self, path: str, *hierarchies: Hierarchy) -> int:
        self._inode += 1
        for hierarchy in hierarchies or (V2,):
            self.apply(EventKind.MKDIR, hierarchy, self._inode, path)
        return self._inode

    def apply(self, kind: EventKind, hierarchy: Hierarchy, inode: int, path: str) -> None:
        with self.lock:
            self.cgroups.apply(kind, hierarchy.id, inode, os.fsencode(path), 0.0)

    @contextmanager
    def running(self) -> Iterator[None]:
        settings = Settings(
            listen=(),
            telemetry_path="/metrics",
            collectors=frozenset({"workload"}),
            procfs="",
            sysfs="",
            cgroupfs="",
            rootfs=str(self.rootfs),
        )
        assert self.collector.open(settings, self.host, self.lock) == []
        self.collector.begin()
        try:
            yield
        finally:
            self.collector.close()

    def series(self) -> Series:
        """Labels that are not empty, by cgroup."""
        snapshot = Snapshot()
        with self.lock:
            self.collector.fill(snapshot, self.host)
        (family,) = snapshot.families
        assert family.metric is CGROUP_INFO
        series: Series = {}
        for (cgroup, *rest), value in family.rows:
            assert value == 1
            assert cgroup not in series, f"{cgroup} is there twice"
            labels = zip(CGROUP_INFO.labels[1:], rest, strict=True)
            series[cgroup] = {name: label for name, label in labels if label}
        return series

    def series_when(self, ready: Callable[[Series], bool]) -> Series:
        """The series once they are so: the thread makes them so."""
        deadline = time.monotonic() + 30
        while not ready(series := self.series()):
            assert time.monotonic() < deadline, series
            time.sleep(0.01)
        return series


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(module, "_PASS_SECONDS", 0.01)
    monkeypatch.setattr(containers, "_FIRST_RETRY", 0.01)
    return Bench(tmp_path)


def test_series_are_of_those_of_whom_something_is_known(bench: Bench) -> None:
    bench.add("/")
    bench.add("/batch")
    bench.add("/system.slice/cron.service")
    assert bench.series() == {
        "/system.slice/cron.service": {"slice": "system.slice", "unit": "cron.service"}
    }


def test_every_label_of_the_catalogue(bench: Bench) -> None:
    bench.add(CONTAINER)
    bench.add("/user.slice/user-1000.slice/session-3.scope")
    bench.add("/slurm/uid_1000/job_12/step_0")
    bench.add("/lxc/web")
    assert bench.series() == {
        CONTAINER: {"container_id": ID, "pod_uid": UID, "qos_class": "Burstable"},
        "/user.slice/user-1000.slice/session-3.scope": {
            "slice": "user-1000.slice",
            "unit": "session-3.scope",
            "user": "1000",
        },
        "/slurm/uid_1000/job_12/step_0": {"user": "1000", "slurm_job": "12", "slurm_step": "0"},
        "/lxc/web": {"runtime": "lxc", "container": "web"},
    }


def test_one_path_in_three_hierarchies_is_one_series(bench: Bench) -> None:
    bench.add("/system.slice/cron.service", V2, BLKIO, MEMORY)
    bench.add(f"/docker/{ID}", MEMORY)
    assert bench.series().keys() == {"/system.slice/cron.service", f"/docker/{ID}"}


def test_exited_cgroup_has_its_series_as_long_as_its_samples(bench: Bench) -> None:
    inode = bench.add("/system.slice/job.service")
    bench.apply(EventKind.RMDIR, V2, inode, "/system.slice/job.service")
    bench.apply(EventKind.RELEASE, V2, inode, "/system.slice/job.service")
    assert bench.series().keys() == {"/system.slice/job.service"}
    bench.cgroups.forget({(V2.id, inode)}, 1000.0)
    assert bench.series() == {}


def test_restarted_service_is_one_series(bench: Bench) -> None:
    path = "/system.slice/job.service"
    inode = bench.add(path)
    bench.apply(EventKind.RMDIR, V2, inode, path)
    bench.add(path)
    assert bench.series().keys() == {path}
    bench.cgroups.forget({(V2.id, inode)}, 1000.0)
    assert bench.series().keys() == {path}


def test_renamed_cgroup_is_another(bench: Bench) -> None:
    inode = bench.add("/lxc/web", MEMORY)
    assert bench.series().keys() == {"/lxc/web"}
    bench.apply(EventKind.RENAME, MEMORY, inode, "/lxc/shop")
    assert bench.series() == {"/lxc/shop": {"runtime": "lxc", "container": "shop"}}


def test_names_that_are_learnt_later_replace_the_row(bench: Bench) -> None:
    bench.add(POD)
    bench.add(CONTAINER)
    with bench.running():
        assert bench.series()[CONTAINER].get("pod") is None
        pods = bench.rootfs / f"var/log/pods/shop_web-0_{UID}"
        pods.mkdir(parents=True)
        config = bench.rootfs / CONFIG
        config.parent.mkdir(parents=True)
        config.with_name("new").write_text(json.dumps({"annotations": ANNOTATIONS}))
        config.with_name("new").rename(config)
        bench.add("/batch")
        series = bench.series_when(lambda s: "container" in s[CONTAINER])
    pod = {"pod": "web-0", "namespace": "shop", "pod_uid": UID, "qos_class": "Burstable"}
    assert series == {
        POD: pod,
        CONTAINER: pod | {"runtime": "containerd", "container_id": ID, "container": "nginx"},
    }


def test_container_that_no_scrape_saw_alive_has_its_names(bench: Bench) -> None:
    (bench.rootfs / f"var/log/pods/shop_web-0_{UID}").mkdir(parents=True)
    with bench.running():
        inode = bench.add(POD)
        deadline = time.monotonic() + 30
        while not bench.collector._names.pods:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        bench.apply(EventKind.RMDIR, V2, inode, POD)
        (bench.rootfs / f"var/log/pods/shop_web-0_{UID}").rmdir()
        assert bench.series()[POD]["pod"] == "web-0"


def test_missing_directory_of_pods_is_said_once(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.add(POD)
    with bench.running():
        deadline = time.monotonic() + 30
        while not caplog.records:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        bench.add(POD.replace("0123", "abcd"))
        time.sleep(0.2)
    assert caplog.messages == [
        f"pods or containers have no names: cannot read {bench.rootfs}/var/log/pods: No such file "
        "or directory; mount the host's directory there, read-only, and run as root or with "
        "CAP_DAC_READ_SEARCH (docs/identity.md)"
    ]


def test_rows_are_made_anew_only_where_something_changed(bench: Bench) -> None:
    """Else 10,000 cgroups would cost 70 ms a scrape."""
    bench.add(POD)
    bench.series()
    before = bench.collector._rows[POD]
    bench.add("/system.slice/cron.service")
    bench.series()
    assert bench.collector._rows[POD] is before
    assert bench.collector._rows.keys() == {POD, "/system.slice/cron.service"}
