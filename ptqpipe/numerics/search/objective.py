"""What a scale search minimizes, to the bit: the definition that every search and kernel reproduces.

For a block of magnitudes x_k (float32), a scale s = value(code) * global_scale (float32) and weights h_k:

    x_k = 0 where x_k < 2^-32 * max x    so that nothing below underflows
    r   = 1 / s                          rounded to float32
    y_k = x_k * r                        rounded to float32
    d_k = y_k - RNE_element(y_k)         rounded to float32; RNE saturates
    t_k = d_k * d_k [* h_k]              each product rounded to float32
    acc = ((t_0 + t_1) + t_2) + ...      float32, in element order
    score = acc * value(code)^2          rounded to float32; exact (float64) where ``exact_weights`` says so

Elements whose codec is not symmetric (two's complement) keep the sign of x_k, and a zero point is added to y_k.
The chosen code is the smallest one with the least score. A scale at which the whole block rounds to zero (its
largest y is at most half the smallest magnitude) scores infinity: such scales all have the same error, sum x_k^2
h_k, and no other scale has a larger one because zero is among the magnitudes. A block for which that holds at every
scale (an all-zero one) gets the smallest scale. The score is the squared error divided by global_scale^2, which is
the same for every candidate of a block, so magnitudes anywhere in 2^-90 .. 2^90 neither underflow nor overflow.
Weights are first scaled by a power of two to a largest one in [1, 2) and raised to at least 2^-24
(``normalize_importance``): they cannot underflow, and no weight is free to be clipped.

Working on y instead of the decoded value makes three proofs exact *in floating point*:

* a tie of RNE has the same |d| on both sides, so how ties break cannot change a score;
* if every code at scale s is at most code(max/2), then scale s/2 reaches the same values with y' = 2y exactly and
  |d'| <= 2|d|, so t' <= 4t, acc' <= 4 acc (rounding is monotone and commutes with factors of 4 where nothing
  underflows) and score(s/2) <= score(s) for any h >= 0: s can be skipped whenever s/2 is a legal scale. The flush of
  x_k is what rules underflow out: with it y >= 2^-32 * (half the smallest magnitude) or y = 0, so t_k >= 2^-126 for
  every element codec whose smallest magnitude is 2^-18 or more. Without it {1, 2^-76} at s = 1 would have the score
  0 by underflow, and more at s = 1/2;
* one clipped element bounds the score from below: score(s) >= h_k (y_k - max)^2 value(code)^2, and that grows
  strictly from code to the next smaller code, so a downward scan may stop once it exceeds the best score.

Formats whose scales are not enumerable, and blocks of more than 256 elements (FP8 rows and tiles), sum t_k and multiply
in float64 instead, since thousands of float32 additions would drown the differences. The order of that sum is fixed
too: ``LANES`` partial sums, lane j over the elements j, j + LANES, ... in order, then the lanes folded in halves.
"""

import torch

from ptqpipe.numerics.formats import Codec, Format
from ptqpipe.numerics.kernels.cpu_tensors import column_weights
from ptqpipe.numerics.qtensor import check_finite, round_to, scale_values, to_blocks

FLUSH = 2.0**-32  # elements below this fraction of their block's largest count as zero
SHORT = 256  # elements of the longest block whose sum is float32, in element order
LANES = 1024  # partial sums of a longer block, or one whose scale codec is not enumerable


def magnitude_blocks(w: torch.Tensor, fmt: Format) -> torch.Tensor:
    """float32 ``[blocks, elements]``: |w| by block, flushed, blocks in the order of the scale grid.

    Elements whose codec is not symmetric keep their sign. Raises NumericsError for NaN and inf.
    """
    check_finite(w)
    blocks = to_blocks(w.float(), fmt)
    x = blocks.abs()
    flush(x, x.amax(dim=1, keepdim=True))
    return x if fmt.element.symmetric else x.copysign_(blocks)


