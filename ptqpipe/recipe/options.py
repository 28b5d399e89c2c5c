"""The options of the command line and of the Python API that say something about bytes, applied to a recipe.

An option is named like the field of `Rule` or `Recipe` that it sets: a new one is one line of `RecipeOptions`. Which
options a command offers, and how they are parsed, is none of this file's business.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ptqpipe.errors import RecipeError
from ptqpipe.recipe.file import load_recipe
from ptqpipe.recipe.model import IGNORED, Recipe, Rule
from ptqpipe.recipe.structure import Keep
from ptqpipe.schemes import get_scheme


@dataclass(frozen=True, slots=True)
class RecipeOptions:
    """What the command line may say about bytes; each given option overrides the recipe's word.

    scheme  by name, for every weight, in place of a recipe file
    ignore  patterns of modules that stay as they are, whatever the recipe says
    """

    scheme: str | None = None
    container: str | None = None
    search: str | None = None
    global_scale: str | None = None
    ignore: tuple[str, ...] = ()
    input_amax: float | None = None
    shard_bytes: int | None = None
    algorithm: str | None = None
    weighting: str | None = None
    damping: float | None = None
    refine: int | None = None
    input_scale: str | None = None
    headroom: float | None = None
    kv_cache: str | None = None
    bias_correction: bool | None = None
    low_rank: int | None = None
    low_rank_dtype: str | None = None


def build_recipe(options: RecipeOptions, *, path: Path | None = None, codes: Recipe | None = None) -> Recipe:
    """The recipe of a file with the options applied, or of the options alone (``nvfp4`` when no format is given).

    codes  the recipe of learned codes that are to be written, which holds where no file is given; who gives it has
           looked that ``options`` name no other format
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
    """The rule with the options applied; gptq that is asked for goes with the diagonal unless told otherwise."""
    given = _given(options, Rule)
    if options.algorithm == "gptq" and rule.weighting == "none":
        given.setdefault("weighting", "diagonal")
    return replace(rule, **given)


def _given(options: RecipeOptions, kind: type[Rule] | type[Recipe]) -> dict[str, Any]:
    """The options that were given, of those that name a field of ``kind`` (``scheme`` is a name here, not a Scheme)."""
    known = {field.name for field in fields(kind)} - {"scheme"}
    names = [field.name for field in fields(options) if field.name in known]
    return {name: getattr(options, name) for name in names if getattr(options, name) is not None}
