# SPDX-License-Identifier: Apache-2.0
"""Prometheus, Alertmanager and their tools, which `make` unpacks but does not install."""

from __future__ import annotations

import json
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.waiting import PATIENCE_SECONDS, wait_for

UNPACKED = Path(__file__).parents[1] / "build/monitoring/usr/bin"

Series = tuple[dict[str, str], list[tuple[float, float]]]
"""Labels, and (time, value)."""


def tool(name: str) -> Path:
    """Of prometheus, promtool, prometheus-alertmanager and amtool."""
    path = UNPACKED / name
    assert path.exists(), f"{path} is missing: run the tests by make, which fetches it"
    return path


def ask(name: str, *arguments: str | Path, input: str | None = None) -> str:
    """Runs a tool that must succeed; all that it printed."""
    said = subprocess.run(
        [tool(name), *arguments],
        input=input,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert said.returncode == 0, said.stdout
    return said.stdout


# Servers -----------------------------------------------------------------------------------------


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as response:
        return json.load(response)


def free_address() -> str:
    """A URL on loopback that nobody serves."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@contextmanager
def server(command: list[str | Path], log: Path) -> Iterator[str]:
    """Runs one, from when it is ready on; its URL."""

    def start() -> subprocess.Popen[bytes]:
        address = f"--web.listen-address={url.removeprefix('http://')}"
        with log.open("w") as output:
            return subprocess.Popen([*command, address], stdout=output, stderr=subprocess.STDOUT)

    url = free_address()
    process = start()

    def answers() -> bool:
        nonlocal process, url
        if process.poll() is not None:
            # Another program may have got the port since it was free.
            assert "address already in use" in log.read_text(), log.read_text()
            url = free_address()
            process = start()
        try:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=5):
                return True
        except OSError:
            return False

    try:
        wait_for(answers, what=f"that {log.stem} is ready")
        yield url
    finally:
        process.terminate()
        try:
            process.wait(timeout=PATIENCE_SECONDS)
        finally:
            process.kill()


@dataclass(frozen=True)
class Prometheus:
    url: str

    def query(self, expr: str, at: float | None = None) -> list[Series]:
        asked = {"query": expr} | ({"time": f"{at}"} if at else {})
        return self._ask("query", asked)

    def query_range(self, expr: str, start: float, end: float, step: float = 1) -> list[Series]:
        return self._ask("query_range", {"query": expr, "start": start, "end": end, "step": step})

    def _ask(self, how: str, asked: dict[str, Any]) -> list[Series]:
        answer = get(f"{self.url}/api/v1/{how}?{urllib.parse.urlencode(asked)}")
        assert answer["status"] == "success", answer
        data = answer["data"]
        if data["resultType"] == "scalar":
            return [({}, [_sample(data["result"])])]
        return [
            (row["metric"], [_sample(value) for value in row.get("values") or [row["value"]]])
            for row in data["result"]
        ]


def _sample(pair: list[Any]) -> tuple[float, float]:
    return float(pair[0]), float(pair[1])


@contextmanager
def prometheus(directory: Path, config: str, *flags: str) -> Iterator[Prometheus]:
    """Runs one with this configuration; its files are in the directory."""
    (directory / "prometheus.yml").write_text(config)
    ask("promtool", "check", "config", directory / "prometheus.yml")
    command: list[str | Path] = [
        tool("prometheus"),
        f"--config.file={directory / 'prometheus.yml'}",
        f"--storage.tsdb.path={directory / 'tsdb'}",
        *flags,
    ]
    with server(command, directory / "prometheus.log") as url:
        yield Prometheus(url)
