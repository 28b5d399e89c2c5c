"""Quantizes a unit with calibration statistics: weighted scales, codes, and a comparison with plain rounding.

One global scale for the unit is searched with the weighted objective; every run of rows gets its block scales, then its
codes; for each weight the output error of the result is compared with that of plain round to nearest, and the better of
the two is taken. Which codes an algorithm chooses is its `Feedback`; without one they are the nearest.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ptqpipe.calibration.inputs import Moments
from ptqpipe.errors import FormatError, NumericsError
from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.numerics.search import get_search
from ptqpipe.quantization import block_objective
from ptqpipe.quantization.driver import (
    absmax_error,
    errors_at,
    of_rows,
    quantize_weight,
    sampled_rows,
    search_global,
)
from ptqpipe.quantization.metric import Metric
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
    quantize_rows,
    row_chunks,
    search_scales,
)
from ptqpipe.recipe.options import AUTO

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

    g      the global one; None for formats without one
    joint  the one scale of formats that have one for all weights of a unit
    """

    g: torch.Tensor | None
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
    amax = _checked(task, inputs)
    scales, versus_plain = _searched(task, inputs, amax)
    g, absmax = scales.g, absmax_error(task.fmt, amax)
    errors, records = list[WeightError](), list[dict[str, Any]]()
    metric: Metric | None = None

    for index, moments in enumerate(inputs):
        if feedback is not None and (index == 0 or moments.second_moment is not inputs[index - 1].second_moment):
            metric = None  # free the old metric first: both together are the memory peak
            metric = _prepare(feedback, index, task.names[index])
        error, record = _weight(task, index, moments, scales, feedback, metric, absmax)
        errors.append(error)
        records.append({"algorithm": options.algorithm, "weighting": options.objective, **record})
    proven = get_search(task.search).proven and feedback is None and options.objective != "block"
    proven = proven and not any(record["reverted"] for record in records)
    promises = tuple(
        _promise(task, moments if scales.joint is None else inputs[0], feedback, reverted=record["reverted"])
        for moments, record in zip(inputs, records, strict=True)
    )
    return UnitResult(None if g is None else float(g), versus_plain, tuple(errors), proven, promises, tuple(records))


def _weight(
    task: Task,
    index: int,
    moments: Moments,
    scales: _Scales,
    feedback: Feedback | None,
    metric: Metric | None,
    absmax: Callable[[torch.Tensor], float],
) -> tuple[WeightError, dict[str, Any]]:
    """Quantizes one weight, the better way of its own and plain rounding; its errors and its fields of the record."""
    judge = (moments if moments.held_out is None else moments.held_out).to(task.device)
    nearest, outputs = _nearest(moments, task, scales), moments.outputs

    def own(start: int, w: torch.Tensor) -> QTensor:
        if feedback is None or metric is None:
            return nearest(w)
        return feedback.choose(w, metric, scales.g, nearest, of_rows(outputs, start, start + len(w)))

    def plain(_start: int, w: torch.Tensor) -> QTensor:
        return scales.nearest(w, task.fmt, task.search, None)

    runs = _runs(task.weights[index], moments, task.fmt, elements=_run_elements(task, feedback))
    best, sums = quantize_weight(task, index, runs, [own, plain], judge=judge, outputs=outputs, absmax=absmax)
    record = {
        "weighted_error": sums[best].weighted,
        "metric": "output" if outputs is None else "kl",
        "output_error": sums[best].output,
        "versus_rtn": sums[best].output / sums[1].output if sums[1].output else 1.0,
        "damping": None if metric is None else metric.damping,
        "reverted": best == 1,
        "held_out": moments.held_out is not None,
    }
    return sums[best].error, record


def choose(task: Task, feedback: Feedback) -> None:
    """Sends the codes that ``feedback`` chooses to the sink, whatever plain rounding would cost: the caller judges.
    Raises as `quantize` does."""
    inputs = task.inputs or ()
    scales, _ = _searched(task, inputs, _checked(task, inputs))
    for batch in _batches(task, inputs, _run_elements(task, feedback)):
        first = batch[0][0]
        metric, nearest = _prepare(feedback, first, task.names[first]), _nearest(inputs[first], task, scales)
        w = torch.cat([task.weights[index].rows(start, stop) for index, start, stop in batch]).to(task.device)
        gradients = [of_rows(inputs[index].outputs, start, stop) for index, start, stop in batch]
        outputs = None if gradients[0] is None else [g for of_member in gradients for g in of_member or ()]
        q, first_row = feedback.choose(w, metric, scales.g, nearest, outputs), 0
        for index, start, stop in batch:
            task.sink(index, start, q if len(batch) == 1 else q.narrow(0, first_row, stop - start))
            first_row += stop - start


def _searched(task: Task, inputs: Sequence[Moments], amax: float) -> tuple[_Scales, float]:
    """(the scales that all weights share, weighted error at that global scale divided by that at the plain one)."""
    fmt, search, joint_scale, versus_plain = task.fmt, task.search, None, 1.0
    importance = [_importance(moments, task) for moments in inputs]
    plain, g, _ = search_global(
        task, lambda: list(zip(sampled_rows(task), importance, strict=True)), amax, search=search
    )
    if plain is not None and g is not None and not torch.equal(g, plain):
        rows = (
            (weight.rows(*run).to(task.device), h)
            for weight, h in zip(task.weights, importance, strict=True)
            for run in chunks(weight.shape, fmt)
        )
        at_plain, at_g = errors_at(rows, fmt, search, [plain, g])
        kept = at_g < at_plain * (1 - ROUNDING_MARGIN)
        g, versus_plain = (g, at_g / at_plain) if kept else (plain, 1.0)
    if fmt.one_scale:
        whole = joint(gather(task.weights, task.device))
        joint_scale = search_scales(whole, fmt, search=search, importance=importance[0])
    return _Scales(g, joint_scale), versus_plain


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


def _importance(moments: Moments, task: Task) -> torch.Tensor | None:
    if task.options.objective in (AUTO, "none") or not bool((moments.second_moment > 0).any()):
        return None
    return moments.second_moment


def _nearest(moments: Moments, task: Task, scales: _Scales) -> Callable[[torch.Tensor], QTensor]:
    fmt, h = task.fmt, _importance(moments, task)
    if task.options.objective != "block":
        return lambda w: scales.nearest(w, fmt, task.search, h)
    blocks = block_objective.moments_for(fmt, full=moments.full_moment, blocks=moments.block_moment)

    def nearest(w: torch.Tensor) -> QTensor:
        chosen = block_objective.search(w, fmt, moments=blocks.to(w.device), global_scale=scales.g)
        return encode_rows(w, chosen, fmt, global_scale=scales.g)

    return nearest


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


def _checked(task: Task, inputs: Sequence[Moments]) -> float:
    for weight, moments, name in zip(task.weights, inputs, task.names, strict=True):
        _check_width(weight, moments, name)
    return largest(task)


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
