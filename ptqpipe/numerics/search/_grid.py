"""Tables that the exact searches read: how the element codec rounds, and the ladder of legal scales.

Derived from a Format and a global scale alone; knows nothing of tensors of a model.
"""

from dataclasses import dataclass

import torch

from ptqpipe.errors import FormatError, NumericsError
from ptqpipe.numerics.formats import Codec, Format
from ptqpipe.numerics.qtensor import scale_values
from ptqpipe.numerics.search.brute_force import all_scales
from ptqpipe.numerics.search.objective import exact_weights

EXPONENT = 0x7F800000  # the exponent field of a float32
MARGIN = 2.0**-18  # far above the rounding of three float32 operations (2^-22), far below a step of any scale codec


@dataclass(frozen=True, slots=True)
class ElementGrid:
    """Rounding to an element codec by a magic number, in float32.

    Let M be the power of two of y's binade, clamped to [low, high]. Adding ``M * magic`` brings y into the binade
    whose ulp is the codec's step there, so ``(y + M * magic) - M * magic`` is y rounded to that step, ties to even
    multiples; ``top`` saturates. Equal to ``qtensor.round_to`` but for ties and hence in every |d|.

    low, high  powers of two: the codec's smallest normal binade (subnormals share its step) and its top binade
    magic      2^(23 - mantissa bits), for the binade of the step (a constant step: the step times 2^23)
    free_magic the same without regard to low and high: rounding to a float of as many bits and any exponent
    top        largest magnitude
    wrap       y up to here rounds to at most ``top`` without saturation
    zero       y up to here rounds to zero
    half       y up to here has a code whose doubled magnitude is in the codec: such a scale is never better than
               half of it
    """

    low: float
    high: float
    magic: float
    free_magic: float
    top: float
    wrap: float
    zero: float
    half: float


def element_grid(codec: Codec) -> ElementGrid:
    """The rounding plan of an enumerable codec; FormatError where it is no minifloat."""
    mags = codec.magnitudes
    step = mags[1]
    linear = next((i for i, m in enumerate(mags) if m != i * step), len(mags))
    if linear == len(mags):  # one binade or less: the step is the same everywhere
        low = high = 1.0
        steps = len(mags)
        magic = step * 2.0**23
    else:
        steps = linear - 1  # 2^(mantissa bits + 1): the subnormals and the first normal binade share a step
        low = steps // 2 * step
        high = 2.0 ** (int(torch.frexp(torch.tensor(mags[-1], dtype=torch.float64)).exponent) - 1)
        magic = 2.0**24 / steps
    free_magic = 2.0**24 / (1 << (steps - 1).bit_length())  # with `reserved` codes the last binade is not full
    magnitudes = set(mags)
    reach = next(i for i, m in enumerate(mags) if 2 * m not in magnitudes) - 1
    last_step = mags[-1] - mags[-2]
    grid = ElementGrid(
        low, high, magic, free_magic, mags[-1], mags[-1] + last_step / 2, step / 2, (mags[reach] + mags[reach + 1]) / 2
    )
    if any(_rounded(m, grid) != m for m in mags):
        raise FormatError(f"{codec.name} is no minifloat; the exact search cannot round to it")
    return grid


def deviations(y: torch.Tensor, q: torch.Tensor, shift: torch.Tensor, *, grid: ElementGrid, saturates: bool) -> None:
    """Replaces ``y`` by y - RNE(y), up to the sign at ties; ``q`` and ``shift`` are scratch of its shape."""
    torch.bitwise_and(y.view(torch.int32), EXPONENT, out=shift.view(torch.int32))
    shift.clamp_(grid.low, grid.high)
    torch.add(y, shift, alpha=grid.magic, out=q)
    q.sub_(shift, alpha=grid.magic)
    if saturates:
        q.clamp_(max=grid.top)
    y.sub_(q)


