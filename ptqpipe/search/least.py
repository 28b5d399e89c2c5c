"""The best scales of a few blocks, from the definition alone: brute force quick enough to run beside a conversion.

Leaves out only the scales that cannot win, by bounds as plain as they can be and with margins far above rounding: those
at which the whole block rounds to zero, those so small that clipping alone costs more than the whole error at another
scale, and those whose half reaches the same values (the first proof of ``objective.py``). Shares no code with the
searches that it judges.

Scales that are plain numbers (bfloat16, float16) are hundreds even so, and their blocks long. With the magnitudes
sorted, the error at a scale is a sum over the codes, of differences of prefix sums in float64, whatever the length of
the block. That rounds otherwise than the definition, by a bounded amount; scales that come so near to the least are
scored by the definition.
"""

from functools import cache

import numpy as np
import torch

from ptqpipe.formats import Codec, Format
from ptqpipe.qtensor import round_to, scale_values
from ptqpipe.search.brute_force import all_scales
from ptqpipe.search.objective import scores

MARGIN = 1e-4  # relative; float32 quotients, products and sums of a block of 256 round by less
ROUNDED = 2.0**-20  # of y, relative: more than twice what its own roundings and those of a middle come to
SUMS = 2.0**-40  # of the sum of the squares: far above the rounding of prefix sums in float64
AT_ONCE = 1 << 22  # elements that are scored in one go: a weight with one scale is one block
NEIGHBOURS = 4  # scales on either side of the one that is judged, which are never left out


def best_scales(
    x: torch.Tensor,
    stored: torch.Tensor,
    *,
    fmt: Format,
    global_scale: torch.Tensor | None = None,
    h: torch.Tensor | None = None,
    every: int = 1,
    first: int = 0,
) -> torch.Tensor:
    """What ``brute_force.search`` gives for these blocks, ``[blocks]`` like ``stored``.

    x       float32 ``[blocks, elements]`` flushed magnitudes
    stored  ``[blocks]`` the scales that are judged
    h       float32 ``[blocks, elements]`` normalized weights, or None
    every   where scales are numbers, only so many-th are tried, from ``first`` on, and the neighbours of ``stored``
    """
    if fmt.scale.enumerable:
        return _among_codes(x, stored, fmt, global_scale, h)
    found = []
    for i in range(len(x)):
        weights = None if h is None else h[i : i + 1]
        found.append(_among_numbers(x[i : i + 1], stored[i : i + 1], fmt, global_scale, weights, every, first))
    return torch.cat(found)


