# SPDX-License-Identifier: Apache-2.0
"""What works on this host, and for what does not: why, and what to do."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass


class Refused(Exception):
    """A feature that this host does not give: `reason` in a few words (it is a label of
    writeback_exporter_feature_available), `detail` and `remedy` for the log and `doctor`."""

    def __init__(self, reason: str, detail: str, remedy: str) -> None:
        super().__init__(f"{detail}; {remedy}")
        self.reason = reason
        self.detail = detail
        self.remedy = remedy


NO_DESCRIPTOR = "no descriptor"


def descriptor_remedy(number: int) -> str:
    """What to do about EMFILE, of this process, and ENFILE, of the machine."""
    if number == errno.ENFILE:
        return "raise fs.file-max (sysctl), or see who has so many files open (lsof)"
    return "raise the limit of open files (systemd: LimitNOFILE=)"


def raise_if_exhausted(error: OSError) -> None:
    """Raises Refused where no file can be opened at all: of this one the error tells nothing, and
    to take it for absent would be an empty scrape that looks like a good one."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        path = os.fsdecode(error.filename)
        raise Refused(
            NO_DESCRIPTOR,
            f"cannot open {path}: {error.strerror}",
            descriptor_remedy(error.errno),
        ) from error


@dataclass(frozen=True, slots=True)
class Feature:
    """A feature and whether it is available; the texts are empty where it is."""

    name: str
    available: bool
    reason: str = ""
    detail: str = ""
    remedy: str = ""

    @classmethod
    def refused(cls, name: str, refusal: Refused) -> Feature:
        return cls(name, False, refusal.reason, refusal.detail, refusal.remedy)
