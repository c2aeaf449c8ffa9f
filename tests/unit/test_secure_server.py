# SPDX-License-Identifier: Apache-2.0
"""The HTTP server with a web configuration: TLS, passwords, headers and the rate limit, against
real sockets and certificates."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import logging
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import bcrypt
import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from hypothesis import given
from hypothesis import strategies as st
from tornado.iostream import StreamClosedError

from tests.unit import certificates
from tests.unit.certificates import Certificate, authority, certify
from tests.unit.test_server import (
    BACKGROUND,
    BIG,
    HANG,
    HOST,
    Collector,
    Response,
    connect,
    read_all,
    request,
    serving,
    snapshot,
)
from tests.waiting import wait_for
from writeback_exporter.web import gate
from writeback_exporter.web.config import ConfigFile
from writeback_exporter.web.gate import Busy, Passwords, RateLimiter
from writeback_exporter.web.policy import RateLimit, WebConfig
from writeback_exporter.web.server import Limits, Server

HASHES = {
    user: bcrypt.hashpw(password, bcrypt.gensalt(4)).decode()
    for user, password in {"alice": b"wonderland", "bj\xf6rn": b"p\xc3\xa5ss:word"}.items()
}
USERS = "basic_auth_users: {" + ", ".join(f"{u}: '{h}'" for u, h in HASHES.items()) + "}\n"
MUTUAL = "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n"
FRESH = Limits(config_age=0, config_look=HANG)
"""Each request sees the files as they are."""
REFUSED = (ssl.SSLError, ConnectionError)


@dataclass
class Config:
    """A configuration file and its directory."""

    directory: Path

    def write(self, text: str) -> ConfigFile:
        """Sets it; the file as a server that starts now reads it."""
        (self.directory / "web.yml").write_text(text)
        return ConfigFile(str(self.directory / "web.yml"))

    def tls(self, more: str = "") -> ConfigFile:
        return self.write(f"tls_server_config:\n  cert_file: s.pem\n  key_file: s.key\n{more}")

    def client(self, certificate: Certificate | None = None) -> ssl.SSLContext:
        """A client that trusts our authority, and may have a certificate of its own."""
        context = ssl.create_default_context(cafile=str(self.directory / "ca.pem"))
        if certificate:
            certificate.write(self.directory, "client")
            context.load_cert_chain(self.directory / "client.pem", self.directory / "client.key")
        return context


@pytest.fixture
def config(tmp_path: Path) -> Config:
    certificates.server().write(tmp_path, "s")
    authority().write(tmp_path, "ca")
    return Config(tmp_path)


def secure(server: Server, context: ssl.SSLContext) -> ssl.SSLSocket:
    return context.wrap_socket(connect(server), server_hostname=HOST, suppress_ragged_eofs=False)


def fetch(
    server: Server,
    context: ssl.SSLContext | None,
    target: str = "/metrics",
    method: str = "GET",
    **headers: str,
) -> Response:
    port = server.addresses[0].port
    client = (
        http.client.HTTPSConnection(HOST, port, timeout=HANG, context=context)
        if context
        else http.client.HTTPConnection(HOST, port, timeout=HANG)
    )
    with contextlib.closing(client):
        client.request(method, target, headers=headers)
        response = client.getresponse()
        return Response(response.status, response.headers, response.read())


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


ALICE = basic("alice", "wonderland")


# TLS ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ec", "2048"])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_scrape_over_tls(config: Config, version: ssl.TLSVersion, kind: str) -> None:
    certificates.server(kind).write(config.directory, "s")
    client = config.client()
    client.minimum_version = client.maximum_version = version
    client.set_alpn_protocols(["h2", "http/1.1"])
    with serving(lambda: snapshot(2_000), config_file=config.tls()) as server:
        for target in ("/metrics", "/", "/-/healthy", "/-/ready"):
            assert fetch(server, client, target).status == 200
        with secure(server, client) as connection:
            assert connection.selected_alpn_protocol() == "http/1.1"
        zipped = fetch(server, client, **{"Accept-Encoding": "gzip"})
        assert zipped.headers["Content-Encoding"] == "gzip"
        assert fetch(server, client).body.count(b"_count{") == 2_000


def test_keep_alive_and_pipelining_over_tls(config: Config) -> None:
    with serving(config_file=config.tls()) as server:
        with secure(server, config.client()) as client:
            client.sendall(request("/-/healthy") * 20 + request("/-/ready"))
            answer = b""
            while not answer.endswith(b"ready\n"):
                answer += client.recv(65536)
        assert answer.count(b"HTTP/1.1 200 OK") == 21


def test_end_of_an_http_1_0_response_is_told_from_a_broken_one(config: Config) -> None:
    """By TLS' own close_notify, without which this client raises SSLEOFError."""
    with (
        serving(lambda: snapshot(2_000), config_file=config.tls()) as server,
        secure(server, config.client()) as client,
    ):
        client.sendall(request("/metrics", "1.0"))
        answer = b"".join(iter(lambda: client.recv(65536), b""))
    assert answer.endswith(b"\n")
    assert answer.count(b"_count{") == 2_000


