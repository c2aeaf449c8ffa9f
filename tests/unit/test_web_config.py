# SPDX-License-Identifier: Apache-2.0
"""What --web.config.file may say, what it may not, and that promtool says the same."""

from __future__ import annotations

import logging
import os
import re
import ssl
import subprocess
import textwrap
from pathlib import Path

import bcrypt
import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from tests.monitoring import tool
from tests.unit import certificates
from writeback_exporter.web import config as web_config
from writeback_exporter.web import tls as tls_module
from writeback_exporter.web.config import ConfigFile, parse
from writeback_exporter.web.policy import ConfigError, WebConfig
from writeback_exporter.web.tls import Tls

HASH = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
TLS = "tls_server_config:\n  cert_file: server.pem\n  key_file: server.key\n"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """With a server's certificate and those of two authorities."""
    certificates.server().write(tmp_path, "server")
    certificates.authority().write(tmp_path, "ca")
    certificates.certify("other").write(tmp_path, "other")
    return tmp_path


def load(directory: Path, text: str) -> WebConfig:
    path = directory / "web.yml"
    path.write_text(textwrap.dedent(text))
    return ConfigFile(str(path)).config


def context(config: WebConfig) -> ssl.SSLContext:
    assert config.tls
    return config.tls.context


def refusal(directory: Path, text: str) -> str:
    """Without the file's name."""
    with pytest.raises(ConfigError) as caught:
        load(directory, text)
    message = str(caught.value)
    assert message.startswith(f"{directory}/web.yml")
    assert len(message.splitlines()) == 1
    return message.removeprefix(f"{directory}/web.yml")


def promtool_agrees(path: Path) -> bool:
    said = subprocess.run(
        [tool("promtool"), "check", "web-config", path], capture_output=True, timeout=60
    )
    return said.returncode == 0


# What it may say ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing yet\n",
        "---\n",
        "{}",
        "tls_server_config:\nhttp_server_config: {}\nbasic_auth_users: {}",
        "http_server_config: {http2: false, headers: }",
        "tls_server_config: {cert_file: , key_file: }",
    ],
)
def test_nothing_is_asked_for(directory: Path, text: str) -> None:
    assert load(directory, text) == WebConfig()
    assert promtool_agrees(directory / "web.yml")


def test_tls_by_default(directory: Path) -> None:
    tls = context(load(directory, TLS))
    assert tls.verify_mode == ssl.CERT_NONE
    assert tls.minimum_version == ssl.TLSVersion.TLSv1_2
    assert tls.maximum_version == ssl.TLSVersion.TLSv1_3
    assert tls.options & ssl.OP_CIPHER_SERVER_PREFERENCE
    assert promtool_agrees(directory / "web.yml")


GOOD_TLS = [
    "client_auth_type: NoClientCert",
    "client_auth_type: ''",
    "client_auth_type: VerifyClientCertIfGiven\n  client_ca_file: ca.pem",
    "client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem",
    "client_auth_type: RequireAndVerifyClientCert",
    "min_version: TLS13",
    "max_version: TLS12",
    "cipher_suites: []",
    "cipher_suites: [TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256, TLS_AES_128_GCM_SHA256]",
    "cipher_suites: [TLS_AES_128_GCM_SHA256]",
    "prefer_server_cipher_suites: false",
    "prefer_server_cipher_suites: on",
    "curve_preferences: [CurveP384]",
    "curve_preferences: []",
]


@pytest.mark.parametrize("more", GOOD_TLS)
def test_promtool_agrees_on_good_tls(directory: Path, more: str) -> None:
    load(directory, f"{TLS}  {more}\n")
    assert promtool_agrees(directory / "web.yml")


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("NoClientCert", ssl.CERT_NONE),
        ("VerifyClientCertIfGiven", ssl.CERT_OPTIONAL),
        ("RequireAndVerifyClientCert", ssl.CERT_REQUIRED),
    ],
)
def test_client_auth_type(directory: Path, name: str, mode: ssl.VerifyMode) -> None:
    ca = "" if mode == ssl.CERT_NONE else "  client_ca_file: ca.pem\n"
    tls = context(load(directory, f"{TLS}  client_auth_type: {name}\n{ca}"))
    assert tls.verify_mode == mode
    assert len(tls.get_ca_certs()) == bool(ca)


