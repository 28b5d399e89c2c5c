"""What convert reads from a statistics folder: the moments of a unit's inputs, checked against the plan beforehand.

Moments are read when a unit is quantized and gone when it is done. Must not know how they are used.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ptqpipe.algorithms.activation_scale import fp8_scale, nvfp4_scale, static_amax
from ptqpipe.algorithms.calibrated import LayerInput, Options
from ptqpipe.algorithms.gptq import has_block_scales
from ptqpipe.algorithms.metric import memory_bytes
from ptqpipe.algorithms.rows import CHUNK_ELEMENTS
from ptqpipe.errors import UsageError
from ptqpipe.formats import WHOLE
from ptqpipe.plan import Member, Plan, Unit
from ptqpipe.recipe import Recipe, Rule
from ptqpipe.schemes import Activation
from ptqpipe.source import Source
from ptqpipe.stages.common.biases import corrected_biases
from ptqpipe.statistics import KnownInputs, Statistics

# What an input reaches at a static scale of one.
LARGEST = {Activation.NVFP4_STATIC_GLOBAL: 2688.0, Activation.FP8_TENSOR_STATIC: 448.0}


def open_statistics(path: Path | None, source: Source, plan: Plan, *, recipe: Recipe) -> Statistics | None:
    """The statistics of this source with every moment that the plan's rules need; None where no folder was given.

    UsageError for statistics of another model, for a module or moment that is missing, and for rules that need
    statistics where there are none.
    """
    if path is None:
        needy = next((unit.rule for unit in plan.units if unit.rule.calibrated), None)
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
        if statistics.model_fingerprint != source.reader.fingerprint():
            known = statistics.content["model"].get("name", "another model")
            raise UsageError(
                f"{path} holds statistics of {known}, not of {source.reader.path}: their fingerprints differ; "
                "calibrate this model"
            )
        for unit in plan.units:
            _check_unit(unit, statistics)
        for weight in corrected_biases(plan, source, recipe):
            statistics.of(weight.removesuffix(".weight"))
    except BaseException:
        statistics.close()
        raise
    return statistics


def options_of(rule: Rule) -> Options:
    """A rule in the words of the algorithm."""
    return Options(
        algorithm=rule.algorithm,
        weighting=rule.weighting,
        order=rule.order,
        damping=rule.damping,
        scales=rule.scales,
        refine=rule.refine,
    )


def inputs_of(unit: Unit, statistics: KnownInputs, options: Options) -> list[LayerInput]:
    """The moments of every member's input, in order; members that share an input share the object."""
    found: dict[str, LayerInput] = {}
    for member in unit.members:
        module = module_of(member)
        key = statistics.key(module)
        if key not in found:
            block = not options.needs_full and statistics.has(module, "block_moment")
            known = statistics.of(module, block=block, full=options.needs_full, held=True)
            held = known.held
            found[key] = LayerInput(
                known.second_moment,
                known.block_moment,
                known.full_moment,
                None if held is None else LayerInput(held.second_moment, held.block_moment, held.full_moment),
            )
    return [found[statistics.key(module_of(m))] for m in unit.members]


def unit_extra_bytes(unit: Unit, statistics: Statistics | None) -> int:
    """About how much memory choosing the codes of a unit with statistics takes beside its weights."""
    if not unit.rule.calibrated:
        return 0
    columns = max(member.shape[1] for member in unit.members)
    squares = 0
    if options_of(unit.rule).needs_full:
        held = statistics is not None and any(statistics.held_out(module_of(m)) for m in unit.members)
        squares = 4 * columns * columns * (2 if held else 1) + memory_bytes(columns)
    bits = unit.scheme.fmt.bits_per_weight(unit.members[0].shape)
    codes = int(2 * bits / 8 * max(member.elements for member in unit.members))  # those of rtn wait beside them
    run = CHUNK_ELEMENTS if unit.scheme.fmt.block[0] != WHOLE else unit.elements  # one scale for all rows: one run
    return squares + codes + 40 * min(run, unit.elements)


