# SPDX-License-Identifier: Apache-2.0
"""The process' own metrics against prometheus-client's, which finds them in another way."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import ProcessCollector
from prometheus_client.metrics_core import Metric

from writeback_exporter.metrics.process import process_metrics


def by_name(metrics: Iterator[Metric] | list[Metric]) -> dict[str, Metric]:
    return {metric.name: metric for metric in metrics}


@pytest.fixture(params=["as it is", "before 6.2"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 6.2 the size of the directory of open files is 0."""
    os_stat = os.stat

    def stat(path: Any, **more: Any) -> os.stat_result:
        return os.stat_result((0,) * 10) if path == "/proc/self/fd" else os_stat(path, **more)

    if request.param == "before 6.2":
        monkeypatch.setattr(os, "stat", stat)


@pytest.mark.usefixtures("kernel")
def test_they_are_what_prometheus_client_has() -> None:
    gc.collect()  # what other tests have left may close files meanwhile
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(1500)]
    try:
        ours = by_name(process_metrics())
        theirs = by_name(list(ProcessCollector(registry=None).collect()))
    finally:
        for descriptor in opened:
            os.close(descriptor)
    assert ours.keys() == theirs.keys()
    for name, metric in ours.items():
        assert (metric.type, metric.documentation) == (
            theirs[name].type,
            theirs[name].documentation,
        )
    values = {name: (m.samples[0].value, theirs[name].samples[0].value) for name, m in ours.items()}
    for name in ("process_start_time_seconds", "process_max_fds"):
        assert values[name][0] == values[name][1]
    assert values["process_open_fds"][0] == values["process_open_fds"][1] - 1  # its listing's own
    assert values["process_open_fds"][0] > 1500
    for name in ("process_virtual_memory_bytes", "process_resident_memory_bytes"):
        assert values[name][0] == pytest.approx(values[name][1], rel=0.1)
    cpu = values["process_cpu_seconds"]
    assert cpu[0] > 0
    assert cpu[1] == pytest.approx(cpu[0], abs=1)  # theirs is read later, and summed in another way
