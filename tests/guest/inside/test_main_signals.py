# SPDX-License-Identifier: Apache-2.0
"""Both main signals where all is allowed: cgroup v2 with io and memory, fexit, a slow disk."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import lab
from tests.lab import BUFFERED_WRITER, DIRECT_READER, DIRECT_WRITER, Disk

from .kernel import dirty_limits, ftrace, pauses, write_until_throttled

MIB = 1 << 20
SLOW, FAST = Disk("/dev/vda"), Disk("/dev/vdb")  # 4 MB/s of writes, and unlimited


def throttle_domains(scrape: lab.Scrape, disk: Disk = SLOW) -> dict[str, float]:
    return {
        domain: scrape.sum("dirty_throttle_domain_total", bdi=disk.dev, domain=domain)
        for domain in ("global", "bdi", "memcg")
    }


def io_stat(group: lab.Cgroup, disk: Disk) -> dict[str, int]:
    """The kernel's own count of a cgroup's bios on a disk."""
    for line in (group.directory / "io.stat").read_text().splitlines():
        device, *fields = line.split()
        if device == disk.dev:
            return {key: int(value) for key, value in (field.split("=") for field in fields)}
    return {}


def test_doctor() -> None:
    report = lab.sh(lab.PROGRAM, "doctor")
    for feature in (
        "dirty_throttle",
        "dirty_throttle_measured_sleep",
        "block_io",
        "work",
        "page_wait",
        "page_wait_exact_end",
    ):
        assert re.search(rf"^ok +{feature}$", report, re.MULTILINE), report
    assert "The main signals work here." in report


def test_direct_io_is_exact() -> None:
    hierarchy = lab.hierarchies().io
    with (
        lab.Exporter(*lab.only("dirty_throttle", "block_io")) as exporter,
        lab.cgroup(hierarchy, "direct") as group,
    ):
        before, io_before = FAST.settled(), io_stat(group, FAST)
        assert io_before == {}
        for size, count in ((512, 20), (4096, 200), (65536, 50)):
            lab.run_in([group], DIRECT_WRITER, FAST.path, size, count, 0)
            lab.run_in([group], DIRECT_READER, FAST.path, size, count, 0)
        truth, own = FAST.settled() - before, io_stat(group, FAST)
        scrape = exporter.scrape()
        for op, ios, total in (
            ("read", truth.reads, truth.read_bytes),
            ("write", truth.writes, truth.written_bytes),
        ):
            labels = {"device": FAST.name, "op": op, "cgroup": "/direct"}
            counted = (
                scrape.sum("block_io_size_bytes_count", **labels),
                scrape.sum("block_io_size_bytes_sum", **labels),
            )
            assert counted == (270, 20 * 512 + 200 * 4096 + 50 * 65536)
            assert counted == (ios, total)
            assert counted == (own[f"{op[0]}ios"], own[f"{op[0]}bytes"])
        assert not any(scrape.select("exporter_map_dropped_total").values())
        assert not any(scrape.select("exporter_program_missed_total").values())


def test_a_throttled_writer(tmp_path: Path) -> None:
    """Throttled by the global limit: each pause counted, its sleep measured, and the flusher's
    writes charged to the writer's cgroup."""
    hierarchy = lab.hierarchies().io
    with (
        lab.ext4(SLOW, tmp_path) as mount,
        lab.Exporter(*lab.only("dirty_throttle", "block_io")) as exporter,
        lab.cgroup(hierarchy, "slow") as group,
        dirty_limits(MIB, 2 * MIB),
    ):
        with ftrace("writeback/balance_dirty_pages") as trace:
            size = write_until_throttled([group], mount / "file", 8 * MIB, lambda: pauses(trace))
        asked = [int(pause) for pause in re.findall(r" pause=(-?\d+)", trace.read_text())]
        lab.sh("sync", "-f", mount)
        scrape, own = exporter.scrape(), io_stat(group, SLOW)

        labels = {"cgroup": "/slow", "bdi": SLOW.dev}
        counts = {
            (dict(series)["cgroup"], dict(series)["bdi"]): count
            for series, count in scrape.select("dirty_throttle_seconds_count").items()
        }
        assert counts == {("/slow", SLOW.dev): sum(pause > 0 for pause in asked)}

        assert scrape.select("dirty_throttle_method_info", method="fexit")
        slept = scrape.sum("dirty_throttle_seconds_sum", **labels)
        requested = scrape.sum("dirty_throttle_requested_seconds_total", **labels)
        # The trace record has whole milliseconds, and Debian's tick is 4 of them.
        assert requested == pytest.approx(sum(pause for pause in asked if pause > 0) / 1000)
        # A timer never ends early; how much later it ends is the kernel's affair.
        assert requested < slept
        assert scrape.sum("dirty_throttled_tasks", **labels) == 0
        domains = throttle_domains(scrape)
        assert sum(domains.values()) == sum(counts.values())
        # The memcg has its share of the same limits, and the kernel selects either.
        assert domains["bdi"] == 0

        written = {"device": SLOW.name, "op": "write"}
        assert own["wbytes"] >= size
        assert scrape.sum("block_io_size_bytes_sum", cgroup="/slow", **written) == own["wbytes"]
        assert scrape.sum("block_io_device_seconds_sum", cgroup="/slow", **written) > 0.5

        # The root cgroup has no such share: there all are the global limit's.
        with ftrace("writeback/balance_dirty_pages") as trace:
            write_until_throttled([], mount / "of-root", 8 * MIB, lambda: pauses(trace))
        later = exporter.scrape()
        root = (later - scrape).sum("dirty_throttle_seconds_count", cgroup="/", bdi=SLOW.dev)
        assert root == pauses(trace)
        assert throttle_domains(later - scrape) == {"global": root, "bdi": 0, "memcg": 0}
        assert not any(later.select("exporter_map_dropped_total").values())


def test_a_cgroup_at_its_memory_limit(tmp_path: Path) -> None:
    """memory.high makes the memcg's own dirty limit the one that decides."""
    with (
        lab.ext4(SLOW, tmp_path) as mount,
        lab.Exporter(*lab.only("dirty_throttle", "block_io")) as exporter,
        lab.cgroup(lab.hierarchies().io, "small") as group,
    ):
        (group.directory / "memory.high").write_text(str(16 * MIB))
        # Long enough: the kernel sums a memcg's dirty pages every two seconds only.
        lab.run_in([group], BUFFERED_WRITER, mount / "file", 30 * MIB)
        scrape = exporter.scrape()
        domains = throttle_domains(scrape)
        assert domains["memcg"] > 0, domains
        assert domains["global"] == domains["bdi"] == 0


def test_a_strict_limit_of_the_device(tmp_path: Path) -> None:
    if not Path("/sys/class/bdi", FAST.dev, "strict_limit").exists():
        pytest.skip("this kernel has no strict_limit in sysfs (6.2)")
    with (
        lab.ext4(FAST, tmp_path) as mount,
        lab.Exporter(*lab.only("dirty_throttle", "block_io")) as exporter,
        lab.cgroup(lab.hierarchies().io, "strict") as group,
        lab.strict_limit(FAST, 65536),
    ):
        lab.run_in([group], BUFFERED_WRITER, mount / "file", 2 * MIB)
        domains = throttle_domains(exporter.scrape(), FAST)
        assert domains["bdi"] > 0
        assert domains["bdi"] >= 0.9 * sum(domains.values())
