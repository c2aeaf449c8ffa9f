# SPDX-License-Identifier: Apache-2.0
"""A real Prometheus and Alertmanager on loopback: they scrape an exporter, and page a webhook."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from alerts.__main__ import HERE, files
from alerts.settings import Settings
from tests import lab, monitoring
from tests.monitoring import Prometheus, get, server, tool
from tests.waiting import wait_for

SCRAPES = "1s"
WINDOW = "10s"
"""Of rates: ten scrapes."""

# Who is told -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Webhook:
    """What Alertmanager sent, by the path that it sent it to."""

    url: str
    received: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def alerts(self, receiver: str, name: str, status: str) -> list[dict[str, Any]]:
        return [
            alert
            for path, message in list(self.received)
            if path == f"/{receiver}"
            for alert in message["alerts"]
            if alert["labels"]["alertname"] == name and alert["status"] == status
        ]


@contextmanager
def webhook() -> Iterator[Webhook]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            made.received.append((self.path, json.loads(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made = Webhook(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield made
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# Servers -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alertmanager:
    url: str

    def alerts(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = get(f"{self.url}/api/v2/alerts")
        return found


@contextmanager
def alertmanager(directory: Path, pager: Webhook) -> Iterator[Alertmanager]:
    """With the example, but to `pager`, and at once."""
    config = yaml.safe_load((HERE / "alertmanager.yml").read_text())
    for route in (config["route"], *config["route"]["routes"]):
        route.update(group_wait="0s", group_interval="1s")
    for receiver in config["receivers"]:
        (hook,) = receiver["webhook_configs"]
        hook["url"] = f"{pager.url}/{receiver['name']}"
    (directory / "alertmanager.yml").write_text(yaml.safe_dump(config))
    # Its templates are where Debian installs them, and it looks nowhere else.
    share = tool("prometheus-alertmanager").parents[1] / "share"
    command: list[str | Path] = [
        *lab.with_mounts(f"mount -t overlay -o lowerdir={share}:/usr/share overlay /usr/share"),
        tool("prometheus-alertmanager"),
        f"--config.file={directory / 'alertmanager.yml'}",
        f"--storage.path={directory / 'alertmanager'}",
        "--cluster.listen-address=",
    ]
    with server(command, directory / "alertmanager.log") as url:
        yield Alertmanager(url)


@contextmanager
def prometheus(
    directory: Path, target: str, to: Alertmanager, rules: Settings
) -> Iterator[Prometheus]:
    (directory / "rules.yml").write_text(files(rules)["rules.yml"])
    config = {
        "global": {
            "scrape_interval": SCRAPES,
            "scrape_timeout": SCRAPES,
            "evaluation_interval": SCRAPES,
        },
        "rule_files": [str(directory / "rules.yml")],
        "alerting": {
            "alertmanagers": [{"static_configs": [{"targets": [to.url.removeprefix("http://")]}]}]
        },
        "scrape_configs": [
            {"job_name": "writeback-exporter", "static_configs": [{"targets": [target]}]}
        ],
    }
    immediately = (
        "--rules.alert.resend-delay=1s",
        "--rules.alert.for-grace-period=0s",
        "--rules.alert.for-outage-tolerance=0s",
    )
    with monitoring.prometheus(directory, yaml.safe_dump(config), *immediately) as running:
        yield running


@dataclass(frozen=True)
class Stack:
    exporter: lab.Exporter
    prometheus: Prometheus
    alertmanager: Alertmanager
    webhook: Webhook


@contextmanager
def stack(directory: Path, *flags: str, mounts: Sequence[str] = ()) -> Iterator[Stack]:
    """All of them; the exporter with these flags, and with mounts that shell commands make for it
    alone. The rules' thresholds are the usual ones, only that nothing must last."""
    with ExitStack() as open_:
        exporter = open_.enter_context(lab.Exporter(*flags, prefix=lab.with_mounts(*mounts)))
        hook = open_.enter_context(webhook())
        manager = open_.enter_context(alertmanager(directory, hook))
        target = exporter.url.removeprefix("http://")
        rules = Settings(window=WINDOW, patience=0)
        scraper = open_.enter_context(prometheus(directory, target, manager, rules))
        wait_for(lambda: scraper.query("up == 1"), what="a scrape")
        yield Stack(exporter, scraper, manager, hook)
