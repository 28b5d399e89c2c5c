"""A talk with a service of OpenAI's API. Knows neither engine nor model."""

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from http.client import HTTPException
from importlib import import_module
from typing import Any

from ptqpipe.errors import PtqError, UsageError, one_line

# Of the connection, and of an answer that has another form.
_FAILURES = (OSError, ValueError, HTTPException, LookupError, TypeError, AttributeError)


class Conversation:
    """What was said to a service, with or without /v1 in its URL, and answered by it. PtqError where none answers."""

    def __init__(self, url: str, *, api_key: str | None, sampling: dict[str, Any], system: str) -> None:
        self._url, self._key = url.rstrip("/").removesuffix("/v1"), api_key
        try:
            with self._open("/v1/models") as response:
                model = json.load(response)["data"][0]
            self.model, self.chats = str(model["id"]), bool(model.get("chat", True))
            self._context = int(model.get("max_model_len") or 0)
        except _FAILURES:
            raise PtqError(f"what answers at {self._url} has no model of OpenAI's API; check --url") from None
        if system and not self.chats:
            raise UsageError(f"{self.model} has no chat template, and so no place for a system prompt; leave it out")
        self._sampling = {name: value for name, value in sampling.items() if value is not None}
        self.messages = [{"role": "system", "content": system}] if system else []

    def ask(self, text: str) -> Generator[str]:
        """The answer to a message in pieces. One that is not read to its end is stopped and kept as far as it came."""
        self.messages.append({"role": "user", "content": text})
        room = self._context - len(text.encode()) - 8  # a text has no more tokens than bytes, its ends aside
        body: dict[str, Any] = {"max_tokens": room} if room > 0 and not self.chats else {}
        body |= {"stream": True, **self._sampling, **({"messages": self.messages} if self.chats else {"prompt": text})}
        said = ""
        try:
            with self._open(f"/v1/{'chat/' if self.chats else ''}completions", body) as response:
                for line in response:
                    if line.startswith(b"data: [DONE]"):
                        return
                    event = json.loads(line[6:]) if line.startswith(b"data: ") else {"choices": []}
                    if "error" in event:
                        raise PtqError(one_line(str(event["error"]["message"])))
                    for one in event["choices"]:
                        if piece := one["delta"].get("content") if self.chats else one["text"]:
                            said += piece
                            yield piece
            raise PtqError("the answer broke off: the service has closed the connection")
        except _FAILURES as error:
            raise PtqError(f"the answer broke off, or is not of OpenAI's API: {one_line(repr(error))}") from None
        finally:
            self.messages = [*self.messages, {"role": "assistant", "content": said}] if said else self.messages[:-1]

    def _open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {self._key}"} if self._key else {})
        proxies = urllib.request.ProxyHandler({} if "://127.0.0.1:" in self._url else None)
        try:
            request = urllib.request.Request(self._url + path, data, headers)
            return urllib.request.build_opener(proxies).open(request, timeout=600.0)
        except _FAILURES as error:
            if isinstance(error, urllib.error.HTTPError):  # a refusal of the service, which says why
                with suppress(*_FAILURES):
                    raise PtqError(one_line(str(json.loads(error.read())["error"]["message"]))) from None
            raise PtqError(f"no service answers at {self._url}: {one_line(str(error))}; check --url") from None


def talk(chat: Conversation, *, say: Callable[[str], None], note: Callable[[str], None]) -> None:
    """Until the end of the input, or Ctrl-C where nothing is answered. ``note`` writes a line that is no answer."""
    with suppress(ImportError):
        import_module("readline")  # gives input() its history; lines that are pasted together are one message
    note(f"{chat.model}. Ctrl-C stops an answer, Ctrl-D ends." + ("" if chat.chats else " It continues your text."))
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            text = input("> ")
            try:
                with closing(chat.ask(text)) as pieces:
                    for piece in pieces if text.strip() else ():
                        say(piece)
                say("\n")
            except KeyboardInterrupt:
                note("\nstopped; Ctrl-C once more ends the talk")
            except PtqError as error:
                note(f"Error: {error}")
