# SPDX-License-Identifier: Apache-2.0
"""The HTTP server against real sockets, hostile ones too.

Times here are either limits that the server enforces or generous deadlines to detect a hang.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import http.client
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.waiting import wait_for
from writeback_exporter.metrics import catalogue
from writeback_exporter.metrics.exposition import HistogramFamily, HistogramRow, Snapshot, family
from writeback_exporter.settings import telemetry_path
from writeback_exporter.web.config import ConfigFile
from writeback_exporter.web.listen import Address, ListenError
from writeback_exporter.web.server import Limits, Server, accepts_gzip

HANG = 20.0
"""Seconds after which a test is taken to hang."""

HOST = "127.0.0.1"
DEFAULTS = Limits()
SLOTS = [1] * 40
BIG = 60_000
"""Series of a response that no pair of socket buffers holds: 100 MB."""


def snapshot(
    series: int = 1, fail_after: int | None = None, rendered: Callable[[], None] = lambda: None
) -> Snapshot:
    """A gauge and a histogram of so many series, of which rendering may fail."""

    def rows() -> Iterator[HistogramRow]:
        for number in range(series):
            if number == fail_after:
                raise RuntimeError("rows broke")
            rendered()
            yield (f"/system.slice/unit-{number}.service", "sda", "read"), SLOTS, number

    gauge = family(catalogue.DIRTY_THROTTLED_TASKS, [(("/", "8:0"), 3.0)])
    return Snapshot([gauge], [HistogramFamily(catalogue.BLOCK_IO_DEVICE_SECONDS, 0, rows)])


@dataclass
class Collector:
    """A collect() that tests can block, break and count."""

    result: Callable[[], Snapshot] = snapshot
    go: threading.Event = field(default_factory=threading.Event)
    begun: int = 0
    now: int = 0
    most: int = 0
    """The most collections seen at the same time."""

    def __call__(self) -> Snapshot:
        self.begun += 1
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            assert self.go.wait(HANG)
            return self.result()
        finally:
            self.now -= 1


@contextlib.contextmanager
def serving(
    collect: Callable[[], Snapshot] = snapshot,
    limits: Limits = DEFAULTS,
    telemetry_path: str = "/metrics",
    ready: Callable[[], bool] = lambda: True,
    status: Callable[[], bytes] = lambda: b"<h1>Status</h1>",
    config_file: ConfigFile | None = None,
) -> Iterator[Server]:
    server = Server([Address(HOST, 0)], telemetry_path, collect, status, ready, limits, config_file)
    server.bind()
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(HANG)
        assert not thread.is_alive()


def connect(server: Server) -> socket.socket:
    return socket.create_connection((HOST, server.addresses[0].port), timeout=HANG)


@dataclass
class Response:
    status: int
    headers: http.client.HTTPMessage
    body: bytes


def fetch(
    server: Server,
    target: str = "/metrics",
    method: str = "GET",
    headers: dict[str, str] | None = None,
    body: bytes | None = None,
) -> Response:
    port = server.addresses[0].port
    with contextlib.closing(http.client.HTTPConnection(HOST, port, timeout=HANG)) as client:
        client.request(method, target, body=body, headers=headers or {})
        response = client.getresponse()
        return Response(response.status, response.headers, response.read())


def request(target: str = "/metrics", version: str = "1.1", *headers: str) -> bytes:
    return "\r\n".join([f"GET {target} HTTP/{version}", "Host: x", *headers, "", ""]).encode()


def read_until_closed(client: socket.socket) -> bytes:
    """Raises ConnectionResetError if the server breaks the connection rather than closes it."""
    return b"".join(iter(lambda: client.recv(65536), b""))


def read_all(client: socket.socket) -> bytes:
    """What comes before the server closes or breaks the connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(65536):
            data += piece
    return data


def talk(server: Server, data: bytes) -> bytes:
    """What the server answers until it closes."""
    with connect(server) as client:
        client.sendall(data)
        return read_all(client)


