# SPDX-License-Identifier: Apache-2.0
"""Capabilities one by one: each is needed, none is missing, and after the start none is left but
what is. What takes fentry, debugfs or other kernels is in tests/guest/inside/test_privileges.py."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path

import pytest

from tests import lab
from tests.host.test_failures import PROBES, READERS, successes
from tests.host.witness import Witness
from tests.lab import DIRECT_WRITER, as_user
from tests.sqpoll import rings
from tests.waiting import PATIENCE_SECONDS, wait_for
from writeback_exporter.privileges import PROGRAMS, RINGS, TRACEFS, Capability, Need

NAMES = {need: tuple(map(str, need.capabilities)) for need in (PROGRAMS, RINGS, TRACEFS)}
NOBODY = 65534


def why(report: lab.Report, feature: str) -> str:
    """What doctor says of a feature, remedy included."""
    text = report.text.partition(f"NO  {feature}\n")[2]
    return "".join(text.splitlines(keepends=True)[:2])


def check_refusal(report: lab.Report, feature: str, lacking: str) -> None:
    assert report.reasons[feature] == "no right"
    told = why(report, feature)
    assert f": the exporter lacks {lacking} [no right]" in told
    assert f"grant {lacking} (systemd: AmbientCapabilities=, docker: --cap-add=), run it" in told


def without_each(need: Need) -> list[tuple[str, tuple[str, ...]]]:
    """(what is left out, the rest) for each of its capabilities."""
    names = NAMES[need]
    return [(out, tuple(n for n in names if n != out)) for out in names]


# Each is needed ---------------------------------------------------------------------------------


def test_a_user_with_what_programs_need() -> None:
    report = lab.doctor(prefix=as_user(*NAMES[PROGRAMS]))
    assert report.status == 0
    assert {report.reasons[name] for name in PROBES | READERS} <= {"", "no right"}
    refused = {name for name in PROBES | READERS if report.reasons[name]}
    assert refused <= {"io_uring"}


def test_the_old_substitute() -> None:
    report = lab.doctor(prefix=as_user("CAP_SYS_ADMIN"))
    assert report.status == 0


@pytest.mark.parametrize(("lacking", "rest"), without_each(PROGRAMS))
def test_programs_without_one(lacking: str, rest: tuple[str, ...]) -> None:
    report = lab.doctor(prefix=as_user(*rest))
    assert report.status == 1
    for name in PROBES | {"cgroup_lifecycle"}:
        check_refusal(report, name, lacking)
    assert {report.reasons[name] for name in READERS} == {""}
    with lab.Exporter(prefix=as_user(*rest)) as exporter:
        assert set(successes(exporter.scrape())) == READERS | {"cgroup_lifecycle"}
    assert any("no BPF" in line and f"lacks {lacking};" in line for line in exporter.log)


LOAD = """
from writeback_exporter.kernel.libbpf import BpfError, Object
from writeback_exporter.kernel.loader import open_file
with Object(open_file("cgroup_lifecycle")) as opened:
    try:
        opened.load()
        opened.attach("cgroup_mkdir")
    except BpfError as error:
        print(error.errno)
"""


@pytest.mark.parametrize("names", [*combinations(NAMES[PROGRAMS], 1), NAMES[PROGRAMS]])
def test_the_kernel_says_the_same_of_programs(names: tuple[str, ...]) -> None:
    """Not our own look at what we have, but bpf(2), decides."""
    command = [*as_user(*names), sys.executable, "-c", LOAD]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ([] if names == NAMES[PROGRAMS] else ["1"])  # EPERM


def test_io_uring_without_one(task_cgroup: lab.Cgroup) -> None:
    """With them times of another user's ring are exported."""
    if lab.doctor().reasons["io_uring"]:
        pytest.skip("no times of SQPOLL threads on this kernel")
    programs = NAMES[PROGRAMS]
    with (
        lab.Exporter(*lab.only("io_uring"), prefix=as_user(*programs, *NAMES[RINGS])) as exporter,
        rings([task_cgroup], "own") as made,
    ):
        truth = made.at_rest(made.fds[0])
        total = exporter.scrape().sum("io_uring_sq_seconds_total", cgroup=task_cgroup.label)
        assert round(total * 1e6) == truth.total > 0
        fdinfo = f"/proc/{made.process.pid}/fdinfo/{made.fds[0]}"
        fd = f"/proc/{made.process.pid}/fd"
        for lacking, rest in without_each(RINGS):
            check_refusal(lab.doctor(prefix=as_user(*programs, *rest)), "io_uring", lacking)
            # The kernel, too, refuses one of the two that are read.
            command = [*as_user(*rest), "sh", "-c", f"ls {fd} && cat {fdinfo}"]
            assert subprocess.run(command, capture_output=True, check=False).returncode != 0
        command = [*as_user(*NAMES[RINGS]), "sh", "-c", f"ls {fd} && cat {fdinfo}"]
        assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_tracepoints_of_system_calls_without_one() -> None:
    traced = lab.with_mounts("mount -t tracefs -o mode=700 tracefs /sys/kernel/tracing")
    needed = (*NAMES[PROGRAMS], *NAMES[TRACEFS])
    report = lab.doctor("--sync.tracepoints", prefix=(*traced, *as_user(*needed)))
    if report.reasons["sync_fentry"] == "":
        pytest.skip("this kernel allows fentry")
    assert report.reasons["sync"] == ""
    for lacking, rest in without_each(TRACEFS):
        prefix = (*traced, *as_user(*NAMES[PROGRAMS], *rest))
        check_refusal(lab.doctor("--sync.tracepoints", prefix=prefix), "sync", lacking)


