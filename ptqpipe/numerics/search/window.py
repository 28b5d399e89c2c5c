"""A fixed window of scale codes around abs-max: the best of [-3, +7] from the code at or below amax / max.

A baseline (ScaleSweep, arXiv 2606.07618). Its proof needs half of the scale to be legal, so without a global scale it
misses optima among the lowest codes: the block {30, 22.5, 14 x 7.5} * 2^-9 starts at code 5 and is exact at code 15.
"""

import torch

from ptqpipe.errors import FormatError
from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.qtensor import scale_values
from ptqpipe.numerics.search._rules import as_grid, fitted_scale
from ptqpipe.numerics.search.objective import importance_blocks, magnitude_blocks, scores

PROVEN = False

BELOW, ABOVE = 3, 7


def search(
    w: torch.Tensor,
    fmt: Format,
    *,
    global_scale: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """uint8 codes ``[N/bn, K/bk]`` of the least score in the window, ties to the smaller code.

    Raises FormatError unless the scales have codes and are finer than powers of two; NumericsError for NaN and inf.
    """
    if not fmt.scale.enumerable or fmt.scale.power_of_two:
        raise FormatError(
            f"the window of codes is for minifloat scales, {fmt.name} has {fmt.scale.name} scales; use exact"
        )
    x = magnitude_blocks(w, fmt)
    h = importance_blocks(importance, w, fmt)
    first, last = fmt.scale.first_scale_code, len(fmt.scale.magnitudes) - 1
    values = scale_values(torch.arange(last + 1, device=w.device).to(torch.uint8), fmt.scale)
    fitted = fitted_scale(x.abs().amax(dim=1), fmt, global_scale=global_scale)
    base = (torch.bucketize(fitted, values, right=True) - 1).clamp(first, last)
    best = torch.full_like(fitted, float("inf"), dtype=torch.float64)
    chosen = torch.full_like(base, first)
    for offset in range(-BELOW, ABOVE + 1):
        code = (base + offset).clamp(first, last)
        score = scores(x, code.to(torch.uint8), fmt=fmt, global_scale=global_scale, h=h)
        better = score < best
        best, chosen = torch.where(better, score, best), torch.where(better, code, chosen)
    return as_grid(chosen.to(torch.uint8), w, fmt)
