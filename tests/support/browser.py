"""A real browser without a window: Chromium, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.waiting import until


def chromium() -> str:
    """Its program; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium on this machine (apt-get install chromium)")
    return found


class Tab:
    """One page; ``errors`` are what its scripts threw and what it could not load."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self.errors: list[str] = []
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                self._waiting.pop(told["id"]).set_result(told)
            elif told["method"] == "Runtime.exceptionThrown":
                self.errors.append(told["params"]["exceptionDetails"]["text"])
            elif told["method"] == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
                self.errors.append(told["params"]["entry"]["text"])

    async def call(self, method: str, **params: Any) -> Any:
        """One DevTools command."""
        number = next(self._numbers)
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_str(json.dumps({"id": number, "method": method, "params": params}))
        told = await waiting
        assert "error" not in told, told
        return told["result"]

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)

    async def js(self, expression: str) -> Any:
        """Value of a JavaScript expression."""
        told = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def text(self, selector: str) -> str:
        """The text of an element as it is shown."""
        return str(await self.js(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    async def shows(self, selector: str, text: str) -> None:
        """Wait until the element shows it."""
        shown = ""

        async def it_does() -> bool:
            nonlocal shown
            shown = await self.text(selector)
            return text in shown

        await until(it_does, lambda: f"{selector} shows {text!r}: {shown!r}")

    async def size(self, width: int, height: int = 800) -> None:
        shape = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **shape)
        # `resize` events come before the callbacks of the next frame, so the page has seen one after two
        await self.js("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    async def prefer(self, scheme: str) -> None:
        """``dark`` or ``light``."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            code = {"Tab": 9, "Enter": 13}[key]
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)

    def close(self) -> None:
        self._reading.cancel()


@asynccontextmanager
async def browsing() -> AsyncIterator[Tab]:
    """An empty tab of a browser that is started for it and ended after it."""
    program = chromium()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        words = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        words += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port_file = Path(profile) / "DevToolsActivePort"
            await until(lambda: port_file.exists() and "\n" in port_file.read_text(), "the browser listens")
            port = port_file.read_text().splitlines()[0]
            async with aiohttp.ClientSession() as session:
                async with session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as answer:
                    address = (await answer.json())["webSocketDebuggerUrl"]
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    tab = Tab(socket)
                    yield tab
                    tab.close()
        finally:
            process.kill()
            process.wait()
