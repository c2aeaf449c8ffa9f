# SPDX-License-Identifier: Apache-2.0
"""Capabilities on kernels that allow fentry, with debugfs and other users' cgroups: each is needed,
none is missing, and after the start none is left but what is."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import lab
from tests.calls import HANGING, stuck_disk
from tests.lab import BUFFERED_WRITER, DIRECT_WRITER, Rights, as_user
from tests.waiting import wait_for
from writeback_exporter.privileges import (
    CGROUP_TRIGGERS,
    DEBUGFS,
    PERF_EVENTS,
    PROGRAMS,
    RINGS,
    TRACEFS,
    Capability,
    Need,
)

from .test_failures import LOCKED_MEMORY, reasons
from .test_main_signals import FAST, SLOW

BPF_SYSCTL = Path("/proc/sys/kernel/unprivileged_bpf_disabled")
PARANOID = Path("/proc/sys/kernel/perf_event_paranoid")
OLD = platform.release().startswith("5.10.")
MAPS = {Capability.BPF} if OLD else set()
"""What reading maps takes, with the sysctl as Debian has it (2): c8644cd0efe7 is in 5.19."""


def names(*needs: Need) -> list[str]:
    return [str(capability) for need in needs for capability in need.capabilities]


def user(*capabilities: str) -> tuple[str, ...]:
    return (*LOCKED_MEMORY, *as_user(*capabilities))


def kept(exporter: lab.Exporter) -> set[int]:
    """The capabilities of all threads, which have the same: none can be raised again."""
    found: set[Rights] = set(lab.rights(exporter.process.pid).values())
    (rights,) = found
    assert rights.inheritable == rights.ambient == frozenset()
    assert rights.permitted == rights.effective
    assert rights.no_new_privileges
    return set(rights.effective)


@contextmanager
def sysctl(file: Path, value: str) -> Iterator[None]:
    before = file.read_text()
    file.write_text(value)
    try:
        yield
    finally:
        file.write_text(before)


def check_lacking(text: str, lacking: str) -> None:
    assert f": the exporter lacks {lacking} [no right]" in text
    assert f"grant {lacking} (systemd: AmbientCapabilities=, docker: --cap-add=), run it" in text


# Each is needed ---------------------------------------------------------------------------------


def test_programs() -> None:
    """A user with BPF and PERFMON has fentry, whatever perf events are to who."""
    flags = lab.only("sync", "block_io_limit", "dirty_throttle", "page_wait")
    with sysctl(PARANOID, "4"):
        report = lab.doctor(*flags, prefix=user(*names(PROGRAMS)))
    refused = {name for name, reason in report.reasons.items() if reason}
    assert refused <= {"block_io_limit_iolatency"}  # no Debian kernel has io.latency
    fentry = {"sync_fentry", "dirty_throttle_measured_sleep", "page_wait_exact_end"}
    assert fentry <= set(report.reasons) - refused
    for lacking, other in (("CAP_PERFMON", "CAP_BPF"), ("CAP_BPF", "CAP_PERFMON")):
        report = lab.doctor(*lab.only("sync"), prefix=user(other))
        assert report.reasons["sync"] == "no right"
        check_lacking(report.text, lacking)


def test_debugfs() -> None:
    flags = lab.only("bdi")
    with lab.Exporter(*flags, prefix=user(*names(DEBUGFS))) as exporter:
        lab.run_in([], BUFFERED_WRITER, FAST.path, 65536)
        scrape = exporter.scrape()
        assert reasons(scrape)["bdi_debugfs"] == ""
        assert scrape.select("wb_dirtied_bytes_total")
        assert kept(exporter) == {Capability.DAC_READ_SEARCH}
    report = lab.doctor(*flags, prefix=user())
    assert report.reasons["bdi_debugfs"] == "no right"
    check_lacking(report.text, "CAP_DAC_READ_SEARCH")
    assert "cannot read /sys/kernel/debug/bdi: Permission denied" in report.text


TRIGGERS = (
    *lab.only("pressure_triggers"),
    "--pressure.trigger=io some 50ms/1s",
    "--pressure.trigger.cgroups=/priv.*",
)


def test_triggers() -> None:
    """Those of cgroups are armed also after the start: what they need stays."""
    task = lab.hierarchies().task
    with lab.Exporter(*TRIGGERS, prefix=user(*names(CGROUP_TRIGGERS))) as exporter:
        assert reasons(exporter.scrape())["pressure_trigger io some 50ms/1s"] == ""
        assert kept(exporter) == set(CGROUP_TRIGGERS.capabilities)
        with lab.cgroup(task, "priv-later"):
            wait_for(lambda: exporter.scrape().sum("pressure_triggers", state="armed") == 2)


def test_triggers_without_one() -> None:
    task = lab.hierarchies().task
    host = "pressure_trigger io some 50ms/1s"
    with lab.cgroup(task, "priv"):
        with lab.Exporter(*TRIGGERS, prefix=user("CAP_SYS_RESOURCE")) as exporter:
            scrape = exporter.scrape()
        # The host's file lets everybody write since 5.13.
        assert reasons(scrape)[host] == ("no right" if OLD else "")
        # Once, be it of the host's or of the cgroup's.
        (line,) = (line for line in exporter.log if "io.pressure: " in line or host in line)
        assert "Permission denied: the exporter lacks CAP_DAC_OVERRIDE; grant" in line
        with lab.Exporter(*TRIGGERS, prefix=user("CAP_DAC_OVERRIDE")) as exporter:
            scrape = exporter.scrape()
        if OLD:  # where each window has its thread, whoever asks
            assert reasons(scrape)[host] == ""
            return
        assert reasons(scrape)[host] == "no right"
        (line,) = (line for line in exporter.log if "io.pressure: " in line or host in line)
        assert "the exporter lacks CAP_SYS_RESOURCE; grant" in line
        assert "or take a window that is a multiple of 2s" in line


TRACED = """
from writeback_exporter.features import Refused
from writeback_exporter.kernel.loader import Kernel
from writeback_exporter.names.cgroups import find_hierarchies
from writeback_exporter.probes.sync import Sync
class Old(Kernel):
    def require_fexit_of_sleepers(self):  # as of arm64 before 6.4, it has none
        raise Refused("no fentry", "", "")
