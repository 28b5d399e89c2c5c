"""A server of the demo model in this process, for all tests of this folder; a second one whose engine is slow."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from ptqpipe.errors import PtqError
from ptqpipe.serving.engine.service import Service
from ptqpipe.serving.server.app import ServerOptions, create_app
from ptqpipe.serving.server.uvicorn_server import bind, run
from tests.serving.engine import models

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    url: str
    service: Service

    def client(self, **headers: str) -> httpx.Client:
        """A client of it."""
        return httpx.Client(base_url=self.url, headers=headers, timeout=60)


@contextmanager
def serving(
    *,
    max_queue: int = 256,
    max_seqs: int = 8,
    api_key: str | None = None,
    max_body: int = 1 << 16,
    slow: float = 0.0,
    template: str | None = TEMPLATE,
    hosts: tuple[str, ...] = (),
    tokenizer: Any = None,
    access_log: bool = False,
) -> Iterator[Server]:
    """A server on a free port; ``slow``: seconds that a step takes longer; ``tokenizer``: in the place of its own."""

    def build() -> Any:
        made = models.engine(models.runner(), max_seqs=max_seqs, end_tokens=[1])
        step = made.step

        def slowed() -> Any:
            if made.busy:
                threading.Event().wait(slow)
            return step()

        made.step = slowed  # type: ignore[method-assign]
        return made

    service = Service(build, max_queue=max_queue, threads=1)
    options = ServerOptions(("demo",), 256, hosts, api_key, max_body, template)
    app = create_app(service, tokenizer or models.tokenizer(), options)
    socket = bind("127.0.0.1", 0)
    ready = threading.Event()
    service.start()

    def main() -> None:
        with suppress(PtqError):  # a test may break it
            run(
                app,
                service,
                socket,
                host="127.0.0.1",
                drain_s=5,
                log=lambda line: None,
                ready=lambda url: ready.set(),
                access_log=access_log,
                signals=False,
            )

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    assert ready.wait(60)
    try:
        yield Server(f"http://127.0.0.1:{socket.getsockname()[1]}", service)
    finally:
        service.stop()
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The demo model, as fast as it is."""
    with serving() as found:
        yield found
