# SPDX-License-Identifier: Apache-2.0
"""`tls_server_config`: what Prometheus' exporter-toolkit settles for TLS, with Python's ssl.

What ssl cannot do as Go's crypto/tls does it is refused rather than done in another way.
"""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import NoReturn, TypeVar

from writeback_exporter.web.policy import ConfigError
from writeback_exporter.web.values import Value

log = logging.getLogger(__name__)

_T = TypeVar("_T")

KEYS = frozenset(
    {
        *("cert", "cert_file", "key", "key_file", "client_ca", "client_ca_file"),
        *("client_auth_type", "client_allowed_sans", "min_version", "max_version"),
        *("cipher_suites", "prefer_server_cipher_suites", "curve_preferences"),
    }
)

_CLIENT_AUTH = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_UNVERIFIED = ("RequestClientCert", "RequireAnyClientCert", "RequireClientCert")
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_OLD_VERSIONS = ("TLS10", "TLS11")
_CIPHERS = {
    f"TLS_ECDHE_{sign}_WITH_{name}": f"ECDHE-{sign}-{openssl}"
    for sign in ("ECDSA", "RSA")
    for name, openssl in (
        ("AES_128_CBC_SHA", "AES128-SHA"),
        ("AES_256_CBC_SHA", "AES256-SHA"),
        ("AES_128_GCM_SHA256", "AES128-GCM-SHA256"),
        ("AES_256_GCM_SHA384", "AES256-GCM-SHA384"),
        ("CHACHA20_POLY1305_SHA256", "CHACHA20-POLY1305"),
    )
}
"""Of TLS 1.2, those that Go does not call insecure: their IANA names, and OpenSSL's."""
_CIPHERS_13 = frozenset(
    {"TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256"}
)
"""May be listed, and are in use always, as in Go: TLS 1.3 has nothing to choose."""
_CURVES = {
    "CurveP256": "prime256v1",
    "CurveP384": "secp384r1",
    "CurveP521": "secp521r1",
    "X25519": "X25519",
}


@dataclass(frozen=True, slots=True)
class Tls:
    """Ready for connections."""

    context: ssl.SSLContext
    client_ca: bool
    """Whether the client's authorities are given, rather than those of the host."""
    allowed_sans: frozenset[str]
    """Where there are any, a client's certificate has to have one."""

    def admits(self, certificate: Mapping[str, object] | None) -> bool:
        """Whether a verified certificate, as getpeercert() gives it, has an allowed name."""
        return not self.allowed_sans.isdisjoint(_sans(certificate or {}))


@dataclass(frozen=True, slots=True)
class Pem:
    """Certificates or a key, in a file or in the configuration itself."""

    value: Value
    path: str | None

    def read(self, marker: str) -> bytes:
        """Raises ConfigError where it cannot, or where there is no `marker` in it."""
        try:
            content = _read(self.path) if self.path is not None else self.value.text().encode()
        except OSError as error:
            raise self.refusal(
                f"cannot be read: {error.strerror}; it must exist, and the exporter's user may "
                "have to be allowed to read it"
            ) from error
        if f"{marker}-----".encode() not in content:
            raise self.refusal(f"has no {marker} in PEM (-----BEGIN ...)")
        return content

    def refusal(self, reason: str) -> ConfigError:
        return self.value.refusal(f"{self.path} {reason}" if self.path is not None else reason)


