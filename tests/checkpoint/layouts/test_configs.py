"""Claims about config files: what readers accept, what they match, and what they are warned of."""

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import match_named_modules, match_targets

from ptqpipe.checkpoint.layouts import ConfigRequest, Target, get_container
from ptqpipe.checkpoint.layouts._config_groups import name_patterns
from ptqpipe.errors import FormatError
from ptqpipe.numerics.schemes import get_scheme

LAYER = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
SOURCE = {
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 64,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def modules(leaves: Sequence[str], layers: range, root: str = "model.layers") -> list[str]:
    return [f"{root}.{layer}.{leaf}" for layer in layers for leaf in leaves]


def targets(names: Sequence[str], scheme: str) -> list[Target]:
    return [Target(f"{name}.weight", get_scheme(scheme)) for name in names]


def quantization(container: str, wanted: Sequence[Target], kept: Sequence[str] = (), **source: Any) -> dict[str, Any]:
    written = get_container(container).configs(ConfigRequest({**SOURCE, **source}, wanted, kept, {"version": "1"}))
    found: dict[str, Any] = written["config.json"]["quantization_config"]
    return found


# --- compressed-tensors


def test_one_scheme_is_the_minimal_config_of_every_reader() -> None:
    args = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    found = quantization("compressed_tensors", targets(modules(LAYER, range(2)), "nvfp4_w4a4"), ["model.embed_tokens"])
    assert found == {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**args, "dynamic": False, "scale_dtype": "torch.float8_e4m3fn"},
                "input_activations": {**args, "dynamic": "local", "scale_dtype": "torch.float8_e4m3fn"},
                "format": "nvfp4-pack-quantized",
            }
        },
        "ignore": ["model.embed_tokens", "lm_head"],
        "ptqpipe": {"version": "1"},
    }


@pytest.mark.parametrize(
    ("scheme", "weights", "inputs", "format_name"),
    [
        ("nvfp4", (4, "tensor_group", 16, None, "torch.float8_e4m3fn"), None, "nvfp4-pack-quantized"),
        ("mxfp4", (4, "group", 32, None, "torch.uint8"), (4, "group", 32, True, "torch.uint8"), "mxfp4-pack-quantized"),
        ("mxfp4_w4a8", (4, "group", 32, None, "torch.uint8"), (8, "token", None, True, None), "mxfp4-pack-quantized"),
        ("mxfp4a16", (4, "group", 32, None, "torch.uint8"), None, "mxfp4-pack-quantized"),
        ("mxfp6", (6, "group", 32, None, "torch.uint8"), None, "mxfp6-pack-quantized"),
        ("mxfp8", (8, "group", 32, None, "torch.uint8"), (8, "group", 32, True, "torch.uint8"), "mxfp8-quantized"),
        ("fp8_dynamic", (8, "channel", None, None, None), (8, "token", None, True, None), "float-quantized"),
        ("fp8_tensor", (8, "tensor", None, None, None), (8, "token", None, True, None), "float-quantized"),
        ("fp8_block", (8, "block", None, [128, 128], None), (8, "group", 128, True, None), "float-quantized"),
        ("int4_g128", (4, "group", 128, None, None), None, "pack-quantized"),
        ("int8", (8, "channel", None, None, None), None, "pack-quantized"),
        ("int8_w8a8", (8, "channel", None, None, None), (8, "token", None, True, None), "int-quantized"),
    ],
)
def test_arguments_of_every_scheme(scheme: str, weights: Any, inputs: Any, format_name: str) -> None:
    group = quantization("compressed_tensors", targets(["a.b"], scheme))["config_groups"]["group_0"]
    args = group["weights"]
    keys = ("num_bits", "strategy", "group_size", "block_structure", "scale_dtype")
    assert tuple(args.get(key) for key in keys) == weights
    kind = "int" if scheme.startswith("int") else "float"
    assert (args["type"], args["symmetric"], args["dynamic"]) == (kind, True, False)
    assert group["format"] == format_name
    given = group.get("input_activations")
    if inputs is None:
        assert given is None
        return
    assert tuple(given.get(key) for key in ("num_bits", "strategy", "group_size", "dynamic", "scale_dtype")) == inputs
    assert given["type"] == kind


