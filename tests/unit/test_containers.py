# SPDX-License-Identifier: Apache-2.0
"""Names of pods and containers from fixture trees: each runtime's files, and files gone wrong."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from writeback_exporter.names import containers as module
from writeback_exporter.names.containers import Container, Names, Pod, Search
from writeback_exporter.names.workloads import Workload

ROOT = Path(__file__).parents[2]
ID = "0123456789abcdef" * 4
OTHER_ID = "fedcba9876543210" * 4
UID = "01234567-89ab-cdef-0123-456789abcdef"
HASH = "0123456789abcdef0123456789abcdef"
IN_POD = Workload(container_id=ID, pod_uid=UID, qos_class="Burstable")
ALONE = Workload(container_id=ID)
POD = Pod("shop", "web-0")

CRI = {
    "io.kubernetes.cri.container-type": "container",
    "io.kubernetes.cri.container-name": "nginx",
    "io.kubernetes.cri.sandbox-name": "web-0",
    "io.kubernetes.cri.sandbox-namespace": "shop",
    "io.kubernetes.cri.sandbox-uid": UID,
}
KUBELET = {
    "io.kubernetes.container.name": "nginx",
    "io.kubernetes.pod.name": "web-0",
    "io.kubernetes.pod.namespace": "shop",
    "io.kubernetes.pod.uid": UID,
}
CONTAINERD = f"run/containerd/io.containerd.runtime.v2.task/k8s.io/{ID}/config.json"
K3S = f"run/k3s/containerd/io.containerd.runtime.v2.task/k8s.io/{ID}/config.json"
NERDCTL = f"run/containerd/io.containerd.runtime.v2.task/default/{ID}/config.json"
MOBY = f"run/containerd/io.containerd.runtime.v2.task/moby/{ID}/config.json"
CRIO_RUN = f"run/containers/storage/overlay-containers/{ID}/userdata/config.json"
CRIO_LIB = f"var/lib/containers/storage/overlay-containers/{ID}/userdata/config.json"
DOCKER = f"var/lib/docker/containers/{ID}/config.v2.json"
PODMAN = "var/lib/containers/storage/overlay-containers/containers.json"
VOLATILE = "run/containers/storage/overlay-containers/volatile-containers.json"


def write(root: Path, path: str, content: object) -> Path:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def found(root: Path, *workloads: Workload) -> Names:
    return Search(str(root)).find(workloads, 0.0)


# kubelet's files ----------------------------------------------------------------------------------


@pytest.mark.parametrize("uid", [UID, HASH], ids=["pod", "static pod"])
def test_pod_by_its_log_directory(tmp_path: Path, uid: str) -> None:
    (tmp_path / f"var/log/pods/shop_web-0_{uid}/nginx").mkdir(parents=True)
    (tmp_path / f"var/log/pods/shop_web-1_{OTHER_ID}").mkdir()
    names = found(tmp_path, Workload(pod_uid=uid, qos_class="Guaranteed"))
    assert names == Names({uid: POD}, {})


def test_directories_of_other_forms_are_left_out(tmp_path: Path) -> None:
    for name in (f"shop_web-0_x_{UID}", f"shop_{UID}", f"_web-0_{UID}", f"__{UID}", UID):
        (tmp_path / "var/log/pods" / name).mkdir(parents=True)
    assert found(tmp_path, IN_POD) == Names()


def test_name_that_is_no_utf_8_is_kept(tmp_path: Path) -> None:
    os.makedirs(os.fsencode(tmp_path) + b"/var/log/pods/shop_\xff_" + UID.encode())
    assert found(tmp_path, IN_POD).pods == {UID: Pod("shop", "\udcff")}


def test_container_by_the_name_of_its_log(tmp_path: Path) -> None:
    logs = tmp_path / "var/log/containers"
    logs.mkdir(parents=True)
    (logs / f"web-0_shop_nginx-{ID}.log").symlink_to("/var/log/pods/nowhere/0.log")
    (logs / f"web-0_shop_nginx-{ID[1:]}.log").touch()
    assert found(tmp_path, IN_POD) == Names({}, {ID: Container("", "nginx")})


# Runtimes' files ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "target",
    ["/data/docker", "../../data/docker", "../../../../data/docker", "/x/../data/./docker"],
)
def test_links_lead_to_what_is_there_for_the_host(tmp_path: Path, target: str) -> None:
    """Docker's directory is on another disk; not on our own root's, which has such a path too."""
    write(tmp_path, f"data/docker/containers/{ID}/config.v2.json", {"Name": "/web"})
    (tmp_path / "x").mkdir()
    (tmp_path / "var/lib").mkdir(parents=True)
    (tmp_path / "var/lib/docker").symlink_to(target)
    assert found(tmp_path, IN_POD).containers == {ID: Container("docker", "web")}


def test_links_in_a_circle(tmp_path: Path) -> None:
    (tmp_path / "var/lib").mkdir(parents=True)
    (tmp_path / "var/lib/docker").symlink_to("/var/lib/docker/x")
    assert found(tmp_path, IN_POD) == Names()


@pytest.mark.parametrize(
    ("path", "content", "runtime"),
    [
        (CONTAINERD, {"annotations": CRI}, "containerd"),
        (K3S, {"annotations": CRI}, "containerd"),
        (CRIO_RUN, {"annotations": KUBELET}, "cri-o"),
        (CRIO_LIB, {"annotations": KUBELET}, "cri-o"),
        (DOCKER, {"Name": "/k8s_nginx_web-0", "Config": {"Labels": KUBELET}}, "docker"),
    ],
)
def test_container_of_a_pod(tmp_path: Path, path: str, content: object, runtime: str) -> None:
    write(tmp_path, path, content)
    assert found(tmp_path, IN_POD) == Names({UID: POD}, {ID: Container(runtime, "nginx")})


@pytest.mark.parametrize(
    ("path", "content", "container"),
    [
        (DOCKER, {"Name": "/web", "Config": {"Labels": {}}}, Container("docker", "web")),
        (DOCKER, {"Name": "/web", "Config": {"Labels": None}}, Container("docker", "web")),
        (NERDCTL, {"annotations": {"nerdctl/name": "web"}}, Container("containerd", "web")),
        (NERDCTL, {"process": {}}, Container("containerd", "")),
        (PODMAN, [{"id": ID, "names": ["web", "alias"]}], Container("podman", "web")),
        (VOLATILE, [{"id": ID, "names": ["web"]}], Container("podman", "web")),
    ],
)
def test_container_alone(tmp_path: Path, path: str, content: object, container: Container) -> None:
    write(tmp_path, path, content)
    assert found(tmp_path, ALONE, Workload(container_id=OTHER_ID)) == Names({}, {ID: container})


def test_sandbox_has_no_container_name(tmp_path: Path) -> None:
    write(
        tmp_path, DOCKER, {"Config": {"Labels": KUBELET | {"io.kubernetes.container.name": "POD"}}}
    )
    assert found(tmp_path, IN_POD) == Names({UID: POD}, {ID: Container("docker", "")})
    of_sandbox = {k: v for k, v in CRI.items() if k != "io.kubernetes.cri.container-name"}
    other = write(tmp_path / "other", CONTAINERD, {"annotations": of_sandbox})
    assert other.exists()
    assert found(tmp_path / "other", IN_POD).containers == {ID: Container("containerd", "")}


def test_docker_has_told_already_what_its_containerd_knows(tmp_path: Path) -> None:
    write(tmp_path, MOBY, {"annotations": {}})
    assert found(tmp_path, ALONE) == Names()


def test_podman_keeps_no_name_where_cri_o_does(tmp_path: Path) -> None:
    write(tmp_path, CRIO_LIB, {"annotations": {"io.container.manager": "libpod"}})
    write(tmp_path, PODMAN, [{"id": ID, "names": ["web"]}])
    assert found(tmp_path, ALONE).containers == {ID: Container("podman", "web")}


@pytest.mark.parametrize(
    "workload", [ALONE, Workload(container_id=ID, pod_uid=HASH, qos_class="Guaranteed")]
)
def test_labels_do_not_make_a_container_one_of_a_pod(tmp_path: Path, workload: Workload) -> None:
    # docker run --label io.kubernetes.pod.name=... is for everybody.
    write(tmp_path, DOCKER, {"Name": "/web", "Config": {"Labels": KUBELET}})
    assert found(tmp_path, workload).pods == {}


def test_kubelet_knows_a_pod_better_than_the_runtime(tmp_path: Path) -> None:
    write(tmp_path, CONTAINERD, {"annotations": CRI | {"io.kubernetes.cri.sandbox-name": "else"}})
    (tmp_path / f"var/log/pods/shop_web-0_{UID}").mkdir(parents=True)
    assert found(tmp_path, IN_POD).pods == {UID: POD}


def test_containerd_before_1_6_has_no_uid(tmp_path: Path) -> None:
    annotations = {k: v for k, v in CRI.items() if k != "io.kubernetes.cri.sandbox-uid"}
    write(tmp_path, CONTAINERD, {"annotations": annotations})
    assert found(tmp_path, IN_POD).pods == {UID: POD}


# Files gone wrong ---------------------------------------------------------------------------------


def _fifo(file: Path) -> None:
    os.mkfifo(file)


def _device(file: Path) -> None:
    os.mknod(file, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero has no end


def _huge(file: Path) -> None:
    file.write_text(json.dumps({"annotations": CRI}) + " " * module._FILE_BYTES)


def _loop(file: Path) -> None:
    file.symlink_to(file.name)


def _link(file: Path) -> None:
    target = file.with_name("elsewhere")
    target.write_text(json.dumps({"annotations": CRI}))
    file.symlink_to(target)


def _closed(file: Path) -> None:
    file.parent.rmdir()
    file.parent.symlink_to(
        file.parent.name
    )  # root may read all, so a loop for what may not be read


BROKEN: Mapping[str, Callable[[Path], object]] = {
    "fifo": _fifo,
    "directory": lambda file: file.mkdir(),
    "huge": _huge,
    "loop": _loop,
    "link": _link,
    "unreachable": _closed,
    "empty": lambda file: file.touch(),
    "cut off": lambda file: file.write_text('{"annotations": {"io.kube'),
    "deep": lambda file: file.write_text("[" * 100_000),
    "number": lambda file: file.write_text("9" * 100_000),
    "binary": lambda file: file.write_bytes(bytes(range(256))),
    "null": lambda file: file.write_text("null"),
    "list": lambda file: file.write_text("[{}, 1]"),
}


@pytest.mark.parametrize("how", BROKEN)
@pytest.mark.parametrize("path", [CONTAINERD, CRIO_LIB, DOCKER, PODMAN])
def test_broken_file_is_as_none(tmp_path: Path, path: str, how: str) -> None:
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    BROKEN[how](file)
    (tmp_path / f"var/log/pods/shop_web-0_{UID}").mkdir(parents=True)
    before = os.listdir("/proc/self/fd")
    assert found(tmp_path, IN_POD) == Names({UID: POD}, {})
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes devices")
def test_device_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / CONTAINERD
    file.parent.mkdir(parents=True)
    _device(file)
    assert found(tmp_path, IN_POD) == Names()


def test_file_that_may_not_be_read_is_as_none_and_the_problem(tmp_path: Path) -> None:
    file = write(tmp_path, CONTAINERD, {"annotations": CRI})
    file.chmod(0)
    code = (
        "from tests.unit.test_containers import *\n"
        f"search = Search({str(tmp_path)!r})\n"
        "print(search.find([ALONE], 0.0) == Names(), search.problem)"
    )
    # Root without its capabilities is the owner, whom the mode binds.
    drop = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    done = subprocess.run(
        [*drop, sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == f"True [Errno 13] Permission denied: '{file}'\n"


def test_files_that_vanish_meanwhile(tmp_path: Path) -> None:
    rounds = 200

    def churn() -> None:
        for _ in range(rounds):
            write(tmp_path, CONTAINERD, {"annotations": CRI})
            write(tmp_path, f"var/log/pods/shop_web-0_{UID}/nginx/0.log", "")
            shutil.rmtree(tmp_path / "run")
            shutil.rmtree(tmp_path / "var")

    thread = threading.Thread(target=churn)
    thread.start()
    results = set()
    while thread.is_alive():
        names = found(tmp_path, IN_POD)
        results |= {*names.pods.values(), *names.containers.values()}
    thread.join()
    assert results <= {POD, Container("containerd", "nginx")}


def test_fifo_is_not_read_even_if_somebody_writes(tmp_path: Path) -> None:
    fifo = tmp_path / CONTAINERD
    fifo.parent.mkdir(parents=True)
    os.mkfifo(fifo)
    text = json.dumps({"annotations": CRI}).encode()
    writer = os.open(fifo, os.O_RDWR)
    try:
        os.write(writer, text)
        assert found(tmp_path, IN_POD) == Names()
        assert os.read(writer, len(text)) == text
    finally:
        os.close(writer)


@pytest.mark.parametrize(
    "content",
    [
        {"annotations": None},
        {"annotations": ["io.kubernetes.cri.container-name"]},
        {"annotations": CRI | {"io.kubernetes.cri.sandbox-name": 7}},
        {"annotations": CRI | {"io.kubernetes.cri.sandbox-name": "x" * 257}},
    ],
)
def test_annotations_of_other_kinds_name_no_pod(tmp_path: Path, content: object) -> None:
    write(tmp_path, CONTAINERD, content)
    assert found(tmp_path, IN_POD) == Names({}, {ID: Container("containerd", "")})


@pytest.mark.parametrize(
    "entry",
    [
        7,
        None,
        {},
        {"id": ID},
        {"id": ID, "names": "web"},
        {"id": ID, "names": []},
        {"id": 7, "names": ["web"]},
    ],
)
def test_podman_entries_of_other_kinds_are_left_out(tmp_path: Path, entry: object) -> None:
    write(tmp_path, PODMAN, [entry, {"id": OTHER_ID, "names": ["web"]}])
    names = found(tmp_path, ALONE, Workload(container_id=OTHER_ID))
    assert names.containers == {OTHER_ID: Container("podman", "web")}


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["annotations", "Name", "Config", "Labels", "id", "names", *CRI, *KUBELET]
            ),
            inner | st.sampled_from([ID, UID]),
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(content=JSON)
def test_any_json_gives_text_or_nothing(
    content: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("root")
    for path in (CONTAINERD, CRIO_RUN, DOCKER, PODMAN):
        write(root, path, content)
        names = found(root, IN_POD)
        assert set(names.pods) <= {UID}
        assert set(names.containers) <= {ID}
        for pod in names.pods.values():
            assert isinstance(pod.name + pod.namespace, str)
        for container in names.containers.values():
            assert isinstance(container.runtime + container.name, str)
        (root / path).unlink()


# From pass to pass --------------------------------------------------------------------------------


def test_directory_that_cannot_be_read_is_the_problem_until_it_can(tmp_path: Path) -> None:
    search = Search(str(tmp_path))
    search.find([ALONE], 0.0)
    assert search.problem is None  # no pod was asked for
    search.find([IN_POD], 1.0)
    assert isinstance(search.problem, FileNotFoundError)
    assert search.problem.filename == str(tmp_path / "var/log/pods")
    (tmp_path / f"var/log/pods/shop_web-0_{UID}").mkdir(parents=True)
    assert search.find([IN_POD], 100.0).pods == {UID: POD}
    assert search.problem is None


def test_what_is_found_is_not_looked_for_again(tmp_path: Path) -> None:
    file = write(tmp_path, CONTAINERD, {"annotations": CRI})
    search = Search(str(tmp_path))
    names = search.find([IN_POD], 0.0)
    file.unlink()
    assert search.find([IN_POD], 1000.0) is names


def test_what_is_not_found_is_looked_for_ever_more_seldom(tmp_path: Path) -> None:
    search = Search(str(tmp_path))
    looks: list[int] = []
    for second in range(2000):
        search.problem = None
        search.find([IN_POD], float(second))
        if search.problem:
            looks.append(second)
    assert looks == [0, 5, 15, 35, 75, 155, 315, 615, 915, 1215, 1515, 1815]


def test_names_that_nobody_asks_for_are_dropped(tmp_path: Path) -> None:
    write(tmp_path, CONTAINERD, {"annotations": CRI})
    search = Search(str(tmp_path))
    assert search.find([IN_POD, Workload(container_id=OTHER_ID)], 0.0) != Names()
    assert search.find([], 1.0) == Names()
    assert search._retries == {}


def test_a_pass_has_a_bound_and_the_next_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_CONTAINERS_A_PASS", 3)
    listed = [{"id": f"{n:064x}", "names": [f"c{n}"]} for n in range(7)]
    write(tmp_path, PODMAN, listed)
    workloads = [Workload(container_id=f"{n:064x}") for n in range(10)]
    search = Search(str(tmp_path))
    sizes = [len(search.find(workloads, float(second)).containers) for second in range(4)]
    assert sizes[-1] == 7
    assert all(later - earlier <= 3 for earlier, later in zip([0, *sizes], sizes, strict=False))


def test_a_listing_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_DIRECTORY_ENTRIES", 10)
    uids = [f"{n:032x}" for n in range(20)]
    for uid in uids:
        (tmp_path / f"var/log/pods/shop_web-0_{uid}").mkdir(parents=True)
    workloads = [Workload(pod_uid=uid, qos_class="Burstable") for uid in uids]
    assert len(found(tmp_path, *workloads).pods) == 10