def test_rendering_that_fails_midway_breaks_the_connection(config: Config) -> None:
    collect = lambda: snapshot(2_000, fail_after=1_000)  # noqa: E731
    with (
        serving(collect, config_file=config.tls()) as server,
        secure(server, config.client()) as client,
    ):
        client.sendall(request("/metrics", "1.0"))
        with pytest.raises(REFUSED):
            b"".join(iter(lambda: client.recv(65536), b""))


def test_deaf_reader_over_tls_is_given_up(config: Config) -> None:
    with (
        serving(lambda: snapshot(BIG), Limits(send=0.3), config_file=config.tls()) as server,
        secure(server, config.client()) as client,
    ):
        client.sendall(request())
        client.recv(1)
        wait_for(lambda: not server.connections and not server.answers)


@pytest.mark.parametrize(
    ("more", "limit"),
    [
        ("  min_version: TLS13\n", "version"),
        ("  cipher_suites: [TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384]\n", "cipher"),
        ("  curve_preferences: [X25519]\n", "curve"),
        ("  cipher_suites: [TLS_AES_128_GCM_SHA256]\n", "version"),
    ],
)
def test_client_that_offers_something_else_is_refused(
    config: Config, more: str, limit: str
) -> None:
    other = config.client()
    if limit == "version":
        other.maximum_version = ssl.TLSVersion.TLSv1_2
    elif limit == "cipher":
        other.maximum_version = ssl.TLSVersion.TLSv1_2
        other.set_ciphers("ECDHE-ECDSA-AES128-GCM-SHA256")
    else:
        other.set_ecdh_curve("secp384r1")
    with serving(config_file=config.tls()) as server:
        assert fetch(server, other).status == 200
    with serving(config_file=config.tls(more)) as server:
        with pytest.raises(REFUSED):
            fetch(server, other)
        assert fetch(server, config.client()).status == 200


@pytest.mark.parametrize("prefers", ["true", "false"])
def test_whose_order_of_cipher_suites_counts(config: Config, prefers: str) -> None:
    suites = [f"TLS_ECDHE_ECDSA_WITH_AES_{suite}" for suite in ("256_GCM_SHA384", "128_GCM_SHA256")]
    more = f"  cipher_suites: [{', '.join(suites)}]\n  prefer_server_cipher_suites: {prefers}\n"
    client = config.client()
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    client.set_ciphers("ECDHE-ECDSA-AES128-GCM-SHA256:ECDHE-ECDSA-AES256-GCM-SHA384")
    with serving(config_file=config.tls(more)) as server, secure(server, client) as connection:
        cipher = connection.cipher()
    assert cipher
    assert ("AES256" in cipher[0]) is (prefers == "true")


# Client certificates ------------------------------------------------------------------------------

