"""Claims about what readers get wrong or call otherwise: warned of, or listed by the names that they look for."""

from fnmatch import fnmatchcase
from typing import Any

import pytest

from ptqpipe.checkpoint.layouts import ConfigRequest, Target, get_container
from ptqpipe.models.layout_issues import layout_warnings
from ptqpipe.numerics.schemes import get_scheme
from tests.checkpoint.layouts.test_configs import MLP, modules, targets

EXPERT = "model.layers.0.mlp.experts.0.up_proj"
LLAMA = {"architectures": ["LlamaForCausalLM"]}


@pytest.mark.parametrize(
    ("container", "names", "scheme", "config", "says"),
    [
        ("compressed_tensors", [EXPERT], "nvfp4", {}, "loads NVFP4 experts wrong"),
        ("compressed_tensors", [EXPERT], "fp8_block", {}, "the container deepseek_fp8"),
        ("compressed_tensors", [EXPERT], "mxfp8", {}, "the container mxfp8_hf"),
        (
            "compressed_tensors",
            [EXPERT],
            "fp8_tensor",
            {},
            "SGLang 0.5.23 refuse experts with fp8_tensor",
        ),
        ("compressed_tensors", ["a.b"], "mxfp6", {}, "have no mxfp6"),
        ("compressed_tensors", ["a.b"], "mxfp4", {}, "SGLang"),
        ("compressed_tensors", ["a.b"], "mxfp8a16", {}, "quantizes the activations"),
        ("compressed_tensors", ["a.b"], "fp8_dynamic", {"dtype": "float16"}, "load with dtype=bfloat16"),
        ("compressed_tensors", [EXPERT], "mxfp4", {"model_type": "gpt_oss"}, "the container gptoss_mxfp4"),
        ("compressed_tensors", [EXPERT], "fp8_dynamic", {"model_type": "qwen3_vl_moe"}, "leaves its experts random"),
        ("deepseek_fp8", [EXPERT], "fp8_block", {"model_type": "llama4"}, "the container compressed_tensors"),
        ("deepseek_fp8", ["a.b"], "fp8_block", LLAMA, "without its scales"),
        ("mxfp8_hf", ["a.b"], "mxfp8", LLAMA, "without its scales"),
        ("modelopt", ["a.b"], "mxfp8", LLAMA, "without its scales"),
        ("modelopt", ["a.b"], "fp8_dynamic", {}, "SGLang 0.5.23 reads no FP8 per channel"),
        ("modelopt", ["a.b"], "fp8_block", {}, "SGLang 0.5.23 reads no FP8 per channel"),
        ("modelopt", [EXPERT], "nvfp4", {}, "quantize the inputs of these experts"),
        ("modelopt", ["a.b"], "nvfp4", {}, "transformers does not read"),
        ("modelopt", [EXPERT], "fp8_dynamic", {}, "no experts with FP8 per channel"),
        ("mxfp8_hf", ["a.b"], "mxfp8", {}, "vLLM 0.32 refuses"),
        ("gptoss_mxfp4", [EXPERT], "mxfp4", {"model_type": "mixtral"}, "not 'mixtral'"),
        ("ptqpipe", ["a.b"], "nvfp4", {}, "only ptqpipe reads"),
    ],
)
def test_known_faults_of_readers_are_warned_of(
    container: str, names: list[str], scheme: str, config: dict[str, Any], says: str
) -> None:
    warnings = layout_warnings(container, targets(names, scheme), config)
    assert any(says in line for line in warnings), warnings
    assert all("\n" not in line and ("; " in line) for line in warnings)


def test_what_sglang_reads_is_not_warned_of() -> None:
    """As found by ``labs/readers/sglang_loads.py``."""
    qwen = {"architectures": ["Qwen3ForCausalLM"]}
    for container, scheme, config in (
        ("deepseek_fp8", "fp8_block", qwen),
        ("mxfp8_hf", "mxfp8", qwen),
        ("modelopt", "mxfp8", qwen),
        ("modelopt", "nvfp4", LLAMA),
        ("modelopt", "fp8_static", LLAMA),
        ("compressed_tensors", "fp8_block", LLAMA),
    ):
        assert not [x for x in layout_warnings(container, targets(["a.b"], scheme), config) if "SGLang" in x]


@pytest.mark.parametrize("scheme", ["nvfp4", "nvfp4_w4a4", "fp8_dynamic", "fp8_tensor", "fp8_block"])
def test_dense_models_of_the_portable_schemes_need_no_warning(scheme: str) -> None:
    wanted = targets(modules(MLP, range(2)), scheme)
    assert layout_warnings("compressed_tensors", wanted, {"dtype": "bfloat16"}) == []
    # Llama 4's experts become linear layers in transformers, so NVFP4 is right there.
    experts = targets(["model.layers.0.feed_forward.experts.0.up_proj"], "nvfp4")
    assert layout_warnings("compressed_tensors", experts, {"model_type": "llama4"}) == []


