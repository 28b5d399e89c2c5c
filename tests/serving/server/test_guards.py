"""Claims about what is refused before it costs anything: other hosts, large bodies, prompts that cannot fit."""

import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from ptqpipe.cli import main
from ptqpipe.models import chat_template
from ptqpipe.serving.engine.engine import ContextTooLong
from ptqpipe.serving.server import guards
from ptqpipe.serving.server.error_responses import ApiError
from ptqpipe.serving.server.prompts import Prompts
from tests.serving.engine import models
from tests.serving.server.conftest import Server, serving

LARGE = 1 << 20


@pytest.fixture(scope="module")
def named() -> Iterator[Server]:
    """A server with names of its own, whose bodies may have 64 KiB."""
    with serving(hosts=("box", "*.example.com")) as found:
        yield found


def raw(server: Server, sent: bytes, *, more: bytes = b"") -> bytes:
    """What the server answers to bytes of HTTP; ``more`` is sent piece by piece, however early the answer comes."""
    port = int(server.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=20) as found:
        found.sendall(sent)
        for at in range(0, len(more), 1 << 16):
            found.sendall(more[at : at + (1 << 16)])
        said = b""
        while piece := found.recv(1 << 16):
            said += piece
    return said


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1:8000", "[::1]:8000", "192.168.7.7", "localhost", "LOCALHOST:1", "a.localhost"),
        *("box", "box.:8000", "api.example.com", "API.Example.com:443", ""),
    ],
)
def test_a_name_of_the_server_and_any_address_are_served(named: Server, host: str) -> None:
    with named.client(host=host) as http:
        assert http.get("/v1/models").status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.com", "localhost.evil.com", "127.0.0.1.evil.com", "example.com", "boxes", "api.example.com.evil.com"]
)
@pytest.mark.parametrize("path", ["/v1/models", "/health", "/metrics", "/", "/openapi.json"])
def test_another_host_is_refused_with_the_option_that_allows_it(named: Server, host: str, path: str) -> None:
    with named.client(host=f"{host}:8000") as http:
        response = http.get(path)
    assert response.status_code == 403
    assert f'allowed_host="{host}"' in response.json()["error"]["message"]


@pytest.mark.parametrize("host", ["a:b:c", "[::1", "localhost:80x", "evil.com#localhost"])
def test_a_host_that_is_none_is_refused(named: Server, host: str) -> None:
    with named.client(host=host) as http:
        assert http.get("/v1/models").status_code in (400, 403)


def test_of_two_hosts_each_is_checked(named: Server) -> None:
    for hosts in (b"Host: localhost\r\nHost: evil.com", b"Host: evil.com\r\nHost: localhost"):
        said = raw(named, b"GET /v1/models HTTP/1.1\r\nConnection: close\r\n" + hosts + b"\r\n\r\n")
        assert said.split(b" ")[1] in (b"400", b"403")


@pytest.mark.parametrize("name", ["http://box", "box:80", "", "a/b"])
def test_an_allowed_host_that_is_no_name_is_refused_before_loading(name: str) -> None:
    said = CliRunner().invoke(main, ["serve", str(models.DEMO), "--allowed-host", name])
    assert (said.exit_code, "expected a name without scheme and port" in said.output) == (2, True)


@pytest.mark.parametrize("length", [b"Content-Length: %d" % LARGE, b"Transfer-Encoding: chunked"])
def test_who_sends_a_body_that_is_too_large_to_its_end_reads_why_it_was_refused(named: Server, length: bytes) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + length + b"\r\n\r\n"
    body = b"a" * LARGE if b"Length" in length else (b"10000\r\n" + b"a" * 0x10000 + b"\r\n") * 16 + b"0\r\n\r\n"
    said = raw(named, head, more=body)
    assert said.startswith(b"HTTP/1.1 413 ")
    assert b"body_too_large" in said


def test_who_asks_before_sending_a_body_that_is_too_large_need_not_send_it(named: Server) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nExpect: 100-continue\r\n"
    said = raw(named, head + b"Content-Length: 1000000\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 413 ")


class Counted:
    """A tokenizer that says how much it was given, and whether two calls were made at once."""

    def __init__(self) -> None:
        self.tokenizer = models.tokenizer()
        self.lengths: list[int] = []
        self.most = self._now = 0
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __len__(self) -> int:
        return len(self.tokenizer)

    def __call__(self, text: str, **options: Any) -> Any:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
        self.lengths.append(len(text))
        threading.Event().wait(0.05)
        with self._lock:
            self._now -= 1
        return self.tokenizer(text, **options)


@pytest.mark.parametrize("text", ["a" * 4_000_000, "word " * 800_000, "\n" * 4_000_000, "é😀" * 2_000_000])
def test_a_text_that_cannot_fit_is_refused_by_its_beginning(text: str) -> None:
    counted = Counted()
    prompts = Prompts(counted, context=1024)
    with pytest.raises(ContextTooLong, match="more than 2048 tokens; this model's context is 1024"):
        prompts.encode(text)
    assert max(counted.lengths) <= 16 * 8 * 1024


@pytest.mark.parametrize("text", ["a b c " * 300, "Return the current value of " * 60, " " * 3000, "x" * 2000])
def test_a_text_that_is_not_refused_has_the_tokens_of_the_whole(text: str) -> None:
    prompts = Prompts(models.tokenizer(), context=256)
    try:
        tokens, _ = prompts.encode(text)
    except ContextTooLong:
        assert len(models.tokenizer()(text).input_ids) > 256
    else:
        assert list(tokens) == models.tokenizer()(text).input_ids


