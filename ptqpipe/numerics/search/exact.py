"""The exact search: the least squared error over every scale of the format, equal to brute force bit for bit.

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

Long blocks (FP8 rows, tiles, tensors) with bfloat16 or float16 scales take the way of ``_long.py``. Elements whose
codec is not symmetric have proofs of their own where they are integers (``_integer_scales.py``); ``brute_force.py``
scores every scale for the others.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from ptqpipe.errors import FormatError
from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.kernels.cpu_tensors import column_weights
from ptqpipe.numerics.qtensor import check_finite, to_blocks
from ptqpipe.numerics.search import _integer_scales as _integers, _long, brute_force
from ptqpipe.numerics.search._grid import MARGIN, ElementGrid, Ladder, deviations, element_grid, ladder
from ptqpipe.numerics.search.objective import FLUSH, LANES, SHORT, fold

CHUNK = 1 << 17  # elements scored at a time: three float32 arrays of this size, most of a 2 MiB cache
SCAN_MAX = SHORT  # elements of a block up to which every candidate is scored directly


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
        raise FormatError(
            f"{fmt.name} has {fmt.scale.name} scales, over which nothing can be proven; use the refit search"
        )
    if not fmt.element.symmetric and _integers.knows(fmt) and global_scale is None:
        return _integers.search(w, fmt, importance=importance)
    if not fmt.element.symmetric:
        return brute_force.search(w, fmt, global_scale=global_scale, importance=importance)
    grid = element_grid(fmt.element)
    steps = ladder(fmt, global_scale=global_scale, grid=grid, device=w.device)
    h = None if importance is None else column_weights(importance, w)
    shape = (w.shape[0], w.shape[1])
    rows, cols = fmt.block_extent(shape)
    if rows * cols > SCAN_MAX:
        index = _long.search_index(w, fmt, global_scale=global_scale, h=h, grid=grid, steps=steps)
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
    chosen = torch.zeros(count, dtype=torch.int64, device=blocks.device)
    size = max(1, CHUNK // block)
    y, q, shift = (torch.empty(block * min(size, count), device=blocks.device) for _ in range(3))
    scan = partial(_descend, chosen=chosen, grid=grid, steps=steps, work=(y, q, shift))
    h_columns = None if h is None else h.t().contiguous()
    rest: list[_Lanes] = []
    for first in range(0, count, size):
        lanes = _load(blocks[first : first + size], h_columns, first=first, grid=grid, steps=steps)
        rest.append(scan(lanes, until=size // 16))
        if sum(len(lanes) for lanes in rest) > size - size // 16:  # together they fill a chunk again
            rest = [scan(_Lanes.join(rest), until=size // 16)]
    scan(_Lanes.join(rest), until=0)
    return chosen


@dataclass(frozen=True, slots=True)
class _Lanes:
    """The blocks that are still scanned, one column each.

    x, h             float32 ``[elements, lanes]``: flushed magnitudes, weights
    anchor, anchor_h float32 ``[anchors, lanes]``: magnitudes (the first row: the largest) and weights of the elements
                     whose clipping bounds the scan
    best, best_index the least score so far and its index; index: the next one to score
    position         int64: which block of the tensor
    """

    x: torch.Tensor
    h: torch.Tensor | None
    anchor: torch.Tensor
    anchor_h: torch.Tensor | None
    best: torch.Tensor
    best_index: torch.Tensor
    index: torch.Tensor
    position: torch.Tensor

    def __len__(self) -> int:
        return len(self.position)

    def keep(self, lanes: torch.Tensor) -> "_Lanes":
        return self._map(lambda column: column.index_select(-1, lanes))

    @classmethod
    def join(cls, parts: list["_Lanes"]) -> "_Lanes":
        """The lanes of all parts (at least one), in order."""
        return _Lanes(
            torch.cat([part.x for part in parts], dim=1),
            None if parts[0].h is None else torch.cat([part.h for part in parts if part.h is not None], dim=1),
            torch.cat([part.anchor for part in parts], dim=1),
            None
            if parts[0].anchor_h is None
            else torch.cat([part.anchor_h for part in parts if part.anchor_h is not None], dim=1),
            torch.cat([part.best for part in parts]),
            torch.cat([part.best_index for part in parts]),
            torch.cat([part.index for part in parts]),
            torch.cat([part.position for part in parts]),
        )

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "_Lanes":
        return _Lanes(
            change(self.x),
            None if self.h is None else change(self.h),
            change(self.anchor),
            None if self.anchor_h is None else change(self.anchor_h),
            change(self.best),
            change(self.best_index),
            change(self.index),
            change(self.position),
        )


def _load(
    blocks: torch.Tensor, h_columns: torch.Tensor | None, *, first: int, grid: ElementGrid, steps: Ladder
) -> _Lanes:
    """The blocks of a chunk as lanes, without those that round to zero at every scale (they keep index 0)."""
    x = torch.empty(blocks.shape[1], len(blocks), device=blocks.device)
    x.copy_(blocks.t()).abs_()
    amax = x.amax(dim=0)
    if not bool(torch.isfinite(amax).all()):
        check_finite(blocks)
    # x < amax * FLUSH, as a mask of all ones made from the sign of the difference: see objective.flush.
    below = (x - amax * FLUSH).view(torch.int32).bitwise_right_shift_(31)
    x.view(torch.int32).bitwise_and_(below.bitwise_not_())
    position = torch.arange(first, first + len(blocks), device=blocks.device)
    h, anchor, anchor_h = None, amax.unsqueeze(0), None
    if h_columns is not None:
        h = h_columns.index_select(1, position % h_columns.shape[1])
        anchor, anchor_h = _anchors(x, h)
    best = torch.full_like(amax, float("inf"), dtype=steps.weight.dtype)
    lanes = _Lanes(x, h, anchor, anchor_h, best, torch.zeros_like(position), steps.start(amax), position)
    live = amax * steps.inv[0] > grid.zero
    return lanes if bool(live.all()) else lanes.keep(live.nonzero()[:, 0])


def _anchors(x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements with the largest x and the largest h x^2 of each lane: their x and their h, both ``[2, lanes]``."""
    anchor, anchor_h = torch.zeros(2, x.shape[1], device=x.device), torch.zeros(2, x.shape[1], device=x.device)
    most = torch.full_like(anchor, -1.0)
    for k in range(len(x)):
        rank = torch.stack((x[k], x[k] * x[k] * h[k]))
        more = rank > most
        most = torch.where(more, rank, most)
        anchor = torch.where(more, x[k], anchor)
        anchor_h = torch.where(more, h[k], anchor_h)
    return anchor, anchor_h


