# SPDX-License-Identifier: Apache-2.0
"""Who a cgroup is, from a running exporter: real cgroups, a fixture of the host's root directory,
and a file system that never answers."""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests import lab
from tests.lab import Cgroup
from tests.waiting import wait_for
from writeback_exporter.exporter import Exporter
from writeback_exporter.files import workload
from writeback_exporter.settings import Settings

ID = "0123456789abcdef" * 4
UID = "01234567-89ab-cdef-0123-456789abcdef"
ANNOTATIONS = {
    "io.kubernetes.cri.container-name": "nginx",
    "io.kubernetes.cri.sandbox-name": "web-0",
    "io.kubernetes.cri.sandbox-namespace": "shop",
    "io.kubernetes.cri.sandbox-uid": UID,
}


@contextmanager
def pod_cgroup(name: str) -> Iterator[Cgroup]:
    """A pod's container below a cgroup of ours, as kubelet makes it with --cgroup-root."""
    with ExitStack() as stack:
        path = name
        for below in ("", "kubepods", "burstable", f"pod{UID}", ID):
            path = f"{path}/{below}" if below else path
            made = stack.enter_context(lab.cgroup(lab.hierarchies().io, path))
        yield made


@pytest.fixture
def top() -> str:
    return f"wbx-workload-{os.getpid()}"


def info(scrape: lab.Scrape, cgroup: Cgroup) -> dict[str, str]:
    """The labels of its one series that are not empty."""
    series = scrape.select("cgroup_info", cgroup=cgroup.label)
    assert list(series.values()) == [1]
    return {name: value for name, value in next(iter(series)) if value and name != "cgroup"}


def info_with_names(exporter: lab.Exporter, cgroup: Cgroup) -> dict[str, str]:
    """They come with a pass of the thread, of which there is one in five seconds."""
    return wait_for(
        lambda: labels if "pod" in (labels := info(exporter.scrape(), cgroup)) else None,
        what="the pod's name",
    )


IN_POD = {"container_id": ID, "pod_uid": UID, "qos_class": "Burstable"}


def test_pod_and_container_of_a_cgroup(top: str, tmp_path: Path) -> None:
    (tmp_path / f"var/log/pods/shop_web-0_{UID}").mkdir(parents=True)
    tasks = tmp_path / "run/containerd/io.containerd.runtime.v2.task/k8s.io"
    (tasks / ID).mkdir(parents=True)
    (tasks / ID / "config.json").write_text(json.dumps({"annotations": ANNOTATIONS}))
    with lab.Exporter(f"--path.rootfs={tmp_path}") as exporter, pod_cgroup(top) as cgroup:
        labels = info_with_names(exporter, cgroup)
    assert labels == IN_POD | {
        "runtime": "containerd",
        "container": "nginx",
        "namespace": "shop",
        "pod": "web-0",
    }


def test_fifo_for_a_file_does_not_block(top: str, tmp_path: Path) -> None:
    (tmp_path / f"var/log/pods/shop_web-0_{UID}").mkdir(parents=True)
    tasks = tmp_path / "run/containerd/io.containerd.runtime.v2.task/k8s.io"
    (tasks / ID).mkdir(parents=True)
    os.mkfifo(tasks / ID / "config.json")
    with lab.Exporter(f"--path.rootfs={tmp_path}") as exporter, pod_cgroup(top) as cgroup:
        # The pod's name comes with the same pass in which the FIFO is looked at.
        assert info_with_names(exporter, cgroup) == IN_POD | {"namespace": "shop", "pod": "web-0"}


@contextmanager
def dead_file_system(directory: Path) -> Iterator[None]:
    """A FUSE file system whose server never answers: whoever looks into it is in D state."""
    libc = ctypes.CDLL(None, use_errno=True)
    directory.mkdir(parents=True)
    try:
        server = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        pytest.skip(f"no FUSE here: {error.strerror}")
    options = f"fd={server},rootmode=40000,user_id=0,group_id=0"
    target = os.fsencode(directory)
    if libc.mount(b"wbx-dead", target, b"fuse", 0, options.encode()) != 0:
        os.close(server)
        pytest.skip(f"no FUSE here: {os.strerror(ctypes.get_errno())}")
    try:
        yield
    finally:
        os.close(server)  # all who wait get an error
        assert libc.umount2(target, 2) == 0  # MNT_DETACH


def sleeping(process: int) -> set[str]:
    """Names of a process's threads in D state."""
    names = set()
    for task in Path(f"/proc/{process}/task").iterdir():
        try:
            text = (task / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
        name, _, rest = text.partition("(")[2].rpartition(")")
        if rest.split()[0] == "D":
            names.add(name)
    return names


def test_dead_disk_hangs_neither_scrapes_nor_the_end(top: str, tmp_path: Path) -> None:
    with (
        pod_cgroup(top) as cgroup,
        dead_file_system(tmp_path / "var/log/pods"),
        lab.Exporter(f"--path.rootfs={tmp_path}") as exporter,
    ):
        hanging = wait_for(
            lambda: sleeping(exporter.process.pid), what="a look into the dead file system"
        )
        assert len(hanging) == 1
        for _ in range(3):
            assert info(exporter.scrape(), cgroup) == IN_POD
        assert exporter.scrape().sum("exporter_collector_success", collector="workload") == 1
        # Others may be in D state for a moment, too; who hangs is there at each look.
        wait_for(lambda: sleeping(exporter.process.pid) == hanging, what="that it still hangs")
        assert exporter.stop() == 0


def test_dead_disk_is_said_once(
    top: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workload, "_HANG_SECONDS", 0.2)
    settings = Settings(
        listen=(),
        telemetry_path="/metrics",
        collectors=frozenset({"workload"}),
        procfs="/proc",
        sysfs="/sys",
        cgroupfs="/sys/fs/cgroup",
        rootfs=str(tmp_path),
    )
    exporter = Exporter(settings)
    with pod_cgroup(top), dead_file_system(tmp_path / "var/log/pods"):
        exporter.start()

        def said() -> bool:
            exporter.collect()
            return "has not answered" in caplog.text

        wait_for(said, what="that it is said")
        exporter.collect()
        exporter.close()
    assert caplog.text.count("has not answered") == 1
