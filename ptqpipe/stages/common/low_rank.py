"""The low-rank part of a unit's weights: convert writes it, verify computes it again.

With statistics it is the best for the layer's output, by the full second moment of the input where the folder has it,
else by its diagonal; without, the best for the weight. Knows plans and statistics; must not know how codes were chosen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ptqpipe.algorithms import lorc
from ptqpipe.algorithms.rtn import Sink, Weight, WeightError
from ptqpipe.plan import Unit
from ptqpipe.qtensor import QTensor
from ptqpipe.stages.common.input_scales import module_of
from ptqpipe.statistics import KnownInputs, Statistics

Chunks = dict[tuple[int, int], QTensor]
"""(member, first row) -> quantized rows of a unit."""


def correct_unit(
    unit: Unit,
    weights: Sequence[Weight],
    chunks: Chunks,
    errors: Sequence[WeightError],
    *,
    statistics: KnownInputs | None,
    sink: Sink,
) -> tuple[tuple[WeightError, ...], tuple[Mapping[str, Any], ...]]:
    """Sends the rows of ``chunks`` to ``sink``, each once, with the best low-rank part for what they leave.

    errors  of the codes alone

    Returns, of each weight, its errors with the low-rank part, and what the record says of that.
    """
    low = unit.scheme.low_rank
    assert low is not None
    found: list[WeightError] = []
    facts: list[Mapping[str, Any]] = []
    moments: tuple[str, lorc.Weighting, lorc.Weighting | None] | None = None
    for index, (member, weight, error) in enumerate(zip(unit.members, weights, errors, strict=True)):
        module = module_of(member)
        key = "" if statistics is None else statistics.key(module)
        if moments is None or moments[0] != key:
            moments = None  # the old one goes before the new one comes
            moments = key, *_weighting(statistics, module, damping=unit.rule.damping)
        runs = sorted((row, q) for (owner, row), q in chunks.items() if owner == index)
        corrected = lorc.correct(weight, runs, low, weighting=moments[1], judge=moments[2])
        for row, q in corrected.rows:
            sink(index, row, q)
        ratio = corrected.squared_error / error.squared_error if error.squared_error else 1.0
        found.append(replace(error, squared_error=corrected.squared_error, versus_absmax=error.versus_absmax * ratio))
        facts.append(
            {
                "rank": low.of(member.shape),
                "dtype": low.dtype,
                "moment": moments[1].kind,
                "held_out": moments[2] is not None,
                "versus_codes": corrected.versus_codes,
                "dropped": corrected.dropped,
            }
        )
    return tuple(found), tuple(facts)


def _weighting(
    statistics: KnownInputs | None, module: str, *, damping: float
) -> tuple[lorc.Weighting, lorc.Weighting | None]:
    """(what the factors minimize, what decides whether they are kept: None for the same)."""
    if statistics is None:
        return lorc.Weighting(), None
    known = statistics.of(module, full=statistics.has(module, "full_moment"), held=True)
    name = f"the input of '{module}'"
    weighting = lorc.Weighting.of(known.second_moment, known.full_moment, damping=damping, name=name)
    if known.held is None or weighting.moment is None:
        return weighting, None
    held = known.held.full_moment if known.held.full_moment is not None else known.held.second_moment
    return weighting, lorc.Weighting(held.double())


def extra_bytes(unit: Unit, statistics: Statistics | None) -> int:
    """About how much memory the low-rank parts of a unit take beside its weights: its codes wait for them."""
    if unit.scheme.low_rank is None:
        return 0
    codes = sum(m.elements * unit.scheme.fmt.bits_per_weight(m.shape) / 8 for m in unit.members)
    needs = []
    for member in unit.members:
        module = module_of(member)
        full = statistics is not None and statistics.has(module, "full_moment")
        held = 8 * member.shape[1] ** 2 if full and statistics is not None and statistics.held_out(module) else 0
        needs.append(lorc.memory_bytes(member.shape, full=full) + held)
    return int(codes) + max(needs)
