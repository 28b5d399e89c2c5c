"""What an error E of one weight W [N, K] costs, by what is known of its inputs and of gradients.

Both classes see a weight in runs of rows: the `sums` of all runs add up, and `total` makes the cost of them.

`ByTokens`   E|E x|^2 of the inputs x; with E[g^2] of the gradients at the outputs tr(diag(E[g^2]) E H E^T), twice the
             KL divergence to second order with tokens and outputs taken as independent
`ByWindows`  twice the KL divergence by d = dLoss/dW of windows: E[(sum of d E)^2], per token

Nearest codes do two things to a weight. Most of their error has random signs, so that squares of d alone
count, of which sums over columns, r, and over rows, c, are known. But codes also are smaller on average than what they
stand for: E = a W + F with a = -|E|^2 / |W|^2 or so, and a change in proportion to W, small as it is, has one sign
everywhere. So

    2 KL = tr(diag(r) F S H S F^T) + a^2 E[s^2],    s = sum of d W,    S^2 = c / (sum of c) / diag(H)

with as much of H = E[x x^T] as is known: S makes its diagonal that of c. The first part adds up over weights. The
second does not, since of two weights that are too small one may make up for the other, as where a norm follows: of all
weights it is E[(sum of a s)^2], and a E[s (sum of a s)] is the share of one of them (Shapley's).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from ptqpipe.calibration.inputs import WeightGradients
from ptqpipe.errors import CheckpointError
from ptqpipe.numerics.schemes import Activation
from ptqpipe.quantization import output_error
from ptqpipe.runtime.input_quantizers import InputQuantizer


@dataclass(frozen=True, slots=True)
class Total:
    """What an error costs.

    cost     of the error; by windows without the part that follows the weight
    whole    of an error that is as large as the weight
    follows  a s, float32 [windows]; None by tokens, where it is not known
    """

    cost: float
    whole: float
    follows: torch.Tensor | None = None

    def beside(self, others: torch.Tensor | None) -> float:
        """The cost beside the largest errors of all weights, this one among them, whose `joint` sum is given."""
        if self.follows is None or others is None:
            return self.cost
        return self.cost + float((self.follows.double() * others.double()).mean())

    def is_finite(self) -> bool:
        return math.isfinite(self.cost) and (self.follows is None or bool(self.follows.isfinite().all()))


@dataclass(frozen=True, slots=True)
class ByTokens:
    """By the inputs of one weight.

    moment    H as `output_error` takes it
    diagonal  of H, float32 [K]
    root      of E[g^2], float32 [N, 1], or None
    """

    moment: torch.Tensor
    diagonal: torch.Tensor
    root: torch.Tensor | None = None

    def sums(self, error: torch.Tensor, w: torch.Tensor, start: int, noise: float) -> torch.Tensor:
        """float64 [2] of the rows [n, K] of an error and of the weight that begin at row ``start``.

        noise  the squared error of quantized inputs, relative to their squares
        """
        by_inputs = self.by_inputs(w, start, noise)
        error, w = self._weighted(error, start), self._weighted(w, start)
        of_error, of_weight = (output_error(part, self.moment) for part in (error, w))
        return torch.tensor([of_error + by_inputs, of_weight], dtype=torch.float64)

    def by_inputs(self, w: torch.Tensor, start: int, noise: float) -> float:
        """What errors of the inputs cost in the rows of `sums`: they do not depend on each other."""
        return noise * output_error(self._weighted(w, start), self.diagonal) if noise else 0.0

    def _weighted(self, rows: torch.Tensor, start: int) -> torch.Tensor:
        return rows if self.root is None else rows * self.root[start : start + len(rows)]

    def total(self, sums: torch.Tensor) -> Total:
        """From the sums of all rows."""
        return Total(float(sums[0]), float(sums[1]))


@dataclass(frozen=True, slots=True)
class ByWindows:
    """By the gradients of one weight over windows.

    inputs  what quantized inputs cost
    root    of r, float32 [N, 1]
    scale   S, float32 [K]
    along   s, float32 [windows], over the root of the tokens of one
    """

    inputs: ByTokens
    root: torch.Tensor
    scale: torch.Tensor
    along: torch.Tensor

    @classmethod
    def of(cls, gradients: WeightGradients, inputs: ByTokens, *, diagonal: torch.Tensor) -> "ByWindows":
        """A column without inputs costs nothing.

        diagonal  of H, float32 [K]; where inputs are rotated its means over what is rotated together, as the columns of
                  the gradients are, too
        """
        columns = gradients.columns.double()
        share = columns / columns.sum().clamp_min(torch.finfo(torch.float32).tiny)
        scale = torch.where(diagonal > 0, share / diagonal, 0.0).sqrt().float()
        return cls(inputs, gradients.rows.sqrt().unsqueeze(1), scale, gradients.along)

    def sums(self, error: torch.Tensor, w: torch.Tensor, start: int, noise: float) -> torch.Tensor:
        """float64 [6], as of `ByTokens`."""
        by_inputs = self.inputs.by_inputs(w, start, noise)
        by_row = self.root[start : start + len(w)]
        error, w = error * by_row * self.scale, w * by_row * self.scale
        squares = [output_error(part, self.inputs.moment) for part in (error, w, error + w)]
        products = [
            float((part * w).sum(0, dtype=torch.float64) @ self.inputs.diagonal.double()) for part in (error, w)
        ]
        return torch.tensor([*squares, *products, by_inputs], dtype=torch.float64)

    def total(self, sums: torch.Tensor) -> Total:
        """From the sums of all rows."""
        of_error, of_weight, of_codes, product, norm, by_inputs = sums.tolist()
        a = product / norm if norm > 0 else 0.0
        between = (of_codes - of_error - of_weight) / 2
        rest = of_error - 2 * a * between + a * a * of_weight
        return Total(max(0.0, rest) + by_inputs, of_weight, a * self.along)


def joint(options: Iterable[Sequence[Total]]) -> torch.Tensor | None:
    """float32 [windows]: the sum over weights of a s, of each weight that of its options whose squares are the largest;
    None where it is known of no weight. The fewer windows for each weight, the more it is made smaller: the share of a
    weight in the square of the sum is mostly noise where there are fewer windows than weights.

    CheckpointError where they are not of the same windows.
    """
    follows_of = [[total.follows for total in of_weight if total.follows is not None] for of_weight in options]
    largest = [
        max(of_weight, key=lambda follows: float(follows.square().sum())) for of_weight in follows_of if of_weight
    ]
    if len({len(follows) for follows in largest}) > 1:
        raise CheckpointError("the statistics have gradients of weights over different windows; calibrate again")
    if not largest:
        return None
    windows = len(largest[0])
    return torch.stack(largest).sum(0) * (windows / (windows + len(largest)))


@cache
def input_noise(activation: Activation) -> float:
    """The squared error of normally distributed inputs that are quantized so, relative to their squares: 0 to 1."""
    if activation is Activation.NONE:
        return 0.0
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    return float((InputQuantizer.fitted(activation, x)(x) - x).double().square().sum() / x.double().square().sum())
