"""The OCP rule: scale exponent floor(log2 amax) - emax, emax being the exponent of the largest element.

A baseline (OCP MX v1.0, section 6.3). The largest magnitude lands in [2^emax, 2^(emax+1)), and is clipped where the
element codec ends before that: 6 of [4, 8) for E2M1.
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
    exponent = exponent_below(block_amax(w, fmt)) - top_exponent(fmt)
    return as_grid(power_of_two_codes(exponent, fmt), w, fmt)
