# SPDX-License-Identifier: Apache-2.0
"""When the exporter forgets; collectors that fail, and what the others do meanwhile."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import pytest

from tests import lab
from tests.waiting import PATIENCE_SECONDS
from writeback_exporter import exporter as module
from writeback_exporter.exporter import Exporter
from writeback_exporter.features import Feature
from writeback_exporter.files.bdi import Bdis
from writeback_exporter.files.host_memory import HostMemory
from writeback_exporter.names import cgroups
from writeback_exporter.settings import Settings


def gone_cgroup(exporter: Exporter) -> tuple[int, int]:
    """(hierarchy, id) of a cgroup that was made and removed."""
    hierarchy = exporter.hierarchies.task
    with lab.cgroup(hierarchy, f"wbx-gone-{os.getpid()}") as group:
        return hierarchy.id, group.id


def is_known(exporter: Exporter, cgroup: tuple[int, int]) -> bool:
    return exporter.host.cgroups.name(exporter.hierarchies.task, cgroup[1]) != cgroups.OTHER


def scrapes_until_forgotten(exporter: Exporter, cgroup: tuple[int, int]) -> list[lab.Scrape]:
    scrapes: list[lab.Scrape] = []
    while is_known(exporter, cgroup):  # its release may take a moment
        assert len(scrapes) < 500
        scrapes.append(lab.scrape(exporter))
        time.sleep(0.02)
    return scrapes


@pytest.fixture
def short_retention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "RETENTION_SECONDS", 0.0)


@pytest.mark.usefixtures("short_retention")
def test_a_view_of_the_status_page_is_no_scrape() -> None:
    """What has gone is forgotten after a scrape has shown it, however often somebody looked."""
    with lab.exporter_in_process("block_io", "dirty_throttle") as exporter:
        gone = gone_cgroup(exporter)
        end = time.monotonic() + 1  # its release may take a moment
        while time.monotonic() < end:
            exporter.observe()
            time.sleep(0.02)
        assert is_known(exporter, gone)
        assert scrapes_until_forgotten(exporter, gone)


@pytest.mark.usefixtures("short_retention")
def test_one_that_keeps_nothing_holds_up_no_forgetting(monkeypatch: pytest.MonkeyPatch) -> None:
    with lab.exporter_in_process("block_io", "host_memory") as exporter:
        (reader,) = (c for c in exporter.running if isinstance(c, HostMemory))
        monkeypatch.setattr(reader, "_procfs", "/nowhere")
        monkeypatch.setattr(reader, "_vmstat", None)  # as after a bug of ours
        gone = gone_cgroup(exporter)
        scrapes = scrapes_until_forgotten(exporter, gone)
    for scrape in scrapes:
        assert scrape.sum("exporter_collector_success", collector="host_memory") == 0
        assert scrape.sum("exporter_collector_success", collector="block_io") == 1


@pytest.mark.usefixtures("short_retention")
def test_one_that_fails_for_good_is_waited_for_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the others forget meanwhile it is told when it works again."""
    monkeypatch.setattr(module, "_PATIENCE", 5)
    told: list[set[tuple[int, int]]] = []
    with lab.exporter_in_process("block_io", "bdi") as exporter:
        (reader,) = (c for c in exporter.running if isinstance(c, Bdis))
        works, forget = reader.read, reader.forget

        def note(gone: set[tuple[int, int]], *rest: object) -> None:
            told.append(set(gone))
            forget(gone, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(reader, "forget", note)
        monkeypatch.setattr(reader, "read", None)
        cgroup = gone_cgroup(exporter)
        for _ in range(5):
            lab.scrape(exporter)
        assert is_known(exporter, cgroup)
        scrapes_until_forgotten(exporter, cgroup)
        monkeypatch.setattr(reader, "read", works)
        scrape = lab.scrape(exporter)
        assert scrape.sum("exporter_collector_success", collector="bdi") == 1
    assert [cgroup in gone for gone in told] == [True]


def test_a_scrape_during_the_start_waits_for_all_collectors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opening, go_on = threading.Event(), threading.Event()
    scrapes: list[lab.Scrape] = []

    def open_slowly(*arguments: Any) -> list[Feature]:
        opening.set()
        assert go_on.wait(PATIENCE_SECONDS)
        return opened(*arguments)

    def scrape_while_it_opens() -> None:
        assert opening.wait(PATIENCE_SECONDS)
        scrapes.append(lab.scrape(exporter))

    opened = HostMemory.open
    monkeypatch.setattr(HostMemory, "open", open_slowly)
    collectors = frozenset({"block_io", "host_memory"})
    exporter = Exporter(Settings((), "/metrics", collectors, "/proc", "/sys", "/sys/fs/cgroup"))
    scraper = threading.Thread(target=scrape_while_it_opens)
    starter = threading.Thread(target=exporter.start)
    try:
        for thread in (scraper, starter):
            thread.start()
        assert opening.wait(PATIENCE_SECONDS)
        scraper.join(0.3)
        assert not scrapes
    finally:
        go_on.set()
        for thread in (scraper, starter):
            thread.join(PATIENCE_SECONDS)
        exporter.close()
    (scrape,) = scrapes
    shown = scrape.values("exporter_collector_success", "collector")
    assert shown == {*collectors, "cgroup_lifecycle"}
