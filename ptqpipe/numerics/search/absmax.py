"""Abs-max: maps the largest magnitude of the block to the largest element, and rounds the scale.

A baseline. A block whose scale rounds to zero is lost, as in the plain rule of the literature; zero is no scale
to write, so such a block gets a scale so large that all its elements round to zero (0.125 for E2M1 with E4M3 scales,
which is also what compressed-tensors writes). ``absmax_pz`` keeps those blocks. Minifloat scales are rounded to
nearest; powers of two, bfloat16 and float16 up; float32 not at all.
"""

import torch

from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.search._rules import as_grid, block_amax, fitted_scale, rounded_scale

PROVEN = False


def search(
    w: torch.Tensor,
    fmt: Format,
    *,
    global_scale: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scales ``[N/bn, K/bk]`` of the abs-max rule; ``importance`` plays no part. NumericsError for NaN and inf."""
    scales = rounded_scale(fitted_scale(block_amax(w, fmt), fmt, global_scale=global_scale), fmt)
    if fmt.scale.enumerable and fmt.scale.first_scale_code > 0:
        scales = torch.where(scales == 0, flush_code(fmt), scales)
    return as_grid(scales, w, fmt)


def flush_code(fmt: Format) -> int:
    """The code at which a block whose scale rounds to zero has no element above half the smallest magnitude.

    64 times the smallest scale, or more for elements of a wider range than that; the smallest scale itself if the codec
    ends before.
    """
    wide = fmt.element.max / fmt.element.min_positive
    wanted = fmt.scale.min_positive * max(64.0, wide)
    large = (code for code, value in enumerate(fmt.scale.magnitudes) if value >= wanted)
    return next(large, fmt.scale.first_scale_code)
