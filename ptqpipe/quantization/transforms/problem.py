"""One edge as an optimization problem: what its consumers read, their weights, the cost of quantizing them.

Built by the stage from a checkpoint and statistics; solved by the files beside this one.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ptqpipe.calibration.inputs import InputStatistics
from ptqpipe.models.folding.tensors import power_of_two

Quantize = Callable[[torch.Tensor], torch.Tensor]
"""float32 [N, K] -> its decode after quantization, float32 [N, K]."""


@dataclass(frozen=True, slots=True)
class Consumer:
    """Weights that share an input and a global scale: float32 [N, K] (a sample of their rows) and the input."""

    weights: torch.Tensor
    inputs: InputStatistics


@dataclass(frozen=True, slots=True)
class Problem:
    """An edge with everything that its factors depend on.

    channels      how many factors
    channel_of    int64 [K]: the channel of each input column
    input_amax    [K] of all consumers together
    weight_amax   [K] of all quantized consumers together, of the sampled rows where there are ``consumers``
    consumers     for searches; empty for transforms that go by maxima alone
    """

    edge: str
    channels: int
    channel_of: torch.Tensor
    input_amax: torch.Tensor
    weight_amax: torch.Tensor
    consumers: tuple[Consumer, ...] = ()

    def by_channel(self, columns: torch.Tensor) -> torch.Tensor:
        """float64 [channels]: the largest value among the columns that read a channel."""
        largest = torch.zeros(self.channels, dtype=torch.float64)
        return largest.scatter_reduce(0, self.channel_of, columns.double(), "amax")


@dataclass(frozen=True, slots=True)
class SolveOptions:
    """The options of the call.

    alpha         SmoothQuant's exponent of the input; Smooth-SwiGLU's share of the spread that is taken out
    powers_of_two factors are rounded to 2^k
    grid          how many exponents a search tries
    samples       tokens that a search with activations draws
    quantize      the weight quantizer, for searches
    quantize_inputs  the quantizer of activations [T, K]; None where they stay as they are
    """

    alpha: float = 0.5
    powers_of_two: bool = False
    grid: int = 20
    samples: int = 256
    quantize: Quantize | None = None
    quantize_inputs: Quantize | None = None

    def round(self, factors: torch.Tensor) -> torch.Tensor:
        """The factors as they will be folded."""
        return power_of_two(factors) if self.powers_of_two else factors


@dataclass(frozen=True, slots=True)
class Solution:
    """Factors float64 [channels] (the producer is divided by them), and the search's report about them.

    error, plain_error  the objective with and without the factors; None for transforms that have none
    facts               what was chosen, for the record
    """

    factors: torch.Tensor
    error: float | None = None
    plain_error: float | None = None
    facts: dict[str, float | str] = field(default_factory=dict)


def spread(inputs: torch.Tensor, weights: torch.Tensor, *, input_power: float, weight_power: float) -> torch.Tensor:
    """inputs^input_power / weights^weight_power, 1 where either is zero, within 2^-20 .. 2^20. float64."""
    dead = (inputs <= 0) | (weights <= 0)
    logs = input_power * torch.log2(inputs.double()) - weight_power * torch.log2(weights.double())
    logs = torch.where(dead, torch.zeros_like(logs), logs)
    alive = logs[~dead]
    if alive.numel() == 0:
        return torch.ones_like(logs)
    middle = (alive.amax() + alive.amin()) / 2
    return torch.exp2(torch.where(dead, logs, (logs - middle).clamp(-20, 20)))