def _rounded(y: float, grid: ElementGrid) -> float:
    """One magnitude rounded as the searches do."""
    value = torch.tensor([y])
    binade = torch.ldexp(torch.ones(1), torch.frexp(value).exponent - 1).clamp(grid.low, grid.high)
    shift = binade * grid.magic
    return float(((value + shift) - shift).clamp(max=grid.top))


@dataclass(frozen=True, slots=True)
class Ladder:
    """Every legal scale of a format at one global scale, ascending.

    codes   what a QTensor stores: uint8 codes, or numbers of the scale's dtype
    inv     float32 1 / (value * global_scale)
    weight  value^2: float32, or float64 where ``exact_weights`` says so
    starts  int64: by the upper bits of a float32 amax, an index above which no scale can be the one chosen
    """

    codes: torch.Tensor
    inv: torch.Tensor
    weight: torch.Tensor
    starts: torch.Tensor

    def rounded(self, index: torch.Tensor) -> torch.Tensor:
        """bool, the shape of ``index``: where a scale or its inverse is no normal number: octaves differ."""
        inv = self.inv[index]
        return (inv < _SMALLEST) | (inv > _LARGEST)

    def start(self, amax: torch.Tensor) -> torch.Tensor:
        """int64, the shape of ``amax`` (non-negative float32): an index above which no scale can be chosen."""
        keys = amax.view(torch.int32).bitwise_right_shift(_KEY_SHIFT)
        return self.starts.index_select(0, keys.flatten()).view(amax.shape)


_SMALLEST, _LARGEST = 2.0**-126, 2.0**126  # scales between them are normal numbers, and so are their inverses
_KEY_SHIFT = 18  # exponent and five mantissa bits: a bucket is a quarter of a step of E4M3


def ladder(fmt: Format, *, global_scale: torch.Tensor | None, grid: ElementGrid, device: torch.device) -> Ladder:
    """The ladder of ``fmt``.

    Raises FormatError for scales that cannot be enumerated, NumericsError for a global scale out of range.
    """
    if global_scale is not None and not 2.0**-100 <= float(global_scale) <= 2.0**100:
        raise NumericsError(
            f"global scale {float(global_scale):g} of {fmt.name} is outside 2^-100 .. 2^100, where scores would "
            "leave float32; rescale the weight or keep it"
        )
    codes = all_scales(fmt.scale).to(device)
    value = scale_values(codes, fmt.scale)
    s = value if global_scale is None else value * global_scale.to(device)
    square = value.double().square() if exact_weights(fmt.scale) else value * value
    return Ladder(codes, 1.0 / s, square, _starts(fmt, s, grid=grid))


def _starts(fmt: Format, s: torch.Tensor, *, grid: ElementGrid) -> torch.Tensor:
    """``Ladder.starts``: the largest of three indices.

    One is the largest scale at which a block of this amax may have a code that cannot be doubled: amax above
    ``grid.half`` scales, less a margin for the rounding of the quotient. One is the largest scale whose half is not a
    legal scale, or leaves the normal numbers. One is the largest scale of all, for blocks that count where the inverse
    of a scale is subnormal: its rounding is another than that of the half's.
    """
    value = scale_values(all_scales(fmt.scale), fmt.scale).double()
    alone = ~torch.isin(value / 2, value) | (s.cpu() < 2 * _SMALLEST)
    lone = int(alone.nonzero()[-1])
    if fmt.element.min_positive < 2.0**-18:  # the halving proof needs products that do not underflow
        lone = len(value) - 1
    keys = torch.arange(0x7F800000 >> _KEY_SHIFT, device=s.device)
    upper = (((keys + 1) << _KEY_SHIFT) - 1).to(torch.int32).view(torch.float32)
    starts = (torch.bucketize(upper, s * (grid.half * (1.0 - MARGIN))) - 1).clamp_(min=lone)
    if bool((s > _LARGEST).any()):
        starts[upper > grid.zero * _LARGEST] = len(value) - 1
    return starts
