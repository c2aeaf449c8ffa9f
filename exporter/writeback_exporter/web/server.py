# SPDX-License-Identifier: Apache-2.0
"""The HTTP server. Every wait, queue and buffer that a client can cause has a bound (`Limits`).

    accept -> _Connection (one deadline at any time) -> _Exchange (one request, one response)
      -> the rate limit, the password (bcrypt in one thread), where the configuration has them
      -> collect (one thread: one at a time) -> render, gzip (two threads) -> client, by chunks
      -> status page (in the same one thread, for all who wait for it at once) -> client

The event loop only moves bytes, and encrypts them. tornado parses HTTP; accepting is our own,
because tornado's acceptor, out of file descriptors, spins and logs 5,000 tracebacks a second
(measured, 6.6).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from tornado import httputil
from tornado.http1connection import (
    HTTP1Connection,
    HTTP1ConnectionParameters,
    HTTP1ServerConnection,
)
from tornado.iostream import IOStream, SSLIOStream, StreamClosedError

from writeback_exporter.metrics.exposition import Snapshot, gzip_chunks, negotiate, render
from writeback_exporter.web.gate import Busy, Passwords, RateLimiter
from writeback_exporter.web.listen import Address, inherited_listeners, open_listeners
from writeback_exporter.web.policy import WebConfig

if TYPE_CHECKING:
    from writeback_exporter.web.config import ConfigFile

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one client, or all together, may cost. Times in seconds, sizes in bytes."""

    connections: int = 512
    """Open at once; the newest beyond are closed."""
    scrapes: int = 8
    """At once, waiting or being sent: each may hold a snapshot. Beyond: 503."""
    header_bytes: int = 16 * 1024
    body_bytes: int = 4 * 1024
    """No request needs a body; a small one is read so that a POST gets its 405."""
    first_request: float = 10
    """From accept to a whole request; a TLS handshake counts."""
    next_request: float = 120
    """From a response to the next whole request. Prometheus keeps its connection from scrape to
    scrape, 15 to 60 s. tornado does not show when a request's first byte came, so this is also
    how long a slow sender can hold a connection that has once sent a request in time."""
    collect: float = 30
    """For waiting and collecting, unless Prometheus says how long it waits itself."""
    status: float = 10
    """For a new status page; then the last one is sent."""
    status_age: float = 5
    """How old a status page may be to be sent again."""
    send: float = 30
    """For a client to take a whole response."""
    passwords: int = 16
    """Being checked, or waiting for it: 0.1 s each, or what their hashes cost. Beyond: 503."""
    password: float = 10
    """For a password to be checked."""
    config_age: float = 1
    """How old a look at the configuration and the files it names may be."""
    config_look: float = 0.5
    """For that look: their disk may be one that hangs. Then the last one holds."""
    shutdown: float = 5
    """For responses in progress to end, once told to stop."""


