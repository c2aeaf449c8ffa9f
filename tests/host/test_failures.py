# SPDX-License-Identifier: Apache-2.0
"""What hosts and containers deny, or run out of: each ends in a message that names the cause, what
does not need it goes on, and nothing is exported that is not so."""

from __future__ import annotations

import errno
import http.client
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests import lab
from tests.host.test_workload import dead_file_system, sleeping
from tests.lab import DIRECT_WRITER, TWO_CAPABILITIES, Disk, with_mounts
from tests.waiting import PATIENCE_SECONDS, wait_for
from writeback_exporter.exporter import COLLECTORS
from writeback_exporter.files.base import Reader
from writeback_exporter.probes.base import Probe

FENTRY = {"sync", "block_io_limit"}
"""Those that have no other way, and are not on a host that refuses it."""
DEFAULT = {name for name, collector in COLLECTORS.items() if collector.default} - FENTRY
PROBES = {name for name in DEFAULT if issubclass(COLLECTORS[name], Probe)}
READERS = {name for name in DEFAULT if issubclass(COLLECTORS[name], Reader)}
BTF = "/sys/kernel/btf/vmlinux"


def successes(scrape: lab.Scrape) -> dict[str, float]:
    return {
        dict(series)["collector"]: value
        for series, value in scrape.select("exporter_collector_success").items()
        if dict(series)["collector"] not in FENTRY
    }


# Rights -----------------------------------------------------------------------------------------

WITHOUT_BPF = lab.denied(lab.BPF_CALL, errno.EPERM)


def test_bpf_that_seccomp_refuses() -> None:
    """As in a container: the message names the container and not, as others' do, memlock."""
    report = lab.doctor(prefix=WITHOUT_BPF)
    assert report.status == 1
    refused = {name for name, reason in report.reasons.items() if reason == "not permitted"}
    assert refused - FENTRY == PROBES | {"cgroup_lifecycle"}
    assert all(report.reasons[name] for name in FENTRY)
    assert {report.reasons[name] for name in READERS} == {""}
    assert "allow bpf(2) in the container's seccomp profile" in report.text
    assert "memlock" not in report.text.lower()
    assert "Main signals are missing." in report.text


def test_readers_go_on_without_bpf(task_cgroup: lab.Cgroup) -> None:
    """They see cgroups come and go though there are no events of them."""
    with lab.Exporter(prefix=WITHOUT_BPF) as exporter:
        scrape = exporter.scrape()
        assert successes(scrape) == dict.fromkeys(READERS | {"cgroup_lifecycle"}, 1)
        assert task_cgroup.label in scrape.values("pressure_waiting_seconds_total", "cgroup")
        assert scrape.values("exporter_feature_available", "reason", feature="block_io") == {
            "not permitted"
        }
        with lab.cgroup(lab.hierarchies().task, f"wbx-later-{os.getpid()}") as later:
            scrape = exporter.scrape()
            assert later.label in scrape.values("pressure_waiting_seconds_total", "cgroup")


def test_two_capabilities_for_all_collectors(tmp_path: Path, io_cgroup: lab.Cgroup) -> None:
    """They lose SQPOLL threads, whose times are other users' to hide, and nothing else."""
    root, two = lab.doctor(), lab.doctor(prefix=TWO_CAPABILITIES)
    assert two.status == root.status == 0
    lost = {
        name: two.reasons.get(name)
        for name, reason in root.reasons.items()
        if two.reasons.get(name) != reason
    }
    assert lost == {"io_uring": "no right", "io_uring_thread_time": None}
    with lab.Exporter(prefix=TWO_CAPABILITIES) as exporter, lab.loop_disk(tmp_path) as disk:
        lab.run_in([io_cgroup], DIRECT_WRITER, disk.path, 4096, 5, 0)
        scrape = exporter.scrape()
        assert successes(scrape) == dict.fromkeys(
            (DEFAULT | {"cgroup_lifecycle"}) - {"io_uring"}, 1
        )
        assert scrape.sum("block_io_size_bytes_count", cgroup=io_cgroup.label) > 0


# Type information -------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 4096, 1 << 20], ids=["empty", "page", "half"])
def test_btf_that_is_cut_off(tmp_path: Path, kept: int) -> None:
    cut = tmp_path / "vmlinux"
    cut.write_bytes(Path(BTF).read_bytes()[:kept])
    report = lab.doctor(prefix=with_mounts(f"mount --bind {cut} {BTF}"))
    assert report.status == 1
    assert {report.reasons[name] for name in PROBES} == {"BTF unreadable"}
    assert {report.reasons[name] for name in READERS} == {""}
    assert f"make {BTF} readable" in report.text


def test_btf_that_is_not_there() -> None:
    report = lab.doctor(prefix=with_mounts("mount -t tmpfs none /sys/kernel/btf"))
    assert report.status == 1
    assert {report.reasons[name] for name in PROBES} == {"no BTF"}
    assert {report.reasons[name] for name in READERS} == {""}
    assert "no such process" not in report.text.lower()


# Descriptors ------------------------------------------------------------------------------------


