"""uvicorn around the app: starts, drains on SIGTERM and SIGINT, ends when the engine does.

On a signal no new request is taken (503), those under way finish, and after the deadline what is left is cancelled. A
second signal ends at once; one while the model loads gives the loading up. When the engine fails, every client gets an
error and the process ends with its error.
"""

import asyncio
import copy
import errno
import gc
import logging
import signal
import socket
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import uvicorn
import uvicorn.logging
from starlette.types import ASGIApp

from ptqpipe.errors import PtqError, UsageError, arg
from ptqpipe.serving.engine import Service, State
from ptqpipe.serving.server.connections import limited, limits

_LAST_WORDS_S = 3.0  # for responses on their way when the engine has ended
_FLUSH_S = 0.2  # for pieces on their way into the event loop
READY = "ready:"  # how the line begins that says so
REPORT_S = 10.0  # between two lines about the throughput
_SECOND_S = 1.0  # one wish to end may come as two signals: to the process and to its group


class _Server(uvicorn.Server):
    """uvicorn's without its signal handlers, which know no draining."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """The listening socket. UsageError where the address is in use or not ours.

    It listens at once: until then a second service could bind the same address, and fail when it has loaded.
    """
    if not 0 <= port < 1 << 16:
        raise UsageError(f"{arg('port')} is {port}, expected 0 to 65535")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(limits()[1])
    except OSError as error:
        reason = error.strerror or str(error)
        if isinstance(error, socket.gaierror) or error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            remedy = f"choose another {arg('host')}"
        elif error.errno in (errno.EADDRINUSE, errno.EACCES, errno.EPERM):  # a low port is root's
            remedy = f"choose another {arg('port')}"
        else:
            remedy = "close other files and sockets of this user, or raise the limit (ulimit -n)"
        raise UsageError(f"cannot listen on {host}:{port}: {reason}; {remedy}") from None
    listener.set_inheritable(False)
    return listener


def run(
    app: ASGIApp,
    service: Service,
    listening: socket.socket,
    *,
    host: str,
    drain_s: float,
    log: Callable[[str], None],
    ready: Callable[[str], None] = lambda url: None,
    access_log: bool = False,
    signals: bool = True,
) -> None:
    """Serves until a signal, or until the engine ends. PtqError when it ended by itself.

    host        as the address is shown
    drain_s     seconds that requests under way may take after a signal
    log         takes lines: when requests are taken, every `REPORT_S` with work, and when it ends
    ready       called with the URL once requests are taken
    access_log  whether each HTTP request is a line on stderr
    signals     False leaves them alone, as one must outside the main thread
    """
    most, backlog = limits()
    config = uvicorn.Config(
        app,
        http=limited(most),
        backlog=backlog,
        log_config=_logging(),
        access_log=access_log,
        proxy_headers=False,  # else every client on loopback may say which address the log shows
        timeout_graceful_shutdown=int(_LAST_WORDS_S),
        lifespan="off",
    )
    if signals:  # this process only serves: Python looks for cycles as often as by default, but not in what is imported
        gc.freeze()
        gc.set_threshold(700, 10, 10)
    running = _Running(_Server(config), service, url_of(host, listening), drain_s, log, ready)
    try:
        asyncio.run(running.serve(listening, signals=signals))
    finally:  # else what is frozen outlives the interpreter, and libraries that count their objects complain
        gc.unfreeze()
    if service.state is State.DEAD and not running.given_up:
        raise PtqError(service.error)


def url_of(host: str, listening: socket.socket) -> str:
    """The URL of a server for a client on this machine. ``host``: what was listened on, perhaps every address."""
    name = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{name}]' if ':' in name else name}:{listening.getsockname()[1]}"


def _logging() -> dict[str, Any]:
    """uvicorn's settings of its log: warnings, and requests with their time, on stderr."""
    settings = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    settings["formatters"]["access"]["()"] = _Access
    settings["formatters"]["access"]["fmt"] = '%(asctime)s %(client_addr)s "%(request_line)s" %(status_code)s'
    settings["handlers"]["access"]["stream"] = "ext://sys.stderr"
    for name in ("uvicorn", "uvicorn.error"):
        settings["loggers"][name]["level"] = "WARNING"
    return settings


