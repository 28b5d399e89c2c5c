"""The bodies of requests, as OpenAI's API defines them, and what they ask of the engine.

Fields that change the answer and that the engine does not know are refused when they are set to something that
matters; fields that do not (``user``, ``metadata``) are left alone.
"""

from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, model_validator

from ptqpipe.serving.engine import SamplingParams
from ptqpipe.serving.server.error_responses import ApiError

MOST_CHOICES = 128
_MOST_BIASES = 4096
_T = TypeVar("_T")


class _FailFast:
    """Ends at the first item of a wrong type: an error for each of a million items takes gigabytes and a minute.

    pydantic's own `FailFast` cannot be hashed, as a member of a union must be.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return {**handler(source), "fail_fast": True}


_List = Annotated[list[_T], _FailFast()]
_DEFAULT_TOKENS = 16  # OpenAI's, of /v1/completions


class StreamOptions(BaseModel):
    """``stream_options``."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    include_usage: bool = False
    """Whether the last event counts the tokens."""


class Sampling(BaseModel):
    """Sampling fields of both kinds of completion."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_left_out(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        biases = data.get("logit_bias")
        if isinstance(biases, dict) and len(biases) > _MOST_BIASES:
            raise ValueError(f"logit_bias has {len(biases)} tokens, expected at most {_MOST_BIASES}")
        return {key: value for key, value in data.items() if value is not None}

    model: str | None = None
    """Name of the model, as /v1/models lists it; without one, the model that is served."""
    n: int = 1
    """How many answers to each prompt, 1 to 128."""
    stream: bool = False
    """Whether the answer comes in pieces, as server-sent events."""
    stream_options: StreamOptions | None = None
    """What a stream tells beside its text."""
    temperature: float | None = None
    """Randomness of the answer, 0 to 2; 0 always takes the most likely token. Default 1."""
    top_p: float | None = None
    """Only the most likely tokens, up to this sum of probabilities, are drawn from; above 0, at most 1. Default 1."""
    top_k: int | None = None
    """Only this many most likely tokens are drawn from; 0 and -1 are all of them. Default 0."""
    seed: int | None = None
    """The same seed gives the same answer; without one it is drawn."""
    stop: str | _List[str] | None = None
    """Strings, at most 16, that end the answer and are no part of it."""
    stop_token_ids: _List[int] | None = None
    """Tokens that end the answer, beside the model's own."""
    min_tokens: int = 0
    """Tokens before anything may end the answer but its greatest length."""
    ignore_eos: bool = False
    """Whether the model's own end tokens do not end the answer."""
    presence_penalty: float | None = None
    """Subtracted from the logits of tokens that were generated before, -2 to 2. Default 0."""
    frequency_penalty: float | None = None
    """Subtracted from the logits of tokens for each time that they were generated before, -2 to 2. Default 0."""
    logit_bias: dict[int, float] | None = None
    """By token: what is added to its logit, -100 to 100."""
    tools: _List[Any] | None = None
    """Not supported; leave it out."""
    functions: _List[Any] | None = None
    """Not supported; leave it out."""
    response_format: dict[str, Any] | None = None
    """Only {"type": "text"} is supported."""
    suffix: str | None = None
    """Not supported; leave it out."""
    best_of: int | None = None
    """Only the value of n is supported."""
    repetition_penalty: float | None = None
    """Only 1 is supported."""
    min_p: float | None = None
    """Only 0 is supported."""

    @property
    def usage_in_stream(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self) -> None:
        """ApiError (400) for what the engine does not do."""
        undone: dict[str, bool] = {
            "tools": bool(self.tools),
            "functions": bool(self.functions),
            "response_format": self.response_format not in (None, {"type": "text"}),
            "suffix": bool(self.suffix),
            "best_of": self.best_of not in (None, self.n),
            "repetition_penalty": self.repetition_penalty not in (None, 1.0),
            "min_p": self.min_p not in (None, 0.0),
        }
        for name, value in undone.items():
            if value:
                raise ApiError(400, f"{name} is not supported by this server; leave it out", param=name)
        if not 1 <= self.n <= MOST_CHOICES:
            raise ApiError(400, f"n is {self.n}, expected 1 to {MOST_CHOICES}", param="n")

    def params(self, *, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
        """The engine's parameters. UsageError for values out of range."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=0 if self.top_k in (None, -1) else int(self.top_k or 0),
            seed=self.seed,
            stop=tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=tuple((self.logit_bias or {}).items()),
        )


class CompletionBody(Sampling):
    """POST /v1/completions. Prompts are text or tokens, one or several."""

    prompt: str | _List[int] | _List[str] | _List[_List[int]]
    """The text to continue, or its tokens; or a list of either."""
    max_tokens: int | None = None
    """Most tokens of the answer. Default 16."""
    logprobs: int | None = None
    """How many most likely tokens to report at each place with their log probabilities, 0 to 20."""
    echo: bool = False
    """Whether the answer begins with the prompt."""

    def prompts(self) -> list[str | list[int]]:
        """The prompts one by one. ApiError if there is none."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise ApiError(400, "prompt is empty; expected text or tokens", param="prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def tokens(self, room: int = _DEFAULT_TOKENS) -> int:
        """How many tokens to generate: what is asked, else OpenAI's default within the ``room`` of the context."""
        return max(1, min(_DEFAULT_TOKENS, room)) if self.max_tokens is None else self.max_tokens


class Message(BaseModel):
    """One message of a chat. Content in parts of text is joined; images are for models that take them."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    role: str
    """Who says it: system, user or assistant."""
    content: str | _List[dict[str, Any]] | None = None
    """The text, or a list of parts {"type": "text", "text": ...} and
    {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}."""

    def text(self) -> str:
        """The content as text, its parts of text joined."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part["text"] for part in self.content)


class ChatBody(Sampling):
    """POST /v1/chat/completions."""

    messages: _List[Message]
    """The chat so far, the oldest message first."""
    max_tokens: int | None = None
    """Most tokens of the answer. Default: what the context has room for."""
    max_completion_tokens: int | None = None
    """The newer name of max_tokens; where both are given, this one counts."""
    logprobs: bool = False
    """Whether to report the log probability of each token of the answer."""
    top_logprobs: int | None = None
    """How many most likely tokens to report at each place, 0 to 20; needs logprobs."""
    add_generation_prompt: bool = True
    """Whether the prompt ends with the template's beginning of an answer."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further variables of the chat template."""


class TokenizeBody(BaseModel):
    """POST /tokenize."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    prompt: str
    """The text."""
    add_special_tokens: bool = True
    """Whether the tokenizer adds its own tokens, such as one for the beginning."""
    model: str | None = None
    """Name of the model; without one, the model that is served."""


class DetokenizeBody(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    tokens: _List[int]
    """The tokens."""
    model: str | None = None
    """Name of the model; without one, the model that is served."""
