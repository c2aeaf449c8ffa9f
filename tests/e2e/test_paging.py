# SPDX-License-Identifier: Apache-2.0
"""From a writer that sleeps in the kernel to a page, and back."""

from __future__ import annotations

from tests.e2e.story import Story


def test_a_page_and_its_end(story: Story) -> None:
    (page,) = {
        alert["fingerprint"]: alert
        for alert in story.stack.webhook.alerts("pager", "WritebackCongestion", "firing")
    }.values()
    assert page["labels"]["bdi"] == story.disk.dev
    assert page["labels"]["severity"] == "critical"
    assert page["labels"]["instance"] == story.stack.exporter.url.removeprefix("http://")
    # The page itself names who.
    assert f"Most throttled: {story.cgroup.label} (" in page["annotations"]["description"]
    (end,) = {
        alert["fingerprint"]
        for alert in story.stack.webhook.alerts("pager", "WritebackCongestion", "resolved")
    }
    assert end == page["fingerprint"]


def test_a_throttled_writer_that_is_well_pages_nobody(story: Story) -> None:
    server = story.stack.prometheus
    asleep = server.query_range(
        f'bdi:dirty_throttled_seconds_rate{{bdi="{story.disk.dev}"}}', story.well, story.stuck
    )
    ((_, values),) = asleep
    assert max(value for _, value in values) > 0.05, "it was not throttled at all"
    assert not server.query_range(
        'ALERTS{alertname="WritebackCongestion"}', story.began, story.stuck
    )


def test_what_a_page_means_is_held_back(story: Story) -> None:
    assert set(story.suppressed) <= {
        "CgroupDirtyThrottled",
        "DirtyPageSpike",
        "PressureStall",
        "SyncCallStuck",
    }
    assert "CgroupDirtyThrottled" in story.suppressed


def test_only_critical_alerts_page(story: Story) -> None:
    for path, message in story.stack.webhook.received:
        severities = {alert["labels"]["severity"] for alert in message["alerts"]}
        assert severities == {"critical" if path == "/pager" else "warning"}


def test_no_rule_fails(story: Story) -> None:
    failed = story.stack.prometheus.query("prometheus_rule_evaluation_failures_total > 0")
    assert failed == []
