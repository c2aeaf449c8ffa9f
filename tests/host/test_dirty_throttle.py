# SPDX-License-Identifier: Apache-2.0
"""Throttling against a second hook: the witness' raw tracepoint."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests import lab
from tests.host.witness import Witness
from tests.lab import BUFFERED_WRITER, Cgroup, Disk, Scrape
from tests.waiting import wait_for
from writeback_exporter.probes.dirty_throttle import ticks_per_second

MIB = 1 << 20


def throttled(scrape: Scrape, bdi: str) -> dict[str, int]:
    """Pauses on a BDI by cgroup."""
    series = scrape.select("dirty_throttle_seconds_count", bdi=bdi)
    return {dict(labels)["cgroup"]: int(count) for labels, count in series.items()}


def test_a_writer_behind_a_strict_limit(
    exporter: lab.Exporter, disk: Disk, task_cgroup: Cgroup, witness: Witness, tmp_path: Path
) -> None:
    labels = {"cgroup": task_cgroup.label, "bdi": disk.dev}
    limits: list[int] = []

    def asleep() -> float:
        """How many writers a scrape met while they slept: it meets no pause of some."""
        writer = lab.spawn_in([task_cgroup], BUFFERED_WRITER, mount / "file", 16 * MIB)
        most = 0.0
        while writer.poll() is None:
            most = max(most, exporter.scrape().sum("dirty_throttled_tasks", **labels))
            # The limit is kept as a share of the host's memory, which moves.
            limits.append(int(Path("/sys/class/bdi", disk.dev, "max_bytes").read_text()))
            time.sleep(0.02)
        writer.communicate()
        assert writer.returncode == 0
        return most

    with lab.ext4(disk, tmp_path) as mount, lab.strict_limit(disk, 65536):
        assert wait_for(asleep, what="a scrape during a pause") == 1
        scrape = exporter.scrape()
        seen = witness.pauses(disk.dev)

    pauses, ticks = seen[task_cgroup.id]
    assert pauses > 0
    # Under that cgroup and that BDI, and each pause.
    assert throttled(scrape, disk.dev)[task_cgroup.label] == pauses
    others = throttled(scrape, disk.dev).keys() - {task_cgroup.label}
    # mkfs and mount, by this test, may have been throttled too, in its own cgroup.
    (own,) = (line for line in Path("/proc/self/cgroup").read_text().splitlines() if "0::" in line)
    assert others <= {own.removeprefix("0::")}
    for bdi in scrape.values("dirty_throttle_seconds_count", "bdi") - {disk.dev}:
        assert task_cgroup.label not in throttled(scrape, bdi)

    requested = scrape.sum("dirty_throttle_requested_seconds_total", **labels)
    assert requested == pytest.approx(ticks / ticks_per_second(), rel=1e-6)
    if scrape.select("dirty_throttle_method_info", method="requested"):
        assert scrape.sum("dirty_throttle_seconds_sum", **labels) == pytest.approx(requested)

    # The device's own limit decided, and its threshold is the one that was set.
    domains = {
        domain: scrape.sum("dirty_throttle_domain_total", bdi=disk.dev, domain=domain)
        for domain in ("global", "bdi", "memcg")
    }
    assert sum(domains.values()) == sum(count for count, _ in seen.values())
    assert domains["bdi"] >= 0.95 * sum(domains.values())
    assert 0 < scrape.sum("bdi_dirty_threshold_bytes", bdi=disk.dev) <= max(limits) + 4096
    assert scrape.sum("bdi_dirty_ratelimit_bytes", bdi=disk.dev) > 0
    assert scrape.sum("bdi_write_bandwidth_bytes", bdi=disk.dev) > 0

    # It was seen asleep, and is not any more.
    time.sleep(0.3)
    assert exporter.scrape().sum("dirty_throttled_tasks", **labels) == 0


def test_nobody_is_throttled_without_a_limit(
    exporter: lab.Exporter, disk: Disk, task_cgroup: Cgroup, witness: Witness, tmp_path: Path
) -> None:
    """But by the host's own, where others' dirty memory is more than half of that."""
    with lab.ext4(disk, tmp_path) as mount:
        lab.run_in([task_cgroup], BUFFERED_WRITER, mount / "file", MIB)
        lab.sh("sync", "-f", mount)
        scrape = exporter.scrape()
        seen = witness.pauses(disk.dev)
    pauses = sum(count for count, _ in seen.values())
    assert sum(throttled(scrape, disk.dev).values()) == pauses
    domains = "dirty_throttle_domain_total"
    assert scrape.sum(domains, bdi=disk.dev) == pauses
    assert scrape.sum(domains, bdi=disk.dev, domain="global") == pauses
