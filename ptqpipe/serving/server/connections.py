"""Connections that do not get a service stuck: a deadline for requests to arrive, and fewer connections than files.

uvicorn waits for ever for the rest of a request. Here a request has `ARRIVE_S` from its first byte, or from the start
of its connection, to its last one; then the connection is answered 408 and closed. At the limit the connection whose
request has been arriving for the longest time makes room for a new one, and where none is arriving the new one is
answered 503. With uvicorn's own connections and ``limit_concurrency`` the row "senders that never finish" of
``tests/fuzz/attack_server.py`` is not held: no good request is answered as long as they hold all files open. Must not
know what is served.
"""

import asyncio
import os
import resource
import time

from uvicorn.protocols.http.h11_impl import H11Protocol

ARRIVE_S = 60.0
MOST = 4096  # connections, however many files may be open
_BACKLOG = 128  # connections that the kernel holds, and that asyncio accepts at once
_ON_THE_WAY = 4  # backlogs: what is accepted in a turn of asyncio's loop is seen, or closed, some turns later
_RESERVED = 32  # open files of everything else, beside those that are open at the start
_LEAST_S = 1.0  # a request may take to arrive even at the limit


def limits() -> tuple[int, int]:
    """(connections, backlog) of this process."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:
        used = _RESERVED
    return limits_of(soft, used)


def limits_of(files: int, used: int) -> tuple[int, int]:
    """(connections, backlog) where ``files`` may be open and ``used`` are.

    asyncio accepts a whole backlog before the first of its connections is seen, and the next one before the connections
    that had to make room are closed, so these have to fit beside the limit.
    """
    if files == resource.RLIM_INFINITY:
        return MOST, _BACKLOG
    backlog = max(1, min(_BACKLOG, files // 16))
    return max(1, min(MOST, files - used - _RESERVED - _ON_THE_WAY * backlog)), backlog


class Connection(H11Protocol):
    """One connection. `limited` makes the class of a server."""

    most = MOST
    arrive_s = ARRIVE_S
    _begun = 0.0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > self.most:
            self._make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.arriving:
            self._stop_waiting()
        elif self._deadline is None:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """uvicorn's, when it ends: a request that has not arrived is not waited for."""
        if self._deadline is not None and self.arriving:
            self.end(b"503 Service Unavailable")
        else:
            super().shutdown()

    @property
    def arriving(self) -> bool:
        """Whether a request, or the rest of one, is expected."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    @property
    def begun(self) -> float:
        """When the request that is arriving began to."""
        return self._begun

    def end(self, status: bytes) -> None:
        """Closes the connection, with the reason for a client that is sending a request and has no answer yet."""
        waiting = self._deadline is not None
        self._stop_waiting()
        if self.transport.is_closing():
            return
        if waiting and (self.cycle is None or self.cycle.response_complete or not self.cycle.response_started):
            self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
        self.transport.close()

    def _wait(self) -> None:
        self._begun = time.monotonic()
        self._deadline = self.loop.call_later(self.arrive_s, self._on_deadline)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_deadline(self) -> None:
        if self.arriving:
            self.end(b"408 Request Timeout")

    def _make_room(self) -> None:
        latest = time.monotonic() - _LEAST_S
        idle = [
            other
            for other in self.connections
            if isinstance(other, Connection) and other.arriving and not other.transport.is_closing()
        ]
        oldest = min(idle, key=lambda other: other.begun)
        if oldest.begun > latest:
            self.end(b"503 Service Unavailable\r\nretry-after: 1")
        else:
            oldest.end(b"408 Request Timeout")


def limited(most: int, *, arrive_s: float = ARRIVE_S) -> type[Connection]:
    """The class of the connections of a server that has at most ``most`` of them."""
    return type("Connection", (Connection,), {"most": most, "arrive_s": arrive_s})