_Work = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Scratch of one search, float32 ``[elements, blocks]`` flat each, used for chunks of any size up to theirs."""


def _descend(
    lanes: _Lanes, *, until: int, chosen: torch.Tensor, grid: ElementGrid, steps: Ladder, work: _Work
) -> _Lanes:
    """Scans until at most ``until`` lanes are left, and returns those; writes ``chosen`` of the others."""
    inv = steps.inv.index_select(0, lanes.index)
    weight = steps.weight.index_select(0, lanes.index)
    while len(lanes) > until:
        score = _score(lanes, inv, weight, grid=grid, steps=steps, work=work)
        better = score <= lanes.best  # the scan goes down, so a tie goes to the smaller scale
        torch.minimum(score, lanes.best, out=lanes.best)
        torch.where(better, lanes.index, lanes.best_index, out=lanes.best_index)
        alive = lanes.index > 0
        lanes.index.sub_(1).clamp_(min=0)
        inv = steps.inv.index_select(0, lanes.index)
        weight = steps.weight.index_select(0, lanes.index)
        alive &= _clipping(lanes, inv, grid=grid) * weight <= lanes.best
        left = int(torch.count_nonzero(alive))
        if left < 0.7 * len(lanes):
            chosen[lanes.position] = lanes.best_index
            keep = alive.nonzero()[:, 0]
            lanes, inv, weight = lanes.keep(keep), inv[keep], weight[keep]
    return lanes


def _clipping(lanes: _Lanes, inv: torch.Tensor, *, grid: ElementGrid) -> torch.Tensor:
    """float32 ``[lanes]``: times value^2, below the score at the scale 1/inv and at every smaller one.

    With y the float32 quotient of an anchor, ((1 - m) y - max)^2 h (1 - m): m = 2^-18 covers the roundings of y
    (three, 2^-22 together), of the difference, the products and the sum, which is never below its largest term.
    """
    clipped = (lanes.anchor * inv).mul_(1.0 - MARGIN).sub_(grid.top).clamp_(min=0.0)
    bound = clipped.square_().mul_(1.0 - MARGIN)
    return bound[0] if lanes.anchor_h is None else bound.mul_(lanes.anchor_h).amax(dim=0)


def _score(
    lanes: _Lanes, inv: torch.Tensor, weight: torch.Tensor, *, grid: ElementGrid, steps: Ladder, work: _Work
) -> torch.Tensor:
    """``[lanes]``: the scores at the scales 1/inv, in the dtype of ``weight`` (value^2)."""
    x = lanes.x
    y, q, shift = (flat[: x.numel()].view(x.shape) for flat in work)
    torch.mul(x, inv, out=y)
    largest = lanes.anchor[0] * inv
    deviations(y, q, shift, grid=grid, saturates=float(largest.max()) > grid.wrap)
    y.mul_(y)
    if lanes.h is not None:
        y.mul_(lanes.h)
    score = _accumulate(y, steps).mul_(weight)
    return score.masked_fill_(largest <= grid.zero, float("inf"))


def _accumulate(t: torch.Tensor, steps: Ladder) -> torch.Tensor:
    """``[blocks]``: the terms ``[elements, blocks]`` summed in the order of the objective."""
    if steps.codes.dtype != torch.uint8:
        lanes = torch.zeros(1 << (len(t) - 1).bit_length(), t.shape[1], dtype=torch.float64, device=t.device)
        lanes[: len(t)] = t  # at most SCAN_MAX < LANES elements: one to a lane, the empty lanes add nothing
        return fold(lanes.t())
    rows = t.unbind(0)
    acc = rows[0] + rows[1]
    for row in rows[2:]:
        acc.add_(row)
    return acc.to(steps.weight.dtype)


assert SCAN_MAX <= LANES
