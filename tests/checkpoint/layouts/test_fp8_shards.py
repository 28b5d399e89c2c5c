"""Claims: a fused qkv_proj whose shards were quantized apart is read where shapes say how, and never otherwise."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ptqpipe
from ptqpipe.errors import CheckpointError, FormatError
from tests import tiny

QKV = "model.layers.0.self_attn.qkv_proj.weight"
DESCRIBED = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def quantized(w: torch.Tensor, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and the decode of a shard, in loops over blocks."""
    rows, columns = -(-w.shape[0] // 128), -(-w.shape[1] // 128)
    codes, scales = torch.empty(w.shape, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    decoded = torch.empty(w.shape)
    for r in range(rows):
        for c in range(columns):
            at = (slice(128 * r, 128 * r + 128), slice(128 * c, 128 * c + 128))
            scale = w[at].abs().amax() / 448
            scales[r, c] = torch.exp2(torch.ceil(torch.log2(scale))) if dtype is torch.float8_e8m0fnu else scale
            codes[at] = (w[at] / scales[r, c]).to(torch.float8_e4m3fn)
            decoded[at] = codes[at].float() * scales[r, c]
    return codes, scales.to(dtype), decoded


def model_of(
    folder: Path,
    shards: int,
    rows: int,
    *,
    kind: str = "mimo_v2",
    dtype: torch.dtype = torch.float32,
    name: str = QKV,
    columns: int = 128,
) -> tuple[Path, torch.Tensor]:
    """A model with one fused weight of ``shards`` shards of ``rows`` rows, and what it decodes to."""
    generator = torch.Generator().manual_seed(rows)
    spread = torch.linspace(0.01, 4, shards * rows)[:, None]
    w = torch.randn(shards * rows, columns, generator=generator) * spread
    parts = [quantized(part, dtype) for part in w.split(rows)]
    tensors = {"model.embed_tokens.weight": torch.ones(96, columns, dtype=torch.bfloat16)}
    tensors[name] = torch.cat([codes.view(torch.uint8) for codes, _, _ in parts]).view(torch.float8_e4m3fn)
    scales = torch.cat([scales.view(torch.uint8) for _, scales, _ in parts]).view(dtype)
    config: dict[str, Any] = {**tiny.LLAMA_CONFIG, "model_type": kind, "quantization_config": DESCRIBED}
    tiny.save(folder, {**tensors, f"{name}_scale_inv": scales}, config=config)
    return folder, torch.cat([decoded for _, _, decoded in parts])


# The rows of MiMo-V2.5-Pro's 8 shards, of the full and of the windowed attention of MiMo-V2.5, and a small one.
@pytest.mark.parametrize(("shards", "rows"), [(8, 3392), (4, 3392), (4, 3712), (3, 302)])
def test_a_weight_of_shards_decodes_to_the_numbers_of_each_shard(tmp_path: Path, shards: int, rows: int) -> None:
    model, wanted = model_of(tmp_path / "model", shards, rows)
    with ptqpipe.load_tensors(model) as loaded:
        assert torch.equal(loaded[QKV].dequantize(), wanted)
    done = ptqpipe.dequantize(model, out=tmp_path / "plain", dtype="fp32")
    with ptqpipe.load_tensors(done.out) as plain:
        assert torch.equal(plain[QKV], wanted)


def test_scales_that_are_powers_of_two_are_of_shards_as_well(tmp_path: Path) -> None:
    model, wanted = model_of(tmp_path / "model", 3, 302, dtype=torch.float8_e8m0fnu, columns=256)
    with ptqpipe.load_tensors(model) as loaded:
        assert torch.equal(loaded[QKV].dequantize(), wanted)


def test_a_conversion_of_shards_is_that_of_the_float_model_they_stand_for(tmp_path: Path) -> None:
    model, wanted = model_of(tmp_path / "model", 3, 302)
    config = {**tiny.LLAMA_CONFIG, "model_type": "mimo_v2"}
    plain = {"model.embed_tokens.weight": torch.ones(96, 128, dtype=torch.bfloat16), QKV: wanted}
    floats = tiny.save(tmp_path / "floats", plain, config=config)
    ours = ptqpipe.convert(model, format="nvfp4", out=tmp_path / "a").out
    theirs = ptqpipe.convert(floats, format="nvfp4", out=tmp_path / "b").out
    assert (ours / "model.safetensors").read_bytes() == (theirs / "model.safetensors").read_bytes()
    assert ptqpipe.verify(ours, source=model).ok


def test_no_other_layout_has_a_place_for_scales_of_shards(tmp_path: Path) -> None:
    model, _ = model_of(tmp_path / "model", 3, 302)
    for container in ("ptqpipe", "compressed_tensors", "modelopt"):
        with pytest.raises(FormatError, match=r"qkv_proj\.weight: its scales are of shards .*`ptqpipe dequantize`"):
            ptqpipe.relayout(model, container, out=tmp_path / "out")
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("shards", "rows"), [(4, 212), (2, 212), (2, 84 + 128), (3, 115)])
def test_shapes_that_fit_several_numbers_of_shards_are_refused(tmp_path: Path, shards: int, rows: int) -> None:
    """Among them those that would pass for a weight that was quantized as one."""
    model, _ = model_of(tmp_path / "model", shards, rows)
    with pytest.raises(CheckpointError, match=r"weight_scale_inv' has .* left open; start from the model's float"):
        ptqpipe.dequantize(model, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_shards_of_another_model_are_named_and_refused(tmp_path: Path) -> None:
    model, _ = model_of(tmp_path / "model", 8, 3392, kind="llama")
    with pytest.raises(CheckpointError, match="as if it had been quantized in 8 shards apart") as caught:
        ptqpipe.dequantize(model, out=tmp_path / "out")
    assert "download" not in str(caught.value)
    assert "correct its config" not in str(caught.value)


@pytest.mark.parametrize("kind", ["llama", "mimo_v2"])
def test_weights_that_were_quantized_as_one_are_read_as_ever(tmp_path: Path, kind: str) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    for number, rows in enumerate((256, 212, 100)):
        model, wanted = model_of(tmp_path / str(number), 1, rows, kind=kind, name=name)
        with ptqpipe.load_tensors(model) as loaded:
            assert torch.equal(loaded[name].dequantize(), wanted)
    assert json.loads((model / "config.json").read_text())["model_type"] == kind
