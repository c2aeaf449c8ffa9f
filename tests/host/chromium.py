# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium, driven by its DevTools protocol: what a page is to who looks at it."""

from __future__ import annotations

import asyncio
import base64
import json
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tornado.websocket import WebSocketClientConnection, websocket_connect

from tests.waiting import PATIENCE_SECONDS, wait_for

_PROBLEMS = ("Log.entryAdded", "Runtime.exceptionThrown", "Network.loadingFailed")


@dataclass(slots=True)
class Opened:
    """A page as it was shown."""

    results: list[Any]
    """Of the expressions that were evaluated in it."""
    problems: list[dict[str, Any]]
    """What Chromium logged, such as violations of the page's policy, and what did not load."""
    png: bytes


@dataclass(slots=True)
class Chromium:
    """A running one; `debugger` is the address of its one tab."""

    debugger: str

    def open(
        self, url: str, *expressions: str, width: int = 1280, height: int = 900, dark: bool = False
    ) -> Opened:
        """Shows a page in a window of that size, and evaluates JavaScript in it."""
        return asyncio.run(self._open(url, expressions, width, height, dark))

    async def _open(
        self, url: str, expressions: tuple[str, ...], width: int, height: int, dark: bool
    ) -> Opened:
        async with asyncio.timeout(PATIENCE_SECONDS):
            socket = await websocket_connect(self.debugger, max_message_size=1 << 26)
            tab = _Tab(socket)
            for domain in ("Log", "Runtime", "Network", "Page"):
                await tab.call(f"{domain}.enable")
            await tab.call(
                "Emulation.setDeviceMetricsOverride",
                width=width,
                height=height,
                deviceScaleFactor=1,
                mobile=False,
            )
            scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            await tab.call("Emulation.setEmulatedMedia", features=[scheme])
            await tab.call("Page.navigate", url=url)
            await tab.until("Page.loadEventFired")
            results = [await tab.evaluate(expression) for expression in expressions]
            picture = await tab.call("Page.captureScreenshot", captureBeyondViewport=True)
            socket.close()
            while await socket.read_message() is not None:
                pass
        problems = [event for event in tab.events if event["method"] in _PROBLEMS]
        return Opened(results, problems, base64.b64decode(picture["data"]))


@dataclass(slots=True)
class _Tab:
    socket: WebSocketClientConnection
    events: list[dict[str, Any]] = field(default_factory=list)
    calls: int = 0

    async def call(self, method: str, **parameters: object) -> dict[str, Any]:
        self.calls += 1
        message = {"id": self.calls, "method": method, "params": parameters}
        await self.socket.write_message(json.dumps(message))
        while (answer := await self._receive()).get("id") != self.calls:
            self.events.append(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    async def until(self, event: str) -> None:
        while all(seen["method"] != event for seen in self.events):
            self.events.append(await self._receive())

    async def evaluate(self, expression: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def _receive(self) -> dict[str, Any]:
        message = await self.socket.read_message()
        assert message is not None, "Chromium has gone"
        answer: dict[str, Any] = json.loads(message)
        return answer


@contextmanager
def chromium(profile: Path) -> Iterator[Chromium]:
    """Starts one with a profile of its own, and ends it."""
    process = subprocess.Popen(
        [
            "chromium",
            "--headless",
            "--no-sandbox",  # which needs a user other than root
            "--disable-gpu",
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            "about:blank",
        ],
        stderr=subprocess.DEVNULL,  # it misses a desktop there
    )
    with process:
        try:
            yield Chromium(wait_for(lambda: _debugger(profile), what="a tab of Chromium's"))
        finally:
            process.kill()


def _debugger(profile: Path) -> str | None:
    """Of the one tab, which comes later than the server that tells of it."""
    try:
        port, _, _ = (profile / "DevToolsActivePort").read_text().partition("\n")
    except FileNotFoundError:
        return None
    if not port:
        return None
    url = f"http://127.0.0.1:{port}/json/list"
    with urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as response:
        tabs = [tab["webSocketDebuggerUrl"] for tab in json.load(response) if tab["type"] == "page"]
    assert len(tabs) <= 1
    return tabs[0] if tabs else None
