"""Claims about damage: a config that contradicts the tensors is one CheckpointError line, never a wrong weight."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ptqpipe.checkpoint.layouts import ConfigRequest, Target, detect_container, get_container, merged_config
from ptqpipe.errors import CheckpointError
from ptqpipe.numerics.schemes import get_scheme
from tests.checkpoint.layouts.builders import Checkpoint, absmax, stored_parts

M = "model.layers.0.mlp.up_proj"
SCHEMES = {
    "compressed_tensors": "nvfp4",
    "modelopt": "nvfp4",
    "deepseek_fp8": "fp8_block",
    "mxfp8_hf": "mxfp8",
    "ptqpipe": "nvfp4",
}


def sound(container: str, scheme_name: str | None = None) -> Checkpoint:
    """A checkpoint with one quantized 256 x 256 weight and a kept one."""
    scheme, layout = get_scheme(scheme_name or SCHEMES[container]), get_container(container)
    w = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    configs = layout.configs(ConfigRequest({}, [Target(f"{M}.weight", scheme)], ["model.norm"], {}))
    tensors = stored_parts(layout, f"{M}.weight", absmax(w, scheme.fmt), scheme)
    return Checkpoint(configs, {**tensors, "model.norm.weight": torch.ones(256)})


def damaged(
    container: str, change: Callable[[dict[str, Any], dict[str, Any]], object], scheme: str | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(config, names) after ``change`` has had its way with quantization_config and names."""
    checkpoint = sound(container, scheme)
    config, names = copy.deepcopy(dict(checkpoint.config)), dict(checkpoint.names)
    change(config["quantization_config"], names)  # type: ignore[arg-type]
    return config, names


def retype(suffix: str, dtype: str, shape: tuple[int, ...]) -> Callable[[dict[str, Any], dict[str, Any]], object]:
    return lambda q, names: names.update({f"{M}.{suffix}": (dtype, shape)})


def drop(suffix: str) -> Callable[[dict[str, Any], dict[str, Any]], object]:
    return lambda q, names: names.pop(f"{M}.{suffix}")