RIGHT = certify("prometheus", authority(), [x509.DNSName("prometheus")])
WRONG = {
    "of another authority": certify("prometheus", authority("another")),
    "its own": certify("prometheus"),
    "expired": certify("prometheus", authority(), days=-1),
    "of a server": certify("prometheus", authority(), usage=ExtendedKeyUsageOID.SERVER_AUTH),
    "of another authority of that name": certify("x", certify("authority", ca=True)),
}


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("auth", ["RequireAndVerifyClientCert", "VerifyClientCertIfGiven"])
def test_client_certificates(config: Config, auth: str, version: ssl.TLSVersion) -> None:
    more = MUTUAL.replace("RequireAndVerifyClientCert", auth)

    def client(certificate: Certificate | None) -> ssl.SSLContext:
        context = config.client(certificate)
        context.maximum_version = version
        return context

    with serving(config_file=config.tls(more)) as server:
        assert fetch(server, client(RIGHT)).status == 200
        for certificate in WRONG.values():
            with pytest.raises(REFUSED):
                fetch(server, client(certificate))
        if auth == "VerifyClientCertIfGiven":
            assert fetch(server, client(None)).status == 200
        else:
            with pytest.raises(REFUSED):
                fetch(server, client(None))
        assert fetch(server, client(RIGHT)).status == 200


def test_client_certificates_are_not_looked_at_unless_asked_for(config: Config) -> None:
    with serving(config_file=config.tls()) as server:
        for certificate in WRONG.values():
            assert fetch(server, config.client(certificate)).status == 200


def test_authority_that_is_no_root_is_trusted(config: Config) -> None:
    """As in Go."""
    middle = certify("middle", authority("root"), ca=True)
    middle.write(config.directory, "middle")
    more = MUTUAL.replace("ca.pem", "middle.pem")
    with serving(config_file=config.tls(more)) as server:
        assert fetch(server, config.client(certify("prometheus", middle))).status == 200
        with pytest.raises(REFUSED):
            fetch(server, config.client(certify("prometheus", authority("root"))))


@pytest.mark.parametrize(
    ("name", "listed"),
    [
        (x509.DNSName("prometheus"), "prometheus"),
        (x509.RFC822Name("ops@example.org"), "ops@example.org"),
        (x509.IPAddress(ip_address("10.0.0.1")), "10.0.0.1"),
        (x509.IPAddress(ip_address("2001:db8::1")), "2001:db8::1"),
        (x509.UniformResourceIdentifier("spiffe://example.org/prom"), "spiffe://example.org/prom"),
    ],
)
def test_allowed_sans(config: Config, name: x509.GeneralName, listed: str) -> None:
    more = f"{MUTUAL}  client_allowed_sans: ['no', '{listed}']\n"
    right = certify("x", authority(), [x509.DNSName("first"), name])
    others = [certify("x", authority(), [x509.DNSName("other")]), certify(listed, authority())]
    with serving(config_file=config.tls(more)) as server:
        assert fetch(server, config.client(right)).status == 200
        for other in others:
            for target in ("/metrics", "/", "/-/healthy"):
                refused = fetch(server, config.client(other), target)
                assert refused.status == 403
                assert refused.body == b"client_allowed_sans has no name of your certificate\n"
        with pytest.raises(REFUSED):
            fetch(server, config.client())


@pytest.mark.parametrize("more", ["", f"{MUTUAL}  client_allowed_sans: [prometheus]\n"])
def test_clients_that_go_after_their_request(
    config: Config, more: str, caplog: pytest.LogCaptureFixture
) -> None:
    context = config.client(RIGHT)
    with serving(limits=FRESH, config_file=config.tls(more)) as server:
        for _ in range(50):
            with secure(server, context) as client:
                client.sendall(request())
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wait_for(lambda: not server.connections and not server.answers)
        assert fetch(server, context).status == 200
    assert not caplog.records


def test_connection_that_is_closed_has_no_certificate(config: Config) -> None:
    more = f"{MUTUAL}  client_allowed_sans: [prometheus]\n"
    with serving(config_file=config.tls(more)) as server:
        with secure(server, config.client(RIGHT)):
            (connection,) = server.connections
        wait_for(lambda: not server.connections)
        with pytest.raises(StreamClosedError):
            assert connection.allowed


