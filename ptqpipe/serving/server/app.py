"""The routes of the server. Each checks its body, makes the call, and chooses how to answer."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp

from ptqpipe._version import __version__
from ptqpipe.serving.engine import Service, State
from ptqpipe.serving.server.endpoints import Chat, Completion, check_chat, check_completion
from ptqpipe.serving.server.error_responses import ApiError, install
from ptqpipe.serving.server.guards import Guards
from ptqpipe.serving.server.metrics import AllReduceStats, Metrics
from ptqpipe.serving.server.pages import add_pages
from ptqpipe.serving.server.prompts import Prompts
from ptqpipe.serving.server.requests import Call
from ptqpipe.serving.server.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Settings of the server: names, limits, access.

    names    of the model; the first one is the one that it says
    context  longest sequence in tokens
    hosts    names that a request's Host may have, beside addresses and localhost (`ptqpipe/serving/server/guards.py`)
    media    folder of the files that messages may name as images
    """

    names: tuple[str, ...]
    context: int
    hosts: tuple[str, ...] = ()
    api_key: str | None = None
    max_body: int = 4 << 20
    chat_template: str | None = None
    media: Path | None = None


@dataclass(frozen=True, slots=True)
class _Served:
    service: Service
    prompts: Prompts
    metrics: Metrics
    options: ServerOptions
    created: int
    details: Callable[[], Mapping[str, Any]]

    def name(self, requested: str | None) -> str:
        """The model's name. ApiError (404) for another one."""
        if requested is not None and requested not in self.options.names:
            names = ", ".join(self.options.names)
            raise ApiError(
                404, f"the model {requested!r} is not served here; use {names}", param="model", code="model_not_found"
            )
        return self.options.names[0] if requested is None else requested

    def model(self, name: str) -> dict[str, Any]:
        """One entry of /v1/models."""
        entry = {"id": name, "object": "model", "created": self.created, "owned_by": "ptqpipe"}
        own = {"max_model_len": self.options.context, "chat": self.prompts.chats, "details": self.details()}
        return {**entry, **own}


def create_app(
    service: Service,
    tokenizer: Any,
    options: ServerOptions,
    *,
    processor: Any = "this model takes no images",
    all_reduce: AllReduceStats | None = None,
    details: Callable[[], Mapping[str, Any]] = dict,
) -> ASGIApp:
    """The application.

    tokenizer   transformers'
    processor   the model's for images, or why there is none (`Prompts`)
    all_reduce  returns what the ranks' sums cost so far
    details     returns what /v1/models tells about the model beside OpenAI's fields, as JSON
    """
    metrics = Metrics(service, options.names[0], all_reduce=all_reduce)
    prompts = Prompts(
        tokenizer,
        context=options.context,
        chat_template=options.chat_template,
        processor=processor,
        media=options.media,
    )
    state = _Served(service, prompts, metrics, options, int(time.time()), details)
    app = FastAPI(
        title=f"ptqpipe serves {options.names[0]}",
        description='OpenAI\'s API for one model. Errors are {"error": {"message", "type", "param", "code"}}.',
        version=__version__,
        docs_url=None,
        redoc_url=None,
    )
    install(app)
    _add_completions(app, state)
    _add_tokens(app, state)
    _add_operations(app, state)
    add_pages(app)
    return Guards(app, hosts=options.hosts, api_key=options.api_key, max_body=options.max_body, count=metrics.http)


def _add_completions(app: FastAPI, state: _Served) -> None:
    async def answer(http: Request, reply: Completion | Chat, *, stream: bool) -> Any:
        call = Call(state.service, state.metrics, reply.requests)
        call.submit()
        if not stream:
            return JSONResponse(await reply.answer(http, call))
        return reply.stream(call)

    @app.post("/v1/completions", tags=["generation"], summary="Continue a text")
    async def completions(body: CompletionBody, http: Request) -> Any:
        """One or several texts, or token ids; ``stream`` sends each piece as it is reply."""
        name = state.name(body.model)
        check_completion(body, most=state.service.most)
        completion = await state.prompts.run(partial(Completion, body, state.prompts, name))
        return await answer(http, completion, stream=body.stream)

    @app.post("/v1/chat/completions", tags=["generation"], summary="Answer a chat")
    async def chat(body: ChatBody, http: Request) -> Any:
        """Needs a model with a chat template; ``stream`` sends each piece as it is reply."""
        name = state.name(body.model)
        check_chat(body)
        chat_answer = await state.prompts.run(partial(Chat, body, state.prompts, name))
        return await answer(http, chat_answer, stream=body.stream)

    @app.get("/v1/models", tags=["model"], summary="The model that is served")
    async def models() -> dict[str, Any]:
        """An entry for each of its names, with its context, formats and memory."""
        return {"object": "list", "data": [state.model(name) for name in state.options.names]}

    @app.get("/v1/models/{name:path}", tags=["model"], summary="One entry of /v1/models")
    async def model(name: str) -> dict[str, Any]:
        """404 for a name that is not served here."""
        return state.model(state.name(name))


def _add_tokens(app: FastAPI, state: _Served) -> None:
    @app.post("/tokenize", tags=["tokens"], summary="The tokens of a text")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        """Their ids, their number, and how many the model takes at most."""
        state.name(body.model)
        tokens, _ = await state.prompts.run(partial(state.prompts.encode, body.prompt, special=body.add_special_tokens))
        return {"tokens": list(tokens), "count": len(tokens), "max_model_len": state.options.context}

    @app.post("/detokenize", tags=["tokens"], summary="The text of tokens")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        """Special ones are included."""
        state.name(body.model)
        _, text = await state.prompts.run(partial(state.prompts.encode, body.tokens))
        return {"prompt": text}


def _add_operations(app: FastAPI, state: _Served) -> None:
    @app.get("/health", tags=["operation"], summary="Whether requests are taken")
    async def health() -> JSONResponse:
        """200, or 503 with the reason."""
        service = state.service
        ready = service.state is State.READY
        body = {"status": "ok" if ready else str(service.state)} | ({"error": service.error} if service.error else {})
        return JSONResponse(body, status_code=200 if ready else 503)

    @app.get("/metrics", tags=["operation"], summary="Counters, times and load")
    async def metrics() -> Response:
        """In Prometheus' format, under vLLM's names where they mean the same."""
        return Response(state.metrics.text(), media_type=CONTENT_TYPE_LATEST)