@pytest.mark.parametrize("scheme", ["nvfp4", "nvfp4_w4a4", "mxfp4", "mxfp6", "mxfp8", "fp8_dynamic", "fp8_block"])
def test_the_library_accepts_the_config_and_knows_every_key(scheme: str) -> None:
    """Groups and arguments forbid unknown keys there; what we add stands at the top."""
    config = QuantizationConfig.model_validate(quantization("compressed_tensors", targets(["a.b"], scheme)))
    assert config.quantization_status == "compressed"


def test_the_source_keeps_its_keys_and_loses_its_old_quantization() -> None:
    wanted = targets(["model.layers.0.mlp.up_proj"], "nvfp4")
    text = {"text_config": {"model_type": "x", "quantization_config": {"quant_method": "fp8"}}}
    written = get_container("compressed_tensors").configs(ConfigRequest({**SOURCE, **text}, wanted, [], {}))
    config = written["config.json"]
    assert {k: config[k] for k in ("model_type", "dtype", "hidden_size")} == {
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": 64,
    }
    assert config["text_config"] == {"model_type": "x"}
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert "weight_block_size" not in config["quantization_config"]


def test_what_is_kept_is_ignored_by_exact_name_and_the_head_always_is() -> None:
    wanted = targets(modules(MLP, range(2)), "nvfp4")
    kept = ["model.embed_tokens.weight", *modules(LAYER, range(2)), "model.layers.0.mlp.gate"]
    ignore = quantization("compressed_tensors", wanted, kept)["ignore"]
    fused = [f"model.layers.{layer}.self_attn.qkv_proj" for layer in range(2)]
    assert ignore == ["model.embed_tokens", *modules(LAYER, range(2)), "model.layers.0.mlp.gate", *fused, "lm_head"]
    assert not any(name.startswith("re:") for name in ignore)
    head = quantization("compressed_tensors", [*wanted, *targets(["lm_head"], "nvfp4")], [])
    assert head["ignore"] == []


def test_kept_stacks_of_experts_are_ignored_under_the_names_that_vllm_asks_for() -> None:
    wanted = targets(modules(LAYER, range(2)), "nvfp4")
    kept = [f"model.layers.{layer}.mlp.experts.{p}" for layer in range(2) for p in ("gate_up_proj", "down_proj")]
    ignore = quantization("compressed_tensors", wanted, kept)["ignore"]
    asked = "model.layers.1.mlp.experts.0.gate_proj"
    assert [name for name in ignore if name.startswith("re:")] != []
    assert vllm_ignores(asked, ignore)
    # Their biases, kept beside quantized experts, ignore nothing.
    experts = targets(["model.layers.0.mlp.experts.0.gate_proj"], "nvfp4")
    ignore = quantization("compressed_tensors", experts, ["model.layers.0.mlp.experts.gate_up_proj_bias"])["ignore"]
    assert not vllm_ignores("model.layers.0.mlp.experts.0.gate_proj", ignore)


def test_kept_experts_are_listed_under_their_module_and_their_biases_never() -> None:
    kept = ["model.layers.1.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.gate_up_proj_bias"]
    stack = Target("model.layers.0.mlp.experts.gate_up_proj", get_scheme("mxfp4a16"), 4, transposed=True)
    expected = ["model.layers.1.mlp.experts.gate_up_proj", "lm_head", "model.layers.1.mlp.experts"]
    assert quantization("gptoss_mxfp4", [stack], kept)["modules_to_not_convert"] == expected
    one = targets(["model.layers.0.mlp.experts.0.gate_proj"], "fp8_block")
    assert quantization("deepseek_fp8", one, kept)["modules_to_not_convert"] == expected


# --- Matching, by the readers' rules


def vllm_match(target: str, name: str) -> bool:
    """How vLLM 0.32 compares a name with an entry: equal, or ``re.match`` after ``re:``."""
    return re.match(target[3:], name) is not None if target.startswith("re:") else target == name


def vllm_ignores(name: str, ignore: Sequence[str]) -> bool:
    return any(vllm_match(entry, name) for entry in ignore)


FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def vllm_group(name: str, config: dict[str, Any]) -> str | None:
    """The group that vLLM gives a module of its own: in file order, first by name, then by all shards of a fused one,
    then by a class name contained in the class of the layer."""
    parent, _, leaf = name.rpartition(".")
    shards = [f"{parent}.{shard}" for shard in FUSED[leaf]] if leaf in FUSED else [name]
    ignored = [vllm_ignores(shard, config["ignore"]) for shard in shards]
    assert len(set(ignored)) == 1, f"{name}: some shards are ignored"
    if ignored[0]:
        return None
    entries = [(t, key) for key, group in config["config_groups"].items() for t in group["targets"]]
    first = [next((key for t, key in entries if vllm_match(t, shard)), None) for shard in shards]
    if None not in first:
        assert len(set(first)) == 1, f"{name}: shards in different groups"
        return first[0]
    return next((key for t, key in entries if t == "Linear"), None)


def ct_groups(names: Sequence[str], config: dict[str, Any]) -> dict[str, str | None]:
    """The group that compressed-tensors (and so transformers) gives every Linear of a model with these names."""
    model = torch.nn.Module()
    for name in names:
        owner = model
        *path, leaf = name.split(".")
        for piece in path:
            if not hasattr(owner, piece):
                owner.add_module(piece, torch.nn.Module())
            owner = getattr(owner, piece)
        owner.add_module(leaf, torch.nn.Linear(1, 1, device="meta"))
    by_target = {t: key for key, group in config["config_groups"].items() for t in group["targets"]}
    matched = match_named_modules(model, list(by_target), config["ignore"])
    found: dict[str, str | None] = dict.fromkeys(names)
    for name, module in matched:
        found[name] = by_target[match_targets(name, module, by_target)[0]]
    return found


def mixed_model() -> tuple[list[Target], list[str]]:
    """Attention in FP8 except layer 1 (kept), the MLPs in NVFP4 except the last layer's, which is FP8."""
    layers = range(12)
    attention = [n for n in modules(LAYER, layers) if ".layers.1." not in n]
    last, others = modules(MLP, range(11, 12)), modules(MLP, range(11))
    wanted = targets([*attention, *last], "fp8_dynamic") + targets(others, "nvfp4")
    return wanted, [*modules(LAYER, range(1, 2)), "model.embed_tokens", "lm_head"]


def test_mixed_groups_are_disjoint_and_both_readers_find_them() -> None:
    wanted, kept = mixed_model()
    config = quantization("compressed_tensors", wanted, kept)
    assert config["format"] == "mixed-precision"
    assert {group["format"] for group in config["config_groups"].values()} == {
        "float-quantized",
        "nvfp4-pack-quantized",
    }
    group_of = {g["format"]: key for key, g in config["config_groups"].items()}
    expected = {
        t.module: group_of["float-quantized" if t.scheme.name == "fp8_dynamic" else "nvfp4-pack-quantized"]
        for t in wanted
    }
    everything = [*expected, *kept]
    assert ct_groups(everything, config) == {**expected, **dict.fromkeys(kept)}
    for name in everything:
        matching = [t for g in config["config_groups"].values() for t in g["targets"] if vllm_match(t, name)]
        assert len(matching) == (name in expected), name
    for layer in range(12):
        prefix = f"model.layers.{layer}"
        qkv = vllm_group(f"{prefix}.self_attn.qkv_proj", config)
        assert qkv == (None if layer == 1 else expected[f"{prefix}.self_attn.q_proj"])
        assert vllm_group(f"{prefix}.mlp.gate_up_proj", config) == expected[f"{prefix}.mlp.up_proj"]
        assert vllm_group(f"{prefix}.mlp.down_proj", config) == expected[f"{prefix}.mlp.down_proj"]
    QuantizationConfig.model_validate(config)


