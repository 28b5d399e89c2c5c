"""The block objective r^T H_b r: for every block, the scale whose nearest codes leave the least expected output error.

r is the rounding residual of one block and H_b the second moment of its columns, so correlations inside the block count
and those between blocks do not. The codes are the nearest ones, as RTN writes them: the argmin is over scales alone.
With other codes a block could do better, which is what gptq and refinement are for.

Exact over every scale of the format. Two arguments leave most of them out:

* all scales at which every element rounds to zero cost w^T H w, and the smallest of those stands for them;
* of a clipped element i at least |w_i| - max * s is left, and whatever the others do the cost is then at least that
  squared over (H^-1)_ii (the Schur complement). The bound grows as scales shrink, so a downward scan may stop.

Costs are float64 sums of float32 residuals; ties go to the smaller scale.
"""

import torch

from ptqpipe.errors import FormatError, arg
from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.qtensor import check_finite, round_to
from ptqpipe.quantization.gptq_steps import scale_ladder

SINGULAR = 1e-5  # least ratio of Cholesky pivots at which the inverse is trusted for a bound
MARGIN = 1e-6  # relative; far above float64 rounding, so that the bound never stops a scan early


def search(
    w: torch.Tensor, fmt: Format, *, moments: torch.Tensor, global_scale: torch.Tensor | None = None
) -> torch.Tensor:
    """uint8 scale codes [N, K/b] of the least r^T H_b r of each block.

    w        [N, K], any float dtype
    moments  [K/b, b, b] second moments of the columns of each block, symmetric, not negative

    Raises NumericsError for NaN and inf in ``w``, FormatError where blocks do not lie in rows or scales are no list.
    """
    size = fmt.block[1]
    if fmt.block[0] != 1 or not fmt.scale.enumerable:
        raise FormatError(f"{fmt.name} has no list of block scales along its rows; use {arg('objective', 'diagonal')}")
    if moments.shape != (w.shape[1] // size, size, size):
        raise FormatError(f"block moments {list(moments.shape)} are not those of {w.shape[1] // size} blocks of {size}")
    check_finite(w)
    ladder = scale_ladder(fmt, global_scale, w.device)
    chosen = torch.empty(fmt.scale_shape((w.shape[0], w.shape[1])), dtype=torch.uint8, device=w.device)
    for block, moment in enumerate(moments):
        part = w[:, block * size : (block + 1) * size].float()
        chosen[:, block] = (_scan(part, moment.double(), ladder, fmt) + fmt.scale.first_scale_code).to(torch.uint8)
    return chosen


def cost_of(w: torch.Tensor, s: torch.Tensor, *, moment: torch.Tensor, fmt: Format) -> torch.Tensor:
    """float64 [n]: r^T H r of rows ``w`` float32 [n, b] rounded to nearest at scales ``s`` float32 [n]."""
    magnitude = w.abs()
    decoded = round_to(magnitude * (1.0 / s).unsqueeze(1), fmt.element) * s.unsqueeze(1)
    left = torch.where(torch.signbit(w), decoded - magnitude, magnitude - decoded).double()
    return ((left @ moment) * left).sum(dim=1)


def _scan(w: torch.Tensor, moment: torch.Tensor, ladder: torch.Tensor, fmt: Format) -> torch.Tensor:
    """int64 [n]: the index of the best scale for rows of one block."""
    amax = w.abs().amax(dim=1)
    share = _conditional(moment)
    # from a scale that zeroes the whole block, downwards
    start = torch.bucketize(amax * (2.0 / fmt.element.min_positive * (1.0 + MARGIN)), ladder).clamp(max=len(ladder) - 1)
    best = torch.full(amax.shape, float("inf"), dtype=torch.float64, device=w.device)
    index = torch.zeros_like(start)
    rows = torch.arange(len(w), device=w.device)
    below = 0
    while len(rows):
        tried = start[rows] - below
        s = ladder[tried]
        cost = cost_of(w[rows], s, moment=moment, fmt=fmt)
        better = cost <= best[rows]
        best[rows[better]], index[rows[better]] = cost[better], tried[better]
        clipped = (w[rows].abs().double() - fmt.element.max * s.double().unsqueeze(1)).clamp(min=0)
        bound = (clipped.square() * share).amax(dim=1) * (1.0 - MARGIN)
        rows = rows[(tried > 0) & (bound <= best[rows])]
        below += 1
    return index


def _conditional(moment: torch.Tensor) -> torch.Tensor:
    """float64 [b]: 1 / (H^-1)_ii, the least cost of one unit left at column i; 0 where H is not safely invertible."""
    lower, failed = torch.linalg.cholesky_ex(moment)
    diagonal = lower.diagonal()
    if int(failed) or not bool(torch.isfinite(lower).all()) or bool(diagonal.amin() < SINGULAR * diagonal.amax()):
        return torch.zeros(len(moment), dtype=torch.float64, device=moment.device)
    return 1.0 / torch.cholesky_inverse(lower).diagonal()


def moments_for(fmt: Format, *, full: torch.Tensor | None = None, blocks: torch.Tensor | None = None) -> torch.Tensor:
    """[K/b, b, b] moments of a format's blocks, cut from the full moment or from moments of other blocks.

    Where the known blocks are smaller, moments across their borders count as zero. FormatError where neither divides.
    """
    size = fmt.block[1]
    if full is not None:
        count = len(full) // size
        return full.reshape(count, size, count, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()
    if blocks is None:
        raise FormatError(
            f"{fmt.name} with {arg('objective', 'block')} needs block moments; calibrate with {arg('moments', 'block')}"
        )
    count, own = blocks.shape[0], blocks.shape[1]
    if size % own == 0:
        ratio = size // own
        wide = torch.zeros(count // ratio, ratio, own, ratio, own)
        for i in range(ratio):
            wide[:, i, :, i, :] = blocks[i::ratio]
        return wide.reshape(-1, size, size)
    if own % size:
        raise FormatError(
            f"{fmt.name} has blocks of {size} columns, the statistics of {own}; use {arg('objective', 'diagonal')}"
        )
    ratio = own // size
    parts = blocks.reshape(count, ratio, size, ratio, size).diagonal(dim1=1, dim2=3).permute(0, 3, 1, 2)
    return parts.reshape(-1, size, size).contiguous()
