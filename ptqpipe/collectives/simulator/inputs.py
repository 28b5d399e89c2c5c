"""What the ranks put in: partial sums drawn from a distribution, or those of a real tensor.

All are bfloat16 numbers held as float32, because that is what a model hands over. A source makes the columns
``[start, stop)`` of every rank's message on demand and always the same ones, so a message of 512 ranks is never held
whole. Must not know schemes or codecs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ptqpipe.errors import UsageError

CHUNK = 4096  # columns that are drawn together: one row of hidden states
OUTLIERS, OUTLIER_FACTOR = 6, 60.0  # channels of every CHUNK, and how much larger they are
CANCELLATION = 4.0  # norm of all partials over the norm of their sum; 1 for independent ones


class Source(Protocol):
    """Where partials come from."""

    @property
    def name(self) -> str:
        """As a row of a table says it."""

    @property
    def elements(self) -> int:
        """Of one rank's message."""

    def partials(self, ranks: int, *, start: int, stop: int) -> torch.Tensor:
        """float32 ``[ranks, stop - start]``, bfloat16 numbers. ``start`` is a multiple of ``CHUNK``."""


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


@dataclass(frozen=True, slots=True)
class Drawn:
    """A row of ``DISTRIBUTIONS``: ``elements`` a rank, seeded."""

    name: str
    elements: int
    seed: int = 0

    def partials(self, ranks: int, *, start: int, stop: int) -> torch.Tensor:
        """See `Source`. Rounded to bfloat16."""
        parts = []
        for first in range(start, stop, CHUNK):
            sequence = np.random.SeedSequence((self.seed, ranks, first // CHUNK))
            generator = torch.Generator().manual_seed(int(sequence.generate_state(1)[0]))  # it heeds 32 bits
            parts.append(DISTRIBUTIONS[self.name](ranks, CHUNK, generator)[:, : stop - first])
        return torch.cat(parts, dim=1).bfloat16().float()


@dataclass(frozen=True, slots=True)
class Given:
    """Partials that somebody recorded: ``values [recorded ranks, elements]``; fewer ranks sum neighbours first."""

    name: str
    values: torch.Tensor

    @property
    def elements(self) -> int:
        """Of one rank's message."""
        return self.values.shape[1]

    def partials(self, ranks: int, *, start: int, stop: int) -> torch.Tensor:
        """See `Source`. UsageError when ``ranks`` does not divide the recorded ones."""
        recorded = self.values.shape[0]
        if recorded % ranks:
            raise UsageError(
                f"{self.name} holds the partials of {recorded} ranks, and {ranks} do not divide them; choose --ranks "
                f"among {', '.join(str(k) for k in range(2, recorded + 1) if recorded % k == 0)}"
            )
        part = self.values[:, start:stop].float()
        return part.reshape(ranks, recorded // ranks, -1).sum(dim=1).bfloat16().float()


@dataclass(frozen=True, slots=True)
class RowParallel:
    """A row-parallel linear: rank r multiplies its slice of the inputs with its slice of the weight.

    x       ``[tokens, inner]``
    weight  ``[outer, inner]``
    """

    name: str
    x: torch.Tensor
    weight: torch.Tensor

    @property
    def elements(self) -> int:
        """tokens x outer."""
        return self.x.shape[0] * self.weight.shape[0]

    def partials(self, ranks: int, *, start: int, stop: int) -> torch.Tensor:
        """See `Source`. UsageError when ``ranks`` does not divide the inner dimension."""
        inner, outer = self.x.shape[1], self.weight.shape[0]
        if inner % ranks:
            raise UsageError(f"{ranks} ranks do not divide the {inner} columns of {self.name}; choose others")
        first, last = start // outer, -(-stop // outer)
        x = self.x[first:last].float().reshape(last - first, ranks, -1).transpose(0, 1)
        w = self.weight.float().reshape(outer, ranks, -1).permute(1, 2, 0)
        return (x @ w).reshape(ranks, -1)[:, start - first * outer : stop - first * outer].bfloat16().float()


def drawn(name: str, elements: int, *, seed: int = 0) -> Drawn:
    """The distribution called ``name``. UsageError with the known names, or for no elements."""
    if name not in DISTRIBUTIONS:
        raise UsageError(f"unknown data {name!r}; known are {', '.join(DISTRIBUTIONS)}")
    if elements < 1:
        raise UsageError(f"{elements} elements are too few; at least 1 is needed")
    if seed < 0:
        raise UsageError(f"seed {seed} is negative; use 0 or more")
    return Drawn(name, elements, seed)
