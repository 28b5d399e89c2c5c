"""Sources below 8 bits: their published layouts are read, and what holds their numbers is written without loss."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import ptqpipe
from ptqpipe.cli import main
from ptqpipe.errors import CheckpointError, UsageError
from ptqpipe.stages.dequantize import dequantize
from ptqpipe.stages.verify.run import verify
from tests import families, tiny

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
LOSSLESS = "0 weights changed; 0 blocks requantized, largest error 0"


def mxfp4(data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Packed codes [..., K/2] (even columns in the low bits) times power-of-two scales [..., K/32], by hand."""
    codes = data.view(torch.uint8).int()
    values = E2M1[torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)]
    return values * torch.exp2(scales.view(torch.uint8).float() - 127).repeat_interleave(32, dim=-1)


def record_of(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "ptqpipe.json").read_text()))


def converted(model: Path, out: Path, fmt: str, **options: Any) -> str:
    """The certificate of a conversion that verify confirms, of the source as of the output."""
    ptqpipe.convert(model, format=fmt, out=out, workers=1, **options)
    assert verify(out, source=model, workers=1).ok
    return str(record_of(out)["certificate"])


@pytest.mark.parametrize("block", [128, 32])
def test_deepseek_v4_is_read(tmp_path: Path, block: int) -> None:
    model = families.make_v4(tmp_path / "v4", block=block)
    stored = load_file(model / "model.safetensors")
    assert verify(model, workers=1).ok
    said = CliRunner().invoke(main, ["inspect", str(model)]).output
    assert "(deepseek_fp8)" in said
    assert {"mxfp4+unknown", "wkv"} <= set(said.split())
    out = dequantize(model, tmp_path / "float", dtype="fp32").out
    assert verify(out, source=model, workers=1).ok
    found = load_file(out / "model.safetensors")
    assert found.keys() == {name for name in stored if not name.endswith(".scale")}
    expert, linear = "layers.0.ffn.experts.0.w2", "layers.0.attn.wkv"
    assert torch.equal(found[f"{expert}.weight"], mxfp4(stored[f"{expert}.weight"], stored[f"{expert}.scale"]))
    scales = stored[f"{linear}.scale"].float().repeat_interleave(block, 0).repeat_interleave(block, 1)
    assert len(scales.unique()) == (1 if block == 128 else 3)
    assert torch.equal(found[f"{linear}.weight"], stored[f"{linear}.weight"].float() * scales)


