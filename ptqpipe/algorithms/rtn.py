"""Round to nearest: searched scales, then the nearest code of every weight. With data, the scales are weighted.

Works on units of any size in a few chunks of memory: the weights are read by runs of rows, several times when the
unit is not cached, and every QTensor goes out as soon as it is made. Formats with one scale for all of a unit's weights
are the exception: these are in memory together. The size of a run depends on the shape alone, so
the sums of the statistics, and with them every byte and every reported number, are the same on every machine.
"""

import torch

from ptqpipe.algorithms import calibrated
from ptqpipe.algorithms.unit import (
    ROUNDING_MARGIN,
    Promise,
    Task,
    UnitResult,
    WeightError,
    checked_amax,
    chunks,
    encode_rows,
    gather,
    joint,
    largest,
    measure,
    quantize_rows,
    row_runs,
    search_scales,
    total_error,
)
from ptqpipe.formats import Format, packed_columns
from ptqpipe.global_scale import absmax_global, exact_global, pick, sample_rows
from ptqpipe.qtensor import QTensor
from ptqpipe.search import get_search


def quantize(task: Task) -> UnitResult:
    """Quantizes the weights of one unit and sends their rows to the sink, a second time where the global scale is
    revised.

    Raises NumericsError naming the weight for NaN, inf, or magnitudes that float32 arithmetic cannot hold.
    """
    fmt, search = task.fmt, task.options.search
    if task.inputs is not None:
        return calibrated.quantize(task)
    if fmt.one_scale:
        return _quantize_as_one(task)
    amax = largest(task)
    samples = [
        torch.cat([weight.rows(*run) for run in sample_rows(weight.shape, fmt)]).to(task.device)
        for weight in task.weights
    ]
    plain = g = None
    if fmt.has_global:
        plain = g = absmax_global(amax, fmt)
        if task.search_global and amax > 0:
            exact = exact_global(amax, fmt, samples)
            g = pick(
                plain,
                fmt,
                total=lambda c: sum(total_error(s, fmt, search=search, global_scale=c) for s in samples),
                exact=exact,
            )
    compare = None if plain is None or g is None or torch.equal(plain, g) else plain
    sums, plain_error = _pass(task, g, compare)
    error = sum(squared for squared, _ in sums)
    if compare is not None and error > plain_error * (1 - ROUNDING_MARGIN):  # the sample misled; the whole decides
        g = plain
        sums, _ = _pass(task, g, None)
        compare = None
    errors = tuple(
        WeightError(squared, energy, _versus_absmax(sample, fmt, search=search, g=g, plain=plain))
        for (squared, energy), sample in zip(sums, samples, strict=True)
    )
    versus_plain = error / plain_error if compare is not None and plain_error else 1.0
    return _result(task, errors, g, versus_plain)


def _result(task: Task, errors: tuple[WeightError, ...], g: torch.Tensor | None, versus_plain: float) -> UnitResult:
    proven = get_search(task.options.search).PROVEN
    promises = (Promise(scales=proven, codes=True),) * len(errors)
    return UnitResult(None if g is None else float(g), versus_plain, errors, proven, promises, ({},) * len(errors))


def _pass(task: Task, g: torch.Tensor | None, compare: torch.Tensor | None) -> tuple[list[tuple[float, float]], float]:
    """Quantizes every row at ``g``: per weight (squared error, energy), and the whole error at ``compare``."""
    fmt, search = task.fmt, task.options.search
    sums: list[tuple[float, float]] = []
    compared = 0.0
    for index, weight in enumerate(task.weights):
        squared = energy = 0.0
        for start, stop in chunks(weight.shape, fmt):
            w = weight.rows(start, stop).to(task.device)
            q = quantize_rows(w, fmt, search=search, global_scale=g)
            task.sink(index, start, q)
            error, power = measure(q, w)
            squared, energy = squared + error, energy + power
            if compare is not None:
                compared += total_error(w, fmt, search=search, global_scale=compare)
        sums.append((squared, energy))
    return sums, compared


def _quantize_as_one(task: Task) -> UnitResult:
    """Formats with one scale per tensor: readers fuse the unit's weights and keep one scale, so it is one tensor.

    Its weights are in memory together, as the source has them, and their codes (`unit.gathered_bytes`).
    """
    fmt = task.fmt
    whole = gather(task.weights, task.device)
    for w, name in zip(whole, task.names, strict=True):
        checked_amax(w, name)
    all_rows = joint(whole)
    scales = search_scales(all_rows, fmt, search=task.options.search)
    plain = search_scales(all_rows, fmt, search="absmax")
    at_plain = measure(_encode_whole(all_rows, plain, fmt), all_rows)[0]
    versus = measure(_encode_whole(all_rows, scales, fmt), all_rows)[0] / (at_plain or 1.0)
    errors = []
    for index, w in enumerate(whole):
        q = _encode_whole(w, scales, fmt)
        task.sink(index, 0, q)
        errors.append(WeightError(*measure(q, w), versus))
    return _result(task, tuple(errors), None, 1.0)


def _encode_whole(w: torch.Tensor, scales: torch.Tensor, fmt: Format) -> QTensor:
    """A matrix at its one scale, encoded by runs of rows."""
    data = torch.empty(w.shape[0], packed_columns(w.shape[1], fmt.element.bits), dtype=torch.uint8, device=w.device)
    for start, stop in row_runs((w.shape[0], w.shape[1])):
        data[start:stop] = encode_rows(w[start:stop], scales, fmt).data
    return QTensor(fmt, (w.shape[0], w.shape[1]), data, scales, None)


def _versus_absmax(
    sample: torch.Tensor, fmt: Format, *, search: str, g: torch.Tensor | None, plain: torch.Tensor | None
) -> float:
    baseline = total_error(sample, fmt, search="absmax", global_scale=plain)
    return total_error(sample, fmt, search=search, global_scale=g) / baseline if baseline else 1.0