def test_too_few_descriptors_at_start() -> None:
    """The kernel's answer to a program that it has verified is not the verifier's."""
    for limit in range(40, 84, 4):
        command = ["prlimit", f"--nofile={limit}:{limit}", str(lab.PROGRAM), "doctor"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        said = done.stdout + done.stderr  # in a line where not even the cgroups can be listed
        assert done.returncode == 1, said
        assert "Too many open files" in said
        assert "raise the limit of open files" in said
        assert "report this" not in said
        assert "Traceback" not in said


def test_descriptors_that_run_out() -> None:
    """Of a running exporter: what opens no file goes on; what does fails, and is never empty. All
    is there again when the limit is raised."""
    with lab.Exporter() as exporter:
        process = exporter.process.pid
        client = http.client.HTTPConnection(
            exporter.url.removeprefix("http://"), timeout=PATIENCE_SECONDS
        )

        def scrape() -> lab.Scrape:
            client.request("GET", "/metrics")  # Prometheus keeps its connection, too
            answer = client.getresponse()
            assert answer.status == 200
            return lab.Scrape(answer.read().decode())

        def families(scrape: lab.Scrape) -> set[str]:
            return {name for name in scrape.samples if name.startswith("writeback_")}

        before = scrape()
        assert set(successes(before).values()) == {1}
        lab.sh("prlimit", f"--pid={process}", "--nofile=64:4096")
        scrape()  # those files of cgroups that were kept open are read, and closed then
        during = scrape()
        failed = {name for name, success in successes(during).items() if not success}
        # Those that read no file at a scrape: who a cgroup is, by its path; triggers, of which
        # there are none.
        assert failed == READERS - {"workload", "pressure_triggers"}
        missing = families(before) - families(during)
        assert missing
        assert not any("exporter" in name for name in missing)
        lab.sh("prlimit", f"--pid={process}", "--nofile=4096:4096")
        after = scrape()
        assert set(successes(after).values()) == {1}
        assert families(after) >= families(before)
        client.close()
        exporter.stop()
    for name in failed - {"bdi"}:
        lines = [line for line in exporter.log if f"collector {name} failed" in line]
        assert lines
        assert all("Too many open files; raise the limit of open files" in line for line in lines)
    assert any("collector bdi failed" in line for line in exporter.log)


# Cgroups ----------------------------------------------------------------------------------------


def test_cgroup_namespace(tmp_path: Path) -> None:
    """The hierarchy mounted anew in it has its root where the namespace begins."""
    mount = tmp_path / "cgroup"
    mount.mkdir()
    hierarchy = lab.hierarchies().v2
    if hierarchy is None:
        pytest.skip("no cgroup v2 here")
    with lab.cgroup(hierarchy, f"wbx-namespace-{os.getpid()}") as group:
        prefix = (
            *("sh", "-c", f'echo 0 >{group.directory}/cgroup.procs && exec "$@"', "sh"),
            *("unshare", "--cgroup"),
            *with_mounts(f"mount -t cgroup2 cgroup2 {mount}"),
        )
        report = lab.doctor(f"--path.cgroupfs={mount}", prefix=prefix)
    assert report.reasons["cgroup_names"] == "cgroup namespace"
    assert "docker: --cgroupns=host" in report.text
    assert report.reasons["dirty_throttle"] == report.reasons["block_io"] == ""


@contextmanager
def odd_cgroups(name: bytes) -> Iterator[list[Path]]:
    """A cgroup of that name in each hierarchy."""
    made = []
    try:
        for hierarchy in sorted(lab.hierarchies().all, key=lambda h: h.id):
            directory = Path(hierarchy.mount, os.fsdecode(name))
            directory.mkdir()
            made.append(directory)
        yield made
    finally:
        lab._end_children()
        for directory in made:
            directory.rmdir()


def test_names_of_cgroups_that_are_no_utf8(tmp_path: Path, disk: Disk) -> None:
    """With all collectors: one label, its bytes spelled out, and its files are read."""
    name = b'wbx-\xff"\\-%d' % os.getpid()
    label = f'/wbx-\\xff"\\-{os.getpid()}'
    series = (
        "cgroup_memory_bytes",
        "pressure_waiting_seconds_total",
        "cgroup_io_operations_total",
        "block_io_size_bytes_count",
    )
    with lab.Exporter() as exporter, ExitStack() as stack:
        directories = stack.enter_context(odd_cgroups(name))
        groups = [lab.Cgroup(directory, label) for directory in directories]
        lab.run_in(groups, DIRECT_WRITER, disk.path, 4096, 5, 0)
        scrape = exporter.scrape()  # which has no series twice
        assert set(successes(scrape).values()) == {1}
        for metric in series:
            assert label in scrape.values(metric, "cgroup"), metric
        assert scrape.sum("cgroup_io_operations_total", cgroup=label, device=disk.name) == 5
        counted = scrape.sum("block_io_size_bytes_count", cgroup=label, device=disk.name)

        # Another one whose name is what is spelled out: one series of both.
        directories = stack.enter_context(odd_cgroups(label[1:].encode()))
        groups = [lab.Cgroup(directory, label) for directory in directories]
        lab.run_in(groups, DIRECT_WRITER, disk.path, 4096, 5, 0)
        scrape = exporter.scrape()
        assert set(successes(scrape).values()) == {1}
        both = scrape.sum("block_io_size_bytes_count", cgroup=label, device=disk.name)
        assert counted < both <= 10
        exporter.stop()
    assert not any("ERROR" in line for line in exporter.log)


# Mounts -----------------------------------------------------------------------------------------


def test_scrape_beside_a_dead_file_system(tmp_path: Path) -> None:
    """All collectors serve; it is told of, and nobody looks into it."""
    with dead_file_system(tmp_path / "dead"), lab.Exporter() as exporter:
        for _ in range(3):
            scrape = exporter.scrape()
            assert successes(scrape) == dict.fromkeys(DEFAULT | {"cgroup_lifecycle"}, 1)
        mounts = scrape.select("bdi_info", mountpoint=str(tmp_path / "dead"))
        assert len(mounts) == 1
        # Any thread is in D state now and then; one that hangs is so for ever.
        wait_for(lambda: not sleeping(exporter.process.pid), what="that no thread hangs")
        assert exporter.stop() == 0
