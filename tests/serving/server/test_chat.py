"""Claims about `ptqpipe chat`: the service's answers, what a talk sends, Ctrl-C, and lines where something is wrong."""

import builtins
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ptqpipe.cli import main
from ptqpipe.cli.talk import Conversation, talk
from ptqpipe.errors import PtqError
from ptqpipe.serving.engine.service import Service
from tests.serving.engine.models import DEMO, PROMPTS, greedy, tokenizer
from tests.serving.server.conftest import TEMPLATE, Server, serving
from tests.serving.server.test_api import text


def right(messages: list[dict[str, str]], count: int) -> str:
    """What transformers continues the template with."""
    chat: Any = messages
    prompt = tokenizer().apply_chat_template(chat, chat_template=TEMPLATE, add_generation_prompt=True, tokenize=False)
    return text(greedy(tokenizer()(prompt, add_special_tokens=False).input_ids, count))


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def piped(question: str, *arguments: object) -> Result:
    return CliRunner().invoke(main, ["chat", *map(str, arguments)], input=question)


def begun(server: Server, system: str = "", **sampling: Any) -> Conversation:
    """A talk of short greedy answers."""
    sampling = {"temperature": 0.0, "max_tokens": 12} | sampling
    return Conversation(server.url, api_key=None, sampling=sampling, system=system)


