"""The OCP rule with round-half-up exponents: as ``ocp_floor``, but a significand of 1.75 or more counts as 2.

A baseline: what compressed-tensors and Quark ("even") write for MXFP4 and MXFP8.
"""

import torch

from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.search._rules import as_grid, block_amax, exponent_below, power_of_two_codes, top_exponent

PROVEN = False


def search(
    w: torch.Tensor,
    fmt: Format,
    *,
    global_scale: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """E8M0 codes ``[N/bn, K/bk]``; ``importance`` plays no part. FormatError for other scales."""
    amax = block_amax(w, fmt)
    bumped = torch.frexp(amax).mantissa >= 0.875  # frexp's mantissa lies in [1/2, 1)
    exponent = exponent_below(amax) + bumped - top_exponent(fmt)
    return as_grid(power_of_two_codes(exponent, fmt), w, fmt)
