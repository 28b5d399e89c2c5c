"""Text that a model generates itself, for calibration without data: windows drawn from its own distribution.

Each text is the beginning-of-text token (where the model has one), a token drawn evenly from the vocabulary, so that
texts differ from the start, or a prompt, and then tokens drawn from what the model predicts. A text that the model ends
goes on with what it thinks comes next.

That a model's own text calibrates it about as well as real text is what LLM-QAT (Liu et al. 2023, arXiv 2305.17888)
found for quantization-aware training.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ptqpipe.errors import UsageError, arg, not_finite
from ptqpipe.models.language_model import cache_name
from ptqpipe.runtime.loading import check_length

DRAWN = -1  # a token that the model is still to choose
BATCH_TOKENS = 32_768  # of windows that are written side by side, whatever their keys and values need
CACHE_BYTES = 4 << 30  # of keys and values, up to which more windows are
THREAD_WORK = 1 << 29  # multiply-adds of a step that are worth a thread: with less, threads mostly wait for each other


@dataclass(frozen=True, slots=True)
class Texts:
    """How texts differ. Windows take turns in each: the first has the first temperature and length, and so on.

    temperatures  that the model's logits are divided by
    lengths       tokens of a text; windows of short ones have several, one after another. None: a text fills a window
    prompts       tokens that texts begin with, of each at most half a text; none: a token drawn evenly
    """

    temperatures: tuple[float, ...] = (1.0,)
    lengths: tuple[int, ...] = ()
    prompts: Sequence[Sequence[int]] = ()


@torch.inference_mode()
def generate(
    model: Any,
    *,
    samples: int,
    seqlen: int,
    seed: int,
    begin: int | None,
    texts: Texts = Texts(),
    on_tokens: Callable[[int], None] | None = None,
) -> torch.Tensor:
    """int64 [samples, seqlen] tokens, on the CPU.

    model      a causal language model of transformers
    begin      the beginning-of-text token, None for a model without one
    on_tokens  called after every step with how many tokens it has added

    Raises UsageError for windows longer than the model's positions, NumericsError for logits that are not finite. The
    same seed and ``samples`` give the same tokens on the same machine and threads: they hang on the last bits of
    logits, and the texts of a batch take turns in drawing.
    """
    check_windows(model.config, samples=samples, seqlen=seqlen)
    generator = torch.Generator().manual_seed(seed)
    windows = torch.empty(samples, seqlen, dtype=torch.int64)
    heats, lengths = texts.temperatures, texts.lengths or (seqlen,)
    for number in range(len(heats) * len(lengths)):
        mine = slice(number, None, len(heats) * len(lengths))
        length, tokens = min(lengths[number // len(heats)], seqlen), windows[mine].numel()
        if not tokens:  # fewer windows than ways
            continue
        texts_begun = _beginnings(model, -(-tokens // length), length, generator, begin, texts.prompts)
        parts = [
            _continue(model, part, heats[number % len(heats)], generator, on_tokens or (lambda count: None))
            for part in torch.split(texts_begun, rows_of(model, length))
        ]
        windows[mine] = torch.cat(parts).flatten()[:tokens].view(-1, seqlen)
    return windows


def _beginnings(
    model: Any, count: int, length: int, generator: torch.Generator, begin: int | None, prompts: Sequence[Sequence[int]]
) -> torch.Tensor:
    """int64 [count, length]: what texts begin with, and DRAWN behind it."""
    tokens = torch.full((count, length), DRAWN)
    start = 0 if begin is None else 1
    if begin is not None:
        tokens[:, 0] = begin
    if not prompts:
        vocabulary = int(model.config.get_text_config().vocab_size)
        tokens[:, start : start + 1] = torch.randint(0, vocabulary, (count, 1), generator=generator)
        return tokens
    for row in tokens:
        prompt = prompts[int(torch.randint(0, len(prompts), (1,), generator=generator))]
        own = prompt[1:] if start and prompt[0] == begin else prompt  # a chat template may have written it
        own = own[: max(1, length // 2 - start)]
        row[start : start + len(own)] = torch.tensor(own)
    return tokens


def check_windows(config: Any, *, samples: int, seqlen: int) -> None:
    """UsageError for windows that a model of this config cannot write."""
    if samples < 1 or seqlen < 2:
        raise UsageError(f"{arg('samples', samples)} {arg('seqlen', seqlen)}: expected 1 or more, and 2 or more")
    check_length(config, seqlen)


def rows_of(model: Any, seqlen: int) -> int:
    """How many windows are written side by side: a step costs little more for many than for one."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or getattr(config, "num_attention_heads", None)
    width = getattr(config, "head_dim", None) or config.hidden_size // (heads or 1)
    tokens = BATCH_TOKENS
    if heads:
        tokens = max(tokens, CACHE_BYTES // (2 * heads * width * config.num_hidden_layers * model.dtype.itemsize))
    return int(max(1, tokens // seqlen))


def threads_for(model: Any, *, samples: int, seqlen: int, most: int) -> int:
    """How many of ``most`` threads a step keeps busy. Of the model and the windows alone, so that runs repeat."""
    work = min(samples, rows_of(model, seqlen)) * sum(p.numel() for p in model.parameters())
    return int(max(1, min(most, work // THREAD_WORK)))


def _continue(
    model: Any, ids: torch.Tensor, heat: float, generator: torch.Generator, report: Callable[[int], None]
) -> torch.Tensor:
    """``ids`` [n, t] with tokens for DRAWN, one of every row per step; keys and values, or states, are kept.

    A model that gives no cache back (RecurrentGemma) computes all tokens again for each.
    """
    ready = int((ids != DRAWN).sum(1).amin())
    report(ids[:, :ready].numel())
    past, new = None, ids[:, :ready]
    name = cache_name(model)
    for place in range(ready, ids.shape[1]):
        kept: dict[str, Any] = {} if name is None or past is None else {name: past}
        out = model(new.to(model.device), use_cache=True, **kept)
        past, logits = None if name is None else getattr(out, name, None), out.logits[:, -1].float().cpu() / heat
        if not bool(torch.isfinite(logits).all()):
            raise not_finite("the model's logits are not finite", out.logits.dtype)
        drawn = torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)
        ids[:, place : place + 1] = torch.where(ids[:, place : place + 1] == DRAWN, drawn, ids[:, place : place + 1])
        report(len(ids))
        new = ids[:, : place + 1] if past is None else ids[:, place : place + 1]
    return ids