def test_without_a_client_ca_those_of_the_host_count(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(directory / "ca.pem"))
    tls = context(load(directory, TLS + "  client_auth_type: RequireAndVerifyClientCert\n"))
    assert ("commonName", "authority") in [
        part for ca in tls.get_ca_certs() for rdn in ca["subject"] for part in rdn
    ]


def test_versions(directory: Path) -> None:
    tls = context(load(directory, TLS + "  min_version: TLS13\n  max_version: TLS13\n"))
    assert tls.minimum_version == tls.maximum_version == ssl.TLSVersion.TLSv1_3


CIPHERS = {
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
}


def test_every_cipher_suite_of_tls_1_2(directory: Path) -> None:
    tls = context(load(directory, TLS + f"  cipher_suites: [{', '.join(CIPHERS)}]\n"))
    assert [c["name"] for c in tls.get_ciphers() if c["protocol"] != "TLSv1.3"] == [
        *CIPHERS.values()
    ]
    assert promtool_agrees(directory / "web.yml")


def test_suites_of_tls_1_3_alone_leave_none_for_1_2(directory: Path) -> None:
    tls = context(load(directory, TLS + "  cipher_suites: [TLS_AES_128_GCM_SHA256]\n"))
    assert tls.minimum_version == ssl.TLSVersion.TLSv1_3


def test_server_preference_can_be_switched_off(directory: Path) -> None:
    tls = context(load(directory, TLS + "  prefer_server_cipher_suites: no\n"))
    assert not tls.options & ssl.OP_CIPHER_SERVER_PREFERENCE


@pytest.mark.parametrize("curve", ["CurveP256", "CurveP384", "CurveP521", "X25519"])
def test_curve(directory: Path, curve: str) -> None:
    assert load(directory, TLS + f"  curve_preferences: [{curve}]\n").tls
    assert promtool_agrees(directory / "web.yml")


def test_inline_certificates(tmp_path: Path) -> None:
    server, ca = certificates.server(), certificates.authority()
    section = {
        "cert": server.pem,
        "key": server.key_pem(),
        "client_ca": ca.pem,
        "client_auth_type": "RequireAndVerifyClientCert",
        "client_allowed_sans": ["prometheus", "2001:db8::1"],
    }
    config = load(tmp_path, yaml.safe_dump({"tls_server_config": section}))
    assert config.tls
    assert config.tls.allowed_sans == {"prometheus", "2001:db8::1"}


def test_paths_are_relative_to_the_file_or_absolute(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert load(directory, TLS).tls
    monkeypatch.chdir(directory)
    Path("web.yml").write_text(TLS)
    assert ConfigFile("web.yml").config.tls
    monkeypatch.chdir("/")
    assert load(directory, TLS.replace("server.", f"{directory}/server.")).tls


def test_users(directory: Path) -> None:
    hashes = [HASH.replace("$2b$", f"$2{letter}$") for letter in "aby"]
    users = dict(zip(["alice", "0123", "no"], hashes, strict=True))
    text = "".join(f"  {name}: {hashed}\n" for name, hashed in users.items())
    config = load(directory, f"basic_auth_users:\n{text}")
    assert config.users == users
    assert HASH[7:] not in repr(config)
    assert promtool_agrees(directory / "web.yml")


def test_headers(directory: Path) -> None:
    headers = {
        "Content-Security-Policy": "default-src 'none'",
        "Strict-Transport-Security": "max-age=1",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "sameorigin",
        "X-XSS-Protection": "",
    }
    text = yaml.safe_dump({"http_server_config": {"http2": True, "headers": headers}})
    assert load(directory, text).headers == headers
    assert promtool_agrees(directory / "web.yml")


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        *(("1s", 1), ("500ms", 0.5), ("1.5s", 1.5), ("1m30s", 90), ("1h", 3600)),
        *(("20us", 2e-5), ("20µs", 2e-5), ("1000000000", 1)),
    ],
)
def test_rate_limit(tmp_path: Path, written: str, seconds: float) -> None:
    config = load(tmp_path, f"rate_limit: {{interval: {written}, burst: 20}}")
    assert config.rate_limit
    assert config.rate_limit.interval == pytest.approx(seconds)
    assert config.rate_limit.burst == 20


@pytest.mark.parametrize("text", ["", "{interval: 0}", "{interval: 0s, burst: 5}", "{burst: 5}"])
def test_no_rate_limit(tmp_path: Path, text: str) -> None:
    assert load(tmp_path, f"rate_limit: {text}").rate_limit is None


