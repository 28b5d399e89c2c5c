"""Claims about from_pretrained after ``import ptqpipe``: it reads what load and load_model read; nothing else changes.

The claims of those are in test_load.py, test_input_quantizers.py and test_packed_load.py. Models whose weights are
decoded (``packed=False``) are compared bit for bit with load_model's.
"""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.quantizers import auto

import ptqpipe
from ptqpipe.checkpoint.layouts import get_container
from ptqpipe.errors import CheckpointError, PtqError, UsageError
from ptqpipe.models.source import Source
from ptqpipe.runtime import load, load_model
from ptqpipe.runtime.hf import PackedConfig, PackedQuantizer, _ranks, register, takes, unregister
from ptqpipe.runtime.loading import check_load
from tests.checkpoint.layouts.builders import Checkpoint, read_checkpoint
from tests.runtime.models import SIZES, float_twin, logits, packed_bytes, quantized


def from_pretrained(path: Path, **options: Any) -> Any:
    """The model, provided that every tensor found its place; decoded unless ``quantization_config`` says otherwise."""
    if "quantization_config" in (path / "config.json").read_text():
        options.setdefault("quantization_config", PackedConfig(packed=False))
    model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True, **options)
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not info[key], (key, sorted(info[key])[:4])
    return model.eval()


def save_stacked(kind: str, folder: Path) -> Any:
    """A model whose own checkpoint has a layer's experts in one tensor; [E, in, out] in Llama 4."""
    sizes = {**SIZES, "intermediate_size": 192}
    configs = {
        "llama4": lambda: transformers.Llama4TextConfig(**sizes, intermediate_size_mlp=192, num_local_experts=4),
        "minimax_m3": lambda: transformers.MiniMaxM3VLTextConfig(**sizes, num_local_experts=4, num_experts_per_tok=2),
        "zaya": lambda: transformers.ZayaConfig(
            **{key: value for key, value in sizes.items() if key != "intermediate_size"},
            num_experts=4, num_experts_per_tok=1, moe_intermediate_size=192, router_hidden_size=32,
        ),
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(configs[kind](), dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0 if parameter.dim() > 1 else 1, 0.05)
    model.save_pretrained(folder)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("model", "container", "scheme"),
    [
        ("qwen3_moe", "compressed_tensors", "nvfp4"),
        ("mixtral", "compressed_tensors", "nvfp4_w4a4"),
        ("qwen3_moe", "compressed_tensors", "fp8_block"),
        ("mixtral", "compressed_tensors", "mxfp8"),
        ("mixtral", "modelopt", "nvfp4"),
        ("llama", "modelopt", "nvfp4_w4a4"),
        ("tied", "modelopt", "mxfp8"),
        ("biased", "compressed_tensors", "mxfp4"),
        ("llama", "ptqpipe", "e2m1/8/ue5m3"),
        ("llama", "deepseek_fp8", "fp8_block"),
        ("qwen3_moe", "mxfp8_hf", "mxfp8"),
    ],
)
def test_from_pretrained_gives_the_model_of_load_model(
    sources: Mapping[str, Path], tmp_path: Path, model: str, container: str, scheme: str, dtype: torch.dtype
) -> None:
    path = quantized(sources[model], container, scheme).save(tmp_path / "q")
    theirs = from_pretrained(path, dtype=dtype)
    assert theirs.dtype is dtype
    assert torch.equal(logits(theirs), logits(load_model(path, dtype=dtype)))


@pytest.mark.parametrize("model", ["qwen3_moe", "mixtral"])
def test_nvfp4_experts_are_those_of_the_decode(sources: Mapping[str, Path], tmp_path: Path, model: str) -> None:
    """What transformers 5.23 alone loads wrong by the global scale."""
    checkpoint = quantized(sources[model], "compressed_tensors", "nvfp4")
    twin = float_twin(sources[model], checkpoint.dequantized("compressed_tensors"), tmp_path / "f")
    path = checkpoint.save(tmp_path / "q")
    assert torch.equal(logits(from_pretrained(path, dtype=torch.float32)), logits(twin))
    unregister()
    try:
        alone = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    finally:
        register()
    assert float((logits(alone) - logits(twin)).abs().max()) > 0.1


def stored_of(path: Path) -> dict[str, Any]:
    """The quantized weights of a checkpoint by name."""
    with Source.open(path) as source:
        return dict(source.stored)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama4", "minimax_m3", "zaya"])
