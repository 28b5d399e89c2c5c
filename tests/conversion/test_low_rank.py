"""Checkpoints of earlier versions with low-rank parts: refused, never read without them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ptqpipe
from ptqpipe.check.inspect import inspect
from ptqpipe.check.verify.command import verify
from ptqpipe.conversion.dequantize import dequantize
from ptqpipe.conversion.relayout.command import relayout
from ptqpipe.errors import CheckpointError
from tests import tiny

WEIGHT = "model.layers.0.mlp.down_proj.weight"
READERS: dict[str, Callable[[Path], object]] = {
    "load_tensors": ptqpipe.load_tensors,
    "load_model": ptqpipe.load_model,
    "inspect": inspect,
    "dequantize": lambda path: dequantize(path, path.parent / "floats"),
    "relayout": lambda path: relayout(path, path.parent / "other", container="compressed_tensors"),
}


def checkpoint(folder: Path, *, version: int, listed: bool, stored: bool) -> Path:
    """A conversion with what a version that had low-rank parts wrote for them: into the config, beside the codes."""
    model = tiny.save(folder / "model", tiny.llama(layers=1), config={**tiny.LLAMA_CONFIG, "num_hidden_layers": 1})
    out = ptqpipe.convert(model, out=folder / "out", format="nvfp4", container="ptqpipe", workers=1).out
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["version"] = version
    if listed:
        config["quantization_config"]["default"] |= {"low_rank": 4, "low_rank_dtype": "bf16"}
    (out / "config.json").write_text(json.dumps(config))
    if stored:
        tensors = load_file(out / "model.safetensors")
        n, k = tensors[f"{WEIGHT}_packed"].shape[0], 2 * tensors[f"{WEIGHT}_packed"].shape[1]
        tensors |= {f"{WEIGHT}_low_rank_left": torch.ones(n, 4), f"{WEIGHT}_low_rank_right": torch.ones(4, k)}
        save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses_in_one_line_and_writes_nothing(reader: str, tmp_path: Path) -> None:
    out = checkpoint(tmp_path, version=2, listed=True, stored=True)
    with pytest.raises(CheckpointError, match=r"has a low-rank part, .* convert the float model again$") as error:
        READERS[reader](out)
    assert "\n" not in str(error.value)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "out"}


def test_verify_says_so_in_its_only_fault(tmp_path: Path) -> None:
    (fault,) = verify(checkpoint(tmp_path, version=2, listed=True, stored=True)).faults
    assert "has a low-rank part" in fault.message


@pytest.mark.parametrize(("version", "listed", "stored"), [(2, False, False), (1, True, False), (1, False, True)])
def test_any_sign_of_one_is_enough(version: int, listed: bool, stored: bool, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has a low-rank part"):
        ptqpipe.load_tensors(checkpoint(tmp_path, version=version, listed=listed, stored=stored))
