"""``ptqpipe chat``: a talk in the terminal with a service of OpenAI's API. Knows neither engine nor model.

A message may have several lines: pasted ones, or those between two lines of three quotation marks. Ctrl-C ends an
answer, or the talk where there is none.
"""

import json
import select
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.client import HTTPException
from typing import Any

from ptqpipe.errors import PtqError, UsageError, one_line

HELP = """/system TEXT  sets the system prompt of all further answers; alone, shows it
/reset        forgets what was said
/quit         ends, as Ctrl-D does
\"\"\"           begins and ends a message of several lines
Ctrl-C stops an answer; where there is none it ends the talk."""
_QUOTES = '"""'
_PASTE_S = 0.03  # lines that arrive this soon after another were pasted with it
_ANSWER_S = 600.0  # without a sign of life


class Conversation:
    """The messages of a chat with a service.

    url       of the service, without /v1
    api_key   what it asks for, if anything
    sampling  fields of the requests: temperature, max_tokens, ...; None are left out
    system    the system prompt, "" for none

    Raises PtqError where no service answers.
    """

    def __init__(self, url: str, *, api_key: str | None, sampling: dict[str, Any], system: str) -> None:
        self._url, self._headers = url.rstrip("/").removesuffix("/v1"), {"content-type": "application/json"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        with self._open("/v1/models") as response:
            try:
                models = json.load(response)["data"]
                if models == []:
                    raise PtqError(f"the service at {self._url} has no model to talk with; load one there")
                model = models[0]
                self.model, self.chats = str(model["id"]), bool(model.get("chat", True))
            except (ValueError, LookupError, TypeError, AttributeError, HTTPException):
                raise PtqError(f"what answers at {self._url} is no service of OpenAI's API; check --url") from None
        self._context = model.get("max_model_len")
        self._sampling = {name: value for name, value in sampling.items() if value is not None}
        self.messages: list[dict[str, str]] = []
        self.tokens, self.seconds = 0, 0.0  # of the last answer, after its first token
        self.system = ""
        if system:
            self.instruct(system)

    def instruct(self, text: str) -> None:
        """Sets the system prompt. UsageError without a chat template, which would have a place for it."""
        if not self.chats:
            raise UsageError(f"{self.model} has no chat template, and so no place for a system prompt; leave it out")
        self.system = text

    def ask(self, text: str) -> Iterator[str]:
        """The answer to a message in pieces. One that is not read to its end is stopped and kept as far as it came."""
        self.messages.append({"role": "user", "content": text})
        said, self.tokens, first = "", 0, 0.0
        try:
            with self._open(f"/v1/{'chat/' if self.chats else ''}completions", self._body(text)) as response:
                for event in _events(response):
                    tokens, pieces = _parts(event, chats=self.chats)
                    self.tokens = self.tokens if tokens is None else tokens
                    for piece in pieces:
                        first = first or time.monotonic()
                        said += piece
                        self.seconds = time.monotonic() - first
                        yield piece
        finally:
            self.messages = [*self.messages, {"role": "assistant", "content": said}] if said else self.messages[:-1]

    def _body(self, text: str) -> dict[str, Any]:
        body = {"stream": True, "stream_options": {"include_usage": True}, **self._sampling}
        if self.chats:
            system = [{"role": "system", "content": self.system}] if self.system else []
            return body | {"messages": [*system, *self.messages]}
        room = (self._context or 0) - len(text.encode()) - 8  # a text has no more tokens than bytes, its ends aside
        return {"max_tokens": room} | body | {"prompt": text} if room > 0 else body | {"prompt": text}

    def _open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The response, which is to be closed. PtqError with what the service says against it."""
        data = None if body is None else json.dumps(body).encode()
        proxies = urllib.request.ProxyHandler({} if "://127.0.0.1:" in self._url else None)
        try:
            request = urllib.request.Request(self._url + path, data, self._headers)
            return urllib.request.build_opener(proxies).open(request, timeout=_ANSWER_S)
        except urllib.error.HTTPError as error:
            raise PtqError(_reason(error)) from None
        except (OSError, ValueError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            remedy = "it may be busy, try again" if isinstance(reason, TimeoutError) else "start it, or check --url"
            raise PtqError(f"no service answers at {self._url}: {one_line(str(reason))}; {remedy}") from None


def _reason(error: urllib.error.HTTPError) -> str:
    """A service's error message for a refused request."""
    if error.code == 401:
        return f"the service refuses the key ({error.reason}); give the one it knows with --api-key"
    with error, suppress(ValueError, KeyError, TypeError):
        return one_line(str(json.load(error)["error"]["message"]))
    return f"the service answers {error.code} {error.reason}; is it one of OpenAI's API?"


def _parts(event: dict[str, Any], *, chats: bool) -> tuple[int | None, list[str]]:
    """(tokens of the answer so far, pieces of it) of an event. PtqError for one of another API."""
    try:
        pieces = [one["delta"].get("content") if chats else one["text"] for one in event["choices"]]
        return (event.get("usage") or {}).get("completion_tokens"), [str(piece) for piece in pieces if piece]
    except (LookupError, TypeError, AttributeError):
        raise PtqError(f"the answer is not of OpenAI's API: {one_line(json.dumps(event))}") from None


def _events(response: Any) -> Iterator[dict[str, Any]]:
    """The events of a stream. PtqError for one that is an error, and where the stream breaks off."""
    try:
        for line in response:
            if line.startswith(b"data: {"):
                event: dict[str, Any] = json.loads(line[6:])
                if error := event.get("error"):
                    raise PtqError(one_line(str(error.get("message", error) if isinstance(error, dict) else error)))
                yield event
            elif line.startswith(b"data: [DONE]"):
                return
    except (OSError, HTTPException) as error:
        raise PtqError(f"the answer broke off: {one_line(str(error))}") from None
    except ValueError as error:
        raise PtqError(f"the answer has a line that is no JSON: {one_line(str(error))}") from None
    raise PtqError("the answer broke off: the service has closed the connection")


def visible(text: str) -> str:
    """A text without control characters, by which it could command the terminal; lines and tabs stay."""
    return "".join(sign for sign in text if sign.isprintable() or sign in "\n\t")


class Talk:
    """A talk in the terminal.

    say   writes a piece of an answer
    note  writes a line that is no answer
    """

    def __init__(self, chat: Conversation, *, say: Callable[[str], None], note: Callable[[str], None]) -> None:
        self._chat, self._say, self._note = chat, say, note

    def run(self) -> None:
        """Until the end of the input, /quit, or Ctrl-C where nothing is answered."""
        with suppress(ImportError):
            import readline  # gives input() its history and its editing

            readline.parse_and_bind("set enable-bracketed-paste on")  # what is pasted is one message
        hint = "" if self._chat.chats else "; it has no chat template and continues your text"
        self._note(f"{self._chat.model}{hint}. /help lists the commands.")
        while (text := self._read()) is not None:
            if text.startswith("/"):
                if not self._command(*text.partition(" ")[::2]):
                    return
            elif text.strip():
                self._answer(text)

    def _read(self) -> str | None:
        """The next message; None at the end."""
        try:
            text = _with_pasted(input("> "))
            if text.strip() != _QUOTES:
                return text.rstrip("\n")
            lines = []
            while (line := input("")).strip() != _QUOTES:
                lines.append(line)
            return "\n".join(lines)
        except (EOFError, KeyboardInterrupt):
            self._say("\n")
            return None

    def _command(self, name: str, rest: str) -> bool:
        """Does what a line that begins with / asks; False ends the talk."""
        if name in ("/quit", "/exit", "/bye"):
            return False
        if name == "/help":
            self._note(HELP)
        elif name == "/reset":
            self._chat.messages = []
            self._note("What was said is forgotten.")
        elif name == "/system":
            self._instruct(rest.strip())
        else:
            self._note(f"{visible(name)} is unknown; /help lists the commands. A space in front makes it a message.")
        return True

    def _instruct(self, text: str) -> None:
        try:
            if text:
                self._chat.instruct(text)
            self._note(f"system prompt: {self._chat.system or 'none'}")
        except UsageError as error:
            self._note(str(error))

    def _answer(self, text: str) -> None:
        chat, pieces = self._chat, self._chat.ask(text)
        try:
            for piece in pieces:
                self._say(visible(piece))
            rate = f", {(chat.tokens - 1) / chat.seconds:.1f} tokens/s" if chat.tokens > 1 and chat.seconds else ""
            self._note(f"\n{chat.tokens} tokens{rate}")
        except KeyboardInterrupt:
            self._note("\nstopped; Ctrl-C once more ends the talk")
        except PtqError as error:
            self._note(f"Error: {error}")
        finally:
            pieces.close()  # type: ignore[attr-defined]  # a generator, whose end closes the connection


def _with_pasted(line: str) -> str:
    """A line, and those that were pasted with it."""
    lines = [line]
    while select.select([sys.stdin], [], [], _PASTE_S)[0]:
        try:
            lines.append(input(""))
        except EOFError:  # to be read again
            break
    return "\n".join(lines)


def answer_once(chat: Conversation, text: str, say: Callable[[str], None]) -> None:
    """Answers one message. UsageError for an empty one."""
    if not text.strip():
        raise UsageError("there is no question on standard input; pipe one in, or run it in a terminal")
    for piece in chat.ask(text.rstrip("\n")):
        say(piece)
    say("\n")
