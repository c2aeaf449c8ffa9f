# SPDX-License-Identifier: Apache-2.0
"""Limits of a loop device's BDI, as they are set."""

from __future__ import annotations

from pathlib import Path

from tests import lab
from tests.lab import Disk
from tests.waiting import wait_for

SETTINGS = ("min_ratio", "max_ratio", "min_bytes", "max_bytes", "strict_limit", "read_ahead_bytes")


def shown(exporter: lab.Exporter, disk: Disk) -> dict[str, float]:
    scrape = exporter.scrape()
    return {
        name: value
        for name in SETTINGS
        for value in scrape.select(f"bdi_{name}", bdi=disk.dev).values()
    }


def set_to(disk: Disk) -> dict[str, float]:
    """What the kernel says, the fine ratios in parts of a million."""
    bdi = Path("/sys/class/bdi", disk.dev)

    def read(name: str) -> int:
        return int((bdi / name).read_text())

    return {
        "min_ratio": read("min_ratio_fine") / 1_000_000,
        "max_ratio": read("max_ratio_fine") / 1_000_000,
        "min_bytes": read("min_bytes"),
        "max_bytes": read("max_bytes"),
        "strict_limit": read("strict_limit"),
        "read_ahead_bytes": read("read_ahead_kb") * 1024,
    }


def test_limits(plugged: Disk) -> None:
    with lab.Exporter(*lab.only("bdi")) as exporter:

        def agreed() -> dict[str, float] | None:
            """Bytes are a share of the host's threshold, which moves."""
            before, now = set_to(plugged), shown(exporter, plugged)
            return now if before == now == set_to(plugged) else None

        before = shown(exporter, plugged)
        assert (before["strict_limit"], before["max_ratio"]) == (0, 1)
        with lab.strict_limit(plugged, 16 << 20), plugged.queue(read_ahead_kb="512"):
            now = wait_for(agreed, what="that both agree")
            assert now["strict_limit"] == 1
            assert 0 < now["max_ratio"] < 1
            assert now["read_ahead_bytes"] == 512 * 1024
        after = shown(exporter, plugged)
        assert after["max_ratio"] == 1
        assert after["read_ahead_bytes"] == before["read_ahead_bytes"]


def test_a_disk_that_is_unplugged(exporter: lab.Exporter, tmp_path: Path) -> None:
    """Its loop device stays, without a file and without series."""
    with lab.loop_disk(tmp_path) as disk:
        dev = disk.dev
        assert shown(exporter, disk).keys() == set(SETTINGS)
    assert dev not in exporter.scrape().values("bdi_max_ratio", "bdi")


def test_debugfs_or_the_reason(exporter: lab.Exporter) -> None:
    scrape = exporter.scrape()
    features = scrape.select("exporter_feature_available", feature="bdi_debugfs")
    readable = Path("/sys/kernel/debug/bdi").is_dir()
    assert list(features.values()) == [float(readable)]
    if not readable:
        assert scrape.values("exporter_feature_available", "reason", feature="bdi_debugfs") == {
            "not mounted"
        }
        assert not scrape.select("wb_dirtied_bytes_total")
