"""Lower bounds of the scores of long blocks, at the significands of all scales and in every octave at once.

On a grid without smallest and largest exponent the error of y = x * r relative to y's binade depends on the
significands of x and of the scale alone, and scaling both by powers of two is exact in float32. That grid contains the
codec's (subnormals and all), so no element is closer to the codec's grid than to it. With m in [1, 2) the significand
of x, p = (2^exponent of x)^2 [* h], V_j in [1, 2) a scale, r_j = fl(1 / V_j) and q(y) the grid's number nearest to y,

    score(scale j, any octave) >= V_j^2 sum p (m r_j - q(m r_j))^2

*Few significands*: bfloat16 has 128, float16 1024. One sum of p for each, times a table of squared distances, is the
right side itself, which is the score wherever nothing is subnormal or clipped.

*float32*: bins of equal width, two sums each, P0 of p and P1 of p m. In a bin from a to b in terms of y = m r, q goes
from q(a) to q(b), and with D = q(b) - q(a) and M halfway between them

    (y - q(y))^2 = y^2 - 2 q(b) y + q(b)^2 + 2 D min(0, y - M)

where D is zero but for the bins around a midpoint of the grid. There min(0, y - M), being concave, is above its chord
(a - M) (b - y) / (b - a). So the sum over a bin is at least sum p y^2 + A0 P0 + A1 P1 with two tables that depend on
the bin and the scale alone, and the bound is within some 10^-4 of the score. Two roundings are subtracted. y is rounded
before its distance is taken, so the distance shrinks by at most 2^-24 y, and the sum E of the squares by at most 2^-23
sqrt(E sum p y^2), by Cauchy and Schwarz. And the sums are those of n float64 terms: 64 sum p y^2, which is more than
the magnitudes of all that is added, times n 2^-53.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.qtensor import to_blocks
from ptqpipe.numerics.search._grid import EXPONENT, MARGIN, ElementGrid, Ladder
from ptqpipe.numerics.search.objective import FLUSH, LANES

# Long blocks as strips of rows whose blocks are searched together, read in segments that stay in cache.
SEGMENT = 1 << 17  # elements converted and scored at a time


@dataclass(frozen=True, slots=True)
class Strip:
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


def strips(w: torch.Tensor, fmt: Format, *, h: torch.Tensor | None, largest: int) -> Iterator[Strip]:
    """The weight as strips of about ``largest`` elements, top to bottom; strips of tiles are one tile high."""
    rows, cols = fmt.block_extent((w.shape[0], w.shape[1]))
    tiles = -(-w.shape[1] // cols)
    height = rows if tiles > 1 else max(1, largest // (rows * cols)) * rows
    if h is not None:
        h = torch.nn.functional.pad(h, (0, tiles * cols - len(h))).reshape(tiles, cols)
    for start in range(0, w.shape[0], height):
        yield Strip(to_blocks(w[start : start + height], fmt), h)


FEW_BINS, MANY_BINS, MANY_ELEMENTS = 10, 12, 1 << 16  # bits of the bins of blocks with fewer and with more elements
_LOOSE = 1.0 - 2.0**-20  # rounding of weighted terms (2^-23) and of the table's products, with room


@dataclass(frozen=True, slots=True)
class Scales:
    """The significands of the scales of a format at one global scale.

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
    ) -> "Scales":
        count = 1 if fmt.scale.power_of_two else round(1.0 / torch.finfo(fmt.scale.dtype or torch.float32).eps)
        value = 1.0 + torch.arange(count, device=device) / count
        if global_scale is None:
            return cls(1.0 / value, value.double().square(), 0, grid)
        g = global_scale.to(device)
        shift = int(torch.frexp(g).exponent) - 1
        return cls(1.0 / (value * torch.ldexp(g, torch.tensor(-shift))), value.double().square(), shift, grid)

    def squares(self, significand: torch.Tensor) -> torch.Tensor:
        """float64 ``[n, J]``: V_j^2 times the squared distance of y, rounded as a score's, for float32 ``[n]``."""
        y = significand.unsqueeze(1) * self.inv
        binade = torch.bitwise_and(y.view(torch.int32), EXPONENT).view(torch.float32)
        d = y - ((y + binade * self.grid.free_magic) - binade * self.grid.free_magic)
        return (d * d).double() * self.square

    def chords(self, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(A0, A1), both float64 ``[2^bits, J]``."""
        inv = self.inv.double()
        y = (1.0 + torch.arange((1 << bits) + 1, dtype=torch.float64, device=inv.device) / (1 << bits)).unsqueeze(
            1
        ) * inv
        q = self._nearest(y)
        twice, middle = 2.0 * (q[1:] - q[:-1]), (q[1:] + q[:-1]) / 2
        slope = twice * ((y[:-1] - middle) / (y[1:] - y[:-1]))
        return q[1:].square() + slope * y[1:], (-2.0 * q[1:] - slope) * inv

    def _nearest(self, y: torch.Tensor) -> torch.Tensor:
        """float64 ``y`` rounded to the grid without smallest and largest exponent."""
        step = torch.ldexp(torch.full_like(y, self.grid.free_magic * 2.0**-23), torch.frexp(y).exponent - 1)
        return torch.round(y / step) * step


@dataclass(frozen=True, slots=True)
class Floor:
    """Lower bounds of the blocks of a strip that are valid in every octave, all in units of the score.

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
        bound.masked_fill_(steps.rounded(below), 0.0)  # their significands are not those of any octave
        return bound.masked_fill_(index < 0, float("inf"))


def floor_of(strip: Strip, amax: torch.Tensor, *, scales: Scales) -> Floor:
    """The bounds of the strip's blocks, whose largest elements ``amax`` are (float32 ``[n]``)."""
    few = _significand_bits(strip)
    binade = torch.bitwise_and(amax.view(torch.int32), EXPONENT)
    unit = torch.ldexp(torch.ones_like(amax, dtype=torch.float64), 2 * ((binade >> 23) - 127 - scales.shift)).unsqueeze(
        1
    )
    if few is None:
        bits = FEW_BINS if strip.blocks.shape[1] < MANY_ELEMENTS else MANY_BINS
        sums = _sums(strip, amax, bits=bits, moments=True)
        least = _from_moments(strip, sums, bits=bits, scales=scales)
    else:
        sums = _sums(strip, amax, bits=few, moments=False)
        count = 1 << few
        least = sums.power @ scales.squares(1.0 + torch.arange(count, device=amax.device) / count)
    own = scales.squares(_significand(amax.view(torch.int32))) * (unit * sums.amax_h.unsqueeze(1))
    return Floor(least * unit, own, amax, sums.amax_h)


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sums over the elements of each block in units of (binade of its largest)^2; float64, but for ``amax_h``.

    power   ``[n, bins]``: of p
    first   ``[n, bins]``: of p m, or empty
    second  ``[n]``: of p m^2, or zeros
    amax_h  float32 ``[n]``: the largest weight that an element of the largest magnitude has
    """

    power: torch.Tensor
    first: torch.Tensor
    second: torch.Tensor
    amax_h: torch.Tensor


def _significand(pattern: torch.Tensor) -> torch.Tensor:
    """float32 in [1, 2) with the mantissa bits of these patterns (int32)."""
    return torch.bitwise_and(pattern, 0x007FFFFF).bitwise_or_(0x3F800000).view(torch.float32)


def _sums(strip: Strip, amax: torch.Tensor, *, bits: int, moments: bool) -> _Sums:
    """One pass over the strip; subnormal elements are left out: less energy is a lower bound still."""
    n = len(amax)
    rows = torch.arange(n, dtype=torch.int32, device=amax.device).unsqueeze(1) << bits
    inv_binade = ((254 << 23) - torch.bitwise_and(amax.view(torch.int32), EXPONENT)).view(torch.float32).unsqueeze(1)
    energy = torch.zeros(n << bits, dtype=torch.float64, device=amax.device)
    first = torch.zeros(n << bits if moments else 0, dtype=torch.float64, device=amax.device)
    second = torch.zeros(n, dtype=torch.float64, device=amax.device)
    amax_h = torch.ones_like(amax) if strip.h is None else torch.zeros_like(amax)
    for start, stop in strip.segments():
        x = strip.magnitudes(start, stop, amax=amax, rows=None)
        pattern = x.view(torch.int32)
        power = torch.bitwise_and(pattern, EXPONENT).view(torch.float32).mul_(inv_binade).square_()
        h = strip.weights(start, stop, rows=None)
        if h is not None:
            power *= h
            amax_h = torch.maximum(amax_h, (h * (x == amax.unsqueeze(1))).amax(dim=1))
        keys = torch.bitwise_right_shift(pattern, 23 - bits).bitwise_and_((1 << bits) - 1).add_(rows).flatten()
        energy += torch.bincount(keys, weights=power.double().flatten(), minlength=n << bits)
        if moments:
            m = _significand(pattern).double()
            weighted = m * power
            first += torch.bincount(keys, weights=weighted.flatten(), minlength=n << bits)
            second += weighted.mul_(m).sum(dim=1)
    return _Sums(energy.view(n, -1), first.view(n, -1), second, amax_h)


def _from_moments(strip: Strip, sums: _Sums, *, bits: int, scales: Scales) -> torch.Tensor:
    """float64 ``[n, J]``: the bound of float32 elements, in units of (binade of the largest)^2."""
    a0, a1 = scales.chords(bits)
    y2 = sums.second.unsqueeze(1) * scales.inv.double().square()
    longest = max(stop - start for start, stop in strip.segments())
    terms = longest + strip.blocks.shape[1] // LANES + (1 << bits) + 64
    e = (sums.power @ a0 + sums.first @ a1 + y2 - y2 * (terms * 64 * 2.0**-53)).clamp_(min=0.0)
    return (e - 2.0**-23 * (e * y2).sqrt()).clamp_(min=0.0) * scales.square


def _significand_bits(strip: Strip) -> int | None:
    """The bits that tell the significands of the strip apart, or None where there are more than float16 has."""
    if strip.blocks.dtype == torch.bfloat16:
        return 7
    if strip.blocks.dtype == torch.float16:
        return 10
    fine = False  # whether any weight has mantissa bits below those of bfloat16
    for start, stop in strip.segments():
        pattern = strip.blocks[:, start:stop].float().view(torch.int32)
        if bool((pattern & 0x1FFF).any()):
            return None
        fine = fine or bool((pattern & 0xFFFF).any())
    return 10 if fine else 7  # float32 that came from float16, or from bfloat16
