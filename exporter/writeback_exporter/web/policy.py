# SPDX-License-Identifier: Apache-2.0
"""What holds for a connection and its requests, wherever that is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from writeback_exporter.web.tls import Tls


class ConfigError(Exception):
    """A configuration that cannot be used: one line that names it, and the remedy."""


@dataclass(frozen=True, slots=True)
class RateLimit:
    """One request each `interval` seconds, and `burst` at once after a pause."""

    interval: float
    burst: int


@dataclass(frozen=True, slots=True)
class WebConfig:
    """Without a file: nothing is asked for."""

    tls: Tls | None = None
    users: Mapping[str, str] = field(default_factory=dict, repr=False)
    """bcrypt hashes by user. Where there are any, each request has to name one."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Of each response, instead of our own; an empty one is not sent."""
    rate_limit: RateLimit | None = None
