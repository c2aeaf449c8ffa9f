# SPDX-License-Identifier: Apache-2.0
"""Sockets as systemd hands them over. tests/matrix/test_systemd.py has systemd itself do it."""

from __future__ import annotations

import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

HANG = 20.0
# sd_listen_fds(3): from descriptor 3 on, and for the process of this number only.
START = (
    'LISTEN_PID=$$ LISTEN_FDS=$1 LISTEN_FDNAMES=a; export LISTEN_PID LISTEN_FDS; shift; exec "$@"'
)
SERVE = """
import os, socket
from writeback_exporter.metrics.exposition import Snapshot
from writeback_exporter.web.listen import ListenError, inherited_listeners
from writeback_exporter.web.server import Server
server = Server(None, "/metrics", Snapshot, lambda: b"the page", lambda: True)
server.bind()
print(*server.addresses, flush=True)
print(*(os.get_inheritable(listener.fileno()) for listener in server._listeners), flush=True)
print([name for name in os.environ if name.startswith("LISTEN_")], flush=True)
try:
    inherited_listeners()
except ListenError as error:
    print(error, flush=True)
server.run()
"""
ASK = """
from writeback_exporter.web.listen import ListenError, inherited_listeners
try:
    inherited_listeners()
except ListenError as error:
    print(error)
"""


def started(
    descriptors: Sequence[int], code: str, *, count: object = None, before: str = ""
) -> subprocess.Popen[str]:
    """Python code that has these descriptors from 3 on, of which it is told that they are `count`;
    these shell commands run before it."""
    # First out of the way of each other.
    moved = "".join(f"exec {90 + i}<&{fd}; " for i, fd in enumerate(descriptors))
    moved += "".join(f"exec {3 + i}<&{90 + i}; " for i in range(len(descriptors)))
    script = f"{moved}{before}{START}"
    number = str(len(descriptors) if count is None else count)
    return subprocess.Popen(
        ["bash", "-c", script, "bash", number, sys.executable, "-c", code],
        pass_fds=descriptors,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def refusal(descriptors: Sequence[int], *, count: object = None, before: str = "") -> str:
    said, errors = started(descriptors, ASK, count=count, before=before).communicate(timeout=HANG)
    assert errors == ""
    return said.rstrip("\n")


@contextmanager
def serving(*listeners: socket.socket) -> Iterator[subprocess.Popen[str]]:
    process = started([listener.fileno() for listener in listeners], SERVE)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=HANG)


def get(listener: socket.socket) -> bytes:
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    with urllib.request.urlopen(f"http://{host}:{port}/", timeout=HANG) as answer:
        body: bytes = answer.read()
        return body


def test_serves_on_each() -> None:
    v4 = socket.create_server(("127.0.0.1", 0))
    v6 = socket.create_server(("::1", 0), family=socket.AF_INET6)
    with v4, v6, serving(v4, v6) as process:
        assert process.stdout is not None
        ports = [listener.getsockname()[1] for listener in (v4, v6)]
        assert process.stdout.readline() == f"127.0.0.1:{ports[0]} [::1]:{ports[1]}\n"
        assert process.stdout.readline() == "False False\n"
        # For no child to take them for its own, nor this process twice.
        assert process.stdout.readline() == "[]\n"
        assert process.stdout.readline().startswith("systemd gave no socket")
        assert get(v4) == get(v6) == b"the page"


def test_connections_wait_while_nobody_serves() -> None:
    """The socket is systemd's: a restart refuses no scrape."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with serving(listener) as process:
            assert get(listener) == b"the page"
        assert process.returncode == 0
        with socket.create_connection(listener.getsockname(), timeout=HANG) as early:
            early.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            with serving(listener):
                assert early.makefile("rb").read().endswith(b"the page")


NONE = "systemd gave no socket to listen on; have a socket unit start the service, with "


@pytest.mark.parametrize("count", ["", "0", "-1", "one", "1 ", "999999"])
def test_count_that_is_none(count: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert refusal([listener.fileno()], count=count).startswith(NONE)


def test_sockets_of_another_process() -> None:
    """A child of the process that systemd started has its environment."""
    run = (
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {ASK!r}], close_fds=False)"
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        said, _ = started([listener.fileno()], run).communicate(timeout=HANG)
    assert said.startswith(NONE)


def test_descriptor_that_is_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        said = refusal([listener.fileno()], count=2, before="exec 4<&-; ")
        assert said.startswith("systemd's descriptor 4: Bad file descriptor; have a socket unit ")


def test_descriptor_that_is_no_socket() -> None:
    """A FIFO, of ListenFIFO=."""
    said = refusal([0])
    assert said.startswith("systemd's descriptor 3: Socket operation on non-socket; have a ")


def udp() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind(("127.0.0.1", 0))
    return made


def connected() -> socket.socket:
    """Of Accept=yes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return socket.create_connection(listener.getsockname())


def unix() -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind("")  # any abstract name
    made.listen()
    return made


@pytest.mark.parametrize("make", [udp, connected, unix])
def test_socket_that_is_not_listening_on_tcp(make: type[socket.socket]) -> None:
    with make() as other:
        said = refusal([other.fileno()])
    assert said.startswith("systemd's descriptor 3 listens on no TCP port; have a socket unit ")


def test_none_is_left_open_where_one_is_refused() -> None:
    code = f"import os\n{ASK}print([os.path.exists(f'/proc/self/fd/{{fd}}') for fd in (3, 4)])"
    with socket.create_server(("127.0.0.1", 0)) as listener, unix() as other:
        process = started([listener.fileno(), other.fileno()], code)
        said, _ = process.communicate(timeout=HANG)
    assert said.splitlines()[1] == "[False, False]"
