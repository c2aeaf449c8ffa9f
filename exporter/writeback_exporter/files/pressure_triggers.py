# SPDX-License-Identifier: Apache-2.0
"""PSI triggers: the kernel wakes a thread of ours when tasks have waited for long enough within a
window (Documentation/accounting/psi.rst), in between scrapes as well.

Each time that epoll finds a descriptor with EPOLLPRI is an event. A cgroup with triggers has a
real-time kernel thread, psimon. Without CAP_SYS_RESOURCE it has none, and windows are multiples
of 2 s, for the kernel then looks when it updates the averages. Either way rmdir of such a cgroup
takes an RCU grace period: 12 ms instead of 0.06 (6.18).
"""

from __future__ import annotations

import errno
import logging
import os
import select
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from writeback_exporter import privileges
from writeback_exporter.collector import Host
from writeback_exporter.features import (
    NO_DESCRIPTOR,
    Feature,
    Refused,
    descriptor_remedy,
)
from writeback_exporter.files.base import Reader
from writeback_exporter.files.pressure import hierarchy_with_pressure, supported, totals
from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.exposition import Labels, Snapshot, family
from writeback_exporter.names.cgroups import Hierarchy
from writeback_exporter.privileges import Capability
from writeback_exporter.settings import PressureTrigger, Settings

log = logging.getLogger(__name__)

LIMIT = 1000
"""Triggers armed at once: each is a descriptor."""

_SERIES_LIMIT = 50_000
"""Counters kept where nobody scrapes, of cgroups that have gone as well."""

_LOOK_SECONDS = 0.5
"""How often to look whether cgroups came or went."""
_RETRY_SECONDS = 30.0
"""When to try again what was refused: to a cgroup whose cgroup.pressure was 0 (6.1), say."""

_HOST = 0  # among cgroup ids, of which none is 0
_SHORTEST_WINDOW = 500_000  # WINDOW_MIN_US of kernel/sched/psi.c in 5.10 and 6.1, in no later one
_AVERAGING = 2_000_000  # PSI_FREQ

_Key = tuple[int, PressureTrigger]


@dataclass(slots=True)
class _Armed:
    key: _Key
    labels: Labels
    path: str | bytes
    total: int | None
    """Microseconds that tasks had waited when it was armed; None once an event was found true."""


