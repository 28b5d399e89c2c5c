"""POST /v1/chat/completions: messages in, a message out."""

import time
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

from starlette.requests import Request as HttpRequest

from ptqpipe.engine.engine import Request
from ptqpipe.server.calls import Call, EventStream, collected
from ptqpipe.server.completions import Choice, usage_of
from ptqpipe.server.errors import ApiError
from ptqpipe.server.logprobs import for_chat
from ptqpipe.server.prompts import Prompts
from ptqpipe.server.schema import ChatBody


class Chat:
    """One call of the endpoint. It tokenizes. Without max_tokens the answer may fill the context."""

    def __init__(self, body: ChatBody, prompts: Prompts, model: str) -> None:
        self.body, self.model, self.names = body, model, prompts.names
        self.id, self.created = f"chatcmpl-{uuid4().hex}", int(time.time())
        tokens = prompts.chat(
            body.messages, generate=body.add_generation_prompt, extra=dict(body.chat_template_kwargs or {})
        )
        asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        if asked is None:
            asked = max(1, prompts.context - len(tokens))
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        params = body.params(max_tokens=asked, logprobs=logprobs, prompt_logprobs=None)
        self.requests = [Request(self.id, tokens, params, body.n)]
        self.choices = [Choice(tokens, "") for _ in range(body.n)]

    async def answer(self, http: HttpRequest, call: Call) -> dict[str, Any]:
        """The whole response."""
        await collected(http, call, lambda place, piece: self.choices[place].take(piece))
        choices = []
        for at, choice in enumerate(self.choices):
            logprobs = for_chat(choice.logprobs, self.names) if self.body.logprobs else None
            message = {"role": "assistant", "content": choice.text, "refusal": None}
            choices.append({"index": at, "message": message, "logprobs": logprobs, "finish_reason": choice.finish})
        return {**self._head("chat.completion"), "choices": choices, "usage": self._usage()}

    def stream(self, call: Call) -> EventStream:
        """The response as events."""
        return EventStream(call, self._events(call))

    async def _events(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        for at in range(len(self.choices)):
            yield self._event(at, {"role": "assistant", "content": ""}, None, None)
        async for place, piece in call.pieces():
            self.choices[place].take(piece)
            if piece.text or piece.finish or piece.logprobs:
                logprobs = for_chat(piece.logprobs, self.names) if self.body.logprobs else None
                yield self._event(place, {"content": piece.text} if piece.text else {}, logprobs, piece.finish)
        if self.body.usage_in_stream:
            yield {**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage()}

    def _event(
        self, at: int, delta: dict[str, Any], logprobs: dict[str, Any] | None, finish: str | None
    ) -> dict[str, Any]:
        choice = {"index": at, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
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
    asked = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if asked is not None and asked < 1:
        raise ApiError(400, f"max_tokens is {asked}, expected 1 or more", param="max_tokens")
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
