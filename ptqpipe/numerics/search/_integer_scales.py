"""The exact search for elements that are consecutive integers, with scales that are bfloat16 or float16 numbers.

Numbers from -l to h have both proofs of ``objective.py``, each sign with an end of its own:

* halving: where every y lies between -(floor(l/2) + 1/2) and floor(h/2) + 1/2, each code doubled is a code, so half of
  the scale is at least as good. The scan starts below that, or where half of a scale is no legal one;
* clipping: the largest element of either sign alone costs (y - h)^2 or (y + l)^2, and ever more for smaller scales. A
  block leaves the scan once that is above its best score.

Between the two lie some 180 bfloat16 scales, and all of them are scored: so the answer is that of brute force, with
weights too. ``kernels/csrc/integers.h`` does the same with fewer roundings of the definition.
"""

import torch

from ptqpipe.numerics.formats import Codec, Format
from ptqpipe.numerics.qtensor import scale_values
from ptqpipe.numerics.search._grid import MARGIN
from ptqpipe.numerics.search.brute_force import all_scales
from ptqpipe.numerics.search.objective import importance_blocks, lane_sum, magnitude_blocks

CHUNK = 1 << 17  # elements scored at a time


def knows(fmt: Format) -> bool:
    """Whether the elements are consecutive integers, and the scales numbers of 16 bits."""
    numbers = sorted(fmt.element.grid)
    few = fmt.scale.dtype in (torch.bfloat16, torch.float16)
    return few and bool(numbers) and numbers == [numbers[0] + i for i in range(len(numbers))] and numbers[0] % 1 == 0


def search(w: torch.Tensor, fmt: Format, *, importance: torch.Tensor | None = None) -> torch.Tensor:
    """Scales ``[N/bn, K/bk]`` of the least score of each block, ties to the smaller one. NumericsError for NaN and
    inf."""
    x, h = magnitude_blocks(w, fmt), importance_blocks(importance, w, fmt)
    scales = all_scales(fmt.scale).to(w.device)
    value = scale_values(scales, fmt.scale)
    size = max(1, CHUNK // x.shape[1])
    parts = [
        _scan(x[i : i + size], None if h is None else h[i : i + size], value, fmt.element)
        for i in range(0, len(x), size)
    ]
    return scales[torch.cat(parts)].reshape(fmt.scale_shape((w.shape[0], w.shape[1])))


def _scan(x: torch.Tensor, h: torch.Tensor | None, value: torch.Tensor, element: Codec) -> torch.Tensor:
    """int64 ``[blocks]``: the index of each block's scale among ``value`` (float32, ascending), from the
    largest that counts downwards."""
    low, high = min(element.grid), max(element.grid)
    amax = x.abs().amax(dim=1)
    ends = torch.stack((x.amax(dim=1).clamp(min=0), (-x).amax(dim=1).clamp(min=0)))
    reach = torch.tensor([high, -low], device=x.device)
    edge = (ends / (torch.floor(reach / 2) + 0.5).unsqueeze(1)).amax(dim=0) * (1.0 + 2.0**-20)
    whole = (~torch.isin(value / 2, value)).sum() - 1  # the last scale whose half is not legal
    index = (torch.bucketize(edge, value, right=True) - 1).clamp(min=int(whole))
    # Above 2^126 the inverse of a scale is subnormal: its rounding is another than that of the half's.
    index = index.masked_fill(amax > 2.0**125, len(value) - 1)
    share = None if h is None else torch.stack([h.gather(1, at)[:, 0] for at in (x.argmax(1, True), x.argmin(1, True))])
    best = torch.full(amax.shape, float("inf"), dtype=torch.float64, device=x.device)
    chosen, rows = torch.zeros_like(index), torch.arange(len(x), device=x.device)
    inverse = 1.0 / value
    while len(rows):
        r, square = inverse[index], value[index].double().square()
        y = x * r.unsqueeze(1)
        t = (y - y.clamp(low, high).round_()).square_()
        score = lane_sum(t if h is None else t.mul_(h)) * square
        score.masked_fill_(amax * r <= element.min_positive / 2, float("inf"))
        better = (score <= best[rows]) & torch.isfinite(score)
        best[rows[better]], chosen[rows[better]] = score[better], index[better]
        alive = index > 0
        index = (index - 1).clamp_(min=0)
        beyond = (ends * inverse[index] * (1.0 - MARGIN) - reach.unsqueeze(1)).clamp_(min=0).square_()
        bound = beyond.amax(dim=0) if share is None else (beyond * share).amax(dim=0)
        alive &= bound.double() * value[index].double().square() * (1.0 - MARGIN) <= best[rows]
        keep = alive.nonzero()[:, 0]
        if len(keep) < len(rows):
            x, amax, ends, index, rows = x[keep], amax[keep], ends[:, keep], index[keep], rows[keep]
            h, share = None if h is None else h[keep], None if share is None else share[:, keep]
    return chosen
