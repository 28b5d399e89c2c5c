"""Models, and sound checkpoints of them."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ptqpipe
from tests import tiny
from tests.check.verify.checks import MOE_CONFIG, Q, moe


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("dense") / "model", tiny.llama())


@pytest.fixture(scope="module")
def good(model: Path) -> Path:
    """An NVFP4 W4A4 conversion in several files, so that every kind of stored tensor and an index are there."""
    out = model.parent / "good"
    ptqpipe.convert(model, format="nvfp4_w4a4", out=out, shard_size=60_000, workers=1)
    return out


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("moe")
    source = tiny.save(folder / "model", moe(), config=MOE_CONFIG)
    ptqpipe.convert(source, format="nvfp4", out=folder / "good", workers=1)
    return source, folder / "good"


@pytest.fixture(scope="module")
def foreign(model: Path) -> Path:
    """As ModelOpt writes FP8: a scale for each weight, as float32, and those of a kv cache beside k and v."""
    out = ptqpipe.convert(model, format="fp8_static", container="modelopt", out=model.parent / "foreign", workers=1).out
    (out / "ptqpipe.json").unlink()
    for name, keys in (("config.json", ("quantization_config",)), ("hf_quant_config.json", ())):
        content = json.loads((out / name).read_text())
        inner = content[keys[0]] if keys else content
        inner.pop("ptqpipe", None)
        inner["producer"] = {"name": "modelopt", "version": "0.47.0"}
        (out / name).write_text(json.dumps(content))
    tensors = load_file(out / "model.safetensors")
    for layer, leaf in ((0, "k"), (0, "v"), (1, "k"), (1, "v")):
        module = f"model.layers.{layer}.self_attn.{leaf}_proj"
        tensors[f"{module}.weight_scale"] *= 1.5
        tensors[f"{module}.{leaf}_scale"] = torch.tensor(0.5 + layer)
    tensors[f"{Q}.weight_scale"] *= 1.0 + 2.0**-20  # no bfloat16 number
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out
