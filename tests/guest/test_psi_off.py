# SPDX-License-Identifier: Apache-2.0
"""Kernels that are told at boot to account no pressure: never zeros, but what to do."""

from __future__ import annotations

import sys
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from . import vm
from .kernels import Kernel

EXPORTER = Path(sys.executable).with_name("writeback-exporter")
# A cgroup beside the root: in 5.10 it has pressure files also when PSI is off.
COMMAND = (
    "mkdir /sys/fs/cgroup/some && "
    f"{EXPORTER} snapshot --snapshot.duration=0s --no-collector.block_io "
    "--no-collector.dirty_throttle '--pressure.trigger=io some 150ms/2s' "
    "--pressure.trigger.cgroups=/some --snapshot.output=/out/metrics"
)


def observe(kernel: Kernel, append: str, out: Path) -> tuple[dict[str, str], set[str], str]:
    """Reasons by feature, cgroups that have pressure, and the log."""
    result = vm.run(kernel, COMMAND, out=out, append=append)
    samples = [
        sample
        for family in text_string_to_metric_families((out / "metrics").read_text())
        for sample in family.samples
    ]
    features = {
        s.labels["feature"]: s.labels["reason"]
        for s in samples
        if s.name == "writeback_exporter_feature_available"
    }
    names = ("pressure_waiting_seconds_total", "pressure_stalled_seconds_total")
    cgroups = {s.labels["cgroup"] for s in samples if s.name.removeprefix("writeback_") in names}
    return features, cgroups, result.output


def test_off(kernel: Kernel, tmp_path: Path) -> None:
    features, cgroups, log = observe(kernel, "psi=0", tmp_path)
    assert features["pressure"] == features["pressure_triggers"] == "PSI off"
    assert cgroups == set()
    assert "pressure is not available: the kernel accounts no pressure" in log
    assert "boot with psi=1" in log
    assert "Traceback" not in log


def test_off_in_cgroups(kernel: Kernel, tmp_path: Path) -> None:
    features, cgroups, log = observe(kernel, "cgroup_disable=pressure", tmp_path)
    assert features["pressure"] == ""
    if kernel.name == "5.10":  # has no such parameter
        assert cgroups == {"/", "/some"}
        return
    assert features["pressure_cgroups"] == "cgroup pressure off"
    assert features["pressure_triggers_of_cgroups"] == "cgroup pressure off"
    assert features["pressure_trigger io some 150ms/2s"] == ""
    assert cgroups == {"/"}
    assert "boot without cgroup_disable=pressure" in log
