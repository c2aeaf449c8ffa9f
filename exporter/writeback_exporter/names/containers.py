# SPDX-License-Identifier: Apache-2.0
"""Names of pods and containers, from the files that kubelet and the runtimes keep on the node.

No API server and no socket is asked. The files lie on disks that may hang, so that nothing here may
run in a scrape: files/workload.py has a thread for it. All reading is bounded, and what cannot be
read or understood is not known.

- `var/log/pods/NAMESPACE_POD_UID/` (kubelet): pods by UID.
- `var/log/containers/POD_NAMESPACE_CONTAINER-ID.log` (kubelet): containers by id.
- `config.json` of containerd and CRI-O, `config.v2.json` of Docker, `containers.json` of Podman:
  containers by id, and which runtime has them.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from writeback_exporter.features import raise_if_exhausted
from writeback_exporter.names.workloads import Workload

_FILE_BYTES = 1 << 20
"""Larger files are not read: a container's configuration has some 10 KB."""
_DIRECTORY_ENTRIES = 20_000
_NAMESPACES = 16
_LINKS = 40  # as the kernel (MAXSYMLINKS)
_CONTAINERS_A_PASS = 1000
_NAME_LENGTH = 256
"""Longer names are none; Kubernetes allows 253 characters."""
_FIRST_RETRY, _LAST_RETRY = 5.0, 300.0
"""Seconds until what was not found is looked for again, doubled each time: kubelet writes its files
some time after the cgroup is made, and most containers that are not found never will be."""


@dataclass(frozen=True, slots=True)
class Pod:
    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class Container:
    """`runtime` is empty where kubelet's log tells the name; the name, for a pod's sandbox."""

    runtime: str
    name: str


@dataclass(frozen=True, slots=True)
class Names:
    """Pods by UID, containers by id. Not changed any more once it is handed over."""

    pods: Mapping[str, Pod] = field(default_factory=dict)
    containers: Mapping[str, Container] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _State:
    """What a runtime's file tells of a container; what it does not is empty."""

    runtime: str
    name: str = ""
    namespace: str = ""
    pod: str = ""
    uid: str = ""


