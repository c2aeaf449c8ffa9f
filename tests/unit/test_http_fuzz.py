# SPDX-License-Identifier: Apache-2.0
"""Requests that are almost right, over sockets, plain and in TLS: whatever comes is answered in
HTTP or not at all, nothing but the known paths with 200, and a scrape works afterwards."""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass
from http import HTTPStatus

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit import certificates
from tests.unit.test_secure_server import Config
from tests.unit.test_secure_server import fetch as fetch_securely
from tests.unit.test_server import HANG, HOST, connect, fetch, serving
from writeback_exporter.web.server import Server

# Requests -----------------------------------------------------------------------------------------

KNOWN = ("/metrics", "/", "/-/healthy", "/-/ready")
_ODD = st.sampled_from(
    [
        *("/metrics/", "//metrics", "/./metrics", "/%6detrics", "/metrics%00", "/metrics%", "/-/"),
        *("/%zz", "/../metrics", "http://x/metrics", "x:80", "*", "", "metrics", "/-/healthy/"),
        *("/metrics?name[]=%ff&name%5b%5d=%zz", "/metrics?" + "&" * 500, "/?x", "/metrics#x"),
        *("/\u00ff", "/metrics\t", "/metrics\x00", "/metrics;x"),
    ]
)
_METHODS = st.sampled_from(
    ["GET", "GET", "GET", "HEAD", "POST", "PUT", "OPTIONS", "TRACE", "CONNECT", "get", "GET\0", ""]
)
_VERSIONS = st.sampled_from(
    ["HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/9", "HTTP", "http/1.1", ""]
)
_HEADERS = st.sampled_from(
    [
        *("Host: x", "Host:", "Host: x\r\nHost: y", "Connection: close", "Connection: keep-alive"),
        *("Accept: */*", "Accept: " + "a," * 800, "Accept-Encoding: gzip;q=nan, *;q=-1"),
        *("Accept: application/openmetrics-text;version=1.0.0", "Accept-Encoding: gzip"),
        *("Content-Length: 0", "Content-Length: 5", "Content-Length: 99999999999999999999"),
        *("Content-Length: -5", "Content-Length: +5", "Content-Length: 5\r\nContent-Length: 6"),
        *(
            "Content-Length: 0x5",
            "Content-Length: 5, 5",
            "Content-Length:",
            "Content-Length: \u0665",
        ),
        *("Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked", "transfer-encoding:x"),
        *("Transfer-Encoding: chunked\r\nContent-Length: 5", "Expect: 100-continue", "Expect: x"),
        *("Authorization: Basic", "Authorization: Basic \u00ff", "Upgrade: h2c", "X: \x00\x01\x7f"),
        *("X-Prometheus-Scrape-Timeout-Seconds: nan", "X-Prometheus-Scrape-Timeout-Seconds: -1"),
        *(": no name", "no colon", " folded: before all", "X: a\r\n folded", "X : space", "X:\ry"),
        "X: " + "x" * 20_000,
    ]
)
_BODIES = st.sampled_from(
    [
        *("", "", "", "12345", "5\r\n12345\r\n0\r\n\r\n", "0\r\n\r\n", "zz\r\n", "-1\r\n\r\n"),
        *("ffffffffffffffff\r\n", "5;ext=1\r\n12345\r\n0\r\nTrailer: x\r\n\r\n", "5\n12345\n0\n\n"),
        *("5\r\n12345", "5\r\n1234567\r\n0\r\n\r\n", "0" * 5000, "+5\r\n12345\r\n0\r\n\r\n"),
        "0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: smuggled\r\n\r\n",
    ]
)
_EOL = st.sampled_from(["\r\n", "\r\n", "\r\n", "\r\n", "\n", "\r", "\r\r\n"])


@st.composite
def _request(draw: st.DrawFn) -> bytes:
    target = draw(st.sampled_from(KNOWN) | st.sampled_from(KNOWN) | _ODD)
    words = [draw(_METHODS), target, draw(_VERSIONS)]
    lines = [" ".join(words), *draw(st.lists(_HEADERS, max_size=4)), "", draw(_BODIES)]
    return draw(_EOL).join(lines).encode("latin-1", "replace")


@st.composite
def _stream(draw: st.DrawFn) -> bytes:
    """Up to three requests in a row, and then a few bytes of them changed, left out or put in."""
    data = bytearray(b"".join(draw(st.lists(_request(), min_size=1, max_size=3))))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data)))
        length = draw(st.integers(0, 8))
        data[at : at + length] = draw(st.binary(max_size=8))
    return bytes(data)


_CUTS = st.lists(st.integers(1, 200), max_size=5)
"""Where a stream is cut into writes."""


