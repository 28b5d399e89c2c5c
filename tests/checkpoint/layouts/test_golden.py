"""Claims about reading: other tools' checkpoints are found, decoded to their readers' bits, and spelled back."""

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ptqpipe.checkpoint.layouts import (
    ConfigRequest,
    PartKind,
    Target,
    decode,
    decode_input_global,
    detect_container,
    encode_part,
    get_container,
    kv_scale,
    merged_config,
)
from ptqpipe.numerics.schemes import get_scheme
from tests.checkpoint.layouts.builders import Checkpoint, read_checkpoint

pytestmark = pytest.mark.shared

CONTAINERS = {
    "ct-fp8": "compressed_tensors",
    "ct-fp8-block": "compressed_tensors",
    "ct-fp8-dynamic": "compressed_tensors",
    "ct-mixed": "compressed_tensors",
    "ct-mixtral-nvfp4": "compressed_tensors",
    "ct-mxfp4": "compressed_tensors",
    "ct-mxfp8": "compressed_tensors",
    "ct-nvfp4": "compressed_tensors",
    "ct-nvfp4-kv": "compressed_tensors",
    "ct-nvfp4a16": "compressed_tensors",
    "ct-qwen3moe-nvfp4": "compressed_tensors",
    "ds-fp8-block": "deepseek_fp8",
    "mo-fp8-kvfp8": "modelopt",
    "mo-mixed": "modelopt",
    "mo-mixtral-nvfp4": "modelopt",
    "mo-nvfp4": "modelopt",
    "mo-qwen3moe-nvfp4": "modelopt",
    "quark-mxfp4": "quark",
}
# What the stored config says, in the words of our scheme table ("+": a pair that no row has).
SCHEMES = {
    "ct-fp8": {"fp8_static"},
    "ct-fp8-block": {"fp8_block"},
    "ct-fp8-dynamic": {"fp8_dynamic"},
    "ct-mixed": {"fp8_dynamic", "nvfp4_w4a4"},
    "ct-mixtral-nvfp4": {"nvfp4_w4a4"},
    "ct-mxfp4": {"mxfp4"},
    "ct-mxfp8": {"mxfp8"},
    "ct-nvfp4": {"nvfp4_w4a4"},
    "ct-nvfp4-kv": {"nvfp4_w4a4"},
    "ct-nvfp4a16": {"nvfp4"},
    "ct-qwen3moe-nvfp4": {"nvfp4_w4a4"},
    "ds-fp8-block": {"fp8_block"},
    "mo-fp8-kvfp8": {"fp8_static"},
    "mo-mixed": {"fp8_static", "nvfp4_w4a4"},
    "mo-mixtral-nvfp4": {"nvfp4_w4a4"},
    "mo-nvfp4": {"nvfp4_w4a4"},
    "mo-qwen3moe-nvfp4": {"nvfp4_w4a4"},
    "quark-mxfp4": {"mxfp4"},
}


@cache
def golden(path: Path) -> Checkpoint:
    return read_checkpoint(path)


