# SPDX-License-Identifier: Apache-2.0
"""Writeback work against a second hook, the witness' raw tracepoint, and files of known size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import lab
from tests.host.conftest import NOBODY
from tests.host.witness import Witness
from tests.lab import BUFFERED_WRITER, Disk, Scrape, exporter_in_process
from tests.waiting import wait_for
from writeback_exporter.exporter import Exporter
from writeback_exporter.kernel.libbpf import KernelBtf
from writeback_exporter.probes.work import Work, reasons

MIB = 1 << 20


def queued(witness: Witness, disk: Disk) -> dict[str, int]:
    """What the witness saw, by reason."""
    kernel = KernelBtf()
    names = reasons(kernel)
    kernel.close()
    return {names[reason]: count for reason, count in witness.queued(disk.dev).items()}


def by_reason(scrape: Scrape, name: str, disk: Disk) -> dict[str, int]:
    return {
        dict(series)["reason"]: int(value)
        for series, value in scrape.select(name, bdi=disk.dev).items()
    }


def write_and_sync(mount: Path, size: int) -> None:
    lab.run_in([], BUFFERED_WRITER, mount / "file", size)
    lab.sh("sync", "-f", mount)


def test_sync(exporter: lab.Exporter, disk: Disk, witness: Witness, tmp_path: Path) -> None:
    with lab.ext4(disk, tmp_path) as mount:
        write_and_sync(mount, 8 * MIB)

        def at_rest() -> tuple[Scrape, dict[str, int]] | None:
            """The flusher has work of its own, and others have all that is mounted written."""
            before = queued(witness, disk)
            scrape = exporter.scrape()
            is_open = any(by_reason(scrape, "work_oldest_seconds", disk).values())
            return None if is_open or queued(witness, disk) != before else (scrape, before)

        scrape, truth = wait_for(at_rest, what="an end of the disk's work")
    assert by_reason(scrape, "work_seconds_count", disk)["sync"] == truth["sync"] > 0
    size = by_reason(scrape, "work_bytes_total", disk)
    # The flusher may have come before, for another reason.
    assert sum(size.values()) >= 8 * MIB
    assert size["sync"] <= 8 * MIB
    assert set(size) <= {"sync", "periodic", "background", "vmscan"}


def probe_of(exporter: Exporter) -> Work:
    (probe,) = (p for p in exporter.running if isinstance(p, Work))
    return probe


@pytest.mark.parametrize("full", ["bdis", "queued", "running"])
def test_full_maps(
    small: dict[str, int], plugged: Disk, witness: Witness, tmp_path: Path, full: str
) -> None:
    small[full] = 0
    with lab.ext4(plugged, tmp_path) as mount, exporter_in_process("work") as exporter:
        before = queued(witness, plugged).get("sync", 0)
        write_and_sync(mount, 2 * MIB)
        scrape = lab.scrape(exporter)
        works = queued(witness, plugged)["sync"] - before
    dropped = scrape.sum("exporter_map_dropped_total", map=f"work/{full}")
    assert dropped >= works > 0
    counts = by_reason(scrape, "work_seconds_count", plugged)
    if full == "queued":  # counted from when it was begun
        assert counts["sync"] == works
        assert sum(by_reason(scrape, "work_bytes_total", plugged).values()) >= 2 * MIB
    else:
        assert counts == {}


def test_open_work_of_a_device_that_is_gone(small: dict[str, int], plugged: Disk) -> None:
    """Work without a BDI that we know is not the oldest for ever."""
    small["queued"] = 0
    with exporter_in_process("work") as exporter:
        scrape = lab.scrape(exporter)
        assert max(scrape.select("work_oldest_seconds").values(), default=0) < 3600
        assert probe_of(exporter).map("queued").lookup(NOBODY * 8) is None
