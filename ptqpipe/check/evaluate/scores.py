"""Scores of every token of a text: by one model, or by two on the same tokens.

The protocol. Tokens are cut into windows of ``window`` that begin every ``stride`` tokens. In each window a token is
scored from the tokens before it in that window, and only if no earlier window has scored it: with ``stride`` equal to
``window`` all but a window's first token are, with a smaller one every token but the first of the text, from at least
``window - stride`` tokens of context. Where the model's tokenizer puts a beginning-of-text token before every text,
the model reads it in the place of each window's first token, as llama.cpp's perplexity does: without it a model like
Gemma predicts badly. Windows go through the model in batches of a fixed rule, since the batch size
moves the last bits of float32 logits. Logits become float32 before the softmax; nothing of the size of a vocabulary
outlives its batch.

Logits come from a model, or from a store of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ptqpipe.calibration.rows import begun
from ptqpipe.errors import UsageError

BATCH_TOKENS = 4096
BATCH_LOGITS = 2**27  # numbers: 512 MiB of float32
CHUNK_LOGITS = 2**24  # numbers in one step of softmax
_COLUMNS = (torch.float32, torch.float32, torch.float32, torch.bool, torch.int64, torch.int64)  # of `_measure`


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens ``[start, stop)`` of a text, of which those in ``[first, stop)`` are scored.

    begin  what the model reads in the place of the first token; None: that token
    """

    start: int
    stop: int
    first: int
    begin: int | None = None

    @property
    def scored(self) -> int:
        return self.stop - self.first


Logits = Callable[[Sequence[Window], torch.Tensor], torch.Tensor]
"""(windows of a batch, tokens of the text) -> logits ``[scored tokens of the batch, vocabulary]``, any float dtype."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of T tokens in C windows. Tensors are on the CPU.

    window, stride  the protocol
    cluster         int64 [T]: the window of each token, what intervals resample
    nll             float32 [T]: -log p of each token, nats
    nll_reference   float32 [T] or None: the same of the reference
    kl              float32 [T] or None: KL(reference || model) of the distributions that predict the token, nats
    agree           bool [T] or None: whether the two most likely tokens are one
    top, top_reference  int64 [T] or None: the most likely token of each model
    """

    window: int
    stride: int
    cluster: torch.Tensor
    nll: torch.Tensor
    nll_reference: torch.Tensor | None = None
    kl: torch.Tensor | None = None
    agree: torch.Tensor | None = None
    top: torch.Tensor | None = None
    top_reference: torch.Tensor | None = None


def windows(count: int, window: int, *, stride: int | None = None, begin: int | None = None) -> list[Window]:
    """The windows of ``count`` tokens, each of which begins with the token ``begin``, if there is one.

    UsageError for a window below 2 or a stride outside [1, window].
    """
    stride = window if stride is None else stride
    if window < 2 or not 1 <= stride <= window:
        raise UsageError(f"window {window} and stride {stride}: expected a window of 2 or more and 1 <= stride <= it")
    spans: list[Window] = []
    end = 0
    for start in range(0, count, stride):
        stop = min(start + window, count)
        first = max(end, start + 1)
        if first < stop:
            spans.append(Window(start, stop, first, begin))
        end = stop
        if stop == count:
            break
    return spans