# None is left -----------------------------------------------------------------------------------


def kept(process: int) -> set[int]:
    """The capabilities of all threads, which have the same: none can be raised again."""
    (rights,) = set(lab.rights(process).values())
    assert rights.inheritable == rights.ambient == frozenset()
    assert rights.permitted == rights.effective
    assert rights.no_new_privileges
    return set(rights.effective)


def bounding(process: int) -> frozenset[int]:
    (bounding,) = {rights.bounding for rights in lab.rights(process).values()}
    return bounding


ROOT = lab.rights(os.getpid())[str(os.getpid())].effective
READING, TRACING = Capability.DAC_READ_SEARCH, Capability.SYS_PTRACE
TRIGGERS = {Capability.SYS_RESOURCE, Capability.DAC_OVERRIDE}


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), {READING, TRACING}),
        (("--no-collector.io_uring",), {READING}),
        (lab.only("block_io", "dirty_throttle", "work", "host_memory"), set()),
        ((*lab.only("pressure_triggers"), "--pressure.trigger=io some 150ms/2s"), set()),
        (
            (
                *lab.only("pressure_triggers"),
                "--pressure.trigger=io some 150ms/2s",
                "--pressure.trigger.cgroups=/none",
            ),
            TRIGGERS,
        ),
    ],
    ids=["default", "no io_uring", "no files of others", "host triggers", "triggers of cgroups"],
)
def test_what_root_keeps(flags: tuple[str, ...], expected: set[Capability]) -> None:
    with lab.Exporter(*flags) as exporter:
        for path in ("/metrics", "/"):  # with all threads that there will be
            exporter.get(path)
        assert kept(exporter.process.pid) == expected & ROOT
        assert bounding(exporter.process.pid) == expected & ROOT
        assert not any("capabilities" in line for line in exporter.log)


def test_what_a_user_keeps() -> None:
    names = NAMES[PROGRAMS]
    with lab.Exporter(prefix=as_user(*names)) as exporter:
        exporter.scrape()
        assert kept(exporter.process.pid) == set()
        # Who has no CAP_SETPCAP cannot change it, and no file's capabilities count any more.
        assert bounding(exporter.process.pid) == set(PROGRAMS.capabilities)


def test_a_filter_that_refuses_to_give_up(tmp_path: Path) -> None:
    """As systemd's @privileged has capset(2): it serves, and says what to allow."""
    number = {"x86_64": 126, "aarch64": 91}[os.uname().machine]
    prefix = lab.denied(number, errno.EPERM)
    with lab.Exporter(prefix=prefix) as exporter:
        assert set(successes(exporter.scrape()).values()) == {1}
    lines = [line for line in exporter.log if "capabilities that are needed no more" in line]
    assert lines
    assert all("capset: Operation not permitted; allow prctl(2) and capset(2)" in x for x in lines)


