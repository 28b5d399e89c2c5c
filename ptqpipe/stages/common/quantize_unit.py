"""A unit quantized by its rule: what convert writes, tune starts from, verify repeats and a dry run times.

Knows rules, schemes and moments of inputs; must not know where weights come from or rows go.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ptqpipe.algorithms import quantizer
from ptqpipe.algorithms.recheck import Recheck
from ptqpipe.algorithms.unit import Sink, Task, UnitResult, Weight
from ptqpipe.errors import NumericsError
from ptqpipe.options import ALGORITHMS, LEARNED
from ptqpipe.plan import Unit
from ptqpipe.qtensor import QTensor
from ptqpipe.rounding import Rounding
from ptqpipe.stages.common import low_rank
from ptqpipe.stages.common.moments import inputs_of
from ptqpipe.statistics import KnownInputs


def quantize_unit(
    unit: Unit,
    weights: Sequence[Weight],
    sink: Sink,
    *,
    statistics: KnownInputs | None = None,
    codes: Sequence[QTensor] | None = None,
    device: torch.device | None = None,
    codes_only: bool = False,
) -> UnitResult:
    """Quantizes a unit by its rule, low-rank parts and all, and finds a sample of its blocks again by brute force.

    statistics  needed by rules that read moments; checked by ``moments.open_statistics``
    codes       chosen before, one QTensor for each weight: taken as they are
    codes_only  without low-rank parts and without the check of a sample

    Raises NumericsError, naming the weight, where weights or moments are unusable or a block is not what was promised.
    """
    names = [member.weight for member in unit.members]
    task = Task(weights, unit.scheme.fmt, names, sink, unit.rule, codes=codes)
    if codes is None and unit.rule.calibrated and statistics is not None:
        task = replace(task, inputs=inputs_of(unit, statistics))
    if device is not None:
        task = replace(task, device=device)
    try:
        return _quantize(task) if codes_only else _quantize_checked(unit, task, statistics)
    except NumericsError as error:
        if error.weight:
            raise
        raise NumericsError(f"{' and '.join(names)}: {error}") from None


def _quantize(task: Task) -> UnitResult:
    return quantizer(LEARNED if task.codes is not None else ALGORITHMS[task.options.algorithm])(task)


def _quantize_checked(unit: Unit, task: Task, statistics: KnownInputs | None) -> UnitResult:
    runs: low_rank.Runs = {}
    whole = unit.scheme.low_rank is None
    keys = [member.key for member in unit.members]
    sink = task.sink if whole else lambda member, row, q: runs.__setitem__((member, row), q)
    sample = Recheck(task.weights, task.fmt, names=keys, sink=sink)
    result = _quantize(replace(task, sink=sample.take))
    counts = sample.check(result.promises)
    records = [{**fields, "rechecked": n} for fields, n in zip(result.record_fields, counts, strict=True)]
    result = replace(result, record_fields=tuple(records))
    if whole:
        return result
    return low_rank.correct_unit(unit, task.weights, runs, result, statistics=statistics, sink=task.sink)


def learned_codes(unit: Unit, rounding: Rounding | None) -> list[QTensor] | None:
    """The learned codes of every weight of a unit; None where there are none."""
    if rounding is None or not rounding.has(unit.members[0].key):
        return None
    return [rounding.of(member.key, unit.scheme.fmt, shape=member.shape) for member in unit.members]