@dataclass(frozen=True, slots=True)
class TlsSettings:
    """What the section says. Its files are not read yet."""

    section: Value
    cert: Pem
    key: Pem
    client_ca: Pem | None
    client_auth: ssl.VerifyMode
    allowed_sans: frozenset[str]
    min_version: ssl.TLSVersion
    max_version: ssl.TLSVersion
    ciphers: tuple[str, ...]
    prefer_server_ciphers: bool
    curve: str | None

    @property
    def files(self) -> list[str]:
        pems = (self.cert, self.key, self.client_ca)
        return [pem.path for pem in pems if pem and pem.path is not None]

    def load(self) -> Tls:
        """Reads the files. Raises ConfigError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # As in Go: no renegotiation, and what is in client_ca is trusted also if it is no root.
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.set_alpn_protocols(["http/1.1"])
        self._choose(context)
        self._load_own(context)
        self._load_client_ca(context)
        return Tls(context, self.client_ca is not None, self.allowed_sans)

    def _choose(self, context: ssl.SSLContext) -> None:
        context.minimum_version, context.maximum_version = self.min_version, self.max_version
        if not self.prefer_server_ciphers:
            context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
        try:
            if self.ciphers:
                context.set_ciphers(":".join(self.ciphers))
            if self.curve:
                context.set_ecdh_curve(self.curve)
        except (ValueError, ssl.SSLError) as error:  # for one that is built, or set, for less
            raise self.section.refusal(
                f"this host's OpenSSL has no such cipher suite or curve: {error}"
            ) from error

    def _load_own(self, context: ssl.SSLContext) -> None:
        cert, key = self.cert.read("CERTIFICATE"), self.key.read("PRIVATE KEY")
        if self.key.path is not None and _everybody_reads(self.key.path):
            log.warning("%s can be read by every user of this host: chmod o-r it", self.key.path)

        def no_password() -> NoReturn:  # without this OpenSSL would ask for it on the terminal
            raise self.key.refusal("is encrypted; decrypt it with `openssl pkey`")

        try:
            with _memory_file(cert) as cert_path, _memory_file(key) as key_path:
                context.load_cert_chain(cert_path, key_path, no_password)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise self.key.refusal("is not the key of the certificate") from error
            raise self.section.refusal(
                f"OpenSSL cannot use certificate and key: {_reason(error)}"
            ) from error

    def _load_client_ca(self, context: ssl.SSLContext) -> None:
        context.verify_mode = self.client_auth
        if self.client_ca:
            text = self.client_ca.read("CERTIFICATE").decode("ascii", "ignore")
            try:
                context.load_verify_locations(cadata=text)
            except ssl.SSLError as error:
                raise self.client_ca.refusal(f"is unusable: {_reason(error)}") from error
        elif self.client_auth != ssl.CERT_NONE:
            context.load_default_certs(ssl.Purpose.CLIENT_AUTH)  # as Go does


def read_tls(section: Value, directory: str) -> TlsSettings | None:
    """What `tls_server_config` says; None where it says nothing. Raises ConfigError."""
    fields = section.fields(KEYS)
    if not fields:
        return None
    cert, key = _pem(fields, "cert", directory), _pem(fields, "key", directory)
    for name, pem in (("cert", cert), ("key", key)):
        if pem is None:
            raise section.refusal(f"{name}_file is missing; add it, or {name} with the PEM itself")
    assert cert
    assert key
    client_auth = _client_auth(fields)
    client_ca = _pem(fields, "client_ca", directory)
    if client_ca and client_auth == ssl.CERT_NONE:
        raise client_ca.value.refusal(
            "nobody is asked for a certificate; add client_auth_type: RequireAndVerifyClientCert"
        )
    allowed_sans = fields["client_allowed_sans"].texts() if "client_allowed_sans" in fields else []
    if "client_allowed_sans" in fields and client_auth != ssl.CERT_REQUIRED:
        raise fields["client_allowed_sans"].refusal(
            "needs client_auth_type: RequireAndVerifyClientCert"
        )
    if "client_allowed_sans" in fields and not allowed_sans:
        raise fields["client_allowed_sans"].refusal("is empty, which allows nobody; remove it")
    ciphers = _ciphers(fields)
    least, most = _version(fields, "min_version", "TLS12"), _version(fields, "max_version", "TLS13")
    if "cipher_suites" in fields and not ciphers:
        least = ssl.TLSVersion.TLSv1_3  # only suites of 1.3 are listed: none is left for 1.2
    if least > most:
        raise section.refusal(
            "no TLS version is left between min_version (or cipher_suites) and max_version"
        )
    prefer = fields.get("prefer_server_cipher_suites")
    return TlsSettings(
        section,
        cert,
        key,
        client_ca,
        client_auth,
        frozenset(allowed_sans),
        least,
        most,
        ciphers,
        prefer.flag() if prefer else True,
        _curve(fields),
    )


def _pem(fields: Mapping[str, Value], name: str, directory: str) -> Pem | None:
    inline, file = fields.get(name), fields.get(f"{name}_file")
    if inline and not inline.text():
        inline = None
    if file and not file.text():
        file = None
    if inline and file:
        raise inline.refusal(f"{name}_file is there too; remove one of them")
    if file:
        if "\0" in file.text():
            raise file.refusal("is no path")
        return Pem(file, os.path.join(directory, file.text()))
    return Pem(inline, None) if inline else None


def _client_auth(fields: Mapping[str, Value]) -> ssl.VerifyMode:
    value = fields.get("client_auth_type")
    if value is None or not value.text():
        return ssl.CERT_NONE
    if value.text() in _UNVERIFIED:
        raise value.refusal(
            "Python's ssl cannot take certificates without verifying them; "
            "choose RequireAndVerifyClientCert or VerifyClientCertIfGiven"
        )
    return _choice(value, _CLIENT_AUTH)


def _version(fields: Mapping[str, Value], name: str, default: str) -> ssl.TLSVersion:
    value = fields.get(name)
    if value is None:
        return _VERSIONS[default]
    if value.text() in _OLD_VERSIONS:
        raise value.refusal("OpenSSL no longer offers TLS before 1.2; choose TLS12 or TLS13")
    return _choice(value, _VERSIONS)


def _ciphers(fields: Mapping[str, Value]) -> tuple[str, ...]:
    """OpenSSL's names of those of TLS 1.2."""
    listed = fields["cipher_suites"].items() if "cipher_suites" in fields else []
    return tuple(_choice(value, _CIPHERS) for value in listed if value.text() not in _CIPHERS_13)


def _curve(fields: Mapping[str, Value]) -> str | None:
    value = fields.get("curve_preferences")
    curves = [_choice(item, _CURVES) for item in value.items()] if value else []
    if value and len(curves) > 1:
        raise value.refusal(
            "Python's ssl takes a single curve; keep one, or remove the key for OpenSSL's choice"
        )
    return curves[0] if curves else None


def _choice(value: Value, choices: Mapping[str, _T]) -> _T:
    if value.text() not in choices:
        raise value.refusal(f"{value.text()[:60]!r} is unknown; choose of {', '.join(choices)}")
    return choices[value.text()]


def _sans(certificate: Mapping[str, object]) -> Iterator[str]:
    names = certificate.get("subjectAltName", ())
    assert isinstance(names, tuple)
    for kind, name in names:
        if kind == "IP Address":  # IPv6 comes as 2001:DB8:0:0:0:0:0:1
            with contextlib.suppress(ValueError):
                yield str(ip_address(name.strip()))
        elif kind in ("DNS", "email", "URI"):
            yield name


def _read(path: str) -> bytes:
    with open(path, "rb") as stream:
        return stream.read(1 << 20)


def _everybody_reads(path: str) -> bool:
    with contextlib.suppress(OSError):  # it was there a moment ago
        return bool(os.stat(path).st_mode & stat.S_IROTH)
    return False


@contextlib.contextmanager
def _memory_file(content: bytes) -> Iterator[str]:
    """A path to it, since ssl takes nothing else: what was read is then what is used."""
    descriptor = os.memfd_create("pem", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as stream:
            stream.write(content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()
