"""Claims about recipes: what they accept, what they refuse and with which words, and which rule wins."""

import hashlib
import inspect
import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import ptqpipe
from ptqpipe.cli import main
from ptqpipe.errors import FormatError, RecipeError, UsageError
from ptqpipe.models.families import DEFAULT_FUSE, Keep
from ptqpipe.numerics.schemes import SCHEMES, get_scheme
from ptqpipe.recipe import file
from ptqpipe.recipe.file import build_recipe, load_recipe, named_recipes, parse_recipe
from ptqpipe.recipe.options import CheckpointOptions, CodeOptions, RecipeOptions, described, recipe_path
from ptqpipe.recipe.recipe import Recipe, Rule, matches
from ptqpipe.run.options import options_of


def rules(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"match": match, "format": name} for match, name in pairs]


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A recipe file that says no more than --format nvfp4."""
    path = tmp_path / "plain.yaml"
    path.write_text("version: 1\nrules: [{match: '*', format: nvfp4}]\n")
    return path


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


def test_the_first_rule_that_matches_wins() -> None:
    recipe = parse_recipe({"version": 1, "rules": rules(("re:.*mlp", "mxfp4"), ("*", "nvfp4"))})
    rule, _ = recipe.rule_for("model.layers.0.mlp.up_proj")
    assert rule is not None
    assert rule.scheme is get_scheme("mxfp4")
    rule, _ = recipe.rule_for("model.layers.0.self_attn.q_proj")
    assert rule is not None
    assert rule.scheme is get_scheme("nvfp4")


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("lm_head", "language-model head"),
        ("model.embed_tokens", "embedding"),
        ("transformer.wte", "embedding"),
        ("model.layers.0.input_layernorm", "norm"),
        ("model.layers.0.mlp.gate", "router"),
        ("model.layers.0.block_sparse_moe.gate", "router"),
        ("model.layers.0.mlp.shared_expert_gate", "router"),
        ("model.layers.0.mlp.router", "router"),
        ("visual.blocks.0.attn.qkv", "vision tower"),
        ("model.vision_tower.encoder.layers.0.mlp.fc1", "vision tower"),
        ("audio_tower.layers.0.fc1", "audio tower"),
        ("multi_modal_projector.linear_1", "multimodal projector"),
        ("mtp.layers.0.mlp.down_proj", "multi-token-prediction head"),
    ],
)
def test_heads_embeddings_routers_and_towers_are_kept_with_a_reason(module: str, reason: str) -> None:
    assert Recipe((Rule("*", get_scheme("nvfp4")),)).rule_for(module) == (None, reason)


@pytest.mark.parametrize(
    "module",
    [
        "model.layers.0.mlp.gate_proj",
        "model.layers.0.mlp.gate_up_proj",
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.experts.3.down_proj",
        "model.layers.0.mlp.shared_expert.up_proj",
        "model.layers.0.block_sparse_moe.experts.0.w1",
        "model.layers.0.linear_attn.in_proj_qkv",
        "transformer.h.0.mlp.c_fc",
    ],
)
def test_linear_layers_are_not_mistaken_for_routers_or_embeddings(module: str) -> None:
    assert Recipe((Rule("*", get_scheme("nvfp4")),)).rule_for(module)[0] is not None


def test_a_rule_that_names_a_kept_module_exactly_overrides_the_keep_list() -> None:
    recipe = parse_recipe({"version": 1, "rules": rules(("lm_head", "fp8"), ("*", "nvfp4"))})
    rule, _ = recipe.rule_for("lm_head")
    assert rule is not None
    assert rule.scheme is get_scheme("fp8_dynamic")


def test_ignore_wins_over_rules() -> None:
    recipe = build_recipe(RecipeOptions(format="nvfp4", ignore=("re:.*o_proj$",)))
    assert recipe.rule_for("model.layers.0.self_attn.o_proj") == (None, "ignored on request")


@pytest.mark.parametrize(
    ("pattern", "module", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.b.c", False),
        ("*.b", "x.y.b", True),
        ("re:.*\\.b$", "x.b", True),
        ("re:b$", "x.b", False),
        ("re:x", "x.b", True),
        ("a.[b]", "a.b", False),
    ],
)
def test_patterns_match_names_globs_and_anchored_expressions(pattern: str, module: str, expected: bool) -> None:
    assert matches(pattern, module) is expected


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (None, "the recipe is empty"),
        ([1], "must be a mapping"),
        ({"version": 2, "rules": rules(("*", "nvfp4"))}, "version is 2, expected 1"),
        ({"version": 1}, "rules must be a non-empty list"),
        ({"version": 1, "rules": []}, "rules must be a non-empty list"),
        ({"version": 1, "rules": rules(("*", "nvfp4")), "ruels": 1}, "unknown key 'ruels'"),
        ({"version": 1, "rules": [{"match": "*", "format": "nvfp4", "serch": "x"}]}, "unknown key 'serch'"),
        ({"version": 1, "rules": [{"match": "*"}]}, "needs both match and format"),
        ({"version": 1, "rules": rules(("re:(", "nvfp4"))}, "not a regular expression"),
        ({"version": 1, "rules": rules(("*", "nvfp5"))}, "unknown format 'nvfp5'"),
        ({"version": 1, "rules": [{"match": "*", "format": "nvfp4", "global_scale": "x"}]}, "global_scale 'x'"),
        ({"version": 1, "rules": rules(("*", "nvfp4")), "input_amax": -1}, "use a number above 0 and below 1e30"),
        ({"version": 1, "rules": rules(("*", "nvfp4")), "input_amax": True}, "must be a number"),
        ({"version": 1, "rules": rules(("*", "nvfp4")), "shard_size": "x"}, "must be of type int"),
        ({"version": 1, "rules": rules(("*", "nvfp4")), "fuse": [["a", "b"], ["b", "c"]]}, "'b' in two groups"),
        ({"version": 1, "rules": rules(("*", "nvfp4")), "keep": [""]}, "keep must be text"),
        (
            {"version": 1, "rules": rules(("*", "nvfp4")), "shard_bytes": 9},
            "'shard_bytes'; it is called shard_size now",
        ),
        ({"version": 1, "rules": [{"match": "*", "format": "fp8", "weighting": "none"}]}, "called objective now"),
    ],
)
def test_malformed_recipes_are_refused_with_the_key(raw: object, words: str) -> None:
    with pytest.raises((RecipeError, FormatError), match=words.replace("(", "\\(")):
        parse_recipe(raw)


@pytest.mark.parametrize(
    "text",
    [
        "a: &a {x: 1}\nb: {<<: [" + ", ".join(["*a"] * 17) + "]}\n",
        "a: &a {" + ", ".join(f"k{i}: 1" for i in range(900)) + "}\nb: {<<: [*a, *a]}\n",
        "a0: &a0 {x: 1, y: 2}\n" + "".join(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}\n" for i in range(1, 40)),
    ],
    ids=["many mappings", "many keys", "doubled again and again"],
)
def test_a_short_recipe_does_not_merge_to_millions_of_keys(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(
        RecipeError, match=r"r\.yaml merges more than 16 mappings or 1000 keys by << at line \d+; write"
    ):
        load_recipe(tmp_path / "r.yaml")


def test_a_recipe_that_would_take_minutes_to_parse_is_refused_by_its_size(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("version: 1\nrules: [" + "{}, " * 300_000 + "]\n")
    with pytest.raises(RecipeError, match=r"r\.yaml cannot be read: it has more than 1048576 bytes"):
        load_recipe(tmp_path / "r.yaml")


@pytest.mark.parametrize("text", ["{", "a: [1, 2", "\x00", "- - - :", "!!python/object:os.system {}"])
def test_files_that_are_not_yaml_are_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as error:
        load_recipe(path)
    assert "\n" not in str(error.value)
    assert "r.yaml" in str(error.value)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ("version: 1\n".encode("utf-16"), r"is not UTF-8 text \(byte 0\); save it as UTF-8"),
        (b"a: b: c", "is not YAML at line 1: mapping values are not allowed here"),
        (b"a: !!python/name:os.system", "line 1: could not determine a constructor"),
        (b"[" * 5000, "nests too deep"),
        (b"rules:\n- {match: a, format: nvfp4}\n", "has no version; write version: 1"),
    ],
)
def test_what_is_wrong_with_a_recipe_file_is_said(tmp_path: Path, raw: bytes, says: str) -> None:
    (tmp_path / "r.yaml").write_bytes(raw)
    with pytest.raises(RecipeError, match=says):
        load_recipe(tmp_path / "r.yaml")


def test_a_missing_recipe_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"does not exist; name a YAML file, or a recipe that "):
        load_recipe(tmp_path / "absent.yaml")
    with pytest.raises(RecipeError, match=r"does not exist; did you mean nvfp4_gptq or "):
        load_recipe(Path("nvfp4_gtpq"))


def test_format_and_recipe_together_contradict(plain: Path) -> None:
    with pytest.raises(RecipeError, match="contradict each other"):
        build_recipe(RecipeOptions(format="nvfp4"), path=plain)


def test_options_override_the_recipe_file(plain: Path) -> None:
    options = RecipeOptions(container="modelopt", scale_search="absmax", global_scale="absmax", shard_size=5)
    recipe = build_recipe(options, path=plain)
    assert (recipe.container, recipe.shard_size) == ("modelopt", 5)
    assert (recipe.rules[0].scale_search, recipe.rules[0].global_scale) == ("absmax", "absmax")


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("NVFP4A16", "nvfp4"),
        ("nvfp4", "nvfp4"),
        ("NVFP4-W4A4", "nvfp4_w4a4"),
        ("FP8_DYNAMIC", "fp8_dynamic"),
        ("Fp8_Block", "fp8_block"),
        ("MXFP4", "mxfp4"),
        ("MXFP8A16", "mxfp8a16"),
        ("mxfp6a16", "mxfp6"),
    ],
)
def test_names_of_the_vllm_world_are_understood(name: str, scheme: str) -> None:
    assert get_scheme(name).name == scheme


def test_no_name_means_two_schemes() -> None:
    names = [name for scheme in SCHEMES.values() for name in (scheme.name, *scheme.aliases)]
    assert len(names) == len(set(names))


def test_the_default_fuse_table_holds_what_runtimes_fuse() -> None:
    for group in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3")):
        assert group in DEFAULT_FUSE


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


def test_every_option_sets_the_field_of_its_name(plain: Path) -> None:
    values: dict[str, Any] = {
        "container": "ptqpipe", "scale_search": "absmax", "global_scale": "absmax", "input_amax": 5.0, "shard_size": 9,
        "algorithm": "gptq", "objective": "block", "damping": 0.5, "refine_passes": 1, "input_scale": "mse",
        "headroom": 2.0,        "kv_cache": "fp8", "bias_correction": True, "mtp": "nvfp4",
        "rotate": "down_proj:64",
    }  # fmt: skip
    assert {*values, "format", "ignore"} == {one.name for one in options_of(RecipeOptions)}
    bare = Recipe((Rule("*", get_scheme("nvfp4")),))
    for name, value in values.items():
        recipe = build_recipe(RecipeOptions(**{name: value}), path=plain)
        found = getattr(recipe.rules[0] if hasattr(bare.rules[0], name) else recipe, name)
        assert found == value
        assert getattr(bare.rules[0] if hasattr(bare.rules[0], name) else bare, name) != value


def test_gptq_on_request_goes_with_the_diagonal_unless_told_otherwise() -> None:
    (rule,) = build_recipe(RecipeOptions(algorithm="gptq")).rules
    assert rule.objective == "diagonal"
    (rule,) = build_recipe(RecipeOptions(algorithm="gptq", objective="none")).rules
    assert rule.objective == "none"


def test_schemes_of_two_containers_need_one_named() -> None:
    recipe = parse_recipe({"version": 1, "rules": rules(("a", "mxfp6_e3m2"), ("*", "nvfp4"))})
    with pytest.raises(UsageError, match="default to different containers"):
        _ = recipe.container_name


def test_python_and_the_command_line_offer_every_option() -> None:
    options = {one.name for one in options_of(RecipeOptions)}
    assert options - inspect.signature(ptqpipe.convert).parameters.keys() == set()
    assert options - {one.name for one in main.commands["convert"].params} == set()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "version: 1\nrules:\n- {match: a, format: nvfp4}\nrules:\n- {match: b, format: mxfp4}\n",
            r"'rules' \(line 4\) twice",
        ),
        ("version: 1\nrules:\n- match: a\n  match: b\n  format: nvfp4\n", r"'match' \(line 4\) twice"),
        ("version: true\nrules:\n- {match: a, format: nvfp4}\n", "version is True, expected 1"),
    ],
)
def test_what_yaml_would_settle_silently_is_an_error(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(RecipeError, match=words):
        load_recipe(tmp_path / "r.yaml")


def test_merged_keys_are_overridden_as_yaml_says(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(
        "version: 1\nrules:\n- &r {match: a, format: nvfp4}\n- {<<: *r, match: b}\n"
        "- {<<: *r, match: '*', format: keep}\n"
    )
    assert [(rule.match, rule.scheme is None) for rule in load_recipe(tmp_path / "r.yaml").rules] == [
        ("a", False),
        ("b", False),
        ("*", True),
    ]


def test_a_short_file_that_describes_billions_is_refused_in_a_short_line(tmp_path: Path) -> None:
    lists = ["l0: &l0 [x, x, x, x, x, x, x, x, x, x]"]
    lists += [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 10)]
    (tmp_path / "r.yaml").write_text("version:\n  " + "\n  ".join(lists) + "\nrules: []\n")
    with pytest.raises(RecipeError, match="version is") as told:
        load_recipe(tmp_path / "r.yaml")
    assert len(str(told.value)) < 1000


def documented(title: str) -> dict[str, str]:
    """Key -> its row in the table below this heading of docs/using.md."""
    text = (Path(__file__).parents[2] / "docs/using.md").read_text().partition(f"## {title}\n")[2].partition("\n##")[0]
    return {row.split("`")[1]: row for row in text.splitlines() if row.startswith("| `")}


def test_the_page_on_recipes_has_every_key_of_the_parser_and_no_other() -> None:
    with pytest.raises(RecipeError) as top:
        parse_recipe({"version": 1, "none": 1})
    with pytest.raises(RecipeError) as rule:
        parse_recipe({"version": 1, "rules": [{"none": 1}]})
    for told, title in ((top, "Keys of the file"), (rule, "Keys of a rule")):
        known = str(told.value).partition("known are ")[2].split(", ")
        assert sorted(documented(title)) == sorted(known)


def test_the_page_on_recipes_has_choices_bounds_and_defaults_of_the_table() -> None:
    for kind, title in ((CheckpointOptions, "Keys of the file"), (CodeOptions, "Keys of a rule")):
        for one in fields(kind):
            about, row = described(one), documented(title)[one.name]
            assert about is not None
            assert all(f"`{choice}`" in row for choice in about.choices), row
            assert about.bounds is None or f"{about.bounds[0]:g} to {about.bounds[1]:g}" in row, row
            default = row.rstrip("| ").rpartition("| ")[2]
            plain = f"{one.default:g}" if isinstance(one.default, float) else str(one.default).lower()
            assert one.default is None or default in (plain, "diagonal with gptq, else none", about.shown), row


def test_the_examples_of_the_page_on_recipes_are_recipes(tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs/using.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        (tmp_path / "r.yaml").write_text(block)
        assert len(load_recipe(tmp_path / "r.yaml").rules) == 3
