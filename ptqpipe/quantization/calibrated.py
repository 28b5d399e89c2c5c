"""Quantizes a unit with calibration statistics: weighted scales, codes, and a comparison with plain rounding.

One global scale for the unit is searched with the weighted objective; every run of rows gets its block scales, then its
codes; for each weight the output error of the result is compared with that of plain round to nearest, and the better of
the two is taken. Which codes an algorithm chooses is its `Feedback`; without one they are the nearest. Rows are
quantized in runs whose size depends on the shape alone, and every product runs over whole runs, so the bytes do not
depend on workers. Codes wait in memory until they are compared; the float weights do not.

Knows tensors, formats and moments; must not know recipes, statistics files or containers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ptqpipe.calibration.inputs import Moments
from ptqpipe.errors import FormatError, NumericsError
from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.global_scale import absmax_global, exact_global, pick, sample_rows
from ptqpipe.numerics.kernels.cpu_decode import decoded
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.numerics.search import get_search
from ptqpipe.quantization import block_objective
from ptqpipe.quantization.metric import Metric, expected_error, output_error
from ptqpipe.quantization.unit import (
    CHUNK_ELEMENTS,
    ROUNDING_MARGIN,
    Promise,
    Task,
    UnitResult,
    Weight,
    WeightError,
    chunks,
    encode_rows,
    gather,
    joint,
    largest,
    measure,
    quantize_rows,
    row_chunks,
    search_scales,
    total_error,
    total_errors,
)

GPU_ELEMENTS = 1 << 25  # about 1.2 GB: a dozen float32 numbers each, for a while


@dataclass(frozen=True, slots=True)
class Feedback:
    """How an algorithm chooses codes in the metric of an input.

    prepare       number of a weight in the unit -> the metric of its input, on the device that computes
    choose        (rows [n, K], metric, global scale, what gives the nearest codes of rows at weighted scales, moments
                  of the gradients at the outputs of these rows or None) -> codes
    moves_scales  whether the block scales may be others than those of the search
    """

    prepare: Callable[[int], Metric]
    choose: Callable[
        [torch.Tensor, Metric, torch.Tensor | None, Callable[[torch.Tensor], QTensor], Sequence[torch.Tensor] | None],
        QTensor,
    ]
    moves_scales: bool


@dataclass(frozen=True, slots=True)
class _Scales:
    """The scales of a unit that are searched once for all its weights.

    g      the global scale to use, ``plain`` the one of the largest weight; None for formats without one
    joint  the one scale of formats that have one for all weights of a unit
    """

    g: torch.Tensor | None
    plain: torch.Tensor | None
    joint: torch.Tensor | None

    def nearest(self, w: torch.Tensor, fmt: Format, search: str, importance: torch.Tensor | None) -> QTensor:
        """Searched scales and nearest codes of rows [n, K]."""
        if self.joint is not None:
            return encode_rows(w, self.joint, fmt)
        return quantize_rows(w, fmt, search=search, global_scale=self.g, importance=importance)


def quantize(task: Task, feedback: Feedback | None = None) -> UnitResult:
    """Quantizes the weights of one unit and sends their rows to the sink, each once.

    The record of each weight gets, besides algorithm and weighting (errors are those of held-out samples if there are
    any):

    weighted_error  sum of h_i r_i^2 over all rows, h the second moment: the expected output error without correlations
    metric          "output", or "kl" where the moments G of the gradients at the output are known
    output_error    tr(E H E^T) with the best moment H (full, else blocks, else the diagonal), undamped; by "kl"
                    tr(G E H E^T)
    versus_rtn      output_error divided by that of plain round to nearest at the unit's global scale
    damping         the one of the metric, None without one
    reverted        whether plain round to nearest was taken
    held_out        whether the errors, and with them the choice, are those of held-out samples

    Raises NumericsError for unusable weights or moments, FormatError for moments of another width.
    """
    options, inputs = task.options, task.inputs or ()
    scales, versus_plain = _searched(task, inputs)
    g, one = scales.g, scales.joint
    errors, records = [], []
    metric: Metric | None = None
    for index, (weight, moments) in enumerate(zip(task.weights, inputs, strict=True)):
        if feedback is not None and (index == 0 or moments.second_moment is not inputs[index - 1].second_moment):
            metric = None  # free the old metric first: both together are the memory peak
            metric = _prepare(feedback, index, task.names[index])
        rows, error, record = _weight(weight, moments, task, scales, feedback, metric)
        for start, q in rows:
            task.sink(index, start, q)
        errors.append(error)
        records.append({"algorithm": options.algorithm, "weighting": options.objective, **record})
    proven = get_search(task.search).proven and feedback is None and options.objective != "block"
    proven = proven and not any(record["reverted"] for record in records)
    promises = tuple(
        _promise(task, inputs[0] if one is not None else moments, feedback, reverted=record["reverted"])
        for moments, record in zip(inputs, records, strict=True)
    )
    return UnitResult(None if g is None else float(g), versus_plain, tuple(errors), proven, promises, tuple(records))


def choose(task: Task, feedback: Feedback) -> None:
    """Sends the codes that ``feedback`` chooses to the sink, whatever plain rounding would cost: the caller judges.
    Raises as `quantize` does."""
    inputs = task.inputs or ()
    scales, _ = _searched(task, inputs)
    for batch in _batches(task, inputs, _run_elements(task, feedback)):
        first = batch[0][0]
        metric, nearest = _prepare(feedback, first, task.names[first]), _nearest(inputs[first], task, scales)
        w = torch.cat([task.weights[index].rows(start, stop) for index, start, stop in batch]).to(task.device)
        known = [_between(inputs[index].outputs, start, stop) for index, start, stop in batch]
        outputs = None if known[0] is None else [g for moments_of_member in known for g in moments_of_member or ()]
        q, at = feedback.choose(w, metric, scales.g, nearest, outputs), 0
        for index, start, stop in batch:
            task.sink(index, start, q if len(batch) == 1 else q.narrow(0, at, stop - start))
            at += stop - start


def _searched(task: Task, inputs: Sequence[Moments]) -> tuple[_Scales, float]:
    """(the scales that all weights share, weighted error at that global scale divided by that at the plain one)."""
    for weight, moments, name in zip(task.weights, inputs, task.names, strict=True):
        _check_width(weight, moments, name)
    plain, g, versus_plain = _global_scale(task, inputs)
    one = None
    if task.fmt.one_scale:
        whole, h = joint(gather(task.weights, task.device)), _importance(inputs[0], task)
        one = search_scales(whole, task.fmt, search=task.search, importance=h)
    return _Scales(g, plain, one), versus_plain


def _prepare(feedback: Feedback, index: int, name: str) -> Metric:
    try:
        return feedback.prepare(index)
    except NumericsError as error:
        raise NumericsError(str(error), weight=name) from None


def _promise(task: Task, moments: Moments, feedback: Feedback | None, *, reverted: bool) -> Promise:
    """What is promised of a weight whose scales ``moments`` weighted. One scale for all weights is searched once."""
    proven = get_search(task.search).proven
    importance = _importance(moments, task)
    if reverted:
        return Promise(scales=proven, codes=True, importance=importance if task.fmt.one_scale else None)
    moved = feedback is not None and feedback.moves_scales
    searched = proven and task.options.objective != "block" and not moved
    return Promise(scales=searched, codes=feedback is None, importance=importance)


def _global_scale(task: Task, inputs: Sequence[Moments]) -> tuple[torch.Tensor | None, torch.Tensor | None, float]:
    """(the plain global scale, the one to use, weighted error at that divided by that at the plain one)."""
    fmt, search, device = task.fmt, task.search, task.device
    amax = largest(task)
    if not fmt.has_global:
        return None, None, 1.0
    plain = absmax_global(amax, fmt)
    if not task.search_global or amax == 0:
        return plain, plain, 1.0
    pairs = list(zip(task.weights, (_importance(moments, task) for moments in inputs), strict=True))
    samples = [(torch.cat([w.rows(*run) for run in sample_rows(w.shape, fmt)]).to(device), h) for w, h in pairs]

    def sampled(scales: Sequence[torch.Tensor]) -> list[float]:
        errors_of_each = (_scaled_errors(s, fmt, search, scales, h) for s, h in samples)
        return [sum(errors) for errors in zip(*errors_of_each, strict=True)]

    def whole(scales: Sequence[torch.Tensor]) -> list[float]:
        parts = ((w.rows(*run).to(device), h) for w, h in pairs for run in chunks(w.shape, fmt))
        errors_of_each = (_scaled_errors(part, fmt, search, scales, h) for part, h in parts)
        return [sum(errors) for errors in zip(*errors_of_each, strict=True)]

    g = pick(plain, fmt, totals=sampled, exact=exact_global(amax, fmt, [s for s, _ in samples]))
    if torch.equal(g, plain):
        return plain, plain, 1.0
    at_plain, at_g = whole([plain, g])
    return (plain, g, at_g / at_plain) if at_g < at_plain * (1 - ROUNDING_MARGIN) else (plain, plain, 1.0)


def _scaled_errors(
    w: torch.Tensor, fmt: Format, search: str, scales: Sequence[torch.Tensor], importance: torch.Tensor | None
) -> list[float]:
    """``total_errors``; with importance in its own unit, so that weights with different inputs add up."""
    totals = total_errors(w, fmt, search=search, global_scales=scales, importance=importance)
    if importance is None:
        return totals
    top = float(importance.amax())
    return [total * (2.0 ** (math.frexp(top)[1] - 1) if top > 0 else 1.0) for total in totals]


def _importance(moments: Moments, task: Task) -> torch.Tensor | None:
    """Column weights of the scale search; None without weighting, or where the moment is zero."""
    if task.options.objective == "none" or not bool((moments.second_moment > 0).any()):
        return None
    return moments.second_moment


def _weight(
    weight: Weight, moments: Moments, task: Task, scales: _Scales, feedback: Feedback | None, metric: Metric | None
) -> tuple[list[tuple[int, QTensor]], WeightError, dict[str, Any]]:
    """(row runs of the better of the calibrated and the plain weight, its errors, its fields of the record)."""
    fmt = task.fmt
    judge = (moments if moments.held_out is None else moments.held_out).to(task.device)
    nearest = _nearest(moments, task, scales)
    made: list[tuple[int, QTensor]] = []
    simple: list[tuple[int, QTensor]] = []
    errors, base = _Errors(), _Errors()
    absmax = 0.0
    for start, stop in _runs(weight, moments, fmt, elements=_run_elements(task, feedback)):
        outputs = _between(moments.outputs, start, stop)
        w = weight.rows(start, stop).to(task.device)
        absmax += total_error(w, fmt, search="absmax", global_scale=scales.plain)
        rtn = scales.nearest(w, fmt, task.search, None)
        if feedback is None or metric is None:
            q = nearest(w)
        else:
            q = feedback.choose(w, metric, scales.g, nearest, outputs)
        made.append((start, q))
        simple.append((start, rtn))
        errors.add(q, w, judge, outputs)
        base.add(rtn, w, judge, outputs)
    reverted = errors.output > base.output
    taken, rows = (base, simple) if reverted else (errors, made)
    error = WeightError(taken.squared, taken.energy, taken.squared / absmax if absmax else 1.0)
    record = {
        "weighted_error": taken.weighted,
        "metric": "output" if moments.outputs is None else "kl",
        "output_error": taken.output,
        "versus_rtn": taken.output / base.output if base.output else 1.0,
        "damping": None if metric is None else metric.damping,
        "reverted": reverted,
        "held_out": moments.held_out is not None,
    }
    return rows, error, record


def _nearest(moments: Moments, task: Task, scales: _Scales) -> Callable[[torch.Tensor], QTensor]:
    """What gives the nearest codes of rows at scales that the moments of their input weight."""
    fmt, h = task.fmt, _importance(moments, task)
    if task.options.objective != "block":
        return lambda w: scales.nearest(w, fmt, task.search, h)
    blocks = block_objective.moments_for(fmt, full=moments.full_moment, blocks=moments.block_moment)

    def nearest(w: torch.Tensor) -> QTensor:
        chosen = block_objective.search(w, fmt, moments=blocks.to(w.device), global_scale=scales.g)
        return encode_rows(w, chosen, fmt, global_scale=scales.g)

    return nearest


class _Errors:
    """Sums over the runs of one weight, float64."""

    def __init__(self) -> None:
        self.squared = self.energy = self.weighted = self.output = 0.0

    def add(self, q: QTensor, w: torch.Tensor, judge: Moments, outputs: Sequence[torch.Tensor] | None) -> None:
        """Adds a run of rows."""
        squared, energy = measure(q, w)
        error = w.float() - decoded(q)
        self.squared, self.energy = self.squared + squared, self.energy + energy
        self.weighted += output_error(error, judge.second_moment)
        self.output += expected_error(error, judge, outputs)


def _runs(weight: Weight, moments: Moments, fmt: Format, *, elements: int) -> list[tuple[int, int]]:
    """Runs of rows [start, stop) of about so many weights: whole ones of those whose gradients are known together."""
    rows = fmt.block_extent(weight.shape)[0]
    rows = rows if moments.outputs is None else math.lcm(rows, len(moments.outputs[0]))
    return row_chunks(weight.shape, block_rows=rows, elements=elements)


def _run_elements(task: Task, feedback: Feedback | None) -> int:
    """How many weights are quantized at once. Feedback goes from column to column in steps that a GPU begins one after
    the other, however few rows there are: it gets more of them, and sums of errors come in another order there."""
    return GPU_ELEMENTS if feedback is not None and task.device.type == "cuda" else CHUNK_ELEMENTS


def _batches(task: Task, inputs: Sequence[Moments], most: int) -> list[list[tuple[int, int, int]]]:
    """Runs of rows (number of a weight, start, stop) in order, by what is quantized at once: those of weights that are
    given one input, up to ``most`` weights, where each goes through its rows a few at a time."""
    batches: list[list[tuple[int, int, int]]] = []
    elements = 0  # of the last batch
    last: torch.Tensor | None = None  # its input, where others may join it
    for index, (weight, moments) in enumerate(zip(task.weights, inputs, strict=True)):
        joins = moments.outputs is not None and task.fmt.block[0] == 1
        for start, stop in _runs(weight, moments, task.fmt, elements=most):
            size = (stop - start) * weight.shape[1]
            if joins and moments.second_moment is last and elements + size <= most:
                batches[-1].append((index, start, stop))
                elements += size
            else:
                batches.append([(index, start, stop)])
                elements = size
            last = moments.second_moment if joins else None
    return batches


def _between(outputs: Sequence[torch.Tensor] | None, start: int, stop: int) -> Sequence[torch.Tensor] | None:
    """The moments of the outputs of a run of rows."""
    return None if outputs is None else outputs[start // len(outputs[0]) : -(-stop // len(outputs[0]))]


def _check_width(weight: Weight, moments: Moments, name: str) -> None:
    if moments.second_moment.shape != (weight.shape[1],):
        raise FormatError(
            f"the statistics of '{name}' are of {moments.second_moment.shape[0]} columns, the weight has "
            f"{weight.shape[1]}; calibrate this model"
        )
    if moments.held_out is not None:
        _check_width(weight, moments.held_out, name)
    if not bool(torch.isfinite(moments.second_moment).all()) or bool((moments.second_moment < 0).any()):
        raise NumericsError(
            f"the second moment of the input of '{name}' is not finite or negative; calibrate again", weight=name
        )
