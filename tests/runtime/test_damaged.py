"""Claims about checkpoints that are damaged or contradict themselves: refused, in one line that names the tensor."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ptqpipe.errors import CheckpointError, UsageError
from ptqpipe.runtime import load, load_model
from ptqpipe.runtime.loading import check_load
from ptqpipe.runtime.parallel import TensorParallel
from tests.checkpoint.layouts.builders import Checkpoint, read_checkpoint
from tests.runtime.models import quantized
from tests.runtime.test_kv_cache import SCHEME, scales_named, with_scales

LAYER = "model.layers.1.mlp.down_proj"


def with_config(made: Checkpoint, folder: Path, **changes: Any) -> Path:
    """The checkpoint with another config.json."""
    path = made.save(folder)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    return path


def refused(path: Path, *wanted: str, packed: bool = True) -> None:
    with pytest.raises(CheckpointError) as error:
        load(path, packed=packed)
    for text in wanted:
        assert text in str(error.value)


@pytest.mark.parametrize(
    ("changes", "tensor", "stored", "expected"),
    [
        ({"head_dim": 16}, "k_proj", "64x128", "32x128"),
        ({"head_dim": 64}, "k_proj", "64x128", "128x128"),
        ({"num_attention_heads": 8}, "_proj", "128x128", "256"),
        ({"num_key_value_heads": 1}, "k_proj", "64x128", "32x128"),
        ({"num_key_value_heads": 4}, "k_proj", "64x128", "128x128"),
        ({"intermediate_size": 128}, "_proj", "256", "128"),
        ({"intermediate_size": 512}, "_proj", "256", "512"),
    ],
)
def test_a_packed_weight_of_another_shape_than_config_json_says_is_refused(
    sources: Mapping[str, Path], tmp_path: Path, changes: dict[str, int], tensor: str, stored: str, expected: str
) -> None:
    made = quantized(sources["llama"], "compressed_tensors", "nvfp4")
    refused(with_config(made, tmp_path / "q", **changes), tensor, stored, expected, "config.json")


def test_ranks_compare_whole_shapes(
    sources: Mapping[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks of half the heads each would fit a config of half the heads."""
    monkeypatch.setattr(TensorParallel, "check", lambda self: None)
    made = quantized(sources["llama"], "compressed_tensors", "nvfp4")
    path = with_config(made, tmp_path / "q", intermediate_size=512)
    with pytest.raises(CheckpointError, match="256"):
        load(path, tp=2, rank=1)


@pytest.mark.parametrize(
    ("model", "container", "scheme", "name"),
    [
        ("qwen3_moe", "compressed_tensors", "nvfp4", "moe_intermediate_size"),
        ("mixtral", "modelopt", "nvfp4", "intermediate_size"),
    ],
)
def test_experts_of_another_shape_than_config_json_says_are_refused(
    sources: Mapping[str, Path], tmp_path: Path, model: str, container: str, scheme: str, name: str
) -> None:
    made = quantized(sources[model], container, scheme)
    refused(with_config(made, tmp_path / "q", **{name: 128}), "experts.0.", "256", "128", "config.json")


GLOBAL, BLOCK = "weight_global_scale", "weight_scale"
SCALES = [
    *[("compressed_tensors", "nvfp4", GLOBAL, value) for value in (float("inf"), float("nan"), 0.0, -1.0)],
    *[("compressed_tensors", "fp8_dynamic", BLOCK, value) for value in (float("inf"), float("nan"), 0.0, -1.0)],
    *[("deepseek_fp8", "fp8_block", "weight_scale_inv", value) for value in (float("inf"), float("nan"), 0.0, -1.0)],
    *[("modelopt", "nvfp4_w4a4", "input_scale", value) for value in (float("inf"), float("nan"), 0.0, -1.0)],
]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("container", "scheme", "part", "value"), SCALES)
def test_a_scale_that_is_not_finite_and_above_zero_is_refused(
    sources: Mapping[str, Path], tmp_path: Path, container: str, scheme: str, part: str, value: float, packed: bool
) -> None:
    made = quantized(sources["llama"], container, scheme)
    made.tensors[f"{LAYER}.{part}"].view(-1)[-1] = value
    refused(made.save(tmp_path / "q"), f"{LAYER}.{part}", f"{value:g}", packed=packed)


@pytest.mark.parametrize(("scheme", "code"), [("nvfp4", 0x7F), ("nvfp4", 0xC0), ("nvfp4", 0xFF), ("mxfp4", 0xFF)])
def test_a_block_scale_that_is_negative_or_nan_is_refused(
    sources: Mapping[str, Path], tmp_path: Path, scheme: str, code: int
) -> None:
    made = quantized(sources["llama"], "compressed_tensors", scheme)
    made.tensors[f"{LAYER}.weight_scale"].view(torch.uint8)[-1, -1] = code
    refused(made.save(tmp_path / "q"), f"{LAYER}.weight_scale", "1 of")


