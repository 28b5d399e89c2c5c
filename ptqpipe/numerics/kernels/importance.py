"""Column weights of a scale search, in the form that the objective and every kernel expect."""

import math

import torch

from ptqpipe.errors import FormatError, NumericsError


def normalize_importance(importance: torch.Tensor) -> torch.Tensor:
    """float32 ``[K]``: weights times the power of two that brings the largest into [1, 2), floored at 2^-24.

    Raises NumericsError for a weight that is negative, NaN or inf, and when all are zero.
    """
    h = importance.detach().float().contiguous()
    top = h.amax()
    if not bool(torch.isfinite(h).all()) or bool((h < 0).any()) or not bool(top > 0):
        raise NumericsError("importance must be finite, non-negative and not all zero; check the statistics")
    exponent = math.frexp(float(top))[1] - 1  # a number here: a GPU's own powers of two need not be exact
    return (h.double() * 2.0**-exponent).float().clamp(min=2.0**-24)


def column_weights(importance: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """:func:`normalize_importance`, where ``w`` is; FormatError unless there is one weight for each column of it."""
    if importance.shape != (w.shape[1],):
        columns, shape = w.shape[1], list(importance.shape)
        raise FormatError(f"importance must have one weight for each of {columns} columns, got {shape}")
    return normalize_importance(importance).to(w.device)
