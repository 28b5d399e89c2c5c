"""What stages read from statistics: the moments of a unit's inputs and the static scales of its activations.

Statistics and learned codes are checked against the model and the plan beforehand (`check_model`, `open_statistics`).
Moments are read when a unit is quantized and gone when it is done. A static scale is a constant or follows from the
statistics, one for all layers that quantize one input together: readers fuse the gate and up projections of all experts
of a layer, so these have one scale, which is found once.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ptqpipe.calibration.inputs import OUT_ROWS, Moments
from ptqpipe.calibration.statistics import MomentSource, Statistics
from ptqpipe.conversion.bias_correction import corrected_biases
from ptqpipe.conversion.kv_cache import statistics_remedy
from ptqpipe.conversion.same_model import check_model
from ptqpipe.errors import CheckpointError, UsageError, arg
from ptqpipe.models.slices import Member
from ptqpipe.models.source import Source
from ptqpipe.numerics.rotation import rotated
from ptqpipe.quantization import CHUNK_ELEMENTS, kronecker, memory_bytes
from ptqpipe.quantization.gptq_steps import has_block_scales
from ptqpipe.quantization.learned_codes import LearnedCodes
from ptqpipe.recipe.plan import Plan, Unit
from ptqpipe.recipe.recipe import Recipe

OUTPUT_BYTES = 36  # for each number of the moments of gradients, as read and as they are factored


def module_of(member: Member) -> str:
    """The name that statistics have for a weight: its module, with the expert of a stack."""
    return member.module if member.stack is None else f"{member.module}[{member.source.expert}]"


def open_statistics(
    path: Path | None,
    source: Source,
    plan: Plan,
    *,
    recipe: Recipe,
    learned: LearnedCodes | None = None,
    collected: bool = False,
) -> Statistics | None:
    """The statistics of this source with every moment that the plan's rules need; None where no folder was given.

    learned    codes that are there already: what they are of needs no statistics to choose its own
    collected  the moments that choosing codes reads are found during the run

    UsageError for statistics of another model, for a module or moment that is missing, and for rules that need
    statistics where there are none.
    """
    if path is None:
        chosen = [unit for unit in plan.units if learned is None or not learned.has(unit.members[0].key)]
        needy = next((unit.rule for unit in chosen if unit.rule.calibrated), None)
        if needy is not None and not collected:
            raise UsageError(
                f"algorithm {needy.algorithm} with objective {needy.objective} needs statistics; "
                f"{statistics_remedy()}; {arg('data', 'TEXT')} without {arg('algorithm')} does it all at once"
            )
        if recipe.bias_correction and not collected:
            raise UsageError(f"{arg('bias_correction')} needs statistics; {statistics_remedy()}")
        return None
    statistics = Statistics.open(path)
    try:
        check_model(statistics, source)
        for unit in plan.units:
            written = learned is not None and learned.has(unit.members[0].key)
            _check_unit(unit, statistics, chosen=not collected and not written)
        for weight in corrected_biases(plan, source, recipe):
            statistics.of(weight.removesuffix(".weight"))
    except BaseException:
        statistics.close()
        raise
    return statistics


def inputs_of(unit: Unit, statistics: MomentSource) -> list[Moments]:
    """The moments of every member's input, in order, and of the gradients at its outputs where those are known, and
    GPTQ has the full moments; members that share an input share its tensors."""
    by_key: dict[str, Moments] = {}
    needed = _needed(unit)
    for member in unit.members:
        module = module_of(member)
        key = statistics.key(module)
        if key not in by_key:
            full = "full_moment" in needed
            block = not full and statistics.has(module, "block_moment")
            stored = statistics.of(module, block=block, full=full, held_out=True)
            by_key[key] = stored.rotated(unit.scheme.rotation)
    both = unit.rule.algorithm == "gptq" and kronecker.possible(unit.scheme.fmt)
    outputs = [statistics.output_moments(module_of(m), m.shape[0]) if both else None for m in unit.members]
    inputs = [by_key[statistics.key(module_of(m))] for m in unit.members]
    if any(
        gradients is None for gradients in outputs
    ):  # without gradients for all members the costs would not be comparable
        return inputs
    return [replace(moments, outputs=gradients) for moments, gradients in zip(inputs, outputs, strict=True)]


def _needed(unit: Unit) -> tuple[str, ...]:
    """The moments that choosing the codes of a unit reads: those of rotated inputs follow from the full one."""
    moments = unit.rule.moments
    return tuple(dict.fromkeys((*moments, "full_moment"))) if moments and unit.scheme.rotation else moments


def unit_extra_bytes(unit: Unit, statistics: Statistics | None) -> int:
    """About how much memory choosing the codes of a unit with statistics takes in addition to its weights."""
    if not unit.rule.calibrated:
        return 0
    columns = max(member.shape[1] for member in unit.members)
    squares = 0
    if "full_moment" in _needed(unit):
        held_out = statistics is not None and any(statistics.held_out(module_of(m)) for m in unit.members)
        squares = 4 * columns * columns * (2 if held_out else 1) + memory_bytes(columns)
        rows = max(member.shape[0] for member in unit.members)
        has_gradients = statistics is not None and all(statistics.knows_outputs(module_of(m)) for m in unit.members)
        both = has_gradients and unit.rule.algorithm == "gptq"
        squares += OUTPUT_BYTES * rows * min(rows, OUT_ROWS) if both else 0
    bits = unit.scheme.fmt.bits_per_weight(unit.members[0].shape)
    codes = int(2 * bits / 8 * max(member.elements for member in unit.members))  # those of rtn wait beside them
    run = CHUNK_ELEMENTS if not unit.scheme.fmt.shares_rows else unit.elements  # one scale for all rows: one run
    return squares + codes + 40 * min(run, unit.elements)


def means_of(unit: Unit, statistics: Statistics | None, weights: set[str]) -> list[torch.Tensor | None]:
    """E[x] of the members among ``weights``, float32 [K], rotated like the weights."""
    if statistics is None:
        return [None] * len(unit.members)
    block = unit.scheme.rotation
    return [rotated(statistics.of(module_of(m)).mean, block) if m.weight in weights else None for m in unit.members]


def describe_statistics(statistics: Statistics) -> Mapping[str, Any]:
    """Their entry in the record."""
    return {
        "digest": statistics.digest,
        "model": statistics.content["model"],
        "data": statistics.content.get("data", {}),
    }


def _check_unit(unit: Unit, statistics: Statistics, *, chosen: bool) -> None:
    """``chosen``: whether the unit's codes will be chosen with these statistics."""
    static, calibrated = unit.scheme.needs_input_global_scale, unit.rule.calibrated and chosen
    if not calibrated and not static:
        return
    rule, fmt = unit.rule, unit.scheme.fmt
    if rule.objective == "block" and not has_block_scales(fmt):
        raise UsageError(
            f"{fmt.name} has no block scales along its rows to weight by blocks; use {arg('objective', 'diagonal')}"
        )
    needed = dict.fromkeys(["second_moment", *["amax"] * static, *(_needed(unit) if calibrated else ())])
    for member in unit.members:
        module = module_of(member)
        if module not in statistics.modules:
            unplaced = statistics.content.get("unplaced")
            if isinstance(unplaced, list) and f"{module}.weight" in unplaced:
                raise UsageError(
                    f"'{module}' has no statistics: transformers' model has no place for it, so nothing runs through "
                    f"it; {arg('ignore', [module])}, or give it a rule with algorithm rtn and objective none"
                )
            raise UsageError(
                f"{statistics.path} has no statistics of '{module}'; calibrate again, or {arg('ignore', [module])}"
            )
        if statistics.columns(module) != member.shape[1]:
            raise CheckpointError(
                f"{statistics.path} has statistics of {statistics.columns(module)} inputs of '{module}', which has "
                f"{member.shape[1]}; calibrate again"
            )
        for moment in needed:
            if not statistics.has(module, moment):
                kind = moment.partition("_")[0]
                other = f", or convert with {arg('algorithm', 'rtn')}" if kind == "full" else ""
                raise UsageError(
                    f"{statistics.path} has no {moment} of '{module}'; calibrate again with "
                    f"{arg('moments', f'diagonal,{kind}')}{other}"
                )