def test_session_that_is_resumed_is_its_clients(config: Config) -> None:
    more = f"{MUTUAL}  client_allowed_sans: [prometheus]\n"
    other = config.client(certify("x", authority(), [x509.DNSName("other")]))
    other.maximum_version = ssl.TLSVersion.TLSv1_2
    with serving(config_file=config.tls(more)) as server:
        with secure(server, other) as client:
            session = client.session
        with other.wrap_socket(connect(server), server_hostname=HOST, session=session) as client:
            assert client.session_reused
            client.sendall(request("/metrics", "1.1", "Connection: close"))
            assert read_all(client).startswith(b"HTTP/1.1 403 ")


# Hostile clients ----------------------------------------------------------------------------------

CLIENT_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"


def test_scrape_among_idle_half_open_and_plain_clients(config: Config) -> None:
    with contextlib.ExitStack() as stack:
        limits = Limits(first_request=6 * HANG)  # all are to be there until the end
        server = stack.enter_context(serving(limits=limits, config_file=config.tls()))
        context = config.client()
        idle = [stack.enter_context(secure(server, context)) for _ in range(250)]
        for _ in range(240):
            stack.enter_context(connect(server))
        for _ in range(10):
            stack.enter_context(connect(server)).sendall(CLIENT_HELLO)
        wait_for(lambda: len(server.connections) == 500)
        plain = stack.enter_context(connect(server))
        plain.sendall(request())
        assert not read_all(plain).startswith(b"HTTP")
        for target in ("/metrics", "/", "/-/healthy"):
            assert fetch(server, context, target).status == 200
        idle[0].sendall(request("/-/healthy"))
        assert idle[0].recv(4096).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("said", [b"", CLIENT_HELLO, CLIENT_HELLO + bytes(100)])
def test_handshake_that_does_not_end_is_not_waited_for(config: Config, said: bytes) -> None:
    with (
        serving(limits=Limits(first_request=0.3), config_file=config.tls()) as server,
        connect(server) as client,
    ):
        client.sendall(said)
        assert read_all(client) == b""


def test_request_that_does_not_come_after_a_handshake_is_not_waited_for(config: Config) -> None:
    context = config.client()

    def connected() -> ssl.SSLSocket | None:
        with contextlib.suppress(*REFUSED):  # the handshake alone may take too long
            return secure(server, context)
        return None

    with (
        serving(limits=Limits(first_request=0.3), config_file=config.tls()) as server,
        wait_for(connected, what="a handshake in time") as client,
        contextlib.suppress(*REFUSED),
    ):
        assert client.recv(1) == b""


# Where the peer has gone, CPython's wrap_socket() leaves its socket to the garbage collector.
LEFT = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@LEFT
def test_clients_that_have_gone_before_they_are_served(config: Config) -> None:
    with serving(config_file=config.tls()) as server:
        for said in (b"", request(), CLIENT_HELLO) * 30:
            with connect(server) as client:
                client.sendall(said)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert fetch(server, config.client()).status == 200
        wait_for(lambda: not server.connections)


@LEFT
def test_client_that_goes_while_it_is_accepted(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrap = ssl.SSLContext.wrap_socket

    def late(context: ssl.SSLContext, client: socket.socket, **options: Any) -> ssl.SSLSocket:
        assert gone.wait(HANG)
        return wrap(context, client, **options)

    gone = threading.Event()
    with serving(config_file=config.tls()) as server:
        with monkeypatch.context() as patch:
            patch.setattr(ssl.SSLContext, "wrap_socket", late)
            with connect(server) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            gone.set()
            wait_for(lambda: not server.connections)
        assert fetch(server, config.client()).status == 200
        wait_for(lambda: not server.connections)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, ssl.SSLContext]]:
    config = Config(tmp_path_factory.mktemp("shared"))
    certificates.server().write(config.directory, "s")
    authority().write(config.directory, "ca")
    with serving(config_file=config.tls(USERS)) as server:
        yield server, config.client()


