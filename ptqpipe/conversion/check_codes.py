"""Learned codes against a conversion. They are good for one plan: the same weights in the same formats and fused
groups, and inputs quantized at the same static scales. Their folder holds the recipe that says all of it.
"""

from collections.abc import Mapping
from dataclasses import fields

from ptqpipe.calibration.statistics import Statistics
from ptqpipe.checkpoint.layouts import get_container
from ptqpipe.conversion.same_model import check_model
from ptqpipe.errors import CheckpointError, RecipeError, UsageError, arg
from ptqpipe.models.source import Source
from ptqpipe.numerics.schemes import get_scheme
from ptqpipe.quantization.learned_codes import CODES_FILE, TRAINED_REASON, LearnedCodes
from ptqpipe.recipe.options import CodeOptions, RecipeOptions
from ptqpipe.recipe.plan import Plan, make_plan
from ptqpipe.recipe.recipe import Recipe


def _again() -> str:
    same = f"{arg('format')}, {arg('recipe')}, {arg('container')} and {arg('ignore')}"
    return f"leave out what differs, or tune again with the same {same}"


def check_rounding(codes: LearnedCodes, source: Source, plan: Plan) -> None:
    """Learned codes against model and plan. UsageError where they are another model's, or lack a weight."""
    check_model(codes, source)
    for unit in plan.units:
        keys = [member.key for member in unit.members]
        missing = [key for key in keys if not codes.has(key)]
        if missing and len(missing) < len(keys):
            raise UsageError(f"{codes.path} has no codes of '{missing[0]}', but of what shares its scale; tune again")
    kept = {entry.name: entry.reason for entry in plan.kept}
    for name in codes.trained:
        if kept.get(name) != TRAINED_REASON:
            raise UsageError(
                f"{codes.path} was tuned with {arg('train')}, which changed '{name}', and this recipe does not keep "
                "it as it was kept there; give the recipe of tune, or tune again"
            )
    if not any(codes.has(member.key) for unit in plan.units for member in unit.members):
        raise UsageError(f"{codes.path} has codes of no weight that the recipe quantizes; tune with the same recipe")


def recipe_of_codes(codes: LearnedCodes, options: RecipeOptions) -> Recipe:
    """The recipe that codes were learned for, which applies where the call gives no recipe file.

    CheckpointError where rounding.json has none that this version knows; UsageError where ``options`` name another
    format.
    """
    described = codes.content.get("recipe")
    if not isinstance(described, Mapping):
        raise CheckpointError(f"{codes.path / CODES_FILE} has no recipe, so what its codes mean is lost; tune again")
    try:
        recipe = Recipe.from_json(described)
    except RecipeError as error:
        raise CheckpointError(f"{codes.path / CODES_FILE}: {error}; tune again") from None
    names = [scheme.name for scheme in recipe.schemes()]
    if options.format is not None and [get_scheme(options.format).name] != names:
        raise UsageError(
            f"{arg('format', options.format)} contradicts {codes.path}, which holds codes for {', '.join(names)}; "
            f"leave {arg('format')} out, or tune with the same {arg('format')}"
        )
    return recipe


def check_codes(
    codes: LearnedCodes,
    source: Source,
    plan: Plan,
    *,
    recipe: Recipe,
    options: RecipeOptions,
    statistics: Statistics | None,
) -> None:
    """UsageError, in one line, for what of a call contradicts the codes that it is to write.

    plan, recipe  those of the call
    """
    _check_plan(codes, source, plan, recipe)
    if any(unit.scheme.needs_input_global_scale and codes.has(unit.members[0].key) for unit in plan.units):
        _check_input_scales(codes, recipe, statistics)
    if all(codes.has(member.key) for unit in plan.units for member in unit.members):
        for name in (option.name for option in fields(CodeOptions)):
            value = options.overrides.get(name)
            if value is not None:
                raise UsageError(
                    f"{arg(name, value)} would change nothing: {codes.path} has the codes of every weight; leave it out"
                )


def _check_plan(codes: LearnedCodes, source: Source, plan: Plan, recipe: Recipe) -> None:
    """The call's plan against the codes' own; a weight without codes may be kept on request."""
    own = recipe_of_codes(codes, RecipeOptions())
    if own == recipe:
        wanted = _fates(plan)
    else:
        capabilities = get_container(own.container_name).CAPABILITIES
        wanted = _fates(make_plan(source.tensors, source.reader.config, recipe=own, capabilities=capabilities))
    fates = _fates(plan)
    for key in dict.fromkeys([*codes.content["weights"], *wanted, *fates]):
        was, now = wanted.get(key), fates.get(key)
        if (now is None and not codes.has(key)) or (now is not None and now == was):
            continue
        before, after = ("kept" if fate is None else f"in {fate[0]}" for fate in (was, now))
        if before == after:
            before, after = "quantized", "kept" if now is None else "in another fused group"
        raise UsageError(f"{codes.path} was tuned with '{key}' {before}, this call has it {after}; {_again()}")


_Fate = tuple[str, tuple[str, ...]]


def _fates(plan: Plan) -> dict[str, _Fate]:
    """Key of every quantized weight -> its scheme, and the keys of its unit."""
    units = [(unit.scheme.label, tuple(m.key for m in unit.members)) for unit in plan.units]
    return {key: (label, keys) for label, keys in units for key in keys}


def _check_input_scales(codes: LearnedCodes, recipe: Recipe, statistics: Statistics | None) -> None:
    """Codes were learned behind inputs at static scales: those must be the ones that are written."""
    made_with = codes.content.get("statistics")
    digest = None if statistics is None else statistics.digest
    if made_with != digest:
        if made_with is None:
            raise UsageError(
                f"{codes.path} was tuned without statistics, its input scales are constant; leave {arg('stats')} out, "
                f"or tune again with the same {arg('stats')}"
            )
        others = (
            f"no {arg('stats')} are given" if statistics is None else f"{statistics.path} holds others ({digest:.16})"
        )
        raise UsageError(
            f"{codes.path} was tuned with the input scales of statistics {str(made_with)[:16]}, {others}; give the "
            f"{arg('stats')} that tune had"
        )
    own = recipe_of_codes(codes, RecipeOptions())
    for name in ("input_amax",) if digest is None else ("input_scale", "headroom"):
        was, now = getattr(own, name), getattr(recipe, name)
        if was != now:
            tuned_with = "the format's own" if was is None else was
            option = f"no {name} in the recipe" if now is None else arg(name, now)
            raise UsageError(
                f"{option} contradicts {codes.path}, which was tuned with {tuned_with}; leave it out, or tune again "
                "with a recipe that says so"
            )
