"""Brute force for a few blocks: the best scales and codes from the definition alone, fast enough for every conversion.

Leaves out only the scales that cannot win, by bounds as plain as they can be and with margins far above rounding: those
at which the whole block rounds to zero, those so small that clipping alone costs more than the whole error at another
scale, and those whose half reaches the same values (the first proof of ``objective.py``). Shares no code with the
searches that it judges.

Scales that are plain numbers (bfloat16, float16) are hundreds even so, and their blocks long. With the magnitudes
sorted, the error at a scale is a sum over the codes, of differences of prefix sums in float64, whatever the length of
the block. That rounds otherwise than the definition, by a bounded amount; scales that come so near to the least are
scored by the definition.

In numpy: the arrays are small, and torch takes several times as long to begin an operation.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ptqpipe.numerics.formats import Codec, Format
from ptqpipe.numerics.qtensor import scale_values
from ptqpipe.numerics.search.brute_force import all_scales
from ptqpipe.numerics.search.objective import FLUSH, scores

MARGIN = 1e-4  # relative; float32 quotients, products and sums of a block of 256 round by less
ROUNDED = 2.0**-20  # of y, relative: more than twice what its own roundings and those of a middle come to
SUMS = 2.0**-40  # of the sum of the squares: far above the rounding of prefix sums in float64
AT_ONCE = 1 << 22  # elements that are scored in one go: a weight with one scale is one block
NEIGHBOURS = 2  # scales on either side of the one that is judged, which are never left out

Array = npt.NDArray[Any]


def best_scales(
    x: Array,
    stored: torch.Tensor,
    *,
    fmt: Format,
    global_scale: torch.Tensor | None = None,
    h: Array | None = None,
    every: int = 1,
    first: int = 0,
) -> torch.Tensor:
    """What ``brute_force.search`` gives for these blocks, ``[blocks]`` like ``stored``.

    x       float32 ``[blocks, elements]`` magnitudes; with their signs for elements that are not symmetric, which have
            scales that are numbers
    stored  ``[blocks]`` the scales that are judged
    h       float32 ``[blocks, elements]`` normalized weights, or None
    every   where scales are numbers, the step of those tried from ``first`` on, besides the neighbours of ``stored``
    """
    size = np.abs(x)
    small = size < size.max(axis=1, keepdims=True) * np.float32(FLUSH)
    if small.any():
        x = np.where(small, np.float32(0), x)
    blocks = _Blocks(x, h, fmt, global_scale)
    with np.errstate(all="ignore"):  # scales far from a block's overflow, and lose
        if fmt.scale.enumerable:
            index = _among_codes(blocks, scale_values(stored, fmt.scale).numpy())
        else:
            index = np.array([_among_numbers(blocks.only(i), stored[i].item(), every, first) for i in range(len(x))])
    return _scales(fmt).stored[torch.from_numpy(index)]


def nearest_codes(w: Array, scales: torch.Tensor, *, fmt: Format, global_scale: torch.Tensor | None = None) -> Array:
    """uint8, the shape of ``w`` (float32 ``[blocks, elements]``): the codes that ``qtensor.encode`` defines at
    ``scales`` ``[blocks]``."""
    value = scale_values(scales, fmt.scale).numpy()
    y = (np.abs(w) if fmt.element.symmetric else w) * _Blocks(w, None, fmt, global_scale).inverse(value)[:, None]
    if not fmt.element.symmetric:
        return _steps(fmt.element).codes[np.searchsorted(_steps(fmt.element).upper, y)]
    codes = np.searchsorted(_steps(fmt.element).upper, y).astype(np.uint8)
    return codes | np.signbit(w).astype(np.uint8) << (fmt.element.bits - 1)


class _Blocks(NamedTuple):
    """The arguments of `best_scales`."""

    x: Array
    h: Array | None
    fmt: Format
    global_scale: torch.Tensor | None

    def only(self, i: int) -> "_Blocks":
        """Block ``i`` alone."""
        return self._replace(x=self.x[i : i + 1], h=None if self.h is None else self.h[i : i + 1])

    def inverse(self, value: Array) -> Array:
        """float32, like ``value``: what the definition multiplies magnitudes by at these scales."""
        g = np.float32(1.0 if self.global_scale is None else float(self.global_scale))
        return np.float32(1.0) / (value * g)

    def exact(self, block: Array, index: Array) -> Array:
        """float64: the scores by the definition of these pairs of a block and a scale."""
        step = max(1, AT_ONCE // self.x.shape[1])
        return np.concatenate(
            [self._exact(block[i : i + step], index[i : i + step]) for i in range(0, len(block), step)]
        )

    def _exact(self, block: Array, index: Array) -> Array:
        h = None if self.h is None else torch.from_numpy(self.h[block])
        codes = _scales(self.fmt).stored[torch.from_numpy(index)]
        x = torch.from_numpy(self.x[block])
        score: Array = scores(x, codes, fmt=self.fmt, global_scale=self.global_scale, h=h).numpy()
        return score


def _among_codes(blocks: _Blocks, stored: Array) -> Array:
    """Indices of the best scales where scales have codes: every pair of a block and a code that may win is scored."""
    fmt, scales, count = blocks.fmt, _scales(blocks.fmt), np.arange(len(blocks.x))
    inverse = blocks.inverse(scales.value)
    low, high = _bounds(blocks, _rough(blocks, count, stored, blocks.inverse(stored)))
    live = blocks.x.max(axis=1)[:, None] * inverse > fmt.element.min_positive / 2
    live &= (scales.reach <= high[:, None]) & ~(scales.value < low[:, None])
    block, index = live.nonzero()
    score = np.full(live.shape, np.inf)
    score[live] = _rough(blocks, block, scales.value[index], inverse[index])
    near = live & (score <= np.fmin.reduce(score, axis=1)[:, None] * (1 + MARGIN))
    if bool((near.sum(axis=1) > 1).any()):  # the definition decides
        score[near] = blocks.exact(*near.nonzero())
        near &= score == np.fmin.reduce(np.where(near, score, np.inf), axis=1)[:, None]
    best: Array = near.argmax(axis=1)
    return best  # ties go to the smallest code, and so does a block that every scale zeroes


def _rough(blocks: _Blocks, block: Array, value: Array, inverse: Array) -> Array:
    """float64: the scores of these pairs of a block and a scale but for the order of the sum."""
    steps = _steps(blocks.fmt.element)
    y = blocks.x[block] * inverse[:, None]
    t = y - steps.magnitudes[np.searchsorted(steps.middle, y)]
    t *= t
    if blocks.h is not None:
        t *= blocks.h[block]
    score: Array = t.sum(axis=1, dtype=np.float64) * value.astype(np.float64) ** 2
    return score


def _among_numbers(blocks: _Blocks, stored: float, every: int, first: int) -> int:
    """The index of the best scale of one block whose scales are numbers."""
    fmt, scales, sums = blocks.fmt, _scales(blocks.fmt), _Sums(blocks)
    g = 1.0 if blocks.global_scale is None else float(blocks.global_scale)
    limit = np.inf
    if 0 < stored < np.inf:
        error, slack = sums.error(np.array([stored * g]))
        limit = float(error[0] + slack[0]) / g**2
    low, high = (float(bound[0]) for bound in _bounds(blocks, np.array([limit])))
    index = np.arange(np.searchsorted(scales.value, low), np.searchsorted(scales.reach, high, side="right"))
    near = np.abs(index - np.searchsorted(scales.value, stored)) <= NEIGHBOURS
    rest = index[near | (index % every == first % every)]
    rest = rest[sums.amax * blocks.inverse(scales.value[rest]) > fmt.element.min_positive / 2]
    rest = rest[~(sums.clipping(scales.exact[rest] * g) > limit * g**2)]
    if not len(rest):
        return 0
    error, slack = sums.error(scales.exact[rest] * g)
    rest = rest[error - slack <= (error + slack).min()]
    if len(rest) > 1:
        rest = rest[blocks.exact(np.zeros_like(rest), rest).argmin() :]  # the first of equal ones: scales ascend
    return int(rest[0])


def _bounds(blocks: _Blocks, limit: Array) -> tuple[Array, Array]:
    """float64 ``[blocks]`` each: the scale below which clipping alone costs more than the score ``limit``, and the
    ``reach`` above which no scale need be looked at."""
    g = 1.0 if blocks.global_scale is None else float(blocks.global_scale)
    clips, high = [], []
    for sign, end, wide in _ends(blocks.fmt.element):
        amax = np.maximum(sign * blocks.x, 0).max(axis=1).astype(np.float64)
        loss = limit
        if blocks.h is not None:
            loss = limit / blocks.h[np.arange(len(amax)), (sign * blocks.x).argmax(axis=1)]
        clips.append((amax * (1 - MARGIN) - np.sqrt(loss) * (g * (1 + MARGIN))) / (end * g))
        high.append(amax * (wide * (1 + MARGIN) / g))
    return np.maximum.reduce(clips), np.maximum.reduce(high)


def _ends(element: Codec) -> list[tuple[int, float, float]]:
    """(sign, largest magnitude, factor) of each sign whose magnitudes are a codec's own; the factor brings a magnitude
    to the measure of `_Scales.reach`."""
    if element.symmetric:
        return [(1, element.max, 1.0)]
    high, low = max(element.grid), -min(element.grid)  # consecutive integers
    return [(1, high, 1.0), (-1, low, (high // 2 + 0.5) / (low // 2 + 0.5))]


class _Sums:
    """Prefix sums of a block: of p, p x and p x^2 of the first 0, 1, ... all magnitudes x, ascending, of weights p."""

    def __init__(self, blocks: _Blocks) -> None:
        self._steps = _steps(blocks.fmt.element)
        self._ends = _ends(blocks.fmt.element)
        self._top = self._ends[0][1]
        self._x, weights = _ascending(blocks.x[0], None if blocks.h is None else blocks.h[0])
        sums = np.zeros((3, len(self._x) + 1))
        moments = sums[:, 1:]
        moments[0] = weights
        np.multiply(moments[0], self._x, out=moments[1])
        np.multiply(moments[1], self._x, out=moments[2])
        np.cumsum(moments, axis=1, out=moments)
        self._weight, self._first, self._second = sums
        self._energy = float(self._second[-1])
        self.amax = max(self._x[-1], -self._x[0])

    def error(self, s: Array) -> tuple[Array, Array]:
        """float64, like ``s``: sum p (x - s q)^2, q the code nearest to x / s; and what the definition may differ by.

        With i_j the number of x below the middle of the magnitudes q_j and q_j+1, sum p x q is the largest magnitude
        times all of sum p x, less (q_j+1 - q_j) times the sum of the first i_j for every j; sum p q^2 likewise.
        """
        below = np.searchsorted(self._x, s.astype(np.float32)[:, None] * self._steps.middle)
        cross = self._top * self._first[-1] - self._first[below] @ self._steps.step
        square = self._top**2 * self._weight[-1] - self._weight[below] @ self._steps.step2
        error = np.maximum(self._energy - 2 * s * cross + s * s * square, 0.0)
        slack = ROUNDED * np.sqrt(error * self._energy) + (ROUNDED**2 + SUMS) * self._energy + 2.0**-22 * error
        return error, slack

    def clipping(self, s: Array) -> Array:
        """float64, like ``s``: the least that the clipped elements alone add to the error."""
        least: Array = np.zeros_like(s)
        for sign, end, _ in self._ends:
            edge = sign * s * end
            at = np.searchsorted(self._x, edge.astype(np.float32))
            count, first, second = self._weight[at], self._first[at], self._second[at]
            if sign > 0:  # those behind it
                count = self._weight[-1] - count
                first, second = self._first[-1] - first, self._energy - second
            least += (second - 2 * edge * first + edge * edge * count) * (1 - MARGIN)
        return least - SUMS * self._energy


def _ascending(x: Array, h: Array | None) -> tuple[Array, Array]:
    """``x``, ascending, and the weight of each: ``h`` or 1.

    Non-negative numbers that are bfloat16 are counted by their upper 16 bits instead of sorted: equal ones become one
    of the sum of their weights.
    """
    bits = x.view(np.int32)
    if not ((bits & 0xFFFF) | (bits < 0)).any():
        upper = bits >> 16
        count = np.bincount(upper)
        occupied = np.flatnonzero(count)
        weights = count if h is None else np.bincount(upper, h)
        return (occupied.astype(np.int32) << 16).view(np.float32), weights[occupied]
    if h is None:
        return np.sort(x), np.ones(len(x))
    order = x.argsort()
    return x[order], h[order]


class _Steps(NamedTuple):
    """The magnitudes of a codec (its numbers, of one that is not symmetric), and of neighbours what lies between them.

    codes       uint8, of each
    magnitudes  float32
    middle      float32, halfway between
    upper       float32, the largest number that rounds to the lower one: a tie goes to the even code
    step        float64, their difference
    step2       float64, the difference of their squares
    """

    codes: Array
    magnitudes: Array
    middle: Array
    upper: Array
    step: Array
    step2: Array


@cache
def _steps(element: Codec) -> _Steps:
    exact = np.array(element.magnitudes if element.symmetric else sorted(element.grid))
    codes = (np.arange(len(exact)) if element.symmetric else np.argsort(element.grid)).astype(np.uint8)
    middle = ((exact[:-1] + exact[1:]) / 2).astype(np.float32)
    upper = np.where(codes[:-1] % 2 == 1, np.nextafter(middle, np.float32(-np.inf)), middle)
    return _Steps(codes, exact.astype(np.float32), middle, upper, np.diff(exact), np.diff(exact**2))


class _Scales(NamedTuple):
    """Every scale of a format, ascending: as it is stored, its value in float32 and in float64, and the least amax
    (float64, for a global scale of 1) at which it need be looked at. Below that it has a half that is legal and no code
    is above half of the largest; or all codes are zero."""

    stored: torch.Tensor
    value: Array
    exact: Array
    reach: Array


@cache
def _scales(fmt: Format) -> _Scales:
    stored = all_scales(fmt.scale)
    value = scale_values(stored, fmt.scale).numpy()
    exact = value.astype(np.float64)
    mags = fmt.element.magnitudes
    magnitudes = set(mags)
    past = next(i for i, m in enumerate(mags) if 2 * m not in magnitudes)
    half, zero = (mags[past - 1] + mags[past]) / 2, fmt.element.min_positive / 2
    proven = fmt.element.min_positive >= 2.0**-18  # else products may underflow, which the proof rules out
    halved = exact[np.searchsorted(exact, exact / 2)] == exact / 2
    return _Scales(stored, value, exact, exact * np.where(halved & proven, half, zero))