def batches(spans: Sequence[Window], *, vocabulary: int) -> Iterator[list[Window]]:
    """Windows in batches of one length each: as many as fit ``BATCH_TOKENS`` and ``BATCH_LOGITS``, at least one."""
    batch: list[Window] = []
    for window in spans:
        length = window.stop - window.start
        most = max(1, min(BATCH_TOKENS, BATCH_LOGITS // vocabulary) // length)
        if batch and (len(batch) >= most or batch[0].stop - batch[0].start != length):
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


def vocabulary_of(model: Any) -> int | None:
    """Width of the logits of a model or a store of logits (its ``vocabulary``), None where it is unknown."""
    if not isinstance(model, torch.nn.Module):
        width: int | None = getattr(model, "vocabulary", None)
        return width
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    return int(model.config.get_text_config().vocab_size if head is None else head.weight.shape[0])  # type: ignore[union-attr, operator]


@torch.inference_mode()
def model_logits(model: Any, batch: Sequence[Window], tokens: torch.Tensor, /) -> torch.Tensor:
    ids = begun(torch.stack([tokens[window.start : window.stop] for window in batch]), batch[0].begin)
    logits = model(ids.to(model.device), use_cache=False).logits
    parts = [
        logits[row, window.first - 1 - window.start : window.stop - 1 - window.start]
        for row, window in enumerate(batch)
    ]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).cpu()


def score(
    model: Any,
    tokens: torch.Tensor,
    *,
    window: int,
    stride: int | None = None,
    begin: int | None = None,
    reference: Any | None = None,
    on_batch: Callable[[int], None] | None = None,
) -> Scores:
    """Scores ``tokens`` (int64 [n]) with a model, and against a reference on the same windows.

    model      a transformers model, or a `Logits`
    begin      the token that every window begins with, of tokenizers that put one before a text (`rows.begin_token`)
    reference  the same; KL and agreement are measured against it
    on_batch   is called after each batch with the number of its tokens that were scored

    UsageError for tokens outside the vocabulary, too few tokens, or a reference with another vocabulary.
    """
    stride = window if stride is None else stride
    spans = windows(int(tokens.numel()), window, stride=stride, begin=begin)
    if not spans:
        raise UsageError(f"{tokens.numel()} tokens are too few to score; expected 2 or more")
    vocabulary = _checked_vocabulary(model, reference, tokens)
    give, compare = _logits_of(model), None if reference is None else _logits_of(reference)
    # Made once: small tensors that outlive their batch would lie between the large ones that come and go, and keep the
    # heap from reusing their place.
    count = sum(w.scored for w in spans)
    columns = [torch.empty(count, dtype=dtype) for dtype in _COLUMNS[: 1 if compare is None else None]]
    cluster, done = torch.empty(count, dtype=torch.int64), 0
    number = iter(range(len(spans)))
    for batch in batches(spans, vocabulary=vocabulary):
        targets = torch.cat([tokens[w.first : w.stop] for w in batch])
        logits = give(batch, tokens)
        other = None if compare is None else compare(batch, tokens)
        if other is not None and other.shape != logits.shape:
            raise UsageError(
                f"the baseline has a vocabulary of {other.shape[-1]}, the model one of {logits.shape[-1]}; only "
                "models with one vocabulary can be compared"
            )
        for column, part in zip(columns, _measure(logits, other, targets), strict=True):
            column[done : done + len(targets)] = part
        for one in batch:
            cluster[done : done + one.scored] = next(number)
            done += one.scored
        if on_batch is not None:
            on_batch(len(targets))
    return Scores(window, stride, cluster, *columns)


def _logits_of(model: Any) -> Logits:
    """A model's logits; a `Logits` as it is."""
    give: Logits = partial(model_logits, model) if isinstance(model, torch.nn.Module) else model
    return give


def _checked_vocabulary(model: Any, reference: Any, tokens: torch.Tensor) -> int:
    """The width of the logits; tokens must be below it, and two models must share it."""
    sizes = [size for m in (model, reference) if (size := vocabulary_of(m)) is not None]
    if len(set(sizes)) > 1:
        raise UsageError(
            f"the baseline has a vocabulary of {sizes[1]}, the model one of {sizes[0]}; only models with one "
            "vocabulary can be compared"
        )
    low, high = int(tokens.min()), int(tokens.max())
    if sizes and not 0 <= low <= high < sizes[0]:
        bad = low if low < 0 else high
        raise UsageError(
            f"token {bad} is outside the model's vocabulary of {sizes[0]}; use text and tokenizer of this model"
        )
    return sizes[0] if sizes else high + 1


def _measure(logits: torch.Tensor, reference: torch.Tensor | None, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """nll, and with a reference its nll, the KL divergence and the agreement, [rows] each; in steps of rows."""
    step = max(1, CHUNK_LOGITS // logits.shape[1])
    parts = []
    for start in range(0, len(logits), step):
        logp = logits[start : start + step].float().log_softmax(-1)
        wanted = targets[start : start + step, None]
        row = [-logp.gather(1, wanted)[:, 0]]
        if reference is not None:
            other = reference[start : start + step].float().log_softmax(-1)
            row.append(-other.gather(1, wanted)[:, 0])
            row.append((other.exp() * (other - logp)).sum(-1))
            top, top_reference = logp.argmax(-1), other.argmax(-1)
            row += [top == top_reference, top, top_reference]
        parts.append(row)
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))
