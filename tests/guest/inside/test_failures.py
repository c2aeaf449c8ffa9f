# SPDX-License-Identifier: Apache-2.0
"""Hosts that lack something which no host's test may take away: controllers, tracefs and debugfs,
perf events; and what a cgroup namespace does to names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import lab
from tests.lab import BUFFERED_WRITER, DIRECT_WRITER, TWO_CAPABILITIES, with_mounts
from writeback_exporter.names.cgroups import Hierarchy

from .test_main_signals import FAST, MIB, SLOW, io_stat

LOCKED_MEMORY = ("prlimit", "--memlock=unlimited:unlimited")
WITHOUT_TRACEFS = with_mounts("umount /sys/kernel/tracing /sys/kernel/debug")
CONTROL = Path("/sys/fs/cgroup/cgroup.subtree_control")
PARANOID = Path("/proc/sys/kernel/perf_event_paranoid")


@contextmanager
def without(controller: str) -> Iterator[None]:
    try:
        CONTROL.write_text(f"-{controller}")
        yield
    finally:
        CONTROL.write_text("+io +memory")


def reasons(scrape: lab.Scrape) -> dict[str, str]:
    series = map(dict, scrape.select("exporter_feature_available"))
    return {labels["feature"]: labels["reason"] for labels in series}


def test_controllers_off_below_the_root(tmp_path: Path) -> None:
    """Numbers land where the kernel charges them, and a reason says so at each scrape."""
    hierarchy = lab.hierarchies().io
    with lab.ext4(FAST, tmp_path) as mount, lab.Exporter() as exporter:

        def written(name: str, off: str) -> dict[str, tuple[float, float]]:
            """Direct writes to one disk and buffered bytes to another, by cgroup."""
            with without(off), lab.cgroup(hierarchy, name) as group:
                before = exporter.scrape()
                lab.run_in([group], DIRECT_WRITER, SLOW.path, 4096, 20, 0)
                lab.run_in([group], BUFFERED_WRITER, mount / name, MIB)
                lab.sh("sync", "-f", mount)
                after = exporter.scrape()
                found.update(reasons(after))
                assert set(after.select("exporter_collector_success").values()) == {1}
            direct, buffered = "block_io_size_bytes_count", "block_io_size_bytes_sum"
            return {
                cgroup: (
                    after.sum(direct, cgroup=cgroup, device=SLOW.name, op="write")
                    - before.sum(direct, cgroup=cgroup, device=SLOW.name, op="write"),
                    after.sum(buffered, cgroup=cgroup, device=FAST.name, op="write")
                    - before.sum(buffered, cgroup=cgroup, device=FAST.name, op="write"),
                )
                for cgroup in (group.label, "/")
            }

        found: dict[str, str] = {}
        without_io = written("without-io", "io")
        assert (
            found["block_io_attribution"] == found["writeback_attribution"] == ("io controller off")
        )
        assert without_io["/without-io"] == (0, 0)
        assert without_io["/"][0] == 20
        assert without_io["/"][1] >= MIB

        # The io controller brings the memory controller along, where it is not to be seen.
        without_memory = written("without-memory", "memory")
        assert found["block_io_attribution"] == found["writeback_attribution"] == ""
        assert without_memory["/without-memory"] == (20, MIB)
        assert without_memory["/"][0] == 0


def test_cgroup_namespace() -> None:
    """What is above its root has no name: it is in other, and no number is lost. What is below has
    its path from there."""
    hierarchy = lab.hierarchies().io
    with (
        lab.cgroup(hierarchy, "namespace") as group,
        lab.cgroup(hierarchy, "above") as above,
        lab.cgroup(Hierarchy(0, str(group.directory)), "exporter") as own,
        lab.cgroup(Hierarchy(0, str(group.directory)), "below") as below,
    ):
        prefix = (
            *("sh", "-c", f'echo 0 >{group.directory}/cgroup.procs && exec "$@"', "sh"),
            *("unshare", "--cgroup"),
            *with_mounts(
                f"echo 0 >{own.directory}/cgroup.procs",
                "umount /sys/fs/cgroup",
                "mount -t cgroup2 cgroup2 /sys/fs/cgroup",
            ),
        )
        with lab.Exporter(prefix=prefix) as exporter:
            (group.directory / "cgroup.subtree_control").write_text("+io +memory")
            lab.run_in([above], DIRECT_WRITER, FAST.path, 4096, 30, 0)
            lab.run_in([below], DIRECT_WRITER, FAST.path, 4096, 20, 0)
            scrape, truth = exporter.scrape(), io_stat(below, FAST)
    assert reasons(scrape)["cgroup_names"] == "cgroup namespace"
    assert any("docker: --cgroupns=host" in line for line in exporter.log)
    assert set(scrape.select("exporter_collector_success").values()) == {1}
    written = {"op": "write", "device": FAST.name}
    assert scrape.sum("block_io_size_bytes_count", cgroup="other", **written) == 30
    assert scrape.sum("block_io_size_bytes_count", cgroup="/below", **written) == truth["wios"]
    assert scrape.sum("block_io_size_bytes_sum", cgroup="/below", **written) == truth["wbytes"]
    assert truth["wios"] == 20
    assert scrape.sum("exporter_collapsed_cgroups", reason="no name") >= 1


def test_locked_memory() -> None:
    """Before 5.11 EPERM may be for RLIMIT_MEMLOCK, and is then not blamed on the container."""
    report = lab.doctor(prefix=("prlimit", "--memlock=65536:65536", *TWO_CAPABILITIES))
    if "bpf_map_charge_init" not in Path("/proc/kallsyms").read_text():
        assert report.status == 0
        return
    assert report.status == 1
    assert report.reasons["dirty_throttle"] == report.reasons["block_io"] == "no memory"
    assert "which is 64 KiB" in report.text
    assert "grant CAP_SYS_RESOURCE" in report.text
    assert "seccomp" not in report.text


def test_what_is_not_needed() -> None:
    """With CAP_BPF and CAP_PERFMON alone, without tracefs and debugfs, where perf events are
    forbidden (4 is Debian's own, stricter than the kernel's strictest): all signals of BPF."""
    before = PARANOID.read_text()
    PARANOID.write_text("4")
    try:
        with (
            lab.Exporter(prefix=(*WITHOUT_TRACEFS, *LOCKED_MEMORY, *TWO_CAPABILITIES)) as exporter,
            lab.cgroup(lab.hierarchies().io, "needed") as group,
        ):
            lab.run_in([group], DIRECT_WRITER, FAST.path, 4096, 40, 0)
            scrape = exporter.scrape()
    finally:
        PARANOID.write_text(before)
    why = reasons(scrape)
    assert why["bdi_debugfs"] == "not mounted"
    assert why["io_uring"] in ("no right", "not in this kernel")
    # No Debian kernel has io.latency.
    rest = set(why) - {
        *("bdi_debugfs", "io_uring", "block_io_request_slots", "block_io_limit_iolatency"),
    }
    assert {why[name] for name in rest if not name.startswith("pressure")} == {""}
    assert {"dirty_throttle_measured_sleep", "page_wait_exact_end"} <= rest
    assert set(scrape.select("exporter_collector_success").values()) == {1}
    labels = {"cgroup": group.label, "device": FAST.name, "op": "write"}
    assert scrape.sum("block_io_size_bytes_count", **labels) == 40
    assert scrape.select("dirty_throttle_method_info", method="fexit")
