"""The exact search: the argmin of ``objective.py`` over every scale of the format, equal to brute force bit for bit.

Two proofs bound the scales that need a score (they are stated and proven for floating point in ``objective.py``):

* from above, *halving*: where every code of the block could be doubled, half of the scale is at least as good. So
  the scan starts at the largest scale at which some code cannot (amax > 3.5 scales for E2M1), or whose half is
  not a legal scale (the odd codes of the lowest two octaves of E4M3);
* from below, *clipping*: the largest element alone costs (amax - max * s)^2 from amax > max * s on, and ever more
  for smaller scales. So the scan goes down and a block leaves it once that bound exceeds its best score.

Rounding margins make both safe: a superfluous score does no harm, because ties go to the smaller code. Neither
proof cares for the weights, so the search is exact with importance too. About 9 scales per block remain for NVFP4
and one or two for MX formats. The scan runs on chunks that stay in the second-level cache, elements along the rows
and blocks along the columns, so that the sum in element order is a sequence of contiguous additions.
"""

from dataclasses import dataclass

import torch

from ptqpipe.errors import FormatError
from ptqpipe.formats import Format
from ptqpipe.qtensor import check_finite, to_blocks
from ptqpipe.search._grid import MARGIN, ElementGrid, Ladder, element_grid, ladder
from ptqpipe.search.objective import LANES, flush, fold, normalize_importance

PROVEN = True

CHUNK = 1 << 17  # elements scored at a time: three float32 arrays of this size, most of a 2 MiB cache
SCAN_MAX = 256  # elements of a block up to which every candidate is scored directly
_EXPONENT = 0x7F800000  # the exponent field of a float32