class Search:
    """Finds names for workloads, pass by pass, and keeps those that are still asked for."""

    def __init__(self, rootfs: str) -> None:
        """`rootfs` is where the host's root directory is."""
        self._root = Path(rootfs)
        self._names = Names()
        self._retries: dict[str, tuple[float, float]] = {}
        self.problem: OSError | None = None
        """Why kubelet's directory, or a runtime's file that is there, could not be read when that
        was last asked for."""

    def find(self, workloads: Collection[Workload], now: float) -> Names:
        """What is known of these workloads at a monotonic time in seconds, the same object as
        before where nothing has changed. It hangs where a disk does."""
        uids = {w.pod_uid for w in workloads if w.pod_uid and w.qos_class}
        uid_of = {w.container_id: w.pod_uid for w in workloads if w.container_id}
        pods = {uid: pod for uid, pod in self._names.pods.items() if uid in uids}
        containers = {i: c for i, c in self._names.containers.items() if i in uid_of}
        self._retries = {k: r for k, r in self._retries.items() if k in uids or k in uid_of}

        due_pods = self._due(uids - pods.keys(), now)
        due = self._due(uid_of.keys() - containers.keys(), now)[:_CONTAINERS_A_PASS]
        if due_pods or due:
            self.problem = None

        listed = self._pods() if due_pods else {}
        pods |= {uid: listed[uid] for uid in due_pods if uid in listed}

        logged, podman = (self._logged(), self._podman()) if due else ({}, {})
        for container_id in due:
            uid = uid_of[container_id]
            state = self._state(container_id)
            if state is None and container_id in podman:
                state = _State("podman", podman[container_id])
            if state and state.pod and uid in uids and state.uid in ("", uid):
                pods.setdefault(uid, Pod(state.namespace, state.pod))
            runtime, name = (state.runtime, state.name) if state else ("", "")
            name = name or logged.get(container_id, "")
            if runtime or name:
                containers[container_id] = Container(runtime, name)

        self._put_off([*due_pods, *due], pods.keys() | containers.keys(), now)
        if (pods, containers) != (self._names.pods, self._names.containers):
            self._names = Names(pods, containers)
        return self._names

    def _due(self, missing: Iterable[str], now: float) -> list[str]:
        return [key for key in missing if self._retries.get(key, (now, 0.0))[0] <= now]

    def _put_off(self, sought: Iterable[str], found: Collection[str], now: float) -> None:
        for key in sought:
            _, delay = self._retries.pop(key, (0.0, _FIRST_RETRY))
            if key not in found:
                self._retries[key] = (now + delay, min(2 * delay, _LAST_RETRY))

    # kubelet's files

    def _pods(self) -> dict[str, Pod]:
        pods = {}
        try:
            for entry in _entries(self._below("var/log/pods"), _DIRECTORY_ENTRIES):
                parts = entry.split("_")  # which no part can have in it
                if len(parts) == 3 and all(parts):
                    pods[parts[2]] = Pod(*parts[:2])
        except OSError as error:
            raise_if_exhausted(error)
            self.problem = error
        return pods

    def _logged(self) -> dict[str, str]:
        names = {}
        with suppress(OSError):
            for entry in _entries(self._below("var/log/containers"), _DIRECTORY_ENTRIES):
                log = _LOG.fullmatch(entry)
                if log:
                    names[log["id"]] = log["container"]
        return names

    # Runtimes' files

    def _state(self, container_id: str) -> _State | None:
        containers = self._below("var/lib/docker/containers")
        docker = _object(self._json(containers / container_id / "config.v2.json"))
        if docker:
            labels = _object(docker.get("Config")).get("Labels")
            name = _text(docker, "Name").removeprefix("/")
            return _of_pod("docker", labels, _KUBELET) or _State("docker", name)
        for storage in _STORAGES:
            containers = self._below(f"{storage}/overlay-containers")
            config = _object(self._json(containers / container_id / "userdata/config.json"))
            state = _of_pod("cri-o", config.get("annotations"), _KUBELET)
            if state:  # else Podman's, which does not have the name there
                return state
        for tasks in self._containerd_tasks():
            spec = _object(self._json(tasks / container_id / "config.json"))
            if spec:
                annotations = spec.get("annotations")
                name = _text(_object(annotations), "nerdctl/name")
                return _of_pod("containerd", annotations, _CRI) or _State("containerd", name)
        return None

    def _containerd_tasks(self) -> Iterator[Path]:
        for containerd in _CONTAINERDS:
            tasks = self._below(f"{containerd}/io.containerd.runtime.v2.task")
            with suppress(OSError):
                for namespace in _entries(tasks, _NAMESPACES):
                    if namespace != "moby":  # Docker's, which has told already what it knows
                        yield tasks / namespace

    def _podman(self) -> dict[str, str]:
        names = {}
        for storage in _STORAGES:
            for file in ("containers.json", "volatile-containers.json"):
                listed = self._json(self._below(f"{storage}/overlay-containers") / file)
                for container in map(_object, listed if isinstance(listed, list) else ()):
                    container_names = container.get("names")
                    if isinstance(container_names, list) and container_names:
                        name = _text({"name": container_names[0]}, "name")
                        names[_text(container, "id")] = name
        return names

    def _below(self, path: str) -> Path:
        """A directory below the host's root. Absolute links on the way lead to what is there, as
        for the host, and not to our own."""
        place, ahead, links = self._root, path.split("/")[::-1], 0
        while ahead and links <= _LINKS:
            part = ahead.pop()
            if part == "..":
                place = place.parent if place != self._root else place
                continue
            step = place / part
            try:
                target = os.readlink(step)
            except OSError:  # no link
                place = step
                continue
            links += 1
            if target.startswith("/"):
                place = self._root
            ahead += target.strip("/").split("/")[::-1]
        return place

    def _json(self, path: Path) -> object:
        """What a file has; None where it is not there, no plain file, too large or no JSON."""
        try:
            # A FIFO would block without O_NONBLOCK.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
        except OSError as error:
            if isinstance(error, PermissionError):
                self.problem = error
            return None
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None
            text = os.read(descriptor, _FILE_BYTES + 1)
            return json.loads(text) if len(text) <= _FILE_BYTES else None
        except (OSError, ValueError, RecursionError):
            return None
        finally:
            os.close(descriptor)


_LOG = re.compile("[^_]+_[^_]+_(?P<container>[^_]+)-(?P<id>[0-9a-f]{64})[.]log")
_STORAGES = ("run/containers/storage", "var/lib/containers/storage")
_CONTAINERDS = (
    "run/containerd",
    "run/k3s/containerd",
    "var/snap/microk8s/common/run/containerd",
)


@dataclass(frozen=True, slots=True)
class _Keys:
    """Under which keys a runtime notes whose container it is."""

    container: str
    pod: str
    namespace: str
    uid: str


_CRI = _Keys(
    "io.kubernetes.cri.container-name",
    "io.kubernetes.cri.sandbox-name",
    "io.kubernetes.cri.sandbox-namespace",
    "io.kubernetes.cri.sandbox-uid",  # since containerd 1.6
)
_KUBELET = _Keys(
    "io.kubernetes.container.name",
    "io.kubernetes.pod.name",
    "io.kubernetes.pod.namespace",
    "io.kubernetes.pod.uid",
)


def _of_pod(runtime: str, notes: object, keys: _Keys) -> _State | None:
    """None where it is no pod's container."""
    noted = _object(notes)
    pod = _text(noted, keys.pod)
    if not pod:
        return None
    name = _text(noted, keys.container)
    return _State(
        runtime,
        "" if name == "POD" else name,  # so Docker and CRI-O call the sandbox
        _text(noted, keys.namespace),
        pod,
        _text(noted, keys.uid),
    )


def _entries(directory: Path, most: int) -> list[str]:
    with os.scandir(directory) as entries:
        return [entry.name for entry in islice(entries, most)]


def _object(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}


def _text(mapping: Mapping[str, object], key: str) -> str:
    value = mapping.get(key)
    return value if isinstance(value, str) and len(value) <= _NAME_LENGTH else ""
