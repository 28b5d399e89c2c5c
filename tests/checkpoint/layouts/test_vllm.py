"""Claims about vLLM's own matching, where vLLM is installed: the rules that test_configs.py states are its rules."""

import copy
import json
from typing import Any

import pytest
import torch

from ptqpipe.checkpoint.layouts import ConfigRequest, Target, get_container
from ptqpipe.numerics.schemes import get_scheme

vllm = pytest.importorskip("vllm", reason="vLLM is not installed here; it pins its own transformers")

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
KEPT = [f"model.layers.1.self_attn.{leaf}" for leaf in ATTENTION] + ["model.embed_tokens", "lm_head"]


def wanted() -> list[Target]:
    """FP8 attention (layer 1 kept) and NVFP4 MLPs (the last layer's FP8) of twelve layers."""
    found = []
    for layer in range(12):
        for leaf in ATTENTION if layer != 1 else ():
            found.append(Target(f"model.layers.{layer}.self_attn.{leaf}.weight", get_scheme("fp8_dynamic")))
        for leaf in MLP:
            scheme = get_scheme("fp8_dynamic" if layer == 11 else "nvfp4")
            found.append(Target(f"model.layers.{layer}.mlp.{leaf}.weight", scheme))
    return found


def quantization(container: str, targets: list[Target], kept: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(quantization_config, hf_quant_config.json or {}), as JSON gives them back."""
    written = get_container(container).configs(ConfigRequest({}, targets, kept, {"version": "1"}))
    again = json.loads(json.dumps(written))
    return again["config.json"]["quantization_config"], again.get("hf_quant_config.json", {})


def test_compressed_tensors_mixed_groups_reach_fused_layers() -> None:
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors as theirs

    config = theirs.CompressedTensorsConfig.from_config(quantization("compressed_tensors", wanted(), KEPT)[0])
    config.packed_modules_mapping = FUSED
    layer_class = type("QKVParallelLinear", (torch.nn.Module,), {})()
    for layer in range(12):
        bits = {}
        for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"):
            scheme = config.get_scheme_dict(layer_class, f"model.layers.{layer}.{name}")
            bits[name] = scheme and scheme["weights"].num_bits
        attention, mlp = (None if layer == 1 else 8), (8 if layer == 11 else 4)
        assert list(bits.values()) == [attention, attention, mlp, mlp]


@pytest.mark.parametrize(
    ("scheme", "class_name", "algorithm"),
    [
        ("nvfp4", "ModelOptNvFp4Config", "W4A16_NVFP4"),
        ("nvfp4_w4a4", "ModelOptNvFp4Config", "NVFP4"),
        ("fp8_dynamic", "ModelOptFp8Config", "FP8_PER_CHANNEL_PER_TOKEN"),
        ("fp8_block", "ModelOptFp8Config", "FP8_PB_WO"),
        ("mxfp8", "ModelOptMxFp8Config", "MXFP8"),
    ],
)
def test_modelopt_is_understood_from_either_file(scheme: str, class_name: str, algorithm: str) -> None:
    from vllm.model_executor.layers.quantization import modelopt as theirs

    targets = [Target(f"model.layers.0.mlp.{leaf}.weight", get_scheme(scheme)) for leaf in MLP]
    for described in quantization("modelopt", targets, [*KEPT, "model.layers.0.mlp.gate"]):
        config = getattr(theirs, class_name).from_config(copy.deepcopy(described))
        config.packed_modules_mapping = FUSED
        assert config.quant_method == algorithm
        for name in ("model.layers.1.self_attn.qkv_proj", "lm_head", "model.layers.0.mlp.gate"):
            assert config.is_layer_excluded(name), name
        for name in ("model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.down_proj"):
            assert not config.is_layer_excluded(name), name


def test_modelopt_mixed_layers_are_found_through_their_shards() -> None:
    from vllm.model_executor.layers.quantization import modelopt as theirs

    for described in quantization("modelopt", wanted(), KEPT):
        config = theirs.ModelOptMixedPrecisionConfig.from_config(copy.deepcopy(described))
        config.packed_modules_mapping = FUSED
        find = config._resolve_quant_algo
        assert find("model.layers.0.self_attn.qkv_proj") == "FP8_PER_CHANNEL_PER_TOKEN"
        assert find("model.layers.1.self_attn.qkv_proj") is None
        assert find("model.layers.10.mlp.gate_up_proj") == "W4A16_NVFP4"
        assert find("model.layers.11.mlp.down_proj") == "FP8_PER_CHANNEL_PER_TOKEN"


def test_deepseek_blocks_skip_what_is_kept() -> None:
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    targets = [Target(f"model.layers.0.mlp.{leaf}.weight", get_scheme("fp8_block")) for leaf in MLP]
    kept = [*KEPT, "model.layers.0.mlp.gate", "model.layers.3.mlp.experts.gate_up_proj"]
    config = Fp8Config.from_config(quantization("deepseek_fp8", targets, kept)[0])
    assert config.weight_block_size == [128, 128]
    for name, skipped in {
        "model.layers.1.self_attn.qkv_proj": True,
        "model.layers.0.mlp.gate": True,
        "model.layers.0.mlp.gate_up_proj": False,
        "model.layers.3.mlp.experts": True,
        "model.layers.2.mlp.experts": False,
    }.items():
        assert is_layer_skipped(prefix=name, ignored_layers=config.ignored_layers, fused_mapping=FUSED) is skipped, name
