"""Four over six: per block, maps the largest magnitude to 6 or to 4, whichever has the smaller squared error.

A baseline (arXiv 2512.02010): two abs-max scales, amax/6 and 1.5 times that, both rounded to nearest and kept from
underflow; 4 wins only where it is strictly better.
"""

import torch

from ptqpipe.errors import FormatError
from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.search._rules import as_grid, at_least_smallest, fitted_scale, rounded_scale
from ptqpipe.numerics.search.objective import importance_blocks, magnitude_blocks, scores

PROVEN = False


def search(
    w: torch.Tensor,
    fmt: Format,
    *,
    global_scale: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scales ``[N/bn, K/bk]`` of the rule, errors weighted by ``importance`` if given.

    Raises FormatError unless the elements are E2M1 (whose gap between 4 and 6 the rule is about) and the scales finer
    than powers of two; NumericsError for NaN and inf.
    """
    if fmt.element.name != "e2m1" or fmt.scale.power_of_two:
        raise FormatError(
            f"four_over_six is for e2m1 elements with scales between powers of two, not {fmt.name}; use exact"
        )
    x = magnitude_blocks(w, fmt)
    h = importance_blocks(importance, w, fmt)
    fitted = fitted_scale(x.amax(dim=1), fmt, global_scale=global_scale)
    six, four = (at_least_smallest(rounded_scale(fitted * k, fmt), fmt) for k in (1.0, 1.5))
    error_six, error_four = (scores(x, code, fmt=fmt, global_scale=global_scale, h=h) for code in (six, four))
    return as_grid(torch.where(error_four < error_six, four, six), w, fmt)
