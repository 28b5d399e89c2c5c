"""Logits in, one token per sequence out.

Each sequence has random numbers of its own and uses one per token, so its tokens do not depend on who else is in the
batch (up to the last bits of the logits, which a different batch may round differently). The number picks from the
cumulative probabilities of the tokens that top-k and top-p leave, in descending order (in the vocabulary's where they
leave all), in float64. Computes where the logits are. Must not know models or text.
"""

from collections.abc import Sequence as Row

import torch

from ptqpipe.serving.engine.sequence import SamplingParams, Sequence, TokenLogprob

_FEW = 256  # tokens that most nuclei are within; where not, ...
_MORE = 16  # ... so many times as many, and again


def sample(logits: torch.Tensor, seqs: Row[Sequence]) -> list[int]:
    """The next token of each sequence from float32 logits [sequences, vocabulary]."""
    adjusted = _adjusted(logits, seqs)
    if adjusted.device.type == "cpu":
        best = adjusted.numpy().argmax(axis=-1).tolist()  # the first of equal ones as torch's, in a tenth of its time
    else:
        best = adjusted.argmax(dim=-1).tolist()
    return [
        best[row] if seq.params.greedy else _draw(adjusted[row], seq.params, seq.rng.random())
        for row, seq in enumerate(seqs)
    ]


def _adjusted(logits: torch.Tensor, seqs: Row[Sequence]) -> torch.Tensor:
    """Logits with penalties and biases, and without end tokens that may not come yet."""
    changed = logits
    for row, seq in enumerate(seqs):
        bans = seq.end_tokens if seq.generated < seq.params.min_tokens else frozenset()
        changes = _changes(seq)
        if not bans and not changes:
            continue
        if changed is logits:
            changed = logits.clone()
        if changes:
            tokens = torch.tensor(list(changes), device=logits.device)
            values = torch.tensor(list(changes.values()), dtype=logits.dtype, device=logits.device)
            changed[row].index_add_(0, tokens, values)
        for token in bans:
            changed[row, token] = float("-inf")
    return changed


def _changes(seq: Sequence) -> dict[int, float]:
    """Bias and penalties: token -> number added to its logit."""
    params = seq.params
    changes = dict(params.logit_bias)
    for token, count in seq.counts.items():
        penalty = params.presence_penalty + params.frequency_penalty * count
        changes[token] = changes.get(token, 0.0) - penalty
    return changes


def _draw(logits: torch.Tensor, params: SamplingParams, number: float) -> int:
    """The token that ``number`` in [0, 1) picks from logits [vocabulary]."""
    scaled = logits.double()
    scaled = (scaled - scaled.max()) / params.temperature
    log_total = torch.logsumexp(scaled, dim=-1)
    vocabulary = logits.shape[0]
    if params.top_p < 1.0 or 0 < params.top_k < vocabulary:
        probabilities, tokens = _best(scaled, log_total, params)
        before = torch.cumsum(probabilities, 0) - probabilities
        probabilities = probabilities[before < params.top_p]
    else:
        tokens = torch.arange(vocabulary, device=logits.device)
        probabilities = torch.exp(scaled - log_total)
    cumulative = torch.cumsum(probabilities, 0)
    index = int(torch.searchsorted(cumulative, number * cumulative[-1], right=True))
    return int(tokens[min(index, len(cumulative) - 1)])


def _best(scaled: torch.Tensor, log_total: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities, descending, and tokens: those that top-k leaves or, without it, as many as hold the nucleus."""
    vocabulary = scaled.shape[0]
    if 0 < params.top_k < vocabulary:
        values, tokens = torch.topk(scaled, params.top_k)
        probabilities = torch.exp(values - log_total)
        return probabilities / probabilities.sum(), tokens  # top-p is of what top-k leaves
    few = min(_FEW, vocabulary)
    while True:
        values, tokens = torch.topk(scaled, few)
        probabilities = torch.exp(values - log_total)
        if few == vocabulary or float(probabilities.sum()) >= params.top_p:
            return probabilities, tokens
        few = min(_MORE * few, vocabulary)


def logprobs_of(logits: torch.Tensor, tokens: Row[int], top: int) -> list[TokenLogprob]:
    """The log probability of each token in its row of float32 logits [n, vocabulary], and the ``top`` best ones'."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, torch.tensor(tokens, dtype=torch.int64, device=logits.device)[:, None])[:, 0].tolist()
    if top == 0:
        return [TokenLogprob(token, value) for token, value in zip(tokens, chosen, strict=True)]
    values, indices = torch.topk(logprobs, min(top, logprobs.shape[1]))
    rows = zip(tokens, chosen, indices.tolist(), values.tolist(), strict=True)
    return [TokenLogprob(token, value, tuple(zip(i, v, strict=True))) for token, value, i, v in rows]
