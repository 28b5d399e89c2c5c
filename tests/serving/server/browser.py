"""A headless Chromium, driven by its DevTools protocol: as much of it as the page's test needs."""

import asyncio
import atexit
import base64
import functools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
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
            message = json.loads((await self._socket.receive(timeout=120)).data)
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

    async def until(self, script: str, seconds: float = 90) -> None:
        """Waits until an expression is true."""
        for _ in range(int(seconds / 0.05)):
            if await self.value(script):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"never true: {script}")

    async def screenshot(self, path: Path) -> None:
        """A PNG of what is seen."""
        path.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot"))["data"]))


@functools.cache
def started() -> str:
    """Where the browser listens: one for all pages of this process, which ends with it."""
    folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    assert BINARY is not None
    process = subprocess.Popen(
        [BINARY, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
         "--remote-debugging-port=0", f"--user-data-dir={folder.name}", "about:blank"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip

    def end() -> None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.wait()
        folder.cleanup()

    atexit.register(end)
    told = Path(folder.name) / "DevToolsActivePort"
    for _ in range(1800):
        if told.exists() and len(told.read_text().splitlines()) == 2:
            break
        time.sleep(0.1)
    port, path = told.read_text().splitlines()
    return f"ws://127.0.0.1:{port}{path}"


@asynccontextmanager
async def opened(url: str, *, width: int, height: int, dark: bool) -> AsyncIterator[Page]:
    """A page of a context of its own, which shares neither storage nor permissions with another page's."""
    at = started()
    async with aiohttp.ClientSession() as session, session.ws_connect(at) as socket:
        own = Page(socket)
        context = (await own.call("Target.createBrowserContext"))["browserContextId"]
        try:
            made = await own.call("Target.createTarget", url="about:blank", browserContextId=context)
            address = f"{at.partition('/devtools')[0]}/devtools/page/{made['targetId']}"
            async with session.ws_connect(address, max_msg_size=1 << 26) as page_socket:
                page = Page(page_socket)
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
            await own.call("Target.disposeBrowserContext", browserContextId=context)