BACKGROUND = ThreadPoolExecutor(8)


# Paths, methods, headers --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "status", "content_type", "text"),
    [
        ("/metrics", 200, "text/plain; version=0.0.4; charset=utf-8", "_throttled_tasks{"),
        ("/metrics?x=%zz&name[]=", 200, "text/plain; version=0.0.4; charset=utf-8", "le="),
        ("/", 200, "text/html; charset=utf-8", "<h1>Status</h1>"),
        ("/-/healthy", 200, "text/plain; charset=utf-8", "ok\n"),
        ("/-/ready", 200, "text/plain; charset=utf-8", "ready\n"),
        ("/metrics/", 404, "text/plain; charset=utf-8", "metrics are at /metrics\n"),
        ("/favicon.ico", 404, "text/plain; charset=utf-8", "metrics are at /metrics\n"),
        ("//", 404, "text/plain; charset=utf-8", "nothing here"),
        ("*", 404, "text/plain; charset=utf-8", "nothing here"),
    ],
)
def test_paths(target: str, status: int, content_type: str, text: str) -> None:
    with serving() as server:
        response = fetch(server, target)
        head = fetch(server, target, "HEAD")
    assert response.status == head.status == status
    assert response.headers["Content-Type"] == head.headers["Content-Type"] == content_type
    assert text in response.body.decode()
    assert head.body == b""


def test_not_ready() -> None:
    with serving(ready=lambda: False) as server:
        response = fetch(server, "/-/ready")
        assert (response.status, response.body) == (503, b"not ready\n")
        assert fetch(server, "/-/healthy").status == 200


def test_metrics_win_over_the_status_page() -> None:
    with serving(telemetry_path="/") as server:
        assert fetch(server, "/").headers["Content-Type"].startswith("text/plain")
        assert fetch(server, "/metrics").status == 404


@pytest.mark.parametrize(
    "path", ["", "metrics", "/a b", "/a?b", "/a#b", "//a", "/\xe4", "/a\n", "/-/x"]
)
def test_telemetry_path_must_be_a_path(path: str) -> None:
    with pytest.raises(ValueError, match="is not a path"):
        telemetry_path(path)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "FOO"])
@pytest.mark.parametrize("body", [None, b"a=b"])
def test_other_methods_are_refused(method: str, body: bytes | None) -> None:
    with serving() as server:
        response = fetch(server, method=method, body=body)
    assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("target", ["/", "/metrics", "/nothing"])
def test_security_headers(target: str) -> None:
    with serving() as server:
        headers = fetch(server, target).headers
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["Cache-Control"] == "no-store"
    assert headers["Date"].endswith(" GMT")
    assert "Server" not in headers
    assert "ornado" not in str(headers)


# Exposition ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accept", "content_type", "openmetrics"),
    [
        ("", "text/plain; version=0.0.4", False),
        ("*/*", "text/plain; version=0.0.4", False),
        ("application/openmetrics-text;version=1.0.0", "application/openmetrics-text", True),
    ],
)
def test_content_negotiation(accept: str, content_type: str, openmetrics: bool) -> None:
    with serving() as server:
        response = fetch(server, headers={"Accept": accept})
    assert response.headers["Content-Type"].startswith(content_type)
    assert response.headers["Vary"] == "Accept, Accept-Encoding"
    assert response.body.endswith(b"# EOF\n") is openmetrics


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        ("", False),
        ("identity", False),
        ("gzip", True),
        ("GZIP;Q=0.1", True),
        ("deflate, gzip ; q=1.0 , br", True),
        ("gzip;q=0", False),
        ("gzip;q=0.000, *", False),
        ("gzip;q=nan", False),
        ("gzip;q=x", False),
        ("*", True),
        ("*;q=0", False),
        (",;,=", False),
        ("gzipped", False),
    ],
)
def test_gzip_negotiation(header: str, accepted: bool) -> None:
    assert accepts_gzip(header) is accepted
    with serving() as server:
        plain = fetch(server)
        response = fetch(server, headers={"Accept-Encoding": header})
    assert plain.headers["Content-Encoding"] is None
    if accepted:
        assert response.headers["Content-Encoding"] == "gzip"
        assert gzip.decompress(response.body) == plain.body
    else:
        assert response.headers["Content-Encoding"] is None
        assert response.body == plain.body


