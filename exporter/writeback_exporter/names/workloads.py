# SPDX-License-Identifier: Apache-2.0
r"""Paths to workloads: what a cgroup's path tells of the unit, container, pod or job that it is.

Pure functions over paths. What a path does not tell stays empty: nothing is guessed, and a name
that is only like a runtime's (`/system.slice/docker.service`) is what systemd calls it. Where the
layouts come from: docs/identity.md.

A path can be several things at once, and each is looked for by itself:

- **systemd**: slices from the top, then one unit, as systemd reads it. What lies below a unit is
  the unit's own affair, except below user@UID.service, whose manager has slices and units too.
- **container**: the outermost one. What runs inside, be it a systemd or another Docker, is its
  payload, whose names mean nothing on this host, and which its owner can choose.
- **pod**: the outermost one, and it wins over containers around it: where a node is itself a
  container (kind, k3d), the pod is the workload.
- **Slurm**: the job and step, be it inside a container (slurmd in a pod) or not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Workload:
    """What a path tells; the fields are labels of writeback_cgroup_info, empty if not known."""

    runtime: str = ""
    """docker, containerd, cri-o, podman, buildkit, buildah, lxc, systemd-nspawn or libvirt."""
    container_id: str = ""
    container: str = ""
    """Name of the container or machine, of the few runtimes whose paths have one."""
    pod_uid: str = ""
    """UID of a Kubernetes pod, a UUID or, of a static pod, 32 hexadecimal digits; or the id of a
    Podman pod, which has 64."""
    qos_class: str = ""
    """As Kubernetes writes it: Guaranteed, Burstable or BestEffort."""
    slice: str = ""
    unit: str = ""
    user: str = ""
    """A user's number."""
    slurm_job: str = ""
    """Number of the job; or its SLUID, an s and 13 letters and digits, where Slurm names the
    directory so (26.05 and later, unless CgroupJobIdPaths=yes). The path has no number then."""
    slurm_step: str = ""


UNKNOWN = Workload()
"""The one object of that value that `parse` gives."""


def parse(path: str) -> Workload:
    """What a path below a hierarchy's root, as in the label `cgroup`, tells of its workload."""
    parts = path.split("/")[1:]
    place = _systemd(parts)
    slurm = _slurm(path)
    workload = replace(
        _pod(path) or _container(parts, place) or _qos_group(path),
        slice=place.slice,
        unit=place.unit,
        user=place.user or slurm.get("uid", ""),
        slurm_job=slurm.get("job") or slurm.get("sluid", ""),
        slurm_step=slurm.get("step", ""),
    )
    return UNKNOWN if workload == UNKNOWN else workload


# systemd ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Place:
    slice: str = ""
    unit: str = ""
    user: str = ""


# Characters of unit names: VALID_CHARS in systemd's src/basic/unit-name.c.
_SLICE = re.compile(r"[\w:.\\-]+\.slice", re.ASCII)
_UNIT = re.compile(r"[\w:.\\@-]+\.(?:service|scope|socket|mount|swap)", re.ASCII)
_USER_SLICE = re.compile(r"user-([0-9]+)\.slice")
_USER_MANAGER = re.compile(r"user@([0-9]+)\.service")


def _systemd(parts: Sequence[str]) -> _Place:
    place = _Place()
    managed = False
    for part in parts:
        # systemd writes _ before a name that could be a kernel's file (cg_escape).
        name = part.removeprefix("_")
        if _SLICE.fullmatch(name):
            user = _USER_SLICE.fullmatch(name) if place.slice == "user.slice" else None
            place.slice = name
        elif _UNIT.fullmatch(name):
            user = None if managed else _USER_MANAGER.fullmatch(name)
            place.unit = name
            if not user:
                break
            managed = True
        else:
            break
        if user:
            place.user = user[1]
    return place


# Kubernetes ---------------------------------------------------------------------------------------