@cache
def manifest(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    return found


def sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def test_every_golden_checkpoint_has_a_claim(shared_dir: Path) -> None:
    quantized = {p.parent.name for p in (shared_dir / "golden").glob("*/config.json")} - {"gptoss-mxfp4"}
    assert {name for name in quantized if not name.startswith("bf16-")} == CONTAINERS.keys() == SCHEMES.keys()


@pytest.mark.parametrize("name", ["bf16-llama", "bf16-mixtral", "bf16-gptoss"])
def test_float_checkpoints_have_no_container(shared_dir: Path, name: str) -> None:
    checkpoint = golden(shared_dir / "golden" / name)
    assert detect_container(checkpoint.config, checkpoint.names) is None


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_weight_decodes_to_the_float32_and_bfloat16_bits_of_the_peer(shared_dir: Path, name: str) -> None:
    checkpoint = golden(shared_dir / "golden" / name)
    container = detect_container(checkpoint.config, checkpoint.names)
    assert container == CONTAINERS[name]
    stored = checkpoint.stored(container)
    assert {w.scheme.name for w in stored.values()} == SCHEMES[name]
    expected = manifest(shared_dir / "golden")[name]
    assert stored.keys() == expected["dequant_f32_sha256"].keys()
    for weight, found in stored.items():
        values = decode(found, checkpoint.load).dequantize()
        assert sha256(values) == expected["dequant_f32_sha256"][weight], weight
        assert sha256(values.bfloat16()) == expected["dequant_bf16_sha256"][weight], weight


@pytest.mark.parametrize("name", CONTAINERS)
def test_the_expected_arrays_are_the_decoded_ones(shared_dir: Path, name: str) -> None:
    checkpoint = golden(shared_dir / "golden" / name)
    stored = checkpoint.stored(CONTAINERS[name])
    expected = load_file(shared_dir / "golden" / "expected" / f"{name}.dequant_f32.safetensors")
    assert expected
    for weight, values in expected.items():
        assert torch.equal(decode(stored[weight], checkpoint.load).dequantize(), values), weight


@pytest.mark.parametrize("name", CONTAINERS)
def test_rows_decode_like_the_rows_of_the_whole(shared_dir: Path, name: str) -> None:
    checkpoint = golden(shared_dir / "golden" / name)
    for found in list(checkpoint.stored(CONTAINERS[name]).values())[:4]:
        whole = decode(found, checkpoint.load).dequantize()
        step = found.scheme.fmt.block_extent(found.shape)[0]
        if found.scheme.fmt.block[0] == 0 or step == found.shape[0]:
            continue
        start, stop = step, min(3 * step, found.shape[0])
        assert torch.equal(decode(found, checkpoint.load, rows=(start, stop)).dequantize(), whole[start:stop])


@pytest.mark.parametrize("name", [name for name in CONTAINERS if name != "quark-mxfp4"])
def test_what_is_read_is_spelled_back_to_the_same_bytes(shared_dir: Path, name: str) -> None:
    checkpoint = golden(shared_dir / "golden" / name)
    compared = 0
    for found in checkpoint.stored(CONTAINERS[name]).values():
        q = decode(found, checkpoint.load)
        for part in found.parts:
            if part.role in (PartKind.INPUT_GLOBAL, PartKind.INPUT_GLOBAL_DIVISOR):
                continue
            stored = checkpoint.tensors[part.name]
            again = encode_part(part, q)
            assert again.dtype == stored.dtype
            assert again.shape == stored.shape
            assert torch.equal(again.reshape(-1).view(torch.uint8), stored.reshape(-1).view(torch.uint8)), part.name
            compared += 1
    assert compared >= 28


@pytest.mark.parametrize("name", [name for name in CONTAINERS if name != "quark-mxfp4"])
def test_written_parts_have_the_names_dtypes_and_shapes_of_the_peer(shared_dir: Path, name: str) -> None:
    """Ours for the same scheme; the peers' only liberty is the dtype of FP8 scales, which the format carries."""
    checkpoint = golden(shared_dir / "golden" / name)
    layout = get_container(CONTAINERS[name])
    for weight, found in checkpoint.stored(CONTAINERS[name]).items():
        for part in layout.parts(weight, found.shape, found.scheme):
            assert checkpoint.names[part.name] == (part.dtype, part.shape), part.name


def test_input_scales_multiply_whatever_is_stored(shared_dir: Path) -> None:
    divisors, factors = golden(shared_dir / "golden" / "ct-nvfp4"), golden(shared_dir / "golden" / "mo-nvfp4")
    weight = "model.layers.0.mlp.down_proj.weight"
    ours = decode_input_global(divisors.stored("compressed_tensors")[weight], divisors.load)
    theirs = decode_input_global(factors.stored("modelopt")[weight], factors.load)
    assert ours is not None
    assert theirs is not None
    assert torch.equal(ours, (1 / divisors.tensors["model.layers.0.mlp.down_proj.input_global_scale"])[0])
    assert torch.equal(theirs, factors.tensors["model.layers.0.mlp.down_proj.input_scale"])
    assert 0.5 < float(ours / theirs) < 2  # two tools calibrated the same model on the same tokens


def test_gpt_oss_experts_decode_to_the_expected_stacks(shared_dir: Path) -> None:
    checkpoint = golden(shared_dir / "golden" / "gptoss-mxfp4")
    assert detect_container(checkpoint.config, checkpoint.names) == "gptoss_mxfp4"
    stored = checkpoint.stored("gptoss_mxfp4")
    expected = load_file(shared_dir / "golden" / "expected" / "gptoss-mxfp4.dequant_f32.safetensors")
    assert stored.keys() == expected.keys()
    for weight, found in stored.items():
        assert (found.experts, found.transposed) == (4, True)
        experts = [decode(found, checkpoint.load, expert=e).dequantize().T for e in range(4)]
        assert torch.equal(torch.stack(experts), expected[weight])
        for part in found.parts:
            again = [encode_part(part, decode(found, checkpoint.load, expert=e)) for e in range(4)]
            assert torch.equal(torch.stack(again), checkpoint.tensors[part.name])


@pytest.mark.parametrize(("ours", "theirs"), [("ct-nvfp4", "mo-nvfp4"), ("ct-nvfp4-kv", "mo-fp8-kvfp8")])
def test_tensors_of_no_weight_are_not_claimed(shared_dir: Path, ours: str, theirs: str) -> None:
    for name in (ours, theirs):
        checkpoint = golden(shared_dir / "golden" / name)
        claimed = {part.name for w in checkpoint.stored(CONTAINERS[name]).values() for part in w.parts}
        rest = checkpoint.names.keys() - claimed
        suffixes = {rest_name.rpartition(".")[2] for rest_name in rest}
        assert suffixes == ({"weight", "k_scale", "v_scale"} if "kv" in name else {"weight"})


def test_kv_scales_change_their_name_and_shape_only(shared_dir: Path) -> None:
    checkpoint = golden(shared_dir / "golden" / "ct-nvfp4-kv")
    other = golden(shared_dir / "golden" / "mo-fp8-kvfp8")
    scales = [name for name in checkpoint.names if name.endswith((".k_scale", ".v_scale"))]
    assert len(scales) == 4
    for name in scales:
        spelled = kv_scale(name, *checkpoint.names[name], container=get_container("modelopt"))
        assert spelled is not None
        assert other.names[spelled.name][1] == spelled.shape == ()
        back = kv_scale(spelled.name, spelled.dtype, spelled.shape, container=get_container("compressed_tensors"))
        assert back is not None
        assert (back.name, (back.dtype, back.shape)) == (name, checkpoint.names[name])
    assert kv_scale("model.layers.0.mlp.up_proj.weight_scale", "F32", (1,), container=get_container("modelopt")) is None


def test_hf_quant_config_alone_describes_a_checkpoint(shared_dir: Path) -> None:
    folder = shared_dir / "golden" / "mo-nvfp4"
    checkpoint = golden(folder)
    plain = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    merged = merged_config(plain, json.loads((folder / "hf_quant_config.json").read_text()))
    assert detect_container(merged, checkpoint.names) == "modelopt"
    assert get_container("modelopt").stored_weights(merged, checkpoint.names) == checkpoint.stored("modelopt")


@pytest.mark.parametrize("name", ["ct-nvfp4-kv", "mo-fp8-kvfp8"])
def test_a_quantized_kv_cache_stays_described(shared_dir: Path, name: str) -> None:
    source = golden(shared_dir / "golden" / name)
    targets = [Target("model.layers.0.mlp.up_proj.weight", get_scheme("nvfp4"))]
    written = {
        container: get_container(container).configs(ConfigRequest(source.config, targets, [], {}))
        for container in ("compressed_tensors", "modelopt")
    }
    ours, theirs = (written[c]["config.json"]["quantization_config"]["kv_cache_scheme"] for c in written)
    words = {"num_bits": 8, "type": "float", "dynamic": False}
    assert ours == {**words, "strategy": "tensor", "symmetric": True}
    assert theirs == words
    assert written["modelopt"]["hf_quant_config.json"]["quantization"]["kv_cache_quant_algo"] == "FP8"
