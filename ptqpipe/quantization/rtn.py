"""Round to nearest: searched scales, then the nearest code of every weight. With data, the scales are weighted.

The search ``enlarged`` is the exact one for weights that are enlarged first (``search/enlarged.py``).

Works on units of any size in a few chunks of memory: the weights are read by runs of rows, several times when the
unit is not cached, and every QTensor goes out as soon as it is made. Formats with one scale for all of a unit's weights
are the exception: these are in memory together.
"""

from dataclasses import replace
from typing import NamedTuple

import torch

from ptqpipe.numerics.formats import Format, packed_columns
from ptqpipe.numerics.global_scale import POINTS, absmax_global, exact_global
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.numerics.search import get_search
from ptqpipe.numerics.search.enlarged import enlarge, factor_for
from ptqpipe.quantization import calibrated
from ptqpipe.quantization.driver import Sums, absmax_error, errors_at, quantize_weight, sampled_rows, search_global
from ptqpipe.quantization.lossless_mxfp4 import transcode
from ptqpipe.quantization.unit import (
    CHUNK_ELEMENTS,
    ROUNDING_MARGIN,
    LoadedWeight,
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
)

ENLARGED_AT_ONCE = 1 << 19  # weights: in float32 they stay in a cache
LARGE = 2.0**126  # magnitudes from here on are not enlarged: the next power of two but one is no float32


def quantize(task: Task) -> UnitResult:
    """Quantizes the weights of one unit and sends their rows to the sink, a second time where the global scale is
    revised.

    Raises NumericsError naming the weight for NaN, inf, or magnitudes that float32 arithmetic cannot hold.
    """
    if task.inputs is not None:
        return calibrated.quantize(task)
    if task.fmt.one_scale:
        return _quantize_as_one(task)
    transcoded = transcode(task)
    if transcoded is not None:
        return transcoded
    amax, samples = largest(task), sampled_rows(task)
    rule = _rule(task, samples, amax)
    importance = task.importance or [None] * len(samples)
    # Where columns count differently, candidates differ by less than the luck of rounding (labs/propagated).
    points = POINTS if all(h is None for h in importance) else 0
    plain, g, lossless = search_global(
        task,
        lambda: [(enlarge(w, rule.factor), h) for w, h in zip(samples, importance, strict=True)],
        amax * rule.factor,
        search=rule.search,
        points=points,
    )
    lossless = lossless and rule.factor == 1
    compare = None if plain is None or g is None or torch.equal(plain, g) else plain
    sums, error, plain_error = _pass(task, rule, g, None if lossless else compare)
    if lossless and any(one.squared for one in sums):  # of the sample alone
        lossless = False
        sums, error, plain_error = _pass(task, rule, g, compare)
    if compare is not None and error > plain_error * (1 - ROUNDING_MARGIN):  # the sample misled; the whole decides
        g = plain
        sums, _, _ = _pass(task, rule, g, None)
        compare = None
    absmax, errors = absmax_error(task.fmt, amax), []
    for one, sample, h in zip(sums, samples, importance, strict=True):
        baseline = absmax(sample)
        versus_absmax = rule.error(sample, task.fmt, g, h) / baseline if baseline else 1.0
        errors.append(WeightError(one.squared, one.energy, versus_absmax))
    versus_plain = 0.0 if lossless else error / plain_error if compare is not None and plain_error else 1.0
    return _result(task, rule, tuple(errors), g, versus_plain)


class _Rule(NamedTuple):
    search: str
    factor: float = 1.0

    def quantize(self, w: torch.Tensor, fmt: Format, g: torch.Tensor | None, h: torch.Tensor | None = None) -> QTensor:
        """Rows ``[n, K]`` at the global scale ``g``; ``h``: what the columns count in the search."""
        return quantize_rows(enlarge(w, self.factor), fmt, search=self.search, global_scale=g, importance=h)

    def error(self, w: torch.Tensor, fmt: Format, g: torch.Tensor | None, h: torch.Tensor | None) -> float:
        """The squared error that this leaves on rows."""
        if self.factor == 1 and h is None:
            return total_error(w, fmt, search=self.search, global_scale=g)
        return measure(self.quantize(w, fmt, g, h), w)[0]


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