def group(q: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = q["config_groups"]["group_0"]
    return found


@pytest.mark.parametrize("container", SCHEMES)
def test_the_sound_checkpoints_are_sound(container: str) -> None:
    checkpoint = sound(container)
    assert detect_container(checkpoint.config, checkpoint.names) == container
    assert list(checkpoint.stored(container)) == [f"{M}.weight"]


def rotate(**changed: Any) -> Any:
    """A rotation of inputs that is read, but for what is changed."""
    group = {"type": "hadamard", "head_dim": 64, "apply": [{"targets": ["Linear"], "location": "input"}], **changed}
    return lambda q, n: q.update(transform_config={"config_groups": {"R4": group}})


@pytest.mark.parametrize(
    ("container", "change", "says"),
    [
        ("compressed_tensors", drop("weight_packed"), "no 'model.layers.0.mlp.up_proj.weight_packed'"),
        ("compressed_tensors", drop("weight_scale"), "has no tensor .*weight_scale"),
        ("compressed_tensors", drop("weight_global_scale"), "has no tensor .*weight_global_scale"),
        ("compressed_tensors", retype("weight_scale", "U8", (256, 16)), "is U8 .* its config says F8_E4M3"),
        ("compressed_tensors", retype("weight_scale", "F8_E4M3", (256, 8)), r"\[256, 8\], but its config says"),
        ("compressed_tensors", retype("weight_packed", "U8", (256,)), "expected two dimensions"),
        ("compressed_tensors", retype("weight_packed", "U8", (256, 100)), r"200; keep|multiples of 1x16"),
        ("compressed_tensors", retype("weight_packed", "I8", (256, 128)), "is I8"),
        ("compressed_tensors", retype("weight_zero_point", "I8", (1,)), "weight_zero_point is not read with"),
        ("compressed_tensors", retype("weight_global_scale", "F32", (2,)), r"F32 \[2\], but"),
        ("compressed_tensors", lambda q, n: q.update(config_groups={}), "no config_groups"),
        ("compressed_tensors", lambda q, n: q.update(config_groups=[1]), "no config_groups"),
        ("compressed_tensors", lambda q, n: q["config_groups"].update(group_0=3), "is int, expected an object"),
        ("compressed_tensors", lambda q, n: group(q).update(weights=4), "must be an object"),
        ("compressed_tensors", lambda q, n: group(q)["weights"].update(num_bits=3), "does not read"),
        ("compressed_tensors", lambda q, n: group(q)["weights"].update(type="int"), "does not read"),
        ("compressed_tensors", lambda q, n: group(q)["weights"].update(symmetric=False), "does not read"),
        ("compressed_tensors", lambda q, n: group(q).update(targets="Linear"), "must be a list of strings"),
        ("compressed_tensors", lambda q, n: group(q).update(targets=["re:("]), "cannot be matched with"),
        ("compressed_tensors", lambda q, n: group(q).update(targets=["model.other"]), "no config group targets it"),
        ("compressed_tensors", lambda q, n: group(q).update(targets=["lm_head"]), "no config group targets it"),
        ("compressed_tensors", lambda q, n: q.update(ignore=[M]), "under 'ignore'"),
        ("compressed_tensors", lambda q, n: q.update(ignore={"a": 1}), "must be a list of strings"),
        ("compressed_tensors", lambda q, n: n.update({"x.weight": ("F8_E4M3", (4, 4))}), "without a 'x.weight_scale'"),
        ("modelopt", drop("weight_scale_2"), "has no tensor .*weight_scale_2"),
        ("modelopt", drop("weight"), "no 'model.layers.0.mlp.up_proj.weight'"),
        ("modelopt", retype("weight", "U8", (0, 128)), "at least one element"),
        ("modelopt", drop("weight_scale"), "is U8 without a"),
        ("modelopt", lambda q, n: q.update(quant_algo="INT4_AWQ"), "'INT4_AWQ', which ptqpipe does not read"),
        ("modelopt", lambda q, n: q.update(quant_algo=None), "quant_algo ''"),
        ("modelopt", lambda q, n: q.update(quant_algo="FP8"), "is U8 .* says F8_E4M3"),
        ("modelopt", lambda q, n: q.update(quant_algo="MIXED_PRECISION"), "needs 'quantized_layers'"),
        ("modelopt", lambda q, n: q.update(quant_algo="MIXED_PRECISION", quantized_layers={"a": {}}), "not list it"),
        ("compressed_tensors", lambda q, n: q.update(transform_config=[1]), "transform_config .* is damaged"),
        (
            "compressed_tensors",
            lambda q, n: q.update(transform_config={"config_groups": {"R4": {"apply": [{"location": "input"}]}}}),
            "has 'R4' at 'input': a change of the activations that ptqpipe does not read",
        ),
        *(
            ("compressed_tensors", rotate(**wrong), "has 'R4' at '(input|output)': a change of the activations")
            for wrong in (
                {"type": "random-hadamard"},
                {"head_dim": 48},
                {"head_dim": None},
                {"randomize": True},
                {"apply": [{"targets": ["Linear"], "location": "output"}]},
                {"apply": [{"targets": ["Linear"], "location": "input", "ignore": [M]}]},
            )
        ),
        (
            "compressed_tensors",
            rotate(apply=[{"targets": "Linear", "location": "input"}]),
            "transform_config 'R4' in config.json must be a list of strings",
        ),
        ("modelopt", lambda q, n: q.update(ignore=[M]), "under 'ignore'"),
        ("modelopt", retype("pre_quant_scale", "BF16", (256,)), "pre_quant_scale"),
        ("deepseek_fp8", drop("weight_scale_inv"), "F8_E4M3 without a"),
        ("deepseek_fp8", drop("weight"), "belongs to no F8_E4M3 weight"),
        ("deepseek_fp8", retype("weight_scale_inv", "F32", (2, 3)), r"\[2, 3\], but its config says F32 \[2, 2\]"),
        ("deepseek_fp8", retype("weight_scale_inv", "I32", (2, 2)), "dtype I32 are not read"),
        ("deepseek_fp8", lambda q, n: q.update(weight_block_size=[64, 64]), r"says F32 \[4, 4\]"),
        ("deepseek_fp8", lambda q, n: q.update(weight_block_size="128"), "expected two positive integers"),
        ("deepseek_fp8", lambda q, n: q.update(weight_block_size=[0, 128]), "expected two positive integers"),
        ("mxfp8_hf", lambda q, n: q.update(weight_block_size=[1, 16]), r"expected \[1, 32\]"),
        ("mxfp8_hf", retype("weight_scale_inv", "U8", (256, 16)), r"\[256, 16\], but"),
        ("ptqpipe", lambda q, n: q.update(version=4), "layout version 4"),
        ("ptqpipe", lambda q, n: q["default"].update(rotation=48), "rotation 48 is none of the blocks"),
        ("ptqpipe", lambda q, n: q["default"].update(rotation=True), "rotation True is none of the blocks"),
        ("ptqpipe", lambda q, n: q.pop("default"), "no 'default'"),
        ("ptqpipe", lambda q, n: q.update(default={}), "unknown format 'None'"),
        ("ptqpipe", lambda q, n: q["default"].update(format="e9m9/16/e4m3"), "unknown"),
        ("ptqpipe", lambda q, n: q["default"].update(activation="loud"), "loud"),
        ("ptqpipe", lambda q, n: q["default"].update(block=[1]), "block"),
        ("ptqpipe", lambda q, n: q["default"].update(block="8"), "block"),
        ("ptqpipe", lambda q, n: q["default"].update(scale="e3m9"), "e3m9"),
        ("ptqpipe", lambda q, n: q["weights"].update({f"{M}.weight": 5}), "must be an object"),
        ("ptqpipe", lambda q, n: q["weights"].update({"gone.weight": {"transposed": True}}), "'gone.weight'"),
        ("ptqpipe", drop("weight_global_scale"), "has no tensor .*weight_global_scale"),
        ("ptqpipe", retype("weight_packed", "U8", (4,)), "two or three dimensions"),
        ("ptqpipe", retype("weight_packed", "U8", (256, 127)), "multiples"),
    ],
)
def test_damage_is_one_line(container: str, change: Any, says: str) -> None:
    config, names = damaged(container, change)
    with pytest.raises(CheckpointError, match=says) as caught:
        get_container(container).stored_weights(config, names)
    assert "\n" not in str(caught.value)
    assert "download" not in str(caught.value)  # a file of a layout that is not known comes down the same again


def test_e8m0_typed_scales_are_refused_where_readers_misread_them() -> None:
    """transformers and vLLM take F8_E8M0 scales in this layout for numbers, silently."""
    config, names = damaged("compressed_tensors", retype("weight_scale", "F8_E8M0", (256, 8)), "mxfp4")
    with pytest.raises(CheckpointError, match=r"is F8_E8M0 .*, but its config says U8"):
        get_container("compressed_tensors").stored_weights(config, names)


def test_w4a4_without_its_input_scale_is_refused() -> None:
    """Readers compute NaN, without an error."""
    config, names = damaged("compressed_tensors", drop("input_global_scale"), "nvfp4_w4a4")
    with pytest.raises(CheckpointError, match=r"has no tensor .*input_global_scale"):
        get_container("compressed_tensors").stored_weights(config, names)


@pytest.mark.parametrize(
    ("shape", "says"), [((4, 8, 2), "expected .experts, rows, groups, 16."), ((4, 8, 2, 8), r"\[4, 8, 2, 8\], but")]
)
def test_gpt_oss_blocks_have_four_dimensions(shape: tuple[int, ...], says: str) -> None:
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    names = {"m.experts.down_proj_blocks": ("U8", shape), "m.experts.down_proj_scales": ("U8", (4, 8, 2))}
    with pytest.raises(CheckpointError, match=says):
        get_container("gptoss_mxfp4").stored_weights(config, names)
    with pytest.raises(CheckpointError, match=r"has no 'm\.experts\.down_proj_blocks'"):
        get_container("gptoss_mxfp4").stored_weights(config, {"m.experts.down_proj_scales": ("U8", (4, 8, 2))})


@pytest.mark.parametrize(
    ("described", "says"),
    [
        ({"quant_method": "hqq"}, "'hqq' in config.json is not one that ptqpipe reads"),
        ({"bits": 4}, "quant_method None"),
        ("fp8", "is str, expected an object"),
    ],
)
def test_other_methods_are_named(described: Any, says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        detect_container({"quantization_config": described}, {})


def test_a_damaged_hf_quant_config_is_named() -> None:
    with pytest.raises(CheckpointError, match="has no object 'quantization'"):
        merged_config({}, {"quantization": [1]})


@pytest.mark.parametrize("value", [None, 3, [], "x", {"dtype": "fp4"}, {"dtype": "fp4", "qscheme": "per_group"}])
def test_a_damaged_quark_spec_is_named(value: Any) -> None:
    config = {"quantization_config": {"quant_method": "quark", "global_quant_config": {"weight": value}}}
    names = {"a.weight": ("U8", (8, 16)), "a.weight_scale": ("U8", (8, 1))}
    with pytest.raises(CheckpointError, match="quark"):
        get_container("quark").stored_weights(config, names)


JUNK: list[Any] = [None, True, 0, -1, 3.5, "", "re:(", "x", [], [None], [[]], {}, {"a": None}]


def mutate(value: Any, generator: torch.Generator) -> Any:
    """``value`` with one random place replaced by junk, or removed."""
    draw = int(torch.randint(0, 1 << 30, (), generator=generator))
    if isinstance(value, dict) and value and draw % 6:
        key = list(value)[draw // 6 % len(value)]
        if draw % 5 == 0:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: mutate(value[key], generator)}
    if isinstance(value, list) and value and draw % 3:
        at = draw // 3 % len(value)
        return [*value[:at], mutate(value[at], generator), *value[at + 1 :]]
    return JUNK[draw // 7 % len(JUNK)]


@pytest.mark.parametrize(("container", "scheme"), [*SCHEMES.items(), ("compressed_tensors", "fp8_dynamic")])
def test_any_mutation_is_read_or_refused_in_one_line(container: str, scheme: str) -> None:
    """Configs and headers with random damage: CheckpointError or an answer, nothing else."""
    checkpoint = sound(container, scheme)
    generator = torch.Generator().manual_seed(0)
    refused: list[str] = []
    for number in range(400):
        config, names = dict(checkpoint.config), dict(checkpoint.names)
        if number % 3:
            config["quantization_config"] = mutate(config["quantization_config"], generator)
        else:
            at = list(names)[int(torch.randint(0, len(names), (), generator=generator))]
            shape = tuple(torch.randint(0, 5, (int(torch.randint(0, 4, (), generator=generator)),)).tolist())
            names[at] = (["U8", "F32", "F8_E4M3", "I64"][number % 4], shape)
        try:
            found = detect_container(config, names)
            if found is not None:
                get_container(found).stored_weights(config, names)
        except CheckpointError as error:
            refused.append(str(error))
    assert 100 < len(refused) < 400
    assert not any("\n" in line for line in refused)
