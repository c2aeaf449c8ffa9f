# SPDX-License-Identifier: Apache-2.0
"""Certificates for tests: authorities, and what they sign."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import NameOID

LOCAL = (x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1")))
"""Whom a server's certificate is for."""


@dataclass(frozen=True)
class Certificate:
    """With its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey

    @property
    def pem(self) -> str:
        return self.certificate.public_bytes(serialization.Encoding.PEM).decode()

    def key_pem(self, password: bytes | None = None) -> str:
        return self.key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(password)
            if password
            else serialization.NoEncryption(),
        ).decode()

    @property
    def serial(self) -> str:
        """As getpeercert() has it."""
        digits = f"{self.certificate.serial_number:X}"
        return digits.zfill(len(digits) + len(digits) % 2)

    def write(self, directory: Path, name: str) -> None:
        """NAME.pem and NAME.key, in place."""
        (directory / f"{name}.pem").write_text(self.pem)
        key = directory / f"{name}.key"
        key.touch(0o600)
        key.write_text(self.key_pem())


_SIGNS = x509.KeyUsage(
    digital_signature=False,
    content_commitment=False,
    key_encipherment=False,
    data_encipherment=False,
    key_agreement=False,
    key_cert_sign=True,
    crl_sign=True,
    encipher_only=False,
    decipher_only=False,
)


def certify(
    name: str,
    by: Certificate | None = None,
    sans: Sequence[x509.GeneralName] = (),
    usage: x509.ObjectIdentifier | None = None,
    ca: bool = False,
    kind: str = "ec",
    days: int = 9,
) -> Certificate:
    """A certificate `by` an authority, or by itself."""
    key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey = (
        ec.generate_private_key(ec.SECP256R1())
        if kind == "ec"
        else rsa.generate_private_key(65537, int(kind))
    )
    issuer = by.key if by else key
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(by.certificate.subject if by else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=99))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        # From Python 3.13 on a client asks for these, which RFC 5280 does.
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key()), critical=False
        )
    )
    if ca:
        builder = builder.add_extension(_SIGNS, critical=True)
    if sans:
        builder = builder.add_extension(x509.SubjectAlternativeName(sans), critical=False)
    if usage:
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
    return Certificate(builder.sign(issuer, hashes.SHA256()), key)


@functools.cache
def authority(name: str = "authority") -> Certificate:
    return certify(name, ca=True)


@functools.cache
def server(kind: str = "ec") -> Certificate:
    return certify("server", authority(), LOCAL, kind=kind)