def test_a_scale_of_deepseek_v4_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = families.make_v4(tmp_path / "v4")
    tensors = load_file(model / "model.safetensors")
    scale = "layers.0.ffn.experts.0.w1.scale"
    tiny.save(model, {**tensors, scale: tensors[scale][:, :3].contiguous()}, config=config_of(model))
    with pytest.raises(CheckpointError, match=rf"'{scale}' is F8_E8M0 \[128, 3\], but its config says .*\[128, 4\]"):
        ptqpipe.convert(model, out=tmp_path / "out")
    del tensors[scale]
    tiny.save(model, tensors, config=config_of(model))
    with pytest.raises(CheckpointError, match=r"w1.weight' is I8 without"):
        ptqpipe.convert(model, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def config_of(model: Path) -> dict[str, Any]:
    return dict(json.loads((model / "config.json").read_text()))


@pytest.mark.parametrize(
    ("fmt", "exponents", "codes", "lossless"),
    [
        ("nvfp4", (-3, -20), range(16), True),  # E4M3 has the powers of two from 2^-9 to 2^8
        ("nvfp4", (-3, -21), range(16), False),
        ("nvfp4", (-3, -22), (4, 6, 7, 14), True),  # 2, 4 and 6 are .5, 1 and 1.5 at four times the scale
        ("nvfp4", (-3, -23), (4, 6, 7, 14), False),
        ("mxfp8", (100, -110), range(16), True),
        ("fp8_block", (-3, -17), range(16), True),  # 14 octaves between 6 * 2^6 and 0.5 * 2^-8
        ("fp8_block", (-3, -18), range(16), False),
        ("mxfp4", (-3, -60), range(16), True),
    ],
)  # fmt: skip
def test_mxfp4_is_written_without_loss_where_its_exponents_allow_it(
    tmp_path: Path, fmt: str, exponents: tuple[int, ...], codes: Any, lossless: bool
) -> None:
    model = families.make_v4(tmp_path / "v4", exponents=exponents, codes_of_least=tuple(codes))
    found = converted(model, tmp_path / "out", fmt)
    assert (found == LOSSLESS) is lossless
    entries = [entry for name, entry in record_of(tmp_path / "out")["weights"].items() if "experts" in name]
    assert len(entries) == 3
    if lossless:
        assert all(entry["squared_error"] == 0 for entry in entries)
    else:  # as few as possible: no block of the larger numbers
        changes = [entry["changed"] for entry in entries]
        assert all(0 < change["blocks"] <= 128 * 128 // (16 if fmt == "nvfp4" else 128 * 128) for change in changes)
        assert max(change["largest_error"] for change in changes) <= 2.0 ** (min(exponents) + 1)
        assert found.startswith(f"{sum(change['weights'] for change in changes)} weights changed; ")


def test_mxfp4_of_gptoss_and_compressed_tensors_becomes_nvfp4_without_loss(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    base, tensors = "model.layers.0.mlp.experts", {"model.embed_tokens.weight": torch.randn(32, 64).bfloat16()}
    for name, rows in (("gate_up_proj", 128), ("down_proj", 64)):
        tensors[f"{base}.{name}_blocks"] = torch.randint(0, 256, (2, rows, 2, 16), generator=generator).to(torch.uint8)
        tensors[f"{base}.{name}_scales"] = torch.randint(115, 125, (2, rows, 2), generator=generator).to(torch.uint8)
        tensors[f"{base}.{name}_bias"] = torch.zeros(2, rows).bfloat16()
    config = {"model_type": "gpt_oss", "hidden_size": 64, "quantization_config": {"quant_method": "mxfp4"}}
    gptoss = tiny.save(tmp_path / "gptoss", tensors, config=config)
    assert converted(gptoss, tmp_path / "a", "nvfp4", container="ptqpipe") == LOSSLESS
    assert len(record_of(tmp_path / "a")["weights"]) == 4
    llama = ptqpipe.convert(tiny.save(tmp_path / "llama", tiny.llama()), format="mxfp4", out=tmp_path / "ct").out
    assert llama is not None
    assert converted(llama, tmp_path / "b", "nvfp4", algorithm="rtn") == LOSSLESS


def test_a_certificate_that_is_not_true_is_found(tmp_path: Path) -> None:
    model = families.make_v4(tmp_path / "v4", exponents=(-3, -22))
    out = tmp_path / "out"
    assert converted(model, out, "nvfp4") != LOSSLESS
    record = record_of(out)
    for entry in record["weights"].values():
        if "changed" in entry:
            entry["changed"] = {"weights": 0, "blocks": 0, "largest_error": 0.0}
    (out / "ptqpipe.json").write_text(json.dumps(record))
    said = [str(finding) for finding in verify(out, workers=1).findings]
    assert any("certificate" in line for line in said)
    (out / "ptqpipe.json").write_text(json.dumps(record | {"certificate": LOSSLESS}))
    said = [str(finding) for finding in verify(out, source=model, workers=1).findings]
    assert any("w1" in line and "compared with the source" in line for line in said)


def test_what_only_adds_error_needs_an_option(tmp_path: Path) -> None:
    model = ptqpipe.convert(tiny.save(tmp_path / "llama", tiny.llama()), format="nvfp4", out=tmp_path / "low").out
    assert model is not None
    with pytest.raises(UsageError, match=r"already quantized \(nvfp4, .*to mxfp8 would only add error.*requantize"):
        ptqpipe.convert(model, format="mxfp8", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    found = converted(model, tmp_path / "out", "mxfp8", requantize=True)
    assert not found.startswith("0 weights")
