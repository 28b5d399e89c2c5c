"""Statistics of the inputs of linear layers, in memory: moments, and the interface by which algorithms read them.

These are what algorithms, transforms and stages hand to each other; `ptqpipe.calibration.statistics` reads them from a
folder.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ptqpipe.numerics.rotation import rotated

OUT_ROWS = 1024  # outputs of a layer in one block of E[g g^T]
EXPERT_ROWS = 256  # the same of an expert, which sees few tokens


@dataclass(frozen=True, slots=True)
class Moments:
    """Second moments of an input x [tokens, K], means over its tokens; float32, from a folder on the CPU.

    second_moment  [K] E[x^2], as the others over tokens of which the first of a window counts `FIRST_WEIGHT` times
    block_moment   [K/16, 16, 16] E[x x^T] inside blocks of 16 columns, or None
    full_moment    [K, K] E[x x^T], or None
    held_out       the same moments of samples that no other number here is of, to judge by; or None
    tokens         how many were seen; 0: not counted
    outputs        E[g g^T] [b, b] of every run of outputs, all but the last as long as the first, g the gradient of the
                   model's loss at them; or None where nothing is known of them
    """

    second_moment: torch.Tensor
    block_moment: torch.Tensor | None = None
    full_moment: torch.Tensor | None = None
    held_out: "Moments | None" = None
    tokens: int = 0
    outputs: Sequence[torch.Tensor] | None = None

    def to(self, device: torch.device) -> "Moments":
        """The moments on a device, without the held-out ones."""
        second, block, full = (
            None if m is None else m.to(device) for m in (self.second_moment, self.block_moment, self.full_moment)
        )
        assert second is not None
        return Moments(second, block, full, tokens=self.tokens)

    def rotated(self, block: int) -> "Moments":
        """Those of the input rotated by blocks of so many columns, by the full moment, which must be there; 0: these
        moments."""
        if not block:
            return self
        assert self.full_moment is not None
        half = rotated(self.full_moment.double(), block)
        full = rotated(half.t(), block).float()
        held_out = None if self.held_out is None else self.held_out.rotated(block)
        return Moments(full.diagonal().clone(), None, full, held_out, self.tokens, self.outputs)


@dataclass(frozen=True, slots=True)
class WeightGradients:
    """Fisher information of a weight W [N, K] per window: sums of squared gradients d = dL/dW, labels sampled from the
    model; per token. float32.

    rows     [N] sums of E[d^2] over the columns
    columns  [K] sums of E[d^2] over the rows
    along    [windows] the sum of d W of each, over the root of its tokens: what a change in proportion to W does
    """

    rows: torch.Tensor
    columns: torch.Tensor
    along: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class InputStatistics(Moments):
    """What calibration knows about the input x [tokens, K] of one linear module. CPU tensors, float32.

    measured   False where this module saw too few tokens and has its group's maximum (experts)
    amax       [K] max |x|
    mean       [K] E[x]
    quantiles  p -> the p-quantile of |x| over all elements
    """

    amax: torch.Tensor
    mean: torch.Tensor
    measured: bool = True
    quantiles: Mapping[float, float] = field(default_factory=dict)


def lower_half(matrix: torch.Tensor) -> torch.Tensor:
    """What lies on and below the diagonal of a symmetric [b, b], in one row: as files have it."""
    rows, columns = torch.tril_indices(*matrix.shape)
    return matrix[rows, columns]


def from_lower_half(half: torch.Tensor) -> torch.Tensor:
    """The symmetric [b, b] of `lower_half`."""
    size = rows_of_half(len(half))
    rows, columns = torch.tril_indices(size, size)
    matrix = half.new_empty(size, size)
    matrix[rows, columns] = matrix[columns, rows] = half
    return matrix


def rows_of_half(numbers: int) -> int:
    """b of a `lower_half` of so many numbers; 0 where there is none."""
    size = (math.isqrt(8 * numbers + 1) - 1) // 2
    return size if size * (size + 1) // 2 == numbers else 0


def is_finite(numbers: torch.Tensor) -> bool:
    """Whether every number is finite: NaN is the largest of all, and no copy is made."""
    return all(math.isfinite(float(number)) for number in torch.aminmax(numbers))
