"""The types that all algorithms share: a unit of weights, what quantizing it needs, and what it returns.

Weights are read by runs of rows, as often as needed, and every run of quantized rows goes out as soon as it is made.
Knows tensors and formats; must not know how codes are chosen.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate
from typing import Any, Protocol

import torch

from ptqpipe.algorithms.rows import checked_amax, chunks, row_runs
from ptqpipe.errors import NumericsError
from ptqpipe.formats import Format
from ptqpipe.inputs import Moments
from ptqpipe.options import CodeOptions
from ptqpipe.qtensor import QTensor

CPU = torch.device("cpu")


class Weight(Protocol):
    """A matrix [N, K] that gives its rows when asked, as often as asked."""

    shape: tuple[int, int]

    def rows(self, start: int, stop: int) -> torch.Tensor: ...


class Matrix:
    """A `Weight` that is in memory."""

    def __init__(self, w: torch.Tensor) -> None:
        self.shape = (w.shape[0], w.shape[1])
        self._w = w

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop)."""
        return self._w[start:stop]


Sink = Callable[[int, int, QTensor], None]
"""Takes (member, first row, quantized rows). A unit whose global scale is revised sends its rows a second time."""


def joined(runs: Mapping[tuple[int, int], QTensor], member: int) -> QTensor:
    """The runs of rows of one member, by (member, first row), as one."""
    parts = [runs[at] for at in sorted(runs) if at[0] == member]
    first = parts[0]
    if len(parts) == 1:
        return first
    shape = (sum(q.shape[0] for q in parts), first.shape[1])
    scales = first.scales if first.fmt.shares_rows else torch.cat([q.scales for q in parts])
    return QTensor(first.fmt, shape, torch.cat([q.data for q in parts]), scales, first.global_scale)


@dataclass(frozen=True, slots=True)
class Task:
    """A unit to be quantized: weights [N_i, K] of one K that share a global scale.

    names    of the weights, for messages
    sink     takes the rows of every weight
    options  of the rule
    inputs   moments of every weight's input; weights that share an input share the object. None without statistics
    codes    one QTensor for each weight, chosen before; None where the algorithm is to choose
    device   that computes
    """

    weights: Sequence[Weight]
    fmt: Format
    names: Sequence[str]
    sink: Sink
    options: CodeOptions = field(default_factory=CodeOptions)
    inputs: Sequence[Moments] | None = None
    codes: Sequence[QTensor] | None = None
    device: torch.device = CPU

    @property
    def search_global(self) -> bool:
        """Whether the global scale is searched."""
        return self.options.global_scale == "search"


@dataclass(frozen=True, slots=True)
class WeightError:
    """Errors of one quantized weight, measured on its decode in float64.

    squared_error   sum (decode - w)^2
    energy          sum w^2
    versus_absmax   squared error divided by that of abs-max scales, on the sampled rows (all rows of a small weight)
    """

    squared_error: float
    energy: float
    versus_absmax: float

    @property
    def relative_mse(self) -> float:
        """squared error / energy; 0 for an all-zero weight."""
        return self.squared_error / self.energy if self.energy else 0.0


@dataclass(frozen=True, slots=True)
class Promise:
    """What is promised of every block of a weight that was written, and what ``recheck.py`` checks.

    scales      whether each scale is the argmin of ``search/objective.py`` at the unit's global scale
    codes       whether each code is the nearest to its weight
    importance  the columns' weights ``[K]`` in that objective, None without any
    """

    scales: bool
    codes: bool
    importance: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class UnitResult:
    """What quantizing a unit gave. ``global_scale`` is None for formats without one.

    versus_plain_global  squared error divided by that of the same search at global scale amax/max_product; at most 1
    proven               whether the block scales are the argmin over every code at that global scale
    promises             of each weight
    record_fields        of each weight: what the record of a checkpoint says besides of how it was quantized
    """

    global_scale: float | None
    versus_plain_global: float
    errors: tuple[WeightError, ...]
    proven: bool
    promises: tuple[Promise, ...]
    record_fields: tuple[Mapping[str, Any], ...]


# The search compares scores and the report decoded errors; they agree to float32 rounding. A global scale must beat
# the plain one by more than that, or the plain one stays.
ROUNDING_MARGIN = 1e-6


def check_decode(names: Sequence[str], errors: Sequence[WeightError], fmt: Format) -> None:
    """NumericsError for a weight with a number so large that the nearest code of the format decodes to infinity."""
    for name, error in zip(names, errors, strict=True):
        if not math.isfinite(error.squared_error):
            raise NumericsError(
                f"{name} has a number next to the largest of float32 (3.4e38), whose nearest in {fmt.name} is beyond "
                "it: it would be read as infinity; repair the source, or keep the weight (an ignore rule)"
            )


def gather(weights: Sequence[Weight], device: torch.device) -> list[torch.Tensor]:
    """Every weight of a unit, whole, in memory that lies together."""
    if len(weights) == 1:
        return [weights[0].rows(0, weights[0].shape[0]).to(device)]
    dtypes = [weight.rows(0, 1).dtype for weight in weights]
    rows = sum(weight.shape[0] for weight in weights)
    memory = torch.empty(rows, weights[0].shape[1], dtype=reduce(torch.promote_types, dtypes), device=device)
    ends = list(accumulate(weight.shape[0] for weight in weights))
    whole = [memory[end - weight.shape[0] : end] for weight, end in zip(weights, ends, strict=True)]
    for weight, w in zip(weights, whole, strict=True):
        for start, stop in row_runs(weight.shape):
            w[start:stop] = weight.rows(start, stop)
    return whole


def gathered_bytes(shapes: Sequence[tuple[int, int]], fmt: Format, *, element_bytes: float) -> int:
    """What a unit with one scale for all of its weights takes in memory: the weights and as many codes."""
    elements = sum(rows * columns for rows, columns in shapes)
    return int(elements * (element_bytes + fmt.element.bits / 8))


def joint(whole: Sequence[torch.Tensor]) -> torch.Tensor:
    """What `gather` gave, as one matrix of the same memory."""
    rows = sum(w.shape[0] for w in whole)
    first = whole[0]
    return first if len(whole) == 1 else first.as_strided((rows, first.shape[1]), first.stride())


def largest(task: Task) -> float:
    """max |w| over the unit. NumericsError naming the weight for NaN and inf."""
    return max(
        checked_amax(weight.rows(*run), name)
        for weight, name in zip(task.weights, task.names, strict=True)
        for run in chunks(weight.shape, task.fmt)
    )