def test_experts_with_a_matrix_each_find_stacks_that_transformers_knows_whole(kind: str, tmp_path: Path) -> None:
    """The oracle is the source itself: FP8 moves no weight by more than 2^-4 of it."""
    original, path = save_stacked(kind, tmp_path / "source"), tmp_path / "q"
    ptqpipe.convert(tmp_path / "source", out=path, format="fp8_dynamic")
    assert any(".experts.1.gate_proj." in name for name in read_checkpoint(path).tensors)
    config = PackedConfig(packed=False, activations="none")
    for model in (from_pretrained(path, quantization_config=config), load_model(path, activations="none")):
        for name, w in original.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name].float(), w.float(), rtol=2**-4, atol=1e-3)
    check_load(path)
    found = load(path, dtype="float32", activations="none")
    torch.testing.assert_close(logits(found), logits(load_model(path, activations="none")), rtol=1e-3, atol=1e-3)
    # Everything that is quantized stays packed, and its inputs are quantized as those of the decoded weights.
    bits8, bits16 = packed_bytes(found)
    quantized_numbers = sum(weight.shape[0] * weight.shape[1] for weight in stored_of(path).values())
    assert bits16 == 2 * quantized_numbers > bits8
    torch.testing.assert_close(logits(load(path, dtype="float32")), logits(load_model(path)), rtol=1e-3, atol=1e-3)


def test_layers_that_a_model_multiplies_itself_quantize_their_inputs(tmp_path: Path) -> None:
    """Jamba's dt_proj, which it calls where its config says that it is quantized: from_pretrained and load agree."""
    config = transformers.JambaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_experts=2, mamba_dt_rank=16, use_mamba_kernels=False, pad_token_id=0,
        attn_layer_period=2, attn_layer_offset=1,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "source")
    ptqpipe.convert(tmp_path / "source", out=tmp_path / "q", format="fp8_dynamic")
    inputs: list[torch.Tensor] = []
    for model in (load(tmp_path / "q", dtype="float32"), load_model(tmp_path / "q")):
        layer = model.model.layers[0].mamba.dt_proj
        hook = layer.register_forward_hook(lambda module, args, y: inputs.append(args[0]))
        expected = logits(model)
        hook.remove()
        found = from_pretrained(tmp_path / "q", dtype=torch.float32, quantization_config=PackedConfig())
        torch.testing.assert_close(logits(found), expected, rtol=1e-4, atol=1e-5)
    assert len(inputs) == 2


def test_a_quantized_weight_without_a_place_is_named(sources: Mapping[str, Path], tmp_path: Path) -> None:
    original = read_checkpoint(sources["llama"])
    more = Checkpoint(original.configs, {**original.tensors, "extra.o_proj.weight": torch.ones(32, 32).bfloat16()})
    source = more.save(tmp_path / "more")
    stray = quantized(source, "compressed_tensors", lambda name: "nvfp4" if name == "extra.o_proj" else None)
    path = stray.save(tmp_path / "q")
    with pytest.raises(CheckpointError, match=r"quantized 'extra\.o_proj\.weight' that its model has no place for"):
        AutoModelForCausalLM.from_pretrained(path)


def test_mixed_modelopt(sources: Mapping[str, Path], tmp_path: Path) -> None:
    def pick(module: str) -> str | None:
        return "mxfp8" if ".self_attn." in module else "nvfp4_w4a4" if ".mlp." in module else None

    path = quantized(sources["llama"], "modelopt", pick).save(tmp_path / "q")
    assert torch.equal(logits(from_pretrained(path, dtype=torch.float32)), logits(load_model(path)))


def test_the_class_itself_works_and_is_left_as_it_was(sources: Mapping[str, Path], tmp_path: Path) -> None:
    path = quantized(sources["llama"], "modelopt", "nvfp4").save(tmp_path / "q")
    model = transformers.LlamaForCausalLM.from_pretrained(
        path, dtype=torch.float32, quantization_config=PackedConfig(packed=False)
    )
    assert "_load_pretrained_model" not in vars(transformers.LlamaForCausalLM)
    assert torch.equal(logits(model.eval()), logits(load_model(path)))


def test_a_load_that_fails_does_not_disturb_the_next(sources: Mapping[str, Path], tmp_path: Path) -> None:
    checkpoint = quantized(sources["llama"], "modelopt", "nvfp4")
    damaged = Checkpoint(
        checkpoint.configs,
        {k: v for k, v in checkpoint.tensors.items() if not k.endswith("0.mlp.up_proj.weight_scale")},
    )
    with pytest.raises(PtqError, match="up_proj"):
        from_pretrained(damaged.save(tmp_path / "d"))
    plain = from_pretrained(sources["llama"], dtype=torch.float32)
    assert torch.equal(logits(plain), logits(load_model(sources["llama"])))


