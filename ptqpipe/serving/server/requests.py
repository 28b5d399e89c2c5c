"""One HTTP request's way through the engine: submitted, its pieces awaited, cancelled when the client leaves.

The engine's thread calls back; here the pieces enter the event loop. Must not know what the pieces become.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ptqpipe.serving.engine import Finish, Request, Service, TokenOutput
from ptqpipe.serving.server.error_responses import ApiError, api_error
from ptqpipe.serving.server.metrics import Metrics, RequestTimer

PING_S = 15.0  # a silent stream says that it lives, so that proxies keep it


class Call:
    """Several engine requests that answer one HTTP request; an asynchronous iterator of (place, piece).

    The place counts choices: the requests in order, each with its ``n`` sequences.
    """

    def __init__(self, service: Service, metrics: Metrics, requests: list[Request]) -> None:
        self._service, self._metrics, self._requests = service, metrics, requests
        self._first = {}
        self._open = 0
        for request in requests:
            self._first[request.id] = self._open
            self._open += request.n
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[TokenOutput] = asyncio.Queue()
        self._watch = [RequestTimer(metrics, len(request.prompt)) for request in requests for _ in range(request.n)]

    def submit(self) -> None:
        """Queues all, or none: raises what `Service.submit` raises."""
        for request in self._requests:
            try:
                self._service.submit(request, self._receive)
            except Exception as error:
                self.cancel()
                self._metrics.refused(api_error(error).status)
                raise

    def cancel(self) -> None:
        """Ends what is not finished."""
        for request in self._requests:
            self._service.cancel(request.id)

    async def pieces(self) -> AsyncIterator[tuple[int, TokenOutput]]:
        """All pieces until every sequence has ended. ApiError where one ended by an error."""
        while self._open:
            piece = await self._queue.get()
            place = self._first[piece.request] + piece.index
            self._watch[place].see(piece)
            if piece.finish is not None:
                self._open -= 1
            if piece.error is not None:
                self.cancel()
                raise ApiError(503 if piece.finish is Finish.CANCELLED else 500, piece.error)
            yield place, piece

    def _receive(self, piece: TokenOutput) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._queue.put_nowait, piece)


async def cancel_on_disconnect(receive: Receive, call: Call) -> None:
    """Waits until the client has left, and cancels the call."""
    while (await receive())["type"] != "http.disconnect":
        pass
    call.cancel()


async def collected(http: HttpRequest, call: Call, take: Callable[[int, TokenOutput], None]) -> None:
    """Gives all pieces to ``take``; cancels when the client leaves."""
    watcher = asyncio.create_task(cancel_on_disconnect(http.receive, call))
    try:
        async for place, piece in call.pieces():
            take(place, piece)
    finally:
        watcher.cancel()
        call.cancel()


class EventStream(Response):
    """A response of server-sent events: JSON objects, then ``[DONE]``.

    events  what to send; an error in it is the last event
    """

    def __init__(self, call: Call, events: AsyncIterator[dict[str, Any]]) -> None:
        super().__init__()
        self._call, self._events = call, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events; cancels when the client leaves."""
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        watcher = asyncio.create_task(cancel_on_disconnect(receive, self._call))
        try:
            async for line in self._lines():
                await send({"type": "http.response.body", "body": line, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            watcher.cancel()
            self._call.cancel()

    async def _lines(self) -> AsyncIterator[bytes]:
        """The events as bytes, with a comment where there is no event for long."""
        pending = asyncio.ensure_future(anext(self._events, None))
        try:
            while True:
                done, _ = await asyncio.wait({pending}, timeout=PING_S)
                if not done:
                    yield b": ping\n\n"
                    continue
                event = pending.result()
                if event is None:
                    break
                text = json.dumps(event, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
                yield b"data: " + text.encode() + b"\n\n"
                pending = asyncio.ensure_future(anext(self._events, None))
        except Exception as error:
            yield b"data: " + json.dumps(api_error(error).body()).encode() + b"\n\n"
        finally:
            pending.cancel()
        yield b"data: [DONE]\n\n"
