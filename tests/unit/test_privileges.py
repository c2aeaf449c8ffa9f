# SPDX-License-Identifier: Apache-2.0
"""Which capabilities are missing, and which stay; tests/host and tests/guest prove the kernel's
part of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from writeback_exporter import privileges
from writeback_exporter.kernel import libbpf
from writeback_exporter.privileges import (
    PROGRAMS,
    RINGS,
    Capability,
    has,
    holds,
    needed_after_start,
    refusal,
)
from writeback_exporter.settings import Settings, pressure_trigger

READING, OVERRIDE = Capability.DAC_READ_SEARCH, Capability.DAC_OVERRIDE
ALL = set(Capability)
NONE = Settings(
    listen=(), telemetry_path="/metrics", collectors=frozenset(), procfs="", sysfs="", cgroupfs=""
)

Hold = Callable[[set[Capability]], None]


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Hold:
    """Has the process hold these, and no others."""

    def hold(held: set[Capability]) -> None:
        mask = sum(1 << capability for capability in held)
        sets = privileges._Sets(mask, mask, 0)
        monkeypatch.setattr(privileges._Sets, "of_this_thread", lambda: sets)
        monkeypatch.setattr(privileges._Sets, "apply", lambda self: None)

    return hold


def test_numbers_are_the_kernels() -> None:
    header = Path("/usr/include/linux/capability.h").read_text()
    defined = dict(re.findall(r"^#define CAP_(\w+)\s+(\d+)$", header, re.MULTILINE))
    assert {c.name: str(c.value) for c in Capability}.items() <= defined.items()


def test_substitutes(hold: Hold) -> None:
    hold({Capability.SYS_ADMIN, OVERRIDE})
    assert holds(PROGRAMS)
    assert has(READING)
    assert not has(Capability.SYS_RESOURCE)
    hold({READING, Capability.BPF})
    assert not has(OVERRIDE)
    assert not has(Capability.SYS_ADMIN)


@pytest.mark.parametrize(
    ("held", "lacking"),
    [
        (set(), "CAP_DAC_READ_SEARCH and CAP_SYS_PTRACE"),
        ({READING}, "CAP_SYS_PTRACE"),
        ({Capability.SYS_PTRACE}, "CAP_DAC_READ_SEARCH"),
    ],
)
@pytest.mark.parametrize("user", [0, 1000])
def test_refusal(
    held: set[Capability], lacking: str, user: int, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To be root is no remedy for root."""
    monkeypatch.setattr("os.geteuid", lambda: user)
    hold(held)
    refused = refusal("it is closed", RINGS.capabilities, "leave it")
    assert refused.reason == "no right"
    assert refused.detail == f"it is closed: the exporter lacks {lacking}"
    root = ", run it as root" if user else ""
    assert refused.remedy == (
        f"grant {lacking} (systemd: AmbientCapabilities=, docker: --cap-add=){root}, or leave it"
    )


def test_refusal_that_no_capability_would_change(hold: Hold) -> None:
    hold(set(RINGS.capabilities))
    refused = refusal("it is closed", RINGS.capabilities)
    assert (refused.reason, refused.detail) == ("no right", "it is closed")
    assert refused.remedy.startswith("allow it in the container's seccomp profile and LSM")


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, set()),
        ({"collectors": frozenset({"block_io", "work", "devices", "sync"})}, set()),
        ({"collectors": frozenset({"bdi"})}, {READING}),
        ({"collectors": frozenset({"workload"})}, {READING}),
        ({"collectors": frozenset({"pressure"})}, {READING}),
        ({"collectors": frozenset({"io_uring"})}, {READING, Capability.SYS_PTRACE}),
        ({"web_config_file": "web.yml"}, {READING}),
        ({"sync_tracepoints": True}, set()),
        ({"pressure_triggers": (pressure_trigger("io some 1s/2s"),)}, set()),
        ({"pressure_trigger_cgroups": re.compile("/a")}, set()),
        (
            {
                "pressure_triggers": (pressure_trigger("io some 1s/2s"),),
                "pressure_trigger_cgroups": re.compile("/a"),
            },
            {Capability.SYS_RESOURCE, OVERRIDE},
        ),
    ],
)
def test_what_is_kept(
    changes: dict[str, object],
    kept: set[Capability],
    hold: Hold,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a kernel that asks for nothing to read maps."""
    monkeypatch.setattr(privileges, "_bpf_asks_for_a_right", lambda _: False)
    settings = replace(NONE, **changes)  # type: ignore[arg-type]
    hold(ALL)
    assert needed_after_start(settings) == kept
    hold(set())
    assert needed_after_start(settings) == set()
    hold(ALL - {READING})  # then the one that stands for it
    instead = {OVERRIDE if capability is READING else capability for capability in kept}
    assert needed_after_start(settings) == instead


@pytest.mark.parametrize(
    ("sysctl", "answers", "kept"),
    [
        ("2\n", True, set()),
        ("1\n", True, set()),
        ("2\n", False, {Capability.BPF}),
        ("0\n", True, {Capability.BPF}),
        (None, True, {Capability.BPF}),
    ],
    ids=["from 5.19", "for good", "before 5.19", "may be set later", "not known"],
)
def test_what_maps_take(
    sysctl: str | None,
    answers: bool,
    kept: set[Capability],
    tmp_path: Path,
    hold: Hold,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "sys/kernel").mkdir(parents=True)
    if sysctl is not None:
        (tmp_path / "sys/kernel/unprivileged_bpf_disabled").write_text(sysctl)
    monkeypatch.setattr(libbpf, "may_call", lambda: answers)
    settings = replace(NONE, procfs=str(tmp_path))
    hold(set(PROGRAMS.capabilities))
    assert needed_after_start(settings) == kept
    hold({Capability.SYS_ADMIN})
    assert needed_after_start(settings) == ({Capability.SYS_ADMIN} if kept else set())
