"""The low-rank part of a unit's weights: convert writes it, verify computes it again.

With statistics it is the best for the layer's output, by the full second moment of the input where the folder has it,
else by its diagonal; without, the best for the weight. Knows plans and statistics; must not know how codes were chosen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ptqpipe.algorithms import lorc
from ptqpipe.algorithms.unit import Sink, UnitResult, Weight, WeightError
from ptqpipe.plan import Unit
from ptqpipe.qtensor import QTensor
from ptqpipe.stages.common.input_scales import module_of
from ptqpipe.statistics import KnownInputs, Statistics

Runs = dict[tuple[int, int], QTensor]
"""(member, first row) -> quantized rows of a unit."""


def correct_unit(
    unit: Unit,
    weights: Sequence[Weight],
    runs: Runs,
    result: UnitResult,
    *,
    statistics: KnownInputs | None,
    sink: Sink,
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


def extra_bytes(unit: Unit, statistics: Statistics | None) -> int:
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
