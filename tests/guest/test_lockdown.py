# SPDX-License-Identifier: Apache-2.0
"""Kernels that are locked down: BPF may read their memory, or the message says why it may not."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from tests.lab import Scrape

from . import kernels, vm

PROGRAM = Path(sys.executable).with_name("writeback-exporter")
# In a container securityfs, which tells of it, is rarely mounted.
DOCTORS = (
    f"{PROGRAM} doctor >/out/mounted; echo $? >>/out/mounted; "
    "umount /sys/kernel/security; "
    f"{PROGRAM} doctor >/out/unmounted; echo $? >>/out/unmounted"
)
WRITE_AND_SCRAPE = """
import pathlib
from tests import lab
with lab.Exporter() as exporter, lab.cgroup(lab.hierarchies().io, "locked") as group:
    lab.run_in([group], lab.DIRECT_WRITER, "/dev/vdb", 4096, 40, 0)
    pathlib.Path("/out/metrics").write_bytes(exporter.get("/metrics"))
"""
SCRAPE = shlex.join([sys.executable, "-c", WRITE_AND_SCRAPE])
BPF = {"dirty_throttle", "block_io", "work", "cgroup_lifecycle"}
FILES = {"pressure", "devices", "host_memory", "bdi", "cgroup_io", "cgroup_memory"}


def run(kernel: kernels.Kernel, mode: str, command: str, out: Path) -> Scrape:
    result = vm.run(kernel, f"{command}; {SCRAPE}", out=out, append=f"lockdown={mode}")
    assert "Traceback" not in result.output, result.output
    return Scrape((out / "metrics").read_text())


def reasons(scrape: Scrape) -> dict[str, str]:
    series = map(dict, scrape.select("exporter_feature_available"))
    return {labels["feature"]: labels["reason"] for labels in series}


def test_confidentiality(kernel: kernels.Kernel, tmp_path: Path) -> None:
    """Nothing is counted by BPF, and said so; the files of the kernel go on."""
    scrape = run(kernel, "confidentiality", DOCTORS, tmp_path)
    why = reasons(scrape)
    assert {why[name] for name in BPF} == {"lockdown"}
    assert {why[name] for name in (*FILES, "bdi_debugfs")} == {""}
    successes = scrape.select("exporter_collector_success")
    assert set(successes.values()) == {1}
    assert scrape.values("exporter_collector_success", "collector") >= FILES
    assert scrape.sum("cgroup_io_operations_total", cgroup="/locked", device="vdb") == 40
    assert not any("block_io" in name or "dirty_throttle" in name for name in scrape.samples)
    for file in ("mounted", "unmounted"):
        report = (tmp_path / file).read_text()
        assert report.endswith("Main signals are missing.\n1\n"), report
        for name in ("dirty_throttle", "block_io"):
            line = report.partition(f"NO  {name}\n")[2]
            assert line.partition("\n")[0].endswith("[lockdown]"), report
        assert "boot with lockdown=integrity" in report
        assert "report this" not in report


def test_integrity(kernel: kernels.Kernel, tmp_path: Path) -> None:
    """As secure boot sets it: all main signals work."""
    scrape = run(kernel, "integrity", "true", tmp_path)
    assert {reasons(scrape)[name] for name in (*BPF, *FILES, "bdi_debugfs")} == {""}
    labels = {"cgroup": "/locked", "device": "vdb"}
    assert scrape.sum("block_io_size_bytes_count", **labels) == 40
