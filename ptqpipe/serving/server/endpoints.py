"""The two endpoints that generate.

POST /v1/completions       text or tokens in, text out, with ``echo`` and log probabilities of the prompt if asked
POST /v1/chat/completions  messages in, a message out
"""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from starlette.requests import Request as HttpRequest

from ptqpipe.serving.engine import Request, TokenLogprob, TokenOutput
from ptqpipe.serving.server.error_responses import ApiError
from ptqpipe.serving.server.logprobs import for_chat, for_completion
from ptqpipe.serving.server.prompts import Prompts
from ptqpipe.serving.server.requests import Call, EventStream, collected
from ptqpipe.serving.server.schema import ChatBody, CompletionBody


@dataclass(slots=True)
class AnswerChoice:
    """One choice as it grows. ``prompt``: its tokens and text, which come first with ``echo``."""

    prompt: tuple[int, ...]
    prompt_text: str
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    cached: int = 0
    finish: str | None = None
    named: int = 0  # characters of the names of the tokens whose log probabilities are out

    def take(self, piece: TokenOutput) -> None:
        self.text += piece.text
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.cached = max(self.cached, piece.cached)
        self.prompt_logprobs = piece.prompt_logprobs or self.prompt_logprobs
        self.finish = piece.finish or self.finish


class Completion:
    """One call of /v1/completions. It tokenizes."""

    def __init__(self, body: CompletionBody, prompts: Prompts, model: str) -> None:
        self.body, self.model, self.names = body, model, prompts.names
        self.id, self.created = f"cmpl-{uuid4().hex}", int(time.time())
        wants = body.logprobs is not None
        encoded = [prompts.encode(prompt) for prompt in body.prompts()]
        self.requests = []
        for index, (tokens, _) in enumerate(encoded):
            params = body.params(
                max_tokens=body.tokens(prompts.context - len(tokens)),
                logprobs=body.logprobs,
                prompt_logprobs=body.logprobs if wants and body.echo else None,
            )
            self.requests.append(Request(f"{self.id}-{index}", tokens, params, body.n))
        self.choices = [AnswerChoice(tokens, text) for tokens, text in encoded for _ in range(body.n)]

    async def answer(self, http: HttpRequest, call: Call) -> dict[str, Any]:
        await collected(http, call, lambda place, piece: self.choices[place].take(piece))
        choices = [self._choice(index, choice) for index, choice in enumerate(self.choices)]
        return {**self._head(), "choices": choices, "usage": self._usage()}

    def stream(self, call: Call) -> EventStream:
        """The response as events."""
        return EventStream(call, self._events(call))

    async def _events(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        usage = {"usage": None} if self.body.usage_in_stream else {}
        async for place, piece in call.pieces():
            choice = self.choices[place]
            first = not choice.tokens and choice.finish is None
            choice.take(piece)
            part = AnswerChoice(choice.prompt, choice.prompt_text)
            part.take(piece)
            if part.text or part.tokens or part.finish:
                part.named = choice.named
                part_choice = self._choice(place, part, echo=self.body.echo and first)
                choice.named = part.named
                yield {**self._head(), "choices": [part_choice], **usage}
        if self.body.usage_in_stream:
            yield {**self._head(), "choices": [], "usage": self._usage()}

    def _choice(self, index: int, choice: AnswerChoice, *, echo: bool | None = None) -> dict[str, Any]:
        """One choice, or a part of one that begins ``named`` characters after the beginning."""
        echo = self.body.echo if echo is None else echo
        logprobs = None
        if self.body.logprobs is not None:
            entries = (*(choice.prompt_logprobs if echo else ()), *choice.logprobs)
            tokens = (*(choice.prompt if echo else ()), *choice.tokens)
            start = choice.named + (0 if self.body.echo else len(choice.prompt_text))
            logprobs = for_completion(entries, tokens[: len(entries)], self.names, offset=start)
            choice.named += sum(len(name) for name in logprobs["tokens"])
        text = (choice.prompt_text if echo else "") + choice.text
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish}

    def _head(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}

    def _usage(self) -> dict[str, Any]:
        prompt = sum(len(request.prompt) for request in self.requests)
        cached = sum(choice.cached for choice in self.choices[:: self.body.n])  # the first of each prompt's choices
        return usage_of(prompt, sum(len(x.tokens) for x in self.choices), cached)


def usage_of(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """The usage of a call, in tokens."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": min(cached, prompt)},
    }


def check_completion(body: CompletionBody, *, most: int) -> None:
    """ApiError for what cannot be asked together. ``most``: sequences that the server takes at once; 0 is unknown."""
    body.check()
    if body.tokens() == 0 and not body.echo:
        raise ApiError(400, "max_tokens is 0 without echo: nothing would be returned", param="max_tokens")
    if body.tokens() < 0:
        raise ApiError(400, f"max_tokens is {body.tokens()}, expected 0 or more", param="max_tokens")
    count = len(body.prompts())
    if most and count * body.n > most:
        raise ApiError(
            400,
            f"{count} prompts with n {body.n} are {count * body.n} sequences; this server takes {most} at once, send "
            "them in several requests",
            param="prompt",
        )


class Chat:
    """One call of /v1/chat/completions. It tokenizes. Without max_tokens the answer may fill the context."""

    def __init__(self, body: ChatBody, prompts: Prompts, model: str) -> None:
        self.body, self.model, self.names = body, model, prompts.names
        self.id, self.created = f"chatcmpl-{uuid4().hex}", int(time.time())
        tokens, images = prompts.chat(
            body.messages, generate=body.add_generation_prompt, extra=dict(body.chat_template_kwargs or {})
        )
        max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        if max_tokens is None:
            max_tokens = max(1, prompts.context - len(tokens))
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        params = body.params(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=None)
        self.requests = [Request(self.id, tokens, params, body.n, images)]
        self.choices = [AnswerChoice(tokens, "") for _ in range(body.n)]

    async def answer(self, http: HttpRequest, call: Call) -> dict[str, Any]:
        await collected(http, call, lambda place, piece: self.choices[place].take(piece))
        choices = []
        for index, choice in enumerate(self.choices):
            logprobs = for_chat(choice.logprobs, self.names) if self.body.logprobs else None
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            choices.append({"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish})
        return {**self._head("chat.completion"), "choices": choices, "usage": self._usage()}

    def stream(self, call: Call) -> EventStream:
        """The response as events."""
        return EventStream(call, self._events(call))

    async def _events(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        for index in range(len(self.choices)):
            yield self._event(index, {"role": "assistant", "content": ""}, None, None)
        async for place, piece in call.pieces():
            self.choices[place].take(piece)
            if piece.text or piece.finish or piece.logprobs:
                logprobs = for_chat(piece.logprobs, self.names) if self.body.logprobs else None
                yield self._event(place, {"content": piece.text} if piece.text else {}, logprobs, piece.finish)
        if self.body.usage_in_stream:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage()}

    def _event(
        self, index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish: str | None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        usage = {"usage": None} if self.body.usage_in_stream else {}
        return {**self._head("chat.completion.chunk"), "choices": [choice], **usage}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _usage(self) -> dict[str, Any]:
        generated = sum(len(choice.tokens) for choice in self.choices)
        return usage_of(len(self.requests[0].prompt), generated, self.choices[0].cached)


def check_chat(body: ChatBody) -> None:
    """ApiError for what cannot be asked together."""
    body.check()
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if max_tokens is not None and max_tokens < 1:
        raise ApiError(400, f"max_tokens is {max_tokens}, expected 1 or more", param="max_tokens")
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
