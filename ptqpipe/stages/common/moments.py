"""What convert reads from a statistics folder: the moments of a unit's inputs, checked against the plan beforehand.

Moments are read when a unit is quantized and gone when it is done. Must not know how they are used.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ptqpipe.algorithms.columns import has_block_scales
from ptqpipe.algorithms.metric import memory_bytes
from ptqpipe.algorithms.rows import CHUNK_ELEMENTS
from ptqpipe.errors import CheckpointError, UsageError
from ptqpipe.inputs import Moments
from ptqpipe.plan import Plan, Unit
from ptqpipe.recipe import Recipe
from ptqpipe.rounding import Rounding
from ptqpipe.source import Source
from ptqpipe.stages.common.extra_tensors import corrected_biases
from ptqpipe.stages.common.identity import check_model
from ptqpipe.stages.common.input_scales import LARGEST, module_of
from ptqpipe.statistics import KnownInputs, Statistics


def open_statistics(
    path: Path | None, source: Source, plan: Plan, *, recipe: Recipe, learned: Rounding | None = None
) -> Statistics | None:
    """The statistics of this source with every moment that the plan's rules need; None where no folder was given.

    learned  codes that are there already: what they are of needs no statistics to choose its own

    UsageError for statistics of another model, for a module or moment that is missing, and for rules that need
    statistics where there are none.
    """
    if path is None:
        chosen = [unit for unit in plan.units if learned is None or not learned.has(unit.members[0].key)]
        needy = next((unit.rule for unit in chosen if unit.rule.calibrated), None)
        if needy is not None:
            raise UsageError(
                f"algorithm {needy.algorithm} with weighting {needy.weighting} needs statistics; make them with "
                "`ptqpipe calibrate` and give --stats FOLDER"
            )
        if recipe.bias_correction:
            raise UsageError("bias_correction needs statistics; make them with `ptqpipe calibrate` and give --stats")
        return None
    statistics = Statistics.open(path)
    try:
        check_model(statistics, source)
        for unit in plan.units:
            _check_unit(unit, statistics)
        for weight in corrected_biases(plan, source, recipe):
            statistics.of(weight.removesuffix(".weight"))
    except BaseException:
        statistics.close()
        raise
    return statistics


def inputs_of(unit: Unit, statistics: KnownInputs) -> list[Moments]:
    """The moments of every member's input, in order; members that share an input share the object."""
    found: dict[str, Moments] = {}
    full = "full_moment" in unit.rule.moments
    for member in unit.members:
        module = module_of(member)
        key = statistics.key(module)
        if key not in found:
            block = not full and statistics.has(module, "block_moment")
            found[key] = statistics.of(module, block=block, full=full, held_out=True)
    return [found[statistics.key(module_of(m))] for m in unit.members]


def unit_extra_bytes(unit: Unit, statistics: Statistics | None) -> int:
    """About how much memory choosing the codes of a unit with statistics takes in addition to its weights."""
    if not unit.rule.calibrated:
        return 0
    columns = max(member.shape[1] for member in unit.members)
    squares = 0
    if "full_moment" in unit.rule.moments:
        held_out = statistics is not None and any(statistics.held_out(module_of(m)) for m in unit.members)
        squares = 4 * columns * columns * (2 if held_out else 1) + memory_bytes(columns)
    bits = unit.scheme.fmt.bits_per_weight(unit.members[0].shape)
    codes = int(2 * bits / 8 * max(member.elements for member in unit.members))  # those of rtn wait beside them
    run = CHUNK_ELEMENTS if not unit.scheme.fmt.shares_rows else unit.elements  # one scale for all rows: one run
    return squares + codes + 40 * min(run, unit.elements)


def means_of(unit: Unit, statistics: Statistics | None, weights: set[str]) -> list[torch.Tensor | None]:
    """E[x] of the members among ``weights``, float32 [K]."""
    if statistics is None:
        return [None] * len(unit.members)
    return [statistics.of(module_of(m)).mean if m.weight in weights else None for m in unit.members]


def describe_statistics(statistics: Statistics) -> Mapping[str, Any]:
    """Their entry in the record."""
    return {
        "digest": statistics.digest,
        "model": statistics.content["model"],
        "data": statistics.content.get("data", {}),
    }


def _check_unit(unit: Unit, statistics: Statistics) -> None:
    static = unit.scheme.activation in LARGEST
    if not unit.rule.calibrated and not static and unit.scheme.low_rank is None:
        return
    rule, fmt = unit.rule, unit.scheme.fmt
    if rule.weighting == "block" and not has_block_scales(fmt):
        raise UsageError(f"{fmt.name} has no block scales along its rows to weight by blocks; use --weighting diagonal")
    needed = dict.fromkeys(["second_moment", *["amax"] * static, *(rule.moments if rule.calibrated else ())])
    for member in unit.members:
        module = module_of(member)
        if module not in statistics.modules:
            unplaced = statistics.content.get("unplaced")
            if isinstance(unplaced, list) and f"{module}.weight" in unplaced:
                raise UsageError(
                    f"'{module}' has no statistics: transformers' model has no place for it, so nothing runs through "
                    "it; --ignore it, or give it a rule with algorithm rtn and weighting none"
                )
            raise UsageError(f"{statistics.path} has no statistics of '{module}'; calibrate again, or --ignore it")
        if statistics.columns(module) != member.shape[1]:
            raise CheckpointError(
                f"{statistics.path} has statistics of {statistics.columns(module)} inputs of '{module}', which has "
                f"{member.shape[1]}; calibrate again"
            )
        for moment in needed:
            if not statistics.has(module, moment):
                kind = moment.partition("_")[0]
                other = ", or convert with --algorithm rtn" if kind == "full" else ""
                raise UsageError(
                    f"{statistics.path} has no {moment} of '{module}'; calibrate again with --moments diagonal,{kind}"
                    f"{other}"
                )
