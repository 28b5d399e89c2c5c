"""Claims about names: the tensors are held to the model that config.json names, with transformers and without it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from ptqpipe.cli import main
from ptqpipe.errors import CheckpointError
from ptqpipe.models.families import check_config, doubts, misfits
from ptqpipe.models.source import Source
from ptqpipe.runtime import expected
from ptqpipe.runtime.expected import unlike_model
from tests import families, family_rows, tiny

Tensors = dict[str, torch.Tensor]
QWEN = "qwen3_5_text"  # which the plain rules do not know
META = {
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    "embed_tokens": "tok_embeddings", "lm_head": "output", "model.": "",
}  # fmt: skip
GGUF = {"model.layers.": "blk.", "self_attn.q_proj": "attn_q", "model.embed_tokens": "token_embd"}


def renamed(names: dict[str, str]) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        found = {}
        for name, tensor in tensors.items():
            for old, new in names.items():
                name = name.replace(old, new)
            found[name] = tensor
        return found

    return change


def without(*parts: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {n: x for n, x in tensors.items() if not any(part in n for part in parts)}


def with_more(name: str, *shape: int) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: torch.zeros(shape or (64, 128)).bfloat16()}


def copied(number: int) -> Callable[[Tensors], Tensors]:
    """With a further layer, of this number."""
    return lambda tensors: (
        tensors
        | {
            name.replace(".layers.1.", f".layers.{number}."): x.clone()
            for name, x in tensors.items()
            if ".layers.1." in name
        }
    )


def same(tensors: Tensors) -> Tensors:
    return tensors


# What is wrong -> (the tensors, what config.json says otherwise, words of the line).
WRONG: dict[str, tuple[Callable[[Tensors], Tensors], dict[str, Any], str]] = {
    "a layer too few": (same, {"num_hidden_layers": 3}, "says num_hidden_layers 3, but the files have 2"),
    "a layer too many": (copied(2), {}, "says num_hidden_layers 2, but the files have model.layers.2"),
    "a layer fewer in the config": (same, {"num_hidden_layers": 1}, "but the files have model.layers.1"),
    "Meta's layout": (renamed(META), {}, "is a name of Meta's and Mistral's own layout"),
    "GGUF's names": (renamed(GGUF), {}, "is a name of GGUF's layout"),
    "a projection missing": (without("1.mlp.up_proj"), {}, "no 'model.layers.1.mlp.up_proj.weight' (1 in all)"),
    "a kind missing": (without("k_proj"), {}, "have no 'model.layers.0.self_attn.k_proj.weight' (2 in all)"),
    "no embedding": (without("embed_tokens"), {}, "have no 'model.embed_tokens.weight'"),
    "no head": (without("lm_head"), {}, "have no 'lm_head.weight'"),
    "a head of another task": (with_more("score.weight", 2, 128), {}, "has no place for 'score.weight' (1 in all)"),
    "another model's": (renamed({"self_attn": "attention"}), {}, "have no 'model.layers.0.self_attn.k_proj.weight'"),
    "another width of the MLP": (same, {"intermediate_size": 192}, "config.json makes it"),
    "more heads": (same, {"num_key_value_heads": 4}, "'model.layers.0.self_attn.k_proj.weight' is 64x128"),
    "a class of another model": (same, {"architectures": ["Qwen2ForCausalLM"]}, "config.json's Qwen2ForCausalLM needs"),
    "another type": (same, {"model_type": "gpt2"}, "config.json's GPT2LMHeadModel needs"),
    "a class of another type": (same, {"architectures": ["GPT2LMHeadModel"]}, "config.json's GPT2LMHeadModel needs"),
    "an adapter in the weights": (
        with_more("model.layers.0.self_attn.q_proj.lora_A.weight", 8, 128), {}, "that is not merged into 'model.layers",
    ),
    "an adapter in those of an unknown class": (
        with_more("model.layers.0.self_attn.q_proj.lora_A.default.weight", 8, 128),
        {"architectures": ["NewestForCausalLM"]}, "that is not merged into 'model.layers.0.self_attn.q_proj.weight'",
    ),
    "a trained head beside its original": (
        with_more("lm_head.modules_to_save.default.weight", 96, 128), {}, "not merged into 'lm_head.weight'",
    ),
    "another vocabulary": (same, {"vocab_size": 100}, "is 96x128, and config.json makes it 100x128"),
}  # fmt: skip
RIGHT: dict[str, tuple[Callable[[Tensors], Tensors], dict[str, Any]]] = {
    "as it is": (same, {}),
    "tied, without the head": (without("lm_head"), {"tie_word_embeddings": True}),
    "tied, with the head": (same, {"tie_word_embeddings": True}),
    "with rotations": (with_more("model.layers.0.self_attn.rotary_emb.inv_freq", 16), {}),
    "without a class": (same, {"architectures": None}),
    "of a class of another type with the same tensors": (same, {"architectures": ["MistralForCausalLM"]}),
    "of another type with the same tensors": (same, {"model_type": "mistral"}),
    "of a class without a type": (same, {"architectures": ["PreTrainedModel"]}),
    "of an unknown class": (same, {"architectures": ["NewestForCausalLM"]}),
}


def made(folder: Path, change: Callable[[Tensors], Tensors], config: dict[str, Any]) -> Path:
    described = {key: x for key, x in {**tiny.LLAMA_CONFIG, **config}.items() if x is not None}
    tiny.save(folder, change(tiny.llama()))
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def lines_of(folder: Path) -> list[str]:
    with Source.open(folder) as source:
        return unlike_model(source)


@pytest.mark.parametrize("wrong", WRONG)
def test_tensors_of_another_model_are_warned_of_refused_with_for_and_a_fault(wrong: str, tmp_path: Path) -> None:
    change, config, said = WRONG[wrong]
    folder, out = made(tmp_path / "model", change, config), tmp_path / "out"
    call = ["convert", str(folder), "--scale-search", "absmax", "-o", str(out)]
    refused = CliRunner().invoke(main, [*call, "--reader", "vllm"])
    assert refused.exit_code == 1, refused.output
    (error,) = [line for line in refused.stderr.splitlines() if line.startswith("Error")]
    assert said in error
    assert "--reader vllm: " in error
    assert not out.exists()
    done = CliRunner().invoke(main, call)
    assert done.exit_code == 0, done.output
    assert any("warning: " in line and said in line for line in done.output.splitlines()), done.output
    for checked in (folder, out):
        report = CliRunner().invoke(main, ["verify", str(checked)])
        assert report.exit_code == 1
        assert said in report.output


@pytest.mark.parametrize("right", RIGHT)
def test_tensors_of_the_model_are_not_doubted(right: str, tmp_path: Path) -> None:
    assert lines_of(made(tmp_path / "model", *RIGHT[right])) == []


@pytest.mark.parametrize("wrong", ["a layer too few", "a layer too many", "Meta's layout", "GGUF's names"])
def test_structure_tells_without_transformers(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "_classes_of", lambda path: [])
    change, config, said = WRONG[wrong]
    (line,) = lines_of(made(tmp_path / "model", change, {**config, "model_type": "newest"}))
    assert said in line


def test_plain_decoders_need_no_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(described: Any) -> Any:
        raise AssertionError("asked transformers")

    monkeypatch.setattr(expected, "_classes_of", never)
    assert lines_of(made(tmp_path / "model", same, {})) == []


@pytest.mark.parametrize("kind", ["gpt_oss", "qwen3_next", "nemotron_h", "granitemoehybrid", "qwen4_exp_text"])
def test_models_of_other_families_fit_and_do_not_without_a_layer_s_part(kind: str, tmp_path: Path) -> None:
    folder = family_rows.make(tmp_path / "model", kind)
    assert lines_of(folder) == []
    tensors = load_file(folder / "model.safetensors")
    lost = next(name for name in tensors if ".0." in name and "norm" in name)
    tiny.save(folder, without(lost)(tensors), config=json.loads((folder / "config.json").read_text()))
    (line,) = lines_of(folder)
    assert "(1 in all), which config.json's" in line


@pytest.mark.slow
@pytest.mark.parametrize("kind", family_rows.MADE_BY_TRANSFORMERS)
def test_what_transformers_saves_fits(kind: str, tmp_path: Path) -> None:
    assert lines_of(family_rows.make(tmp_path / "model", kind)) == []


@pytest.mark.parametrize("mtp", [False, True])
def test_layers_of_multi_token_prediction_are_not_too_many(mtp: bool, tmp_path: Path) -> None:
    for kind in ("deepseek_v3", QWEN):
        assert lines_of(families.make_model(tmp_path / kind, kind, mtp=mtp)) == []


def test_a_config_chooses_no_code_of_the_empty_model(tmp_path: Path) -> None:
    code = {"_attn_implementation": "someone/kernel", "auto_map": {"AutoConfig": "x.Y"}, "attn_implementation": "a/b"}
    (line,) = lines_of(made(tmp_path / "model", without("k_proj"), code))
    assert "have no 'model.layers.0.self_attn.k_proj.weight'" in line


def test_an_mtp_layer_that_config_json_does_not_count_stays_with_a_word(tmp_path: Path) -> None:
    folder = families.make_model(tmp_path / "model", "deepseek_v3", mtp=True)
    config = json.loads((folder / "config.json").read_text())
    del config["num_nextn_predict_layers"]
    (folder / "config.json").write_text(json.dumps(config))
    done = CliRunner().invoke(main, ["convert", str(folder), "--scale-search", "absmax", "-o", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "model.layers.2 is a multi-token prediction layer that config.json does not count" in done.output
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert not [name for name in stored if ".layers.2." in name and not name.endswith((".weight", "bias"))]
    assert [name for name in stored if ".layers.1.self_attn" in name and name.endswith("weight_packed")]
    checked = CliRunner().invoke(main, ["verify", str(tmp_path / "out"), "--source", str(folder)])
    assert checked.exit_code == 0, checked.output


def test_weights_of_an_adapter_beside_those_that_they_are_of_are_refused_but_where_they_are_part_of_the_model() -> None:
    parts = ("base_layer.weight", "lora_A.default.weight", "lora_B.default.weight")
    names = ["model.embed_tokens.weight", *(f"model.layers.0.self_attn.q_proj.{part}" for part in parts)]
    with pytest.raises(CheckpointError, match=r"is of an adapter that is not merged into .*merge_and_unload"):
        check_config({"model_type": "llama"}, names)
    check_config({"model_type": "phi4mm"}, names)


def test_a_family_without_a_row_is_said_with_the_reader_that_was_asked_for(tmp_path: Path) -> None:
    folder, out = made(tmp_path / "model", same, {"model_type": "newest", "architectures": None}), tmp_path / "out"
    call = ["convert", str(folder), "--scale-search", "absmax", "-o", str(out), "--json", "--reader", "vllm"]
    done = CliRunner().invoke(main, call)
    assert done.exit_code == 0, done.output
    (said,) = json.loads(done.stdout)["warnings"]
    assert "has no row for model_type 'newest'" in said
    assert "; whether vllm takes them quantized is not known" in said
    assert said in json.loads((out / "ptqpipe.json").read_text())["doubts"]


def test_layouts_and_counts_are_told_by_names_alone() -> None:
    names = {name: ("BF16", tuple(x.shape)) for name, x in tiny.llama().items()}
    assert misfits(tiny.LLAMA_CONFIG, names) == doubts(tiny.LLAMA_CONFIG, names) == []
    megatron = {"decoder.layers.0.self_attention.linear_qkv.weight": ("BF16", (64, 64))}
    assert "Megatron's layout" in misfits(tiny.LLAMA_CONFIG, megatron)[0]
    mistral = {"layers.0.attention.wkv_b.weight": ("BF16", (64, 64))}
    assert misfits({"text_config": {"model_type": "mistral_large4_text"}}, mistral) == []


def test_a_config_without_a_model_type_is_said_and_refused_with_for(tmp_path: Path) -> None:
    folder = made(tmp_path / "model", same, {})
    config = json.loads((folder / "config.json").read_text())
    del config["model_type"]
    (folder / "config.json").write_text(json.dumps(config))
    call = ["convert", str(folder), "--scale-search", "absmax", "--dry-run"]
    assert "config.json has no 'model_type'" in CliRunner().invoke(main, call).output
    refused = CliRunner().invoke(main, [*call, "--reader", "vllm"])
    assert refused.exit_code != 0
    assert "config.json has no 'model_type'" in refused.output


def test_an_adapter_beside_the_model_is_said(tmp_path: Path) -> None:
    folder = made(tmp_path / "model", same, {})
    call = ["convert", str(folder), "--scale-search", "absmax", "--dry-run"]
    assert "lies beside the model" not in CliRunner().invoke(main, call).output
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert "adapter_config.json lies beside the model" in CliRunner().invoke(main, call).output
