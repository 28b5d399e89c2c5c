"""Claims of load_model: whatever the container, the model computes with the decoded weights and nothing else.

Expected logits come from transformers' own float model, into whose checkpoint the decode is written; expected weights
from compressed-tensors' decompression.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import ptqpipe
from ptqpipe.checkpoint.layouts import ConfigRequest, Target, encode_part, get_container
from ptqpipe.errors import CheckpointError, UsageError
from ptqpipe.numerics.schemes import get_scheme
from ptqpipe.runtime import load_model
from ptqpipe.runtime.hf import register, unregister
from tests import families
from tests.checkpoint.layouts.builders import Checkpoint, absmax, read_checkpoint
from tests.runtime.models import SIZES, TOKENS, float_twin, logits, quantized


@pytest.mark.parametrize(
    ("model", "container", "scheme"),
    [
        ("llama", "compressed_tensors", "nvfp4"),
        ("tied", "compressed_tensors", "mxfp4a16"),
        ("biased", "compressed_tensors", "mxfp6"),
        ("biased", "modelopt", "nvfp4"),
        ("llama", "deepseek_fp8", "fp8_block"),
        ("llama", "ptqpipe", "e2m1/8/ue5m3"),
        ("qwen3_moe", "compressed_tensors", "nvfp4"),
        ("qwen3_moe", "modelopt", "nvfp4"),
        ("mixtral", "compressed_tensors", "nvfp4"),
        ("mixtral", "compressed_tensors", "fp8_block"),
        ("qwen3_moe", "mxfp8_hf", "mxfp8"),
        ("mixtral", "ptqpipe", "nvfp4"),
    ],
)
def test_logits_are_those_of_the_decoded_weights(
    sources: Mapping[str, Path], tmp_path: Path, model: str, container: str, scheme: str
) -> None:
    checkpoint = quantized(sources[model], container, scheme)
    loaded = load_model(checkpoint.save(tmp_path / "q"), activations="none")
    assert loaded.dtype is torch.float32
    assert not loaded.training
    twin = float_twin(sources[model], checkpoint.dequantized(container), tmp_path / "f")
    assert torch.equal(logits(loaded), logits(twin))


def test_mixed_schemes_reach_their_modules(sources: Mapping[str, Path], tmp_path: Path) -> None:
    def pick(module: str) -> str | None:
        return "nvfp4" if ".experts." in module else "mxfp8a16" if ".self_attn." in module else None

    checkpoint = quantized(sources["qwen3_moe"], "compressed_tensors", pick)
    twin = float_twin(sources["qwen3_moe"], checkpoint.dequantized("compressed_tensors"), tmp_path / "f")
    assert torch.equal(logits(load_model(checkpoint.save(tmp_path / "q"))), logits(twin))


@pytest.mark.parametrize(
    "scheme", ["nvfp4", "nvfp4_w4a4", "mxfp4", "mxfp8", "fp8_dynamic", "fp8_tensor", "fp8_block", "int4_g32"]
)
def test_weights_equal_the_decompression_of_compressed_tensors(
    sources: Mapping[str, Path], tmp_path: Path, scheme: str
) -> None:
    """In bfloat16, the only dtype that it decompresses to. Its reader is transformers without ours."""
    path = quantized(sources["llama"], "compressed_tensors", scheme).save(tmp_path / "q")
    unregister()
    try:
        theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
        theirs(TOKENS)  # the first forward decompresses
    finally:
        register()
    ours = load_model(path, dtype="bfloat16").state_dict()
    compared = 0
    for name, module in theirs.named_modules():
        if isinstance(module, torch.nn.Linear):
            assert torch.equal(module.weight, ours[f"{name}.weight"]), name
            compared += 1
    assert compared == 15


def test_conv1d_weights_are_turned_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=64, n_layer=1, n_head=2, n_positions=32, vocab_size=96)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "f")
    original, layout, scheme = read_checkpoint(tmp_path / "f"), get_container("ptqpipe"), get_scheme("nvfp4")
    tensors, targets, values = dict(original.tensors), [], {}
    for name in [name for name in original.tensors if name.endswith((".c_attn.weight", ".c_fc.weight"))]:
        q = absmax(tensors.pop(name).t().contiguous(), scheme.fmt)
        tensors.update({p.name: encode_part(p, q) for p in layout.parts(name, q.shape, scheme, transposed=True)})
        targets.append(Target(name, scheme, transposed=True))
        values[name] = q.dequantize().t().contiguous()
    configs = layout.configs(ConfigRequest(original.config, targets, [], {}))
    loaded = load_model(Checkpoint(configs, tensors).save(tmp_path / "q"))
    twin = float_twin(tmp_path / "f", values, tmp_path / "t")
    assert len(values) == 2
    assert torch.equal(logits(loaded), logits(twin))


def test_stacked_experts_of_gpt_oss(tmp_path: Path) -> None:
    config = transformers.GptOssConfig(
        **SIZES, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2, sliding_window=16
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "f")
    original, layout, scheme = read_checkpoint(tmp_path / "f"), get_container("gptoss_mxfp4"), get_scheme("mxfp4a16")
    tensors, targets, values = dict(original.tensors), [], {}
    for name in [n for n in original.tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts = [absmax(expert.T.contiguous(), scheme.fmt) for expert in tensors.pop(name)]
        for part in layout.parts(name, experts[0].shape, scheme, experts=4, transposed=True):
            tensors[part.name] = torch.stack([encode_part(part, q) for q in experts])
        targets.append(Target(name, scheme, 4, transposed=True))
        values[name] = torch.stack([q.dequantize().T for q in experts])
    kept = [name.removesuffix(".weight") for name, tensor in tensors.items() if tensor.dim() == 2]
    configs = layout.configs(ConfigRequest(original.config, targets, kept, {}))
    loaded = load_model(Checkpoint(configs, tensors).save(tmp_path / "q"))
    assert torch.equal(logits(loaded), logits(float_twin(tmp_path / "f", values, tmp_path / "t")))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_plain_checkpoint_is_what_transformers_loads(sources: Mapping[str, Path], dtype: str) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(sources["biased"], dtype=getattr(torch, dtype)).eval()
    assert torch.equal(logits(load_model(sources["biased"], dtype=dtype)), logits(theirs))


def test_auto_is_the_dtype_of_the_checkpoint(sources: Mapping[str, Path]) -> None:
    assert load_model(sources["tied"], dtype="auto").dtype is torch.bfloat16


def test_tied_heads_stay_tied(sources: Mapping[str, Path], tmp_path: Path) -> None:
    loaded = load_model(quantized(sources["tied"], "compressed_tensors", "nvfp4").save(tmp_path / "q"))
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_experts_that_llm_compressor_misnames_find_their_place(sources: Mapping[str, Path], tmp_path: Path) -> None:
    checkpoint = quantized(sources["mixtral"], "compressed_tensors", "nvfp4")
    names = {".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}
    tensors = {}
    for name, tensor in checkpoint.tensors.items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        tensors[name] = tensor
    assert tensors.keys() != checkpoint.tensors.keys()
    misnamed = load_model(Checkpoint(checkpoint.configs, tensors).save(tmp_path / "m"))
    assert torch.equal(logits(misnamed), logits(load_model(checkpoint.save(tmp_path / "q"))))


def broken(checkpoint: Checkpoint, **changes: torch.Tensor | None) -> Checkpoint:
    tensors = {**checkpoint.tensors, **{k: v for k, v in changes.items() if v is not None}}
    return Checkpoint(checkpoint.configs, {k: v for k, v in tensors.items() if changes.get(k, v) is not None})


def test_a_missing_tensor_is_named(sources: Mapping[str, Path], tmp_path: Path) -> None:
    checkpoint = broken(read_checkpoint(sources["llama"]), **{"model.norm.weight": None})
    with pytest.raises(CheckpointError, match=r"lacks 'model\.norm\.weight' \(1 in all\)"):
        load_model(checkpoint.save(tmp_path / "q"))


def test_a_quantized_weight_without_a_place_is_named(sources: Mapping[str, Path], tmp_path: Path) -> None:
    def stray(module: str) -> str | None:
        return "nvfp4" if module == "extra.o_proj" else None

    original = read_checkpoint(sources["llama"])
    more = Checkpoint(original.configs, {**original.tensors, "extra.o_proj.weight": torch.ones(32, 32).bfloat16()})
    path = more.save(tmp_path / "more")
    with pytest.raises(CheckpointError, match=r"quantized 'extra\.o_proj\.weight'"):
        load_model(quantized(path, "compressed_tensors", stray).save(tmp_path / "q"))
    with pytest.warns(UserWarning, match=r"no place for 'extra\.o_proj\.weight'"):
        load_model(path)


def test_another_shape_is_an_error_of_one_line(sources: Mapping[str, Path], tmp_path: Path) -> None:
    original = read_checkpoint(sources["llama"])
    path = broken(original, **{"model.norm.weight": torch.ones(7).bfloat16()}).save(tmp_path / "q")
    with pytest.raises(CheckpointError) as caught:
        load_model(path)
    assert "\n" not in str(caught.value)


def test_a_model_type_that_transformers_does_not_know(sources: Mapping[str, Path], tmp_path: Path) -> None:
    original = read_checkpoint(sources["llama"])
    path = Checkpoint({"config.json": {**original.config, "model_type": "nonesuch"}}, original.tensors).save(
        tmp_path / "q"
    )
    with pytest.raises(CheckpointError, match=r"transformers .* lacks: update transformers"):
        load_model(path)


@pytest.mark.parametrize(("option", "value"), [("dtype", "float4"), ("activations", "static")])
def test_unknown_options_are_named(sources: Mapping[str, Path], option: str, value: str) -> None:
    options: dict[str, Any] = {option: value}
    with pytest.raises(UsageError, match=value):
        load_model(sources["llama"], **options)


def test_the_package_offers_it(sources: Mapping[str, Path]) -> None:
    assert ptqpipe.load_model is load_model


def parameter_of(state: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Where a checkpoint's tensor is in a model of dense layers, or of fused experts (expert 0)."""
    if name in state:
        return state[name]
    parent, _, leaf = name.replace("block_sparse_moe", "mlp").removesuffix(".weight").rpartition(".0.")
    if leaf in ("down_proj", "w2"):
        return state[f"{parent}.down_proj"][0]
    assert leaf in ("gate_proj", "w1"), name
    return state[f"{parent}.gate_up_proj"][0].chunk(2)[0]