def test_name_filter() -> None:
    name = "writeback_dirty_throttled_tasks"
    with serving() as server:
        one = fetch(server, f"/metrics?name[]={name}").body.decode()
        same = fetch(server, f"/metrics?name%5B%5D={name}&name[]=other").body.decode()
        none = fetch(server, "/metrics?name[]=other")
    assert one.splitlines()[-1] == f'{name}{{bdi="8:0",cgroup="/"}} 3.0'
    assert "_bucket" not in one
    assert same == one
    assert (none.status, none.body) == (200, b"")


def test_head_does_not_collect() -> None:
    collect = Collector()
    with serving(collect) as server:
        response = fetch(server, method="HEAD", headers={"Accept-Encoding": "gzip"})
    assert response.status == 200
    assert response.headers["Content-Encoding"] == "gzip"
    assert collect.begun == 0


def test_big_response_is_whole() -> None:
    with serving(lambda: snapshot(5_000)) as server:
        plain = fetch(server).body
        packed = fetch(server, headers={"Accept-Encoding": "gzip"}).body
    assert plain.count(b"_count{") == 5_000
    assert gzip.decompress(packed) == plain
    done = subprocess.run(["gzip", "-d"], input=packed, capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (plain, b"")


def test_keep_alive_and_http_1_0() -> None:
    with serving() as server:
        client = http.client.HTTPConnection(HOST, server.addresses[0].port, timeout=HANG)
        with contextlib.closing(client):
            for _ in range(3):
                client.request("GET", "/metrics")
                first = client.sock
                assert client.getresponse().read()
                assert client.sock is first is not None
        for keep_alive in ((), ("Connection: keep-alive",)):
            answer = talk(server, request("/metrics", "1.0", *keep_alive))
            head, _, body = answer.partition(b"\r\n\r\n")
            assert b"chunked" not in head
            assert body.startswith(b"# HELP")
            assert body.endswith(b"\n")


def test_pipelining() -> None:
    with serving() as server:
        answer = talk(
            server,
            request("/-/healthy") * 20
            + request()
            + request("/-/ready", "1.1", "Connection: close"),
        )
    assert answer.count(b"HTTP/1.1 200 OK") == 22
    assert answer.count(b"\r\n\r\nok\n") == 20
    assert answer.endswith(b"\r\n\r\nready\n")


# Failures -----------------------------------------------------------------------------------------


def test_failed_collection_is_a_500_and_the_next_works(caplog: pytest.LogCaptureFixture) -> None:
    results = iter([ValueError("no\nmap"), TimeoutError("map"), None])

    def collect() -> Snapshot:
        error = next(results)
        if error is not None:
            raise error
        return snapshot()

    with serving(collect) as server:
        first, second, third = fetch(server), fetch(server), fetch(server)
    assert (first.status, first.body) == (500, b"ValueError: no map\n")
    assert (second.status, second.body) == (500, b"TimeoutError: map\n")
    assert third.status == 200
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert [record.name for record in errors] == ["writeback_exporter.web.server"] * 2
    assert all(record.exc_info for record in errors)


def test_rendering_that_fails_at_once_is_a_500() -> None:
    with serving(lambda: snapshot(1, fail_after=0)) as server:
        response = fetch(server)
    assert (response.status, response.body) == (500, b"RuntimeError: rows broke\n")


@pytest.mark.parametrize("encoding", ["identity", "gzip"])
def test_rendering_that_fails_midway_breaks_the_connection(encoding: str) -> None:
    with serving(lambda: snapshot(20_000, fail_after=10_000)) as server:
        with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
            fetch(server, headers={"Accept-Encoding": encoding})
        assert fetch(server, "/-/healthy").status == 200


def test_rendering_that_fails_midway_breaks_the_connection_of_http_1_0_too() -> None:
    with serving(lambda: snapshot(2_000, fail_after=1_000)) as server, connect(server) as client:
        client.sendall(request("/metrics", "1.0"))
        wait_for(lambda: not server.connections)
        with pytest.raises(ConnectionResetError):
            read_until_closed(client)


# Hostile clients ----------------------------------------------------------------------------------


def test_scrape_among_idle_slow_and_deaf_clients() -> None:
    stop = threading.Event()

    def dribble(client: socket.socket) -> None:
        for byte in request():
            client.sendall(bytes([byte]))
            if stop.wait(1):
                return

    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(lambda: snapshot(BIG)))
        for _ in range(50):
            stack.enter_context(connect(server))
        slow = stack.enter_context(connect(server))
        dribbler = threading.Thread(target=dribble, args=[slow], daemon=True)
        dribbler.start()
        deaf = stack.enter_context(connect(server))
        deaf.sendall(request())
        half_deaf = stack.enter_context(connect(server))
        half_deaf.sendall(request())
        half_deaf.recv(1)
        wait_for(lambda: len(server.connections) == 53)
        small = "/metrics?name[]=writeback_dirty_throttled_tasks"
        for target in ("/-/healthy", small, "/metrics", "/"):
            assert fetch(server, target, headers={"Accept-Encoding": "gzip"}).status == 200
        wait_for(lambda: len(server.answers) == 2)  # the deaf ones are not given up yet
        stop.set()
        dribbler.join(HANG)