# What it may not ----------------------------------------------------------------------------------

AUTH = "  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: ca.pem\n"
BAD = [
    ("basic_auth: {}", ":1: basic_auth: unknown; remove it, or choose of basic_auth_users, "),
    ("- a", ":1: is to be a mapping"),
    ("text", ":1: is to be a mapping"),
    ("tls_server_config: 1", ":1: tls_server_config: is to be a mapping"),
    (f"{TLS}{TLS}", ":4: tls_server_config: is there twice; remove one"),
    (f"{TLS}  cert_file: server.pem\n", ":4: tls_server_config.cert_file: is there twice"),
    (f"{TLS}  certfile: x\n", ":4: tls_server_config.certfile: unknown; "),
    ("? [a]\n: b", ":1: a key: is to be a string"),
    ("basic_auth_users: {? {a: b} : c}", ":1: a key of basic_auth_users: is to be a string"),
    ("tls_server_config: {key_file: a}", ":1: tls_server_config: cert_file is missing; add it"),
    ("tls_server_config: {cert_file: a}", "key_file is missing; add it, or key with the PEM"),
    (f"{TLS}  cert_file2: [\n", ": is not YAML: "),
    ("a: b: c", ":1: is not YAML: mapping values are not allowed here"),
    ("--- 1\n--- 2\n", ":2: is not YAML: "),
    ("a: \x07", ": is not YAML: "),
    ("[" * 5000, ": is nested too deeply"),
    (f"{TLS}  client_auth_type: Always\n", "client_auth_type: 'Always' is unknown; choose of No"),
    (f"{TLS}  client_auth_type: [a]\n", "client_auth_type: is to be a string"),
    (f"{TLS}  client_ca_file: ca.pem\n", "client_ca_file: nobody is asked for a certificate; "),
    (f"{TLS}  min_version: TLS14\n", "min_version: 'TLS14' is unknown; choose of TLS12, TLS13"),
    (f"{TLS}  max_version: 1.2\n", "max_version: '1.2' is unknown; choose of TLS12, TLS13"),
    (f"{TLS}  cipher_suites: TLS_AES_128_GCM_SHA256\n", "cipher_suites: is to be a list"),
    (f"{TLS}  cipher_suites: [ECDHE-RSA-AES128-SHA]\n", "'ECDHE-RSA-AES128-SHA' is unknown; "),
    (f"{TLS}  cipher_suites: [{{}}]\n", "cipher_suites: is to be a string"),
    (f"{TLS}  prefer_server_cipher_suites: 1\n", "_suites: is to be true or false"),
    (f"{TLS}  curve_preferences: [P-256]\n", "'P-256' is unknown; choose of CurveP256, "),
    ("http_server_config: {http2: 'true'}", "http_server_config.http2: is to be true or false"),
    ("http_server_config: {http3: true}", "http_server_config.http3: unknown; "),
    ("http_server_config: {headers: {Cache-Control: a}}", "headers.Cache-Control: unknown; "),
    ("http_server_config: {headers: {X-Frame-Options: ''}}", "is to be deny or sameorigin"),
    ("http_server_config: {headers: {X-Content-Type-Options: a}}", "is to be nosniff"),
    ("basic_auth_users: [a]", "basic_auth_users: is to be a mapping"),
    ("basic_auth_users: {alice: secret}", "basic_auth_users.alice: is no bcrypt hash; make one"),
    ("basic_auth_users: {alice: }", "basic_auth_users.alice: is to be a string"),
    (f"basic_auth_users: {{a: {HASH}, a: {HASH}}}", "basic_auth_users.a: is there twice"),
    ("rate_limit: {interval: soon, burst: 1}", "rate_limit.interval: is to be a duration"),
    ("rate_limit: {interval: 1s, burst: many}", "rate_limit.burst: is to be a whole number"),
    ("rate_limit: {interval: 1s, rate: 1}", "rate_limit.rate: unknown; remove it, or choose of b"),
    (f"{TLS}  client_auth_type: RequireAndVerifyClientCert\n  client_ca_file: no.pem\n", "no.pem"),
    ("tls_server_config: {cert_file: no.pem, key_file: server.key}", "no.pem cannot be read: No s"),
    ("tls_server_config: {cert_file: server.pem, key_file: no.key}", "no.key cannot be read: No s"),
    ("tls_server_config: {cert_file: server.pem, key_file: other.key}", "is not the key of the"),
    ("tls_server_config: {cert_file: server.key, key_file: server.key}", "has no CERTIFICATE in P"),
    ("tls_server_config: {cert_file: server.pem, key_file: server.pem}", "has no PRIVATE KEY in P"),
    ('tls_server_config: {cert_file: "a\\0", key_file: server.pem}', "cert_file: is no path"),
]
STRICTER = [
    (f"{TLS}  client_auth_type: RequestClientCert\n", "ssl cannot take certificates without veri"),
    (f"{TLS}  client_auth_type: RequireAnyClientCert\n", "ssl cannot take certificates without v"),
    (f"{TLS}  client_auth_type: RequireClientCert\n", "ssl cannot take certificates without veri"),
    (f"{TLS}  min_version: TLS11\n", "OpenSSL no longer offers TLS before 1.2; choose TLS12 or"),
    (f"{TLS}  min_version: TLS13\n  max_version: TLS12\n", "no TLS version is left between"),
    (
        f"{TLS}  cipher_suites: [TLS_AES_128_GCM_SHA256]\n  max_version: TLS12\n",
        "no TLS version is left between min_version (or cipher_suites) and max_version",
    ),
    (f"{TLS}  curve_preferences: [X25519, CurveP256]\n", "Python's ssl takes a single curve; "),
    ("tls_server_config: {min_version: TLS13}", "cert_file is missing"),
    ("tls_server_config: {cert_file: '', key_file: ''}", "cert_file is missing"),
    (f"basic_auth_users: {{a: '{HASH.replace('$04$', '$19$')}'}}", "a cost above 18 takes"),
    (f"basic_auth_users: {{a: '{HASH[:28]}z{HASH[29:]}'}}", "is no bcrypt hash; make one with"),
    (f"basic_auth_users: {{'a:b': '{HASH}'}}", "cannot have a colon in it"),
    ('http_server_config: {headers: {X-XSS-Protection: "a\\r\\nb"}}', "one line of ASCII"),
    (f"{TLS}{AUTH}".replace("ca.pem", "server.key"), "server.key has no CERTIFICATE in PEM"),
]
"""promtool accepts these."""
NEWER = [
    (f"{TLS}{AUTH}  client_allowed_sans: []\n", "is empty, which allows nobody; remove it"),
    (f"{TLS}  client_allowed_sans: [a]\n", "needs client_auth_type: RequireAndVerifyClientCert"),
    (f"{TLS}  cert: a\n", "tls_server_config.cert: cert_file is there too; remove one of them"),
    ("tls_server_config: {cert: a, key: b}", "cert: has no CERTIFICATE in PEM"),
    ("rate_limit: {interval: 1s}", "rate_limit: burst is missing, and without it nothing is"),
    ("rate_limit: {interval: -1s, burst: 1}", "rate_limit.interval: is to be a duration"),
]
"""Of these Debian's promtool does not know the keys."""


