"""Claims about recipes: what they accept, what they refuse and with which words, and which rule wins."""

import inspect
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import ptqpipe
from ptqpipe.cli import main
from ptqpipe.errors import FormatError, RecipeError, UsageError
from ptqpipe.models.families import DEFAULT_FUSE
from ptqpipe.numerics.schemes import SCHEMES, get_scheme
from ptqpipe.recipe.file import build_recipe, load_recipe, parse_recipe
from ptqpipe.recipe.options import CheckpointOptions, CodeOptions, RecipeOptions, described
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
