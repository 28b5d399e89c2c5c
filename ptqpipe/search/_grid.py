"""Tables that the exact searches read: how the element codec rounds, and the ladder of legal scales.

Derived from a Format and a global scale alone; knows nothing of tensors of a model.
"""

from dataclasses import dataclass

import torch

from ptqpipe.errors import FormatError
from ptqpipe.formats import Codec, Format
from ptqpipe.qtensor import scale_values
from ptqpipe.search.brute_force import all_scales
from ptqpipe.search.objective import exact_weights

MARGIN = 2.0**-18  # far above the rounding of three float32 operations (2^-22), far below a step of any scale codec


@dataclass(frozen=True, slots=True)
class ElementGrid:
    """Rounding to an element codec by a magic number, in float32.

    Let M be the power of two of y's binade, clamped to [low, high]. Adding ``M * magic`` brings y into the binade
    whose ulp is the codec's step there, so ``(y + M * magic) - M * magic`` is y rounded to that step, ties to even
    multiples; ``top`` saturates. Equal to ``qtensor.round_to`` but for ties and hence in every |d|.

    low, high  powers of two: the codec's smallest normal binade (subnormals share its step) and its top binade
    magic      2^(23 - mantissa bits)
    top        largest magnitude
    wrap       y up to here rounds to at most ``top`` without saturation
    zero       y up to here rounds to zero
    half       y up to here has a code whose doubled magnitude is in the codec: such a scale is never better than
               half of it
    """

    low: float
    high: float
    magic: float
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
        magic = step * 2.0**23
    else:
        steps = linear - 1  # 2^(mantissa bits + 1): the subnormals and the first normal binade share a step
        low = steps // 2 * step
        high = 2.0 ** (int(torch.frexp(torch.tensor(mags[-1], dtype=torch.float64)).exponent) - 1)
        magic = 2.0**24 / steps
    known = set(mags)
    reach = next(i for i, m in enumerate(mags) if 2 * m not in known) - 1
    last_step = mags[-1] - mags[-2]
    grid = ElementGrid(low, high, magic, mags[-1], mags[-1] + last_step / 2, step / 2, (mags[reach] + mags[reach + 1]) / 2)
    if any(_rounded(m, grid) != m for m in mags):
        raise FormatError(f"{codec.name} is no minifloat; the exact search cannot round to it")
    return grid


def _rounded(y: float, grid: ElementGrid) -> float:
    """One magnitude rounded as the searches do."""
    value = torch.tensor([y])
    binade = torch.ldexp(torch.ones(1), torch.frexp(value).exponent - 1).clamp(grid.low, grid.high)
    shift = binade * grid.magic
    return float(((value + shift) - shift).clamp(max=grid.top))


@dataclass(frozen=True, slots=True)
class Ladder:
    """Every legal scale of a format at one global scale, ascending.

    codes       what a QTensor stores: uint8 codes, or numbers of the scale's dtype
    inv         float32 1 / (value * global_scale)
    weight      value^2: float32, or float64 where ``exact_weights`` says so
    threshold   float32: a block whose amax is at most this rounds to codes that half of the scale reaches too
    lone        the last index whose half is not a legal scale: all above it fall under the halving proof
    """

    codes: torch.Tensor
    inv: torch.Tensor
    weight: torch.Tensor
    threshold: torch.Tensor
    lone: int

    def start(self, amax: torch.Tensor) -> torch.Tensor:
        """int64 ``[blocks]``: an index above which no scale can be the one chosen, for blocks of this ``amax``."""
        return (torch.bucketize(amax, self.threshold) - 1).clamp_(min=self.lone)


def ladder(fmt: Format, *, global_scale: torch.Tensor | None, grid: ElementGrid, device: torch.device) -> Ladder:
    """The ladder of ``fmt``; FormatError for scales that cannot be enumerated."""
    codes = all_scales(fmt.scale).to(device)
    value = scale_values(codes, fmt.scale)
    s = value if global_scale is None else value * global_scale.to(device)
    square = value.double().square() if exact_weights(fmt.scale) else value * value
    exact = value.double()
    has_half = torch.isin(exact / 2, exact)
    lone = int((~has_half).nonzero()[-1])
    if fmt.element.min_positive < 2.0**-18:  # the halving proof needs products that do not underflow
        lone = len(codes) - 1
    return Ladder(codes, 1.0 / s, square, s * (grid.half * (1.0 - MARGIN)), lone)
