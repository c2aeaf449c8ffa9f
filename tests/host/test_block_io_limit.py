# SPDX-License-Identifier: Apache-2.0
"""A kernel without fentry, as this one is: the collector is refused with a reason, and all else
runs."""

from __future__ import annotations

import pytest

from tests import lab


@pytest.fixture
def report() -> str:
    text = lab.sh(lab.PROGRAM, "doctor")
    if "ok  dirty_throttle_measured_sleep" in text:
        pytest.skip("this kernel has fentry; the guests' tests measure")
    return text


def test_doctor_says_what_it_needs(report: str) -> None:
    (_, about) = report.split("NO  block_io_limit\n")
    why, remedy, *_ = about.splitlines()
    assert why.strip().startswith("why:")
    assert why.endswith("[needs fentry]")
    assert "CONFIG_DYNAMIC_FTRACE_WITH_DIRECT_CALLS" in remedy
    assert "The main signals work here." in report


@pytest.mark.usefixtures("report")
def test_no_series_says_that_nothing_was_held(exporter: lab.Exporter) -> None:
    """No zeros where nobody looks; the other collectors run."""
    scrape = exporter.scrape()
    (reason,) = scrape.values("exporter_feature_available", "reason", feature="block_io_limit")
    assert reason == "needs fentry"
    assert scrape.sum("exporter_feature_available", feature="block_io_limit") == 0
    assert scrape.sum("exporter_feature_available", feature="block_io") == 1
    assert "writeback_block_io_limit_seconds" not in scrape.text
    assert not scrape.select("exporter_map_entries", map="block_io_limit/limit_held")