_HEX = "[0-9a-f]"
# kubelet gives a static pod a hash for a UID. In slices, - is _, since there it means "below".
_POD_UID = f"{_HEX}{{8}}(?:[-_]{_HEX}{{4}}){{3}}[-_]{_HEX}{{12}}|{_HEX}{{32}}"
_QOS_CLASSES = {None: "Guaranteed", "burstable": "Burstable", "besteffort": "BestEffort"}
# A slice that --cgroup-root lies above has its name before it: kubelet-kubepods-pod....slice. A
# colon follows where kubelet has the systemd driver and containerd has not.
_POD = re.compile(
    "/(?:"
    r"(?:[^/:]+-)?kubepods(?:-(?P<slice_qos>burstable|besteffort))?"
    rf"-pod(?P<slice_uid>{_POD_UID})\.slice(?![^/:])"
    "|"
    rf"kubepods(?:/(?P<qos>burstable|besteffort))?/pod(?P<uid>{_POD_UID})(?![^/])"
    ")"
)
_QOS_GROUP = re.compile(
    r"/(?:(?:[^/:]+-)?kubepods-(burstable|besteffort)\.slice|kubepods/(burstable|besteffort))\Z"
)


def _pod(path: str) -> Workload | None:
    pod = _POD.search(path)
    if not pod:
        return None
    below = path[pod.end() + 1 :].split("/", 1)[0]
    runtime, container_id = _container_id("", below.replace(":", "-"))
    return Workload(
        runtime=runtime,
        container_id=container_id,
        pod_uid=(pod["slice_uid"] or pod["uid"]).replace("_", "-"),
        qos_class=_QOS_CLASSES[pod["slice_qos"] or pod["qos"]],
    )


def _qos_group(path: str) -> Workload:
    """The parent of all pods of a class."""
    group = _QOS_GROUP.search(path)
    return Workload(qos_class=_QOS_CLASSES[group[1] or group[2]]) if group else UNKNOWN


# Containers and machines --------------------------------------------------------------------------

_ID = re.compile(f"{_HEX}{{64}}")
# Monitors of containers (libpod-conmon-, crio-conmon-, lxc.monitor.) do not match, for they are
# none; but some lie below a directory with the container's name.
_MONITOR = {"lxc": ["lxc.monitor"], "systemd-nspawn": ["supervisor"]}
_MARKED_ID = re.compile(
    "(?P<marker>docker|nerdctl|cri-containerd|crio|libpod|libpod-payload|runc|crun)"
    rf"-(?P<id>{_HEX}{{64}})(?:\.scope)?"
)
_RUNTIMES = {
    "docker": "docker",
    "nerdctl": "containerd",
    "cri-containerd": "containerd",
    "crio": "cri-o",
    "libpod": "podman",
    "libpod-payload": "podman",
    # The OCI runtime's own choice of a name: for whom it ran is not known.
    "runc": "",
    "crun": "",
}
_RUNTIME_OF_PARENT = {"docker": "docker", "k8s.io": "containerd"}
"""Of containers whose directories have just the id for a name."""
_BUILDKIT_ID = re.compile("[0-9a-z]{25}")
_BUILDKIT_SCOPE = re.compile(r"docker-([0-9a-z]{25})\.scope")
_BUILDAH = re.compile(r"(?:(?:crun|runc)-)?(buildah-buildah[0-9]+)(?:\.scope)?")
_PODMAN_POD = re.compile(rf"(?:.+-)?libpod_pod_({_HEX}{{64}})\.slice")
_LXC = re.compile(r"lxc\.payload\.(.+)", re.DOTALL)
_MACHINE_SCOPE = re.compile(r"machine-(.+)\.scope")
_NSPAWN = re.compile(r"systemd-nspawn@(.+)\.service")
_LIBVIRT_MACHINE = re.compile(r"(?:qemu|lxc|xen|ch|bhyve)-[0-9]+-.+")
_LIBVIRT = re.compile(r"(.+)\.libvirt-(?:qemu|lxc)", re.DOTALL)


