# SPDX-License-Identifier: Apache-2.0
"""What the command line settles."""

from __future__ import annotations

import re
from dataclasses import dataclass

from writeback_exporter.names.rules import EVERY_CGROUP, CgroupRules
from writeback_exporter.web.listen import Address

_LONGEST = 86400.0
_MOST_CGROUPS = 100_000
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of all commands."""

    listen: tuple[Address, ...]
    telemetry_path: str
    collectors: frozenset[str]
    procfs: str
    sysfs: str
    cgroupfs: str
    rootfs: str = "/"
    cgroups: CgroupRules = EVERY_CGROUP
    idle_timeout: float = 0.0
    """After so many seconds without a change series leave; 0: never."""


def duration(text: str) -> float:
    """Seconds of a duration as Prometheus writes it: 500ms, 5s, 2m. Raises ValueError."""
    match = re.fullmatch(r"([0-9]+)(ms|s|m|h)", text)
    if not match:
        raise ValueError(f"{text!r} is no duration, such as 500ms, 5s or 2m")
    if len(match[1]) > 8 or int(match[1]) * _UNITS[match[2]] > _LONGEST:
        raise ValueError(f"{text!r} is longer than a day")
    return int(match[1]) * _UNITS[match[2]]


def cgroup_regex(text: str) -> re.Pattern[str]:
    """A regular expression for paths of cgroups. Raises ValueError."""
    try:
        return re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from error


def cgroup_limit(text: str) -> int:
    """A number of cgroups, from 1 to 100,000. Raises ValueError."""
    if not re.fullmatch(r"[0-9]{1,6}", text) or not 1 <= int(text) <= _MOST_CGROUPS:
        raise ValueError(f"{text!r} is no number of cgroups from 1 to {_MOST_CGROUPS}")
    return int(text)


def telemetry_path(text: str) -> str:
    """An absolute URL path, none of the server's own. Raises ValueError."""
    if not re.fullmatch(r"/(?!/|-/)[!$&-;=@-Z_a-z~%]*", text):
        raise ValueError(f"{text!r} is not a path such as /metrics")
    return text
