"""The float32 global scale of a fused group: the abs-max one, its canonical neighbours, and the search among them.

Every global scale that leaves this file is *canonical* for its scale codec: written as a multiplier g (ModelOpt) or
as a divisor d = 1/g (compressed-tensors), it decodes to the same bits. Canonical means, in float32, with d = RN(1/g):

    RN(1/d) == g        and        RN(v/d) == RN(v*g) for every value v of the scale codec.

About one float32 in five is canonical for E4M3. ``canonical`` looks among the short ones: if g has at most 24 - p
significant bits and v at most p (4 for E4M3), then v*g is exact and v/d = v*g*(1-e), where e is the relative error of
d, so the second condition asks no more than |e| < 2^-24/M for the largest significand M < 2 of all v*g. Since |e| <=
2^-24 G/2 for g's own significand G, seven short g in ten pass; the longest run of failures lies at the square root of
2, where the rounding error of 1/g changes slowly. Both conditions look at significands alone, so one octave stands
for all, and the largest step that ``canonical`` ever takes (1.41e-4 of g for E4M3) is found by trying every short g of
an octave, which a test does.

Knows formats; must not know searches, tensors of a model, files or containers: the error of a candidate comes from a
callable. The octave and the number of points come from measurements of real weights (labs/global_scale_gain).
"""

import math
from collections.abc import Callable, Sequence
from functools import cache

import torch

from ptqpipe.errors import NumericsError
from ptqpipe.numerics.formats import Codec, Format

RANGE = (2.0**-100, 2.0**100)  # beyond, products with block scales or their reciprocals leave float32
OCTAVE_START = 1.5  # candidates lie in [1.5, 3) x the plain one: room for the blocks that want a larger scale
POINTS = 16
SAMPLE_ALL = 1 << 17  # weights of this many elements and fewer are sampled whole
SAMPLE_FRACTION = 16
SAMPLE_RUNS = 32


def absmax_global(amax: float, fmt: Format) -> torch.Tensor:
    """float32 0-d: amax / max_product (2688 for NVFP4), rounded to a canonical one; 1 for a group of zeros.

    For scale codecs with more range than any weight needs (8 exponent bits) the divisor is the largest element alone.
    Raises NumericsError when the result is outside 2^-100 .. 2^100 or ``amax`` is not finite.
    """
    if amax == 0:
        return torch.tensor(1.0)
    return canonical(torch.tensor(amax, dtype=torch.float32) / torch.tensor(absmax_divisor(fmt)), fmt)


def absmax_divisor(fmt: Format) -> float:
    """The divisor of the amax in the abs-max global scale: the largest product, or the largest element alone."""
    narrow = fmt.scale.enumerable and fmt.scale.max <= 2.0**60
    return fmt.max_product if narrow else fmt.element.max


def canonical(g: torch.Tensor, fmt: Format) -> torch.Tensor:
    """The canonical float32 nearest to ``g`` among those of 24 - p significant bits, the larger at equal distance.

    p is the scale codec's number of significant bits; the change is at most 1.41e-4 of g for E4M3 scales (4 bits).
    Scales of 24 bits leave no room: for them only the reciprocal's round trip is ensured.
    Raises NumericsError outside 2^-100 .. 2^100 (NaN and inf included).
    """
    value = float(g)
    if not RANGE[0] <= value <= RANGE[1]:
        raise NumericsError(
            f"global scale {value:g} of {fmt.name} is outside 2^-100 .. 2^100; the weight's magnitudes are not "
            "those of a trained model, rescale it or keep it"
        )
    significand, exponent = math.frexp(float(g.float()))
    bits = max(8, 24 - significant_bits(fmt.scale))
    units = significand * 2.0**bits
    nearest = math.floor(units)
    for distance in range(1 << bits):
        for unit in sorted({nearest - distance, nearest + 1 + distance}, key=lambda u: (abs(u - units), -u)):
            candidate = torch.tensor(math.ldexp(unit, exponent - bits))
            if is_canonical(candidate, fmt):
                return candidate
    raise AssertionError("unreachable: powers of two are canonical")


def is_canonical(g: torch.Tensor, fmt: Format) -> bool:
    """Whether the float32 ``g`` decodes to the same bits as a multiplier and as the divisor 1/g, at every scale."""
    g, values = g.float().cpu(), _odd_values(fmt.scale)
    inv = 1.0 / g  # a division of two tensors below: a number divided by a tensor is a product with its reciprocal
    return bool(1.0 / inv == g) and torch.equal(values / inv, values * g)