@contextmanager
def typed(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> Iterator[None]:
    """What a person types, message by message; an error is what a key raises."""
    left = list(lines)

    def read(prompt: str = "") -> str:
        line = left.pop(0) if left else EOFError
        if isinstance(line, str):
            return line
        raise line

    with monkeypatch.context() as patched:
        patched.setattr(builtins, "input", read)
        yield
    assert left == []


def run(chat: Conversation, say: Callable[[str], None] | None = None) -> tuple[str, list[str]]:
    """(what was answered, what was noted) in a talk."""
    answered: list[str] = []
    noted: list[str] = []
    talk(chat, say=say or answered.append, note=noted.append)
    return "".join(answered), noted


def test_a_question_through_a_pipe_is_answered_by_a_service(server: Server) -> None:
    result = piped("What is a list?\n", "--url", f"{server.url}/v1", "--temperature", 0, "--max-tokens", 16)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == right([said("user", "What is a list?")], 16) + "\n"


def test_a_checkpoint_is_loaded_and_continues_a_text_where_it_has_no_template() -> None:
    result = piped(PROMPTS[0], DEMO, "--temperature", 0, "--max-tokens", 12, "--dtype", "fp32", "--workers", 1)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == text(greedy(tokenizer()(PROMPTS[0]).input_ids, 12)) + "\n"


class Other(BaseHTTPRequestHandler):
    """A server that is another's, or one that goes in the middle of an answer."""

    models: bytes
    answer = b'data: {"choices": [{"text": "Once"}]}\n\n'

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.models)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))  # a socket closed with bytes unread resets the connection
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextmanager
def other(models: bytes) -> Iterator[str]:
    """The URL of such a server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), type("_", (Other,), {"models": models})) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (b"<html>a page</html>", "has no model of OpenAI's API; check --url"),
        (b'{"data": []}', "has no model of OpenAI's API; check --url"),
        (b"[1]", "has no model of OpenAI's API"),
        (b'{"data": [{"id": "m", "chat": false}]}', "the answer broke off: the service has closed the connection"),
    ],
)
def test_another_server_and_an_answer_without_its_end_are_a_line(models: bytes, message: str) -> None:
    with other(models) as url:
        result = piped("a", "--url", url)
    assert result.exit_code == 1
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("model", [b'{"data": ["m"]}', b'{"data": [{"name": "m"}]}'])
def test_a_model_without_an_id_is_a_line(model: bytes) -> None:
    test_another_server_and_an_answer_without_its_end_are_a_line(model, "has no model of OpenAI's API; check --url")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"data: {broken\n\n", "is not of OpenAI's API: JSONDecodeError"),
        (b'data: {"object": "chat.completion.chunk"}\n\n', "is not of OpenAI's API: KeyError('choices')"),
        (b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n', "is not of OpenAI's API: KeyError('text')"),
        (b'data: {"choices": "text"}\n\n', "is not of OpenAI's API: TypeError"),
        (b'data: {"error": {"message": "no room"}}\n\n', "no room"),
        (b'data: {"error": "no room"}\n\n', "is not of OpenAI's API: TypeError"),
    ],
)
def test_an_answer_in_another_form_is_a_line(answer: bytes, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Other, "answer", answer)
    test_another_server_and_an_answer_without_its_end_are_a_line(b'{"data": [{"id": "m", "chat": false}]}', message)


def test_a_talk_sends_what_was_said_and_the_system_prompt(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    chat, system = begun(server, "Be brief."), said("system", "Be brief.")
    with typed(monkeypatch, "Hi", "", "two\nlines"):  # which were pasted
        answers, noted = run(chat)
    first = right([system, said("user", "Hi")], 12)
    second = right([system, said("user", "Hi"), said("assistant", first), said("user", "two\nlines")], 12)
    assert answers == f"{first}\n\n{second}\n"
    assert chat.messages[3:] == [said("user", "two\nlines"), said("assistant", second)]
    assert len(noted) == 1


def test_ctrl_c_stops_the_answer_and_another_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(piece: str) -> None:
        if piece.strip():
            raise KeyboardInterrupt

    with serving(slow=0.05) as server:
        chat = begun(server, max_tokens=200)
        with typed(monkeypatch, "One", KeyboardInterrupt):
            _, noted = run(chat, interrupt)
        assert noted[-1] == "\nstopped; Ctrl-C once more ends the talk"
        assert [turn["role"] for turn in chat.messages] == ["user", "assistant"]
        assert server.service.engine is not None
        until = time.monotonic() + 60
        while not server.service.engine.counters.finished:
            assert time.monotonic() < until
            time.sleep(0.02)
        assert server.service.engine.counters.finished == {"cancelled": 1}


def test_what_the_service_refuses_is_a_line_and_the_talk_goes_on(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = begun(server)
    with typed(monkeypatch, "word " * 400, "Hi"):
        answers, noted = run(chat)
    assert any("context is 256 tokens" in line for line in noted)
    assert answers == right([said("user", "Hi")], 12) + "\n"


def test_an_answer_cannot_command_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Into a pipe it goes as it is."""
    event = {"choices": [{"text": "a\x1b]0;title\x07b\x9b31m\tc\n\u202ed é"}]}
    monkeypatch.setattr(Other, "answer", f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n".encode())
    with other(b'{"data": [{"id": "m", "chat": false}]}') as url:
        command = [sys.executable, "-m", "ptqpipe", "chat", "--url", url]
        piped = subprocess.run(command, input=b"Hi", stdout=subprocess.PIPE, check=True, timeout=120).stdout
        leader, follower = os.openpty()
        subprocess.run(command, input=b"Hi", stdout=follower, check=True, timeout=120)
        os.close(follower)
        with os.fdopen(leader, "rb", buffering=0) as screen:
            shown = screen.read(1000)
    assert piped.decode() == f"{event['choices'][0]['text']}\n"
    assert shown.decode() == "a\\x1b]0;title\\x07b\\x9b31m\tc\r\n\\u202ed é\r\n"


@pytest.mark.parametrize(
    ("question", "arguments", "code", "says"),
    [
        ("a", (), 2, "name a checkpoint to load, or the --url"),
        ("a", (DEMO, "--url", "http://127.0.0.1:1"), 2, "one of them"),
        ("a", ("--url", "http://127.0.0.1:1"), 1, "no service answers at http://127.0.0.1:1: "),
        ("a", ("--url", "nonsense"), 1, "check --url"),
        ("a", ("--url", "SERVER/nowhere"), 1, "there is no GET /nowhere/v1/models here"),
        ("\n", ("--url", "SERVER"), 2, "no question on standard input"),
        ("a", ("--url", "SERVER", "--temperature", 7), 1, "temperature is 7"),
        ("a", ("nowhere",), 2, "nowhere"),
    ],
)
def test_a_wrong_call_is_one_line(
    server: Server, question: str, arguments: tuple[object, ...], code: int, says: str
) -> None:
    result = piped(question, *(str(word).replace("SERVER", server.url) for word in arguments))
    assert (result.exit_code, result.stdout) == (code, "")
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_service_that_fails_in_the_middle_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(slow=0.02) as server:
        pieces = begun(server, max_tokens=200).ask("One")
        next(pieces)
        service: Service = server.service
        service.fail("a rank died")
        with pytest.raises(PtqError, match="a rank died"):
            list(pieces)