def test_a_list_of_tokens_that_cannot_fit_is_not_decoded() -> None:
    prompts = Prompts(models.tokenizer(), context=16)
    with pytest.raises(ContextTooLong):
        prompts.encode([1] * 33)
    assert prompts.encode([1] * 32)[0] == (1,) * 32


def test_requests_tokenize_one_after_another() -> None:
    counted = Counted()
    answers: list[int] = []
    with serving(tokenizer=counted) as server, server.client() as http:
        body = {"prompt": "Return the value", "max_tokens": 1}
        threads = [
            threading.Thread(target=lambda: answers.append(http.post("/v1/completions", json=body).status_code))
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert answers == [200] * 6
    assert (counted.most, len(counted.lengths) >= 6) == (1, True)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [1.5] * 100_000}),
        ("/v1/completions", {"prompt": [["a"] * 10] * 10_000}),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": ["x"] * 100_000}),
        ("/v1/completions", {"prompt": "a", "logit_bias": {f"x{at}": 1 for at in range(50_000)}}),
        ("/v1/chat/completions", {"messages": [1] * 100_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [1] * 100_000}]}),
        ("/detokenize", {"tokens": ["a"] * 100_000}),
    ],
)
def test_of_many_items_of_a_wrong_type_few_are_reported(path: str, body: dict[str, Any]) -> None:
    from fastapi.exceptions import RequestValidationError
    from pydantic import TypeAdapter, ValidationError

    from ptqpipe.serving.server import schema

    kinds = {"/v1/completions": "CompletionBody", "/v1/chat/completions": "ChatBody", "/detokenize": "DetokenizeBody"}
    with pytest.raises(ValidationError) as error:
        TypeAdapter(getattr(schema, kinds[path])).validate_python(json.loads(json.dumps(body)))
    assert len(RequestValidationError(error.value.errors()).errors()) <= 20


MANY = {
    "lists": json.dumps({"prompt": [[1]] * 20_000}),
    "lists in lists": "[" * 20_000,
    "objects": json.dumps({"messages": [{}] * 20_000}),
    "objects of fields that nobody reads": json.dumps({"prompt": "a", "metadata": [{}] * 20_000}),
    "strings": json.dumps({"prompt": [""] * 140_000}),
    "keys": json.dumps({"prompt": "a", "logit_bias": {str(at): 1 for at in range(140_000)}}),
    "strings with quotation marks": json.dumps({"prompt": ['"\\'] * 140_000}),
}
FEW = {
    "brackets in a text": json.dumps({"prompt": "[{" * 20_000}),
    "brackets between quotation marks in a text": json.dumps({"prompt": '\\"[{' * 40_000}),
    "quotation marks in a text": json.dumps({"prompt": '"' * 300_000}),
    "tokens": json.dumps({"prompt": [1] * 300_000}),
    "a long chat": json.dumps({"messages": [{"role": "user", "content": [{"type": "text", "text": "["}]}] * 5_000}),
}


@pytest.mark.parametrize("body", MANY.values(), ids=list(MANY))
def test_bodies_of_many_values_are_refused_before_they_are_objects(body: str) -> None:
    with pytest.raises(ApiError, match=r"expected at most (16384|131072); send it as several requests"):
        guards._check_values(body.encode())


@pytest.mark.parametrize("body", FEW.values(), ids=list(FEW))
def test_what_looks_like_many_values_inside_of_a_text_is_one(body: str) -> None:
    guards._check_values(body.encode())


def test_a_body_of_many_values_gets_400(named: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "_MOST_GROUPS", 10)
    with named.client() as http:
        response = http.post("/v1/completions", json={"prompt": [[1]] * 10})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "too_many_values")
        assert http.post("/v1/completions", json={"prompt": [[1]] * 2, "max_tokens": 1}).status_code == 200


def test_a_tokenizer_that_gives_up_is_an_error_of_the_request() -> None:
    """As Oniguruma does after ten million steps: a panic in Rust, which is no Exception."""
    from tokenizers import Regex, pre_tokenizers

    words = models.own_tokenizer()
    words.backend_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+b"), "isolated")
    long = "a" * 60
    chat = [{"role": "user", "content": long}]
    with serving(tokenizer=words) as server, server.client() as http:
        for path, body in (
            ("/v1/completions", {"prompt": long}),
            ("/v1/completions", {"prompt": ["a", long], "stream": True}),
            ("/tokenize", {"prompt": long}),
            ("/v1/chat/completions", {"messages": chat}),
        ):
            response = http.post(path, json=body)
            assert response.status_code == 400
            assert "the model's tokenizer fails on this text: Onig" in response.json()["error"]["message"]
            assert http.post("/tokenize", json={"prompt": "b"}).status_code == 200


def test_a_chat_template_that_does_not_end_is_an_error_of_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are answered after it, and nothing keeps the service from ending."""
    chat_template.compile_template("x")
    monkeypatch.setattr(chat_template, "RENDER_S", 0.5)
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    body = {"messages": [{"role": "user", "content": "a"}]}
    with serving(template=loop) as server, server.client() as http:
        response = http.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        assert "the chat template fails on these messages: it does not end" in response.json()["error"]["message"]
        assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
