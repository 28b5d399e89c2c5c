"""Text that a model generates itself, for calibration without data: windows drawn from its own distribution.

Each window is the beginning-of-text token (where the model has one), a token drawn evenly from the vocabulary, so that
windows differ from the start, and then tokens drawn from what the model predicts, at temperature 1. A window that ends
its text goes on with what the model thinks comes next. Must not know files or statistics.

That a model's own text calibrates it about as well as real text is what LLM-QAT (Liu et al. 2023, arXiv 2305.17888)
found for quantization-aware training.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from ptqpipe.errors import NumericsError, UsageError
from ptqpipe.runtime.loading import check_length

BATCH_TOKENS = 32_768  # of windows that are written side by side, whatever their keys and values need
CACHE_BYTES = 4 << 30  # of keys and values, up to which more windows are
THREAD_WORK = 1 << 29  # multiply-adds of a step that are worth a thread: with less, threads mostly wait for each other


@torch.inference_mode()
def generate(
    model: Any,
    *,
    samples: int,
    seqlen: int,
    seed: int,
    begin: int | None,
    on_tokens: Callable[[int], None] | None = None,
) -> torch.Tensor:
    """int64 [samples, seqlen] tokens, on the CPU.

    model      a causal language model of transformers
    begin      the beginning-of-text token, None for a model without one
    on_tokens  called after every step with how many tokens it has added

    Raises UsageError for windows longer than the model's positions, NumericsError for logits that are not finite. The
    same seed and ``samples`` give the same tokens on the same machine and threads: they hang on the last bits of
    logits, and the windows of a batch take turns in drawing.
    """
    check_windows(model.config, samples=samples, seqlen=seqlen)
    generator = torch.Generator().manual_seed(seed)
    vocabulary = int(model.config.get_text_config().vocab_size)
    first = torch.randint(0, vocabulary, (samples, 1), generator=generator)
    if begin is not None:
        first = torch.cat([torch.full_like(first, begin), first], dim=1)
    report = on_tokens or (lambda count: None)
    parts = torch.split(first, rows_of(model, seqlen))
    return torch.cat([_continue(model, part, seqlen, generator, report) for part in parts])[:, :seqlen]


def check_windows(config: Any, *, samples: int, seqlen: int) -> None:
    """UsageError for windows that a model of this config cannot write."""
    if samples < 1 or seqlen < 2:
        raise UsageError(f"--samples {samples} --seqlen {seqlen}: expected 1 or more, and 2 or more")
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
    model: Any, ids: torch.Tensor, seqlen: int, generator: torch.Generator, report: Callable[[int], None]
) -> torch.Tensor:
    """``ids`` [n, t] continued to [n, seqlen], one token of every row per step; keys and values, or states, are kept.

    A model that gives no cache back (RecurrentGemma) computes all tokens again for each.
    """
    report(ids.numel())
    past, new = None, ids
    cache = "cache_params" if "cache_params" in inspect.signature(model.forward).parameters else "past_key_values"
    while ids.shape[1] < seqlen:
        out = model(new.to(model.device), use_cache=True, **{cache: past})
        past, logits = getattr(out, cache, None), out.logits[:, -1].float().cpu()
        if not bool(torch.isfinite(logits).all()):
            raise NumericsError("the model's logits are not finite; use --dtype float32, or check the model's weights")
        new = torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)
        ids = torch.cat([ids, new], dim=1)
        report(len(new))
        new = ids if past is None else new
    return ids
