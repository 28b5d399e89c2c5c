"""The inputs of the simulated ranks: partial sums drawn from a distribution, or those of a real tensor.

All are bfloat16 numbers held as float32, because that is what a model hands over. A source makes the columns
``[start, stop)`` of every rank's message on demand and always the same ones, so a message of 512 ranks is never held
whole. Must not know schemes or codecs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ptqpipe.errors import UsageError

CHUNK = 4096  # columns that are drawn together: one row of hidden states
OUTLIERS, OUTLIER_FACTOR = 6, 60.0  # channels of every CHUNK, and how much larger they are
CANCELLATION = 4.0  # norm of all partials over the norm of their sum; 1 for independent ones


@dataclass(frozen=True, slots=True)
class Inputs:
    """Where partials come from.

    name      as a row of a table says it
    elements  of one rank's message
    make      (ranks, start, stop) -> float32 ``[ranks, stop - start]``, bfloat16 numbers
    """

    name: str
    elements: int
    make: Callable[[int, int, int], torch.Tensor]

    def partials(self, ranks: int, *, start: int, stop: int) -> torch.Tensor:
        """float32 ``[ranks, stop - start]``, bfloat16 numbers. ``start`` is a multiple of ``CHUNK``."""
        return self.make(ranks, start, stop)


Draw = Callable[[int, int, torch.Generator], torch.Tensor]


def _normal(ranks: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(ranks, columns, generator=generator)


def _student(ranks: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    chi_squared = torch.randn(3, ranks, columns, generator=generator).square().sum(dim=0)
    return _normal(ranks, columns, generator) / (chi_squared / 3).sqrt()


def _outliers(ranks: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    x = _normal(ranks, columns, generator)
    channels = torch.arange(OUTLIERS) * (CHUNK // OUTLIERS) + 17  # spread, none at the edge of a block
    x[:, channels[channels < columns]] *= OUTLIER_FACTOR
    return x


def _cancelling(ranks: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """Independent partials plus shares that sum to zero, as large as ``CANCELLATION`` asks."""
    share = _normal(ranks, columns, generator)
    share -= share.mean(dim=0)
    amplitude = math.sqrt((CANCELLATION**2 - 1) / (1 - 1 / ranks))
    return _normal(ranks, columns, generator) + amplitude * share


DISTRIBUTIONS: dict[str, Draw] = {
    "gaussian": _normal,
    "t3": _student,
    "outliers": _outliers,
    "cancelling": _cancelling,
}


def drawn(name: str, elements: int, *, seed: int = 0) -> Inputs:
    """The distribution called ``name``, rounded to bfloat16. UsageError with the known names, or for no elements."""
    if name not in DISTRIBUTIONS:
        raise UsageError(f"unknown data {name!r}; known are {', '.join(DISTRIBUTIONS)}")
    if elements < 1:
        raise UsageError(f"{elements} elements are too few; at least 1 is needed")
    if seed < 0:
        raise UsageError(f"seed {seed} is negative; use 0 or more")

    def make(ranks: int, start: int, stop: int) -> torch.Tensor:
        parts = []
        for first in range(start, stop, CHUNK):
            sequence = np.random.SeedSequence((seed, ranks, first // CHUNK))
            generator = torch.Generator().manual_seed(int(sequence.generate_state(1)[0]))  # it heeds 32 bits
            parts.append(DISTRIBUTIONS[name](ranks, CHUNK, generator)[:, : stop - first])
        return torch.cat(parts, dim=1).bfloat16().float()

    return Inputs(name, elements, make)


def given(name: str, values: torch.Tensor) -> Inputs:
    """Partials that somebody recorded: ``values [recorded ranks, elements]``; fewer ranks sum neighbours first.

    Its `partials` raise UsageError when ``ranks`` does not divide the recorded ones.
    """
    recorded = values.shape[0]

    def make(ranks: int, start: int, stop: int) -> torch.Tensor:
        if recorded % ranks:
            raise UsageError(
                f"{name} holds the partials of {recorded} ranks, and {ranks} do not divide them; choose --ranks among "
                f"{', '.join(str(k) for k in range(2, recorded + 1) if recorded % k == 0)}"
            )
        part = values[:, start:stop].float()
        return part.reshape(ranks, recorded // ranks, -1).sum(dim=1).bfloat16().float()

    return Inputs(name, values.shape[1], make)


def row_parallel(name: str, x: torch.Tensor, weight: torch.Tensor) -> Inputs:
    """A row-parallel linear: rank r multiplies its slice of the inputs with its slice of the weight.

    x       ``[tokens, inner]``
    weight  ``[outer, inner]``

    Its `partials` raise UsageError when ``ranks`` does not divide the inner dimension.
    """
    inner, outer = x.shape[1], weight.shape[0]

    def make(ranks: int, start: int, stop: int) -> torch.Tensor:
        if inner % ranks:
            raise UsageError(f"{ranks} ranks do not divide the {inner} columns of {name}; choose others")
        first, last = start // outer, -(-stop // outer)
        rows = x[first:last].float().reshape(last - first, ranks, -1).transpose(0, 1)
        columns = weight.float().reshape(outer, ranks, -1).permute(1, 2, 0)
        return (rows @ columns).reshape(ranks, -1)[:, start - first * outer : stop - first * outer].bfloat16().float()

    return Inputs(name, x.shape[0] * outer, make)