@pytest.mark.parametrize(
    ("kind", "kept", "other"),
    [  # as SGLang's nemotron_h.py, falcon_mamba.py and layers/attention/vision.py have them
        ("mamba", "backbone.layers.0.mixer.dt_proj", "model.layers.0.mixer.dt_proj"),
        ("nemotron_h", "backbone.layers.0.mixer.in_proj", "model.layers.0.mixer.in_proj"),
        ("mistral3", "vision_tower.layers.0.attention.o_proj", "vision_tower.layers.0.attention.proj"),
    ],
)
def test_what_sglang_calls_otherwise_is_listed_by_both_names(kind: str, kept: str, other: str) -> None:
    target = Target("model.layers.0.mlp.down_proj.weight", get_scheme("fp8_dynamic"))
    files = get_container("compressed_tensors").configs(ConfigRequest({"model_type": kind}, [target], [kept]))
    assert {kept, other} <= {*files["config.json"]["quantization_config"]["ignore"]}


@pytest.mark.parametrize("container", ["compressed_tensors", "modelopt", "deepseek_fp8"])
def test_what_readers_fuse_is_listed_by_the_name_of_the_whole_too(container: str) -> None:
    # qkv_proj and gate_up_proj: what SGLang asks is_layer_excluded and should_ignore_layer about
    attention, mlp = "model.layers.0.self_attn", "model.layers.1.mlp"
    kept = [f"{attention}.{leaf}_proj" for leaf in "qkv"] + [f"{mlp}.{leaf}_proj" for leaf in ("gate", "up")]
    kept.append("model.layers.2.mlp.experts.0.gate_proj")  # experts have a list of their own
    target = Target("model.layers.0.mlp.down_proj.weight", get_scheme("fp8_block"))
    files = get_container(container).configs(ConfigRequest({"model_type": "llama"}, [target], kept))
    described = files["config.json"]["quantization_config"]
    listed = described.get("ignore", described.get("modules_to_not_convert"))
    assert {*kept, f"{attention}.qkv_proj", f"{mlp}.gate_up_proj"} <= {*listed}
    assert not any("experts" in name and "gate_up_proj" in name for name in listed)


@pytest.mark.parametrize("container", ["compressed_tensors", "modelopt", "deepseek_fp8"])
def test_the_layer_that_sglang_drafts_with_is_listed_by_the_names_of_its_own_model(container: str) -> None:
    # deepseek_nextn.py and glm4_moe_nextn.py: "decoder" for the layer behind the last, a head below "shared_head"
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    kept = [
        "model.layers.1.self_attn.o_proj",
        "model.layers.2.self_attn.o_proj",
        "model.layers.2.mlp.experts.0.up_proj",
    ]
    target = Target("model.layers.0.self_attn.o_proj.weight", get_scheme("fp8_block"))
    for count in (0, 1):
        request = ConfigRequest({**config, "num_nextn_predict_layers": count}, [target], kept)
        described = get_container(container).configs(request)["config.json"]["quantization_config"]
        listed = {*described.get("ignore", described.get("modules_to_not_convert"))}
        own = {"model.decoder.self_attn.o_proj", "model.decoder.mlp.experts.0.up_proj", "model.shared_head.head"}
        assert listed & own == (own if count else set())
        assert {*kept, "lm_head"} <= listed


def test_a_latent_projection_that_is_kept_does_not_speak_for_those_of_other_layers() -> None:
    # is_layer_excluded of SGLang's modelopt_quant.py goes by the last part of these names, vLLM's by the whole alone
    kept = [f"model.layers.1.self_attn.{leaf}" for leaf in ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "o_proj")]
    names = [f"model.layers.0.self_attn.{leaf}.weight" for leaf in ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj")]
    targets = [Target(name, get_scheme("nvfp4")) for name in names]
    files = get_container("modelopt").configs(ConfigRequest({"model_type": "deepseek_v3"}, targets, kept))
    listed = files["config.json"]["quantization_config"]["ignore"]
    assert not {name.rpartition(".")[2] for name in listed} & {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"}
    assert all(any(fnmatchcase(name, entry) for entry in listed) for name in kept)
    assert not any(fnmatchcase(name.removesuffix(".weight"), entry) for name in names for entry in listed)
    whole = {f"model.layers.1.self_attn.fused_qkv_a_proj{end}" for end in ("", "_with_mqa")}
    assert whole <= {*listed}


@pytest.mark.parametrize("container", ["compressed_tensors", "modelopt"])
def test_what_vllm_calls_otherwise_is_listed_by_both_names(container: str) -> None:
    kept = ["model.altup_projections.0", "model.altup_unembed_projections.0", "model.per_layer_model_projection"]
    target = Target("model.layers.0.mlp.up_proj.weight", get_scheme("nvfp4"))
    for kind, more in (
        ("gemma3n", ["model.self_decoder.altup_projections.0", "model.self_decoder.per_layer_model_projection"]),
        ("gemma3n_text", ["model.self_decoder.altup_projections.0", "model.self_decoder.per_layer_model_projection"]),
        ("llama", []),
    ):
        files = get_container(container).configs(ConfigRequest({"model_type": kind}, [target], kept))
        listed = files["config.json"]["quantization_config"]["ignore"]
        assert [name for name in listed if name != "lm_head"] == [*kept, *more]
