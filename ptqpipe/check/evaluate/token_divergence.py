"""Where a model diverges from its baseline: how KL spreads over tokens and positions, and the tokens that it hits most.

All of it follows from `Scores`, so it costs no further forward pass. Also the texts that two models continue from the
same beginnings. A tokenizer is a function that gives a piece of text for tokens.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ptqpipe.check.evaluate.scores import Scores, windows

FIRST, PER_DECADE, BINS = 1e-8, 4, 40  # of the histogram: from 1e-8 to 100 nats
WORST = 10
BEFORE = 24  # tokens of context that are shown with one of the worst
BEGINNING, CONTINUED = 24, 32  # tokens of a sample: read, then written by each model

Decode = Callable[[Sequence[int]], str]
"""Tokens -> their text."""


def kl_histogram(scores: Scores) -> dict[str, Any]:
    """Histogram of the tokens' KL divergences: ``counts[0]`` below ``first`` nats, then ``per_decade`` bins for each
    power of ten, then one bin for all above."""
    assert scores.kl is not None
    places = (scores.kl.double().clamp_min(FIRST / 10) / FIRST).log10().mul(PER_DECADE).floor().long() + 1
    counts = torch.bincount(places.clamp(0, BINS + 1), minlength=BINS + 2)
    return {"first": FIRST, "per_decade": PER_DECADE, "counts": counts.tolist()}


def kl_by_position(scores: Scores, count: int) -> list[dict[str, Any]]:
    """The mean KL of the tokens with so many tokens of context, 1, 2 to 3, 4 to 7 and so on.

    count  tokens of the text, scored or not
    """
    assert scores.kl is not None
    _, context = _places(scores, count)
    octaves = context.double().log2().floor().long()
    rows = []
    for octave in sorted(set(octaves.tolist())):
        kl = scores.kl[octaves == octave].double()
        error = float(kl.std() / math.sqrt(len(kl))) if len(kl) > 1 else None
        last = min(2 ** (octave + 1) - 1, int(context.max()))
        rows.append(
            {"first": 2**octave, "last": last, "tokens": len(kl), "mean": float(kl.mean()), "standard_error": error}
        )
    return rows


def worst_tokens(scores: Scores, tokens: torch.Tensor, decode: Decode) -> list[dict[str, Any]]:
    """The tokens with the largest KL, worst first: the text before, the token, what each model thought of it.

    tokens  int64 [n]: the text that was scored
    """
    assert scores.kl is not None
    assert scores.nll_reference is not None
    assert scores.top is not None
    assert scores.top_reference is not None
    index, context = _places(scores, len(tokens))
    rows = []
    for i in scores.kl.topk(min(WORST, len(scores.kl))).indices.tolist():
        place, seen = int(index[i]), int(context[i])
        rows.append(
            {
                "kl": float(scores.kl[i]),
                "context": seen,
                "before": decode(tokens[place - min(seen, BEFORE) : place].tolist()),
                "token": decode([int(tokens[place])]),
                "checkpoint": math.exp(-float(scores.nll[i])),
                "baseline": math.exp(-float(scores.nll_reference[i])),
                "checkpoint_top": decode([int(scores.top[i])]),
                "baseline_top": decode([int(scores.top_reference[i])]),
            }
        )
    return rows


def _places(scores: Scores, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [T] each: where a scored token lies in the text, and how many tokens of context it was scored from."""
    spans = windows(count, scores.window, stride=scores.stride)
    index = torch.cat([torch.arange(w.first, w.stop) for w in spans])
    start = torch.cat([torch.full((w.scored,), w.start) for w in spans])
    return index, index - start


def beginnings(tokens: torch.Tensor, samples: int) -> torch.Tensor:
    """int64 [samples, BEGINNING]: pieces of a text, spread evenly over it; fewer of a text that is too short."""
    room = len(tokens) - BEGINNING
    samples = min(samples, max(0, room + 1))
    starts = [room * i // max(1, samples) for i in range(samples)]
    return torch.stack([tokens[s : s + BEGINNING] for s in starts]) if starts else tokens.new_empty(0, BEGINNING)


@torch.inference_mode()
def continued(model: Any, beginning: torch.Tensor, *, begin: int | None = None, most: int = CONTINUED) -> torch.Tensor:
    """int64 [samples, up to most]: the most likely next tokens, one after another, by a transformers model.

    begin  the token that a text begins with, which ``beginning`` [samples, tokens] leaves out; None: none
    """
    first = beginning.new_full((len(beginning), int(begin is not None)), begin or 0)
    ids = torch.cat([first, beginning], 1).to(model.device)
    plain = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "num_beams": 1}
    generated = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, pad_token_id=0, **plain)
    written: torch.Tensor = generated[:, ids.shape[1] :].cpu()
    return written
