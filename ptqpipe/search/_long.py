"""The exact search for long blocks (FP8 rows, tiles, tensors) whose scales are bfloat16 or float16 numbers.

Scoring each of the 128 bfloat16 scales of an octave, and those below, would read every weight hundreds of times.
Instead a lower bound of all scores at once leaves one or two scales to score, best first, until no bound is below the
best score. So the answer is that of brute force, whatever the weights are.

The bound. On a grid without smallest and largest exponent the error of y = x * r relative to y's binade depends on the
significands of x and of the scale alone, and scaling both by powers of two is exact in float32. That grid contains
the codec's (subnormals and all), so no element is closer to the codec's grid than to it, and

    score(scale j, any octave) >= sum_i H[i] T[i, j] V_j^2         H[i] = sum of (2^exponent of x)^2 [* h] over the
                                                                   elements x whose significand is the i-th one

with T[i, j] the squared distance for significands X_i and scale V_j in [1, 2): one histogram and one product with a
small table give the bounds of all scales. bfloat16 has 128 significands, float16 1024, so for them
the bound is met wherever nothing is subnormal or clipped. float32 weights are binned by 12 bits, and the distance,
which changes no faster than y, is lowered by what half a bin can change. The largest element adds its clipping error
in place of its share of the histogram, and that ends the descent through the octaves.

Scores themselves are those of the objective, summed in its order.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ptqpipe.formats import Format
from ptqpipe.qtensor import check_finite, to_blocks
from ptqpipe.search._grid import EXPONENT, MARGIN, ElementGrid, Ladder, deviations
from ptqpipe.search.objective import FLUSH, LANES, fold

STRIP = 1 << 20  # elements whose blocks are searched together, unless one block alone is longer
SEGMENT = 1 << 17  # elements converted and scored at a time
_LOOSE = 1.0 - 2.0**-20  # rounding of weighted terms (2^-23) and of the table's products, with room


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
    bounds = _Bounds.make(fmt, global_scale=global_scale, grid=grid, device=w.device)
    parts = [
        _search_strip(strip, grid=grid, steps=steps, bounds=bounds) for strip in _strips(w, fmt, h=h, largest=STRIP)
    ]
    return torch.cat(parts)


@dataclass(frozen=True, slots=True)
class _Strip:
    """Whole blocks of some rows of the weight.

    blocks  ``[n, elements]`` in the weight's dtype
    h       float32 ``[n or 1, columns of a block]``, or None: element e of a block has column e mod columns
    """

    blocks: torch.Tensor
    h: torch.Tensor | None

    def segments(self) -> Iterator[tuple[int, int]]:
        """Runs of elements [start, stop) that start on multiples of LANES."""
        n, elements = self.blocks.shape
        width = max(1, SEGMENT // max(n, 1) // LANES) * LANES
        return ((start, min(start + width, elements)) for start in range(0, elements, width))

    def magnitudes(self, start: int, stop: int, *, amax: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
        """float32: flushed |w| of the elements [start, stop) of these ``rows`` (None: all), a tensor of its own."""
        part = self.blocks[:, start:stop]
        x = (part if rows is None else part.index_select(0, rows)).float()
        x = x.abs() if x.data_ptr() == part.data_ptr() else x.abs_()
        below = (x - (amax * FLUSH).unsqueeze(1)).view(torch.int32).bitwise_right_shift_(31)
        x.view(torch.int32).bitwise_and_(below.bitwise_not_())
        return x

    def weights(self, start: int, stop: int, *, rows: torch.Tensor | None) -> torch.Tensor | None:
        """float32, broadcasting with :meth:`magnitudes`, or None."""
        if self.h is None:
            return None
        columns = torch.arange(start, stop, device=self.h.device) % self.h.shape[1]
        h = self.h if rows is None or len(self.h) == 1 else self.h.index_select(0, rows)
        return h.index_select(1, columns)


def _strips(w: torch.Tensor, fmt: Format, *, h: torch.Tensor | None, largest: int) -> Iterator[_Strip]:
    """The weight as strips of about ``largest`` elements, top to bottom; strips of tiles are one tile high."""
    rows, cols = fmt.block_extent((w.shape[0], w.shape[1]))
    tiles = -(-w.shape[1] // cols)
    height = rows if tiles > 1 else max(1, largest // (rows * cols)) * rows
    if h is not None:
        h = torch.nn.functional.pad(h, (0, tiles * cols - len(h))).reshape(tiles, cols)
    for start in range(0, w.shape[0], height):
        yield _Strip(to_blocks(w[start : start + height], fmt), h)


@dataclass(frozen=True, slots=True)
class _Bounds:
    """What the lower bound needs, for one format and global scale.

    inv     float32 ``[J]``: 1 / (V_j * global_scale), the global scale brought into [1, 2)
    square  float64 ``[J]``: V_j^2
    shift   the exponent taken from the global scale
    """

    inv: torch.Tensor
    square: torch.Tensor
    shift: int
    grid: ElementGrid

    @classmethod
    def make(
        cls, fmt: Format, *, global_scale: torch.Tensor | None, grid: ElementGrid, device: torch.device
    ) -> "_Bounds":
        count = round(1.0 / torch.finfo(fmt.scale.dtype or torch.float32).eps)
        value = 1.0 + torch.arange(count, device=device) / count
        if global_scale is None:
            return cls(1.0 / value, value.double().square(), 0, grid)
        g = global_scale.to(device)
        shift = int(torch.frexp(g).exponent) - 1
        return cls(1.0 / (value * torch.ldexp(g, torch.tensor(-shift))), value.double().square(), shift, grid)

    def table(self, bits: int, *, exact: bool) -> torch.Tensor:
        """float64 ``[2^bits, J]``: T[i, j] V_j^2; unless ``exact``, the least over the bin of significand i."""
        half = 0.0 if exact else 2.0 ** -(bits + 1)
        x = 1.0 + torch.arange(1 << bits, device=self.inv.device) / (1 << bits) + half
        y = x.unsqueeze(1) * self.inv
        binade = torch.bitwise_and(y.view(torch.int32), EXPONENT).view(torch.float32)
        d = (y - ((y + binade * self.grid.free_magic) - binade * self.grid.free_magic)).abs()
        d = (d - self.inv * (half * (1.0 + MARGIN))).clamp_(min=0.0)
        return (d * d).double() * self.square


@dataclass(frozen=True, slots=True)
class _Floor:
    """Lower bounds of the blocks of a strip that hold in every octave, all in units of the score.

    floor  float64 ``[n, J]``: the sum over all elements
    own    float64 ``[n, J]``: the part of it that the largest element has
    amax   float32 ``[n]``: the largest element; amax_h: its weight (ones without weights)
    """

    floor: torch.Tensor
    own: torch.Tensor
    amax: torch.Tensor
    amax_h: torch.Tensor

    def bound(self, index: torch.Tensor, rows: torch.Tensor, *, grid: ElementGrid, steps: Ladder) -> torch.Tensor:
        """float64 ``[rows, J]``: below the scores at ``index`` (int64, same shape); inf where it is negative.

        The clipping term is that of ``exact._clipping``, in place of the largest element's part of the floor.
        """
        below = index.clamp(min=0)
        y = self.amax[rows].unsqueeze(1) * steps.inv[below]
        clipped = (y.double() * (1.0 - MARGIN) - grid.top).clamp_(min=0.0).square_() * (1.0 - MARGIN)
        clipped *= steps.weight[below] * self.amax_h[rows].double().unsqueeze(1)
        scale = below % self.floor.shape[1]  # the ladder begins at a power of two, so this is the significand
        excess = clipped - self.own[rows].gather(1, scale) * (1.0 + MARGIN)
        bound = self.floor[rows].gather(1, scale) * _LOOSE + excess.clamp_(min=0.0)
        return bound.masked_fill_(index < 0, float("inf"))


def _floor(strip: _Strip, amax: torch.Tensor, *, bounds: _Bounds) -> _Floor:
    """The histogram of the strip times the table."""
    n = len(amax)
    bits, exact = _significand_bits(strip)
    rows = torch.arange(n, dtype=torch.int32, device=amax.device).unsqueeze(1) << bits
    binade = torch.bitwise_and(amax.view(torch.int32), EXPONENT)
    inv_binade = ((254 << 23) - binade).view(torch.float32).unsqueeze(1)
    energy = torch.zeros(n << bits, dtype=torch.float64, device=amax.device)
    amax_h = torch.ones_like(amax) if strip.h is None else torch.zeros_like(amax)
    for start, stop in strip.segments():
        x = strip.magnitudes(start, stop, amax=amax, rows=None)
        pattern = x.view(torch.int32)
        power = torch.bitwise_and(pattern, EXPONENT).view(torch.float32).mul_(inv_binade).square_()
        h = strip.weights(start, stop, rows=None)
        if h is not None:
            power *= h
            amax_h = torch.maximum(amax_h, (h * (x == amax.unsqueeze(1))).amax(dim=1))
        keys = torch.bitwise_right_shift(pattern, 23 - bits).bitwise_and_((1 << bits) - 1).add_(rows)
        energy += torch.bincount(keys.flatten(), weights=power.flatten(), minlength=n << bits)
    table = bounds.table(bits, exact=exact)
    unit = torch.ldexp(torch.ones_like(amax, dtype=torch.float64), 2 * ((binade >> 23) - 127 - bounds.shift)).unsqueeze(
        1
    )
    largest = (amax.view(torch.int32) >> (23 - bits)) & ((1 << bits) - 1)
    own = table.index_select(0, largest) * (unit * amax_h.unsqueeze(1))
    return _Floor(energy.view(n, -1) @ table * unit, own, amax, amax_h)


def _significand_bits(strip: _Strip) -> tuple[int, bool]:
    """(bits that tell significands apart, whether they tell all of them)."""
    if strip.blocks.dtype == torch.bfloat16:
        return 7, True
    if strip.blocks.dtype == torch.float16:
        return 10, True
    fine = False  # whether any weight has mantissa bits below those of bfloat16
    for start, stop in strip.segments():
        pattern = strip.blocks[:, start:stop].float().view(torch.int32)
        if bool((pattern & 0x1FFF).any()):
            return 12, False
        fine = fine or bool((pattern & 0xFFFF).any())
    return (10, True) if fine else (7, True)  # float32 that came from float16, or from bfloat16


def _search_strip(strip: _Strip, *, grid: ElementGrid, steps: Ladder, bounds: _Bounds) -> torch.Tensor:
    """int64 ``[n]``: the index of each block of the strip."""
    amax = torch.stack([strip.blocks[:, a:b].abs().amax(dim=1) for a, b in strip.segments()]).amax(dim=0).float()
    if not bool(torch.isfinite(amax).all()):
        check_finite(strip.blocks)
    scan = _BestFirst(
        strip,
        _floor(strip, amax, bounds=bounds),
        torch.full_like(amax, float("inf"), dtype=torch.float64),
        torch.zeros(len(amax), dtype=torch.int64, device=amax.device),
        grid,
        steps,
    )
    # Blocks that round to zero at every scale keep index 0.
    rows = (amax * steps.inv[0] > grid.zero).nonzero()[:, 0]
    count = len(bounds.inv)
    index = steps.start(amax).unsqueeze(1) - torch.arange(count, device=amax.device)
    while len(rows):  # octave by octave downwards: the bounds only grow, so a block that needs no score is done
        rows = scan.run(rows, index[rows])
        index -= count
    return scan.chosen


@dataclass(frozen=True, slots=True)
class _BestFirst:
    """Scores the scales of a strip in the order of their bounds, as long as these are not above the best score."""

    strip: _Strip
    floor: _Floor
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