@pytest.mark.slow
@pytest.mark.shared
def test_peers_checkpoints_decode_to_the_recorded_weights(shared_dir: Path) -> None:
    """Parameters against the arrays beside the golden checkpoints, float32, bit for bit."""
    compared = 0
    for file in sorted((shared_dir / "golden" / "expected").glob("*.safetensors")):
        folder = shared_dir / "golden" / file.name.removesuffix(".dequant_f32.safetensors")
        state = load_model(folder, activations="none").state_dict()
        for name, values in load_file(file).items():
            assert torch.equal(parameter_of(state, name), values), (folder.name, name)
            compared += 1
    assert compared == 48


def test_a_tower_with_quantized_inputs_is_left_out_where_text_alone_is_given(tmp_path: Path) -> None:
    source, recipe = families.make_model(tmp_path / "model", "qwen3_vl"), tmp_path / "recipe.yaml"
    rules = '- {match: "*visual.blocks*", format: fp8_dynamic}\n- {match: "*", format: nvfp4}\n'
    found = []
    for at, text in enumerate((rules, rules.replace("fp8_dynamic", "keep"))):
        recipe.write_text(f"version: 1\nrules:\n{text}")
        done = ptqpipe.convert(source, recipe=recipe, out=tmp_path / f"out{at}", scale_search="absmax", workers=1)
        found.append(load_model(done.out, dtype="float32")(torch.tensor([[3, 5, 7]])).logits)
    assert torch.equal(*found)