@pytest.mark.parametrize(("text", "words"), BAD)
def test_refusal_that_promtool_shares(directory: Path, text: str, words: str) -> None:
    assert words in refusal(directory, text)
    if not text.startswith("--- 1"):  # of several documents it reads the first
        assert not promtool_agrees(directory / "web.yml")


@pytest.mark.parametrize(("text", "words"), STRICTER)
def test_refusal_of_what_promtool_accepts(directory: Path, text: str, words: str) -> None:
    assert words in refusal(directory, text)
    assert promtool_agrees(directory / "web.yml")


@pytest.mark.parametrize(("text", "words"), NEWER)
def test_refusal_of_newer_keys(directory: Path, text: str, words: str) -> None:
    assert words in refusal(directory, text)


def test_secrets_are_not_quoted(directory: Path) -> None:
    for text in ("basic_auth_users: {a: hunter2}", "tls_server_config: {cert: hunter2, key: b}"):
        assert "hunter2" not in refusal(directory, text)


def test_key_with_a_password_is_not_asked_for(directory: Path) -> None:
    (directory / "server.key").write_text(certificates.server().key_pem(b"secret"))
    assert "server.key is encrypted; decrypt it with `openssl pkey`" in refusal(directory, TLS)


def test_certificate_that_openssl_refuses(directory: Path) -> None:
    (directory / "server.pem").write_text(
        "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    )
    assert "OpenSSL cannot use certificate and key: " in refusal(directory, TLS)
    (directory / "ca.pem").write_text((directory / "server.pem").read_text())
    certificates.server().write(directory, "server")
    assert "ca.pem is unusable: " in refusal(directory, TLS + AUTH)
    certificates.certify("weak", kind="1024").write(directory, "server")
    assert "OpenSSL cannot use certificate and key: ee key too small" in refusal(directory, TLS)


@pytest.mark.parametrize(("name", "value"), [("_CURVES", "no"), ("_CIPHERS", "no")])
def test_openssl_that_can_do_less(
    directory: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setattr(tls_module, name, {"X": value})
    key = {"_CURVES": "curve_preferences", "_CIPHERS": "cipher_suites"}[name]
    words = "this host's OpenSSL has no such cipher suite or curve: "
    assert words in refusal(directory, f"{TLS}  {key}: [X]\n")


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"\xff\xfe\x00", ": is not text in UTF-8"), (b"#" * (1 << 20) + b"\n", "larger than 1 MiB")],
)
def test_file_that_is_none(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "web.yml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        ConfigFile(str(path))


@pytest.mark.parametrize("name", ["no.yml", "", "web\0.yml"])
def test_file_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: .*; --web.config.file must name a "):
        ConfigFile(f"{tmp_path}/{name}")


def test_key_that_everybody_can_read(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(directory, TLS)
    assert not caplog.records
    (directory / "server.key").chmod(0o644)
    load(directory, TLS)
    assert [record.getMessage() for record in caplog.records] == [
        f"{directory}/server.key can be read by every user of this host: chmod o-r it"
    ]


# Any file -----------------------------------------------------------------------------------------

SECTIONS = {
    "tls_server_config": [
        *("cert", "cert_file", "key", "key_file", "client_ca", "client_ca_file", "<<"),
        *("client_auth_type", "client_allowed_sans", "min_version", "max_version"),
        *("cipher_suites", "prefer_server_cipher_suites", "curve_preferences"),
    ],
    "http_server_config": ["http2", "headers"],
    "basic_auth_users": ["alice", "", "a:b", "\x1b", "null"],
    "rate_limit": ["interval", "burst"],
}
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text("a9 é\n:{}[]'#\x1b\u2028\0$/", max_size=9),
    st.sampled_from(
        [HASH, "TLS12", "TLS13", "X25519", "RequireAndVerifyClientCert", "1s", "a.pem"]
    ),
)
LISTS = st.lists(SCALARS, max_size=3)
HEADERS = st.dictionaries(st.sampled_from(["X-Frame-Options", "X-XSS-Protection"]), SCALARS)
SECTION = {
    name: st.dictionaries(st.sampled_from(keys), SCALARS | LISTS | HEADERS, max_size=6)
    for name, keys in SECTIONS.items()
}


def _parses_or_is_refused(content: bytes) -> None:
    refused = "/etc/web.yml: "
    try:
        parse("/etc/web.yml", content)
    except ConfigError as error:
        refused = str(error)
    assert refused.startswith("/etc/web.yml:")
    assert len(refused.splitlines()) == 1


@given(st.fixed_dictionaries({}, optional={n: s | SCALARS for n, s in SECTION.items()}))
def test_any_values_parse_or_are_refused_in_a_line(values: object) -> None:
    _parses_or_is_refused(yaml.safe_dump(values, allow_unicode=True).encode())


@given(st.binary() | st.text("tls_rv:-[]{}&*!|>'\"\n\t a0?,#%<", max_size=60).map(str.encode))
@example(b"a: &a [*a]")
@example(b"basic_auth_users: &a {b: *a}")
@example(b"!!binary x: y")
@example(b'"a\\nb": y')
@example(b"rate_limit: {interval: !!int 1e9}")
@example(b"? ? ? a")
@example(b"\xef\xbb\xbf")
def test_any_bytes_parse_or_are_refused_in_a_line(content: bytes) -> None:
    _parses_or_is_refused(content)


# Alternative names --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "admitted"),
    [
        ((("DNS", "prometheus"),), True),
        ((("DNS", "other"), ("DNS", "prometheus")), True),
        ((("email", "prometheus"),), True),
        ((("URI", "spiffe://x/prometheus"),), True),
        ((("IP Address", "10.0.0.1"),), True),
        ((("IP Address", "2001:DB8:0:0:0:0:0:1"),), True),
        ((("IP Address", "<invalid>"),), False),
        ((("DNS", "prometheus.example"),), False),
        ((("DNS", "PROMETHEUS"),), False),
        ((("DirName", ((("commonName", "prometheus"),),)),), False),
        ((), False),
    ],
)
def test_allowed_sans(names: tuple[tuple[str, object], ...], admitted: bool) -> None:
    allowed = frozenset({"prometheus", "spiffe://x/prometheus", "10.0.0.1", "2001:db8::1"})
    tls = Tls(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), True, allowed)
    assert tls.admits({"subjectAltName": names}) is admitted
    assert not tls.admits({"subject": ((("commonName", "prometheus"),),)})
    assert not tls.admits(None)