def search(
    w: torch.Tensor,
    fmt: Format,
    *,
    global_scale: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """Scales ``[N/bn, K/bk]`` (uint8 codes, or numbers of the scale's dtype) of the least score of each block.

    w             ``[N, K]``, any float dtype
    global_scale  float32 0-d, None when the format has none
    importance    ``[K]`` non-negative column weights, or None

    Raises NumericsError for NaN, inf and unusable importance; FormatError for float32 scales (no finite set to prove
    anything over: see ``refit``) and for shapes that do not divide.
    """
    if not fmt.scale.enumerable and fmt.scale.dtype == torch.float32:
        raise FormatError(f"{fmt.name} has {fmt.scale.name} scales, over which nothing can be proven; use the refit search")
    grid = element_grid(fmt.element)
    steps = ladder(fmt, global_scale=global_scale, grid=grid, device=w.device)
    h = None if importance is None else normalize_importance(importance)
    shape = (w.shape[0], w.shape[1])
    rows, cols = fmt.block_extent(shape)
    if rows * cols > SCAN_MAX:
        raise FormatError(f"{fmt.name}: blocks of {rows * cols} elements have no exact search yet")
    elif rows == 1:
        index = _scan_rows(w, cols, h=h, grid=grid, steps=steps)
    else:
        spread = None if h is None else to_blocks(h.expand(shape), fmt)
        index = _scan(to_blocks(w, fmt), spread, grid=grid, steps=steps)
    return steps.codes[index].reshape(fmt.scale_shape(shape))


def _scan_rows(
    w: torch.Tensor, block: int, *, h: torch.Tensor | None, grid: ElementGrid, steps: Ladder
) -> torch.Tensor:
    """:func:`_scan` for blocks along a row: the weights of a chunk of blocks repeat with the row."""
    blocks = w.reshape(-1, block)
    return _scan(blocks, None if h is None else h.reshape(-1, block), grid=grid, steps=steps)


def _scan(blocks: torch.Tensor, h: torch.Tensor | None, *, grid: ElementGrid, steps: Ladder) -> torch.Tensor:
    """int64 ``[blocks]``: the index of each block's scale. ``h`` repeats every ``len(h)`` blocks."""
    count, block = blocks.shape
    out = torch.empty(count, dtype=torch.int64, device=blocks.device)
    size = max(1, CHUNK // block)
    work = _Work.make(block, min(size, count), blocks.device)
    for first in range(0, count, size):
        x = blocks[first : first + size].float().abs()
        amax = x.amax(dim=1)
        if not bool(torch.isfinite(amax).all()):
            check_finite(blocks)
        x = flush(x, amax.unsqueeze(1)).t().contiguous()
        weights = None
        if h is not None:
            lanes = torch.arange(first, first + x.shape[1], device=blocks.device) % len(h)
            weights = h[lanes].t().contiguous()
        out[first : first + size] = _scan_chunk(x, amax, weights, grid=grid, steps=steps, work=work)
    return out


@dataclass(frozen=True, slots=True)
class _Work:
    """Scratch of one search, float32 ``[elements, blocks]`` flat, used for chunks of any size up to theirs."""

    y: torch.Tensor
    q: torch.Tensor
    shift: torch.Tensor

    @classmethod
    def make(cls, block: int, count: int, device: torch.device) -> "_Work":
        y, q, shift = (torch.empty(block * count, device=device) for _ in range(3))
        return cls(y, q, shift)


def _scan_chunk(
    x: torch.Tensor, amax: torch.Tensor, h: torch.Tensor | None, *, grid: ElementGrid, steps: Ladder, work: _Work
) -> torch.Tensor:
    """int64 ``[blocks]``: the scan of one chunk of magnitudes ``x`` ``[elements, blocks]``."""
    chosen = torch.zeros(x.shape[1], dtype=torch.int64, device=x.device)
    top_weight = None if h is None else h.gather(0, x.argmax(dim=0, keepdim=True))[0]
    # Blocks that round to zero at every scale keep index 0.
    lanes = (amax * steps.inv[0] > grid.zero).nonzero()[:, 0]
    state = _State(x, h, amax, top_weight, steps.start(amax), torch.full_like(amax, float("inf"), dtype=steps.weight.dtype))
    if len(lanes) < len(chosen):
        state = state.keep(lanes)
    best_index = torch.zeros_like(lanes)
    while len(lanes):
        inv = steps.inv[state.index]
        score = _score(state, inv, grid=grid, steps=steps, work=work)
        better = score <= state.best  # the scan goes down, so a tie goes to the smaller scale
        torch.where(better, score, state.best, out=state.best)
        torch.where(better, state.index, best_index, out=best_index)
        alive = _alive(state, grid=grid, steps=steps)
        left = int(alive.sum())
        if left == 0:
            break
        state.index.sub_(1).clamp_(min=0)
        if left < 0.7 * len(lanes):
            chosen[lanes] = best_index
            keep = alive.nonzero()[:, 0]
            state, lanes, best_index = state.keep(keep), lanes[keep], best_index[keep]
    chosen[lanes] = best_index
    return chosen


@dataclass(frozen=True, slots=True)
class _State:
    """The blocks that are still scanned, one column each."""

    x: torch.Tensor
    h: torch.Tensor | None
    amax: torch.Tensor
    top_weight: torch.Tensor | None
    index: torch.Tensor
    best: torch.Tensor

    def keep(self, lanes: torch.Tensor) -> "_State":
        """The state of these columns alone."""
        return _State(
            self.x.index_select(1, lanes),
            None if self.h is None else self.h.index_select(1, lanes),
            self.amax[lanes],
            None if self.top_weight is None else self.top_weight[lanes],
            self.index[lanes],
            self.best[lanes],
        )


def _alive(state: _State, *, grid: ElementGrid, steps: Ladder) -> torch.Tensor:
    """bool ``[blocks]``: whether the next smaller scale (and so any smaller one) could still be chosen.

    With y the float32 quotient of the largest element, ((1 - m) y - max)^2 value^2 (1 - m) h is below the float32
    score of that scale and of every smaller one: m = 2^-18 covers the roundings of y (three, 2^-22 together), of
    the difference, the products and the sum, which is never below its largest term.
    """
    below = (state.index - 1).clamp_(min=0)
    clipped = (state.amax * steps.inv[below]).mul_(1.0 - MARGIN).sub_(grid.top).clamp_(min=0.0)
    bound = clipped.square_().mul_(1.0 - MARGIN)
    if state.top_weight is not None:
        bound *= state.top_weight
    return (bound * steps.weight[below] <= state.best) & (state.index > 0)


def _score(state: _State, inv: torch.Tensor, *, grid: ElementGrid, steps: Ladder, work: _Work) -> torch.Tensor:
    """``[blocks]``: the scores at ``state.index``, in the dtype of ``steps.weight``."""
    x = state.x
    y, q, shift = (flat[: x.numel()].view(x.shape) for flat in (work.y, work.q, work.shift))
    torch.mul(x, inv, out=y)
    largest = state.amax * inv
    deviations(y, q, shift, grid=grid, saturates=bool((largest > grid.wrap).any()))
    y.mul_(y)
    if state.h is not None:
        y.mul_(state.h)
    score = _accumulate(y, steps).mul_(steps.weight[state.index])
    return score.masked_fill_(largest <= grid.zero, float("inf"))


def deviations(y: torch.Tensor, q: torch.Tensor, shift: torch.Tensor, *, grid: ElementGrid, saturates: bool) -> None:
    """Replaces ``y`` by y - RNE(y), up to the sign at ties; ``q`` and ``shift`` are scratch of its shape."""
    torch.bitwise_and(y.view(torch.int32), _EXPONENT, out=shift.view(torch.int32))
    shift.clamp_(grid.low, grid.high)
    torch.add(y, shift, alpha=grid.magic, out=q)
    q.sub_(shift, alpha=grid.magic)
    if saturates:
        q.clamp_(max=grid.top)
    y.sub_(q)


def _accumulate(t: torch.Tensor, steps: Ladder) -> torch.Tensor:
    """``[blocks]``: the terms ``[elements, blocks]`` summed in the order of the objective."""
    if steps.codes.dtype != torch.uint8:
        lanes = torch.zeros(1 << (len(t) - 1).bit_length(), t.shape[1], dtype=torch.float64, device=t.device)
        lanes[: len(t)] = t  # at most SCAN_MAX < LANES elements: one to a lane, the empty lanes add nothing
        return fold(lanes.t())
    acc = t[0] + t[1] if len(t) > 1 else t[0].clone()
    for k in range(2, len(t)):
        acc += t[k]
    return acc.to(steps.weight.dtype)


assert SCAN_MAX <= LANES