@given(st.binary(max_size=300), st.booleans(), st.booleans())
def test_no_bytes_harm_the_server(
    shared: tuple[Server, ssl.SSLContext], data: bytes, hello: bool, encrypted: bool
) -> None:
    server, context = shared
    with connect(server) as client:
        if encrypted:
            with context.wrap_socket(client, server_hostname=HOST) as wrapped:
                wrapped.sendall(data)
                wrapped.sendall(b"\r\n\r\n")
        else:
            with contextlib.suppress(OSError):  # it may have been refused after the first bytes
                client.sendall(CLIENT_HELLO * hello + data)
                client.shutdown(socket.SHUT_WR)
            read_all(client)
    assert fetch(server, context, "/-/healthy", Authorization=ALICE).status == 200


def test_broken_handshakes_are_not_logged(config: Config, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with serving(config_file=config.tls(MUTUAL)) as server:
        for certificate in WRONG.values():
            with pytest.raises(REFUSED):
                fetch(server, config.client(certificate))
        with connect(server) as client:
            client.sendall(request())
            read_all(client)
        wait_for(lambda: not server.connections)
    assert not caplog.records


# Files that change --------------------------------------------------------------------------------


def serial(server: Server, context: ssl.SSLContext) -> str:
    """Of the certificate that the server shows."""
    with secure(server, context) as client:
        certificate = client.getpeercert()
    assert certificate
    return str(certificate["serialNumber"])


def test_certificate_is_replaced_while_serving(config: Config) -> None:
    client = config.client()
    new = certify("server", authority(), certificates.LOCAL)
    with serving(limits=FRESH, config_file=config.tls()) as server:
        assert serial(server, client) == certificates.server().serial
        (config.directory / "s.pem").write_text(new.pem)
        assert serial(server, client) == certificates.server().serial, "its key is not there yet"
        (config.directory / "s.key").write_text(new.key_pem())
        assert serial(server, client) == new.serial


def test_files_are_looked_at_once_in_a_while(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, looks = config.tls(), 0
    look = file.look

    def counted() -> WebConfig:
        nonlocal looks
        looks += 1
        return look()

    monkeypatch.setattr(file, "look", counted)
    with serving(limits=Limits(config_age=HANG), config_file=file) as server:
        for _ in range(20):
            assert fetch(server, config.client()).status == 200
    assert looks == 1


def test_look_that_hangs_stops_nobody(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    file, go = config.tls(), threading.Event()
    look, looks = file.look, list[str]()

    def hanging() -> WebConfig:
        looks.append("one")
        assert go.wait(HANG)
        return look()

    monkeypatch.setattr(file, "look", hanging)
    new = certify("server", authority(), certificates.LOCAL)
    new.write(config.directory, "s")
    with serving(limits=Limits(config_age=0, config_look=0.1), config_file=file) as server:
        for _ in range(20):
            assert fetch(server, config.client()).status == 200
        assert len(looks) == 1
        go.set()
        wait_for(lambda: serial(server, config.client()) == new.serial)


def test_server_ends_while_a_look_hangs(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file, begun, go = config.tls(), threading.Event(), threading.Event()

    def hanging() -> WebConfig:
        begun.set()
        assert go.wait(HANG)
        return file.config

    monkeypatch.setattr(file, "look", hanging)
    limits = Limits(config_look=HANG)
    with serving(limits=limits, config_file=file) as server, connect(server) as client:
        assert begun.wait(HANG)
        server.stop()
        assert read_all(client) == b""
    go.set()
    assert not caplog.records


def test_look_that_fails_is_logged_and_the_last_holds(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = config.tls()
    monkeypatch.setattr(file, "look", lambda: 1 / 0)
    with serving(limits=Limits(config_age=HANG), config_file=file) as server:
        assert fetch(server, config.client()).status == 200
    (record,) = caplog.records
    assert record.getMessage() == "the web configuration was not looked at"


def test_connections_of_before_are_closed_once_they_are_idle(config: Config) -> None:
    """What a removed authority has signed would otherwise stay in for as long as it asks."""
    collect = Collector()
    context = config.client(RIGHT)
    with (
        serving(collect, FRESH, config_file=config.tls(MUTUAL)) as server,
        secure(server, context) as idle,
        secure(server, context) as busy,
    ):
        busy.sendall(request())
        wait_for(lambda: collect.begun == 1)
        authority("another").write(config.directory, "ca2")
        config.tls(MUTUAL.replace("ca.pem", "ca2.pem"))
        with pytest.raises(REFUSED):
            fetch(server, context)
        assert idle.recv(65536) == b""
        collect.go.set()
        answer = b"".join(iter(lambda: busy.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.endswith(b"0\r\n\r\n")


def test_tls_is_switched_on_while_serving(config: Config) -> None:
    with serving(limits=FRESH, config_file=config.write("")) as server:
        assert fetch(server, None).status == 200
        config.tls()
        assert fetch(server, config.client()).status == 200
        with pytest.raises(ConnectionError):
            fetch(server, None)


# Passwords ----------------------------------------------------------------------------------------


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, str]]:
    """The work that bcrypt was given."""
    done: list[tuple[bytes, str]] = []
    check = bcrypt.checkpw

    def counted(password: bytes, hashed: bytes) -> bool:
        done.append((password, hashed.decode()))
        return check(password, hashed)

    monkeypatch.setattr(bcrypt, "checkpw", counted)
    return done


WRONG_HEADERS = [
    *(basic("alice", "wonder"), basic("alice", ""), basic("", "wonderland"), basic("", "")),
    *(basic("ALICE", "wonderland"), basic("mallory", "wonderland"), basic("alice", "a\0b")),
    *(
        "",
        "Basic",
        "Basic ",
        "Basic !",
        "Basic YWxpY2U=",
        "Bearer x",
        ALICE + "x",
        "Digest " + ALICE,
    ),
    *(ALICE.replace("Basic ", "Basic"), basic("alice", "wonderland" + "x" * 9000)),
]


@pytest.mark.parametrize("header", WRONG_HEADERS)
def test_wrong_password(config: Config, header: str) -> None:
    with serving(config_file=config.write(USERS)) as server:
        response = fetch(server, None, Authorization=header)
    assert (response.status, response.body) == (401, b"user or password is missing or wrong\n")
    assert response.headers["WWW-Authenticate"].startswith('Basic realm="')


@pytest.mark.parametrize(
    "header",
    [
        ALICE,
        ALICE.replace("Basic", "bAsIc"),
        ALICE.replace(" ", "   "),
        basic("bj\xf6rn", "p\xe5ss:word"),
    ],
)
def test_right_password(config: Config, header: str) -> None:
    with serving(config_file=config.write(USERS)) as server:
        assert fetch(server, None, Authorization=header).status == 200


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
@pytest.mark.parametrize("target", ["/metrics", "/", "/-/healthy", "/-/ready", "/nothing"])
def test_every_path_asks_for_a_password(config: Config, target: str, method: str) -> None:
    collect = Collector()
    with serving(collect, config_file=config.tls(USERS)) as server:
        assert fetch(server, config.client(), target, method).status == 401
        collect.go.set()
        right = fetch(server, config.client(), target, method, Authorization=ALICE).status
        assert right == (405 if method == "POST" else 404 if target == "/nothing" else 200)


def test_password_and_certificate_are_both_asked_for(config: Config) -> None:
    with serving(config_file=config.tls(MUTUAL + USERS)) as server:
        assert fetch(server, config.client(RIGHT)).status == 401
        assert fetch(server, config.client(RIGHT), Authorization=ALICE).status == 200
        with pytest.raises(REFUSED):
            fetch(server, config.client(), Authorization=ALICE)


def test_verdicts_are_kept(config: Config, checks: list[tuple[bytes, str]]) -> None:
    with serving(config_file=config.write(USERS)) as server:
        for _ in range(5):
            assert fetch(server, None, Authorization=ALICE).status == 200
            assert fetch(server, None, Authorization=basic("alice", "x")).status == 401
            assert fetch(server, None, Authorization=basic("bj\xf6rn", "wonderland")).status == 401
    assert [password for password, _ in checks] == [b"wonderland", b"x", b"wonderland"]


def test_unknown_user_is_the_same_work(config: Config, checks: list[tuple[bytes, str]]) -> None:
    with serving(config_file=config.write(USERS)) as server:
        assert fetch(server, None, Authorization=basic("mallory", "wonderland")).status == 401
    assert checks == [(b"wonderland", HASHES["alice"])], "and it does not become alice by that"


def test_password_that_is_changed_while_serving(config: Config) -> None:
    with serving(limits=FRESH, config_file=config.write(USERS)) as server:
        assert fetch(server, None, Authorization=ALICE).status == 200
        assert fetch(server, None, Authorization=basic("alice", "new")).status == 401
        changed = bcrypt.hashpw(b"new", bcrypt.gensalt(4)).decode()
        config.write(USERS.replace(HASHES["alice"], changed))
        assert fetch(server, None, Authorization=ALICE).status == 401
        assert fetch(server, None, Authorization=basic("alice", "new")).status == 200
        config.write(f"basic_auth_users: {{bob: '{changed}'}}")
        assert fetch(server, None, Authorization=basic("alice", "new")).status == 401
        assert fetch(server, None, Authorization=basic("bob", "new")).status == 200


def test_bytes_beyond_those_that_bcrypt_looks_at(config: Config) -> None:
    hashed = bcrypt.hashpw(b"x" * 72, bcrypt.gensalt(4)).decode()
    with serving(config_file=config.write(f"basic_auth_users: {{a: '{hashed}'}}")) as server:
        for length, status in ((71, 401), (72, 200), (73, 200), (5000, 200)):
            assert fetch(server, None, Authorization=basic("a", "x" * length)).status == status


def test_checks_are_bounded_and_block_nobody(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, begun = threading.Event(), []

    def slow(password: bytes, hashed: bytes) -> bool:
        begun.append(password)
        assert go.wait(HANG)
        return bool(password == b"wonderland")

    with serving(limits=Limits(passwords=3), config_file=config.write(USERS)) as server:
        assert fetch(server, None, Authorization=ALICE).status == 200
        monkeypatch.setattr(bcrypt, "checkpw", slow)
        guesses = [basic("alice", f"guess {number}") for number in range(3)]
        waiting = [
            BACKGROUND.submit(fetch, server, None, Authorization=guess)
            for guess in (*guesses, guesses[0])
        ]
        wait_for(lambda: len(server.answers) == 4 and len(begun) == 1)
        refused = fetch(server, None, Authorization=basic("alice", "one more"))
        assert (refused.status, refused.body) == (503, b"3 passwords are being checked already\n")
        assert refused.headers["Retry-After"] == "5"
        for target in ("/metrics", "/-/healthy"):
            assert fetch(server, None, target, Authorization=ALICE).status == 200
        assert fetch(server, None).status == 401
        go.set()
        assert [guess.result(HANG).status for guess in waiting] == [401] * 4
    assert len(begun) == 3, "the same guess is checked once"


def test_check_that_takes_long_is_answered_later(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    check: Callable[[bytes, bytes], bool] = bcrypt.checkpw
    monkeypatch.setattr(bcrypt, "checkpw", lambda *args: go.wait(HANG) and check(*args))
    limits = Limits(password=0.2)
    with serving(limits=limits, config_file=config.write(USERS)) as server:
        late = fetch(server, None, Authorization=ALICE)
        assert (late.status, late.body) == (503, b"the password was not checked within 0.2 s\n")
        with connect(server) as client:  # and one that does not wait for it
            client.sendall(request("/metrics", "1.1", f"Authorization: {ALICE}"))
            wait_for(lambda: len(server.answers) == 1)
        wait_for(lambda: not server.answers)
        go.set()
        wait_for(lambda: fetch(server, None, Authorization=ALICE).status == 200)


def test_server_ends_while_passwords_are_checked(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    go, begun = threading.Event(), threading.Event()

    def slow(password: bytes, hashed: bytes) -> bool:
        begun.set()
        return go.wait(HANG)

    monkeypatch.setattr(bcrypt, "checkpw", slow)
    with (
        serving(limits=Limits(shutdown=0.1), config_file=config.write(USERS)) as server,
        connect(server) as client,
        connect(server) as second,
    ):
        client.sendall(request("/metrics", "1.1", f"Authorization: {ALICE}"))
        second.sendall(request("/metrics", "1.1", f"Authorization: {basic('a', 'b')}"))
        wait_for(lambda: begun.is_set() and len(server.answers) == 2)
    go.set()
    assert not caplog.records


def test_no_password_is_kept(config: Config) -> None:
    async def check() -> Passwords:
        passwords = Passwords(9, HANG)
        assert await passwords.check(HASHES, ALICE)
        assert not await passwords.check(HASHES, basic("alice", "wonder"))
        passwords.close()
        return passwords

    kept = vars(asyncio.run(check()))
    verdicts = [*kept["_right"], *kept["_wrong"]]
    assert [len(verdict) for verdict in verdicts] == [32, 32]
    assert not kept["_checking"]
    assert "wonder" not in repr(kept)


def test_verdicts_are_bounded_and_guesses_do_not_displace_what_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gate, "_KEPT", 5)

    async def check() -> Passwords:
        passwords = Passwords(9, HANG)
        assert await passwords.check(HASHES, ALICE)
        for number in range(20):
            assert not await passwords.check(HASHES, basic("alice", f"guess {number}"))
        monkeypatch.setattr(bcrypt, "checkpw", None)
        assert await passwords.check(HASHES, ALICE)
        assert not await passwords.check(HASHES, basic("alice", "guess 19"))
        passwords.close()
        return passwords

    kept = vars(asyncio.run(check()))
    assert (len(kept["_right"]), len(kept["_wrong"])) == (1, 5)


def test_failure_of_bcrypt_is_not_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        passwords = Passwords(9, HANG)
        with monkeypatch.context() as patch:
            patch.setattr(bcrypt, "checkpw", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                await passwords.check(HASHES, ALICE)
        assert await passwords.check(HASHES, ALICE)
        passwords.close()

    asyncio.run(check())


def test_no_checks_at_all() -> None:
    async def check() -> None:
        passwords = Passwords(0, HANG)
        with pytest.raises(Busy, match="0 passwords are being checked already"):
            await passwords.check(HASHES, ALICE)
        passwords.close()

    asyncio.run(check())


# Headers and the rate limit -----------------------------------------------------------------------


def test_headers_are_on_each_response(config: Config) -> None:
    text = f"""{USERS}
http_server_config:
  headers:
    X-Frame-Options: sameorigin
    Strict-Transport-Security: max-age=31536000
    Content-Security-Policy: ''
"""
    with serving(config_file=config.write(text)) as server:
        for target in ("/metrics", "/", "/-/healthy", "/nothing"):
            for authorization in ("", ALICE):
                headers = fetch(server, None, target, Authorization=authorization).headers
                assert headers.get_all("X-Frame-Options") == ["sameorigin"]
                assert headers["Strict-Transport-Security"] == "max-age=31536000"
                assert headers["Content-Security-Policy"] is None
                assert headers["X-Content-Type-Options"] == "nosniff", "ours, as it is not set"


def test_rate_limit(config: Config) -> None:
    limit = "rate_limit: {interval: 1h, burst: 3}\n"
    with serving(limits=FRESH, config_file=config.write(USERS + limit)) as server:
        # Also requests that are refused count: guessing is what the limit is against.
        assert [fetch(server, None).status for _ in range(3)] == [401] * 3
        limited = fetch(server, None, Authorization=ALICE)
        assert limited.status == 429
        assert limited.body == b"more requests than rate_limit in --web.config.file allows\n"
        config.write(USERS)
        assert fetch(server, None, Authorization=ALICE).status == 200


def test_token_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    rate, limit = RateLimiter(), RateLimit(0.5, 2)
    assert [rate.admits(limit) for _ in range(3)] == [True, True, False]
    now += 0.4
    assert not rate.admits(limit)
    now += 0.2
    assert [rate.admits(limit) for _ in range(2)] == [True, False]
    now += 1000
    assert [rate.admits(limit) for _ in range(3)] == [True, True, False]
    assert rate.admits(None)
    assert rate.admits(RateLimit(1, 1)), "another limit begins anew"
