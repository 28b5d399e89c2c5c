"""A unit quantized by its rule, low-rank parts and all: convert writes it, tune starts from it, verify repeats it.

With statistics a low-rank part is the best for the layer's output, by the full second moment of the input where the
folder has it, else by its diagonal; without, the best for the weight. Knows rules, schemes and moments of inputs; must
not know where weights come from or rows go.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ptqpipe.calibration.statistics import KnownInputs, Statistics
from ptqpipe.conversion.moments import inputs_of, module_of
from ptqpipe.errors import NumericsError
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.quantization import RowWriter, Task, UnitResult, Weight, WeightError, lorc, quantizer
from ptqpipe.quantization.learned_codes import Rounding
from ptqpipe.quantization.recheck import Recheck
from ptqpipe.recipe.options import ALGORITHMS, LEARNED
from ptqpipe.recipe.plan import Unit

QuantizedRows = dict[tuple[int, int], QTensor]
"""(member, first row) -> quantized rows of a unit."""


def correct_unit(
    unit: Unit,
    weights: Sequence[Weight],
    runs: QuantizedRows,
    result: UnitResult,
    *,
    statistics: KnownInputs | None,
    sink: RowWriter,
) -> UnitResult:
    """Sends the rows of ``runs`` to ``sink``, each once, with the best low-rank part for the error that they leave.

    result  of the codes alone; the one returned has the errors with the low-rank parts, and what the record says of
            these
    """
    low = unit.scheme.low_rank
    assert low is not None
    found: list[WeightError] = []
    records: list[Mapping[str, Any]] = []
    current: tuple[str, lorc.Weighting, lorc.Weighting | None] | None = None
    for index, (member, weight, error) in enumerate(zip(unit.members, weights, result.errors, strict=True)):
        module = module_of(member)
        key = "" if statistics is None else statistics.key(module)
        if current is None or current[0] != key:
            current = None  # the old one goes before the new one comes
            current = key, *_weighting(statistics, module, damping=unit.rule.damping)
        own = sorted((row, q) for (owner, row), q in runs.items() if owner == index)
        corrected = lorc.correct(weight, own, low, weighting=current[1], judge=current[2])
        for row, q in corrected.rows:
            sink(index, row, q)
        ratio = corrected.squared_error / error.squared_error if error.squared_error else 1.0
        found.append(replace(error, squared_error=corrected.squared_error, versus_absmax=error.versus_absmax * ratio))
        records.append(
            {
                "rank": low.of(member.shape),
                "dtype": low.dtype,
                "moment": current[1].kind,
                "held_out": current[2] is not None,
                "versus_codes": corrected.versus_codes,
                "dropped": corrected.dropped,
            }
        )
    pairs = zip(result.record_fields, records, strict=True)
    return replace(
        result, errors=tuple(found), record_fields=tuple({**fields, "low_rank": low_rank} for fields, low_rank in pairs)
    )


def _weighting(
    statistics: KnownInputs | None, module: str, *, damping: float
) -> tuple[lorc.Weighting, lorc.Weighting | None]:
    """(what the factors minimize, what decides whether they are kept: None for the same)."""
    if statistics is None:
        return lorc.Weighting(), None
    found = statistics.of(module, full=statistics.has(module, "full_moment"), held_out=True)
    name = f"the input of '{module}'"
    weighting = lorc.Weighting.of(found.second_moment, found.full_moment, damping=damping, name=name)
    held_out = found.held_out
    if held_out is None or weighting.moment is None:
        return weighting, None
    moment = held_out.full_moment if held_out.full_moment is not None else held_out.second_moment
    return weighting, lorc.Weighting(moment.double())


def low_rank_bytes(unit: Unit, statistics: Statistics | None) -> int:
    """About how much memory the low-rank parts of a unit take in addition to its weights: its codes wait for them."""
    if unit.scheme.low_rank is None:
        return 0
    codes = sum(m.elements * unit.scheme.fmt.bits_per_weight(m.shape) / 8 for m in unit.members)
    needs = []
    for member in unit.members:
        module = module_of(member)
        full = statistics is not None and statistics.has(module, "full_moment")
        held_out = 8 * member.shape[1] ** 2 if full and statistics is not None and statistics.held_out(module) else 0
        needs.append(lorc.memory_bytes(member.shape, full=full) + held_out)
    return int(codes) + max(needs)


def quantize_unit(
    unit: Unit,
    weights: Sequence[Weight],
    sink: RowWriter,
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
    runs: QuantizedRows = {}
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
    return correct_unit(unit, task.weights, runs, result, statistics=statistics, sink=task.sink)


def learned_codes(unit: Unit, rounding: Rounding | None) -> list[QTensor] | None:
    """The learned codes of every weight of a unit; None where there are none."""
    if rounding is None or not rounding.has(unit.members[0].key):
        return None
    return [rounding.of(member.key, unit.scheme.fmt, shape=member.shape) for member in unit.members]
