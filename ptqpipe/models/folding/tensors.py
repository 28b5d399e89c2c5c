"""The changes that a transform makes to a tensor, as data, and applying them: factors along an axis, block diagonal
orthogonal matrices, constants.

Computed in float64 on runs of rows, so a tensor of any size needs the memory of a run. An op speaks of the tensor as
it is stored; ``on_columns`` and ``on_rows`` translate from a logical [out, in] weight.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from ptqpipe.models.folding.structure import Edge, Matrix, Norm
from ptqpipe.numerics.rotation import signs

RUN = 256  # rows of a run are multiples of this: no rotation block lies across two runs


@dataclass(frozen=True, slots=True)
class Scale:
    """t = (t + offset) * factors - offset along ``axis``, from index ``start`` on. factors float64 [n]."""

    axis: int
    factors: torch.Tensor
    start: int = 0
    expert: int | None = None
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Rotate:
    """Multiplies by an orthogonal matrix in blocks along ``axis``, over [start, start + length).

    matrices  float64 [length / block, block, block], a row t becoming ``t @ matrix``; None: the Hadamard matrix in each
    """

    axis: int
    block: int
    start: int
    length: int
    expert: int | None = None
    matrices: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Reset:
    """Every element becomes ``value``: a norm whose weight has moved into its readers."""

    value: float
    expert: int | None = None


Op = Scale | Rotate | Reset
Folding = tuple[str, Op]
"""(tensor, what happens to it)"""


def on_columns(matrix: Matrix, factors: torch.Tensor) -> list[Folding]:
    """Multiplies the input columns of a weight by factors [K]."""
    return [(matrix.tensor, Scale(0 if matrix.transposed else 1, factors, expert=matrix.expert))]


def on_rows(matrix: Matrix, factors: torch.Tensor) -> list[Folding]:
    """Multiplies the output rows of a weight, and its bias, by factors [N]."""
    axis = 1 if matrix.transposed else 0
    foldings: list[Folding] = [(matrix.tensor, Scale(axis, factors, matrix.start, matrix.expert))]
    if matrix.bias is not None:
        foldings.append((matrix.bias, Scale(0, factors, matrix.start)))
    return foldings


def rotate_columns(matrix: Matrix, block: int, matrices: torch.Tensor | None = None) -> list[Folding]:
    """W R: the inputs arrive rotated. ``matrices`` as in `Rotate`."""
    axis, length = 0 if matrix.transposed else 1, matrix.shape[1]
    return [(matrix.tensor, Rotate(axis, block, 0, length, matrix.expert, matrices))]


def rotate_rows(matrix: Matrix, block: int, matrices: torch.Tensor | None = None) -> list[Folding]:
    """R^T W, and R^T bias: the outputs leave rotated. ``matrices`` as in `Rotate`."""
    axis, length = 1 if matrix.transposed else 0, matrix.shape[0]
    foldings: list[Folding] = [(matrix.tensor, Rotate(axis, block, matrix.start, length, matrix.expert, matrices))]
    if matrix.bias is not None:
        foldings.append((matrix.bias, Rotate(0, block, matrix.start, length, matrices=matrices)))
    return foldings


def move_factors(edge: Edge, factors: torch.Tensor) -> list[Folding]:
    """What the consumers of an edge gain and its producer loses: channel c is divided by factors[c].

    factors  float64 [channels], positive
    """
    foldings: list[Folding] = []
    inverse = 1.0 / factors
    producer = edge.producer
    if isinstance(producer, Norm):
        foldings.append((producer.weight, Scale(0, inverse, offset=producer.offset)))
        if producer.bias is not None:
            foldings.append((producer.bias, Scale(0, inverse)))
    else:
        foldings += on_rows(producer, inverse)
    columns = factors[edge.channel_of()]
    for consumer in edge.consumers:
        foldings += on_columns(consumer, columns)
    return foldings


@cache
def hadamard(block: int) -> torch.Tensor:
    """float64 [block, block]: Sylvester's matrix over sqrt(block); symmetric and its own inverse."""
    scaled: torch.Tensor = signs(block) / block**0.5
    return scaled


def apply(rows: torch.Tensor, ops: Iterable[Op], *, first: int = 0, expert: int | None = None) -> torch.Tensor:
    """The ops on some rows of a tensor, float64.

    rows    [n, K] or [n], rows ``first`` and following; ``first`` is a multiple of RUN where one of the ops rotates
    expert  the plane of a stack that the rows belong to: ops of other planes are left out
    """
    t = rows.to(torch.float64, copy=True)
    for op in ops:
        if op.expert is not None and op.expert != expert:
            continue
        if isinstance(op, Reset):
            t.fill_(op.value)
        elif isinstance(op, Scale):
            _scale(t, op, first)
        else:
            _rotate(t, op, first)
    return t


def _range(t: torch.Tensor, op: Scale | Rotate, length: int, first: int) -> tuple[torch.Tensor, int, int]:
    """The part of ``t`` that an op covers, and the part of the op, [begin, end), that falls on these rows."""
    offset = first if op.axis == 0 else 0
    begin = max(op.start, offset)
    end = max(begin, min(op.start + length, offset + t.shape[op.axis]))
    return t.narrow(op.axis, begin - offset if end > begin else 0, end - begin), begin - op.start, end - op.start


def _scale(t: torch.Tensor, op: Scale, first: int) -> None:
    part, begin, end = _range(t, op, op.factors.numel(), first)
    factors = op.factors[begin:end].to(torch.float64)
    factors = factors.reshape(-1, *[1] * (t.dim() - 1)) if op.axis == 0 else factors
    if op.offset:
        part.add_(op.offset).mul_(factors).sub_(op.offset)
    else:
        part.mul_(factors)


def _rotate(t: torch.Tensor, op: Rotate, first: int) -> None:
    part, begin, end = _range(t, op, op.length, first)
    if begin == end:
        return
    matrices = hadamard(op.block) if op.matrices is None else op.matrices[begin // op.block : end // op.block]
    if op.axis == 0:
        rotated = matrices.mT @ part.reshape(-1, op.block, part[0].numel())
    else:
        blocks = part.reshape(-1, part.shape[-1] // op.block, op.block)
        rotated = (blocks.transpose(0, 1) @ matrices).transpose(0, 1)
    part.copy_(rotated.reshape(part.shape))


def is_exact(ops: Sequence[Op]) -> bool:
    """Whether the ops only multiply by powers of two, which no float dtype rounds outside its subnormal range."""
    return all(isinstance(op, Scale) and not op.offset and bool(is_power_of_two(op.factors)) for op in ops)


def is_power_of_two(factors: torch.Tensor) -> bool:
    return bool((torch.frexp(factors)[0] == 0.5).all())


def power_of_two(factors: torch.Tensor) -> torch.Tensor:
    """The nearest power of two in the logarithm."""
    return torch.exp2(torch.log2(factors.double()).round())