def _result(
    task: Task, rule: _Rule, errors: tuple[WeightError, ...], g: torch.Tensor | None, versus_plain: float
) -> UnitResult:
    proven = get_search(rule.search).proven
    columns = task.importance or [None] * len(errors)
    lossless = [not one.squared_error for one in errors]  # whatever the columns count
    importance = [None if exact else h for exact, h in zip(lossless, columns, strict=True)]
    promises = tuple(Promise(scales=proven, codes=True, importance=h, factor=rule.factor) for h in importance)
    fields = {"enlarged": rule.factor} if task.search == "enlarged" else {}
    return UnitResult(None if g is None else float(g), versus_plain, errors, proven, promises, (fields,) * len(errors))


def _pass(
    task: Task, rule: _Rule, g: torch.Tensor | None, compare: torch.Tensor | None
) -> tuple[list[Sums], float, float]:
    """Quantizes every row at ``g``: the sums of each weight; sum (decode - factor w)^2 over all, which the search makes
    least, weighted where columns count differently; and that sum at the global scale ``compare``."""
    fmt, all_sums = task.fmt, list[Sums]()
    error = compared = of_weight = 0.0
    memory: torch.Tensor | None = None
    h: torch.Tensor | None = None

    def nearest(_start: int, w: torch.Tensor) -> QTensor:
        nonlocal memory, of_weight, compared
        if rule.factor != 1 and (memory is None or memory.numel() < w.numel()):
            memory = torch.empty(w.numel(), device=w.device)
        enlarged = enlarge(w, rule.factor, memory=memory)
        q = quantize_rows(enlarged, fmt, search=rule.search, global_scale=g, importance=h)
        if compare is not None and h is not None and g is not None:
            at_g, at_plain = errors_at([(enlarged, h)], fmt, rule.search, [g, compare])
            of_weight, compared = of_weight + at_g, compared + at_plain
        elif compare is not None:
            of_weight += measure(q, enlarged)[0] if rule.factor != 1 else 0.0
            compared += total_error(enlarged, fmt, search=rule.search, global_scale=compare)
        return q

    for index, weight in enumerate(task.weights):
        of_weight, h = 0.0, None if task.importance is None else task.importance[index]
        few = ENLARGED_AT_ONCE if rule.factor != 1 else CHUNK_ELEMENTS
        runs = row_chunks(weight.shape, block_rows=fmt.block_extent(weight.shape)[0], elements=few)
        _, (sums,) = quantize_weight(task, index, runs, [nearest])
        all_sums.append(sums)
        error += sums.squared if rule.factor == 1 and h is None else of_weight
    return all_sums, error, compared


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
    gathered, errors = replace(task, weights=[LoadedWeight(w) for w in whole]), []
    for index, w in enumerate(whole):
        encode = [lambda _start, w: _encode_whole(w, scales, fmt)]
        _, (sums,) = quantize_weight(gathered, index, [(0, len(w))], encode)
        errors.append(WeightError(sums.squared, sums.energy, versus))
    return _result(task, _Rule(task.search), tuple(errors), None, 1.0)


def _encode_whole(w: torch.Tensor, scales: torch.Tensor, fmt: Format) -> QTensor:
    """A matrix at its one scale, encoded by runs of rows."""
    data = torch.empty(w.shape[0], packed_columns(w.shape[1], fmt.element.bits), dtype=torch.uint8, device=w.device)
    for start, stop in row_chunks((w.shape[0], w.shape[1])):
        data[start:stop] = encode_rows(w[start:stop], scales, fmt).data
    return QTensor(fmt, (w.shape[0], w.shape[1]), data, scales, None)
