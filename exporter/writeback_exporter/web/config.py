# SPDX-License-Identifier: Apache-2.0
"""`--web.config.file`: TLS, users, headers and a rate limit, in the format that Prometheus and its
exporters share (https://github.com/prometheus/exporter-toolkit/blob/master/docs/web-configuration.md).
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import replace

from writeback_exporter.web.policy import ConfigError, RateLimit, WebConfig
from writeback_exporter.web.tls import TlsSettings, read_tls
from writeback_exporter.web.values import Value, read_yaml

log = logging.getLogger(__name__)

_LARGEST = 1 << 20
_HEADERS: Mapping[str, tuple[str, ...]] = {
    "Content-Security-Policy": (),
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
}
"""Those that the toolkit allows, and their values where it allows only these."""
_HASH = re.compile(
    r"\$2[aby]\$(?P<cost>0[4-9]|[12][0-9]|3[01])\$"
    r"[./A-Za-z0-9]{21}[.Oeu](?# the last of the salt has two bits, and bcrypt is strict there)"
    r"[./A-Za-z0-9]{31}"
)
_HIGHEST_COST = 18
"""It takes the one thread 20 s; each more doubles that, and 31 is two days."""


class ConfigFile:
    """The file, and those it names. `config` is what they last said that could be used."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError."""
        self._path = path
        self._stamps: dict[str, tuple[int, ...]] = {}
        self.config = self._read()

    def look(self) -> WebConfig:
        """Reads them anew where one has changed. What cannot be used is logged, and not taken.

        Blocks for as long as their file system does.
        """
        if any(_stamp(path) != stamp for path, stamp in self._stamps.items()):
            try:
                read = self._read()
                self._refuse_less(read)
            except ConfigError as error:
                log.error("%s; going on with what was read before", error)
            else:
                self.config = read
                log.info("%s, or a file it names, has changed and is in use", self._path)
        return self.config

    def _read(self) -> WebConfig:
        # Stamps before content: what changes in between is seen by the next look.
        self._stamps = {self._path: _stamp(self._path)}
        try:
            with open(self._path, "rb") as stream:
                content = stream.read(_LARGEST + 1)
        except (OSError, ValueError) as error:  # ValueError: a NUL in the path
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigError(
                f"{self._path}: cannot be read: {reason}; --web.config.file must name a file that "
                "the exporter's user may read"
            ) from error
        if len(content) > _LARGEST:
            raise ConfigError(f"{self._path}: is larger than 1 MiB, which no web configuration is")
        config, tls = parse(self._path, content)
        if tls is None:
            return config
        self._stamps |= {file: _stamp(file) for file in tls.files}
        return replace(config, tls=tls.load())

    def _refuse_less(self, read: WebConfig) -> None:
        """Not every editor writes a file at once: the first half of one, or an empty one, must not
        open what was closed."""
        lost = ""
        if self.config.users and not read.users:
            lost = "basic_auth_users"
        if self.config.tls:
            old, new = self.config.tls, read.tls
            if new is None:
                lost = "tls_server_config"
            elif new.context.verify_mode < old.context.verify_mode:
                lost = "client_auth_type"
            elif old.client_ca and not new.client_ca:
                lost = "client_ca_file"
            elif old.allowed_sans and not new.allowed_sans:
                lost = "client_allowed_sans"
        if lost:
            raise ConfigError(
                f"{self._path}: {lost} asks for less than before; restart the exporter if that is "
                "meant"
            )


def _stamp(path: str) -> tuple[int, ...]:
    """Other where the file is another, or has other content; of a symbolic link, its target's."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return ()
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def parse(path: str, content: bytes) -> tuple[WebConfig, TlsSettings | None]:
    """What a configuration says; the files for TLS are not read yet. Raises ConfigError."""
    sections = read_yaml(path, content).fields(
        ("tls_server_config", "http_server_config", "basic_auth_users", "rate_limit")
    )
    nothing = Value(path, "", None)
    tls = read_tls(sections.get("tls_server_config", nothing), os.path.dirname(path))
    return WebConfig(
        None,
        _users(sections.get("basic_auth_users", nothing)),
        _headers(sections.get("http_server_config", nothing)),
        _rate_limit(sections.get("rate_limit", nothing)),
    ), tls


def _users(section: Value) -> Mapping[str, str]:
    users = {}
    for name, value in section.fields().items():
        hashed = value.text()
        match = _HASH.fullmatch(hashed)
        if not match:
            raise value.refusal("is no bcrypt hash; make one with `htpasswd -nBC 10 USER`")
        if int(match["cost"]) > _HIGHEST_COST:
            raise value.refusal(f"a cost above {_HIGHEST_COST} takes minutes; 10 to 12 is usual")
        if ":" in name:
            raise value.refusal("a user's name cannot have a colon in it: HTTP ends it there")
        users[name] = hashed
    return users


def _headers(section: Value) -> Mapping[str, str]:
    fields = section.fields(("http2", "headers"))
    if "http2" in fields:
        fields["http2"].flag()  # accepted, as Prometheus has it on: clients then choose HTTP/1.1
    headers = {}
    for name, value in (
        fields.get("headers", Value(section.file, "", None)).fields(_HEADERS).items()
    ):
        headers[name] = value.text()
        allowed = _HEADERS[name]
        if allowed and headers[name] not in allowed:
            raise value.refusal(f"is to be {' or '.join(allowed)}")
        if not re.fullmatch(r"[ -~]*", headers[name]):
            raise value.refusal("is to be one line of ASCII")
    return headers


def _rate_limit(section: Value) -> RateLimit | None:
    fields = section.fields(("interval", "burst"))
    interval = fields["interval"].duration() if "interval" in fields else 0
    burst = fields["burst"].number() if "burst" in fields else 0
    if interval and not burst:
        raise section.refusal("burst is missing, and without it nothing is answered; 1 or more")
    return RateLimit(interval, burst) if interval else None
