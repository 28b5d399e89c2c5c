"""Claims about connections: what arrives slowly is ended, and is never in the way of what arrives."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx
import pytest
import uvicorn

from ptqpipe.errors import UsageError
from ptqpipe.serving.server.connections import Connection, limited, limits_of
from ptqpipe.serving.server.uvicorn_server import bind

HALF_HEADERS = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Le"
HALF_BODY = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the length of the body; /slow never."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message["body"], message["more_body"]
    if scope["path"] == "/slow":
        await receive()
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
    await send({"type": "http.response.body", "body": b"%04d" % len(body)})


@contextmanager
def serving(kind: type[Connection]) -> Iterator[int]:
    """The port of a server of such connections."""
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=kind, lifespan="off", log_level="error", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: server.run(sockets=[listening]), daemon=True)
    thread.start()
    while not server.started:
        threading.Event().wait(0.01)
    try:
        yield listening.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def opened(port: int, sent: bytes) -> socket.socket:
    found = socket.create_connection(("127.0.0.1", port), timeout=60)
    found.sendall(sent)
    return found


def everything(found: socket.socket) -> bytes:
    """What comes until the other side closes, or resets the connection: what was sent to it late is unread."""
    said = b""
    with suppress(ConnectionResetError):
        while piece := found.recv(1000):
            said += piece
    return said


@pytest.mark.parametrize("sent", [b"", b"G", HALF_HEADERS, HALF_BODY])
def test_a_request_that_does_not_arrive_is_answered_408_and_closed(sent: bytes) -> None:
    with serving(limited(8, arrive_s=0.3)) as port:
        assert everything(opened(port, sent)).startswith(b"HTTP/1.1 408 ")


def test_a_second_request_of_a_connection_has_a_deadline_too() -> None:
    kind = limited(8, arrive_s=600)
    with serving(kind) as port:
        whole = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
        found = opened(port, whole)
        said = b""
        while b"0003" not in said:
            said += found.recv(1000)
        kind.arrive_s = 0.3
        found.sendall(HALF_HEADERS)
        assert everything(found).startswith(b"HTTP/1.1 408 ")


def test_a_request_that_has_arrived_may_take_as_long_as_it_wants() -> None:
    with serving(limited(8, arrive_s=1.5)) as port:
        found = opened(port, b"POST /slow HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc")
        found.settimeout(2.5)
        with pytest.raises(TimeoutError):
            found.recv(1)
        found.close()


def test_a_body_that_keeps_arriving_slowly_is_ended_too() -> None:
    with serving(limited(8, arrive_s=0.3)) as port:
        found = opened(port, HALF_BODY)
        said = b""
        found.settimeout(0.05)
        for _ in range(90):
            with suppress(OSError):  # closed already: what was said before is there to be read
                found.sendall(b"a")
            try:
                said = found.recv(1000)
            except TimeoutError:
                continue
            break
        assert said.startswith(b"HTTP/1.1 408 ")


def test_at_the_limit_what_has_been_arriving_longest_makes_room() -> None:
    with serving(limited(4, arrive_s=600)) as port:
        slow = [opened(port, HALF_BODY) for _ in range(4)]
        for _ in range(60):  # what begins to arrive has a second even at the limit
            answer = httpx.post(f"http://127.0.0.1:{port}/", content=b"ab", timeout=60)
            if answer.status_code != 503:
                break
            threading.Event().wait(float(answer.headers["retry-after"]))
        assert answer.text == "0002"
        assert everything(slow[0]).startswith(b"HTTP/1.1 408 ")
        for one in slow:
            one.close()


def test_at_the_limit_without_one_that_is_late_a_new_connection_is_refused() -> None:
    with serving(limited(2, arrive_s=600)) as port:
        slow = [opened(port, b"POST /slow HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\na") for _ in range(2)]
        said = everything(opened(port, b""))
        assert said.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after" in said
        for one in slow:
            one.close()


def test_a_server_that_ends_does_not_wait_for_requests_that_have_not_arrived(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with serving(limited(64, arrive_s=600)) as port:
        slow = [opened(port, HALF_BODY) for _ in range(20)] + [opened(port, HALF_HEADERS)]
        while httpx.get(f"http://127.0.0.1:{port}/", timeout=60).status_code != 200:
            pass
    assert all(everything(one).startswith(b"HTTP/1.1 503 ") for one in slow)
    assert "CancelledError" not in capfd.readouterr().err + caplog.text


@pytest.mark.parametrize(("files", "used"), [(64, 20), (256, 40), (1024, 60), (1 << 20, 60), (1 << 30, 60)])
def test_connections_and_a_backlog_fit_beside_the_files_that_are_open(files: int, used: int) -> None:
    connections, backlog = limits_of(files, used)
    assert 1 <= backlog <= 128
    assert 1 <= connections <= 4096
    assert connections + backlog + used <= files


def test_a_second_service_on_a_port_is_refused_when_it_binds() -> None:
    with bind("127.0.0.1", 0) as first, pytest.raises(UsageError, match="choose another port"):
        bind("127.0.0.1", first.getsockname()[1])


@pytest.mark.parametrize("port", [-1, 65536, 99999])
def test_a_port_that_is_none_is_refused(port: int) -> None:
    with pytest.raises(UsageError, match=f"port is {port}, expected 0 to 65535"):
        bind("127.0.0.1", port)