class PressureTriggers(Reader):
    """Events of the PSI triggers that --pressure.trigger asks for; nothing where it does not."""

    name = "pressure_triggers"

    def __init__(self) -> None:
        self._counts: dict[Labels, int] = {}
        self._counting = threading.Lock()
        self._armed: dict[int, _Armed] = {}  # by descriptor
        self._keys: set[_Key] = set()  # of what is armed
        self._refused: set[_Key] = set()
        self._over_limit = 0
        self._told: set[str] = set()  # what was logged, or is a feature
        self._averaged = False
        self._hierarchy: Hierarchy | None = None  # whose cgroups may get triggers
        self._seen = -1  # the generation of cgroups that was looked at last
        self._retry_at = 0.0
        self._stop = -1
        self._failure: Exception | None = None
        self._watcher: threading.Thread | None = None

    def open(self, settings: Settings, host: Host, lock: threading.Lock) -> list[Feature]:
        self._settings, self._host, self._lock = settings, host, lock
        if not settings.pressure_triggers:
            return []
        supported(settings.procfs)
        self._averaged = _averaged(settings.procfs)
        # Not poll(2): 5.10 warns in its log when a cgroup with a waiter of that kind is removed
        # (__wake_up_pollfree), which is the end of a host with panic_on_warn.
        self._poll = select.epoll()
        features = []
        for trigger in settings.pressure_triggers:
            name = f"pressure_trigger {trigger}"
            path = f"{settings.procfs}/pressure/{trigger.resource}"
            try:
                self._arm((_HOST, trigger), "/", path)
            except Refused as refusal:
                self._refused.add((_HOST, trigger))
                self._told.add(f"{trigger}: {refusal.remedy}")
                features.append(Feature.refused(name, refusal))
            else:
                features.append(Feature(name, True))
        if settings.pressure_trigger_cgroups:
            try:
                self._hierarchy = hierarchy_with_pressure(host)
            except Refused as refusal:
                features.append(Feature.refused("pressure_triggers_of_cgroups", refusal))
            else:
                self._follow()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._poll.register(self._stop, select.EPOLLIN)
        return features

    def begin(self) -> None:
        if self._stop != -1:
            self._watcher = threading.Thread(target=self._watch, name=self.name, daemon=True)
            self._watcher.start()

    # In the thread ----------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            self._watch_until_stopped()
        except Exception as error:  # whatever it is, it must not end unseen
            self._failure = error

    def _watch_until_stopped(self) -> None:
        timeout = _LOOK_SECONDS if self._hierarchy else None
        while True:
            for descriptor, events in self._poll.poll(timeout):
                if descriptor == self._stop:
                    return
                self._take(descriptor, events)
            if self._hierarchy:
                self._follow()

    def _take(self, descriptor: int, events: int) -> None:
        armed = self._armed[descriptor]
        if events & select.EPOLLERR:
            # Its cgroup, or the cgroup's pressure files, have gone.
            self._disarm(descriptor)
            self._refused.add(armed.key)
        elif events & select.EPOLLPRI and self._is_true(armed):
            with self._counting:
                if armed.labels in self._counts:
                    self._counts[armed.labels] += 1

    def _is_true(self, armed: _Armed) -> bool:
        """Whether tasks have waited for the threshold since the trigger was armed.

        Without CAP_SYS_RESOURCE the kernel compares the total of the averages with one that only
        privileged triggers advance (psi_trigger_create; seen in 6.18): in the first two windows
        it takes for growth what had been waited for before.
        """
        if self._averaged and armed.total is not None:
            _, trigger = armed.key
            try:
                total = totals(armed.path).get(trigger.kind, 0)
            except Refused:  # out of descriptors: not known to be true
                return False
            if total - armed.total < trigger.threshold:
                return False
        armed.total = None
        return True

    def _follow(self) -> None:
        """Arms triggers of cgroups that came, and lets go of those that went."""
        assert self._hierarchy
        assert self._settings.pressure_trigger_cgroups
        cgroups, now = self._host.cgroups, time.monotonic()
        if cgroups.generation == self._seen and now < self._retry_at:
            return
        # A scrape that is under way may take longer than a window.
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._seen = cgroups.generation
            listed = list(cgroups.listed(self._hierarchy))
        finally:
            self._lock.release()
        matches = self._settings.pressure_trigger_cgroups.fullmatch
        wanted = {
            (cgroup, trigger): (label, directory)
            for cgroup, label, directory in listed
            if label != "/" and matches(label)  # the host's are those of the root
            for trigger in self._settings.pressure_triggers
        }
        for descriptor, armed in list(self._armed.items()):
            if armed.key not in wanted and armed.key[0] != _HOST:
                self._disarm(descriptor)
        if now >= self._retry_at:
            self._refused = {key for key in self._refused if key[0] == _HOST}
            self._retry_at = now + _RETRY_SECONDS
        self._refused = {key for key in self._refused if key in wanted or key[0] == _HOST}
        missing = [key for key in wanted if key not in self._keys and key not in self._refused]
        room = max(0, min(LIMIT - len(self._armed), _SERIES_LIMIT - len(self._counts)))
        self._over_limit = max(0, len(missing) - room)
        if self._over_limit and self._is_new("limit"):
            log.warning(
                "%d PSI triggers are left out: the limit is %d at once, and %d counters until a "
                "scrape; let --pressure.trigger.cgroups match fewer cgroups",
                self._over_limit,
                LIMIT,
                _SERIES_LIMIT,
            )
        for key in missing[:room]:
            label, directory = wanted[key]
            try:
                self._arm(key, label, directory + f"/{key[1].resource}.pressure".encode())
            except Refused as refusal:
                self._refused.add(key)
                # What is not there has gone, or will be there when it is tried again.
                if refusal.reason != _NOT_THERE and self._is_new(f"{key[1]}: {refusal.remedy}"):
                    log.warning("PSI trigger %s is refused: %s", key[1], refusal)

    def _is_new(self, message: str) -> bool:
        """Whether this is to be told for the first time."""
        new = message not in self._told
        self._told.add(message)
        return new

    def _arm(self, key: _Key, label: str, path: str | bytes) -> None:
        """Raises Refused."""
        cgroup, trigger = key
        if (cgroup, trigger.resource, trigger.kind) == (_HOST, "cpu", "full"):
            raise Refused(
                "undefined",
                "the kernel does not define full CPU pressure of the whole host",
                "watch some, or with --pressure.trigger.cgroups cgroups",
            )
        before = totals(path)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if trigger.kind not in before:
                    raise Refused(
                        "not in this kernel",
                        f"{os.fsdecode(path)} has no {trigger.kind}",
                        "use a kernel from 5.13 on, or watch some",
                    )
                # The end of line counts: /proc puts a NUL in place of the last byte written.
                os.write(
                    descriptor, f"{trigger.kind} {trigger.threshold} {trigger.window}\n".encode()
                )
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            raise _refusal(trigger, path, self._averaged, error) from error
        labels = (label, trigger.resource, trigger.kind, trigger.limits)
        with self._counting:
            self._counts.setdefault(labels, 0)
        self._armed[descriptor] = _Armed(key, labels, path, before[trigger.kind])
        self._keys.add(key)
        self._poll.register(descriptor, select.EPOLLPRI)

    def _disarm(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)
        self._keys.discard(self._armed.pop(descriptor).key)
        os.close(descriptor)

    # At a scrape ------------------------------------------------------------------------------

    def fill(self, snapshot: Snapshot, host: Host) -> None:
        if not self._settings.pressure_triggers:
            return
        if self._failure:
            raise RuntimeError(f"nobody waits for PSI triggers any more: {self._failure}")
        with self._counting:
            counts = list(self._counts.items())
        states = {
            "armed": len(self._armed),
            "refused": len(self._refused),
            "over_limit": self._over_limit,
        }
        snapshot.families += [
            family(catalogue.PRESSURE_EVENTS, counts),
            family(catalogue.PRESSURE_TRIGGERS, (((s,), n) for s, n in states.items())),
        ]

    def forget(self, gone: set[tuple[int, int]], host: Host, now: float) -> None:
        if self._hierarchy is None or not any(h == self._hierarchy.id for h, _ in gone):
            return
        in_use = host.cgroups.labels_in_use(self._hierarchy, gone) | {"/"}
        with self._counting:
            self._counts = {k: count for k, count in self._counts.items() if k[0] in in_use}

    def close(self) -> None:
        if self._stop == -1:
            return
        if self._watcher:
            os.eventfd_write(self._stop, 1)
            self._watcher.join()
            self._watcher = None
        os.close(self._stop)
        self._stop = -1
        self._poll.close()
        # Each close waits for an RCU grace period, 9 ms or more; together they wait for the same.
        with ThreadPoolExecutor(max_workers=32) as pool:
            list(pool.map(os.close, self._armed))
        self._armed.clear()


