"""Claims about compressed-tensors' formats: each is read, or refused with what it stores, and never called damaged."""

from typing import Any

import pytest
from compressed_tensors.config import CompressionFormat

from ptqpipe.checkpoint.layouts import get_container
from ptqpipe.errors import CheckpointError

M = "model.layers.0.mlp.up_proj"
CHANNEL = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
INT8 = {**CHANNEL, "type": "int"}
FP8_TENSORS = {f"{M}.weight": ("F8_E4M3", (64, 128)), f"{M}.weight_scale": ("BF16", (64, 1))}
INT8_TENSORS = {f"{M}.weight": ("I8", (64, 128)), f"{M}.weight_scale": ("BF16", (64, 1))}
BITMASK = {
    f"{M}.weight.compressed": ("BF16", (64, 64)),
    f"{M}.weight.bitmask": ("U8", (64, 16)),
    f"{M}.weight.shape": ("I64", (2,)),
}
MARLIN = {
    f"{M}.weight_packed": ("I32", (4, 128)),
    f"{M}.meta": ("I16", (8, 64)),
    f"{M}.scale_packed": ("F16", (1, 64)),
}


def described(kind: str, weights: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    groups = {} if weights is None else {"g": {"targets": ["Linear"], "weights": weights, "format": kind}}
    method = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "format": kind}
    return {"quantization_config": {**method, "config_groups": groups, **more}}


def sparsity(kind: str) -> dict[str, Any]:
    return {"sparsity_config": {"format": kind, "sparsity_structure": "2:4", "targets": ["Linear"]}}


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "2:4 sparse": (described("dense", None, **sparsity("sparse-24-bitmask")), BITMASK, "without their zeros"),
    "2:4 sparse, no groups": (
        {"quantization_config": {"quant_method": "compressed-tensors", **sparsity("sparse-24-bitmask")}},
        BITMASK,
        "without their zeros",
    ),
    "sparse": (described("dense", None, **sparsity("sparse-bitmask")), BITMASK, "without their zeros"),
    "sparse and FP8": (
        described("float-quantized", CHANNEL, **sparsity("sparse-24-bitmask")),
        BITMASK | {f"{M}.weight_scale": ("BF16", (64, 1))},
        "without their zeros",
    ),
    "sparse without a word": (described("dense", None), BITMASK, "is a part of sparse weights"),
    "sparse-24-bitmask as the format": (described("sparse-24-bitmask", CHANNEL), BITMASK, "without their zeros"),
    "marlin-24": (described("marlin-24", {**INT8, "num_bits": 4}), MARLIN, "2:4 sparse INT4"),
    "naive-quantized of 4 bits": (
        described("naive-quantized", {**INT8, "num_bits": 4}),
        INT8_TENSORS,
        "one code in a byte",
    ),
    "no groups": (
        described("dense", None),
        {f"{M}.weight": ("BF16", (64, 128))},
        "has no config_groups, which say how",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_format_that_is_not_read_is_refused_with_what_it_stores(what: str) -> None:
    config, names, says = REFUSED[what]
    with pytest.raises(CheckpointError, match=says) as error:
        get_container("compressed_tensors").stored_weights(config, names)
    assert "damaged" not in str(error.value)
    assert "download" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "weights", "names"),
    [
        ("naive-quantized", CHANNEL, FP8_TENSORS),
        ("naive-quantized", INT8, INT8_TENSORS),
        ("float-quantized", CHANNEL, FP8_TENSORS),
        ("int-quantized", INT8, INT8_TENSORS),
    ],
)
def test_8_bits_of_every_name_are_read(kind: str, weights: dict[str, Any], names: dict[str, Any]) -> None:
    token = {**weights, "strategy": "token", "dynamic": True}
    config = described(kind, {**weights, "dynamic": False})
    config["quantization_config"]["config_groups"]["g"]["input_activations"] = token
    layout = get_container("compressed_tensors")
    stored = layout.stored_weights(config, names)
    assert list(stored) == [f"{M}.weight"]
    assert list(layout.config_faults({"config.json": config}, stored)) == []


def test_sparsity_of_dense_weights_is_no_reason_to_refuse() -> None:
    config = described("float-quantized", CHANNEL, **sparsity("sparse-24-bitmask"))
    assert list(get_container("compressed_tensors").stored_weights(config, FP8_TENSORS)) == [f"{M}.weight"]


def test_a_quantized_cache_alone_leaves_plain_weights() -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    names = {f"{M}.weight": ("BF16", (64, 128)), "model.layers.0.self_attn.k_scale": ("BF16", (1,))}
    config = described("dense", None, kv_cache_scheme=scheme)
    assert get_container("compressed_tensors").stored_weights(config, names) == {}


def test_every_format_of_the_library_is_decided_here() -> None:
    """A new one has to be read, or get a line that says what it stores."""
    read = {"dense", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision"}
    read |= {"nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized"}
    assert {kind.value for kind in CompressionFormat} - read == {"sparse-bitmask", "sparse-24-bitmask", "marlin-24"}