def test_what_is_saved_is_the_float_model(sources: Mapping[str, Path], tmp_path: Path) -> None:
    path = quantized(sources["qwen3_moe"], "compressed_tensors", "nvfp4").save(tmp_path / "q")
    model = from_pretrained(path, dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved")
    again = from_pretrained(tmp_path / "saved")
    assert getattr(again.config, "quantization_config", None) is None
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_weights_stay_packed_unless_told_otherwise(sources: Mapping[str, Path], tmp_path: Path, model: str) -> None:
    """4.5 bits a weight (and 32 for each matrix), and the very model of `load`."""
    path = quantized(sources[model], "compressed_tensors", "nvfp4").save(tmp_path / "q")
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    packed, floats = packed_bytes(theirs)
    assert floats > 0
    assert packed == pytest.approx(floats * 4.5 / 16, rel=1e-3)
    assert torch.equal(logits(theirs), logits(load(path, dtype="float32")))


def test_a_packed_model_says_that_it_cannot_be_saved(sources: Mapping[str, Path], tmp_path: Path) -> None:
    path = quantized(sources["llama"], "compressed_tensors", "nvfp4").save(tmp_path / "q")
    model = AutoModelForCausalLM.from_pretrained(path)
    with pytest.raises(ValueError, match="not serializable"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_plain_models_and_asked_for_quantizers_stay_with_transformers(
    sources: Mapping[str, Path], tmp_path: Path
) -> None:
    assert not isinstance(getattr(from_pretrained(sources["llama"]), "hf_quantizer", None), PackedQuantizer)
    checkpoint = quantized(sources["llama"], "compressed_tensors", "nvfp4")
    described: dict[str, Any] = dict(checkpoint.config)["quantization_config"]  # type: ignore[assignment]
    config = transformers.CompressedTensorsConfig(**described, dequantize=True)
    path = checkpoint.save(tmp_path / "q")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, quantization_config=config)
    assert torch.equal(logits(model.eval()), logits(load_model(path, dtype="bfloat16")))


def test_a_config_made_by_transformers_own_factory_is_ours(sources: Mapping[str, Path], tmp_path: Path) -> None:
    """lm-eval reads config.json itself and passes the quantization config that it made of it."""
    checkpoint = quantized(sources["qwen3_moe"], "compressed_tensors", "nvfp4")
    path = checkpoint.save(tmp_path / "q")
    config = auto.AutoQuantizationConfig.from_dict(checkpoint.config["quantization_config"])
    model = from_pretrained(path, dtype=torch.float32, quantization_config=config)
    assert torch.equal(logits(model), logits(load(path, dtype="float32")))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"tp_size": 2, "tp_plan": {"model.layers.*.self_attn.o_proj": "rowwise"}}, "PackedConfig"),
        ({"fsdp_size": 2}, "tensor parallelism alone"),
        ({"tp_size": 2, "pp_size": 2}, "tensor parallelism alone"),
    ],
)
def test_parallelism_that_packed_models_lack_is_refused(asked: dict[str, Any], message: str) -> None:
    config = SimpleNamespace(distributed_config=DistributedConfig(**asked))
    with pytest.raises(UsageError, match=message):
        _ranks(SimpleNamespace(config=config), None)


def test_integers_stay_with_transformers() -> None:
    args = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
    described = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": args}},
    }
    assert not takes(described)
    assert not takes({"quant_method": "gptq", "bits": 4})
    assert not takes({"quant_method": "fp8"} if torch.accelerator.is_available() else {"quant_method": "awq"})


def test_registering_is_undone_by_unregistering() -> None:
    merge, read = auto.AutoHfQuantizer.merge_quantization_configs, auto.AutoQuantizationConfig.from_dict
    register()
    assert auto.AutoHfQuantizer.merge_quantization_configs is merge
    unregister()
    try:
        assert auto.AutoHfQuantizer.merge_quantization_configs is not merge
        assert auto.AutoQuantizationConfig.from_dict is not read
        assert "modelopt" not in auto.AUTO_QUANTIZATION_CONFIG_MAPPING
        assert "ptqpipe" not in auto.AUTO_QUANTIZER_MAPPING
        unregister()
    finally:
        register()
    assert "modelopt" in auto.AUTO_QUANTIZATION_CONFIG_MAPPING


@pytest.mark.slow
@pytest.mark.parametrize(
    "imports",
    [
        pytest.param("import ptqpipe; from transformers import AutoModelForCausalLM", marks=pytest.mark.interpreter),
        "from transformers import AutoModelForCausalLM; import ptqpipe",  # a fork has transformers already
        pytest.param("import ptqpipe.runtime.hf", marks=pytest.mark.interpreter),
    ],
)
@pytest.mark.usefixtures("forks")
def test_any_order_of_imports_registers(imports: str) -> None:
    check = "from transformers.quantizers import auto; assert 'modelopt' in auto.AUTO_QUANTIZATION_CONFIG_MAPPING"
    code = f"import warnings; warnings.simplefilter('error', UserWarning); {imports}; {check}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_importing_ptqpipe_does_not_import_transformers() -> None:
    code = "import sys, ptqpipe; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)


def test_containers_know_what_is_taken() -> None:
    """Every container's method that transformers cannot read is registered."""
    for name in ("modelopt", "ptqpipe"):
        assert get_container(name).QUANT_METHOD in auto.AUTO_QUANTIZATION_CONFIG_MAPPING


@pytest.mark.slow
@pytest.mark.shared
def test_every_golden_checkpoint_loads_as_load_model_does(shared_dir: Path) -> None:
    tokens = torch.randint(3, 500, (2, 32), generator=torch.Generator().manual_seed(3))
    folders = sorted(path.parent for path in (shared_dir / "golden").glob("*/config.json"))
    assert len(folders) == 24
    for folder in folders:
        theirs = from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            assert torch.equal(theirs(tokens).logits, load_model(folder)(tokens).logits), folder.name
