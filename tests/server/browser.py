"""A headless Chromium, driven by its DevTools protocol: as much of it as the page's test needs."""

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

BINARY = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)


class Page:
    """One page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._count = socket, 0
        self.problems: list[str] = []  # what the page's scripts threw or the console complained about

    async def call(self, method: str, **params: Any) -> Any:
        """The result of a DevTools method."""
        self._count += 1
        await self._socket.send_json({"id": self._count, "method": method, "params": params})
        while True:
            message = json.loads((await self._socket.receive(timeout=30)).data)
            if message.get("method") == "Runtime.exceptionThrown":
                self.problems.append(json.dumps(message["params"]["exceptionDetails"]))
            if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.problems.append(message["params"]["entry"]["text"])
            if message.get("id") == self._count:
                assert "error" not in message, message
                return message["result"]

    async def value(self, script: str) -> Any:
        """What a JavaScript expression is."""
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, script: str, seconds: float = 30) -> None:
        """Waits until an expression is true."""
        for _ in range(int(seconds / 0.05)):
            if await self.value(script):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"never true: {script}")

    async def screenshot(self, path: Path) -> None:
        """A PNG of what is seen."""
        path.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot"))["data"]))


@asynccontextmanager
async def opened(url: str, *, width: int, height: int, dark: bool) -> AsyncIterator[Page]:
    """A page of a browser of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        assert BINARY is not None
        process = subprocess.Popen(
            [BINARY, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--remote-debugging-port=0", f"--user-data-dir={folder}", "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            told = Path(folder) / "DevToolsActivePort"
            for _ in range(600):
                if told.exists() and len(told.read_text().splitlines()) == 2:
                    break
                await asyncio.sleep(0.1)
            port = told.read_text().splitlines()[0]
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    target = next(entry for entry in await answer.json() if entry["type"] == "page")
                async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=1 << 26) as socket:
                    page = Page(socket)
                    for domain in ("Page", "Runtime", "Log"):
                        await page.call(f"{domain}.enable")
                    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
                    await page.call("Emulation.setEmulatedMedia", features=[scheme])
                    await page.call(
                        "Emulation.setDeviceMetricsOverride",
                        width=width, height=height, deviceScaleFactor=1, mobile=False,
                    )  # fmt: skip
                    await page.call("Page.navigate", url=url)
                    yield page
        finally:
            process.terminate()
            process.wait(20)
