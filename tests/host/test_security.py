# SPDX-License-Identifier: Apache-2.0
"""docs/security.md, as it stands: its web configuration for a real exporter, and its scrape
configuration for a real Prometheus."""

from __future__ import annotations

import base64
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from tests import lab
from tests.monitoring import ask, prometheus
from tests.unit import certificates
from tests.waiting import PATIENCE_SECONDS, wait_for

DOCUMENT = (Path(__file__).parents[2] / "docs/security.md").read_text()
WEB, SCRAPE = re.findall(r"^```yaml\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """With all that the document's files name."""
    certificates.server().write(tmp_path, "server")
    certificates.authority().write(tmp_path, "ca")
    certificates.certify("prometheus", certificates.authority()).write(tmp_path, "client")
    (tmp_path / "password").write_text("secret")
    (tmp_path / "web.yml").write_text(WEB)
    return tmp_path


def test_document(directory: Path) -> None:
    ask("promtool", "check", "web-config", directory / "web.yml")
    with lab.Exporter(f"--web.config.file={directory}/web.yml") as exporter:
        url = urllib.parse.urlsplit(exporter.url)
        assert url.scheme == "https"
        context = ssl.create_default_context(cafile=str(directory / "ca.pem"))
        with pytest.raises((urllib.error.URLError, ConnectionError, ssl.SSLError)):
            urllib.request.urlopen(exporter.url, timeout=PATIENCE_SECONDS, context=context)
        context.load_cert_chain(directory / "client.pem", directory / "client.key")
        with pytest.raises(urllib.error.HTTPError, match="401") as caught:
            urllib.request.urlopen(exporter.url, timeout=PATIENCE_SECONDS, context=context)
        caught.value.close()
        login = base64.b64encode(b"prometheus:secret").decode()
        request = urllib.request.Request(
            f"{exporter.url}/metrics", headers={"Authorization": f"Basic {login}"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS, context=context) as answer:
            assert "writeback_exporter_build_info" in answer.read().decode()
        config = SCRAPE.replace("localhost:10435", url.netloc)
        assert config != SCRAPE
        quick = "global: {scrape_interval: 3s, scrape_timeout: 3s}\n"
        with prometheus(directory, config + quick) as scraper:
            wait_for(lambda: scraper.query("up == 1"), what="a scrape")
    assert not any("ERROR" in line or "Traceback" in line for line in exporter.log)