@cache
def significant_bits(codec: Codec) -> int:
    """The most significant bits that a value of the codec has: 4 for E4M3, 1 for E8M0."""
    if codec.dtype is not None:
        return 1 - round(math.log2(torch.finfo(codec.dtype).eps))
    return max(_odd_part(m).bit_length() for m in codec.magnitudes if m)


def _odd_part(magnitude: float) -> int:
    numerator = magnitude.as_integer_ratio()[0]
    return numerator // (numerator & -numerator)


@cache
def _odd_values(codec: Codec) -> torch.Tensor:
    """float32: every significand of the codec as an odd integer; powers of two change no rounding. 1 for 24 bits."""
    bits = significant_bits(codec)
    return torch.arange(1, 1 << bits if bits < 16 else 2, 2, dtype=torch.float32)


def candidates(plain: torch.Tensor, fmt: Format, *, points: int = POINTS) -> list[torch.Tensor]:
    """The plain global scale, then ``points`` canonical ones evenly (in the logarithm) over [1.5, 3) times it."""
    factors = (OCTAVE_START * 2.0 ** (k / points) for k in range(points))
    return [plain, *(canonical(plain * factor, fmt) for factor in factors)]


def pick(
    plain: torch.Tensor,
    fmt: Format,
    *,
    totals: Callable[[Sequence[torch.Tensor]], Sequence[float]],
    points: int = POINTS,
    exact: torch.Tensor | None = None,
) -> torch.Tensor:
    """The candidate with the least total, the first one at equality; ``plain`` where no other is below it.

    plain   float32 0-d, from :func:`absmax_global`
    totals  the squared errors of the whole group (or of a fixed sample of it) at global scales, blocks searched
    exact   a candidate besides, from :func:`exact_global`; where its total is zero it is taken

    On a sample the choice is a ranking, not a proof: the caller compares the whole group at both before it keeps it.
    """
    best, least = plain, math.inf
    if exact is not None:
        best, least = exact, totals([exact])[0]
        if least == 0:
            return best
    globals_tried = candidates(plain, fmt, points=points)
    for candidate, error in zip(globals_tried, totals(globals_tried), strict=True):
        if error < least:
            best, least = candidate, error
    return best


def exact_global(amax: float, fmt: Format, samples: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The power of two at which weights of an MXFP4 checkpoint are written without loss, if any global scale does that.

    Their numbers have at most the two significant bits of E2M1, which no trained float weight's all have: None for
    those. A block whose largest number has the exponent a needs a scale of at least 2^(a-2), 2 being the exponent of
    E2M1's largest number. The least power of two by which the largest number's block has a scale within E4M3 (2^8)
    leaves the most room below it, 17 octaves; codes of smaller blocks may be shifted, which the exact search finds.
    """
    bits = significant_bits(fmt.element)
    if not (fmt.has_global and fmt.scale.enumerable and fmt.element.symmetric and amax > 0):
        return None
    if not all(_few_bits(sample[:1], bits) for sample in samples) or not all(_few_bits(s, bits) for s in samples):
        return None
    exponents = [math.frexp(number)[1] for number in (amax, fmt.element.max, fmt.scale.max)]
    power = exponents[0] - exponents[1] - exponents[2] + 1
    g = torch.tensor(math.ldexp(1.0, power))
    return g if RANGE[0] <= float(g) <= RANGE[1] else None


def _few_bits(w: torch.Tensor, bits: int) -> bool:
    below = (1 << (24 - bits)) - 1
    return not bool((w.float().contiguous().view(torch.int32) & below).any())


def sample_rows(shape: tuple[int, int], fmt: Format) -> list[tuple[int, int]]:
    """Runs of rows [start, stop), ascending and on block edges, that rank global scales: a function of the shape alone.

    The whole of a weight of at most 2^17 elements; else about a sixteenth of the rows (and at least 2^17 elements), in
    up to 32 runs spread evenly from the first row to the last.
    """
    rows, columns = shape
    unit = fmt.block_extent(shape)[0]
    groups = -(-rows // unit)
    if rows * columns <= SAMPLE_ALL:
        return [(0, rows)]
    wanted = max(groups // SAMPLE_FRACTION, -(-SAMPLE_ALL // (columns * unit)))
    runs = min(SAMPLE_RUNS, wanted)
    length = -(-wanted // runs)
    if length * runs >= groups:
        return [(0, rows)]
    last = groups - length
    starts = [last * k // (runs - 1) if runs > 1 else 0 for k in range(runs)]
    return [(start * unit, min((start + length) * unit, rows)) for start in starts]