_NOT_THERE = "not there"


def _refusal(
    trigger: PressureTrigger, path: str | bytes, averaged: bool, error: OSError
) -> Refused:
    detail = f"{os.fsdecode(path)}: {error.strerror}"
    match error.errno:
        case errno.EINVAL if averaged and trigger.window % _AVERAGING:
            otherwise = "take a window that is a multiple of 2s"
            return privileges.refusal(detail, [Capability.SYS_RESOURCE], otherwise)
        case errno.EINVAL if trigger.window < _SHORTEST_WINDOW:
            reason = "window too short"
            remedy = "take a window of 500ms or more, the shortest of this kernel"
        case errno.ENOENT | errno.ENODEV | errno.EOPNOTSUPP:
            reason = _NOT_THERE
            remedy = "use a kernel that accounts it; in a cgroup, write 1 to its cgroup.pressure"
        case errno.EACCES:  # by the file's mode
            return privileges.refusal(detail, [Capability.DAC_OVERRIDE])
        case errno.EPERM:  # psi_open(), kernel/sched/psi.c, 5.13 to 6.3
            return privileges.refusal(detail, [Capability.SYS_RESOURCE])
        case errno.EROFS:
            reason = "read-only"
            remedy = (
                "let the exporter write there, for that is how a trigger is set: mount it rw, in "
                "systemd with ProtectControlGroups=no"
            )
        case errno.EMFILE | errno.ENFILE:
            reason, remedy = NO_DESCRIPTOR, descriptor_remedy(error.errno)
        case _:
            reason = "refused by the kernel"
            remedy = "take other limits, or do without"
    return Refused(reason, detail, remedy)


def _averaged(procfs: str) -> bool:
    """Whether triggers are looked at along with the averages: without CAP_SYS_RESOURCE, in kernels
    that let everybody set them (6.4), for which they made these files writable."""
    if privileges.has(Capability.SYS_RESOURCE):
        return False
    with os.scandir(f"{procfs}/pressure") as files:
        return any(file.stat().st_mode & stat.S_IWOTH for file in files)