@pytest.mark.parametrize("said", [b"", b"GET /met", request() + b"GET /met"])
def test_connection_without_a_whole_request_is_closed(said: bytes) -> None:
    limits = Limits(first_request=1, next_request=1)
    with serving(limits=limits) as server:
        answer = talk(server, said)
        assert fetch(server).status == 200
    assert answer.endswith(b"0\r\n\r\n" if said.startswith(request()) else b"")


def test_body_that_does_not_come_is_not_waited_for() -> None:
    with serving(limits=Limits(first_request=0.3)) as server:
        assert talk(server, b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n") == b""


@pytest.mark.parametrize(
    "said", [request(), request("/metrics", "1.0"), (request("/") + request("/x")) * 20_000]
)
def test_reader_that_does_not_read_is_given_up(said: bytes) -> None:
    limits = Limits(send=0.3)
    with serving(lambda: snapshot(BIG), limits) as server, connect(server) as client:
        client.settimeout(0.5)
        with contextlib.suppress(TimeoutError, ConnectionError):
            client.sendall(said)
            client.recv(1)
        wait_for(lambda: not server.connections and not server.answers)


def test_connections_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(limits=Limits(connections=3)))
        clients = [stack.enter_context(connect(server)) for _ in range(3)]
        wait_for(lambda: len(server.connections) == 3)
        for _ in range(5):
            assert talk(server, b"") == b""
        clients[0].sendall(request("/-/healthy"))
        assert clients[0].recv(4096).startswith(b"HTTP/1.1 200")
        clients[1].close()
        wait_for(lambda: len(server.connections) == 2)
        assert fetch(server).status == 200
    complaints = [record.getMessage() for record in caplog.records]
    assert complaints == ["3 connections are open: closing new ones"]


def test_header_too_large() -> None:
    with serving() as server:
        fits = request("/-/healthy", "1.1", "Connection: close", "X: " + "x" * 15_000)
        assert talk(server, fits).startswith(b"HTTP/1.1 200")
        for size in (16 * 1024, 1024 * 1024):
            with connect(server) as client:
                with contextlib.suppress(ConnectionError):
                    client.sendall(request("/", "1.1", "X: " + "x" * size))
                assert read_all(client) == b""
        assert fetch(server).status == 200