# And nothing is missed --------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [(), as_user(*NAMES[PROGRAMS])], ids=["root", "user"])
def test_all_works_without(prefix: tuple[str, ...], witness: Witness, tmp_path: Path) -> None:
    """Cgroups and disks that come later, and a program that is attached later, at a scrape, as
    block_io's insert is once there is a disk without statistics of its own."""
    with lab.Exporter(prefix=prefix) as exporter:
        first = exporter.scrape()
        before = kept(exporter.process.pid)
        inserted = "block_io/insert_slots", "block_io/insert_hash"
        with (
            lab.loop_disk(tmp_path) as disk,
            ExitStack() as stack,
        ):
            begun, (seen, _) = disk.settled(), witness.completed(disk)
            name = f"wbx-late-{os.getpid()}"
            groups = [stack.enter_context(lab.cgroup(h, name)) for h in lab.hierarchies().all]
            lab.run_in(groups, DIRECT_WRITER, disk.path, 4096, 100, 0)
            truth = disk.settled() - begun
            scrape = exporter.scrape()
            labels = {"device": disk.name, "op": "write", "cgroup": f"/{name}"}
            counted = scrape.sum("block_io_size_bytes_count", **labels)
            assert counted == witness.completed(disk)[0] - seen
            assert truth.writes == 100
            for metric in ("cgroup_memory_bytes", "pressure_waiting_seconds_total"):
                if scrape.select(metric):
                    assert f"/{name}" in scrape.values(metric, "cgroup"), metric
            assert scrape.select("device_disk_info", device=disk.name)
            with disk.queue(iostats="0", scheduler="none"):
                # Looked for at a scrape, once what is known of devices is a little older.
                wait_for(
                    lambda: (
                        not exporter.scrape()
                        .values("exporter_program_runs_total", "program")
                        .isdisjoint(inserted)
                    ),
                    what="insert",
                )
                lab.run_in(groups, DIRECT_WRITER, disk.path, 4096, 100, 0)
            time.sleep(1)
            scrape = exporter.scrape()
            shown = witness.completed(disk)[0] - seen
            assert scrape.sum("block_io_size_bytes_count", **labels) == shown > counted
            assert scrape.sum("block_io_queue_seconds_count", **labels) == shown
        assert set(successes(scrape).values()) == {1}
        assert successes(scrape) == successes(first)
        assert set(first.samples) <= set(scrape.samples)
        assert kept(exporter.process.pid) == before
        assert exporter.stop() == 0
    assert not [line for line in exporter.log if "ERROR" in line or "Traceback" in line]
    assert not [line for line in exporter.log if "is not known" in line]


def private(cgroup: lab.Cgroup) -> None:
    os.chown(cgroup.directory, NOBODY, NOBODY)
    cgroup.directory.chmod(0o700)


def test_a_cgroup_that_its_owner_keeps_private(task_cgroup: lab.Cgroup) -> None:
    """Root reads its files, also after the start; a user without the capability cannot."""
    private(task_cgroup)
    metric = "pressure_waiting_seconds_total"
    if lab.hierarchies().v2 is None:
        metric = "cgroup_memory_bytes"
    for prefix, seen in (((), True), (as_user(*NAMES[PROGRAMS]), False)):
        with lab.Exporter(prefix=prefix) as exporter:
            cgroups = exporter.scrape().values(metric, "cgroup")
            assert (task_cgroup.label in cgroups) == seen


OVERRIDE = ("setpriv", "--bounding-set=-all,+bpf,+perfmon,+dac_override", "--inh-caps=-all")
"""As docker has root: with CAP_DAC_OVERRIDE, without CAP_DAC_READ_SEARCH."""


@pytest.mark.parametrize(
    ("prefix", "expected"), [((), READING), (OVERRIDE, Capability.DAC_OVERRIDE)]
)
def test_a_web_configuration_of_another_user(
    prefix: tuple[str, ...], expected: Capability, tmp_path: Path
) -> None:
    """Root reads it anew when it changes."""
    place = tmp_path / "private"
    place.mkdir(mode=0o700)
    file = place / "web.yml"

    def write(header: str) -> None:
        file.write_text(f"http_server_config: {{headers: {{X-Frame-Options: {header}}}}}\n")
        file.chmod(0o600)
        os.chown(file, NOBODY, NOBODY)

    write("deny")
    os.chown(place, NOBODY, NOBODY)
    flags = (*lab.only("host_memory"), f"--web.config.file={file}")
    with lab.Exporter(*flags, prefix=prefix) as exporter:
        assert kept(exporter.process.pid) == {expected}

        def header() -> str:
            with urllib.request.urlopen(exporter.url, timeout=PATIENCE_SECONDS) as answer:
                return str(answer.headers["X-Frame-Options"])

        assert header() == "deny"
        write("sameorigin")
        wait_for(lambda: header() == "sameorigin", what="reading it anew")
    assert not any("ERROR" in line for line in exporter.log)
