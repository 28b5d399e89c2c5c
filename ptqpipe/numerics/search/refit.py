"""float32 scales: the best of a list of candidates, then alternating least squares. Good, not proven.

float32 scales cannot be enumerated, so nothing here claims the minimum: the name says so. For fixed codes q the best
scale is <x, q> / <q, q>, for a fixed scale the best codes are the nearest ones; alternating the two never raises the
error and ends in a local minimum, and the ladder decides in which one. Research rows only: formats that readers
know have bfloat16 or enumerable scales, and ``exact`` is for them.
"""

import torch

from ptqpipe.errors import FormatError
from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.kernels.importance import column_weights
from ptqpipe.numerics.qtensor import check_finite, round_to, to_blocks
from ptqpipe.numerics.search._grid import element_grid
from ptqpipe.numerics.search._rules import as_grid
from ptqpipe.numerics.search.objective import flush, scores

PROVEN = False

LADDER = 32  # points per octave: past this the refit finds the same scales
ROUNDS = 8  # of refits at most; nearly all blocks are done after three
_CHUNK = 1 << 18  # elements at a time


def search(
    w: torch.Tensor,
    fmt: Format,
    *,
    global_scale: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """float32 scales ``[N/bn, K/bk]``.

    Raises FormatError unless the format has float32 scales and elements with a sign bit; NumericsError for NaN, inf and
    unusable importance.
    """
    if fmt.scale.dtype != torch.float32:
        raise FormatError(f"refit is for float32 scales, {fmt.name} has {fmt.scale.name} scales; use exact")
    if not fmt.element.symmetric:
        raise FormatError(f"refit is for elements with a sign bit, {fmt.name} has {fmt.element.name}; use absmax")
    check_finite(w)
    h = None if importance is None else to_blocks(column_weights(importance, w).expand_as(w), fmt)
    blocks = to_blocks(w, fmt)
    size = max(1, _CHUNK // blocks.shape[1])
    parts = [
        _search_blocks(blocks[k : k + size], None if h is None else h[k : k + size], fmt=fmt, global_scale=global_scale)
        for k in range(0, len(blocks), size)
    ]
    return as_grid(torch.cat(parts), w, fmt)


def _search_blocks(
    blocks: torch.Tensor, h: torch.Tensor | None, *, fmt: Format, global_scale: torch.Tensor | None
) -> torch.Tensor:
    """float32 ``[blocks]``."""
    x = blocks.float().abs()
    amax = x.amax(dim=1)
    x = flush(x, amax.unsqueeze(1))
    g = torch.ones_like(amax) if global_scale is None else global_scale.expand_as(amax)
    smallest = torch.finfo(torch.float32).smallest_normal
    best = torch.full_like(amax, float("inf"), dtype=torch.float64)
    chosen = torch.full_like(amax, smallest)

    def offer(scale: torch.Tensor) -> bool:
        nonlocal best, chosen
        scale = scale.clamp(min=smallest)
        score = scores(x, scale, fmt=fmt, global_scale=global_scale, h=h)
        better = score < best
        best, chosen = torch.where(better, score, best), torch.where(better, scale, chosen)
        return bool(better.any())

    # From where nothing is clipped up to where half of the scale is as good (the halving proof of objective.py), and
    # as far down as clipping pays for blocks of up to 256.
    grid = element_grid(fmt.element)
    octaves = torch.log2(torch.tensor(1.5 * grid.wrap / grid.half)).item()
    for k in range(int(LADDER * octaves) + 1):
        offer(amax / (1.5 * grid.wrap * 2.0 ** (-k / LADDER)) / g)
    for _ in range(ROUNDS):
        q = round_to(x * (1.0 / (chosen * g)).unsqueeze(1), fmt.element).double()
        weighted = q if h is None else q * h
        refit = ((x * weighted).sum(dim=1) / (q * weighted).sum(dim=1).clamp(min=1e-300)).float() / g
        if not offer(refit):
            break
    return chosen
