"""Perplexity and divergence from scores: a number, its error, its interval."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ptqpipe.check.evaluate.bootstrap import RESAMPLES, SEED, cluster_sums, interval, standard_error
from ptqpipe.check.evaluate.scores import Scores
from ptqpipe.errors import NumericsError, UsageError, arg

PERCENTILES = (50.0, 90.0, 99.0, 99.9)


@dataclass(frozen=True, slots=True)
class Perplexity:
    """exp of the mean negative log-likelihood per scored token.

    value, reference   perplexities
    nll, nll_reference  the means, nats per token
    difference         value - reference
    interval           95 % of the paired bootstrap of ``difference``, or of ``value`` without a reference
    """

    tokens: int
    value: float
    nll: float
    reference: float | None
    nll_reference: float | None
    difference: float | None
    interval: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Divergence:
    """KL(reference || model), nats per token.

    standard_error  over windows; None for a single window, like ``interval`` (95 %, bootstrap over windows)
    percentiles     of the tokens: "50" -> ...
    top1_agreement  fraction of tokens on which both rank the same token first
    """

    tokens: int
    mean: float
    standard_error: float | None
    interval: tuple[float, float] | None
    percentiles: Mapping[str, float]
    max: float
    top1_agreement: float


def perplexity(scores: Scores, *, resamples: int = RESAMPLES, seed: int = SEED) -> Perplexity:
    """Perplexity of scores, and its difference to the reference's. NumericsError where a model gave NaN."""
    _check_finite(scores)
    sums, counts = cluster_sums(scores.nll, scores.cluster)
    nll = float(sums.sum() / counts.sum())
    tokens = len(scores.nll)
    if scores.nll_reference is None:
        spread = interval((sums,), counts, of=np.exp, resamples=resamples, seed=seed)
        return Perplexity(tokens, float(np.exp(nll)), nll, None, None, None, spread)
    others, _ = cluster_sums(scores.nll_reference, scores.cluster)
    other = float(others.sum() / counts.sum())
    value, reference = float(np.exp(nll)), float(np.exp(other))
    spread = interval((sums, others), counts, of=lambda a, b: np.exp(a) - np.exp(b), resamples=resamples, seed=seed)
    return Perplexity(tokens, value, nll, reference, other, value - reference, spread)


def divergence(scores: Scores, *, resamples: int = RESAMPLES, seed: int = SEED) -> Divergence:
    """KL statistics of scores against a reference. UsageError without one, NumericsError where a model gave NaN."""
    if scores.kl is None or scores.agree is None:
        raise UsageError("these scores have no reference; give score() one")
    _check_finite(scores)
    sums, counts = cluster_sums(scores.kl, scores.cluster)
    levels = torch.tensor(PERCENTILES, dtype=torch.float64) / 100
    quantiles = np.quantile(scores.kl.double().numpy(), levels.numpy())
    return Divergence(
        tokens=len(scores.kl),
        mean=float(sums.sum() / counts.sum()),
        standard_error=standard_error(sums, counts),
        interval=interval((sums,), counts, resamples=resamples, seed=seed),
        percentiles={f"{p:g}": float(q) for p, q in zip(PERCENTILES, quantiles, strict=True)},
        max=float(scores.kl.max()),
        top1_agreement=float(scores.agree.double().mean()),
    )


def _check_finite(scores: Scores) -> None:
    for name, values in (("model", scores.nll), ("baseline", scores.nll_reference)):
        if values is not None and not bool(torch.isfinite(values).all()):
            where = int((~torch.isfinite(values)).nonzero()[0])
            raise NumericsError(
                f"the {name} gives no probability to scored token {where} (NaN or zero); use "
                f"{arg('dtype', 'fp32')}, or check its weights"
            )
