"""Claims about parts that are kept by default: a rule that means them quantizes them, verify accepts the result, and
convert says what readers do with it. A rule that means other weights too leaves them as they are."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

import ptqpipe
from ptqpipe.check.verify.command import verify
from ptqpipe.cli import main
from ptqpipe.numerics.schemes import get_scheme
from ptqpipe.recipe.recipe import Recipe, Rule
from tests import tiny

Make = Callable[..., Path]
BLOCK = "model.layers.2."  # the one behind the two of the model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with a vision tower, a projector, an MTP block and an MTP layer numbered like a decoder layer."""
    tensors = tiny.llama(layers=3, hidden=64, inner=128)
    t = tiny.Tensors(1)
    tiny.attention(t, "visual.blocks.0.attn", hidden=64, kv=32)
    t.add("visual.blocks.0.mlp.fc1.weight", 128, 64)
    t.add("visual.pos_embed.weight", 16, 64)
    t.ones("visual.blocks.0.norm1.weight", 64)
    t.add("multi_modal_projector.linear_1.weight", 64, 64)
    tiny.attention(t, "mtp.layers.0.self_attn", hidden=64, kv=32)
    t.add("mtp.layers.0.mlp.gate.weight", 16, 64)
    t.add(f"{BLOCK}eh_proj.weight", 64, 128)
    config = {**tiny.LLAMA_CONFIG, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}
    config |= {"num_key_value_heads": 1, "num_nextn_predict_layers": 1}
    return tiny.save(tmp_path_factory.mktemp("named") / "model", tensors | t.made, config=config)


def converted(model: Path, out: Path, *rules: tuple[str, str], more: str = "") -> tuple[dict[str, str], set[str]]:
    """Scheme of every quantized weight, and the kept ones, of a conversion that verify accepts."""
    lines = [f"- {{match: {json.dumps(match)}, format: {name}}}" for match, name in rules]
    out.with_suffix(".yaml").write_text("\n".join(["version: 1", more, "rules:", *lines]))
    done = ptqpipe.convert(model, out=out, recipe=out.with_suffix(".yaml"), workers=1)
    report = verify(done.out, source=model, workers=1)
    assert report.ok, [item.message for item in report.faults]
    return {name: entry["scheme"] for name, entry in done.record["weights"].items()}, set(done.record["kept"])


@pytest.mark.parametrize(
    ("match", "part", "stays"),
    [
        ("visual.*", "visual.blocks", {"visual.pos_embed.weight"}),
        ("re:visual\\.blocks\\.\\d+\\.mlp", "visual.blocks.0.mlp", {"visual.blocks.0.attn.q_proj.weight"}),
        ("multi_modal_projector*", "multi_modal_projector", {"visual.blocks.0.mlp.fc1.weight"}),
        ("mtp.*", "mtp", {"mtp.layers.0.mlp.gate.weight"}),
        (f"{BLOCK}*", BLOCK, {f"{BLOCK}eh_proj.weight"}),
        ("*lm_head", "lm_head", {"model.embed_tokens.weight"}),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_rule_that_means_a_kept_part_quantizes_it(
    model: Path, tmp_path: Path, match: str, part: str, stays: set[str], *, first: bool
) -> None:
    rules = [(match, "fp8_dynamic"), ("*", "nvfp4")]
    quantized, kept = converted(model, tmp_path / "out", *(rules if first else rules[::-1]))
    assert {scheme for name, scheme in quantized.items() if name.startswith(part)} == {"fp8_dynamic"}
    assert {scheme for name, scheme in quantized.items() if not name.startswith(part)} == {"nvfp4"}
    assert stays <= kept


def test_a_rule_that_means_other_weights_too_leaves_the_kept_parts(model: Path, tmp_path: Path) -> None:
    quantized, _ = converted(model, tmp_path / "out", ("*attn*", "fp8_dynamic"), ("re:.*mlp", "nvfp4"))
    assert {name.split(".")[0] for name in quantized} == {"model"}
    assert not any(name.startswith(BLOCK) for name in quantized)


def test_what_the_recipe_or_the_call_keeps_stays(model: Path, tmp_path: Path) -> None:
    _, kept = converted(model, tmp_path / "own", ("mtp.*", "fp8_dynamic"), ("*", "nvfp4"), more="keep: ['mtp.*']")
    assert "mtp.layers.0.self_attn.q_proj.weight" in kept
    recipe = tmp_path / "own.yaml"
    recipe.write_text("version: 1\nrules: [{match: 'mtp.*', format: fp8}, {match: '*', format: nvfp4}]\n")
    done = ptqpipe.convert(model, out=tmp_path / "call", recipe=recipe, ignore=["mtp.*"], workers=1)
    assert done.record["kept"]["mtp.layers.0.self_attn.q_proj.weight"]["reason"] == "ignored on request"


@pytest.mark.parametrize(
    ("match", "words"),
    [
        ("visual.*", "visual.blocks.0.attn.q_proj (5 of this kind): whether readers take it quantized differs"),
        ("mtp.*", "mtp.layers.0.self_attn.q_proj (4 of this kind): whether readers"),
        ("*lm_head", "lm_head (1 of this kind): vLLM builds the head of"),
        ("*embed_tokens", "model.embed_tokens (1 of this kind): readers look up the rows"),
    ],
)
def test_convert_says_what_readers_do_with_it(model: Path, tmp_path: Path, match: str, words: str) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"version: 1\nrules: [{{match: '{match}', format: fp8}}, {{match: '*', format: nvfp4}}]\n")
    call = ["convert", str(model), "--recipe", str(recipe), "-o", str(tmp_path / "out"), "--dry-run"]
    assert f"warning: {words}" in CliRunner().invoke(main, call, catch_exceptions=False).output
    own = [*call, "--container", "ptqpipe"]
    assert words not in CliRunner().invoke(main, own, catch_exceptions=False).output


def test_a_keep_rule_and_an_unknown_part_change_nothing() -> None:
    recipe = Recipe((Rule("lm_*", None), Rule("none.*", get_scheme("fp8")), Rule("*", get_scheme("nvfp4"))))
    modules = ["lm_head", "model.layers.0.mlp.up_proj"]
    assert recipe.named(modules) == frozenset()
    assert recipe.rule_for("lm_head", recipe.named(modules)) == (None, "language-model head")


def test_the_rule_of_all_weights_means_no_part_even_where_there_is_nothing_else() -> None:
    recipe = Recipe((Rule("*", get_scheme("nvfp4")),))
    assert recipe.named(["wte"]) == frozenset()
