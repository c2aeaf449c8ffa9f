# SPDX-License-Identifier: Apache-2.0
"""Which cgroups are exported under a label of their own: the settings --cgroup.*."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CgroupRules:
    """What an operator wants of cgroups. Applied to paths below the hierarchy's root, which itself
    (/) is always exported."""

    include: re.Pattern[str] | None = None
    """Matched in full, as Prometheus does: cgroups that do not match are not exported."""
    exclude: re.Pattern[str] | None = None
    """Matched in full: cgroups that match are not exported."""
    collapse: tuple[re.Pattern[str], ...] = ()
    """Matched from the path's begin: a cgroup is exported as the part that matches, or as its first
    group where there is one. The first pattern that matches counts; include and exclude then see
    what it left."""
    limit: int = 10_000
    """How many labels a hierarchy gives at most."""

    @property
    def text(self) -> str:
        """All of them: equal where the rules are."""
        patterns = (self.include, self.exclude, *self.collapse)
        return repr((self.limit, [pattern and pattern.pattern for pattern in patterns]))

    def label(self, path: str) -> str | None:
        """The label for a path; None where it is not exported."""
        if path == "/":
            return path
        for pattern in self.collapse:
            if match := pattern.match(path):
                part = (match[1] if pattern.groups else match[0]) or ""
                if part.startswith("/") and part.rstrip("/"):
                    path = part.rstrip("/")
                    break
        if self.include and not self.include.fullmatch(path):
            return None
        if self.exclude and self.exclude.fullmatch(path):
            return None
        return path


EVERY_CGROUP = CgroupRules()
"""As it is where nothing is set."""