@pytest.mark.parametrize(
    "said",
    [
        b"\0\xff" * 100 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500) + b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nConnection: close\r\nno colon\r\n\r\n",
        b"GET / HTTP/1.1\r\nConnection: close\r\n: no name\r\nContent-Length: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nConnection: close\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nConnection: close\r\nContent-Length: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nConnection: close\r\nContent-Length: 1, 2\r\n\r\n",
        b"GET / HTTP/1.1\r\nConnection: close\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffff\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n",
    ],
)
def test_garbage(said: bytes, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with serving() as server:
        # tornado 6.2 takes a Content-Length of -1 and any Transfer-Encoding.
        assert talk(server, said)[:12] in (b"", b"HTTP/1.1 400", b"HTTP/1.1 200")
        with connect(server) as client:  # and a client that sends it and goes away
            client.sendall(said)
        assert fetch(server).status == 200
    assert not caplog.records


def test_odd_but_valid_requests() -> None:
    with serving() as server:
        for target in (
            "/\xff\xfe",
            "/metrics?%ff=%zz&&&name[]",
            "http://[/metrics",
            "/?" + "&" * 9000,
        ):
            line = f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
            assert talk(server, line.encode("latin1"))[9:12] in (b"200", b"400", b"404")


@given(st.binary(max_size=300), st.booleans())
def test_no_bytes_harm_the_server(shared: Server, data: bytes, end_of_header: bool) -> None:
    with connect(shared) as client:
        client.sendall(data + b"\r\n\r\n" * end_of_header)
        client.shutdown(socket.SHUT_WR)
        read_all(client)
    assert fetch(shared, "/-/healthy").status == 200


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    with serving() as server:
        yield server


# Waiting scrapes ----------------------------------------------------------------------------------


def test_collections_take_turns_and_waiting_ones_are_bounded() -> None:
    collect = Collector()
    with serving(collect, Limits(scrapes=3)) as server:
        scrapes = [BACKGROUND.submit(fetch, server) for _ in range(3)]
        wait_for(lambda: len(server.answers) == 3 and collect.begun == 1)
        refused = fetch(server)
        assert refused.status == 503
        assert refused.headers["Retry-After"] == "5"
        assert refused.body == b"3 scrapes are in progress already\n"
        assert fetch(server, "/-/healthy").status == 200
        collect.go.set()
        assert [scrape.result(HANG).status for scrape in scrapes] == [200] * 3
        assert fetch(server).status == 200
    assert (collect.begun, collect.most) == (4, 1)


def test_scrape_is_not_collected_once_its_time_is_over() -> None:
    collect = Collector()
    with serving(collect) as server:
        first = BACKGROUND.submit(fetch, server)
        wait_for(lambda: collect.begun == 1)
        late = fetch(server, headers={"X-Prometheus-Scrape-Timeout-Seconds": "0.2"})
        assert (late.status, late.body) == (503, b"not collected within 0.2 s\n")
        collect.go.set()
        assert first.result(HANG).status == 200
        assert fetch(server).status == 200
    assert collect.begun == 2


def test_slow_collection_is_not_waited_for() -> None:
    collect = Collector()
    with serving(collect, Limits(collect=0.2)) as server:
        assert fetch(server).status == 503
        collect.go.set()
        patient = {"X-Prometheus-Scrape-Timeout-Seconds": "20"}
        assert fetch(server, headers=patient).status == 200


@pytest.mark.parametrize("seconds", ["", "x", "nan", "-1", "0", "inf", "1e999", "9" * 400])
def test_odd_scrape_timeouts(seconds: str) -> None:
    with serving() as server:
        headers = {"X-Prometheus-Scrape-Timeout-Seconds": seconds}
        assert fetch(server, headers=headers).status == 200


def test_scrape_is_not_collected_once_its_client_has_gone() -> None:
    collect = Collector()
    with serving(collect) as server:
        first = BACKGROUND.submit(fetch, server)
        wait_for(lambda: collect.begun == 1)
        with connect(server) as client:
            client.sendall(request())
            wait_for(lambda: len(server.answers) == 2)
        wait_for(lambda: len(server.answers) == 1)
        collect.go.set()
        assert first.result(HANG).status == 200
    assert collect.begun == 1


def test_rendering_stops_once_the_client_has_gone() -> None:
    rows = 0

    def rendered() -> None:
        nonlocal rows
        rows += 1

    with serving(lambda: snapshot(10**9, rendered=rendered)) as server:
        with connect(server) as client:
            client.sendall(request())
            client.recv(1)
        wait_for(lambda: not server.answers)
        seen = rows
        time.sleep(0.1)
        assert rows - seen < 1000  # at most the chunk that was being rendered


# Status page --------------------------------------------------------------------------------------


@dataclass
class Page:
    """A status() that tests can block and count; each page is another."""

    go: threading.Event = field(default_factory=threading.Event)
    begun: int = 0

    def __call__(self) -> bytes:
        self.begun += 1
        page = f"page {self.begun}".encode()
        assert self.go.wait(HANG)
        return page


def test_status_page_is_made_once_for_all_who_wait() -> None:
    page = Page()
    with serving(status=page) as server:
        views = [BACKGROUND.submit(fetch, server, "/") for _ in range(5)]
        wait_for(lambda: len(server.answers) == 5)
        page.go.set()
        assert {view.result(HANG).body for view in views} == {b"page 1"}


def test_status_page_is_sent_again_while_it_is_young() -> None:
    page = Page()
    page.go.set()
    with serving(status=page, limits=Limits(status_age=6 * HANG)) as server:
        assert fetch(server, "/").body == fetch(server, "/").body == b"page 1"
    with serving(status=page, limits=Limits(status_age=0.3)) as server:
        assert fetch(server, "/").body == b"page 2"
        time.sleep(0.4)
        assert fetch(server, "/").body == b"page 3"


def test_status_page_takes_its_turn_among_collections() -> None:
    collect, page = Collector(), Page()
    page.go.set()
    with serving(collect, status=page, limits=Limits(status=0.3)) as server:
        scrape = BACKGROUND.submit(fetch, server)
        wait_for(lambda: collect.begun == 1)
        refused = fetch(server, "/")
        assert (refused.status, refused.body) == (503, b"no status page within 0.3 s\n")
        assert refused.headers["Retry-After"] == "5"
        fetch(server, "/")
        assert page.begun == 0
        collect.go.set()
        assert scrape.result(HANG).status == 200
        wait_for(lambda: page.begun == 1)
        server.limits = DEFAULTS
        assert fetch(server, "/").body == b"page 1", "the views before have asked for one"


def test_last_status_page_is_sent_where_the_next_one_takes_too_long() -> None:
    page = Page()
    page.go.set()
    with serving(status=page, limits=Limits(status_age=0)) as server:
        assert fetch(server, "/").body == b"page 1"
        server.limits = Limits(status=0.3, status_age=0)
        page.go.clear()
        for _ in range(3):
            assert fetch(server, "/").body == b"page 1"
        assert page.begun == 2
        page.go.set()
        wait_for(lambda: fetch(server, "/").body != b"page 1")


def test_status_page_is_made_also_when_its_client_has_gone() -> None:
    page = Page()
    with serving(status=page) as server:
        with connect(server) as client:
            client.sendall(request("/"))
            wait_for(lambda: page.begun == 1)
        wait_for(lambda: not server.answers)
        page.go.set()
        assert fetch(server, "/").body == b"page 1"


def test_head_makes_no_status_page() -> None:
    page = Page()
    with serving(status=page) as server:
        assert fetch(server, "/", "HEAD").status == 200
    assert page.begun == 0


def test_status_page_that_fails_is_a_500_and_the_next_works() -> None:
    pages: Iterator[bytes | Exception] = iter([LookupError("two\nlines"), b"good"])

    def status() -> bytes:
        page = next(pages)
        if isinstance(page, Exception):
            raise page
        return page

    with serving(status=status) as server:
        response = fetch(server, "/")
        assert (response.status, response.body) == (500, b"LookupError: two lines\n")
        assert fetch(server, "/").body == b"good"


# Start and end ------------------------------------------------------------------------------------

CHILD = """
import logging, resource, sys
from writeback_exporter.metrics.exposition import Snapshot
from writeback_exporter.web.listen import Address
from writeback_exporter.web.server import Server
logging.basicConfig()
server = Server([Address.parse("127.0.0.1:0")], "/metrics", Snapshot, bytes, lambda: True)
server.bind()
if len(sys.argv) > 1:
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]),) * 2)
print(server.addresses[0].port, flush=True)
server.run()
print("returned")
"""


@contextlib.contextmanager
def child(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The server in a process of its own; its port."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_process_cleanly(number: signal.Signals) -> None:
    with (
        child() as (process, port),
        # An idle connection, a slow one and one that is kept alive hold nothing up.
        socket.create_connection((HOST, port)),
        socket.create_connection((HOST, port)) as slow,
        contextlib.closing(http.client.HTTPConnection(HOST, port, timeout=HANG)) as client,
    ):
        slow.sendall(b"GET /metr")
        client.request("GET", "/metrics")
        assert client.getresponse().status == 200
        process.send_signal(number)
        output, errors = process.communicate(timeout=HANG)
    assert (process.returncode, output, errors) == (0, "returned\n", "")


def test_out_of_file_descriptors() -> None:
    with child("30") as (process, port):
        clients = [socket.create_connection((HOST, port), timeout=HANG) for _ in range(60)]
        clients[0].sendall(request("/-/healthy"))
        assert clients[0].recv(4096).startswith(b"HTTP/1.1 200")
        time.sleep(0.5)  # to spin in, were it to spin
        for client in clients:
            client.close()
        with contextlib.closing(http.client.HTTPConnection(HOST, port, timeout=HANG)) as again:
            again.request("GET", "/metrics")
            assert again.getresponse().status == 200
        process.terminate()
        _, errors = process.communicate(timeout=HANG)
    assert process.returncode == 0
    assert errors.splitlines() == [
        "WARNING:writeback_exporter.web.server:cannot accept connections: "
        "[Errno 24] Too many open files"
    ]


def test_response_in_progress_ends_before_the_server_does() -> None:
    collect = Collector()
    with serving(collect) as server:
        scrape = BACKGROUND.submit(fetch, server)
        wait_for(lambda: collect.begun == 1)
        server.stop()
        wait_for(lambda: not server.addresses)
        collect.go.set()
        assert scrape.result(HANG).status == 200


@pytest.mark.parametrize("target", ["/metrics", "/"])
def test_response_that_does_not_end_is_not_waited_for_long(target: str) -> None:
    collect, page = Collector(), Page()
    limits = Limits(shutdown=0.2)
    with serving(collect, limits, status=page) as server, connect(server) as client:
        client.sendall(request(target))
        wait_for(lambda: collect.begun + page.begun == 1)
        server.stop()
        assert read_all(client) == b""
        collect.go.set()
        page.go.set()


def test_stop_before_run_and_twice() -> None:
    server = Server([Address(HOST, 0)], "/", snapshot, bytes, lambda: True)
    server.bind()
    server.stop()
    server.stop()
    server.run()
    assert server.addresses == []
    server.stop()


# Listening ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        (":10435", "", 10435),
        ("127.0.0.1:0", "127.0.0.1", 0),
        ("[::1]:10435", "::1", 10435),
        ("[fe80::1%eth0]:1", "fe80::1%eth0", 1),
        ("[::ffff:1.2.3.4]:1", "::ffff:1.2.3.4", 1),
        ("localhost:9", "localhost", 9),
        ("node-1.example.org:65535", "node-1.example.org", 65535),
    ],
)
def test_address(text: str, host: str, port: int) -> None:
    address = Address.parse(text)
    assert address == Address(host, port)
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "10435",
        "localhost",
        "localhost:",
        "localhost:http",
        "localhost:-1",
        "localhost:65536",
        "localhost:99999",
        "localhost: 80",
        "localhost:\u0661",
        "::1:10435",
        "[::1]",
        "[::1",
        "::1]:1",
        "[]:1",
        "[[::1]]:1",
        "[::1%]:1",
        "[:::1]:1",
        "[localhost]:1",
        "[1.2.3.4.5]:1",
        "256.0.0.1:1",
        "1.2.3:1",
        "a b:1",
        "http://localhost:1",
        "localhost:1/metrics",
        "b\xfccher:1",
        "a\n:1",
        ":1\n",
    ],
)
def test_bad_address(text: str) -> None:
    with pytest.raises(ValueError, match=r"^'.*") as caught:
        Address.parse(text)
    assert type(caught.value) is ValueError
    assert len(str(caught.value).splitlines()) == 1


