# SPDX-License-Identifier: Apache-2.0
"""Which cgroups are exported by name: rules and limit; nothing is counted twice or lost."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from writeback_exporter.names.cgroups import (
    OTHER,
    RETENTION_SECONDS,
    Cgroups,
    EventKind,
    Hierarchies,
    Hierarchy,
)
from writeback_exporter.names.rules import EVERY_CGROUP, CgroupRules

V2 = Hierarchy(0, "/nowhere")
POD = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0a.slice"
CONTAINER = f"{POD}/cri-containerd-{'0' * 64}.scope"


def rules(
    include: str | None = None, exclude: str | None = None, collapse: tuple[str, ...] = ()
) -> CgroupRules:
    return CgroupRules(
        re.compile(include) if include is not None else None,
        re.compile(exclude) if exclude is not None else None,
        tuple(map(re.compile, collapse)),
    )


def known(cgroup_rules: CgroupRules, *paths: str) -> Cgroups:
    """Cgroups 1, 2... of these paths."""
    cgroups = Cgroups(Hierarchies(V2, V2), cgroup_rules)
    for cgroup, path in enumerate(paths, 1):
        cgroups.apply(EventKind.MKDIR, 0, cgroup, os.fsencode(path), 0.0)
    return cgroups


def labels(cgroups: Cgroups, count: int) -> list[str]:
    return [cgroups.name(V2, cgroup) for cgroup in range(1, count + 1)]


@pytest.mark.parametrize(
    ("cgroup_rules", "path", "label"),
    [
        (EVERY_CGROUP, CONTAINER, CONTAINER),
        (rules(include="/kubepods.*"), CONTAINER, CONTAINER),
        (rules(include="/kubepods.*"), "/system.slice", None),
        (rules(include="/kubepods"), "/kubepods.slice", None),  # matched in full
        (rules(exclude="/user.slice(/.*)?"), "/user.slice/a", None),
        (rules(exclude="/user.slice"), "/user.slice/a", "/user.slice/a"),
        (rules(include="/a.*", exclude="/a/b"), "/a/b", None),
        (rules(include="/a.*", exclude="/a/b"), "/a/c", "/a/c"),
        (rules(collapse=(r"/kubepods\.slice/.*-pod[^/]+",)), CONTAINER, POD),
        (rules(collapse=(r"/kubepods\.slice/.*-pod[^/]+",)), "/system.slice", "/system.slice"),
        (rules(collapse=("(/a/[^/]+)/.+",)), "/a/b/c/d", "/a/b"),  # the first group
        (rules(collapse=("/a/b/", "/a/")), "/a/b/c", "/a/b"),  # no slash at the end
        (rules(collapse=("/x", "/a/b", "/a")), "/a/b/c", "/a/b"),  # the first that matches
        (rules(collapse=("b",)), "/a/b", "/a/b"),  # from the path's begin
        (rules(collapse=("/?", "(/b)?")), "/a/b", "/a/b"),  # what matches nothing collapses nothing
        (rules(include="/a", collapse=("/a",)), "/a/b", "/a"),  # sees what collapse left
        (rules(include="/a", exclude=".*"), "/", "/"),  # the root always
    ],
)
def test_rules(cgroup_rules: CgroupRules, path: str, label: str | None) -> None:
    assert cgroup_rules.label(path) == label
    assert labels(known(cgroup_rules, path), 1) == [label or OTHER]


@given(path=st.text().map("/".__add__), pattern=st.sampled_from(["/a*", ".*", "(/.)|/b", "", "/+"]))
def test_a_collapsed_label_is_a_path(path: str, pattern: str) -> None:
    label = rules(collapse=(pattern,)).label(path)
    assert label is not None
    assert label.startswith("/")
    assert path.startswith(label)


def test_limit_is_sticky_and_room_is_given_back() -> None:
    cgroups = known(CgroupRules(limit=2), "/a", "/b", "/c", "/d")
    assert labels(cgroups, 4) == ["/a", "/b", OTHER, OTHER]
    assert (cgroups.shown, cgroups.collapsed["limit"]) == (2, 2)
    for kind in (EventKind.RMDIR, EventKind.RELEASE):
        cgroups.apply(kind, 0, 1, b"/a", 1.0)
    # Exported until it was scraped for the last time.
    assert labels(cgroups, 4) == ["/a", "/b", OTHER, OTHER]
    cgroups.expired(2.0)
    gone = cgroups.expired(2.0 + RETENTION_SECONDS)
    cgroups.forget(gone, 2.0 + RETENTION_SECONDS)
    # What was counted as other once stays there; a new one finds room.
    cgroups.apply(EventKind.MKDIR, 0, 5, b"/e", 200.0)
    assert [cgroups.name(V2, c) for c in (2, 3, 4, 5)] == ["/b", OTHER, OTHER, "/e"]


def test_limit_counts_labels() -> None:
    cgroups = known(CgroupRules(collapse=(re.compile("/a"),), limit=1), "/a/1", "/a/2", "/b")
    assert labels(cgroups, 3) == ["/a", "/a", OTHER]


def test_reasons_are_counted() -> None:
    cgroups = known(rules(exclude="/b"), "/a", "/b")
    cgroups.name(V2, 77)
    assert labels(cgroups, 2) == ["/a", OTHER]
    assert cgroups.collapsed == {"rule": 1, "limit": 0, "no name": 1}


def test_files_are_read_of_cgroups_with_a_label_of_their_own() -> None:
    """What is collapsed is in its ancestor's files already."""
    collapse = (re.compile(r"/kubepods\.slice/.*-pod[^/]+"),)
    cgroups = known(
        CgroupRules(exclude=re.compile("/x"), collapse=collapse), "/", POD, CONTAINER, "/x"
    )
    assert list(cgroups.listed(V2)) == [
        (1, "/", b"/nowhere"),
        (2, POD, b"/nowhere" + POD.encode()),
    ]


def test_files_of_names_that_are_no_text() -> None:
    cgroups = Cgroups(Hierarchies(V2, V2))
    for cgroup, path in enumerate((b"/a\xff", b"/b\xff", b"/b\\xff", "/ü".encode()), 1):
        cgroups.apply(EventKind.MKDIR, 0, cgroup, path, 0.0)
    assert labels(cgroups, 4) == ["/a\\xff", "/b\\xff", "/b\\xff", "/ü"]
    # Two that look alike cannot both be exported: the one that is called so is.
    assert [(label, directory) for _, label, directory in cgroups.listed(V2)] == [
        ("/b\\xff", b"/nowhere/b\\xff"),
        ("/ü", "/nowhere/ü".encode()),
        ("/a\\xff", b"/nowhere/a\xff"),
    ]


def test_a_renamed_cgroup_is_judged_anew(tmp_path: Path) -> None:
    cgroups = known(rules(exclude="/old.*"), "/a", "/a/b")
    assert labels(cgroups, 2) == ["/a", "/a/b"]
    cgroups.apply(EventKind.RENAME, 0, 1, b"/c", 0.0)
    assert labels(cgroups, 2) == ["/c", "/c/b"]
    assert cgroups.shown == 2
    cgroups.apply(EventKind.RENAME, 0, 1, b"/old", 0.0)
    assert labels(cgroups, 2) == [OTHER, OTHER]
    # Its counts are in other's now, and stay.
    cgroups.apply(EventKind.RENAME, 0, 1, b"/d", 0.0)
    assert labels(cgroups, 2) == [OTHER, OTHER]