class _Access(uvicorn.logging.AccessFormatter):
    """Lines of the access log without what follows "?", where no route takes anything and clients may put keys."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        if isinstance(record.args, tuple) and len(record.args) == 5:  # client, method, path, version, status
            client, method, path, version, status = record.args
            record.args = (client, method, str(path).partition("?")[0], version, status)
        return super().formatMessage(record)


class _Running:
    """One run of the server."""

    def __init__(
        self,
        server: uvicorn.Server,
        service: Service,
        url: str,
        drain_s: float,
        log: Callable[[str], None],
        ready: Callable[[str], None],
    ) -> None:
        self._server, self._service, self._url = server, service, url
        self._drain_s, self._log, self._ready = drain_s, log, ready
        self.given_up = False  # a signal came while the model was loaded
        self._asked = asyncio.Event()
        self._asked_at = 0.0

    async def serve(self, listening: socket.socket, *, signals: bool) -> None:
        service, loop = self._service, asyncio.get_running_loop()
        serving = asyncio.create_task(self._server.serve(sockets=[listening]))
        for number in (signal.SIGTERM, signal.SIGINT) if signals else ():
            loop.add_signal_handler(number, self._on_signal, number)
        ended = asyncio.create_task(asyncio.to_thread(service.ended.wait))
        announce = asyncio.create_task(self._announce())
        stop = asyncio.create_task(self._asked.wait())
        await asyncio.wait({serving, ended, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not service.ended.is_set():
            await self._drain(ended)
        announce.cancel()
        stop.cancel()
        if not service.ended.is_set():
            service.fail("the engine did not end in time")
        await asyncio.sleep(_FLUSH_S)
        self._server.should_exit = True
        await serving
        await ended

    async def _drain(self, ended: "asyncio.Task[bool]") -> None:
        service = self._service
        service.drain()
        await asyncio.wait({ended}, timeout=_LAST_WORDS_S if self.given_up else self._drain_s)
        if not service.ended.is_set() and not self.given_up:
            self._log(f"the deadline is over: {service.sequences()} sequences are cancelled")
            service.stop()
            await asyncio.wait({ended}, timeout=_LAST_WORDS_S)

    def _on_signal(self, number: int) -> None:
        now = time.monotonic()
        if not self._asked.is_set():
            self._asked_at = now
            count, deadline = self._service.sequences(), self._drain_s
            name = signal.Signals(number).name
            self.given_up = self._service.state is State.LOADING
            left = f"{count} under way with {deadline:g} s to finish" if count else "none is under way: ending"
            under_way = f"no new requests; {left}"
            self._log(f"{name}: {'loading is given up' if self.given_up else under_way}")
            self._service.drain()
            self._asked.set()
        elif now - self._asked_at > _SECOND_S:
            self._log("second signal: what is under way is cancelled")
            self._service.stop()

    async def _announce(self) -> None:
        """Prints when the service is ready, and from then on how much work it does."""
        while self._service.state is State.LOADING:
            await asyncio.sleep(0.05)
        if self._service.state is State.READY:
            self._log(f"{READY} {self._url}/v1 (chat: {self._url}/)")
            self._ready(self._url)
        throughput = Throughput(self._service)
        while True:
            await asyncio.sleep(REPORT_S)
            if (line := throughput.line()) is not None:
                self._log(line)


class Throughput:
    """What the server has done since the last line about it, for its log. ``clock`` gives seconds."""

    def __init__(self, service: Service, clock: Callable[[], float] = time.monotonic) -> None:
        self._service, self._clock = service, clock
        self._at, self._seen = clock(), self._tokens()

    def line(self) -> str | None:
        """Tokens per second since the last call, and how busy the engine is; None where there was no work at all."""
        now, tokens, load = self._clock(), self._tokens(), self._service.load()
        seconds = max(now - self._at, 1e-9)
        prompt, generated = ((new - old) / seconds for new, old in zip(tokens, self._seen, strict=True))
        self._at, worked, self._seen = now, tokens != self._seen, tokens
        if not worked and not load.running and not load.waiting:
            return None
        return (
            f"prompts {prompt:.1f}, generation {generated:.1f} tokens/s; running {load.running}, "
            f"waiting {load.waiting}; KV cache {100 * load.cache_use:.1f} %"
        )

    def _tokens(self) -> tuple[int, int]:
        """(tokens of prompts, generated tokens) that were computed since the start."""
        engine = self._service.engine
        return (engine.counters.prompt_tokens, engine.counters.generated_tokens) if engine is not None else (0, 0)
