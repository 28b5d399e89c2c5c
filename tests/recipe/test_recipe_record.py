"""Claims about the record of a recipe: its spelling and order, and the recipe that is made again from it."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from ptqpipe.errors import RecipeError
from ptqpipe.models.families import Keep
from ptqpipe.numerics.schemes import get_scheme
from ptqpipe.recipe.file import load_recipe, named_recipes, parse_recipe
from ptqpipe.recipe.recipe import Recipe, Rule

RECORDED = """{"rules": [{"match": "*", "scheme": "nvfp4", "search": "auto", "global_scale": "search", "algorithm":
"gptq", "weighting": "diagonal", "damping": 0.01, "order": "static", "scales": "auto", "refine": 2}, {"match":
"re:x", "scheme": "keep", "search": "auto", "global_scale": "search", "algorithm": "rtn", "weighting": "auto",
"damping": 0.01, "order": "static", "scales": "auto", "refine": 3}], "keep": [["lm_head", "why"]], "fuse": [["a",
"b"]], "container": "compressed_tensors", "input_amax": 336.0, "input_scale": "absmax", "headroom": 1.0, "kv_cache":
"none", "bias_correction": false, "mtp": "keep", "shard_bytes": 7, "description": "text"}""".replace("\n", " ")


def test_a_record_says_every_field_in_this_spelling_and_order() -> None:
    gptq = Rule("*", get_scheme("nvfp4"), algorithm="gptq", objective="diagonal", refine_passes=2)
    recipe = Recipe(
        (gptq, Rule("re:x", None)),
        keep=(Keep("lm_head", "why"),),
        fuse=(("a", "b"),),
        container="Compressed-Tensors",
        input_amax=336.0,
        shard_size=7,
        description="text",
    )
    assert json.dumps(recipe.to_json()) == RECORDED
    before = {name: value for name, value in recipe.to_json().items() if name != "mtp"}
    assert Recipe.from_json(before).mtp == "keep"  # of a version that did not know the field
    by_format = replace(recipe, input_amax=None)
    assert by_format.to_json() == recipe.to_json() | {"input_amax": None}
    assert Recipe.from_json(by_format.to_json()).input_amax is None
    turned = replace(recipe, rotate="down_proj:64")
    assert turned.to_json() == recipe.to_json() | {"rotate": "down_proj:64"}
    assert Recipe.from_json(turned.to_json()).rotations == {"down_proj": 64}


def test_a_recipe_of_a_version_with_low_rank_parts_is_the_same_without_one_and_refused_with_one() -> None:
    """Its digest, which names a run, is that of the JSON as that version wrote it."""
    recipe, earlier = Recipe.from_json(json.loads(RECORDED)), json.loads(RECORDED)
    for rule in earlier["rules"]:
        rule |= {"low_rank": 0, "low_rank_dtype": "bf16"}
    assert Recipe.from_json(earlier) == recipe
    assert recipe.digest == hashlib.sha256(json.dumps(earlier, sort_keys=True).encode()).hexdigest()
    earlier["rules"][1]["low_rank"] = 4
    with pytest.raises(RecipeError, match=r"low_rank is 4, .* convert again") as error:
        Recipe.from_json(earlier)
    assert "\n" not in str(error.value)
    with pytest.raises(RecipeError, match=r"rules\[0\]\.low_rank: .* leave low_rank and low_rank_dtype out$"):
        parse_recipe({"version": 1, "rules": [{"match": "*", "format": "nvfp4", "low_rank": 16}]})


@pytest.mark.parametrize("name", named_recipes())
def test_a_recipe_is_made_again_from_its_record(name: str) -> None:
    recipe = load_recipe(Path(name))
    assert Recipe.from_json(recipe.to_json()) == replace(recipe, container=recipe.container_name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shard_bytes": None, "more": 1}, "the recipe's more is not one that this version writes"),
        ({"container": "Compressed-Tensors"}, "the recipe's container is not one"),
        ({"keep": [["re:(", "why"]]}, "cannot be read: RecipeError pattern"),
        ({"rules": []}, "cannot be read: RecipeError a recipe needs"),
        ({"rules": [{"match": "*", "scheme": "nvfp4", "serch": "x"}]}, "cannot be read: TypeError"),
        ({"rules": [{"match": "*", "scheme": "nvfp4"}]}, "the recipe's rules is not one"),
        ({"rules": [{"match": "*", "scheme": "nvfp5"}]}, "cannot be read: UnknownFormat"),
        ({"fuse": 3}, "cannot be read: TypeError"),
    ],
)
def test_a_record_of_no_recipe_is_refused_in_one_line(change: dict[str, object], words: str) -> None:
    with pytest.raises(RecipeError, match=words) as error:
        Recipe.from_json(json.loads(RECORDED) | change)
    assert "\n" not in str(error.value)


def test_a_record_without_a_field_is_refused() -> None:
    described = json.loads(RECORDED)
    del described["kv_cache"]
    with pytest.raises(RecipeError, match="cannot be read: KeyError 'kv_cache'"):
        Recipe.from_json(described)
