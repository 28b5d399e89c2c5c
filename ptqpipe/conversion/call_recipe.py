"""The recipe of a call: of its options, its recipe file, its statistics, or of learned codes."""

from dataclasses import replace
from pathlib import Path

from ptqpipe.calibration.statistics import Statistics
from ptqpipe.checkpoint import name_of
from ptqpipe.conversion.check_codes import recipe_of_codes
from ptqpipe.errors import UsageError, arg
from ptqpipe.numerics.search import get_search
from ptqpipe.quantization.learned_codes import LearnedCodes
from ptqpipe.recipe.file import build_recipe
from ptqpipe.recipe.options import ALGORITHMS, AUTO, OBJECTIVES, PROPAGATED, RecipeOptions
from ptqpipe.recipe.recipe import Recipe


def best_with(
    options: RecipeOptions, *, stats: Path | None, recipe_path: Path | None, codes: Path | None = None
) -> RecipeOptions:
    """The options with the best that statistics allow, where neither they nor a recipe, a file's or that of learned
    codes, say it: GPTQ where the full moments are there, else nearest codes at weighted scales."""
    if stats is None or recipe_path is not None or codes is not None:
        return options
    if not options.stated & {"algorithm", "objective"}:
        with Statistics.open(stats) as statistics:
            usable = [name for name, row in ALGORITHMS.items() if not row.moment or statistics.has_any(row.moment)]
        options = options.but(algorithm=usable[-1])
    if (
        options.algorithm == "rtn"
        and "objective" not in options.stated
        and options.scale_search in (AUTO, "exact", "brute_force")
    ):
        options = options.but(objective="diagonal")
    return options


def with_searches(recipe: Recipe, *, data: bool) -> Recipe:
    """The recipe, its searches checked and every objective decided. ``data``: its codes are found with data that the
    rules do not speak of, which start from the exact scales unless a rule names others.

    UsageError for a search that is unknown, or that a rule has no use for.
    """
    rules = []
    for rule in recipe.rules:
        checked = replace(rule, scale_search="exact") if data and rule.scale_search == AUTO else rule
        search = get_search("exact" if checked.scale_search == AUTO else checked.scale_search)
        scheme = checked.scheme
        weighable = scheme is not None and scheme.fmt.scale.enumerable and search.proven
        if checked.objective == AUTO:
            free = not data and not checked.calibrated and weighable and scheme is not None
            checked = replace(checked, objective=OBJECTIVES.get(scheme.fmt.name, "none") if free and scheme else "none")
        elif checked.objective == PROPAGATED and (data or checked.calibrated or not weighable):
            what = arg("objective", PROPAGATED)
            raise UsageError(
                f"{what} is for searches that take weights, of formats with a list of block scales, without data; use "
                f"{arg('format', 'nvfp4')} and {arg('scale_search', 'exact')}, or leave it out"
            )
        if (
            checked.scale_search == "enlarged"
            and scheme is not None
            and (checked.calibrated or data or scheme.fmt.one_scale)
        ):
            why = (
                f"{scheme.fmt.name} has one scale for all" if scheme.fmt.one_scale else "the data say what errors cost"
            )
            raise UsageError(
                f"{arg('scale_search', 'enlarged')} is for nearest codes without data, and {why}; leave it out"
            )
        rules.append(checked)
    return replace(recipe, rules=tuple(rules))


def check_used(options: RecipeOptions, recipe: Recipe, *, statistics: bool) -> None:
    """UsageError for an option that is given and would change no byte, since nothing of the recipe asks for it."""
    read = {name for rule in recipe.rules if rule.scheme is not None for name in ALGORITHMS[rule.algorithm].options}
    own = {name: key for key, row in ALGORITHMS.items() for name in row.options}
    static = any(scheme.needs_input_global_scale for scheme in recipe.schemes())
    kinds = "a format with static activation scales, such as nvfp4_w4a4"
    for name, used, needs in (
        *((name, name in read, f"{arg('algorithm', own[name])} and {arg('stats')}") for name in own),
        ("input_scale", static and statistics, f"{arg('stats')} and {kinds}"),
        ("headroom", static and statistics, f"{arg('stats')} and {kinds}"),
        ("input_amax", static and not statistics, f"{kinds}, without {arg('stats')}"),
    ):
        if name in options.stated and not used:
            raise UsageError(
                f"{arg(name, getattr(options, name))} would change nothing: it needs {needs}; otherwise leave it out"
            )


def recipe_of_call(
    options: RecipeOptions, path: Path | None, codes: LearnedCodes | None, *, statistics: bool
) -> Recipe:
    """The recipe of the options and a recipe file, or that of the codes where there is none."""
    own = None if codes is None else recipe_of_codes(codes, options if path is None else RecipeOptions())
    recipe = build_recipe(options, path=path, codes=own)
    check_used(options, recipe, statistics=statistics)
    return recipe


def default_out(path: Path, recipe: Recipe) -> Path:
    """``<model>-NVFP4A16`` in the working directory; ``-MIXED`` for several schemes."""
    schemes = recipe.schemes()
    return Path(f"{name_of(path)}-{schemes[0].suffix if len(schemes) == 1 else 'MIXED'}")