# Files that change --------------------------------------------------------------------------------


@pytest.fixture
def file(directory: Path) -> ConfigFile:
    path = directory / "web.yml"
    path.write_text(f"{TLS}{AUTH}basic_auth_users: {{alice: '{HASH}'}}\n")
    return ConfigFile(str(path))


def test_look_reads_nothing_anew_where_nothing_has_changed(
    file: ConfigFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = file.config
    monkeypatch.setattr(web_config, "parse", None)
    assert file.look() is before


@pytest.mark.parametrize("name", ["web.yml", "server.pem", "server.key", "ca.pem"])
def test_look_reads_anew_what_has_changed(
    file: ConfigFile, directory: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    before = file.config
    path = directory / name
    path.write_text(path.read_text() + "\n")
    now = file.look()
    assert now is not before
    assert now.tls is not before.tls
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert file.look() is now


@pytest.mark.parametrize("name", ["web.yml", "server.pem", "server.key", "ca.pem"])
def test_broken_file_is_logged_once_and_not_taken(
    file: ConfigFile, directory: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = file.config
    path = directory / name
    good = path.read_text()
    for broken in (lambda: path.write_text("["), lambda: path.unlink()):
        broken()
        caplog.clear()
        for _ in range(3):
            assert file.look() is before
        (record,) = caplog.records
        assert record.levelname == "ERROR"
        assert record.getMessage().endswith("; going on with what was read before")
    path.write_text(good)
    assert file.look() is not before


def test_certificate_and_key_that_change_one_after_the_other(
    file: ConfigFile, directory: Path
) -> None:
    new = certificates.certify("new", certificates.authority())
    before = file.config
    (directory / "server.pem").write_text(new.pem)
    assert file.look() is before
    (directory / "server.key").write_text(new.key_pem())
    assert file.look() is not before


def test_files_behind_a_symbolic_link_that_is_turned(tmp_path: Path) -> None:
    """As Kubernetes updates a secret."""
    for name in ("1", "2"):
        (tmp_path / name).mkdir()
        certificates.server().write(tmp_path / name, "server")
    data = tmp_path / "data"
    data.symlink_to("1")
    path = tmp_path / "web.yml"
    path.write_text(TLS.replace("server.", "data/server."))
    file = ConfigFile(str(path))
    before = file.config
    (tmp_path / "next").symlink_to("2")
    os.replace(tmp_path / "next", data)
    assert file.look() is not before


@pytest.mark.parametrize(
    ("text", "less"),
    [
        ("", "tls_server_config"),
        (f"basic_auth_users: {{alice: '{HASH}'}}\n", "tls_server_config"),
        (f"{TLS}{AUTH}", "basic_auth_users"),
        (f"{TLS}basic_auth_users: {{alice: '{HASH}'}}\n", "client_auth_type"),
        (
            f"{TLS}{AUTH.splitlines()[0]}\nbasic_auth_users: {{alice: '{HASH}'}}\n",
            "client_ca_file",
        ),
    ],
)
def test_half_a_file_opens_nothing(
    file: ConfigFile, directory: Path, text: str, less: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = file.config
    (directory / "web.yml").write_text(text)
    assert file.look() is before
    assert re.search(rf"{less} asks for less than before; restart", caplog.text)


def test_allowed_sans_are_not_lost(directory: Path) -> None:
    path = directory / "web.yml"
    path.write_text(f"{TLS}{AUTH}  client_allowed_sans: [a]\n")
    file = ConfigFile(str(path))
    before = file.config
    path.write_text(f"{TLS}{AUTH}")
    assert file.look() is before
    path.write_text(f"{TLS}{AUTH}  client_allowed_sans: [b]\n")
    assert file.look() is not before
