"""What happens before a route is reached: size of the body, API key, request id. An ASGI application around another."""

import hmac
import re
from collections.abc import Callable
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ptqpipe.server.errors import ApiError

_GUARDED = ("/v1/", "/tokenize", "/detokenize")
_ID = re.compile(rb"[\w.:-]{1,128}")


class Guards:
    """Refuses (401, 413) or lets through, names the request, and counts the answer.

    api_key   what ``Authorization: Bearer`` must bring for the API; health, metrics and the page are open
    max_body  bytes
    count     called with (path, status) of every response
    """

    def __init__(self, app: ASGIApp, *, api_key: str | None, max_body: int, count: Callable[[str, int], None]) -> None:
        self._app, self._max_body, self._count = app, max_body, count
        self._key = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        name = given if _ID.fullmatch(given) else uuid4().hex.encode()

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name)]
                self._count(_route(scope), message["status"])
            await send(message)

        try:
            self._check(scope["path"], headers)
            whole = await self._read(receive)
            if whole is not None:
                await self._app(scope, whole, answer)
        except ApiError as error:
            await error.response()(scope, receive, answer)

    def _check(self, path: str, headers: dict[bytes, bytes]) -> None:
        if self._key is not None and path.startswith(_GUARDED):
            found = headers.get(b"authorization", b"")
            if not hmac.compare_digest(found, self._key):
                raise ApiError(
                    401,
                    "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body:
            raise self._too_large()

    async def _read(self, receive: Receive) -> Receive | None:
        """A ``receive`` with the whole body in its first message; None when the client has left meanwhile.

        FastAPI would read it whole, too, but makes its own error of one that is raised meanwhile.
        """
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return None
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > self._max_body:
                raise self._too_large()
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        return replay

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_body} bytes", code="body_too_large")


def _route(scope: Scope) -> str:
    """The path of the route that answered; one name for all that there are not."""
    route = scope.get("route")
    return str(getattr(route, "path", "other"))
