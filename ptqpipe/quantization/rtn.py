"""Round to nearest: searched scales, then the nearest code of every weight. With data, the scales are weighted.

The search ``enlarged`` is the exact one for weights that are enlarged first (``search/enlarged.py``).

Works on units of any size in a few chunks of memory: the weights are read by runs of rows, several times when the
unit is not cached, and every QTensor goes out as soon as it is made. Formats with one scale for all of a unit's weights
are the exception: these are in memory together. The size of a run depends on the shape alone, so
the sums of the statistics, and with them every byte and every reported number, are the same on every machine.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ptqpipe.numerics.formats import Format, packed_columns
from ptqpipe.numerics.global_scale import absmax_global, exact_global, pick, sample_rows
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.numerics.search import get_search
from ptqpipe.numerics.search.enlarged import enlarge, factor_for
from ptqpipe.quantization import calibrated
from ptqpipe.quantization.lossless_mxfp4 import transcode
from ptqpipe.quantization.unit import (
    CHUNK_ELEMENTS,
    ROUNDING_MARGIN,
    Promise,
    Task,
    UnitResult,
    WeightError,
    checked_amax,
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

ENLARGED_AT_ONCE = 1 << 19  # weights: in float32 they stay in a cache
LARGE = 2.0**126  # magnitudes from here on are not enlarged: the next power of two but one is no float32


def quantize(task: Task) -> UnitResult:
    """Quantizes the weights of one unit and sends their rows to the sink, a second time where the global scale is
    revised.

    Raises NumericsError naming the weight for NaN, inf, or magnitudes that float32 arithmetic cannot hold.
    """
    fmt = task.fmt
    if task.inputs is not None:
        return calibrated.quantize(task)
    if fmt.one_scale:
        return _quantize_as_one(task)
    transcoded = transcode(task)
    if transcoded is not None:
        return transcoded
    amax = largest(task)
    samples = [
        torch.cat([weight.rows(*run) for run in sample_rows(weight.shape, fmt)]).to(task.device)
        for weight in task.weights
    ]
    rule = _rule(task, samples, amax)
    plain, g, lossless = _global_scales(task, rule, samples, amax)
    compare = None if plain is None or g is None or torch.equal(plain, g) else plain
    sums, plain_error = _pass(task, rule, g, None if lossless else compare)
    error = sum(one.minimized for one in sums)
    if lossless and error != 0:  # of the sample alone
        lossless = False
        sums, plain_error = _pass(task, rule, g, compare)
    if compare is not None and error > plain_error * (1 - ROUNDING_MARGIN):  # the sample misled; the whole decides
        g = plain
        sums, _ = _pass(task, rule, g, None)
        compare = None
    errors = tuple(
        WeightError(one.squared, one.energy, _versus_absmax(sample, fmt, rule=rule, g=g, amax=amax))
        for one, sample in zip(sums, samples, strict=True)
    )
    versus_plain = 0.0 if lossless else error / plain_error if compare is not None and plain_error else 1.0
    return _result(task, rule, errors, g, versus_plain)


class _Rule(NamedTuple):
    """The search of the block scales, and what the weights are multiplied by before."""

    search: str
    factor: float = 1.0

    def quantize(self, w: torch.Tensor, fmt: Format, g: torch.Tensor | None) -> QTensor:
        """Rows ``[n, K]`` at the global scale ``g``."""
        return quantize_rows(enlarge(w, self.factor), fmt, search=self.search, global_scale=g)


def _rule(task: Task, samples: list[torch.Tensor], amax: float) -> _Rule:
    """The search of a task by name; for ``enlarged`` the exact one, and the factor that the samples ask for."""
    if task.search != "enlarged":
        return _Rule(task.search)
    fmt, g, exact = task.fmt, None, _Rule("exact")
    if fmt.has_global:
        exact_g = exact_global(amax, fmt, samples)
        g = absmax_global(amax, fmt) if exact_g is None else exact_g
    lost = [measure(exact.quantize(sample, fmt, g), sample) for sample in samples]
    factor = factor_for(sum(error for error, _ in lost), sum(energy for _, energy in lost))
    return exact._replace(factor=factor) if amax < LARGE else exact


def _global_scales(
    task: Task, rule: _Rule, samples: list[torch.Tensor], amax: float
) -> tuple[torch.Tensor | None, torch.Tensor | None, bool]:
    """(the plain global scale, the one that the samples ask for, whether that leaves no error on them, as the plain one
    does); None for a format without one."""
    fmt = task.fmt
    if not fmt.has_global:
        return None, None, False
    plain = absmax_global(amax * rule.factor, fmt)
    if not task.search_global or amax == 0:
        return plain, plain, False
    enlarged = [enlarge(s, rule.factor) for s in samples]

    def totals(scales: Sequence[torch.Tensor]) -> list[float]:
        errors_of_each = (total_errors(s, fmt, search=rule.search, global_scales=scales) for s in enlarged)
        return [sum(errors) for errors in zip(*errors_of_each, strict=True)]

    exact = exact_global(amax * rule.factor, fmt, enlarged)
    g = pick(plain, fmt, totals=totals, exact=exact)
    if rule.factor != 1 or g is not exact:
        return plain, g, False
    at_g, at_plain = totals([g, plain])
    return plain, g, 0 == at_g < at_plain


def _result(
    task: Task, rule: _Rule, errors: tuple[WeightError, ...], g: torch.Tensor | None, versus_plain: float
) -> UnitResult:
    proven = get_search(rule.search).proven
    promises = (Promise(scales=proven, codes=True, factor=rule.factor),) * len(errors)
    fields = {"enlarged": rule.factor} if task.search == "enlarged" else {}
    return UnitResult(None if g is None else float(g), versus_plain, errors, proven, promises, (fields,) * len(errors))


class _Sums(NamedTuple):
    """Of one weight: sum (decode - w)^2, sum w^2, and sum (decode - factor w)^2, which the search makes least."""

    squared: float
    energy: float
    minimized: float


def _pass(task: Task, rule: _Rule, g: torch.Tensor | None, compare: torch.Tensor | None) -> tuple[list[_Sums], float]:
    """Quantizes every row at ``g``: the sums of each weight, and what would be minimized of all at ``compare``."""
    fmt = task.fmt
    sums: list[_Sums] = []
    compared = 0.0
    memory: torch.Tensor | None = None
    for index, weight in enumerate(task.weights):
        squared = energy = minimized = 0.0
        few = ENLARGED_AT_ONCE if rule.factor != 1 else CHUNK_ELEMENTS
        for start, stop in row_chunks(weight.shape, block_rows=fmt.block_extent(weight.shape)[0], elements=few):
            w = weight.rows(start, stop).to(task.device)
            if rule.factor != 1 and (memory is None or memory.numel() < w.numel()):
                memory = torch.empty(w.numel(), device=w.device)
            enlarged = enlarge(w, rule.factor, memory=memory)
            q = quantize_rows(enlarged, fmt, search=rule.search, global_scale=g)
            task.sink(index, start, q)
            error, power = measure(q, w)
            squared, energy = squared + error, energy + power
            if rule.factor == 1:
                minimized += error
            elif compare is not None:
                minimized += measure(q, enlarged)[0]
            if compare is not None:
                compared += total_error(enlarged, fmt, search=rule.search, global_scale=compare)
        sums.append(_Sums(squared, energy, minimized))
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
    scales = search_scales(all_rows, fmt, search=task.search)
    plain = search_scales(all_rows, fmt, search="absmax")
    at_plain = measure(_encode_whole(all_rows, plain, fmt), all_rows)[0]
    versus = measure(_encode_whole(all_rows, scales, fmt), all_rows)[0] / (at_plain or 1.0)
    errors = []
    for index, w in enumerate(whole):
        q = _encode_whole(w, scales, fmt)
        task.sink(index, 0, q)
        errors.append(WeightError(*measure(q, w), versus))
    return _result(task, _Rule(task.search), tuple(errors), None, 1.0)


def _encode_whole(w: torch.Tensor, scales: torch.Tensor, fmt: Format) -> QTensor:
    """A matrix at its one scale, encoded by runs of rows."""
    data = torch.empty(w.shape[0], packed_columns(w.shape[1], fmt.element.bits), dtype=torch.uint8, device=w.device)
    for start, stop in row_chunks((w.shape[0], w.shape[1])):
        data[start:stop] = encode_rows(w[start:stop], scales, fmt).data
    return QTensor(fmt, (w.shape[0], w.shape[1]), data, scales, None)


def _versus_absmax(sample: torch.Tensor, fmt: Format, *, rule: _Rule, g: torch.Tensor | None, amax: float) -> float:
    """The squared error of sampled rows divided by that of abs-max scales."""
    plain = absmax_global(amax, fmt) if fmt.has_global else None
    baseline = total_error(sample, fmt, search="absmax", global_scale=plain)
    if rule.factor == 1:
        own = total_error(sample, fmt, search=rule.search, global_scale=g)
    else:
        own = measure(rule.quantize(sample, fmt, g), sample)[0]
    return own / baseline if baseline else 1.0
