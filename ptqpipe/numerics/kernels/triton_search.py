"""Block scales in Triton, one block to a lane: ``search/brute_force.py``'s, and ``baselines.absmax``'s.

A block's float32 sum runs in element order inside its lane. The scores are those of ``search/objective.py``, to the
bit; only codes that cannot win are left out. With y = amax * (1 / s):

* above the window: if every code at s is at most code(max/2), s/2 is as good and its code smaller (the objective's
  second proof); y <= ABOVE says so;
* below it, without weights: from y > BELOW on 2s is better, because what amax gains outweighs what the other elements
  can lose (``triton_block._limits`` has the sums). BELOW is widened by a margin that dwarfs float32's rounding;
* below it, with weights: the clipped elements alone bound the score from below and that bound grows downwards, so a
  lane stops once it exceeds the best score by 2^-16, again far more than its rounding;
* where s/2 or 2s is no legal scale (the odd ones of the lowest 15 codes, the top octave) nothing is left out;
* where float32 itself breaks these proofs every code is scored: a block more than 2^16 beyond saturation (all scores
  equal up to rounding), or a global scale outside 2^-100 .. 2^100.

Every launch must say ``enable_fp_fusion=False``. Imports Triton: import it from inside functions.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ptqpipe.numerics.kernels.triton_codecs import (
    Minifloat,
    decode_e8m0,
    decode_magnitude,
    encode_signed,
    floor_minifloat3,
    round_magnitude,
)


class BlockPlan(NamedTuple):
    """The constants of a format.

    block   elements of a block
    scale   a scale codec with three mantissa bits, where it is not ``e8m0``; a sign bit above its own is never set
    stop    largest scale code
    octave  of the element's largest magnitude: its binary exponent
    above, below  see the module's docstring
    """

    element: Minifloat
    block: int
    e8m0: bool
    scale: Minifloat
    stop: int
    octave: int
    above: float
    below: float


@triton.jit
def magnitudes(w: tl.tuple, B: tl.constexpr) -> tl.tuple:
    """(amax, |w| as a tuple with elements below 2^-32 amax set to zero), per lane."""
    amax = tl.abs(w[0])
    for k in tl.static_range(1, B):
        amax = tl.maximum(amax, tl.abs(w[k]))
    x: tl.tuple = ()
    for k in tl.static_range(B):
        magnitude = tl.abs(w[k])
        x = x + (tl.where(magnitude < amax * 2.0**-32, 0.0, magnitude),)  # noqa: RUF005 - Triton has no starred tuples
    return amax, x


@triton.jit
def candidate(code: tl.tensor, global_scale: tl.tensor, PLAN: tl.constexpr) -> tl.tuple:
    """(r, value squared) of int32 scale codes: r = 1/s correctly rounded; the square exact, float64 for E8M0."""
    SCALE: tl.constexpr = PLAN.scale
    if PLAN.e8m0:
        # 1 / 2^(c-127) is 2^((254-c)-127), exact; only that of code 254 is subnormal.
        r = decode_e8m0(254 - code)
        square = ((code.to(tl.int64) * 2 + (1023 - 254)) << 52).to(tl.float64, bitcast=True)
    else:
        value = decode_magnitude(code, SCALE)
        r = tl.div_rn(tl.full(code.shape, 1.0, tl.float32), value * global_scale)
        square = value * value
    return r, square


@triton.jit
def deviation(
    x: tl.tuple,
    h: tl.tuple,
    r: tl.tensor,
    PLAN: tl.constexpr,
    WEIGHTED: tl.constexpr,
) -> tl.tuple:
    """(sum of d^2 h in element order, what clipped elements contribute to it; zero without weights), per lane."""
    ELEMENT: tl.constexpr = PLAN.element
    B: tl.constexpr = PLAN.block
    acc = tl.zeros(r.shape, tl.float32)
    clipped = tl.zeros(r.shape, tl.float32)
    for k in tl.static_range(B):
        y = x[k] * r
        inside = tl.minimum(y, ELEMENT.max)
        d = y - round_magnitude(inside, ELEMENT)
        t = d * d
        if WEIGHTED:
            t = t * h[k]
            over = y - inside
            clipped += over * over * h[k]
        acc += t
    return acc, clipped


@triton.jit
def score(
    x: tl.tuple,
    h: tl.tuple,
    amax: tl.tensor,
    code: tl.tensor,
    global_scale: tl.tensor,
    PLAN: tl.constexpr,
    WEIGHTED: tl.constexpr,
) -> tl.tuple:
    """(score of one scale code per lane, a lower bound of it and of those of all smaller codes)."""
    ELEMENT: tl.constexpr = PLAN.element
    r, square = candidate(code, global_scale, PLAN)
    acc, clipped = deviation(x, h, r, PLAN, WEIGHTED)
    rounds_to_zero = amax * r <= 2.0 ** (ELEMENT.emin - ELEMENT.mant - 1)
    total = tl.where(rounds_to_zero, float("inf"), acc.to(square.dtype) * square)
    return total, clipped.to(square.dtype) * square


@triton.jit
def window_minifloat3(amax: tl.tensor, global_scale: tl.tensor, PLAN: tl.constexpr, WEIGHTED: tl.constexpr) -> tl.tuple:
    """(first, last) code that can win. ``last`` is one more than amax / (above g) says, because that is rounded."""
    SCALE: tl.constexpr = PLAN.scale
    STOP: tl.constexpr = PLAN.stop
    last = floor_minifloat3(tl.div_rn(amax, global_scale * PLAN.above), SCALE.emin, STOP) + 1
    last = tl.minimum(tl.maximum(last, 15), STOP)
    first = tl.full(amax.shape, 1, tl.int32)
    if not WEIGHTED:
        first = floor_minifloat3(tl.div_rn(amax, global_scale * PLAN.below), SCALE.emin, STOP)
        first = tl.maximum(tl.minimum(first, STOP - 7), 1)
    hopeless = tl.div_rn(amax, global_scale) > SCALE.max * 2.0**16
    odd_scale = (global_scale < 2.0**-100) | (global_scale > 2.0**100)
    first = tl.where(hopeless | odd_scale | (amax == 0.0), 1, first)
    last = tl.where(odd_scale, STOP, last)
    return first, tl.where(amax == 0.0, 1, last)


@triton.jit
def window_e8m0(amax: tl.tensor, PLAN: tl.constexpr, WEIGHTED: tl.constexpr) -> tl.tuple:
    """(first, last) code that can win: around the one that puts amax into [2^octave, 2^(octave+1))."""
    bits = amax.to(tl.int32, bitcast=True)
    code = (bits >> 23) - PLAN.octave
    y = ((bits & 0x007FFFFF) + ((PLAN.octave + 127) << 23)).to(tl.float32, bitcast=True)
    last = tl.maximum(code + (y > 2 * PLAN.above).to(tl.int32), 0)
    first = tl.zeros(amax.shape, tl.int32)
    if not WEIGHTED:
        first = tl.maximum(code - (2 * y <= PLAN.below).to(tl.int32), 0)
    return tl.where(amax == 0.0, 0, first), tl.where(amax == 0.0, 0, last)


@triton.jit
def search(
    x: tl.tuple,
    h: tl.tuple,
    amax: tl.tensor,
    global_scale: tl.tensor,
    PLAN: tl.constexpr,
    WEIGHTED: tl.constexpr,
) -> tl.tensor:
    """int32 scale codes: the smallest code of the least score.

    Codes are scored downwards, so that the last of equals is the smallest. A lane that is done goes on scoring its
    ``first`` code, which changes nothing.
    """
    if PLAN.e8m0:
        first, last = window_e8m0(amax, PLAN, WEIGHTED)
        best = tl.full(amax.shape, float("inf"), tl.float64)
    else:
        first, last = window_minifloat3(amax, global_scale, PLAN, WEIGHTED)
        best = tl.full(amax.shape, float("inf"), tl.float32)
    code = last
    chosen = last
    left = tl.max(last - first, axis=0) + 1
    while left > 0:
        steps = left
        if WEIGHTED:
            steps = tl.minimum(left, 4)
        for _ in range(steps):
            at = tl.maximum(code, first)
            now, bound = score(x, h, amax, at, global_scale, PLAN, WEIGHTED)
            better = now <= best
            best = tl.where(better, now, best)
            chosen = tl.where(better, at, chosen)
            code = at - 1
            if WEIGHTED:
                code = tl.where(bound > best * (1 + 2.0**-16), first - 1, code)
        left = tl.max(code - first, axis=0) + 1
    return chosen


@triton.jit
def absmax_code(amax: tl.tensor, global_scale: tl.tensor, PLAN: tl.constexpr) -> tl.tensor:
    """int32 code for amax / max / global_scale: a power of two rounded up, a minifloat rounded to nearest.

    A minifloat that rounds to zero becomes code 32, which is 64 times the smallest scale, as ``absmax`` has it.
    """
    ELEMENT: tl.constexpr = PLAN.element
    SCALE: tl.constexpr = PLAN.scale
    wanted = tl.div_rn(tl.div_rn(amax, tl.full(amax.shape, ELEMENT.max, tl.float32)), global_scale)
    if PLAN.e8m0:
        # 2^(c-127) has c in the exponent field and no fraction; 2^-127, of code 0, is the fraction one half.
        bits = wanted.to(tl.int32, bitcast=True)
        below = bits >> 23
        code = below + ((bits & 0x007FFFFF) > tl.where(below == 0, 0x00400000, 0)).to(tl.int32)
    else:
        code = encode_signed(wanted, tl.full(amax.shape, 1.0, tl.float32), SCALE)
        code = tl.where(code == 0, 32, code)
    return tl.minimum(code, PLAN.stop)
