# SPDX-License-Identifier: Apache-2.0
"""A real exporter and clients that behave badly; and how it ends."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import ssl
import threading
import time
import urllib.parse
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests import lab
from tests.unit import certificates
from tests.waiting import PATIENCE_SECONDS


def connect(exporter: lab.Exporter) -> socket.socket:
    url = urllib.parse.urlsplit(exporter.url)
    return socket.create_connection((url.hostname, url.port), timeout=PATIENCE_SECONDS)


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
        _, rest = exporter.process.communicate(timeout=PATIENCE_SECONDS)
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
                writer.communicate(timeout=PATIENCE_SECONDS)
            truth = disk.stats() - before
            scrape = exporter.scrape()
        counted = scrape.sum("block_io_size_bytes_count", device=disk.name)
        unended = scrape.sum("exporter_map_dropped_total", map="block_io/requests")
        assert 0 < counted <= truth.writes
        assert scrape.sum("block_io_inflight", device=disk.name) <= unended + 1


# Crowds -----------------------------------------------------------------------------------------

CROWD, SLOW = 500, 100
CLIENT_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"


def memory(process: int, key: str) -> int:
    """Bytes: VmRSS is what it has, VmHWM the most that it had."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition(f"{key}:")[2].split()[0]) << 10


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "TLS"])
def test_crowds(tls: bool, tmp_path: Path) -> None:
    """Slow-loris and half-open handshakes are held, then 500 scrape at once, twice: each gets a
    whole answer, 503 or, beyond 512 connections, none; memory is bounded and does not grow; and a
    normal scrape is served while the slow ones are there."""
    flags, context = [], None
    if tls:
        certificates.server().write(tmp_path, "s")
        certificates.authority().write(tmp_path, "ca")
        (tmp_path / "web.yml").write_text("tls_server_config: {cert_file: s.pem, key_file: s.key}")
        flags.append(f"--web.config.file={tmp_path}/web.yml")
        context = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    with lab.Exporter(*flags) as exporter, ExitStack() as stack:
        url = urllib.parse.urlsplit(exporter.url)
        process = exporter.process.pid

        def client() -> http.client.HTTPConnection:
            assert url.port is not None
            if context:
                return http.client.HTTPSConnection(
                    "127.0.0.1", url.port, timeout=PATIENCE_SECONDS, context=context
                )
            return http.client.HTTPConnection("127.0.0.1", url.port, timeout=PATIENCE_SECONDS)

        def scrape() -> int:
            """The status of a whole answer, 0 where the connection is closed instead."""
            with closing(client()) as one:
                try:
                    one.request("GET", "/metrics")
                    answer = one.getresponse()
                    text = answer.read()
                except (ConnectionError, ssl.SSLError, http.client.BadStatusLine):
                    return 0
                assert answer.status != 200 or b"writeback_exporter_series" in text
                return answer.status

        def crowd() -> Counter[int]:
            ready = threading.Barrier(CROWD)

            def wait_and_scrape(_: int) -> int:
                ready.wait(PATIENCE_SECONDS)
                return scrape()

            with ThreadPoolExecutor(CROWD) as pool:
                return Counter(pool.map(wait_and_scrape, range(CROWD)))

        assert scrape() == 200
        before = memory(process, "VmRSS")
        slow = [stack.enter_context(connect(exporter)) for _ in range(SLOW)]
        for one in slow:
            one.sendall(CLIENT_HELLO if tls else b"GET /metrics HTTP/1.1\r\nX-Slow: ")
        # Prometheus would be among the others, with a connection that it has kept.
        kept = stack.enter_context(closing(client()))
        kept.request("GET", "/-/healthy")
        assert kept.getresponse().read() == b"ok\n"
        after = []
        for _ in range(2):
            statuses = crowd()
            assert statuses.keys() <= {200, 503, 0}
            assert statuses[200] >= 1
            kept.request("GET", "/metrics")
            answer = kept.getresponse()
            assert answer.status == 200
            assert b"writeback_exporter_series" in answer.read()
            assert scrape() == 200
            after.append(memory(process, "VmRSS"))
        most = memory(process, "VmHWM")
        figures = [size >> 20 for size in (before, *after, most)]
        print(f"{figures} MB, {dict(statuses)}")
        assert most - before < 32 << 20, figures
        assert after[1] - after[0] < 8 << 20, figures
        assert exporter.stop() == 0
    assert not any("ERROR" in line or "Traceback" in line for line in exporter.log)
