"""Abs-max with underflow protection ("prevent zero"): as ``absmax``, but never below the smallest scale.

A baseline: what ModelOpt does, and the PZ rows of Schaefer and Tabak (arXiv 2605.08565).
"""

import torch

from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.search._rules import as_grid, at_least_smallest, block_amax, fitted_scale, rounded_scale

PROVEN = False


def search(
    w: torch.Tensor,
    fmt: Format,
    *,
    global_scale: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scales ``[N/bn, K/bk]`` of the rule; ``importance`` plays no part. NumericsError for NaN and inf."""
    fitted = fitted_scale(block_amax(w, fmt), fmt, global_scale=global_scale)
    return as_grid(at_least_smallest(rounded_scale(fitted, fmt), fmt), w, fmt)
