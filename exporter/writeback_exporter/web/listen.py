# SPDX-License-Identifier: Apache-2.0
"""Where the server listens: addresses of the command line, sockets that are opened or inherited."""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from ipaddress import ip_address


class ListenError(Exception):
    """What cannot be listened on: one line with the kernel's answer and the remedy."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen. An empty host is every address, IPv4 and IPv6; port 0 is any free port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Reads `HOST:PORT`, `[IPV6]:PORT` or `:PORT`. Raises ValueError with a one-line reason."""
        match = _ADDRESS.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not HOST:PORT, [IPV6]:PORT or :PORT")
        if int(match["port"]) > 65535:
            raise ValueError(f"{text!r}: the port is above 65535")
        host: str = match["ipv6"] or match["name"]
        if match["ipv6"] or re.fullmatch(r"[0-9.]+", host):
            try:
                ip_address(host)
            except ValueError:
                raise ValueError(f"{text!r}: {host} is not an IP address") from None
        return cls(host, int(match["port"]))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


_ADDRESS = re.compile(
    r"(?:\[(?P<ipv6>[0-9a-f:.]+(?:%[\w.-]+)?)\]|(?P<name>[\w.-]*)):(?P<port>[0-9]{1,5})",
    re.ASCII | re.IGNORECASE,
)
_REMEDIES = {
    errno.EADDRINUSE: "the port is taken (`ss -ltnp` shows by whom): stop that or choose another",
    errno.EADDRNOTAVAIL: "this host has no such address (`ip address` shows those it has)",
    errno.EACCES: "a port below 1024 needs CAP_NET_BIND_SERVICE: grant it or choose a higher one",
    errno.EAFNOSUPPORT: "IPv6 is off here: choose an IPv4 address",
}


def open_listeners(addresses: Sequence[Address]) -> list[socket.socket]:
    """A listening socket each. Raises ListenError, with none of them left open."""
    with ExitStack() as unless_all:
        listeners = [unless_all.enter_context(_open(address)) for address in addresses]
        unless_all.pop_all()
    return listeners


def _open(address: Address) -> socket.socket:
    """Of a name's several addresses the first IPv4 one, as Go's net.Listen."""
    try:
        if not address.host and socket.has_dualstack_ipv6():
            anywhere = ("", address.port)
            return socket.create_server(anywhere, family=socket.AF_INET6, dualstack_ipv6=True)
        found = socket.getaddrinfo(
            address.host or None, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, _, _, _, where = min(found, key=lambda entry: entry[0] != socket.AF_INET)
        return socket.create_server(where, family=family)
    except socket.gaierror as error:
        answer, remedy = error.strerror, "give an IP address, or a name that resolves here"
    except UnicodeError:  # from Python's IDNA encoder: a label too long, or empty
        answer, remedy = "not a possible host name", "give an IP address or a host name"
    except OSError as error:
        answer = os.strerror(error.errno or 0)
        remedy = _REMEDIES.get(error.errno or 0, "choose another address")
    raise ListenError(f"cannot listen on {address}: {answer}; {remedy}")


_FIRST_INHERITED = 3  # SD_LISTEN_FDS_START
_SOCKET_UNIT = "have a socket unit start the service, with ListenStream= and without Accept="


def inherited_listeners() -> list[socket.socket]:
    """The listening TCP sockets that systemd opened for this process (sd_listen_fds(3)). Raises
    ListenError, with none of them left open. A second call finds none."""
    names = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
    process, count, _ = (os.environ.pop(name, "") for name in names)
    # Whom a service starts has its environment, but not its sockets.
    if process != str(os.getpid()) or not re.fullmatch("[1-9][0-9]{0,4}", count, re.ASCII):
        raise ListenError(f"systemd gave no socket to listen on; {_SOCKET_UNIT}")
    with ExitStack() as unless_all:
        listeners = []
        for descriptor in range(_FIRST_INHERITED, _FIRST_INHERITED + int(count)):
            try:
                listener = unless_all.enter_context(socket.socket(fileno=descriptor))
                listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            except OSError as error:
                raise ListenError(
                    f"systemd's descriptor {descriptor}: {error.strerror}; {_SOCKET_UNIT}"
                ) from None
            if not listening or listener.family not in (socket.AF_INET, socket.AF_INET6):
                raise ListenError(
                    f"systemd's descriptor {descriptor} listens on no TCP port; {_SOCKET_UNIT}"
                )
            listener.set_inheritable(False)
            listeners.append(listener)
        unless_all.pop_all()
    return listeners
