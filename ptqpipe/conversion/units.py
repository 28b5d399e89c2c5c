"""A unit quantized by its rule: convert writes it, tune starts from it, verify repeats it."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ptqpipe.calibration.statistics import MomentSource
from ptqpipe.conversion.input_moments import inputs_of
from ptqpipe.errors import NumericsError, arg
from ptqpipe.models.source import SourceRows
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.quantization import RowWriter, Task, UnitResult, Weight, WeightError, quantizer
from ptqpipe.quantization.driver import write_learned
from ptqpipe.quantization.learned_codes import LearnedCodes
from ptqpipe.quantization.recheck import Recheck
from ptqpipe.recipe.options import ALGORITHMS, PROPAGATED
from ptqpipe.recipe.plan import Unit

# A weight whose squared error is above this share of its energy is gone; the coarsest formats leave a tenth of it.
LOST = 0.5


def quantize_unit(
    unit: Unit,
    weights: Sequence[Weight],
    sink: RowWriter,
    *,
    statistics: MomentSource | None = None,
    codes: Sequence[QTensor] | None = None,
    device: torch.device | None = None,
    recheck: bool = True,
) -> UnitResult:
    """Quantizes a unit by its rule, and finds a sample of its blocks again by brute force.

    statistics  needed by rules that read moments; checked by ``moments.open_statistics``
    codes       chosen before, one QTensor for each weight: taken as they are
    recheck     whether a sample is searched again

    Raises NumericsError, naming the weight, where weights or moments are unusable or a block is not what was promised.
    """
    names = [member.weight for member in unit.members]
    task = Task(weights, unit.scheme.fmt, names, sink, unit.rule, codes=codes)
    if codes is None and unit.rule.calibrated and statistics is not None:
        task = replace(task, inputs=inputs_of(unit, statistics))
    if codes is None and unit.rule.propagates:
        task = replace(task, importance=[w.energies if isinstance(w, SourceRows) else None for w in weights])
    if device is not None:
        task = replace(task, device=device)
    try:
        result = _quantize_checked(unit, task) if recheck else _quantize(task)
    except NumericsError as error:
        if error.weight:
            raise
        raise NumericsError(f"{' and '.join(names)}: {error}") from None
    if task.importance is None:
        return result
    used = ("none" if promise.importance is None else PROPAGATED for promise in result.promises)
    records = zip(result.record_fields, used, strict=True)
    return replace(result, record_fields=tuple({**fields, "weighting": weighting} for fields, weighting in records))


def _quantize(task: Task) -> UnitResult:
    return write_learned(task) if task.codes is not None else quantizer(ALGORITHMS[task.options.algorithm])(task)


def _quantize_checked(unit: Unit, task: Task) -> UnitResult:
    sample = Recheck(task.weights, task.fmt, names=[member.key for member in unit.members], sink=task.sink)
    result = _quantize(replace(task, sink=sample.take))
    counts = sample.check(result.promises)
    records = [{**fields, "rechecked": n} for fields, n in zip(result.record_fields, counts, strict=True)]
    return replace(result, record_fields=tuple(records))


def learned_codes(unit: Unit, codes: LearnedCodes | None) -> list[QTensor] | None:
    """The learned codes of every weight of a unit; None where there are none."""
    if codes is None or not codes.has(unit.members[0].key):
        return None
    return [codes.of(member.key, unit.scheme.fmt, shape=member.shape) for member in unit.members]


def check_kept_alive(unit: Unit, errors: Sequence[WeightError]) -> None:
    """NumericsError for a weight of which mostly zeros are left: its scale, often a shared one, cannot hold it."""
    for member, error in zip(unit.members, errors, strict=True):
        if error.relative_mse > LOST:
            others = [m.weight for m in unit.members if m is not member]
            shared = f", at the scale that it shares with {' and '.join(others)}" if others else ""
            raise NumericsError(
                f"{member.weight} would lose {min(error.relative_mse, 1.0):.0%} of its energy in "
                f"{unit.scheme.fmt.name}{shared}; repair the source, or keep it: {arg('ignore', [member.module])}"
            )
