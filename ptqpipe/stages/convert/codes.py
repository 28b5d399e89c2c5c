"""Learned codes against the call that writes them: their own recipe, and what of the call contradicts it.

Codes are good for one plan: the same weights in the same formats and fused groups, and inputs quantized at the same
static scales. rounding.json holds the recipe that says all of it; whoever gives codes alone gets that recipe. Reads no
weight. Must not know how units are quantized.
"""

from collections.abc import Mapping
from dataclasses import fields

from ptqpipe.containers import get_container
from ptqpipe.errors import CheckpointError, RecipeError, UsageError
from ptqpipe.options import CodeOptions
from ptqpipe.plan import Plan, make_plan
from ptqpipe.recipe import Recipe, RecipeOptions
from ptqpipe.rounding import ROUNDING_FILE, Rounding
from ptqpipe.schemes import get_scheme
from ptqpipe.source import Source
from ptqpipe.stages.common.input_scales import LARGEST
from ptqpipe.statistics import Statistics

_AGAIN = "leave out what differs, or tune again with the same --format, --recipe, --container and --ignore"


def recipe_of_codes(codes: Rounding, options: RecipeOptions) -> Recipe:
    """The recipe that codes were learned for, which holds where the call gives no recipe file.

    CheckpointError where rounding.json has none that this version knows; UsageError where ``options`` name another
    format.
    """
    described = codes.content.get("recipe")
    if not isinstance(described, Mapping):
        raise CheckpointError(f"{codes.path / ROUNDING_FILE} has no recipe, so what its codes mean is lost; tune again")
    try:
        recipe = Recipe.from_json(described)
    except RecipeError as error:
        raise CheckpointError(f"{codes.path / ROUNDING_FILE}: {error}; tune again") from None
    names = [scheme.name for scheme in recipe.schemes()]
    if options.scheme is not None and [get_scheme(options.scheme).name] != names:
        raise UsageError(
            f"--format {options.scheme} contradicts {codes.path}, which holds codes for {', '.join(names)}; leave "
            "--format out, or tune with the same --format"
        )
    return recipe


def check_codes(
    codes: Rounding,
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
    if any(unit.scheme.activation in LARGEST and codes.has(unit.members[0].key) for unit in plan.units):
        _check_input_scales(codes, recipe, statistics)
    if all(codes.has(member.key) for unit in plan.units for member in unit.members):
        for name in (option.name for option in fields(CodeOptions)):
            given = options.given.get(name)
            if given is not None:
                raise UsageError(
                    f"--{name.replace('_', '-')} {given} would change nothing: {codes.path} has the codes of every "
                    "weight; leave it out"
                )


def _check_plan(codes: Rounding, source: Source, plan: Plan, recipe: Recipe) -> None:
    """The call's plan against the codes' own; a weight without codes may be kept on request."""
    own = recipe_of_codes(codes, RecipeOptions())
    if own == recipe:
        wanted = _fates(plan)
    else:
        abilities = get_container(own.container_name).ABILITIES
        wanted = _fates(make_plan(source.tensors, source.reader.config, recipe=own, abilities=abilities))
    found = _fates(plan)
    for key in dict.fromkeys([*codes.content["weights"], *wanted, *found]):
        was, now = wanted.get(key), found.get(key)
        if (now is None and not codes.has(key)) or (now is not None and now == was):
            continue
        before, after = ("kept" if fate is None else f"in {fate[0]}" for fate in (was, now))
        if before == after:
            before, after = "quantized", "kept" if now is None else "in another fused group"
        raise UsageError(f"{codes.path} was tuned with '{key}' {before}, this call has it {after}; {_AGAIN}")


_Fate = tuple[str, tuple[str, ...]]


def _fates(plan: Plan) -> dict[str, _Fate]:
    """Key of every quantized weight -> its scheme, and the keys of its unit."""
    units = [(unit.scheme.label, tuple(m.key for m in unit.members)) for unit in plan.units]
    return {key: (label, keys) for label, keys in units for key in keys}


def _check_input_scales(codes: Rounding, recipe: Recipe, statistics: Statistics | None) -> None:
    """Codes were learned behind inputs at static scales: those must be the ones that are written."""
    made_with = codes.content.get("statistics")
    given = None if statistics is None else statistics.digest
    if made_with != given:
        if made_with is None:
            raise UsageError(
                f"{codes.path} was tuned without statistics, its input scales are constant; leave --stats out, or tune "
                "again with the same --stats"
            )
        held = "no --stats are given" if statistics is None else f"{statistics.path} holds others ({given:.16})"
        raise UsageError(
            f"{codes.path} was tuned with the input scales of statistics {str(made_with)[:16]}, {held}; give the "
            "--stats that tune had"
        )
    own = recipe_of_codes(codes, RecipeOptions())
    for name in ("input_amax",) if given is None else ("input_scale", "headroom"):
        was, now = getattr(own, name), getattr(recipe, name)
        if was != now:
            raise UsageError(
                f"--{name.replace('_', '-')} {now} contradicts {codes.path}, which was tuned with {was}; leave it out, "
                "or tune again with a recipe that says so"
            )
