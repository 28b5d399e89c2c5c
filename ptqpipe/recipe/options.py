"""The options of a call applied to a recipe: each option that was given overrides the recipe."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ptqpipe.errors import RecipeError
from ptqpipe.options import ALGORITHMS, RecipeOptions
from ptqpipe.recipe.file import load_recipe
from ptqpipe.recipe.model import IGNORED, Recipe, Rule
from ptqpipe.recipe.structure import Keep
from ptqpipe.schemes import get_scheme


def build_recipe(options: RecipeOptions, *, path: Path | None = None, codes: Recipe | None = None) -> Recipe:
    """The recipe of a file with the options applied, or of the options alone (``nvfp4`` when no format is given).

    codes  the recipe of learned codes that are to be written, used where no file is given; the caller has checked that
           ``options`` name no other format
    """
    if path is not None and options.scheme is not None:
        raise RecipeError(f"--format {options.scheme} and --recipe {path} contradict each other; give one of them")
    if path is not None:
        recipe = load_recipe(path)
    elif codes is not None:
        recipe = codes
    else:
        recipe = Recipe((Rule("*", get_scheme("nvfp4" if options.scheme is None else options.scheme)),))
    return replace(
        recipe,
        rules=tuple(_with_options(rule, options) for rule in recipe.rules),
        keep=tuple(Keep(pattern, IGNORED) for pattern in options.ignore) + recipe.keep,
        **_given(options, Recipe),
    )


def _with_options(rule: Rule, options: RecipeOptions) -> Rule:
    """The rule with the options applied; an algorithm goes with its usual weighting unless the rule or call says so."""
    given = _given(options, Rule)
    if options.algorithm in ALGORITHMS and rule.weighting == "none":
        given.setdefault("weighting", ALGORITHMS[options.algorithm].weighting)
    return replace(rule, **given)


def _given(options: RecipeOptions, kind: type[Rule] | type[Recipe]) -> dict[str, Any]:
    """The options that were given, of those that name a field of ``kind``."""
    known = {field.name for field in fields(kind)}
    return {name: value for name, value in options.given.items() if name in known}