def test_expressions_hold_for_the_names_that_readers_make_of_them() -> None:
    """vLLM renames model.language_model. to language_model.model. and maps plain names only; towers stay apart."""
    text = modules(MLP, range(4), "model.language_model.layers")
    attention = modules(LAYER, range(4), "model.language_model.layers")
    tower = modules(MLP, range(2), "model.visual.layers")
    config = quantization("compressed_tensors", targets(text, "nvfp4") + targets(attention, "fp8_dynamic"), tower)
    for name in (*text, *attention):
        renamed = name.replace("model.language_model.", "language_model.model.")
        mine = [key for key, g in config["config_groups"].items() if any(vllm_match(t, renamed) for t in g["targets"])]
        assert mine == [vllm_group(name, config)] != [None]
    found = ct_groups([*text, *attention, *tower], config)
    assert [found[name] for name in tower] == [None] * len(tower)


def test_the_group_of_the_routed_experts_comes_first_and_names_them() -> None:
    """transformers 5.23 gives the experts the first group with an expression that contains "experts"."""
    experts = [
        f"model.layers.{layer}.mlp.experts.{e}.{p}"
        for layer in range(3)
        for e in range(8)
        for p in ("gate_proj", "up_proj", "down_proj")
    ]
    shared = modules(("mlp.shared_experts.up_proj", "mlp.shared_experts.gate_proj"), range(3))
    wanted = targets([*modules(LAYER, range(3)), *shared], "fp8_dynamic") + targets(experts, "mxfp4")
    config = quantization("compressed_tensors", wanted, modules(("mlp.gate",), range(3)))
    first = next(iter(config["config_groups"].values()))
    assert first["format"] == "mxfp4-pack-quantized"
    assert len(first["targets"]) == 1
    assert "experts" in first["targets"][0]
    for name in experts:
        assert vllm_group(name, config) == "group_0"
    for name in shared:
        assert vllm_group(name, config) == "group_1"


def test_an_alternation_lists_what_is_not_all() -> None:
    inside = modules(("mlp.up_proj", "mlp.gate_proj"), range(3))
    assert name_patterns(inside, []) == [r"re:^(.*\.)?layers\.\d+\.mlp\.(gate_proj|up_proj)$"]
    assert name_patterns(inside, ["model.layers.3.mlp.up_proj"]) == [
        r"re:^(.*\.)?layers\.(0|1|2)\.mlp\.(gate_proj|up_proj)$"
    ]
    assert name_patterns(inside, ["mtp.layers.0.mlp.up_proj"]) == [r"re:^model\.layers\.\d+\.mlp\.(gate_proj|up_proj)$"]
    assert name_patterns(inside, [], ignored=["visual.layers.0.mlp.up_proj"]) == [
        r"re:^(.*\.)?layers\.\d+\.mlp\.(gate_proj|up_proj)$"  # readers look at what is ignored first
    ]
    assert name_patterns(["lm_head"], ["model.lm_head"]) == [r"re:^lm_head$"]
    assert name_patterns(["visual.merger.mlp.0", "visual.merger.mlp.2"], ["visual.merger.mlp.1"]) == [
        r"re:^(.*\.)?mlp\.(0|2)$"
    ]


@pytest.mark.parametrize("seed", range(20))
def test_expressions_match_exactly_their_modules(seed: int) -> None:
    """Any division of an MoE model's modules into two groups and a kept rest."""
    generator = torch.Generator().manual_seed(seed)
    every = modules((*LAYER, *(f"mlp.experts.{e}.{p}_proj" for e in range(5) for p in ("up", "down"))), range(6))
    every += [f"mtp.layers.{i}.self_attn.q_proj" for i in range(2)] + ["model.layers.10.mlp.up_proj", "lm_head"]
    share = torch.randint(0, 3, (len(every),), generator=generator).tolist()
    for group in range(2):
        inside = [name for name, owner in zip(every, share, strict=True) if owner == group]
        others = [name for name in every if name not in inside]
        patterns = name_patterns(inside, others)
        for name in every:
            assert any(vllm_match(pattern, name) for pattern in patterns) == (name in inside), name


# --- ModelOpt


def test_modelopt_says_the_same_twice() -> None:
    wanted = targets(modules(MLP, range(2)), "nvfp4_w4a4")
    written = get_container("modelopt").configs(ConfigRequest(SOURCE, wanted, ["model.embed_tokens"], {"v": 1}))
    flat, nested = written["config.json"]["quantization_config"], written["hf_quant_config.json"]
    arguments = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    assert flat == {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": ["model.embed_tokens", "lm_head"],
        "config_groups": {"group_0": {"input_activations": arguments, "weights": arguments, "targets": ["Linear"]}},
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "ptqpipe": {"v": 1},
    }
    assert nested == {
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "exclude_modules": ["model.embed_tokens", "lm_head"],
            "group_size": 16,
        },
    }


