"""Claims about the simulated FP8 kv cache.

Expected logits come from transformers' float model whose rotary function and value projections are wrapped here, so
keys and values are rounded on another way.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama import modeling_llama

from ptqpipe.errors import CheckpointError
from ptqpipe.runtime import load_model
from tests.checkpoint.layouts.builders import Checkpoint
from tests.runtime.models import TOKENS, float_twin, logits, quantized

SCALES = {"k": 0.013, "v": 0.0041}
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def with_scales(checkpoint: Checkpoint, scales: Mapping[str, torch.Tensor], scheme: Any) -> Checkpoint:
    config: dict[str, Any] = dict(checkpoint.config)
    config["quantization_config"] = {**config["quantization_config"], "kv_cache_scheme": scheme}
    return Checkpoint({"config.json": config}, {**checkpoint.tensors, **scales})


def scales_named(pattern: str, value: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {pattern.format(layer=layer, kind=kind): value[kind].clone() for layer in range(2) for kind in "kv"}


def rounded(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def expected(twin: Any, monkeypatch: pytest.MonkeyPatch, scales: Mapping[str, torch.Tensor]) -> torch.Tensor:
    rotate = modeling_llama.apply_rotary_pos_emb

    def rotated(q: torch.Tensor, k: torch.Tensor, *rest: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = rotate(q, k, *rest, **named)
        return q, rounded(k, scales["k"].reshape(-1, 1, 1))

    def values(_: Any, __: Any, out: torch.Tensor) -> torch.Tensor:
        heads = out.unflatten(-1, (2, 32))
        return rounded(heads, scales["v"].reshape(-1, 1)).flatten(-2)

    handles = [layer.self_attn.v_proj.register_forward_hook(values) for layer in twin.model.layers]
    with monkeypatch.context() as patch:
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", rotated)
        out = logits(twin)
    for handle in handles:
        handle.remove()
    return out


@pytest.mark.parametrize(
    ("container", "pattern", "shape", "scheme"),
    [
        ("compressed_tensors", "model.layers.{layer}.self_attn.{kind}_scale", (1,), SCHEME),
        ("compressed_tensors", "model.layers.{layer}.self_attn.{kind}_scale", (2, 1, 1), SCHEME),
        ("modelopt", "model.layers.{layer}.self_attn.{kind}_proj.{kind}_scale", (), "FP8"),
    ],
)
def test_keys_and_values_go_through_e4m3(
    sources: Mapping[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    container: str,
    pattern: str,
    shape: tuple[int, ...],
    scheme: Any,
) -> None:
    checkpoint = quantized(sources["llama"], container, "nvfp4")
    values = {kind: torch.full(shape, scale) for kind, scale in SCALES.items()}
    if len(shape) == 3:
        values = {kind: scale * torch.tensor([1.0, 1.7]).reshape(shape) for kind, scale in values.items()}
    path = with_scales(checkpoint, scales_named(pattern, values), scheme).save(tmp_path / "q")
    twin = float_twin(sources["llama"], checkpoint.dequantized(container), tmp_path / "f")
    plain = logits(twin)
    assert torch.equal(logits(load_model(path, activations="none")), plain)
    ours = logits(load_model(path))
    assert torch.equal(ours, expected(twin, monkeypatch, values))
    assert not torch.equal(ours, plain)


def test_generation_with_a_cache_is_generation_without(sources: Mapping[str, Path], tmp_path: Path) -> None:
    values = {kind: torch.tensor([scale]) for kind, scale in SCALES.items()}
    scales = scales_named("model.layers.{layer}.self_attn.{kind}_scale", values)
    checkpoint = with_scales(quantized(sources["llama"], "compressed_tensors", "nvfp4"), scales, SCHEME)
    model = load_model(checkpoint.save(tmp_path / "q"))
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    cached = model.generate(TOKENS, use_cache=True, **options)
    assert torch.equal(cached, model.generate(TOKENS, use_cache=False, **options))


def test_scales_without_a_scheme_are_named_and_left(sources: Mapping[str, Path], tmp_path: Path) -> None:
    values = {kind: torch.tensor([scale]) for kind, scale in SCALES.items()}
    scales = scales_named("model.layers.{layer}.self_attn.{kind}_scale", values)
    checkpoint = quantized(sources["llama"], "compressed_tensors", "nvfp4")
    path = with_scales(checkpoint, scales, None).save(tmp_path / "q")
    with pytest.warns(UserWarning, match="kv cache is not FP8"):
        model = load_model(path)
    assert torch.equal(logits(model), logits(load_model(path, activations="none")))


def test_half_a_pair_is_named(sources: Mapping[str, Path], tmp_path: Path) -> None:
    scales = {"model.layers.1.self_attn.k_scale": torch.tensor([0.1])}
    checkpoint = with_scales(quantized(sources["llama"], "compressed_tensors", "nvfp4"), scales, SCHEME)
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn has a k_scale alone"):
        load_model(checkpoint.save(tmp_path / "q"))
