# SPDX-License-Identifier: Apache-2.0
"""What paths tell of workloads: every layout that is known, each with all that must come of it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from writeback_exporter.names.workloads import UNKNOWN, Workload, parse

ID = "0123456789abcdef" * 4
INNER = "fedcba9876543210" * 4
UID = "01234567-89ab-cdef-0123-456789abcdef"
_UID = UID.replace("-", "_")
HASH = "0123456789abcdef0123456789abcdef"
BUILD = "0123456789abcdefghijklmno"
SLUID = "s0123456789ABC"

SYSTEMD = {
    "/": UNKNOWN,
    "/init.scope": Workload(unit="init.scope"),
    "/system.slice": Workload(slice="system.slice"),
    "/system.slice/cron.service": Workload(slice="system.slice", unit="cron.service"),
    # A template's instance, in a slice of its own.
    "/system.slice/system-getty.slice/getty@tty1.service": Workload(
        slice="system-getty.slice", unit="getty@tty1.service"
    ),
    # Names stay escaped, as systemctl shows them.
    r"/system.slice/system-postgresql.slice/postgresql@15\x2dmain.service": Workload(
        slice="system-postgresql.slice", unit=r"postgresql@15\x2dmain.service"
    ),
    r"/system.slice/dev-disk-by\x2duuid-0123.swap": Workload(
        slice="system.slice", unit=r"dev-disk-by\x2duuid-0123.swap"
    ),
    "/system.slice/boot-efi.mount": Workload(slice="system.slice", unit="boot-efi.mount"),
    "/system.slice/sshd.socket": Workload(slice="system.slice", unit="sshd.socket"),
    # Written with _ because it could be a file of the cpu controller.
    "/system.slice/_cpu.service": Workload(slice="system.slice", unit="cpu.service"),
    # Below a unit is its own affair, whatever it looks like.
    "/system.slice/app.service/worker/batch.scope": Workload(
        slice="system.slice", unit="app.service"
    ),
    # Runtimes' daemons are units like any other.
    "/system.slice/docker.service": Workload(slice="system.slice", unit="docker.service"),
    "/system.slice/containerd.service": Workload(slice="system.slice", unit="containerd.service"),
    "/system.slice/docker-cleanup.scope": Workload(
        slice="system.slice", unit="docker-cleanup.scope"
    ),
    "/user.slice": Workload(slice="user.slice"),
    "/user.slice/user-1000.slice": Workload(slice="user-1000.slice", user="1000"),
    "/user.slice/user-1000.slice/session-3.scope": Workload(
        slice="user-1000.slice", unit="session-3.scope", user="1000"
    ),
    "/user.slice/user-1000.slice/user-runtime-dir@1000.service": Workload(
        slice="user-1000.slice", unit="user-runtime-dir@1000.service", user="1000"
    ),
    "/user.slice/user-1000.slice/user@1000.service": Workload(
        slice="user-1000.slice", unit="user@1000.service", user="1000"
    ),
    "/user.slice/user-1000.slice/user@1000.service/init.scope": Workload(
        slice="user-1000.slice", unit="init.scope", user="1000"
    ),
    "/user.slice/user-1000.slice/user@1000.service/app.slice": Workload(
        slice="app.slice", unit="user@1000.service", user="1000"
    ),
    "/user.slice/user-1000.slice/user@1000.service/app.slice/sync.service": Workload(
        slice="app.slice", unit="sync.service", user="1000"
    ),
    (
        "/user.slice/user-1000.slice/user@1000.service/app.slice/app-org.example.slice"
        "/app-flatpak-org.example.Editor-1234.scope"
    ): Workload(
        slice="app-org.example.slice",
        unit="app-flatpak-org.example.Editor-1234.scope",
        user="1000",
    ),
    # Only user.slice has users' slices, and only the first user@ is the system's.
    "/system.slice/user-1000.slice": Workload(slice="user-1000.slice"),
    "/user.slice/user-1.slice/user@1.service/user@2.service/a.service": Workload(
        slice="user-1.slice", unit="user@2.service", user="1"
    ),
}

DOCKER = {
    # systemd driver
    f"/system.slice/docker-{ID}.scope": Workload(
        "docker", ID, slice="system.slice", unit=f"docker-{ID}.scope"
    ),
    # systemd driver, --cgroup-parent
    f"/batch.slice/docker-{ID}.scope": Workload(
        "docker", ID, slice="batch.slice", unit=f"docker-{ID}.scope"
    ),
    # A systemd inside: its units are the payload's.
    f"/system.slice/docker-{ID}.scope/system.slice/nginx.service": Workload(
        "docker", ID, slice="system.slice", unit=f"docker-{ID}.scope"
    ),
    # cgroupfs driver
    f"/docker/{ID}": Workload("docker", ID),
    f"/docker/{ID}/init.scope": Workload("docker", ID),
    f"/docker/{ID}/system.slice/nginx.service": Workload("docker", ID),
    # Docker in Docker: the outermost
    f"/docker/{ID}/docker/{INNER}": Workload("docker", ID),
    # cgroupfs driver, --cgroup-parent: nothing says whose it is
    f"/batch/{ID}": Workload("", ID),
    f"/ecs/{HASH}/{ID}": Workload("", ID),
    # rootless
    f"/user.slice/user-1000.slice/user@1000.service/user.slice/docker-{ID}.scope": Workload(
        "docker", ID, slice="user.slice", unit=f"docker-{ID}.scope", user="1000"
    ),
    # the daemon's own BuildKit, in both drivers, and a buildkitd of its own
    f"/system.slice/docker-{BUILD}.scope": Workload(
        "buildkit", BUILD, slice="system.slice", unit=f"docker-{BUILD}.scope"
    ),
    f"/docker/buildkit/{BUILD}": Workload("buildkit", BUILD),
    f"/buildkit/{BUILD}": Workload("buildkit", BUILD),
    "/docker": UNKNOWN,
    "/docker/short": UNKNOWN,
    f"/docker/{ID[1:]}": UNKNOWN,
    f"/docker/{ID}0": UNKNOWN,
    f"/docker/{ID.upper()}": UNKNOWN,
    f"/system.slice/docker-{ID[1:]}.scope": Workload(
        slice="system.slice", unit=f"docker-{ID[1:]}.scope"
    ),
}

CONTAINERD = {
    f"/system.slice/nerdctl-{ID}.scope": Workload(
        "containerd", ID, slice="system.slice", unit=f"nerdctl-{ID}.scope"
    ),
    # cgroupfs driver: /NAMESPACE/ID, and a namespace may have any name
    f"/default/{ID}": Workload("", ID),
    f"/k8s.io/{ID}": Workload("containerd", ID),
    f"/system.slice/cri-containerd-{ID}.scope": Workload(
        "containerd", ID, slice="system.slice", unit=f"cri-containerd-{ID}.scope"
    ),
    # The OCI runtime's own default: for whom it ran is not known.
    f"/system.slice/runc-{ID}.scope": Workload(
        "", ID, slice="system.slice", unit=f"runc-{ID}.scope"
    ),
    f"/system.slice/myapp-{ID}.scope": Workload(slice="system.slice", unit=f"myapp-{ID}.scope"),
}

PODMAN = {
    f"/machine.slice/libpod-{ID}.scope": Workload(
        "podman", ID, slice="machine.slice", unit=f"libpod-{ID}.scope"
    ),
    f"/machine.slice/libpod-{ID}.scope/container": Workload(
        "podman", ID, slice="machine.slice", unit=f"libpod-{ID}.scope"
    ),
    f"/machine.slice/libpod-{ID}.scope/container/system.slice/nginx.service": Workload(
        "podman", ID, slice="machine.slice", unit=f"libpod-{ID}.scope"
    ),
    # conmon is no container
    f"/machine.slice/libpod-conmon-{ID}.scope": Workload(
        slice="machine.slice", unit=f"libpod-conmon-{ID}.scope"
    ),
    # a pod
    f"/machine.slice/machine-libpod_pod_{INNER}.slice": Workload(
        "podman", pod_uid=INNER, slice=f"machine-libpod_pod_{INNER}.slice"
    ),
    f"/machine.slice/machine-libpod_pod_{INNER}.slice/libpod-{ID}.scope/container": Workload(
        "podman",
        ID,
        pod_uid=INNER,
        slice=f"machine-libpod_pod_{INNER}.slice",
        unit=f"libpod-{ID}.scope",
    ),
    # cgroupfs driver
    f"/libpod_parent/libpod-{ID}": Workload("podman", ID),
    f"/libpod_parent/libpod-{ID}/container": Workload("podman", ID),
    f"/libpod_parent/libpod-conmon-{ID}": UNKNOWN,
    "/libpod_parent/conmon": UNKNOWN,
    f"/libpod_parent/{INNER}": Workload("podman", pod_uid=INNER),
    f"/libpod_parent/{INNER}/conmon": Workload("podman", pod_uid=INNER),
    f"/libpod_parent/{INNER}/libpod-{ID}": Workload("podman", ID, pod_uid=INNER),
    # rootless
    f"/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope": Workload(
        "podman", ID, slice="user.slice", unit=f"libpod-{ID}.scope", user="1000"
    ),
    (
        "/user.slice/user-1000.slice/user@1000.service/user.slice"
        f"/user-libpod_pod_{INNER}.slice/libpod-{ID}.scope/container"
    ): Workload(
        "podman",
        ID,
        pod_uid=INNER,
        slice=f"user-libpod_pod_{INNER}.slice",
        unit=f"libpod-{ID}.scope",
        user="1000",
    ),
    # --cgroups=split (Quadlet): the container below the unit, conmon beside it
    f"/system.slice/web.service/libpod-payload-{ID}": Workload(
        "podman", ID, slice="system.slice", unit="web.service"
    ),
    f"/system.slice/web.service/libpod-payload-{ID}/container": Workload(
        "podman", ID, slice="system.slice", unit="web.service"
    ),
    "/system.slice/web.service/runtime": Workload(slice="system.slice", unit="web.service"),
    "/system.slice/web.service/supervisor": Workload(slice="system.slice", unit="web.service"),
    # builds
    "/system.slice/crun-buildah-buildah123456789.scope": Workload(
        "buildah",
        "buildah-buildah123456789",
        slice="system.slice",
        unit="crun-buildah-buildah123456789.scope",
    ),
    "/user.slice/user-7.slice/user@7.service/app.slice/runc-buildah-buildah12.scope": Workload(
        "buildah",
        "buildah-buildah12",
        slice="app.slice",
        unit="runc-buildah-buildah12.scope",
        user="7",
    ),
    "/buildah-buildah12": Workload("buildah", "buildah-buildah12"),
}

_BURSTABLE = "/kubepods.slice/kubepods-burstable.slice"
_NESTED_BURSTABLE = "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice"

KUBERNETES = {
    "/kubepods.slice": Workload(slice="kubepods.slice"),
    _BURSTABLE: Workload(qos_class="Burstable", slice="kubepods-burstable.slice"),
    f"{_BURSTABLE}/kubepods-burstable-pod{_UID}.slice": Workload(
        pod_uid=UID, qos_class="Burstable", slice=f"kubepods-burstable-pod{_UID}.slice"
    ),
    # systemd driver: containerd, CRI-O and its monitor, Docker
    f"{_BURSTABLE}/kubepods-burstable-pod{_UID}.slice/cri-containerd-{ID}.scope": Workload(
        "containerd",
        ID,
        pod_uid=UID,
        qos_class="Burstable",
        slice=f"kubepods-burstable-pod{_UID}.slice",
        unit=f"cri-containerd-{ID}.scope",
    ),
    f"{_BURSTABLE}/kubepods-burstable-pod{_UID}.slice/crio-{ID}.scope/container": Workload(
        "cri-o",
        ID,
        pod_uid=UID,
        qos_class="Burstable",
        slice=f"kubepods-burstable-pod{_UID}.slice",
        unit=f"crio-{ID}.scope",
    ),
    f"{_BURSTABLE}/kubepods-burstable-pod{_UID}.slice/crio-conmon-{ID}.scope": Workload(
        pod_uid=UID,
        qos_class="Burstable",
        slice=f"kubepods-burstable-pod{_UID}.slice",
        unit=f"crio-conmon-{ID}.scope",
    ),
    (
        "/kubepods.slice/kubepods-besteffort.slice"
        f"/kubepods-besteffort-pod{_UID}.slice/docker-{ID}.scope"
    ): Workload(
        "docker",
        ID,
        pod_uid=UID,
        qos_class="BestEffort",
        slice=f"kubepods-besteffort-pod{_UID}.slice",
        unit=f"docker-{ID}.scope",
    ),
    # guaranteed: no slice between; a static pod's UID is a hash
    f"/kubepods.slice/kubepods-pod{HASH}.slice/cri-containerd-{ID}.scope": Workload(
        "containerd",
        ID,
        pod_uid=HASH,
        qos_class="Guaranteed",
        slice=f"kubepods-pod{HASH}.slice",
        unit=f"cri-containerd-{ID}.scope",
    ),
    # kubelet --cgroup-root=/kubelet
    f"{_NESTED_BURSTABLE}/kubelet-kubepods-burstable-pod{_UID}.slice/cri-containerd-{ID}.scope": (
        Workload(
            "containerd",
            ID,
            pod_uid=UID,
            qos_class="Burstable",
            slice=f"kubelet-kubepods-burstable-pod{_UID}.slice",
            unit=f"cri-containerd-{ID}.scope",
        )
    ),
    # kubelet has the systemd driver, containerd has not
    f"/system.slice/containerd.service/kubepods-burstable-pod{_UID}.slice:cri-containerd:{ID}": (
        Workload(
            "containerd",
            ID,
            pod_uid=UID,
            qos_class="Burstable",
            slice="system.slice",
            unit="containerd.service",
        )
    ),
    # cgroupfs driver
    "/kubepods": UNKNOWN,
    "/kubepods/burstable": Workload(qos_class="Burstable"),
    f"/kubepods/burstable/pod{UID}": Workload(pod_uid=UID, qos_class="Burstable"),
    f"/kubepods/burstable/pod{UID}/{ID}": Workload("", ID, pod_uid=UID, qos_class="Burstable"),
    f"/kubepods/besteffort/pod{UID}/crio-{ID}": Workload(
        "cri-o", ID, pod_uid=UID, qos_class="BestEffort"
    ),
    f"/kubepods/besteffort/pod{UID}/crio-conmon-{ID}": Workload(
        pod_uid=UID, qos_class="BestEffort"
    ),
    f"/kubepods/pod{HASH}/{ID}": Workload("", ID, pod_uid=HASH, qos_class="Guaranteed"),
    f"/custom/root/kubepods/burstable/pod{UID}/{ID}": Workload(
        "", ID, pod_uid=UID, qos_class="Burstable"
    ),
    # inside: a container that makes cgroups, even such as look like another pod
    f"/kubepods/pod{UID}/{ID}/kubepods/besteffort/pod{HASH}/{INNER}": Workload(
        "", ID, pod_uid=UID, qos_class="Guaranteed"
    ),
    f"/kubepods/pod{UID}/{ID}/docker/{INNER}": Workload(
        "", ID, pod_uid=UID, qos_class="Guaranteed"
    ),
    # kind: the node is a container, the pod is the workload
    f"/docker/{ID}/kubelet/kubepods/burstable/pod{UID}/{INNER}": Workload(
        "", INNER, pod_uid=UID, qos_class="Burstable"
    ),
    (
        f"/system.slice/docker-{ID}.scope{_NESTED_BURSTABLE}"
        f"/kubelet-kubepods-burstable-pod{_UID}.slice/cri-containerd-{INNER}.scope"
    ): Workload(
        "containerd",
        INNER,
        pod_uid=UID,
        qos_class="Burstable",
        slice="system.slice",
        unit=f"docker-{ID}.scope",
    ),
    f"/docker/{ID}/kubelet/kubepods": Workload("docker", ID),
    # no pods
    f"/pod{UID}": UNKNOWN,
    f"/pods/pod{UID}/{ID}": Workload("", ID),
    f"/notkubepods/pod{UID}": UNKNOWN,
    f"/kubepods/pod{UID}x": UNKNOWN,
    f"/kubepods/burst/pod{UID}": UNKNOWN,
}

SLURM = {
    "/slurm": UNKNOWN,
    "/slurm/uid_1000": Workload(user="1000"),
    "/slurm/uid_1000/job_12": Workload(user="1000", slurm_job="12"),
    "/slurm/uid_1000/job_12/step_0": Workload(user="1000", slurm_job="12", slurm_step="0"),
    "/slurm/uid_1000/job_12/step_0/task_1": Workload(user="1000", slurm_job="12", slurm_step="0"),
    "/slurm_node-1/uid_1000/job_12/step_batch": Workload(
        user="1000", slurm_job="12", slurm_step="batch"
    ),
    "/slurm/system": UNKNOWN,
    "/system.slice/slurmd.service": Workload(slice="system.slice", unit="slurmd.service"),
    "/system.slice/slurmstepd.scope": Workload(slice="system.slice", unit="slurmstepd.scope"),
    "/system.slice/slurmstepd.scope/system": Workload(
        slice="system.slice", unit="slurmstepd.scope"
    ),
    "/system.slice/slurmstepd.scope/job_12": Workload(
        slice="system.slice", unit="slurmstepd.scope", slurm_job="12"
    ),
    "/system.slice/slurmstepd.scope/job_12/step_batch/user/task_0": Workload(
        slice="system.slice", unit="slurmstepd.scope", slurm_job="12", slurm_step="batch"
    ),
    "/system.slice/slurmstepd.scope/job_12/step_extern/slurm": Workload(
        slice="system.slice", unit="slurmstepd.scope", slurm_job="12", slurm_step="extern"
    ),
    "/system.slice/slurmstepd.scope/job_12/step_interactive/user": Workload(
        slice="system.slice", unit="slurmstepd.scope", slurm_job="12", slurm_step="interactive"
    ),
    # a component of a heterogeneous job
    "/system.slice/slurmstepd.scope/job_12/step_0+1/user/task_special": Workload(
        slice="system.slice", unit="slurmstepd.scope", slurm_job="12", slurm_step="0+1"
    ),
    "/system.slice/node-1_slurmstepd.scope/job_12/step_3": Workload(
        slice="system.slice", unit="node-1_slurmstepd.scope", slurm_job="12", slurm_step="3"
    ),
    # 26.05: named by the SLUID
    f"/system.slice/slurmstepd.scope/{SLUID}/step_0/user/task_0": Workload(
        slice="system.slice", unit="slurmstepd.scope", slurm_job=SLUID, slurm_step="0"
    ),
    f"/system.slice/node-1_slurmstepd.scope/{SLUID}": Workload(
        slice="system.slice", unit="node-1_slurmstepd.scope", slurm_job=SLUID
    ),
    f"/system.slice/slurmstepd.scope/{SLUID}0": Workload(
        slice="system.slice", unit="slurmstepd.scope"
    ),
    "/system.slice/slurmstepd.scope/job_12x/step_0": Workload(
        slice="system.slice", unit="slurmstepd.scope"
    ),
    # slurmd in a pod: both
    f"/kubepods/pod{UID}/{ID}/system.slice/slurmstepd.scope/job_12/step_0": Workload(
        "", ID, pod_uid=UID, qos_class="Guaranteed", slurm_job="12", slurm_step="0"
    ),
    # a container in a job: both
    f"/slurm/uid_1000/job_12/step_0/libpod-{ID}": Workload(
        "podman", ID, user="1000", slurm_job="12", slurm_step="0"
    ),
    "/job_12/step_0": UNKNOWN,
    "/batch/uid_1000/job_12": UNKNOWN,
}

MACHINES = {
    "/lxc/web": Workload("lxc", container="web"),
    "/lxc/101/ns/system.slice/nginx.service": Workload("lxc", container="101"),
    "/lxc.payload.web": Workload("lxc", container="web"),
    "/lxc.payload.project_web/system.slice/nginx.service": Workload("lxc", container="project_web"),
    "/lxc.payload/web/init.scope": Workload("lxc", container="web"),
    "/lxc.payload.web/lxc.payload.inner": Workload("lxc", container="web"),
    f"/lxc.payload.web/docker/{ID}": Workload("lxc", container="web"),
    "/lxc": UNKNOWN,
    "/lxc.monitor.web": UNKNOWN,
    "/lxc.monitor/web": UNKNOWN,
    "/lxc.pivot": UNKNOWN,
    # lxc.cgroup.pattern = lxc/%n
    "/lxc/web/lxc.payload/init.scope": Workload("lxc", container="web"),
    "/lxc/web/lxc.monitor": UNKNOWN,
    "/user.slice/user-1000.slice/session-3.scope/lxc.payload.web": Workload(
        "lxc", container="web", slice="user-1000.slice", unit="session-3.scope", user="1000"
    ),
    "/machine.slice/machine-web.scope": Workload(
        "systemd-nspawn", container="web", slice="machine.slice", unit="machine-web.scope"
    ),
    r"/machine.slice/machine-web\x2d1.scope/payload/system.slice/nginx.service": Workload(
        "systemd-nspawn",
        container="web-1",
        slice="machine.slice",
        unit=r"machine-web\x2d1.scope",
    ),
    "/machine.slice/systemd-nspawn@web.service/payload": Workload(
        "systemd-nspawn", container="web", slice="machine.slice", unit="systemd-nspawn@web.service"
    ),
    # systemd-nspawn itself is no container
    "/machine.slice/systemd-nspawn@web.service/supervisor": Workload(
        slice="machine.slice", unit="systemd-nspawn@web.service"
    ),
    "/system.slice/machine-web.scope": Workload(slice="system.slice", unit="machine-web.scope"),
    r"/machine.slice/machine-qemu\x2d1\x2dvm.scope": Workload(
        "libvirt",
        container="qemu-1-vm",
        slice="machine.slice",
        unit=r"machine-qemu\x2d1\x2dvm.scope",
    ),
    r"/machine.slice/machine-qemu\x2d12\x2ddb\x2dprod.scope/libvirt/vcpu0": Workload(
        "libvirt",
        container="qemu-12-db-prod",
        slice="machine.slice",
        unit=r"machine-qemu\x2d12\x2ddb\x2dprod.scope",
    ),
    # no systemd on the host
    "/machine/qemu-1-vm.libvirt-qemu/emulator": Workload("libvirt", container="qemu-1-vm"),
}

PLAIN = dict.fromkeys(
    ["/batch", "/batch/nightly", f"/agents/{HASH}", "/a.b/c", "/.slice", "/.service"], UNKNOWN
)

LAYOUTS = SYSTEMD | DOCKER | CONTAINERD | PODMAN | KUBERNETES | SLURM | MACHINES | PLAIN


@pytest.mark.parametrize("path", LAYOUTS)
def test_path(path: str) -> None:
    assert parse(path) == LAYOUTS[path]


@pytest.mark.parametrize("label", ["", "unattributed", "other"])
def test_label_that_is_no_path(label: str) -> None:
    assert parse(label) == UNKNOWN


PIECES = st.sampled_from(sorted({part for path in LAYOUTS for part in path.split("/")}))
PATHS = st.lists(PIECES | st.text(max_size=8) | st.just("x" * 255), max_size=9).map(
    lambda parts: "/" + "/".join(parts)
)
FORMS = {
    "runtime": "|docker|containerd|cri-o|podman|buildkit|buildah|lxc|systemd-nspawn|libvirt",
    "container_id": "|[0-9a-f]{64}|[0-9a-z]{25}|buildah-buildah[0-9]+",
    "container": "|.+",
    "pod_uid": "|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}|[0-9a-f]{64}",
    "qos_class": "|Guaranteed|Burstable|BestEffort",
    "slice": r"|[^/]+\.slice",
    "unit": r"|[^/]+\.(service|scope|socket|mount|swap)",
    "user": "|[0-9]+",
    "slurm_job": "|[0-9]+|s[0-9A-Z]{13}",
    "slurm_step": "|[0-9A-Za-z+]+",
}


@given(PATHS | st.text(max_size=300))
def test_any_path_has_labels_of_the_forms_that_are_promised(path: str) -> None:
    workload = parse(path)
    for name in Workload.__slots__:
        assert re.fullmatch(FORMS[name], getattr(workload, name), re.DOTALL | re.ASCII), name
    assert parse(path) == workload


@given(PATHS)
def test_what_is_below_a_container_tells_nothing_more_than_slurm(payload: str) -> None:
    outer = f"/kubepods/pod{UID}/{ID}"
    inner = parse(outer + payload)
    alone = parse(outer)
    for name in set(Workload.__slots__) - {"slurm_job", "slurm_step", "user"}:
        assert getattr(inner, name) == getattr(alone, name), name


@given(PATHS)
def test_a_docker_container_is_itself_unless_a_pod_runs_in_it(payload: str) -> None:
    inner = parse(f"/system.slice/docker-{ID}.scope{payload}")
    assert inner.unit == f"docker-{ID}.scope"
    if not inner.qos_class:
        assert (inner.runtime, inner.container_id) == ("docker", ID)
