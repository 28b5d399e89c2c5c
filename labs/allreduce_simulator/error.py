"""The error of an AllReduce: exact numerics of schemes over a source, in slabs of columns, and the closed form of it.

Relative L2 is ||result - sum|| / ||sum||, over all elements and as the median over blocks; the sum is that of the
bfloat16 partials in float64. Must not know time or topologies.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from labs.allreduce_simulator.codecs import PLAIN
from labs.allreduce_simulator.inputs import CANCELLATION, CHUNK, Inputs
from labs.allreduce_simulator.schemes import Partials, ReduceScheme, WireRounding, get_scheme, owners_of, reduce_of
from ptqpipe.errors import UsageError

SLAB_NUMBERS = 1 << 24  # partials of all ranks held at a time
MEDIAN_BLOCK = 64  # elements of a block in the median
MAX_RANKS = 512
BF16_ROUNDING = 0.00166  # relative L2 of rounding Gaussian numbers to bfloat16


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """What one scheme did to one source.

    bits          on the wire an element of the stages that are quantized
    rel_l2        over all elements
    rel_l2_block  median over blocks of ``MEDIAN_BLOCK``
    max_error     largest |error| over the root mean square of the sum
    bias          mean error over the root mean square of the sum
    mse           mean squared error, absolute
    model         the closed form's ``rel_l2``; None where it says nothing
    """

    scheme: str
    codec: str
    ranks: int
    data: str
    elements: int
    bits: float
    rel_l2: float
    rel_l2_block: float
    max_error: float
    bias: float
    mse: float
    model: float | None = None


class _ErrorSums:
    """What the slabs add up to."""

    def __init__(self) -> None:
        self.error = self.energy = self.signed = 0.0
        self.largest = 0.0
        self.count = 0
        self.blocks: list[torch.Tensor] = []

    def add(self, error: torch.Tensor, exact: torch.Tensor) -> None:
        """float64 ``[elements]`` each."""
        self.error += float(error.square().sum())
        self.energy += float(exact.square().sum())
        self.signed += float(error.sum())
        self.largest = max(self.largest, float(error.abs().max()))
        self.count += error.numel()
        whole = error.numel() // MEDIAN_BLOCK * MEDIAN_BLOCK
        of_block = error[:whole].reshape(-1, MEDIAN_BLOCK).square().sum(dim=1)
        self.blocks.append((of_block / exact[:whole].reshape(-1, MEDIAN_BLOCK).square().sum(dim=1)).sqrt())


@dataclass(frozen=True, slots=True)
class Case:
    """One row to be measured; ``model`` is its closed-form prediction."""

    scheme: ReduceScheme
    codec: WireRounding
    model: float | None = None


def measure(
    cases: Sequence[Case], *, source: Inputs, ranks: int, node: int = 8, output: torch.dtype = torch.bfloat16
) -> list[ErrorRow]:
    """Runs every case over the whole source, exactly; all see the same partials.

    node    ranks of a machine, for the hierarchical schemes
    output  dtype of the result
    Raises UsageError for worlds outside 2..512.
    """
    if not 2 <= ranks <= MAX_RANKS:
        raise UsageError(f"{ranks} ranks are outside of 2..{MAX_RANKS}; choose a world between")
    grain = math.lcm(CHUNK, MEDIAN_BLOCK, *(case.codec.block for case in cases))
    step = max(1, SLAB_NUMBERS // ranks // grain) * grain
    sums = [_ErrorSums() for _ in cases]
    for start in range(0, source.elements, step):
        values = source.partials(ranks, start=start, stop=min(source.elements, start + step))
        exact = values.double().sum(dim=0)
        for case, total in zip(cases, sums, strict=True):
            result = reduced(case, values, start=start, elements=source.elements, node=node)
            total.add(result.to(output).double() - exact, exact)
    return [_row(case, total, source=source, ranks=ranks) for case, total in zip(cases, sums, strict=True)]


def reduced(case: Case, values: torch.Tensor, *, start: int, elements: int, node: int) -> torch.Tensor:
    """float32: the result of all ranks for a slab ``[ranks, columns]`` that begins at ``start`` of ``elements``."""
    ranks, columns = values.shape
    unit = case.codec.block
    padded = torch.nn.functional.pad(values, (0, -columns % unit)) if columns % unit else values
    owners = owners_of(-(-elements // unit), ranks)[start // unit : start // unit + padded.shape[1] // unit]
    message = Partials(case.codec.entered(padded.reshape(ranks, -1, unit)), owners)
    result = reduce_of(case.scheme, node)(message, case.codec)
    return case.codec.left(result).reshape(-1)[:columns]


def _row(case: Case, sums: _ErrorSums, *, source: Inputs, ranks: int) -> ErrorRow:
    rms = math.sqrt(sums.energy / sums.count)
    return ErrorRow(
        scheme=case.scheme.name,
        codec=case.codec.name,
        ranks=ranks,
        data=source.name,
        elements=source.elements,
        bits=case.codec.bits,
        rel_l2=math.sqrt(sums.error / sums.energy) if sums.energy else math.nan,
        rel_l2_block=float(torch.cat(sums.blocks).nanmedian()) if sums.blocks else math.nan,
        max_error=sums.largest / rms if rms else math.nan,
        bias=sums.signed / sums.count / rms if rms else math.nan,
        mse=sums.error / sums.count,
        model=case.model,
    )


def rounded_variance(scheme: str, ranks: int, *, node: int = 8, cancellation: float = 1.0) -> float:
    """Sum of the variances of everything that is rounded, over the variance of the result.

    Independent partials of equal variance; ``cancellation`` is ||partials|| / ||sum|| and is known for the schemes that
    round partials alone. UsageError for a scheme that the formula does not cover.
    """
    k, c = ranks, cancellation**2
    of_partials = {"one-shot": c, "two-shot": c * (k - 1) / k + 1, "two-shot-all": c + 1, "ring-ag": 1.0}
    if scheme in of_partials:
        return of_partials[scheme]
    machines = k // node
    if c == 1 and scheme in ("hierarchical", "hierarchical-outer") and machines > 1:
        return (node - 1) / node * (scheme == "hierarchical") + (machines - 1) / machines + 1
    chains = {"ring": (k - 1,), "ring-rs": (k - 1,), "semi-loop": (k // 2, (k - 1) // 2)}
    if c != 1 or scheme not in chains:
        raise UsageError(f"no closed form of {scheme!r} at {k} ranks with cancellation {cancellation:g}")
    return sum(n * (n + 1) / 2 for n in chains[scheme]) / k + (scheme != "ring-rs")


def model_error(
    scheme: str, rounding: float, *, ranks: int, node: int = 8, cancellation: float = 1.0, output: float = BF16_ROUNDING
) -> float:
    """The closed form of ``rel_l2``: independent roundings add up in the square.

    rounding  relative L2 of one rounding of one partial (see `rounding_error`)
    output    that of the cast at the end
    """
    weight = rounded_variance(scheme, ranks, node=node, cancellation=cancellation)
    return math.sqrt(rounding**2 * weight + output**2)


# Mean square of how much rounding to bfloat16 moves a scale: steps of 2^-7 over a mantissa whose logarithm is uniform.
_SCALE_OFF_SQUARED = 2**-14 / 12 * (3 / (8 * math.log(2)))


def integer_rounding_error(bits: int, block: int) -> float:
    """Relative L2 of rounding Gaussian numbers to symmetric integers whose bfloat16 scale is rounded to the nearest.

    A step of E[amax^2]^(1/2) / qmax, squared over 12. The largest of a block would be exact but for the scale: it is
    off by qmax times what the scale is, in steps. E[amax^2] = integral of 2 a P(amax > a), by the trapezoid rule.
    """
    a = torch.linspace(0, 12, 200_001, dtype=torch.float64)
    beyond = 1 - torch.erf(a / math.sqrt(2)) ** block
    amax_squared = float(torch.trapezoid(2 * a * beyond, a))
    qmax = (1 << (bits - 1)) - 1
    rounded = (block - 1 + 12 * qmax**2 * _SCALE_OFF_SQUARED) / block
    return math.sqrt(rounded * amax_squared / 12) / qmax


def rounding_error(codec: WireRounding, *, elements: int = 1 << 18, seed: int = 1) -> float:
    """Relative L2 of one rounding of Gaussian numbers, measured."""
    x = torch.randn(elements // codec.block, codec.block, generator=torch.Generator().manual_seed(seed))
    return float((codec.left(codec.rounded(codec.entered(x))) - x).norm() / x.norm())


def rounding_of(codec: WireRounding) -> float:
    """Relative L2 of one rounding of Gaussian numbers: by the integral for integers, measured for the others."""
    match = re.fullmatch(r"int(\d)/(\d+)", codec.name)
    return integer_rounding_error(int(match[1]), int(match[2])) if match else rounding_error(codec)


def errors_of(
    source: Inputs, schemes: Sequence[str], roundings: Sequence[tuple[WireRounding, float]], *, ranks: int, node: int
) -> list[ErrorRow]:
    """The row of every scheme with every codec, over one source and world.

    roundings  the codecs, each with its `rounding_of`
    node       ranks of a machine for the two-level schemes, which are left out of worlds that it does not divide
    """
    cases = []
    for scheme in map(get_scheme, schemes):
        if scheme.two_level and (ranks % node or ranks <= node):
            continue
        if scheme.plain:
            cases.append(Case(scheme, PLAIN[scheme.plain]))
            continue
        for codec, rounding in roundings:
            cases.append(Case(scheme, codec, _model(scheme, rounding, source, ranks=ranks, node=node)))
    return measure(cases, source=source, ranks=ranks, node=node) if cases else []


def _model(scheme: ReduceScheme, rounding: float, source: Inputs, *, ranks: int, node: int) -> float | None:
    """The closed form where it applies: independent Gaussian partials, and those that cancel."""
    if source.name not in ("gaussian", "cancelling"):
        return None
    cancellation = CANCELLATION if source.name == "cancelling" else 1.0
    try:
        return model_error(scheme.name, rounding, ranks=ranks, node=node, cancellation=cancellation)
    except UsageError:  # no closed form
        return None
