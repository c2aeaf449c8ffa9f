# SPDX-License-Identifier: Apache-2.0
"""A real exporter and clients that behave badly; and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import lab


def connect(exporter: lab.Exporter) -> socket.socket:
    host, port = exporter.url.removeprefix("http://").rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=30)


def test_idle_and_slow_clients_do_not_stop_a_scrape(exporter: lab.Exporter) -> None:
    with ExitStack() as stack:
        for _ in range(50):
            stack.enter_context(connect(exporter))
        half = stack.enter_context(connect(exporter))
        half.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        deaf = stack.enter_context(connect(exporter))
        deaf.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n" * 20)  # and reads nothing
        for _ in range(3):
            assert "writeback_exporter_build_info" in exporter.get("/metrics").decode()
            half.sendall(b"a")


def test_formats(exporter: lab.Exporter) -> None:
    plain = exporter.get("/metrics")
    zipped = exporter.get("/metrics", {"Accept-Encoding": "gzip"})
    assert {line.split(b" ")[0] for line in plain.splitlines() if b"_build_info" in line} == {
        line.split(b" ")[0] for line in zipped.splitlines() if b"_build_info" in line
    }
    openmetrics = exporter.get("/metrics", {"Accept": "application/openmetrics-text"})
    assert openmetrics.endswith(b"# EOF\n")
    assert exporter.get("/-/healthy")
    assert exporter.get("/-/ready")
    assert b"dirty_throttle_measured_sleep" in exporter.get("/")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_cleanly_and_leaves_nothing(number: signal.Signals) -> None:
    with lab.Exporter() as exporter:
        exporter.scrape()
        exporter.process.send_signal(number)
        _, rest = exporter.process.communicate(timeout=30)
        assert exporter.process.returncode == 0
        assert "Traceback" not in rest


def test_snapshot(tmp_path: Path) -> None:
    output = tmp_path / "writeback.prom"
    flags = ["snapshot", "--snapshot.duration=200ms"]
    lab.sh(lab.PROGRAM, *flags, f"--snapshot.output={output}")
    printed = lab.sh(lab.PROGRAM, *flags) + "\n"
    for scrape in (lab.Scrape(output.read_text()), lab.Scrape(printed)):
        successes = scrape.select("exporter_collector_success").values()
        assert len(successes) >= 3
        assert set(successes) == {1}
    assert os.listdir(tmp_path) == [output.name]


def test_two_exporters_count_the_same(exporter: lab.Exporter, tmp_path: Path) -> None:
    with lab.Exporter() as second, lab.loop_disk(tmp_path) as disk:
        lab.run_in([], lab.DIRECT_WRITER, disk.path, 4096, 100, 0)
        counts = [
            e.scrape().sum("block_io_size_bytes_count", device=disk.name)
            for e in (exporter, second)
        ]
        assert counts[0] == counts[1] > 0


def test_attaching_while_requests_are_in_flight(tmp_path: Path) -> None:
    """What began before we attached is not counted, and nothing stays open for ever."""
    with lab.loop_disk(tmp_path) as disk:
        endless = lab.DIRECT_WRITER.replace("range(count)", "iter(int, 1)").replace("i * size", "0")
        writers = [lab.spawn_in([], endless, disk.path, 4096, 0, 0) for _ in range(4)]
        before = disk.stats()
        with lab.Exporter() as exporter:
            time.sleep(0.5)
            assert all(writer.poll() is None for writer in writers)
            for writer in writers:
                writer.kill()
                writer.communicate(timeout=120)
            truth = disk.stats() - before
            scrape = exporter.scrape()
        counted = scrape.sum("block_io_size_bytes_count", device=disk.name)
        unended = scrape.sum("exporter_map_dropped_total", map="block_io/requests")
        assert 0 < counted <= truth.writes
        assert scrape.sum("block_io_inflight", device=disk.name) <= unended + 1