def flush(x: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Zeroes, in place, the magnitudes ``x`` that are too small for their block's ``amax`` (broadcast) to matter."""
    return x.masked_fill_(x < amax * FLUSH, 0.0)


def importance_blocks(importance: torch.Tensor | None, w: torch.Tensor, fmt: Format) -> torch.Tensor | None:
    """Per-column weights ``[K]`` spread over the blocks of ``w``: float32 ``[blocks, elements]``, or None."""
    if importance is None:
        return None
    return to_blocks(column_weights(importance, w).expand(w.shape[0], w.shape[1]), fmt)


def scores(
    x: torch.Tensor,
    codes: torch.Tensor,
    *,
    fmt: Format,
    global_scale: torch.Tensor | None = None,
    h: torch.Tensor | None = None,
    zeros: torch.Tensor | None = None,
) -> torch.Tensor:
    """float64 ``[blocks]``: the score of one candidate scale per block, as defined at the top of this file.

    x      float32 ``[blocks, elements]`` magnitudes; with their signs for elements that are not symmetric
    codes  ``[blocks]`` scale codes (uint8), or the scales themselves for a codec that is not enumerable
    h      float32 ``[blocks, elements]`` non-negative weights, or None for all ones
    zeros  float32 ``[blocks]`` numbers of the zero points, which are added to y; None for a format without them
    """
    score, largest = formula(x, codes, fmt=fmt, global_scale=global_scale, h=h, zeros=zeros)
    return torch.where(largest <= fmt.element.min_positive / 2, float("inf"), score)


def formula(
    x: torch.Tensor,
    codes: torch.Tensor,
    *,
    fmt: Format,
    global_scale: torch.Tensor | None = None,
    h: torch.Tensor | None = None,
    zeros: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(what the formula gives for every block, float64; the largest y): no scale is ruled out for zeroing a block.

    This is what a total adds up: a block that every scale rounds to zero still costs its energy.
    """
    value = scale_values(codes, fmt.scale)
    s = value if global_scale is None else value * global_scale
    y = x * (1.0 / s).unsqueeze(1)
    largest = (y if fmt.element.symmetric else y.abs()).amax(dim=1)
    y = y if zeros is None else y + zeros.unsqueeze(1)
    d = y - round_to(y, fmt.element)
    t = d * d
    if h is not None:
        t = t * h
    if fmt.scale.enumerable and t.shape[1] <= SHORT:
        acc = t[:, 0].clone()
        for k in range(1, t.shape[1]):
            acc += t[:, k]
    else:
        acc = lane_sum(t)
    return weigh(acc, value, fmt.scale), largest


def lane_sum(t: torch.Tensor) -> torch.Tensor:
    """float64 ``[blocks]``: the sums of float32 ``t`` ``[blocks, elements]`` in the fixed order of ``LANES`` lanes."""
    width = min(LANES, 1 << (t.shape[1] - 1).bit_length())  # lanes that stay empty add nothing
    lanes = torch.zeros(t.shape[0], width, dtype=torch.float64, device=t.device)
    for start in range(0, t.shape[1], LANES):
        part = t[:, start : start + LANES]
        lanes[:, : part.shape[1]] += part
    return fold(lanes)


def fold(lanes: torch.Tensor) -> torch.Tensor:
    """``[blocks, 2^n]`` -> ``[blocks]``: the upper half of the lanes added to the lower one until one is left."""
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def exact_weights(codec: Codec) -> bool:
    """Whether scores are float64 products: powers of two (exact), long blocks, values whose squares leave float32."""
    if not codec.enumerable or codec.power_of_two:
        return True
    return codec.max > 2.0**60 or codec.min_positive < 2.0**-60


def weigh(acc: torch.Tensor, value: torch.Tensor, codec: Codec) -> torch.Tensor:
    """float64: ``acc * value^2``, rounded to float32 unless ``exact_weights``."""
    if exact_weights(codec):
        return acc.double() * value.double().square()
    return (acc * (value * value)).double()
