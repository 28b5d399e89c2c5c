"""Text that a model writes itself, to calibrate on where there is no data: windows drawn from its own distribution.

Each window is the beginning-of-text token (where the model has one), a token drawn evenly from the vocabulary, so that
windows differ from the start, and then tokens drawn from what the model predicts, at temperature 1. A window that ends
its text goes on with what the model thinks comes next. Must not know files or statistics.

That a model's own text calibrates it about as well as real text is what LLM-QAT (Liu et al. 2023, arXiv 2305.17888)
found for quantization-aware training.
"""

from typing import Any

import torch

from ptqpipe.errors import NumericsError, UsageError

BATCH_TOKENS = 32_768  # of windows that are written side by side, at most


@torch.inference_mode()
def generate(model: Any, *, samples: int, seqlen: int, seed: int, begin: int | None) -> torch.Tensor:
    """int64 [samples, seqlen] tokens, on the CPU.

    model  a causal language model of transformers
    begin  the beginning-of-text token, None for a model without one

    Raises UsageError for windows longer than the model's positions, NumericsError for logits that are not finite. The
    same seed gives the same tokens on the same machine and threads: they hang on the last bits of logits.
    """
    if samples < 1 or seqlen < 2:
        raise UsageError(f"--samples {samples} --seqlen {seqlen}: expected 1 or more, and 2 or more")
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and seqlen > positions:
        raise UsageError(
            f"--seqlen {seqlen} is more than the model's {positions} positions; choose {positions} or less"
        )
    generator = torch.Generator().manual_seed(seed)
    vocabulary = int(model.config.get_text_config().vocab_size)
    first = torch.randint(0, vocabulary, (samples, 1), generator=generator)
    if begin is not None:
        first = torch.cat([torch.full_like(first, begin), first], dim=1)
    rows = max(1, BATCH_TOKENS // seqlen)
    return torch.cat([_continue(model, part, seqlen, generator) for part in torch.split(first, rows)])[:, :seqlen]


def _continue(model: Any, ids: torch.Tensor, seqlen: int, generator: torch.Generator) -> torch.Tensor:
    """``ids`` [n, t] continued to [n, seqlen]."""
    past, new = None, ids
    while ids.shape[1] < seqlen:
        out = model(new.to(model.device), past_key_values=past, use_cache=True)
        past, logits = out.past_key_values, out.logits[:, -1].float().cpu()
        if not bool(torch.isfinite(logits).all()):
            raise NumericsError("the model's logits are not finite; use --dtype float32, or check the model's weights")
        new = torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)
        ids = torch.cat([ids, new], dim=1)
    return ids