@pytest.mark.parametrize(
    ("scheme", "algorithm", "group_size"),
    [
        ("nvfp4", "W4A16_NVFP4", 16),
        ("nvfp4_w4a4", "NVFP4", 16),
        ("fp8_dynamic", "FP8_PER_CHANNEL_PER_TOKEN", None),
        ("fp8_block", "FP8_PB_WO", 128),
        ("mxfp8", "MXFP8", 32),
    ],
)
def test_modelopt_algorithms(scheme: str, algorithm: str, group_size: int | None) -> None:
    """Weight-only NVFP4 is never called NVFP4, which zeroes experts in vLLM for want of an input scale."""
    written = get_container("modelopt").configs(ConfigRequest(SOURCE, targets(["a.b"], scheme), [], {}))
    flat, nested = written["config.json"]["quantization_config"], written["hf_quant_config.json"]["quantization"]
    assert flat["quant_algo"] == nested["quant_algo"] == algorithm
    assert nested.get("group_size") == group_size
    assert ("input_activations" in flat["config_groups"]["group_0"]) is (scheme != "nvfp4")


def test_modelopt_mixed_lists_every_layer_in_both_files() -> None:
    wanted, kept = mixed_model()
    written = get_container("modelopt").configs(ConfigRequest(SOURCE, wanted, kept, {}))
    flat, nested = written["config.json"]["quantization_config"], written["hf_quant_config.json"]["quantization"]
    assert flat["quant_algo"] == nested["quant_algo"] == "MIXED_PRECISION"
    assert flat["quantized_layers"] == nested["quantized_layers"]
    assert flat["quantized_layers"] == {
        t.module: {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}
        if t.scheme.name == "fp8_dynamic"
        else {"quant_algo": "W4A16_NVFP4", "group_size": 16}
        for t in wanted
    }
    grouped = [name for group in flat["config_groups"].values() for name in group["targets"]]
    assert sorted(grouped) == sorted(t.module for t in wanted)


def vllm_excludes(name: str, entries: Sequence[str]) -> bool:
    """vLLM 0.32 on a module that is not fused: equal, contained, or a wildcard."""
    return any(entry == name or entry in name or fnmatchcase(name, entry) for entry in entries)


def test_an_excluded_router_does_not_exclude_a_projection_whose_name_begins_like_it() -> None:
    kept = ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "lm_head"]
    wanted = targets(["model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"], "nvfp4")
    entries = quantization("modelopt", wanted, kept)["ignore"]
    assert entries == ["model.layers.0.mlp.gat[e]", "model.layers.1.mlp.gate", "lm_head"]
    for name in ("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.up_proj"):
        assert not vllm_excludes(name, entries)
    for name in kept:
        assert vllm_excludes(name, entries)


# --- The others


def test_deepseek_and_mxfp8_list_what_is_kept_for_each_reader() -> None:
    wanted = targets(modules(MLP, range(1)), "fp8_block")
    kept = ["model.embed_tokens", "model.layers.0.mlp.gate"]
    found = quantization("deepseek_fp8", wanted, kept)
    assert found == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["model.embed_tokens", "model.layers.0.mlp.gate", "lm_head"],
        "ptqpipe": {"version": "1"},
    }
    found = quantization("mxfp8_hf", targets(modules(MLP, range(1)), "mxfp8"), kept)
    assert found["weight_block_size"] == [1, 32]
    assert found["scale_fmt"] == "ue8m0"
    assert found["modules_to_not_convert"] == found["ignored_layers"] == [*kept, "lm_head"]


def test_a_scheme_that_a_layout_cannot_spell_stops_its_config() -> None:
    for container, scheme in (("compressed_tensors", "e2m1/8/ue5m3"), ("modelopt", "mxfp4"), ("deepseek_fp8", "nvfp4")):
        with pytest.raises(FormatError, match=r"^a\.b\.weight: "):
            quantization(container, targets(["a.b"], scheme))