_TEXT = {"Content-Type": "text/plain; charset=utf-8"}
_HTML = {"Content-Type": "text/html; charset=utf-8"}
_ASK = {"WWW-Authenticate": 'Basic realm="writeback-exporter", charset="UTF-8"'}
_SECURITY = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Server:
    """Serves metrics at `telemetry_path`, the status page and the health checks beside them, at the
    addresses `listen` or, where that is None, at the sockets that systemd gives.

    `collect` and `status`, which makes the page's HTML, may block; they are called in one thread,
    so never twice at a time, and the snapshot that is returned must not change any more. `ready` is
    called in the event loop and must not block. `config_file` is looked at while serving.
    """

    def __init__(
        self,
        listen: Sequence[Address] | None,
        telemetry_path: str,
        collect: Callable[[], Snapshot],
        status: Callable[[], bytes],
        ready: Callable[[], bool],
        limits: Limits = Limits(),
        config_file: ConfigFile | None = None,
    ) -> None:
        self.limits = limits
        self.config = config_file.config if config_file else WebConfig()
        """As of the last look at it."""
        self.connections: set[_Connection] = set()
        self.answers: set[asyncio.Task[None]] = set()
        self._listen = listen
        self._telemetry_path = telemetry_path
        self._collect = collect
        self._status = status
        self._ready = ready
        self._listeners: list[socket.socket] = []
        self._collector = ThreadPoolExecutor(1, "collect")
        self._renderers = ThreadPoolExecutor(2, "render")
        self._passwords = Passwords(limits.passwords, limits.password)
        self._rate = RateLimiter()
        self._config_file = config_file
        self._looker = ThreadPoolExecutor(1, "web-config")
        self._looking: asyncio.Task[None] | None = None
        self._looked = float("-inf")
        self._scrapes = 0
        self._page: bytes | None = None
        self._page_expires = float("-inf")
        self._making_page: asyncio.Task[None] | None = None
        self._complained = -60.0
        # Not asyncio's: this one can be set from any thread, before, during and after run().
        self._stop: concurrent.futures.Future[None] = concurrent.futures.Future()

    @property
    def addresses(self) -> list[Address]:
        """What bind() bound; of interest where port 0 was asked for, and of systemd's sockets."""
        return [Address(*listener.getsockname()[:2]) for listener in self._listeners]

    def bind(self) -> None:
        """Opens the listening sockets. Raises ListenError, with none of them left open."""
        given = self._listen
        self._listeners = inherited_listeners() if given is None else open_listeners(given)
        for listener in self._listeners:
            listener.setblocking(False)  # as the event loop requires

    def run(self) -> None:
        """Serves, once, until stop() or, in the main thread, SIGTERM or SIGINT; closes everything.

        A collection that hangs is not waited for here, but Python does so when it exits; a second
        signal ends the process then.
        """
        # tornado logs malformed requests and broken connections, which are the clients' affair, up
        # to ERROR and with tracebacks (6.2). What we raise, answer() or tornado.application logs.
        logging.getLogger("tornado.general").setLevel(logging.CRITICAL)
        try:
            asyncio.run(self._serve())
        finally:
            self._collector.shutdown(wait=False, cancel_futures=True)
            self._renderers.shutdown(wait=False, cancel_futures=True)
            self._looker.shutdown(wait=False, cancel_futures=True)
            self._passwords.close()

    def stop(self) -> None:
        """Makes run() return. From any thread, at any time, any number of times."""
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            self._stop.set_result(None)

    # Connections --------------------------------------------------------------------------------

    async def _serve(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, self.stop)
        # A group, so that a bug that ends an acceptor ends run() too, rather than leave us deaf.
        async with asyncio.TaskGroup() as group:
            acceptors = [group.create_task(self._accept(each)) for each in self._listeners]
            await asyncio.wrap_future(self._stop)
            for acceptor in acceptors:
                acceptor.cancel()
        self._close_listeners()
        if self.answers:
            await asyncio.wait(self.answers, timeout=self.limits.shutdown)
        for connection in tuple(self.connections):
            await connection.http.close()

    async def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, peer = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:
                self._complain("cannot accept connections: %s", error)
                await asyncio.sleep(0.1)  # out of descriptors or memory: do not spin
                continue
            if len(self.connections) < self.limits.connections:
                await self._welcome(client, str(peer[0]))
            else:
                client.close()
                self._complain("%d connections are open: closing new ones", len(self.connections))
            # sock_accept returns at once while connections are waiting, so that without this a
            # flood of new ones would keep the loop from those already open.
            await asyncio.sleep(0)

    async def _welcome(self, client: socket.socket, peer: str) -> None:
        with contextlib.ExitStack() as unless_served:
            unless_served.callback(client.close)
            await self._look()
            # A client that has gone already cannot be wrapped for TLS.
            with contextlib.suppress(OSError):
                self.connections.add(_Connection(self, client, peer))
                unless_served.pop_all()

    def _close_listeners(self) -> None:
        while self._listeners:
            self._listeners.pop().close()

    def _complain(self, message: str, *args: object) -> None:
        """Logs a warning, at most one a minute: clients can cause any number."""
        if time.monotonic() - self._complained >= 60:
            self._complained = time.monotonic()
            log.warning(message, *args)

    # Configuration ------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Has `config` be as the file is, within `config_age`."""
        now = asyncio.get_running_loop().time()
        if self._config_file is None:
            return
        if self._looking is None and now >= self._looked + self.limits.config_age:
            self._looked = now
            self._looking = asyncio.create_task(self._look_at(self._config_file))
        if self._looking is not None:
            left = self._looked + self.limits.config_look - now
            # Once it has taken too long, nobody waits for it any more.
            await asyncio.wait([self._looking], timeout=max(left, 0))

    async def _look_at(self, file: ConfigFile) -> None:
        loop = asyncio.get_running_loop()
        try:
            config = await loop.run_in_executor(self._looker, file.look)
        except Exception:
            log.exception("the web configuration was not looked at")
            return
        finally:
            self._looking = None
        if config.tls is not self.config.tls:
            for connection in tuple(self.connections):
                connection.retire()
        self.config = config

    # Responses ----------------------------------------------------------------------------------

    async def answer(self, exchange: _Exchange) -> None:
        """Writes the response. If that fails, the client sees a 500 or a broken connection."""
        try:
            await self._route(exchange)
        except StreamClosedError:
            log.debug("%s: the client has gone", exchange.path)
        except Exception as error:
            log.exception("%s failed", exchange.path)
            if exchange.started:
                exchange.connection.reset()
                return
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            with contextlib.suppress(StreamClosedError):
                await exchange.reply(500, reason[:500])

    async def _route(self, exchange: _Exchange) -> None:
        if not await self._admit(exchange):
            return
        if exchange.method not in ("GET", "HEAD"):
            await exchange.reply(405, "only GET and HEAD", _TEXT | {"Allow": "GET, HEAD"})
        elif exchange.path == self._telemetry_path:
            await self._scrape(exchange)
        elif exchange.path == "/":
            await self._show_status(exchange)
        elif exchange.path == "/-/healthy":
            await exchange.reply(200, "ok")
        elif exchange.path == "/-/ready":
            ready = self._ready()
            await exchange.reply(200 if ready else 503, "ready" if ready else "not ready")
        else:
            await exchange.reply(404, f"nothing here; metrics are at {self._telemetry_path}")

    async def _admit(self, exchange: _Exchange) -> bool:
        """Whether the request may be answered, also what is asked of health. Else it says why."""
        await self._look()
        config = self.config
        exchange.configured = config.headers
        if not self._rate.admits(config.rate_limit):
            await exchange.reply(429, "more requests than rate_limit in --web.config.file allows")
            return False
        if not exchange.connection.allowed:
            await exchange.reply(403, "client_allowed_sans has no name of your certificate")
            return False
        if not config.users:
            return True
        exchange.connection.deadline(self.limits.password + self.limits.send)
        try:
            right = await self._passwords.check(
                config.users, exchange.headers.get("Authorization", "")
            )
        except Busy as busy:
            exchange.connection.deadline(self.limits.send)
            await exchange.reply(503, str(busy))
            return False
        exchange.connection.deadline(self.limits.send)
        if not right:
            await exchange.reply(401, "user or password is missing or wrong", _TEXT | _ASK)
        return right

    async def _show_status(self, exchange: _Exchange) -> None:
        if exchange.method == "HEAD":
            await exchange.start(200, _HTML)
            exchange.end()
            return
        loop = asyncio.get_running_loop()
        if self._making_page is None and loop.time() >= self._page_expires:
            self._making_page = loop.create_task(self._make_page())
        if self._making_page is not None:
            # One for all who come meanwhile: however many they are, the one thread has one more
            # call to wait for, and it goes on when they leave.
            exchange.connection.deadline(self.limits.status + self.limits.send)
            done, _ = await asyncio.wait([self._making_page], timeout=self.limits.status)
            for made in done:
                made.result()  # or what it raised
        if self._page is None:
            await exchange.reply(503, f"no status page within {self.limits.status:g} s")
        else:
            await exchange.reply(200, self._page, _HTML)

    async def _make_page(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            self._page = await loop.run_in_executor(self._collector, self._status)
            self._page_expires = loop.time() + self.limits.status_age
        finally:
            self._making_page = None

    async def _scrape(self, exchange: _Exchange) -> None:
        chosen = negotiate(exchange.headers.get("Accept", ""))
        headers = {"Content-Type": chosen.content_type, "Vary": "Accept, Accept-Encoding"}
        gzip = accepts_gzip(exchange.headers.get("Accept-Encoding", ""))
        if gzip:
            headers["Content-Encoding"] = "gzip"
        if exchange.method == "HEAD":
            await exchange.start(200, headers)
            exchange.end()
            return
        if self._scrapes >= self.limits.scrapes:
            await exchange.reply(503, f"{self._scrapes} scrapes are in progress already")
            return
        self._scrapes += 1
        try:
            snapshot = await self._collect_in_turn(exchange)
            if snapshot is not None:
                chunks = render(snapshot, chosen, exchange.names)
                await self._stream(exchange, headers, gzip_chunks(chunks) if gzip else chunks)
        finally:
            self._scrapes -= 1

    async def _collect_in_turn(self, exchange: _Exchange) -> Snapshot | None:
        """The snapshot, or None once 503 was answered because it would come too late.

        The turn is the place in the one thread's queue. A scrape whose time runs out, or whose
        client goes away, leaves the queue and is never collected.
        """
        seconds = _patience(exchange.headers, self.limits.collect)
        exchange.connection.deadline(seconds + self.limits.send)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(seconds) as timeout:
                return await loop.run_in_executor(self._collector, self._collect)
        except TimeoutError:
            if not timeout.expired():
                raise  # collect's own
            await exchange.reply(503, f"not collected within {seconds:g} s")
            return None

    async def _stream(
        self, exchange: _Exchange, headers: Mapping[str, str], chunks: Iterator[bytes]
    ) -> None:
        """Renders and sends chunk by chunk: one is in memory at a time, and no turn is held."""
        exchange.connection.deadline(self.limits.send)
        step = partial(
            asyncio.get_running_loop().run_in_executor, self._renderers, next, chunks, None
        )
        # The first chunk comes before the headers, so that a failure to render it is still a 500.
        first = await step()
        await exchange.start(200, headers, first or b"")
        while (chunk := await step()) is not None:
            await exchange.http.write(chunk)
        exchange.end()


class _Connection(httputil.HTTPServerConnectionDelegate):
    """A client's connection. Until it closes, one deadline is running."""

    def __init__(self, server: Server, client: socket.socket, peer: str) -> None:
        limits = server.limits
        self.server = server
        self.stream, self._tls = self._open(client), server.config.tls
        parameters = HTTP1ConnectionParameters(
            chunk_size=limits.header_bytes,
            max_header_size=limits.header_bytes,
            max_body_size=limits.body_bytes,
        )
        self.http = HTTP1ServerConnection(self.stream, parameters, peer)
        self._patience = limits.first_request
        self._timer: asyncio.TimerHandle | None = None
        self._idle = True
        self._retired = False
        self.http.start_serving(self)

    def _open(self, client: socket.socket) -> IOStream:
        """Raises OSError."""
        size = self.server.limits.header_bytes
        tls = self.server.config.tls
        if tls is None:
            return IOStream(client, read_chunk_size=size)
        wrapped = tls.context.wrap_socket(client, server_side=True, do_handshake_on_connect=False)
        return SSLIOStream(wrapped, read_chunk_size=size)

    @property
    def allowed(self) -> bool:
        """Whether its client's certificate has an allowed name. Raises StreamClosedError."""
        if self._tls is None or not self._tls.allowed_sans:
            return True
        if self.stream.closed():
            raise StreamClosedError
        assert isinstance(self.stream, SSLIOStream)
        try:
            certificate = self.stream.socket.getpeercert()
        except OSError as error:  # it has gone, and tornado has not seen it yet
            raise StreamClosedError(error) from error
        return self._tls.admits(certificate)

    def retire(self) -> None:
        """Closes it after the response in progress: TLS is another now, or other certificates."""
        self._retired = True
        if self._idle:
            self.close()

    def begin_response(self) -> None:
        """A whole request is here."""
        self._idle = False
        self.deadline(self.server.limits.send)

    def close(self) -> None:
        """Closes; in TLS says first that this is the end."""
        if isinstance(self.stream, SSLIOStream) and not self.stream.closed():
            with contextlib.suppress(OSError, ValueError):
                self.stream.socket.unwrap()
        self.stream.close()

    def deadline(self, seconds: float) -> None:
        """Sets the one deadline anew: the connection is reset in so many seconds."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, self.reset)

    def reset(self) -> None:
        """Closes with a TCP reset: no client takes that for the end of a response, and the kernel
        drops at once what a slow reader has left in the send buffer (up to 4 MiB)."""
        if not self.stream.closed():
            no_linger = struct.pack("ii", 1, 0)
            self.stream.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, no_linger)
            self.stream.close()

    def start_request(
        self, server_conn: object, request_conn: httputil.HTTPConnection
    ) -> _Exchange:
        """tornado: the last response is out, the next request is awaited."""
        self._idle = True
        if self._retired:
            self.close()
        self.deadline(self._patience)
        self._patience = self.server.limits.next_request
        assert isinstance(request_conn, HTTP1Connection)
        return _Exchange(self, request_conn)

    def on_close(self, server_conn: object) -> None:
        """tornado: the connection is closed."""
        if self._timer is not None:
            self._timer.cancel()
        self.server.connections.discard(self)


class _Exchange(httputil.HTTPMessageDelegate):
    """One request and its response."""

    def __init__(self, connection: _Connection, http: HTTP1Connection) -> None:
        self.connection = connection
        self.http = http
        self.started = False
        self.configured: Mapping[str, str] = {}
        """Headers of each response."""

    def headers_received(
        self,
        start_line: httputil.RequestStartLine | httputil.ResponseStartLine,
        headers: httputil.HTTPHeaders,
    ) -> None:
        """tornado: the request's header is here."""
        assert isinstance(start_line, httputil.RequestStartLine)
        self.method, target, self.version = start_line
        self.path, _, query = target.partition("?")
        self.names = parse_qs(query).get("name[]", [])
        self.headers = headers

    def finish(self) -> None:
        """tornado: the whole request is here."""
        server = self.connection.server
        self.connection.begin_response()
        task = asyncio.create_task(server.answer(self))
        server.answers.add(task)
        task.add_done_callback(server.answers.discard)

        def client_has_gone() -> None:
            task.cancel()

        self.http.set_close_callback(client_has_gone)

    async def start(self, code: int, headers: Mapping[str, str], chunk: bytes = b"") -> None:
        """Sends status, headers and a first piece of the body."""
        self.started = True
        line = httputil.ResponseStartLine("HTTP/1.1", code, HTTPStatus(code).phrase)
        date = {"Date": httputil.format_timestamp(time.time())}
        fields = {**date, **_SECURITY, **self.configured, **headers}
        given = httputil.HTTPHeaders({name: text for name, text in fields.items() if text})
        await self.http.write_headers(line, given, chunk)

    async def reply(self, code: int, body: str | bytes, headers: Mapping[str, str] = _TEXT) -> None:
        """Sends a whole response; a `body` that is a string is one line of text."""
        content = body if isinstance(body, bytes) else f"{body}\n".encode()
        extra = {"Content-Length": str(len(content))}
        if code == HTTPStatus.SERVICE_UNAVAILABLE:
            extra["Retry-After"] = "5"
        await self.start(code, {**headers, **extra}, b"" if self.method == "HEAD" else content)
        self.end()

    def end(self) -> None:
        """Ends the body; all of it has been handed to the kernel."""
        if self.version == "HTTP/1.0":
            self.connection.close()  # 1.0 has no chunks: closing is the end
        else:
            self.http.finish()


def accepts_gzip(header: str) -> bool:
    """Whether an Accept-Encoding header admits gzip (RFC 9110, 12.5.3)."""
    quality: dict[str, float] = {}
    for item in header.lower().split(","):
        coding, _, parameter = item.partition(";")
        name, _, value = parameter.partition("=")
        try:
            quality[coding.strip()] = float(value) if name.strip() == "q" else 1
        except ValueError:
            quality[coding.strip()] = 0
    return quality.get("gzip", quality.get("*", 0)) > 0


def _patience(headers: httputil.HTTPHeaders, default: float) -> float:
    """How long Prometheus waits for this scrape, in seconds; `default` if it does not say."""
    try:
        seconds = float(headers.get("X-Prometheus-Scrape-Timeout-Seconds", ""))
    except ValueError:
        return default
    return min(seconds, 60) if seconds > 0 else default  # NaN too is not above 0