def _container(parts: Sequence[str], place: _Place) -> Workload | None:
    """The outermost container or machine, and the Podman pod that it is in."""
    podman_pod = ""
    parents = ("", *parts)
    for depth, (parent, part) in enumerate(zip(parents, parts, strict=False)):
        pod = _PODMAN_POD.fullmatch(part)
        if pod:
            podman_pod = pod[1]
            continue
        if parent == "libpod_parent" and _ID.fullmatch(part):
            podman_pod = part
            continue
        runtime, container_id = _container_id(parent, part)
        if container_id:
            return Workload(runtime, container_id, pod_uid=podman_pod)
        runtime, name = _machine(place) if part == place.unit else _named(parent, part, depth)
        if name and parts[depth + 1 : depth + 2] != _MONITOR.get(runtime):
            return Workload(runtime, container=name)
    return Workload("podman", pod_uid=podman_pod) if podman_pod else None


def _container_id(parent: str, part: str) -> tuple[str, str]:
    """(runtime, id) of a directory whose name has a container's id, or two empty strings."""
    marked = _MARKED_ID.fullmatch(part)
    if marked:
        return _RUNTIMES[marked["marker"]], marked["id"]
    if _ID.fullmatch(part):
        return _RUNTIME_OF_PARENT.get(parent, ""), part
    buildkit = _BUILDKIT_SCOPE.fullmatch(part)
    if buildkit:
        return "buildkit", buildkit[1]
    if parent == "buildkit" and _BUILDKIT_ID.fullmatch(part):
        return "buildkit", part
    buildah = _BUILDAH.fullmatch(part)
    return ("buildah", buildah[1]) if buildah else ("", "")


def _machine(place: _Place) -> tuple[str, str]:
    """(runtime, name) of a unit that is a machine (systemd-machined), or two empty strings."""
    nspawn = _NSPAWN.fullmatch(place.unit)
    scope = _MACHINE_SCOPE.fullmatch(place.unit) if place.slice == "machine.slice" else None
    machine = nspawn or scope
    if not machine:
        return "", ""
    name = _ESCAPED.sub(lambda escaped: chr(int(escaped[1], 16)), machine[1])
    return "libvirt" if _LIBVIRT_MACHINE.fullmatch(name) else "systemd-nspawn", name


_ESCAPED = re.compile(r"\\x([2-7][0-9a-f])")
"""How systemd writes an ASCII character that a unit's name may not have."""


def _named(parent: str, part: str, depth: int) -> tuple[str, str]:
    """(runtime, name) of a directory whose name has a container's name, or two empty strings."""
    lxc = _LXC.fullmatch(part)
    if lxc:
        return "lxc", lxc[1]
    if part and (parent == "lxc.payload" or (parent == "lxc" and depth == 1)):
        return "lxc", part
    libvirt = _LIBVIRT.fullmatch(part) if parent == "machine" else None
    return ("libvirt", libvirt[1]) if libvirt else ("", "")


# Slurm --------------------------------------------------------------------------------------------

# Where several slurmd share a node, its name is in the root's: slurm_NODE, NODE_slurmstepd.scope.
_STEP = r"/step_(?P<step>[0-9A-Za-z+]+)"
_SLURM_V1 = re.compile(
    rf"/slurm(?:_[^/]+)?/uid_(?P<uid>[0-9]+)(?:/job_(?P<job>[0-9]+)(?:{_STEP})?)?(?![^/])"
)
# A SLUID is an s and 13 digits of Crockford's base 32 (Slurm's src/common/sluid.c).
_SLURM_V2 = re.compile(
    r"/(?:[^/]+_)?slurmstepd\.scope"
    rf"/(?:job_(?P<job>[0-9]+)|(?P<sluid>s[0-9A-HJKMNP-TV-Z]{{13}}))(?:{_STEP})?(?![^/])"
)


def _slurm(path: str) -> dict[str, str]:
    found = _SLURM_V1.search(path) or _SLURM_V2.search(path)
    return found.groupdict(default="") if found else {}
