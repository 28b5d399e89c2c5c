"""uvicorn around the app: starts, drains on SIGTERM and SIGINT, ends when the engine does.

On a signal no new request is taken (503), those under way finish, and after the deadline what is left is cancelled. A
second signal ends at once. When the engine fails, everyone is told and the process ends with its error.
"""

import asyncio
import signal
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp

from ptqpipe.engine.service import Service, State
from ptqpipe.errors import PtqError, UsageError

_LAST_WORDS_S = 3.0  # for responses on their way when the engine has ended


@dataclass(frozen=True, slots=True)
class Listen:
    """Where to listen, and how long requests under way may take after a signal."""

    host: str = "127.0.0.1"
    port: int = 8000
    drain_s: float = 30.0


class _Server(uvicorn.Server):
    """uvicorn's without its signal handlers, which know no draining."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leaves signals alone."""
        yield


def bind(listen: Listen) -> socket.socket:
    """The listening socket. UsageError where the address is taken or not ours."""
    try:
        family = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM)[0][0]
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((listen.host, listen.port))
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"cannot listen on {listen.host}:{listen.port}: {reason}; choose another --port") from None
    found.set_inheritable(False)
    return found


def run(
    app: ASGIApp, service: Service, listening: socket.socket, listen: Listen, *, say: Callable[[str], None]
) -> None:
    """Serves until a signal, or until the engine ends. PtqError when it ended by itself."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, timeout_graceful_shutdown=int(_LAST_WORDS_S), lifespan="off"
    )
    asyncio.run(_serve(_Server(config), service, listening, listen, say))
    if service.state is State.DEAD:
        raise PtqError(service.error)


async def _serve(
    server: uvicorn.Server, service: Service, listening: socket.socket, listen: Listen, say: Callable[[str], None]
) -> None:
    loop, signals = asyncio.get_running_loop(), asyncio.Event()

    def on_signal(number: int) -> None:
        if signals.is_set():
            say("second signal: what is under way is cancelled")
            service.stop()
            server.force_exit = True
        else:
            count = service.sequences()
            say(
                f"{signal.Signals(number).name}: no new requests; {count} under way have {listen.drain_s:g} s to finish"
            )
            service.drain()
        signals.set()

    serving = asyncio.create_task(server.serve(sockets=[listening]))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    ended = asyncio.create_task(asyncio.to_thread(service.ended.wait))
    announce = asyncio.create_task(_announce(service, listen, listening, say))
    asked = asyncio.create_task(signals.wait())
    await asyncio.wait({serving, ended, asked}, return_when=asyncio.FIRST_COMPLETED)
    if signals.is_set() and not service.ended.is_set():
        await asyncio.wait({ended}, timeout=listen.drain_s)
        if not service.ended.is_set():
            say(f"the deadline is over: {service.sequences()} sequences are cancelled")
            service.stop()
            await asyncio.wait({ended}, timeout=_LAST_WORDS_S)
    announce.cancel()
    if not service.ended.is_set():
        service.fail("the engine did not end in time")
    await asyncio.sleep(0.2)  # pieces on their way into the event loop
    server.should_exit = True
    await serving
    await ended


async def _announce(service: Service, listen: Listen, listening: socket.socket, say: Callable[[str], None]) -> None:
    """Says when the service is ready."""
    while service.state is State.LOADING:
        await asyncio.sleep(0.05)
    if service.state is State.READY:
        port = listening.getsockname()[1]
        say(f"ready: http://{listen.host}:{port}/v1 (chat: http://{listen.host}:{port}/)")
