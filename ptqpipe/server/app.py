"""The routes of the server. Each checks its body, makes the call, and chooses how to answer."""

import time
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.types import ASGIApp

from ptqpipe._version import __version__
from ptqpipe.engine import Service, State
from ptqpipe.server.calls import Call, EventStream
from ptqpipe.server.endpoints import Chat, Completion, check_chat, check_completion
from ptqpipe.server.errors import ApiError, install
from ptqpipe.server.guards import Guards
from ptqpipe.server.metrics import AllReduceStats, Metrics
from ptqpipe.server.prompts import Prompts
from ptqpipe.server.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Settings of the server: names, limits, access.

    names    of the model; the first one is the one that it says
    context  longest sequence in tokens
    hosts    names that a request's Host may have, beside addresses and localhost (`ptqpipe/server/guards.py`)
    """

    names: tuple[str, ...]
    context: int
    hosts: tuple[str, ...] = ()
    api_key: str | None = None
    max_body: int = 4 << 20
    chat_template: str | None = None


@dataclass(frozen=True, slots=True)
class _State:
    service: Service
    prompts: Prompts
    metrics: Metrics
    options: ServerOptions
    created: int

    def name(self, asked: str | None) -> str:
        """The model's name. ApiError (404) for another one."""
        if asked is not None and asked not in self.options.names:
            known = ", ".join(self.options.names)
            raise ApiError(
                404, f"the model {asked!r} is not served here; use {known}", param="model", code="model_not_found"
            )
        return self.options.names[0] if asked is None else asked

    def model(self, name: str) -> dict[str, Any]:
        """One entry of /v1/models."""
        entry = {"id": name, "object": "model", "created": self.created, "owned_by": "ptqpipe"}
        return {**entry, "max_model_len": self.options.context, "chat": self.prompts.chats}


def create_app(
    service: Service, tokenizer: Any, options: ServerOptions, *, all_reduce: AllReduceStats | None = None
) -> ASGIApp:
    """The application. ``tokenizer`` is transformers'; ``all_reduce`` returns what the ranks' sums cost so far."""
    metrics = Metrics(service, all_reduce=all_reduce)
    prompts = Prompts(tokenizer, context=options.context, chat_template=options.chat_template)
    state = _State(service, prompts, metrics, options, int(time.time()))
    app = FastAPI(title="ptqpipe", version=__version__, docs_url=None, redoc_url=None)
    install(app)
    _add_completions(app, state)
    _add_tokens(app, state)
    _add_operations(app, state)
    return Guards(app, hosts=options.hosts, api_key=options.api_key, max_body=options.max_body, count=metrics.http)


def _add_completions(app: FastAPI, state: _State) -> None:
    async def answer(http: Request, made: Completion | Chat, *, stream: bool) -> Any:
        call = Call(state.service, state.metrics, made.requests)
        call.submit()
        if not stream:
            return JSONResponse(await made.answer(http, call))
        return _Streaming(made.stream(call))

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, http: Request) -> Any:
        name = state.name(body.model)
        check_completion(body, most=state.service.most)
        made = await state.prompts.run(partial(Completion, body, state.prompts, name))
        return await answer(http, made, stream=body.stream)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, http: Request) -> Any:
        name = state.name(body.model)
        check_chat(body)
        made = await state.prompts.run(partial(Chat, body, state.prompts, name))
        return await answer(http, made, stream=body.stream)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [state.model(name) for name in state.options.names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return state.model(state.name(name))


class _Streaming(Response):
    """Lets an event stream through FastAPI."""

    def __init__(self, stream: EventStream) -> None:
        super().__init__()
        self._stream = stream

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._stream(scope, receive, send)


def _add_tokens(app: FastAPI, state: _State) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        state.name(body.model)
        tokens, _ = await state.prompts.run(partial(state.prompts.encode, body.prompt, special=body.add_special_tokens))
        return {"tokens": list(tokens), "count": len(tokens), "max_model_len": state.options.context}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        state.name(body.model)
        _, text = await state.prompts.run(partial(state.prompts.encode, body.tokens))
        return {"prompt": text}


def _add_operations(app: FastAPI, state: _State) -> None:
    page = files("ptqpipe.server").joinpath("page.html").read_text(encoding="utf-8")

    @app.get("/health")
    async def health() -> JSONResponse:
        service = state.service
        ready = service.state is State.READY
        body = {"status": "ok" if ready else str(service.state)} | ({"error": service.error} if service.error else {})
        return JSONResponse(body, status_code=200 if ready else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(state.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/")
    async def root() -> HTMLResponse:
        policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        return HTMLResponse(page, headers={"Content-Security-Policy": policy})
