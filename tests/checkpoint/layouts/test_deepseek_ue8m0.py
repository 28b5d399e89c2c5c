"""Claims about FP8 blocks whose scales are powers of two, as DeepSeek-V3.1's files spell them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ptqpipe
from ptqpipe.check.verify.command import verify
from ptqpipe.conversion.relayout.command import relayout
from ptqpipe.errors import CheckpointError
from ptqpipe.numerics.formats import get_format
from ptqpipe.numerics.search.brute_force import search as brute_force
from ptqpipe.runtime import load, load_model
from tests import tiny

WEIGHT = "model.layers.0.self_attn.o_proj.weight"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    weights = {WEIGHT: torch.randn(320, 256, generator=torch.Generator().manual_seed(0)).bfloat16() * 0.1}
    return tiny.save(tmp_path_factory.mktemp("plain"), weights, config={"model_type": "llama"})


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "out"
    return Path(ptqpipe.convert(model, out=out, format="fp8_block_ue8m0", workers=1).out)


def test_scales_are_float32_powers_of_two_that_brute_force_finds(model: Path, made: Path) -> None:
    stored = load_file(made / "model.safetensors")
    scales = stored[f"{WEIGHT}_scale_inv"]
    assert scales.dtype == torch.float32
    assert torch.equal(scales.log2().round(), scales.log2())
    best = brute_force(load_file(model / "model.safetensors")[WEIGHT], get_format("fp8_block_ue8m0"))
    assert torch.equal(torch.exp2(best.float() - 127), scales)
    described = json.loads((made / "config.json").read_text())["quantization_config"]
    assert (described["quant_method"], described["scale_fmt"]) == ("fp8", "ue8m0")
    assert verify(made, source=model, workers=1).ok


def test_another_layout_and_back_are_the_same_bytes(made: Path, tmp_path: Path) -> None:
    relayout(made, tmp_path / "own", container="ptqpipe")
    relayout(tmp_path / "own", tmp_path / "back", container="deepseek_fp8")
    assert load_file(tmp_path / "own/model.safetensors")[f"{WEIGHT}_scale"].dtype == torch.uint8
    assert (tmp_path / "back/model.safetensors").read_bytes() == (made / "model.safetensors").read_bytes()
    assert verify(tmp_path / "back", workers=1).ok


def test_a_scale_that_is_no_power_of_two_is_refused_where_the_config_says_so(made: Path, tmp_path: Path) -> None:
    tensors = load_file(made / "model.safetensors")
    tensors[f"{WEIGHT}_scale_inv"][1, 1] = 0.3
    (tmp_path / "config.json").write_text((made / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{WEIGHT}_scale_inv has the scale 0\.3.*powers of two"):
        dict(ptqpipe.load_tensors(tmp_path))[WEIGHT].dequantize()


def test_the_packed_model_computes_what_the_decoded_one_does(tmp_path: Path) -> None:
    demo = Path(ptqpipe.__file__).parent / "demo_model"
    done = ptqpipe.convert(demo, out=tmp_path / "out", format="fp8_block_ue8m0", workers=1)
    ids = torch.arange(3, 15).reshape(1, -1)
    with torch.no_grad():
        packed, decoded = load(done.out, dtype="float32")(ids).logits, load_model(done.out)(ids).logits
    assert torch.allclose(packed, decoded, rtol=0, atol=1e-4 * float(decoded.abs().max()))
