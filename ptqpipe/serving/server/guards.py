"""Checks before a route is reached: Host, API key, size of the body, request id. An ASGI app around another.

Why the Host is checked: a page of any web site can have its own name resolve to this machine (DNS rebinding), and its
scripts may then read what a server without a key answers. The browser still sends that name as the Host. An address
there is safe: a page that has it came from there.
"""

import asyncio
import contextlib
import gc
import hmac
import ipaddress
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ptqpipe.errors import arg
from ptqpipe.serving.server.error_responses import ApiError

_GUARDED = ("/v1/", "/tokenize", "/detokenize")
_ID = re.compile(rb"[\w.:-]{1,128}")
_HOST = re.compile(r"\[(?P<ipv6>[^]]*)\](?::\d*)?|(?P<name>[^:]*)(?::\d*)?")
_DRAIN_BYTES = 256 << 20  # of a body that is too large, read and thrown away so that its sender sees the answer
_DRAIN_S = 10.0
_MOST_GROUPS = 1 << 14  # lists and objects of a body: a chat has one a message, and one a part of it
_MOST_STRINGS = 1 << 17
_LARGE_BYTES = 1 << 16  # of a body, whose objects do not wait until Python looks for cycles by itself


class Guards:
    """Refuses (400, 401, 403, 413) or lets through, names the request, and counts the answer.

    hosts     names that a Host may have beside addresses and localhost; * in one stands for anything
    api_key   what ``Authorization: Bearer`` must bring for the API; health, metrics and the page are open
    max_body  bytes
    count     called with (path, status) of every response
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        hosts: tuple[str, ...] = (),
        api_key: str | None,
        max_body: int,
        count: Callable[[str, int], None],
    ) -> None:
        self._app, self._max_body, self._count = app, max_body, count
        self._hosts = ("localhost", "*.localhost", *(host.lower().rstrip(".") for host in hosts))
        self._key = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", b"")
        name = request_id if _ID.fullmatch(request_id) else uuid4().hex.encode()

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", name)]
                self._count(_route(scope), message["status"])
            await send(message)

        try:
            for host in [value for key, value in scope["headers"] if key == b"host"]:
                self._check_host(host.decode("latin-1"))
            self._check_key(scope["path"], headers)
            whole = await self._read(receive, headers)
            if whole is not None:
                await self._app(scope, whole, answer)
                length = headers.get(b"content-length", b"")
                if not length.isdigit() or int(length) >= _LARGE_BYTES:  # in chunks, or large
                    gc.collect(1)  # an error leaves the body in a cycle, with its traceback and the frames there
        except ApiError as error:
            await error.response()(scope, receive, answer)

    def _check_host(self, host: str) -> None:
        """ApiError for the name of another server."""
        parts = _HOST.fullmatch(host.strip())
        if parts is None:
            raise ApiError(400, f"the Host header {host!r} is no host")
        name = (parts["ipv6"] or parts["name"] or "").lower().rstrip(".")
        if not name or _is_address(name) or any(fnmatchcase(name, allowed) for allowed in self._hosts):
            return
        raise ApiError(
            403,
            f"the Host {name!r} is not a name of this server; start it with {arg('allowed_host', name)} if it is",
            code="host_not_allowed",
        )

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        if self._key is not None and path.startswith(_GUARDED):
            key = headers.get(b"authorization", b"")
            if not hmac.compare_digest(key, self._key):
                raise ApiError(
                    401,
                    "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )

    async def _read(self, receive: Receive, headers: dict[bytes, bytes]) -> Receive | None:
        """A ``receive`` with the whole body in its first message; None when the client has left meanwhile.

        FastAPI would read it whole, too, but makes its own error of one that is raised meanwhile.
        """
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body:
            if headers.get(b"expect", b"").lower() != b"100-continue":  # then nothing is sent before we ask for it
                await _drain(receive)
            raise self._too_large()
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
            if size > self._max_body:
                parts.clear()
                if more:
                    await _drain(receive)
                raise self._too_large()
        body = b"".join(parts)
        _check_values(body)
        whole: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        return replay

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_body} bytes", code="body_too_large")


def _check_values(body: bytes) -> None:
    """ApiError for JSON of more values than a request can have: to build a million objects of 4 MB, and check each,
    takes a second in which nothing else is answered."""
    if body.count(b"[") + body.count(b"{") <= _MOST_GROUPS and body.count(b'"') <= 2 * _MOST_STRINGS:
        return
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quotation mark left begins or ends a string
    count, most, what = plain.count(b'"') // 2, _MOST_STRINGS, "strings"
    if count <= most:
        outside = b'"'.join(plain.split(b'"')[::2])
        count, most, what = outside.count(b"[") + outside.count(b"{"), _MOST_GROUPS, "lists and objects"
    if count > most:
        raise ApiError(
            400,
            f"the body has {count} {what}, expected at most {most}; send it as several requests",
            code="too_many_values",
        )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def _drain(receive: Receive) -> None:
    """Reads the rest of a body and throws it away.

    A connection that is closed with bytes unread is reset, and its other end may never see the answer.
    """
    size = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_S):
            while size <= _DRAIN_BYTES:
                message = await receive()
                if not message.get("more_body", False):
                    return
                size += len(message.get("body", b""))


def _route(scope: Scope) -> str:
    """The path of the route that answered; one name for all that there are not."""
    route = scope.get("route")
    return str(getattr(route, "path", "other"))