def test_zero_block_scales_decode_to_zero_and_are_let_through(sources: Mapping[str, Path], tmp_path: Path) -> None:
    made = quantized(sources["llama"], "compressed_tensors", "nvfp4")
    made.tensors[f"{LAYER}.weight_scale"].view(torch.uint8)[-1, -1] = 0
    path = made.save(tmp_path / "q")
    weight = load_model(path).get_submodule(LAYER).weight
    assert not weight[-1, -16:].any()
    assert weight[-1, :-16].any()
    load(path)


def test_a_zero_scale_of_a_row_of_zeros_is_let_through(sources: Mapping[str, Path], tmp_path: Path) -> None:
    made = quantized(sources["llama"], "compressed_tensors", "fp8_dynamic")
    made.tensors[f"{LAYER}.weight_scale"][3] = 0
    made.tensors[f"{LAYER}.weight"][3] = 0
    path = made.save(tmp_path / "q")
    assert not load_model(path).get_submodule(LAYER).weight[3].any()
    made.tensors[f"{LAYER}.weight_scale"][4] = float("nan")
    refused(made.save(tmp_path / "worse"), f"{LAYER}.weight_scale", "nan")


@pytest.mark.parametrize("part", ["k_scale", "v_scale"])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 0.0, -1.0])
def test_a_damaged_scale_of_the_kv_cache_is_refused(
    sources: Mapping[str, Path], tmp_path: Path, part: str, value: float
) -> None:
    scales = scales_named("model.layers.{layer}.self_attn.{kind}_scale", {"k": torch.ones(1), "v": torch.ones(1)})
    name = f"model.layers.1.self_attn.{part}"
    scales[name][0] = value
    made = with_scales(quantized(sources["llama"], "compressed_tensors", "nvfp4"), scales, SCHEME)
    refused(made.save(tmp_path / "q"), name, f"{value:g}")


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("name", "value"), [("vocab_size", 97), ("intermediate_size", 128), ("head_dim", 16)])
def test_a_plain_checkpoint_of_another_shape_names_the_tensor(
    sources: Mapping[str, Path], tmp_path: Path, name: str, value: int, packed: bool
) -> None:
    path = with_config(read_checkpoint(sources["llama"]), tmp_path / "q", **{name: value})
    refused(path, "weight' is ", "its config.json makes it ", packed=packed)


CONFIGS = [
    ({"num_attention_heads": 0}, "integer modulo by zero"),
    ({"num_hidden_layers": "x"}, "'num_hidden_layers' expected int, got str"),
    ({"rms_norm_eps": "x"}, "'rms_norm_eps' expected float, got str"),
    ({"hidden_act": "nosuch"}, "nosuch"),
    ({"rope_parameters": {"rope_type": "nosuch", "rope_theta": 1e4}}, "nosuch"),
    ({"model_type": "nosuch", "auto_map": {"AutoConfig": "evil.Evil"}}, "such code is never run"),
    ({"max_position_embeddings": -5}, "max_position_embeddings -5, expected 1 or more"),
]


@pytest.mark.parametrize(("changes", "says"), CONFIGS)
def test_a_config_that_makes_no_model_is_one_line_and_nobody_is_asked(
    sources: Mapping[str, Path], tmp_path: Path, changes: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*_: object) -> str:
        raise AssertionError("a question")

    monkeypatch.setattr("builtins.input", asked)
    path = with_config(read_checkpoint(sources["llama"]), tmp_path / "q", **changes)
    with pytest.raises(CheckpointError) as error:
        check_load(path)
    assert says in str(error.value)
    assert "config.json" in str(error.value)
    if "max_position_embeddings" not in changes:  # nothing but a service has a use for it
        refused(path, says, "config.json")


@pytest.mark.parametrize(("text", "says"), [("{", "not a valid JSON"), ('{"eos_token_id": "x"}', "eos_token_id 'x'")])
def test_a_damaged_generation_config_is_one_line(
    sources: Mapping[str, Path], tmp_path: Path, text: str, says: str
) -> None:
    path = read_checkpoint(sources["llama"]).save(tmp_path / "q")
    (path / "generation_config.json").write_text(text)
    refused(path, says, "generation_config.json")
    with pytest.raises(CheckpointError, match="generation_config"):
        check_load(path)


def test_what_does_not_load_is_known_before_ranks_start(sources: Mapping[str, Path], tmp_path: Path) -> None:
    made = quantized(sources["llama"], "compressed_tensors", "nvfp4")
    check_load(made.save(tmp_path / "q"), tp=2)
    with pytest.raises(UsageError, match="tp=16 does not divide"):
        check_load(tmp_path / "q", tp=16)
    with pytest.raises(CheckpointError, match=r"its config\.json makes it"):
        check_load(with_config(made, tmp_path / "other", head_dim=16))
