# SPDX-License-Identifier: Apache-2.0
"""docs/security.md, as it stands: its web configuration for a real exporter, and its scrape
configuration for a real Prometheus."""

from __future__ import annotations

import base64
import json
import re
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import lab
from tests.monitoring import ask, tool
from tests.unit import certificates

DOCUMENT = (Path(__file__).parents[2] / "docs/security.md").read_text()
WEB, SCRAPE = re.findall(r"^```yaml\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
HANG = 60


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """With all that the document's files name."""
    certificates.server().write(tmp_path, "server")
    certificates.authority().write(tmp_path, "ca")
    certificates.certify("prometheus", certificates.authority()).write(tmp_path, "client")
    (tmp_path / "password").write_text("secret")
    (tmp_path / "web.yml").write_text(WEB)
    return tmp_path


@contextmanager
def prometheus(directory: Path, target: str) -> Iterator[str]:
    """Scrapes the target; its URL."""
    config = SCRAPE.replace("localhost:10435", target)
    assert config != SCRAPE
    (directory / "prometheus.yml").write_text(
        config + "global: {scrape_interval: 500ms, scrape_timeout: 400ms}\n"
    )
    ask("promtool", "check", "config", directory / "prometheus.yml")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command: list[str | Path] = [
        tool("prometheus"),
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'tsdb'}",
        f"--web.listen-address={address}",
    ]
    with (
        (directory / "prometheus.log").open("w") as log,
        subprocess.Popen(command, stderr=log) as process,
    ):
        try:
            yield f"http://{address}"
        finally:
            process.terminate()


def up(prometheus: str) -> list[str]:
    """The values of `up`, none before the first scrape."""
    try:
        with urllib.request.urlopen(f"{prometheus}/api/v1/query?query=up", timeout=HANG) as answer:
            found = json.load(answer)
    except (urllib.error.URLError, ConnectionError):
        return []
    return [row["value"][1] for row in found["data"]["result"]]


def test_document(directory: Path) -> None:
    ask("promtool", "check", "web-config", directory / "web.yml")
    with lab.Exporter(f"--web.config.file={directory}/web.yml") as exporter:
        url = urllib.parse.urlsplit(exporter.url)
        assert url.scheme == "https"
        context = ssl.create_default_context(cafile=str(directory / "ca.pem"))
        with pytest.raises((urllib.error.URLError, ConnectionError, ssl.SSLError)):
            urllib.request.urlopen(exporter.url, timeout=HANG, context=context)
        context.load_cert_chain(directory / "client.pem", directory / "client.key")
        with pytest.raises(urllib.error.HTTPError, match="401") as caught:
            urllib.request.urlopen(exporter.url, timeout=HANG, context=context)
        caught.value.close()
        login = base64.b64encode(b"prometheus:secret").decode()
        request = urllib.request.Request(
            f"{exporter.url}/metrics", headers={"Authorization": f"Basic {login}"}
        )
        with urllib.request.urlopen(request, timeout=HANG, context=context) as answer:
            assert "writeback_exporter_build_info" in answer.read().decode()
        with prometheus(directory, url.netloc) as scraper:
            end = time.monotonic() + HANG
            while up(scraper) != ["1"]:
                log = (directory / "prometheus.log").read_text()
                assert time.monotonic() < end, (exporter.log, log)
                time.sleep(0.2)
    assert not any("ERROR" in line or "Traceback" in line for line in exporter.log)
