"""The exact search for long blocks (FP8 rows, tiles, tensors) whose scales are bfloat16 or float16 numbers.

Scoring each of the 128 bfloat16 scales of an octave, and those below, would read every weight hundreds of times.
Instead a lower bound of all scores at once leaves one or two scales to score, best first, until no bound is below the
best score. So the answer is that of brute force, whatever the weights are.

The bound (``_long_floor.py``) comes from one pass over the weights, holds in every octave and is within some 10^-4 of
the score where few weights are subnormal. The largest element adds its clipping error in place of its share of the
bound, and that ends the descent through the octaves.

Scores themselves are those of the objective, summed in its order.
"""

from dataclasses import dataclass

import torch

from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.qtensor import check_finite
from ptqpipe.numerics.search._grid import ElementGrid, Ladder, deviations
from ptqpipe.numerics.search._long_floor import Floor, Scales, Strip, floor_of, strips
from ptqpipe.numerics.search.objective import LANES, fold

STRIP = 1 << 20  # elements whose blocks are searched together, unless one block alone is longer


def search_index(
    w: torch.Tensor,
    fmt: Format,
    *,
    global_scale: torch.Tensor | None,
    h: torch.Tensor | None,
    grid: ElementGrid,
    steps: Ladder,
) -> torch.Tensor:
    """int64 ``[blocks]``: the index in ``steps`` of each block's scale; ``h`` normalized ``[K]`` or None."""
    scales = Scales.make(fmt, global_scale=global_scale, grid=grid, device=w.device)
    parts = [
        _search_strip(strip, grid=grid, steps=steps, scales=scales) for strip in strips(w, fmt, h=h, largest=STRIP)
    ]
    return torch.cat(parts)


def _search_strip(strip: Strip, *, grid: ElementGrid, steps: Ladder, scales: Scales) -> torch.Tensor:
    """int64 ``[n]``: the index of each block of the strip."""
    amax = torch.stack([strip.blocks[:, a:b].abs().amax(dim=1) for a, b in strip.segments()]).amax(dim=0).float()
    if not bool(torch.isfinite(amax).all()):
        check_finite(strip.blocks)
    scan = _BestFirst(
        strip,
        floor_of(strip, amax, scales=scales),
        torch.full_like(amax, float("inf"), dtype=torch.float64),
        torch.zeros(len(amax), dtype=torch.int64, device=amax.device),
        grid,
        steps,
    )
    # Blocks that round to zero at every scale keep index 0.
    rows = (amax * steps.inv[0] > grid.zero).nonzero()[:, 0]
    count = len(scales.inv)
    index = steps.start(amax).unsqueeze(1) - torch.arange(count, device=amax.device)
    while len(rows):  # octave by octave downwards: the bounds only grow, so a block that needs no score is done
        rows = scan.run(rows, index[rows])
        index -= count
    return scan.chosen


@dataclass(frozen=True, slots=True)
class _BestFirst:
    """Scores the scales of a strip in the order of their bounds, as long as these are not above the best score."""

    strip: Strip
    floor: Floor
    best: torch.Tensor
    chosen: torch.Tensor
    grid: ElementGrid
    steps: Ladder

    def run(self, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Searches the scales ``index`` ``[rows, J]`` of these blocks; returns the rows that had to score any."""
        bound = self.floor.bound(index, rows, grid=self.grid, steps=self.steps)
        needed = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        while True:
            least, at = bound.min(dim=1)
            go = ((least <= self.best[rows]) & torch.isfinite(least)).nonzero()[:, 0]
            if len(go) == 0:
                return rows[needed]
            needed[go] = True
            scale = index[go, at[go]]
            bound[go, at[go]] = float("inf")
            self._take(rows[go], scale)

    def _take(self, rows: torch.Tensor, index: torch.Tensor) -> None:
        """Scores one scale of each of these blocks; ties go to the smaller scale."""
        score = self._scores(rows, index)
        best, chosen = self.best[rows], self.chosen[rows]
        better = (score < best) | ((score == best) & (index < chosen))
        self.best[rows] = torch.where(better, score, best)
        self.chosen[rows] = torch.where(better, index, chosen)

    def _scores(self, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """float64 ``[rows]``: ``objective.scores``, by segments."""
        amax, inv = self.floor.amax[rows], self.steps.inv[index]
        some = None if len(rows) == len(self.chosen) else rows
        largest = amax * inv
        saturates = float(largest.max()) > self.grid.wrap
        lanes = torch.zeros(len(rows), LANES, dtype=torch.float64, device=rows.device)
        for start, stop in self.strip.segments():
            t = self.strip.magnitudes(start, stop, amax=amax, rows=some).mul_(inv.unsqueeze(1))
            deviations(t, torch.empty_like(t), torch.empty_like(t), grid=self.grid, saturates=saturates)
            t.mul_(t)
            h = self.strip.weights(start, stop, rows=some)
            if h is not None:
                t *= h
            for first in range(0, t.shape[1], LANES):
                part = t[:, first : first + LANES]
                lanes[:, : part.shape[1]] += part
        score = fold(lanes) * self.steps.weight[index]
        return score.masked_fill_(largest <= self.grid.zero, float("inf"))