sync = Sync()
try:
    sync.load(Old(syscall_tracepoints=True), find_hierarchies("/sys/fs/cgroup", "/proc"))
except Refused as refusal:
    print(f"{refusal.detail} [{refusal.reason}] {refusal.remedy}")
"""


def traced(*capabilities: str) -> str:
    command = [*user(*capabilities), sys.executable, "-c", TRACED]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_tracepoints_of_system_calls() -> None:
    """The kernel's own levels of perf_event_paranoid let CAP_PERFMON do. Debian's 3, which is its
    default, and 4, which Ubuntu has, do not."""
    programs = names(PROGRAMS)
    assert PARANOID.read_text() == "3\n"
    with sysctl(PARANOID, "2"):
        assert traced(*programs, *names(TRACEFS)) == ""
        check_lacking(traced(*programs), "CAP_DAC_READ_SEARCH")
    for level in ("3", "4"):
        with sysctl(PARANOID, level):
            said = traced(*programs, *names(TRACEFS))
            assert f"(kernel.perf_event_paranoid is {level})" in said
            check_lacking(said, "CAP_SYS_ADMIN")
            assert said.endswith(", or set kernel.perf_event_paranoid to 2\n")
    assert traced(*programs, *names(TRACEFS, PERF_EVENTS)) == ""


# None is left, and nothing is missed --------------------------------------------------------------


@pytest.mark.parametrize("root", [True, False], ids=["root", "user"])
def test_all_works_without(root: bool, tmp_path: Path) -> None:
    """Long after the start: cgroups and disks that are new, a program attached late, calls that
    are looked at whether they are open still, names that are forgotten."""
    flags = lab.only("block_io", "sync", "pressure", "cgroup_memory", "devices", "io_uring", "bdi")
    io = lab.hierarchies().io
    with (
        lab.Exporter(*flags, prefix=() if root else user(*names(PROGRAMS))) as exporter,
        lab.cgroup(io, "late") as late,
        stuck_disk(FAST, tmp_path) as (stuck, release),
    ):
        first = exporter.scrape()
        rights = kept(exporter)
        assert rights == MAPS | (set(RINGS.capabilities) if root else set())
        process = lab.spawn_in([late], HANGING, stuck.path, tmp_path / "go")
        assert process.stdout is not None
        assert process.stdout.readline() == "calls\n"

        def is_open_long() -> bool:
            return exporter.scrape().sum("sync_open_seconds", cgroup="/late", call="fsync") > 2

        # Older than 2 s: a BPF program is run to see whether it is true (BPF_PROG_TEST_RUN).
        wait_for(is_open_long, what="an open call")
        programs = exporter.scrape().values("exporter_program_runs_total", "program")
        assert not [name for name in programs if "insert" in name]
        with SLOW.queue(iostats="0", scheduler="none"):

            def is_attached() -> bool:
                scrape = exporter.scrape()
                names = scrape.values("exporter_program_runs_total", "program")
                return any(name.startswith("block_io/insert") for name in names)

            wait_for(is_attached, what="insert")
            lab.run_in([late], DIRECT_WRITER, SLOW.path, 4096, 40, 0)
            labels = {"cgroup": "/late", "device": SLOW.name, "op": "write"}
            scrape = exporter.scrape()
            assert scrape.sum("block_io_size_bytes_count", **labels) == 40
            assert scrape.sum("block_io_queue_seconds_count", **labels) == 40
        release()
        assert process.stdout.readline() == "returned\n"
        scrape = exporter.scrape()
        assert scrape.sum("sync_seconds_count", cgroup="/late", call="fsync") == 1
        assert scrape.sum("sync_open_seconds", cgroup="/late", call="fsync") == 0
        assert scrape.sum("exporter_map_entries", map="sync/open_calls") == 0
        for metric in ("cgroup_memory_bytes", "pressure_waiting_seconds_total"):
            assert "/late" in scrape.values(metric, "cgroup")
        for limit in (1 << 30, 1 << 29):  # of which inotify tells
            (late.directory / "memory.max").write_text(str(limit))
            scrape = exporter.scrape()
            assert scrape.sum("cgroup_memory_limit_bytes", cgroup="/late", limit="max") == limit
        assert set(scrape.select("exporter_collector_success").values()) == {1}
        assert set(first.samples) <= set(scrape.samples)
        assert kept(exporter) == rights
        assert exporter.stop() == 0
    assert not [line for line in exporter.log if "level=ERROR" in line or "Traceback" in line]
    assert not [line for line in exporter.log if "is not known" in line]


def test_the_sysctl_that_is_set_later() -> None:
    """Where everybody may use bpf(2) when we start, and nobody later: on a kernel that then wants
    CAP_BPF for maps too it is kept."""
    with sysctl(BPF_SYSCTL, "0"), lab.Exporter(*lab.only("block_io")) as exporter:
        assert kept(exporter) == {Capability.BPF}  # of which nothing tells whether it will do
        BPF_SYSCTL.write_text("2")
        scrape = exporter.scrape()
        assert set(scrape.select("exporter_collector_success").values()) == {1}
        assert exporter.stop() == 0
    assert BPF_SYSCTL.read_text() == "2\n"
    assert os.geteuid() == 0
