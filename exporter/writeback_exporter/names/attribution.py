# SPDX-License-Identifier: Apache-2.0
"""What this host's cgroups let an exporter say: whose names are known, whose IO is whose."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from writeback_exporter.features import Feature, Refused, raise_if_exhausted
from writeback_exporter.names.cgroups import Hierarchies, Hierarchy

_SWITCH_IO_ON = (
    "write +io to cgroup.subtree_control from the root down (systemd: DefaultIOAccounting=yes in "
    "system.conf, then systemctl daemon-reexec)"
)
_ROOT_INODE = 1  # of every kernfs, cgroup v1 and v2


def attribution(hierarchies: Hierarchies) -> list[Feature]:
    """Features that no program needs, and without which numbers land under another cgroup."""
    features = []
    for name, check in (
        ("cgroup_names", _names),
        ("block_io_attribution", _block_io),
        ("writeback_attribution", _writeback),
    ):
        try:
            refusals = list(check(hierarchies))
        except Refused as no_answer:
            refusals = [no_answer]
        features.append(Feature.refused(name, refusals[0]) if refusals else Feature(name, True))
    return features


def _names(hierarchies: Hierarchies) -> Iterator[Refused]:
    for hierarchy in hierarchies.all:
        try:
            inode = os.stat(hierarchy.mount).st_ino
        except OSError as error:
            yield Refused(
                "unreadable",
                f"cannot read {hierarchy.mount}: {error.strerror}",
                "mount the cgroup file system there, or say where it is with --path.cgroupfs",
            )
            continue
        if inode != _ROOT_INODE:
            yield Refused(
                "cgroup namespace",
                f"{hierarchy.mount} is not its hierarchy's root: cgroups above it have no name",
                "mount the host's cgroup file system, and share its cgroup namespace "
                "(docker: --cgroupns=host)",
            )


def _block_io(hierarchies: Hierarchies) -> Iterator[Refused]:
    if hierarchies.io.id == 0 and "io" not in _enabled(hierarchies.io):
        yield Refused(
            "io controller off",
            "the io controller is off below the root: all block IO is charged to the root",
            _SWITCH_IO_ON,
        )


def _writeback(hierarchies: Hierarchies) -> Iterator[Refused]:
    if hierarchies.io.id != 0:
        yield Refused(
            "cgroup v1",
            "cgroup v1 charges buffered writeback to the root, whoever wrote",
            "boot with cgroup v2 alone (systemd.unified_cgroup_hierarchy=1)",
        )
    elif hierarchies.memory != hierarchies.io:
        yield Refused(
            "no memory controller",
            "cgroup v2 has no memory controller: buffered writeback is charged to the root",
            "boot with cgroup_enable=memory, without any cgroup v1 mount of it",
        )
    # The memory controller may be off there: io brings it along unseen (depends_on of
    # io_cgrp_subsys, block/blk-cgroup.c), for the owner of pages.
    elif "io" not in _enabled(hierarchies.io):
        yield Refused(
            "io controller off",
            "the io controller is off below the root: all buffered writeback is charged to it",
            _SWITCH_IO_ON,
        )


def _enabled(hierarchy: Hierarchy) -> set[str]:
    try:
        return set(Path(hierarchy.mount, "cgroup.subtree_control").read_text().split())
    except OSError as error:
        raise_if_exhausted(error)
        return set()
