"""The loop over a unit's weights that every algorithm shares, the search of its global scale, and the sums of errors.

Rows are quantized in runs whose size depends on the shape alone, and every sum runs over whole runs: bytes and reported
numbers are the same with any number of workers.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from ptqpipe.calibration.inputs import Moments
from ptqpipe.errors import FormatError
from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.global_scale import POINTS, absmax_global, exact_global, pick, sample_rows
from ptqpipe.numerics.kernels.cpu_decode import decoded
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.quantization.metric import expected_error, output_error
from ptqpipe.quantization.unit import (
    CPU,
    Promise,
    Task,
    UnitResult,
    WeightError,
    chunks,
    largest,
    measure,
    total_error,
    total_errors,
)

Choose = Callable[[int, torch.Tensor], QTensor]
"""(first row, rows [n, K]) -> their codes and scales."""

Sample = tuple[torch.Tensor, torch.Tensor | None]
"""Sampled rows [n, K] of a weight, and what its columns weigh [K] in the search of scales; None: all the same."""


class Sums:
    """Errors of one weight over its runs of rows, in float64.

    squared, energy   sum (decode - w)^2 and sum w^2
    absmax            the squared error of abs-max scales on the same rows, where it is asked for
    weighted, output  with moments of the input: sum h r^2 and tr(E H E^T), as ``calibrated.quantize`` records them
    """

    def __init__(self) -> None:
        self.squared = self.energy = self.absmax = self.weighted = self.output = 0.0

    def add(self, q: QTensor, w: torch.Tensor, judge: Moments | None, outputs: Sequence[torch.Tensor] | None) -> None:
        squared, energy = measure(q, w)
        self.squared, self.energy = self.squared + squared, self.energy + energy
        if judge is not None:
            error = w.float() - decoded(q)
            self.weighted += output_error(error, judge.second_moment)
            self.output += expected_error(error, judge, outputs)

    @property
    def error(self) -> WeightError:
        """Of the weight, relative to abs-max scales on all of its rows."""
        return WeightError(self.squared, self.energy, self.squared / self.absmax if self.absmax else 1.0)


def quantize_weight(
    task: Task,
    index: int,
    runs: Sequence[tuple[int, int]],
    policies: Sequence[Choose],
    *,
    judge: Moments | None = None,
    outputs: Sequence[torch.Tensor] | None = None,
    absmax: Callable[[torch.Tensor], float] | None = None,
) -> tuple[int, list[Sums]]:
    """Quantizes the runs of rows [start, stop) of one weight by every policy and sends those of the best to the sink.

    Rows of a single policy go out as they are made. Those of several wait, as codes, for the comparison: the least
    output error wins, the first one at equality.

    judge, outputs  moments of the input and of the gradients at the outputs, by which errors are judged
    absmax          what abs-max scales would leave on a run of rows

    Returns (the number of the best policy, the sums of each).
    """
    sums, waiting = [Sums() for _ in policies], list[tuple[int, list[QTensor]]]()
    for start, stop in runs:
        w, gradients = task.weights[index].rows(start, stop).to(task.device), of_rows(outputs, start, stop)
        baseline = 0.0 if absmax is None else absmax(w)
        quantized = [choose(start, w) for choose in policies]
        if len(quantized) == 1:
            task.sink(index, start, quantized[0])
        else:
            waiting.append((start, quantized))
        for each, q in zip(sums, quantized, strict=True):
            each.add(q, w, judge, gradients)
            each.absmax += baseline
    best = min(range(len(sums)), key=lambda policy: sums[policy].output)
    for start, quantized in waiting:
        task.sink(index, start, quantized[best])
    return best, sums


def of_rows(outputs: Sequence[torch.Tensor] | None, start: int, stop: int) -> Sequence[torch.Tensor] | None:
    """The moments of the outputs of a run of rows."""
    return None if outputs is None else outputs[start // len(outputs[0]) : -(-stop // len(outputs[0]))]


def absmax_error(fmt: Format, amax: float) -> Callable[[torch.Tensor], float]:
    """The squared error of abs-max scales on rows of a unit with the largest magnitude ``amax``."""
    plain = absmax_global(amax, fmt) if fmt.has_global else None
    return lambda w: total_error(w, fmt, search="absmax", global_scale=plain)


def sampled_rows(task: Task) -> list[torch.Tensor]:
    """The rows of every weight that rank global scales."""
    return [
        torch.cat([weight.rows(*run) for run in sample_rows(weight.shape, task.fmt)]).to(task.device)
        for weight in task.weights
    ]


def search_global(
    task: Task, samples: Callable[[], Sequence[Sample]], amax: float, *, search: str, points: int = POINTS
) -> tuple[torch.Tensor | None, torch.Tensor | None, bool]:
    """(the global scale of the largest magnitude ``amax``, the one with the least error on ``samples``, whether that
    leaves no error on them, as the first one does); None for a format without one. Samples are read only where there is
    something to search. ``points``: how many candidates there are besides."""
    fmt = task.fmt
    plain = absmax_global(amax, fmt) if fmt.has_global else None
    if plain is None or not task.search_global or amax == 0:
        return plain, plain, False
    rows = samples()
    exact = exact_global(amax, fmt, [w for w, _ in rows])
    best = pick(plain, fmt, totals=lambda scales: errors_at(rows, fmt, search, scales), points=points, exact=exact)
    if best is not exact:
        return plain, best, False
    at_best, at_plain = errors_at(rows, fmt, search, [best, plain])
    return plain, best, 0 == at_best < at_plain


def errors_at(rows: Iterable[Sample], fmt: Format, search: str, global_scales: Sequence[torch.Tensor]) -> list[float]:
    """The error of all rows at each global scale; with importance in its own unit, so that those of weights with
    different inputs add up."""
    errors = []
    for w, importance in rows:
        totals = total_errors(w, fmt, search=search, global_scales=global_scales, importance=importance)
        if importance is not None:
            top = float(importance.amax())
            totals = [total * (2.0 ** (math.frexp(top)[1] - 1) if top > 0 else 1.0) for total in totals]
        errors.append(totals)
    return [sum(each) for each in zip(*errors, strict=True)]


def write_learned(task: Task) -> UnitResult:
    """Sends the rows of ``task.codes``, which `ptqpipe tune` has chosen, to the sink; errors are those of the decode.
    Computes on the CPU.

    FormatError where the QTensors of a unit do not share one global scale; NumericsError for unusable weights.
    """
    fmt, codes = task.fmt, task.codes or ()
    g = codes[0].global_scale
    if any((q.global_scale is None) != (g is None) or (g is not None and q.global_scale != g) for q in codes):
        raise FormatError(f"the stored codes of {' and '.join(task.names)} have different global scales; tune again")
    absmax, errors = absmax_error(fmt, largest(task)), []
    for index, (weight, q) in enumerate(zip(task.weights, codes, strict=True)):
        narrow: Choose = lambda start, w, q=q: q.narrow(0, start, len(w))  # type: ignore[misc]  # noqa: E731
        runs = chunks(weight.shape, fmt)
        _, (sums,) = quantize_weight(replace(task, device=CPU), index, runs, [narrow], absmax=absmax)
        errors.append(sums.error)
    promises, fields = (Promise(scales=False, codes=False),) * len(errors), ({"algorithm": "learned"},) * len(errors)
    return UnitResult(None if g is None else float(g), 1.0, tuple(errors), False, promises, fields)
