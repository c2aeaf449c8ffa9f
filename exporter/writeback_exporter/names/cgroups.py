# SPDX-License-Identifier: Apache-2.0
"""Cgroup ids to paths: hierarchies, one walk at start, and events from then on.

An id is the inode number of the cgroup's directory; each hierarchy has an id space of its own. An
exited cgroup keeps its name for as long as the kernel may still charge IO to it (until `release`)
and then until its last samples were scraped.
"""

from __future__ import annotations

import errno
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, KeysView, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain
from pathlib import Path

from writeback_exporter.names.rules import EVERY_CGROUP, CgroupRules

UNATTRIBUTED = "unattributed"
"""Label of what has no owner: flushes. No path starts without a slash, so none can collide."""
OTHER = "other"
"""Label of what is collapsed: cgroups beyond a map's capacity or the limit, that a rule leaves out,
or whose name is not known."""

OTHER_ID = (1 << 64) - 1
"""Under this id the BPF programs count for whom their maps have no room (bpf/cgroup.h)."""

NEAR = 0.9
"""From this share of a limit on, the log warns."""

RETENTION_SECONDS = 120.0
"""How long a released cgroup is exported at least: two scrapes at the usual longest interval, so
that each of several Prometheus servers sees its last samples."""


_EXITED_LIMIT = 50_000
"""Names of exited cgroups kept where nobody scrapes; without the eldest, its rows are OTHER's."""
_PATH_LIMIT = 1023
"""Bytes of a path that an event can hold (PATH_SIZE in bpf/cgroup_lifecycle.bpf.c): what is as long
has been cut, and would be the name of all below it."""
_EVICTED_LIMIT = 500_000
"""Ids kept of those; more cannot be in the maps."""


DYING_SECONDS = 600.0
"""When the series of a removed cgroup go that the kernel keeps because of its page cache, perhaps
for days: its dirty pages are written back within the first minute. Should it have IO after that,
its series begin anew, under its name."""


