# SPDX-License-Identifier: Apache-2.0
"""What the command line settles."""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass

from writeback_exporter.names.rules import EVERY_CGROUP, CgroupRules
from writeback_exporter.web.listen import Address

_LONGEST = 86400.0
_MOST_CGROUPS = 100_000
_LONGEST_WINDOW = 10_000_000  # WINDOW_MAX_US in kernel/sched/psi.c
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class PressureTrigger:
    """Asks for an event when tasks waited for `threshold` within `window`, both in microseconds
    (Documentation/accounting/psi.rst); `kind` is some or full."""

    resource: str
    kind: str
    threshold: int
    window: int

    @property
    def limits(self) -> str:
        """Threshold and window, such as 150ms/2s."""
        return f"{_written(self.threshold)}/{_written(self.window)}"

    def __str__(self) -> str:
        return f"{self.resource} {self.kind} {self.limits}"


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of all commands."""

    listen: tuple[Address, ...] | None
    """None: the sockets that systemd gives."""
    telemetry_path: str
    collectors: frozenset[str]
    procfs: str
    sysfs: str
    cgroupfs: str
    rootfs: str = "/"
    cgroups: CgroupRules = EVERY_CGROUP
    idle_timeout: float = 0.0
    """After so many seconds without a change series leave; 0: never."""
    pressure_triggers: tuple[PressureTrigger, ...] = ()
    pressure_trigger_cgroups: re.Pattern[str] | None = None
    sync_tracepoints: bool = False
    web_config_file: str | None = None
    bpf_pin: str | None = None
    """Where serve pins what it loads, in a BPF file system."""


def duration(text: str) -> float:
    """Seconds of a duration as Prometheus writes it: 500ms, 5s, 2m. Raises ValueError."""
    match = re.fullmatch(r"([0-9]+)(ms|s|m|h)", text)
    if not match:
        raise ValueError(f"{text!r} is no duration, such as 500ms, 5s or 2m")
    if len(match[1]) > 8 or int(match[1]) * _UNITS[match[2]] > _LONGEST:
        raise ValueError(f"{text!r} is longer than a day")
    return int(match[1]) * _UNITS[match[2]]


def cgroup_limit(text: str) -> int:
    """A number of cgroups, from 1 to 100,000. Raises ValueError."""
    if not re.fullmatch(r"[0-9]{1,6}", text) or not 1 <= int(text) <= _MOST_CGROUPS:
        raise ValueError(f"{text!r} is no number of cgroups from 1 to {_MOST_CGROUPS}")
    return int(text)


def _written(microseconds: int) -> str:
    milliseconds = microseconds // 1000
    return f"{milliseconds}ms" if milliseconds % 1000 else f"{milliseconds // 1000}s"


def pressure_trigger(text: str) -> PressureTrigger:
    """Reads RESOURCE KIND THRESHOLD/WINDOW. Raises ValueError."""
    match = re.fullmatch(r"(cpu|memory|io|irq) (some|full) ([^/]+)/([^/]+)", text)
    if not match:
        raise ValueError(f"{text!r} is no pressure trigger, such as 'io some 150ms/2s'")
    resource, kind, *limits = match.groups()
    threshold, window = (round(duration(limit) * 1e6) for limit in limits)
    if resource == "irq" and kind == "some":
        raise ValueError(f"{text!r}: irq pressure is only full")
    if window > _LONGEST_WINDOW:
        raise ValueError(f"{text!r}: the window is longer than 10s")
    if not 0 < threshold <= window:
        raise ValueError(f"{text!r}: the threshold is not between 1ms and the window")
    return PressureTrigger(resource, kind, threshold, window)


def regular_expression(text: str) -> re.Pattern[str]:
    """Raises ValueError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of what a later Python reads otherwise
            return re.compile(text)
    except (re.error, OverflowError, RecursionError, Warning) as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from error


def telemetry_path(text: str) -> str:
    """An absolute URL path, none of the server's own. Raises ValueError."""
    if not re.fullmatch(r"/(?!/|-/)[!$&-;=@-Z_a-z~%]*", text):
        raise ValueError(f"{text!r} is not a path such as /metrics")
    return text
