"""Claims about recipes that come with the package: their names, what is taken for one, what they keep."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from ptqpipe.cli import main
from ptqpipe.errors import RecipeError
from ptqpipe.numerics.schemes import SCHEMES, get_scheme
from ptqpipe.recipe import file
from ptqpipe.recipe.file import load_recipe, named_recipes
from ptqpipe.recipe.options import recipe_path


@pytest.mark.parametrize("name", [name for name, path in named_recipes().items() if path.parent.name == "methods"])
def test_every_recipe_for_any_model_says_more_than_a_format(name: str) -> None:
    recipe = load_recipe(Path(name))
    assert recipe.description
    assert len(recipe.schemes()) > 1 or any(rule.calibrated for rule in recipe.rules)


def test_a_recipe_has_one_name_which_is_no_format_s() -> None:
    files = sorted((Path(__file__).parents[2] / "recipes").rglob("*.yaml"))
    assert sorted(named_recipes().values()) == files
    assert named_recipes().keys().isdisjoint(SCHEMES)


def test_a_recipe_goes_by_its_name_in_any_spelling_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_recipe(Path("NVFP4-GPTQ")) == load_recipe(named_recipes()["nvfp4_gptq"])
    assert load_recipe(Path("Qwen2.5")) == load_recipe(named_recipes()["qwen2_5"])


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_name_that_is_both_a_recipe_and_something_here_is_not_guessed(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if kind == "file":
        Path("qwen3").write_text("version: 1\nrules: [{match: '*', format: fp8}]\n")
    else:
        Path("qwen3").mkdir()
    own = named_recipes()["qwen3"]
    said = f"qwen3 is a recipe of ptqpipe and a {kind} in the working directory; give ./qwen3 for the {kind}, {own} for"
    with pytest.raises(RecipeError, match=re.escape(said)):
        load_recipe(Path("qwen3"))
    assert load_recipe(own).schemes() == (get_scheme("nvfp4"),)
    if kind == "file":
        parsed = main.commands["convert"].make_context("convert", ["m", "--recipe", "./qwen3"]).params
        for path in (parsed["recipe"], recipe_path("./qwen3")):
            assert load_recipe(path).schemes() == (get_scheme("fp8"),)


def test_a_file_of_another_name_or_with_its_ending_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "qwen3.yaml"):
        Path(name).write_text("version: 1\nrules: [{match: '*', format: fp8}]\n")
        assert load_recipe(Path(name)).schemes() == (get_scheme("fp8"),)


def test_an_installation_without_recipes_says_so_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages/ptqpipe"
    (package.parent / "recipes/models").mkdir(parents=True)  # of another package
    (package.parent / "recipes/models/other.yaml").touch()
    said = f"{package}/recipes has no recipes; install ptqpipe again, or name a YAML file"
    with pytest.raises(RecipeError, match=f"^{re.escape(said)}$"):
        named_recipes(package)
    monkeypatch.setattr(file, "named_recipes", lambda: named_recipes(package))
    with pytest.raises(RecipeError, match=re.escape(said)):
        load_recipe(Path("qwen3"))
    (tmp_path / "mine").write_text("version: 1\nrules: [{match: '*', format: fp8}]\n")
    monkeypatch.chdir(tmp_path)
    assert load_recipe(Path("mine")).schemes() == (get_scheme("fp8"),)


def test_recipes_lists_and_prints_those_with_a_name(tmp_path: Path) -> None:
    def shown(*args: str) -> str:
        return CliRunner().invoke(main, ["recipes", *args], catch_exceptions=False).output

    listed = shown().splitlines()
    assert max(map(len, listed)) <= 80
    assert [line for line in listed if line.endswith(":")] == ["For a series of models:", "For any model:"]
    assert [line.split()[0] for line in listed if re.match("  [a-z]", line)] == list(named_recipes())
    assert [one["name"] for one in json.loads(shown("--json"))] == list(named_recipes())
    (tmp_path / "copy.yaml").write_text(shown("mixed-nvfp4-fp8"))
    assert load_recipe(tmp_path / "copy.yaml") == load_recipe(Path("mixed_nvfp4_fp8"))
    assert shown("NVFP4-GPTQ").startswith("# NVFP4 weights by error feedback")


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("model.layers.0.mlp.up_proj", "nvfp4"),
        ("model.layers.0.mlp.experts.3.up_proj", "nvfp4"),
        ("model.layers.0.block_sparse_moe.experts.3.w1", "nvfp4"),
        ("model.layers.0.feed_forward.w1", "nvfp4"),
        ("model.decoder.layers.0.fc1", "nvfp4"),
        ("model.layers.0.self_attn.q_proj", "fp8_dynamic"),
        ("model.layers.0.linear_attn.out_proj", "fp8_dynamic"),
        ("gpt_neox.layers.0.attention.dense", "fp8_dynamic"),
        ("transformer.h.0.self_attention.query_key_value", "fp8_dynamic"),
        ("transformer.h.0.attn.c_attn", "fp8_dynamic"),
    ],
)
def test_the_mixed_recipe_knows_attention_by_whatever_name_families_give_it(name: str, scheme: str) -> None:
    rule, _ = load_recipe(Path("mixed_nvfp4_fp8")).rule_for(name)
    assert rule is not None
    assert rule.scheme == get_scheme(scheme)