class CgroupfsError(Exception):
    """The cgroup file system is not where it was looked for; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """A cgroup hierarchy: the number that the kernel gives it (0 is v2) and its mount point."""

    id: int
    mount: str


@dataclass(frozen=True, slots=True)
class Hierarchies:
    """Where this host's cgroups are: `io` owns block IO, `task` names the throttled task, `memory`
    has the memory controller, if any has."""

    io: Hierarchy
    task: Hierarchy
    memory: Hierarchy | None = None

    @property
    def all(self) -> set[Hierarchy]:
        return {self.io, self.task} | ({self.memory} if self.memory else set())

    @property
    def by_use(self) -> tuple[Hierarchy, Hierarchy, Hierarchy]:
        """Those of block IO, of tasks, and of memory or what stands for it."""
        return self.io, self.task, self.memory or self.task

    @property
    def v2(self) -> Hierarchy | None:
        """The v2 hierarchy, alone or beside others; only v2 has pressure files."""
        return self.task if self.task.id == 0 else None

    @property
    def memory_v1(self) -> bool:
        """No v2 hierarchy is mounted, tasks are named by the v1 memory hierarchy."""
        return self.task.id != 0


def find_hierarchies(cgroupfs: str, procfs: str) -> Hierarchies:
    """Finds the hierarchies below `cgroupfs` (/sys/fs/cgroup) on v2, hybrid and v1 hosts.

    v2: one tree has all. Hybrid: v1 controllers, and a v2 tree beside them (`unified`) that names
    every task's service. v1: each controller has a tree. Raises CgroupfsError.
    """
    numbers = _hierarchy_numbers(procfs)
    root = Path(cgroupfs)
    try:
        if (root / "cgroup.controllers").exists():
            v2 = Hierarchy(0, str(root))
            has_memory = "memory" in (root / "cgroup.controllers").read_text().split()
            return Hierarchies(v2, v2, v2 if has_memory else None)
        mounts = {entry.name: str(entry) for entry in sorted(root.iterdir()) if entry.is_dir()}
    except OSError as error:
        raise CgroupfsError(
            f"cannot read the cgroup file system at {cgroupfs}: {error.strerror}; mount it there, "
            "or say where it is with --path.cgroupfs"
        ) from error

    def v1(controller: str) -> Hierarchy | None:
        for name, mount in mounts.items():
            mounted = controller in name.split(",") and os.path.exists(f"{mount}/cgroup.procs")
            if mounted and controller in numbers:
                return Hierarchy(numbers[controller], mount)
        return None

    unified = next(
        (mount for mount in mounts.values() if os.path.exists(f"{mount}/cgroup.controllers")), None
    )
    v2_beside = Hierarchy(0, unified) if unified else None
    io = v1("blkio") or v2_beside
    task = v2_beside or v1("memory")
    if not io or not task:
        raise CgroupfsError(
            f"{cgroupfs} is no cgroup file system (neither cgroup.controllers, nor unified, nor "
            "blkio and memory are in it); say where it is with --path.cgroupfs"
        )
    memory = v1("memory")
    if v2_beside and not memory and "memory" in _controllers(v2_beside):
        memory = v2_beside
    return Hierarchies(io, task, memory)


def _controllers(hierarchy: Hierarchy) -> set[str]:
    try:
        return set(Path(hierarchy.mount, "cgroup.controllers").read_text().split())
    except OSError:
        return set()


def _hierarchy_numbers(procfs: str) -> dict[str, int]:
    # /proc/self/cgroup: "7:blkio:/path"; "0::/path" is v2.
    try:
        lines = Path(procfs, "self/cgroup").read_bytes().rstrip(b"\n").split(b"\n")
    except OSError as error:
        raise CgroupfsError(
            f"cannot read {procfs}/self/cgroup: {error.strerror}; mount procfs there, or say where "
            "it is with --path.procfs"
        ) from error
    numbers = {}
    for line in lines:
        number, controllers, _ = line.split(b":", 2)
        for controller in controllers.decode("ascii", "replace").split(","):
            numbers[controller] = int(number)
    return numbers


def printable(path: bytes) -> str:
    """A path as a label value: bytes that are no UTF-8 become \\xNN."""
    return path.decode("utf-8", "backslashreplace")


def _decoded(path: bytes) -> str:
    """A path that keeps its bytes, whatever they are."""
    return path.decode("utf-8", "surrogateescape")


def _encoded(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")


def _label(path: str) -> str:
    return path if path.isascii() else printable(_encoded(path))


class EventKind(IntEnum):
    """As enum cgroup_event_kind in bpf/cgroup_lifecycle.bpf.c; a test compares them."""

    MKDIR = 0
    RENAME = 1
    RMDIR = 2
    RELEASE = 3


@dataclass(slots=True)
class _Exited:
    path: str
    quiet_since: float
    """When it was removed, or its entries in the maps were last deleted."""
    released_at: float | None = None
    scraped: bool = False


@dataclass(slots=True)
class _Tree:
    hierarchy: Hierarchy
    live: dict[int, str] = field(default_factory=dict)
    exited: dict[int, _Exited] = field(default_factory=dict)
    labels: dict[int, str] = field(default_factory=dict)
    """Labels by id, once they were asked for. Who was exported as OTHER stays there, or OTHER's
    counters would go back."""
    shown: Counter[str] = field(default_factory=Counter)
    """Labels but OTHER, with the number of ids that have them."""
    collapsed: dict[int, str] = field(default_factory=dict)
    """Why an id has the label OTHER."""
    nameless: set[int] = field(default_factory=set)
    """Ids that came and went while events were lost, found in the maps since `expired`: nothing
    will tell that they went."""
    evicted: deque[int] = field(default_factory=lambda: deque(maxlen=_EVICTED_LIMIT))
    """Ids whose names were given up, though their entries in the maps are still to go."""


class Cgroups:
    """The names of all cgroups that IO or throttling can be charged to. Not thread-safe."""

    def __init__(self, hierarchies: Hierarchies, rules: CgroupRules = EVERY_CGROUP) -> None:
        self.hierarchies = hierarchies
        self.rules = rules
        self._trees = {h.id: _Tree(h) for h in hierarchies.all}
        self.generation = 0
        """Counts the times that cgroups came or went."""

    def walk(self, now: float) -> None:
        """Learns what is there now. At start, and after events were lost: what a former walk or
        event knew and this one does not see has exited at `now`, a monotonic time in seconds."""
        found = {
            tree.hierarchy.id: dict(_walk(tree.hierarchy.mount)) for tree in self._trees.values()
        }
        self.generation += 1
        for tree in self._trees.values():
            there = found[tree.hierarchy.id]
            for cgroup in tree.live.keys() - there.keys():
                tree.exited[cgroup] = _Exited(tree.live[cgroup], now)
            for cgroup in tree.live.keys() & there.keys():
                if tree.live[cgroup] != there[cgroup] and cgroup not in tree.collapsed:
                    _unname(tree, cgroup)  # renamed
            tree.live = there
            for cgroup in tree.exited.keys() & there.keys():
                del tree.exited[cgroup]
            # Its release may be among the events that were lost: what waits for it waits no more.
            for exited in tree.exited.values():
                if exited.released_at is None:
                    exited.released_at = now

    def live(self, hierarchy: Hierarchy) -> KeysView[int]:
        """Ids of the cgroups that are there."""
        return self._trees[hierarchy.id].live.keys()

    def exited(self) -> Iterator[tuple[int, int]]:
        """(hierarchy, id) of each exited cgroup."""
        for tree in self._trees.values():
            for cgroup in tree.exited:
                yield tree.hierarchy.id, cgroup

    def exit_of(self, hierarchy: int, cgroup: int) -> tuple[bytes, bool] | None:
        """Path of an exited cgroup and whether the kernel has released it; None of any other, and
        of one whose path nobody knows."""
        tree = self._trees.get(hierarchy)
        exited = tree.exited.get(cgroup) if tree else None
        if exited is None or not exited.path:
            return None
        return _encoded(exited.path), exited.released_at is not None

    def labelled(self) -> dict[tuple[int, int], str]:
        """Each (hierarchy, id) that has a label, with why it is OTHER, or an empty text."""
        return {
            (tree.hierarchy.id, cgroup): tree.collapsed.get(cgroup, "")
            for tree in self._trees.values()
            for cgroup in tree.labels
        }

    def recall(
        self,
        exited: Iterable[tuple[int, int, bytes, bool]],
        labelled: Mapping[tuple[int, int], str],
        now: float,
    ) -> None:
        """After the first walk: takes in what another process has known of exited cgroups, as
        (hierarchy, id, path, released), and from `labelled`. Who had a label has it again, and who
        was OTHER for another reason than a rule stays there."""
        for hierarchy, cgroup, path, released in exited:
            tree = self._trees.get(hierarchy)
            if tree and cgroup not in tree.live:
                tree.exited[cgroup] = _Exited(_decoded(path), now, now if released else None)
        for (hierarchy, cgroup), why in labelled.items():
            tree = self._trees.get(hierarchy)
            if tree is None:
                continue
            is_known = cgroup in tree.live or cgroup in tree.exited
            if why in ("limit", "no name"):
                tree.labels[cgroup], tree.collapsed[cgroup] = OTHER, why
                if not is_known:  # it went, and nobody heard of it
                    tree.nameless.add(cgroup)
            elif is_known:
                self.name(tree.hierarchy, cgroup)

    def apply(self, kind: EventKind, hierarchy: int, cgroup: int, path: bytes, now: float) -> None:
        """Takes in one event of the kernel, in its order."""
        tree = self._trees.get(hierarchy)
        if tree is None:
            return
        self.generation += 1
        if len(path) >= _PATH_LIMIT and cgroup not in tree.live and cgroup not in tree.labels:
            tree.labels[cgroup], tree.collapsed[cgroup] = OTHER, "no name"
        if kind is EventKind.MKDIR:
            if len(path) < _PATH_LIMIT:
                # A walk may have seen it under a later name.
                tree.live.setdefault(cgroup, _decoded(path))
            # Nothing to forget: an id is never used twice (kernfs counts up).
        elif kind is EventKind.RENAME:
            _rename(tree, cgroup, _decoded(path))
            for renamed in tree.labels.keys() & tree.live.keys() - tree.collapsed.keys():
                _unname(tree, renamed)
        elif kind is EventKind.RMDIR:
            tree.exited.setdefault(cgroup, _Exited(tree.live.pop(cgroup, _decoded(path)), now))
            self._bound(tree)
        elif kind is EventKind.RELEASE:
            exited = tree.exited.setdefault(cgroup, _Exited(_decoded(path), now))
            if exited.released_at is None:  # else a walk has taken it for released already
                exited.released_at, exited.scraped = now, False
            tree.live.pop(cgroup, None)
            self._bound(tree)

    @staticmethod
    def _bound(tree: _Tree) -> None:
        if len(tree.exited) > _EXITED_LIMIT:
            eldest = next(iter(tree.exited))
            del tree.exited[eldest]
            _unname(tree, eldest)
            tree.evicted.append(eldest)

    def knows(self, hierarchy: Hierarchy, cgroup: int) -> bool:
        """Whether a live cgroup has a name by now: not yet, where it was made since the last events
        were taken in. Asked before `name` by who finds ids only then."""
        return cgroup in self._trees[hierarchy.id].live

    def name(self, hierarchy: Hierarchy, cgroup: int) -> str:
        """The label of a cgroup: its path below the hierarchy's root, or UNATTRIBUTED or OTHER."""
        if not cgroup:
            return UNATTRIBUTED
        if cgroup == OTHER_ID:
            return OTHER
        tree = self._trees[hierarchy.id]
        label = tree.labels.get(cgroup)
        return self._assign(tree, cgroup) if label is None else label

    def _assign(self, tree: _Tree, cgroup: int) -> str:
        path = tree.live.get(cgroup)
        if path is None and cgroup in tree.exited:
            path = tree.exited[cgroup].path
        label = None if path is None else self.rules.label(_label(path))
        if path is None:
            tree.collapsed[cgroup] = "no name"
            tree.nameless.add(cgroup)
        elif label is None:
            tree.collapsed[cgroup] = "rule"
        elif label not in tree.shown and len(tree.shown) >= self.rules.limit:
            tree.collapsed[cgroup] = "limit"
        else:
            tree.labels[cgroup] = label
            tree.shown[label] += 1
            return label
        tree.labels[cgroup] = OTHER
        return OTHER

    def expired(self, now: float) -> set[tuple[int, int]]:
        """(hierarchy, id) of the cgroups whose series may go, and marks the rest as scraped."""
        gone = set()
        for tree in self._trees.values():
            gone |= {(tree.hierarchy.id, cgroup) for cgroup in tree.evicted}
            for cgroup in tree.nameless - tree.live.keys():
                tree.exited.setdefault(cgroup, _Exited("", now, now))
            tree.nameless.clear()
            for cgroup, exited in tree.exited.items():
                if exited.released_at is None:
                    over = now - exited.quiet_since >= DYING_SECONDS
                else:
                    over = now - exited.released_at >= RETENTION_SECONDS
                if over and exited.scraped:
                    gone.add((tree.hierarchy.id, cgroup))
                exited.scraped = True
        return gone

    def forget(self, gone: set[tuple[int, int]], now: float) -> None:
        """Drops the names of what has gone; of a cgroup that the kernel still has, keeps it."""
        for hierarchy, cgroup in gone:
            tree = self._trees[hierarchy]
            exited = tree.exited.get(cgroup)
            if exited and exited.released_at is None:
                exited.quiet_since, exited.scraped = now, False
                continue
            tree.exited.pop(cgroup, None)
            _unname(tree, cgroup)
        for tree in self._trees.values():
            left = [c for c in tree.evicted if (tree.hierarchy.id, c) not in gone]
            tree.evicted.clear()
            tree.evicted.extend(left)

    def heirs(self, hierarchy: Hierarchy, gone: set[tuple[int, int]]) -> dict[str, int]:
        """The labels of a hierarchy that stay when `gone` are forgotten, each with a cgroup that
        has it: a path may have a new one by then, as that of a service that was started again."""
        tree = self._trees[hierarchy.id]
        exited = (c for c in tree.exited if (hierarchy.id, c) not in gone)
        heirs = {self.name(hierarchy, c): c for c in chain(exited, tree.live)}
        return {**heirs, UNATTRIBUTED: 0, OTHER: OTHER_ID}

    def labels_in_use(self, hierarchy: Hierarchy, gone: set[tuple[int, int]]) -> set[str]:
        """The labels of a hierarchy that stay when `gone` are forgotten."""
        return set(self.heirs(hierarchy, gone))

    def listed(self, hierarchy: Hierarchy) -> Iterator[tuple[int, str, bytes]]:
        """(id, label, directory) of each live cgroup that is exported under a label of its own: of
        whose files samples can be made. It may be gone when they are opened."""
        mount = os.fsencode(hierarchy.mount)
        seen: set[str] = set()
        spelled_out = []
        tree = self._trees[hierarchy.id]
        for cgroup, path in tree.live.items():
            label = tree.labels.get(cgroup)
            if label is None:
                label = self._assign(tree, cgroup)
            if label == path:
                seen.add(label)
                yield cgroup, label, mount if path == "/" else mount + _encoded(path)
            elif label == _label(path):
                spelled_out.append((cgroup, label, path))
        # A name that is no UTF-8 may look like another, and only one of them can be exported.
        for cgroup, label, path in spelled_out:
            if label not in seen:
                seen.add(label)
                yield cgroup, label, mount + _encoded(path)

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of live and of exited cgroups."""
        trees = self._trees.values()
        return sum(len(t.live) for t in trees), sum(len(t.exited) for t in trees)

    @property
    def shown(self) -> int:
        """Labels in use, of the hierarchy that has the most."""
        return max(len(tree.shown) for tree in self._trees.values())

    @property
    def collapsed(self) -> dict[str, int]:
        """Numbers of cgroups that are exported as OTHER, by reason."""
        reasons = Counter({"rule": 0, "limit": 0, "no name": 0})
        for tree in self._trees.values():
            reasons.update(tree.collapsed.values())
        return dict(reasons)


def _unname(tree: _Tree, cgroup: int) -> None:
    label = tree.labels.pop(cgroup, None)
    tree.collapsed.pop(cgroup, None)
    if label is not None and label != OTHER:
        tree.shown[label] -= 1
        if not tree.shown[label]:
            del tree.shown[label]


def _rename(tree: _Tree, cgroup: int, path: str) -> None:
    # Only v1 can rename; the cgroups below move with it.
    old = tree.live.get(cgroup)
    tree.live[cgroup] = path
    if old is not None:
        below = old + "/"
        for other, name in tree.live.items():
            if name.startswith(below):
                tree.live[other] = f"{path}/{name[len(below) :]}"


def _walk(mount: str) -> Iterator[tuple[int, str]]:
    """(id, path) of every cgroup of a mounted hierarchy, without those that vanish meanwhile."""
    top = os.fsencode(mount)
    try:
        yield os.stat(top).st_ino, "/"
    except OSError as error:
        raise CgroupfsError(
            f"cannot read the cgroup file system at {mount}: {error.strerror}; run the exporter as "
            "root, or say where it is with --path.cgroupfs"
        ) from error
    pending = [b""]
    while pending:
        parent = pending.pop()
        try:
            with os.scandir(top + parent) as entries:
                children = [e for e in entries if e.is_dir(follow_symlinks=False)]
                for entry in children:
                    path = parent + b"/" + entry.name
                    yield entry.inode(), _decoded(path)
                    pending.append(path)
        except OSError as error:
            if parent and error.errno not in (errno.EMFILE, errno.ENFILE):
                # It has gone meanwhile; or whoever has it delegated to him has closed it, or made
                # it deeper than a path can be. It has a name itself.
                continue
            raise CgroupfsError(
                f"cannot read {printable(top + parent)}: {error.strerror}; raise the limit of open "
                "files if that is the reason, or run the exporter as root"
            ) from error