def input_scales(unit: Unit, recipe: Recipe, statistics: Statistics | None) -> list[torch.Tensor | None]:
    """The static scale of every member's input, float32 0-d; None where the scheme has none.

    Without statistics a constant. Members of a unit share one, and so do the gate and up projections of all experts of
    a layer: runtimes quantize their common input once.
    """
    largest = LARGEST.get(unit.scheme.activation)
    if largest is None:
        return [None] * len(unit.members)
    if statistics is None:
        constant = torch.tensor(recipe.input_amax, dtype=torch.float32) / largest
        return [constant] * len(unit.members)
    modules = dict.fromkeys(m for member in unit.members for m in _sharing(module_of(member), recipe, statistics))
    amax = 0.0
    for key in dict.fromkeys(statistics.content["modules"][module]["key"] for module in modules):
        module = next(m for m in modules if statistics.content["modules"][m]["key"] == key)
        known = statistics.of(module)
        found = static_amax(
            known.amax, known.second_moment, known.quantiles, policy=recipe.input_scale, largest=largest, name=module
        )
        amax = max(amax, found)
    nvfp4 = unit.scheme.activation is Activation.NVFP4_STATIC_GLOBAL
    scale = (nvfp4_scale if nvfp4 else fp8_scale)(amax, headroom=recipe.headroom)
    return [scale] * len(unit.members)


def _sharing(module: str, recipe: Recipe, statistics: Statistics) -> list[str]:
    """Modules with the input of ``module``: itself, and its like in the other experts of the layer."""
    match = re.fullmatch(r"(.*\.experts)\.\d+\.([^.]+)", module)
    if match is None:
        return [module]
    leaves = next((group for group in recipe.fuse if match[2] in group), (match[2],))
    if len(leaves) == 1:
        return [module]
    pattern = re.compile(re.escape(match[1]) + r"\.\d+\.(?:" + "|".join(map(re.escape, leaves)) + ")")
    return [name for name in statistics.modules if pattern.fullmatch(name)]


def means_of(unit: Unit, statistics: Statistics | None, weights: set[str]) -> list[torch.Tensor | None]:
    """E[x] of the members among ``weights``, float32 [K]."""
    if statistics is None:
        return [None] * len(unit.members)
    return [statistics.of(module_of(m)).mean if m.weight in weights else None for m in unit.members]


def module_of(member: Member) -> str:
    """The name that statistics have for a weight: its module, with the expert of a stack."""
    return member.module if member.stack is None else f"{member.module}[{member.source.expert}]"


def describe_statistics(statistics: Statistics) -> Mapping[str, Any]:
    """What the record says of them."""
    return {
        "digest": statistics.digest,
        "model": statistics.content["model"],
        "data": statistics.content.get("data", {}),
    }


def _check_unit(unit: Unit, statistics: Statistics) -> None:
    static = unit.scheme.activation in LARGEST
    if not unit.rule.calibrated and not static and unit.scheme.low_rank is None:
        return
    options, fmt = options_of(unit.rule), unit.scheme.fmt
    if options.weighting == "block" and not has_block_scales(fmt):
        raise UsageError(f"{fmt.name} has no block scales along its rows to weight by blocks; use --weighting diagonal")
    wanted = ["second_moment"] + ["amax"] * static + ["full_moment"] * (unit.rule.calibrated and options.needs_full)
    wanted += ["block_moment"] * (options.weighting == "block" and not options.needs_full)
    for member in unit.members:
        module = module_of(member)
        if module not in statistics.modules:
            raise UsageError(f"{statistics.path} has no statistics of '{module}'; calibrate again, or --ignore it")
        for moment in wanted:
            if not statistics.has(module, moment):
                kind = moment.partition("_")[0]
                raise UsageError(
                    f"{statistics.path} has no {moment} of '{module}'; calibrate again with --moments {kind}"
                )
