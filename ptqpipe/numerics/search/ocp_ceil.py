"""The smallest power of two that clips nothing: scale exponent ceil(log2(amax / max)).

A baseline: what ModelOpt writes for MXFP4. For MXFP8 it is nearly always the optimum.
"""

import torch

from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.search._rules import as_grid, block_amax, exponent_below, fitted_scale, power_of_two_codes

PROVEN = False


def search(
    w: torch.Tensor,
    fmt: Format,
    *,
    global_scale: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """E8M0 codes ``[N/bn, K/bk]``; ``importance`` plays no part. FormatError for other scales."""
    fitted = fitted_scale(block_amax(w, fmt), fmt, global_scale=None)
    above = torch.frexp(fitted).mantissa > 0.5  # no power of two itself
    return as_grid(power_of_two_codes(exponent_below(fitted) + above, fmt), w, fmt)