def pieces(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    for cut in cuts:
        yield data[:cut]
        data = data[cut:]
    yield data


# Answers ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[bytes, bytes]
    body: bytes


_STATUS_LINE = re.compile(rb"HTTP/1\.1 (\d{3}) ([ -~]+)")
_FIELD = re.compile(rb"([!#-'*+.0-9A-Z^-z|~-]+): ([ -~]*)")
_CHUNK = re.compile(rb"[0-9a-f]+")


class _Reader:
    """Reads a stream of HTTP/1.1 responses strictly (RFC 9112): AssertionError where it is none,
    EOFError where it ends within one."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def answers(self, headless: bool) -> Iterator[Answer]:
        """`headless`: some may be answers to HEAD, which are without the body they tell of."""
        while self._data:
            status = self._line(_STATUS_LINE)
            if status[0] == b"HTTP/1.1 100 (Continue)":  # tornado's, to "Expect: 100-continue"
                assert self._take(2) == b"\r\n"
                continue
            assert status[2].decode() == HTTPStatus(int(status[1])).phrase
            headers: dict[bytes, bytes] = {}
            while not self._data.startswith(b"\r\n"):
                field = self._line(_FIELD)
                assert field[1].lower() not in headers
                headers[field[1].lower()] = field[2]
            self._take(2)
            bodiless = headless and (not self._data or self._data.startswith(b"HTTP/1.1 "))
            yield Answer(int(status[1]), headers, b"" if bodiless else self._body(headers))

    def _body(self, headers: dict[bytes, bytes]) -> bytes:
        if headers.get(b"transfer-encoding") == b"chunked":
            body = b""
            while size := int(self._line(_CHUNK)[0], 16):
                body += self._take(size)
                assert self._take(2) == b"\r\n"
            assert self._take(2) == b"\r\n"
            return body
        if b"content-length" in headers:
            return self._take(int(headers[b"content-length"]))
        return self._take(len(self._data))  # it ends with the connection

    def _line(self, pattern: re.Pattern[bytes]) -> re.Match[bytes]:
        line, end, rest = self._data.partition(b"\r\n")
        if not end:
            raise EOFError
        match = pattern.fullmatch(line)
        assert match, line[:200]
        self._data = rest
        return match

    def _take(self, size: int) -> bytes:
        if len(self._data) < size:
            raise EOFError
        taken, self._data = self._data[:size], self._data[size:]
        return taken


LAST = b"\r\n\r\nGET /-/last HTTP/1.1\r\nConnection: close\r\n\r\n"


def check(client: socket.socket, data: bytes, cuts: list[int]) -> None:
    """Sends it in pieces, and that is answered as one may."""
    said, given_up, broken = b"", False, True
    with contextlib.suppress(ConnectionError, ssl.SSLError):  # as what is too large is broken off
        for piece in pieces(data + LAST, cuts):
            client.sendall(piece)
        client.settimeout(0.3)
        while True:
            try:
                piece = client.recv(65536)
            except TimeoutError:  # it waits for more of a body, say
                assert not given_up, "it does not see that the client has gone"
                given_up = True
                client.settimeout(HANG)
                # Of TLS as well: this is how most clients go.
                socket.socket.shutdown(client, socket.SHUT_WR)
                continue
            if not piece:
                break
            said += piece
        broken = given_up
    good = 0
    # As many as there are lines in it that ask for what there is, and no more.
    asked = re.findall(rb"(?:GET|HEAD) (?:/metrics|/|/-/healthy|/-/ready)(?:\?[^ ]*)? HTTP/", data)
    try:
        for answer in _Reader(said).answers(headless=b"HEAD" in data):
            assert answer.status in (200, 400, 404, 405)
            if answer.status == 400:  # tornado's, which says nothing and closes
                assert answer.body == b""
                continue
            assert answer.headers[b"x-content-type-options"] == b"nosniff"
            good += answer.status == 200
    except EOFError:
        assert broken
    assert good <= len(asked)


# Servers ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quiet() -> Iterator[None]:
    """Nothing that comes is worth a line in the log, let alone a traceback."""
    told: list[str] = []

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(self.format(record))

    handler = Told(logging.INFO)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
    assert told == []


@pytest.fixture(scope="module")
def plain(quiet: None) -> Iterator[Server]:
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def secure(
    quiet: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, ssl.SSLContext]]:
    config = Config(tmp_path_factory.mktemp("fuzz"))
    certificates.server().write(config.directory, "s")
    certificates.authority().write(config.directory, "ca")
    with serving(config_file=config.tls()) as server:
        yield server, config.client()


ASKED = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
EXPECTING = b"GET /metrics HTTP/1.1\r\nExpect: 100-continue\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12345\r\n0\r\n\r\n"


@given(_stream(), _CUTS)
@example(ASKED * 3, [1, 1, 1])
@example(CHUNKED + ASKED, [60])
@example(EXPECTING + ASKED, [])
@example(b"HEAD /metrics HTTP/1.1\r\n\r\n" + ASKED, [])
def test_almost_requests(plain: Server, data: bytes, cuts: list[int]) -> None:
    with connect(plain) as client:
        check(client, data, cuts)
    answer = fetch(plain)
    assert answer.status == 200
    assert b"_throttled_tasks{" in answer.body


@given(_stream(), _CUTS)
@example(ASKED * 3, [1, 1, 1])
@example(CHUNKED + ASKED, [60])
@example(EXPECTING + ASKED, [])
def test_almost_requests_in_tls(
    secure: tuple[Server, ssl.SSLContext], data: bytes, cuts: list[int]
) -> None:
    server, context = secure
    with context.wrap_socket(connect(server), server_hostname=HOST) as client:
        check(client, data, cuts)
    answer = fetch_securely(server, context)
    assert answer.status == 200
    assert b"_throttled_tasks{" in answer.body
