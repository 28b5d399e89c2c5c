"""Means over tokens with errors over windows: a cluster standard error and a seeded cluster bootstrap.

Tokens of one window are not independent, windows nearly are: an error counts windows. A mean is the ratio of two sums,
that of the values and that of the tokens, both by window.
"""

from collections.abc import Callable

import numpy as np
import torch

RESAMPLES = 2000
SEED = 0
_CHUNK = 2**22  # drawn windows in one step


def cluster_sums(values: torch.Tensor, cluster: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(sums, counts) by cluster, float64 [clusters]. ``cluster`` numbers them from 0."""
    number = int(cluster.max()) + 1
    sums = torch.zeros(number, dtype=torch.float64).index_add_(0, cluster, values.double())
    return sums.numpy(), torch.bincount(cluster, minlength=number).double().numpy()


def standard_error(sums: np.ndarray, counts: np.ndarray) -> float | None:
    """Standard error of ``sum(sums) / sum(counts)``, linearized; None for a single cluster, which has none."""
    clusters = len(sums)
    if clusters < 2:
        return None
    deviation = sums - counts * (sums.sum() / counts.sum())
    return float(np.sqrt(clusters / (clusters - 1) * (deviation**2).sum()) / counts.sum())


def resampled_means(
    sums: tuple[np.ndarray, ...], counts: np.ndarray, *, resamples: int = RESAMPLES, seed: int = SEED
) -> list[np.ndarray]:
    """Means of every column of sums over ``resamples`` draws of the clusters with replacement, the same draws for all.

    float64 [resamples] each.
    """
    generator = np.random.default_rng(seed)
    clusters = len(counts)
    step = max(1, _CHUNK // clusters)
    parts: list[list[np.ndarray]] = []
    for start in range(0, resamples, step):
        drawn = generator.integers(0, clusters, (min(step, resamples - start), clusters))
        total = counts[drawn].sum(1)
        parts.append([column[drawn].sum(1) / total for column in sums])
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


def interval(
    sums: tuple[np.ndarray, ...],
    counts: np.ndarray,
    *,
    of: Callable[..., np.ndarray] | None = None,
    level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> tuple[float, float] | None:
    """Percentile interval of a function of the means (of the only mean, without ``of``); None for a single cluster."""
    if len(counts) < 2:
        return None
    means = resampled_means(sums, counts, resamples=resamples, seed=seed)
    values = means[0] if of is None else of(*means)
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)