def _among_codes(
    x: torch.Tensor, stored: torch.Tensor, fmt: Format, global_scale: torch.Tensor | None, h: torch.Tensor | None
) -> torch.Tensor:
    """`best_scales` where scales have codes: every pair of a block and a code that may win is scored at once."""
    codes, (s, reach) = all_scales(fmt.scale), _reach(fmt)
    amax = x.amax(dim=1)

    def rough(block: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """The score but for the order of its sum."""
        y = x[block] * _inverse(scales, fmt, global_scale).unsqueeze(1)
        t = (y - round_to(y, fmt.element)).square_()
        score = (t if h is None else t * h[block]).sum(dim=1).double() * scale_values(
            scales, fmt.scale
        ).double().square()
        return score

    low, high = _bounds(x, rough(torch.arange(len(x)), stored), fmt, global_scale, h)
    live = amax.unsqueeze(1) * _inverse(codes, fmt, global_scale) > fmt.element.min_positive / 2
    block, code = (live & (reach <= high.unsqueeze(1)) & ~(s < low.unsqueeze(1))).nonzero(as_tuple=True)
    score = rough(block, codes[code])
    near = score <= _least(score, block, len(x))[block] * (1 + MARGIN)
    block, code = block[near], code[near]
    if bool((block[1:] == block[:-1]).any()):  # more than one for a block: the definition decides
        score = scores(x[block], codes[code], fmt=fmt, global_scale=global_scale, h=None if h is None else h[block])
        won = score == _least(score, block, len(x))[block]
        block, code = block[won], code[won]
    first = torch.full((len(x),), len(codes)).scatter_reduce_(0, block, code, "amin")  # ties go to the smallest code
    return codes[torch.where(first == len(codes), 0, first)]  # a block that every scale zeroes has the smallest


def _among_numbers(
    x: torch.Tensor,
    stored: torch.Tensor,
    fmt: Format,
    global_scale: torch.Tensor | None,
    h: torch.Tensor | None,
    every: int,
    first: int,
) -> torch.Tensor:
    """`best_scales` of one block ``[1, elements]`` whose scales are numbers."""
    numbers, (s, reach) = _numbers(fmt.scale), _reach(fmt)
    g = 1.0 if global_scale is None else float(global_scale)
    sums = _Sums(x[0], fmt.element, None if h is None else h[0])
    limit = torch.tensor([float("inf")], dtype=torch.float64)
    if bool(torch.isfinite(stored) & (stored > 0)):
        error, slack = sums.error(stored.double() * g)
        limit = (error + slack) / g**2
    low, high = _bounds(x, limit, fmt, global_scale, h)
    index = torch.arange(int(torch.searchsorted(s, low)), int(torch.searchsorted(reach, high, right=True)))
    near = (index - torch.searchsorted(s, stored.double())).abs() <= NEIGHBOURS
    rest = numbers[index[near | (index % every == first % every)]]
    rest = rest[sums.amax * _inverse(rest, fmt, global_scale) > fmt.element.min_positive / 2]
    rest = rest[~(sums.clipping(rest.double() * g) > limit * g**2)]
    if not len(rest):
        return numbers[:1]
    error, slack = sums.error(rest.double() * g)
    rest = rest[error - slack <= (error + slack).min()]
    if len(rest) > 1:
        parts = torch.split(rest, max(1, AT_ONCE // x.shape[1]))
        exact = torch.cat(
            [scores(x.expand(len(p), -1), p, fmt=fmt, global_scale=global_scale, h=_rows(h, len(p))) for p in parts]
        )
        rest = rest[exact.argmin()].reshape(1)  # the first of equal ones: scales ascend
    return rest


def _rows(h: torch.Tensor | None, count: int) -> torch.Tensor | None:
    return None if h is None else h.expand(count, -1)


def _bounds(
    x: torch.Tensor, limit: torch.Tensor, fmt: Format, global_scale: torch.Tensor | None, h: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 ``[blocks]`` each: the scale below which clipping alone costs more than the score ``limit``, and the
    ``_reach`` above which no scale need be looked at."""
    g = 1.0 if global_scale is None else float(global_scale)
    amax = x.amax(dim=1)
    loss = limit if h is None else limit / h.gather(1, x.argmax(dim=1, keepdim=True))[:, 0]
    clips = (amax.double() * (1 - MARGIN) - loss.sqrt() * (g * (1 + MARGIN))) / (fmt.element.max * g)
    return clips, amax.double() * ((1 + MARGIN) / g)


def _inverse(scales: torch.Tensor, fmt: Format, global_scale: torch.Tensor | None) -> torch.Tensor:
    """float32: what the definition multiplies magnitudes by."""
    value = scale_values(scales, fmt.scale)
    return 1.0 / (value if global_scale is None else value * global_scale)


def _least(score: torch.Tensor, block: torch.Tensor, count: int) -> torch.Tensor:
    """float64 ``[count]``: the least score of each block, inf where it has none."""
    return torch.full((count,), float("inf"), dtype=torch.float64).scatter_reduce_(0, block, score, "amin")


class _Sums:
    """Prefix sums of a block's sorted magnitudes."""

    def __init__(self, x: torch.Tensor, element: Codec, h: torch.Tensor | None) -> None:
        self._middle, self._step, self._step2 = _steps(element)
        self._top = element.max
        if h is None:
            self._x = _ascending(x)
            exact = first = self._x.double()
            self._count = torch.arange(len(x) + 1, dtype=torch.float64)
        else:
            self._x, order = x.sort()
            exact, p = self._x.double(), h[order].double()
            first = p * exact
            self._count = torch.cat((torch.zeros(1, dtype=torch.float64), p.cumsum(0)))
        self._first = torch.cat((torch.zeros(1, dtype=torch.float64), first.cumsum(0)))
        self._second = torch.cat((torch.zeros(1, dtype=torch.float64), (first * exact).cumsum(0)))
        self._energy = float(self._second[-1])
        self.amax = self._x[-1]

    def error(self, s: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """float64, like ``s``: sum p (x - s q)^2, q the code nearest to x / s; and what the definition may differ by.

        With i_j the number of x below the middle of the magnitudes q_j and q_j+1, sum p x q is the largest magnitude
        times all of sum p x, less (q_j+1 - q_j) times the sum of the first i_j for every j; sum p q^2 likewise.
        """
        below = torch.bucketize(s.float().unsqueeze(1) * self._middle, self._x)
        cross = self._top * self._first[-1] - self._first[below] @ self._step
        square = self._top**2 * self._count[-1] - self._count[below] @ self._step2
        error = (self._energy - 2 * s * cross + s * s * square).clamp_(min=0.0)
        slack = ROUNDED * (error * self._energy).sqrt() + (ROUNDED**2 + SUMS) * self._energy + 2.0**-22 * error
        return error, slack

    def clipping(self, s: torch.Tensor) -> torch.Tensor:
        """float64, like ``s``: the least that the clipped elements alone add to the error."""
        top = s * self._top
        whole = torch.bucketize(top.float(), self._x)
        count, first, second = (sums[-1] - sums[whole] for sums in (self._count, self._first, self._second))
        return (second - 2 * top * first + top * top * count) * (1 - MARGIN) - SUMS * self._energy


def _ascending(x: torch.Tensor) -> torch.Tensor:
    """Non-negative float32 sorted; numbers that are bfloat16 by their 16 bits, for which numpy counts digits."""
    bits = x.view(torch.int32)
    if bool((bits & 0xFFFF).any()):
        return torch.from_numpy(np.sort(x.numpy()))
    upper = np.sort((bits >> 16).to(torch.int16).numpy(), kind="stable")
    return (torch.from_numpy(upper).int() << 16).view(torch.float32)


@cache
def _steps(element: Codec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Between neighbouring magnitudes: their middle (float32), their difference and that of their squares (float64)."""
    magnitudes = torch.tensor(element.magnitudes, dtype=torch.float64)
    return ((magnitudes[:-1] + magnitudes[1:]) / 2).float(), magnitudes.diff(), magnitudes.square().diff()


@cache
def _numbers(codec: Codec) -> torch.Tensor:
    """``all_scales`` of a codec of tens of thousands."""
    return all_scales(codec)


@cache
def _reach(fmt: Format) -> tuple[torch.Tensor, torch.Tensor]:
    """float64: the value of every scale, and the least amax, for a global scale of 1, at which it need be looked at.

    Below it the scale has a half that is legal and no code is above half of the largest; or all codes are zero.
    """
    value = scale_values(all_scales(fmt.scale), fmt.scale).double()
    mags = fmt.element.magnitudes
    known = set(mags)
    past = next(i for i, m in enumerate(mags) if 2 * m not in known)
    half, zero = (mags[past - 1] + mags[past]) / 2, fmt.element.min_positive / 2
    proven = fmt.element.min_positive >= 2.0**-18  # else products may underflow, which the proof rules out
    return value, value * torch.where(torch.isin(value / 2, value) & proven, half, zero)