@given(
    st.text()
    | st.from_regex(r"\[?[0-9a-f:.%]*\]?:[0-9]*", fullmatch=True)
    | st.text("[]:.%019azAZ-_ \n/\0", max_size=20)
)
def test_address_parses_or_raises_value_error(text: str) -> None:
    reason, address = "", None
    try:
        address = Address.parse(text)
    except ValueError as error:
        reason = str(error)
    if address is None:
        assert len(reason.splitlines()) == 1
    else:
        assert Address.parse(str(address)) == address
        assert 0 <= address.port <= 65535


def listen(*addresses: Address) -> Server:
    server = Server(addresses, "/", snapshot, bytes, lambda: True)
    server.bind()
    return server


def close(server: Server) -> None:
    server.stop()
    server.run()


def test_port_in_use() -> None:
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ListenError) as caught:
            listen(Address(HOST, 0), Address(HOST, port))
    assert str(caught.value) == (
        f"cannot listen on 127.0.0.1:{port}: Address already in use; the port is taken "
        "(`ss -ltnp` shows by whom): stop that or choose another"
    )


@pytest.mark.parametrize(
    ("address", "answer"),
    [
        (Address("192.0.2.1", 0), "192.0.2.1:0: Cannot assign requested address; this host has no"),
        (Address("x.invalid", 1), "x.invalid:1: "),
        (Address("x" * 64, 1), "not a possible host name"),
        (Address("a..b", 1), "a..b:1: "),
        (Address("fe80::1%nosuch", 1), "[fe80::1%nosuch]:1: "),
    ],
)
def test_address_that_is_not_here(address: Address, answer: str) -> None:
    with pytest.raises(ListenError) as caught:
        listen(address)
    assert answer in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_port_without_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> socket.socket:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(ListenError, match=r"Permission denied; .*CAP_NET_BIND_SERVICE"):
        listen(Address(HOST, 80))


def test_listen_on_several() -> None:
    server = listen(Address(HOST, 0), Address("localhost", 0))
    try:
        assert [address.host for address in server.addresses] == [HOST, HOST]
        assert all(address.port for address in server.addresses)
    finally:
        close(server)


def test_name_with_several_addresses_is_its_ipv4_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", (HOST, 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    server = listen(Address("localhost", 0))
    assert [address.host for address in server.addresses] == [HOST]
    close(server)


def test_empty_host_is_every_address() -> None:
    server = listen(Address("", 0))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        port = server.addresses[0].port
        for host in (HOST, "::1") if socket.has_dualstack_ipv6() else (HOST,):
            with socket.create_connection((host, port), timeout=HANG) as client:
                client.sendall(request("/-/healthy"))
                assert client.recv(4096).startswith(b"HTTP/1.1 200")
    finally:
        server.stop()
        thread.join(HANG)
    assert not thread.is_alive()
