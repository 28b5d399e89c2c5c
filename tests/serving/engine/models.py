"""Models and oracles of the engine's tests: transformers' own `generate` says what is right."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ptqpipe.numerics.kernels import cpu_library, cpu_linear
from ptqpipe.runtime import load_model
from ptqpipe.serving.engine.batch import Batch, Span
from ptqpipe.serving.engine.engine import Engine, EngineOptions, Request, TokenOutput
from ptqpipe.serving.engine.model_runner import ModelRunner
from ptqpipe.serving.engine.sequence import SamplingParams

DEMO = Path(__file__).resolve().parents[3] / "ptqpipe" / "demo_model"
PROMPTS = (
    "Return the current value of",
    "def",
    "The module defines a class that is used for everything in the world and more. " * 3,
    "A list of " * 20,
    "Raises an error when the file",
)


def has_panels() -> bool:
    """Whether this machine multiplies bfloat16 in panels, any number of rows."""
    return cpu_linear.Bf16Panels.fastest()


def has_kernels(run: ModelRunner) -> list[bool]:
    """Of each layer, whether its forward is not transformers'."""
    return ["forward" in vars(layer) for layer in run.model.model.layers]


def steps(run: ModelRunner) -> list[torch.Tensor]:
    """Logits of three sequences: their prompts, then single tokens of all, over the edge of a page, and of two."""
    lengths, g = [3, 9, 6], torch.Generator().manual_seed(3)
    pages = [tuple(range(4 * i, 4 * i + 4)) for i in range(3)]
    found = []
    for counts in (lengths, [1, 1, 1], [1, 1, 1], [1, 0, 1], [1, 1, 2]):
        spans = []
        for i, count in enumerate(counts):
            lengths[i] += count if counts is not lengths else 0
            if count:
                spans.append(Span(count, lengths[i], pages[i][: -(-lengths[i] // run.block_size)]))
        tokens = torch.randint(3, 96, (sum(counts),), generator=g)
        found.append(run.run(Batch(tokens, torch.arange(len(tokens)), tuple(spans))))
    return found


def has_one_order() -> bool:
    """Whether on this machine a token's result can be the same bits whatever else is computed: attention, too."""
    return has_panels() and cpu_library.multiplies_bf16()


@cache
def reference(path: Path = DEMO) -> Any:
    """transformers' model in float32."""
    return load_model(path)


def own_tokenizer(path: Path = DEMO) -> Any:
    """The model's, for a test that changes it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


@cache
def tokenizer(path: Path = DEMO) -> Any:
    """The model's, one for all tests."""
    return own_tokenizer(path)


@cache
def runner(path: Path = DEMO, *, max_len: int = 256, max_bytes: int = 1 << 28, block_size: int = 16) -> ModelRunner:
    """A model of its own for the engine, whose attention it changes."""
    return ModelRunner(load_model(path), EngineOptions(max_bytes, max_len, 16, block_size))


def engine(
    run: ModelRunner | None = None,
    *,
    max_len: int = 256,
    max_seqs: int = 8,
    max_batch_tokens: int = 512,
    prefix_caching: bool = True,
    end_tokens: Sequence[int] = (),
    tokens: Any = None,
) -> Engine:
    """An engine on a runner (the demo model's)."""
    run = run or runner()
    limits = replace(
        run.options,
        max_len=max_len,
        max_seqs=max_seqs,
        max_batch_tokens=max_batch_tokens,
        prefix_caching=prefix_caching,
    )
    vocabulary = run.config.vocab_size
    return Engine(run, tokens or tokenizer(), options=limits, vocabulary=vocabulary, end_tokens=end_tokens)


def encoded(prompts: Sequence[str] = PROMPTS, path: Path = DEMO) -> list[tuple[int, ...]]:
    """The prompts' tokens."""
    return [tuple(tokenizer(path)(prompt).input_ids) for prompt in prompts]


def greedy(prompt: Sequence[int], count: int, *, path: Path = DEMO) -> list[int]:
    """What transformers generates."""
    return list(_greedy(tuple(prompt), count, path))


@cache
def _greedy(prompt: tuple[int, ...], count: int, path: Path) -> list[int]:
    return greedy_of(reference(path), prompt, count)


def greedy_of(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """What a model of transformers generates."""
    ids = torch.tensor([list(prompt)])
    mask = torch.ones_like(ids)  # without it a token 0 is taken for padding
    out = model.generate(
        ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0,
        eos_token_id=None,
    )  # fmt: skip
    return [int(token) for token in out[0, len(prompt) :]]


def ask(prompt: Sequence[int], count: int = 24, *, name: str = "a", n: int = 1, **params: Any) -> Request:
    """A greedy request unless ``params`` say otherwise."""
    return Request(name, tuple(prompt), SamplingParams(**{"max_tokens": count, "temperature": 0.0, **params}), n)


def run_all(engine: Engine) -> list[TokenOutput]:
    """All pieces until nothing is left to do."""
    pieces = []
    while engine.busy:
        pieces += engine.step()
    return pieces


def text_of(pieces: Sequence[TokenOutput], name: str = "a", index: int = 0) -> str:
    """The text of one sequence."""
    return "".join(piece.text for piece in pieces if (piece.request, piece.index) == (name, index))


def tokens_of(pieces: Sequence[TokenOutput], name: str = "a", index: int = 0) -> list[int]:
    """The tokens of one sequence."""
    return [token for piece in pieces if (piece.request, piece.index) == (name, index) for token in piece.tokens]


def generate(engine: Engine, requests: Sequence[Request]) -> dict[str, list[list[int]]]:
    """The generated tokens of each request's sequences, computed together."""
    tokens: dict[str, list[list[int]]] = {request.id: [[] for _ in range(request.n)] for request in requests}
    for request in requests:
        engine.add(request)
    while engine.busy:
        for piece in engine.step():
            tokens[piece.request][piece.index] += piece.tokens
    return tokens
