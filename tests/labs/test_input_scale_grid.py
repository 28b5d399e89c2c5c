"""Claims about the study that multiplies the static input scales of a checkpoint."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ptqpipe
from tests import tiny

LAYER = "model.layers.0."


@pytest.fixture(scope="module")
def grid() -> Any:
    pytest.importorskip("transformers", reason="needs the extra hf")
    return import_module("labs.input_scale_grid.__main__")


@pytest.mark.parametrize("container", ["compressed_tensors", "modelopt"])
def test_scales_are_those_that_a_larger_constant_gives_in_layouts_that_multiply_or_divide(
    grid: Any, container: str, tmp_path: Path
) -> None:
    model = tiny.save(tmp_path / "model", tiny.llama())
    for name, amax in (("once", 336.0), ("twice", 672.0)):
        ptqpipe.convert(model, format="nvfp4_w4a4", container=container, input_amax=amax, out=tmp_path / name)
    grid.scaled(tmp_path / "once", tmp_path / "all", 2.0, "")
    grid.scaled(tmp_path / "once", tmp_path / "first", 2.0, LAYER)
    once, twice, every, first = (
        load_file(next((tmp_path / name).glob("*.safetensors"))) for name in ("once", "twice", "all", "first")
    )
    assert {name for name in once if not torch.equal(once[name], twice[name])}
    for name, tensor in twice.items():
        assert torch.equal(every[name], tensor)
        assert torch.equal(first[name], tensor if LAYER in name else once[name])


def test_a_checkpoint_without_such_scales_is_refused(grid: Any, tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(SystemExit, match="has no static input scale; give one of nvfp4_w4a4"):
        grid.scaled(tmp_path, tmp_path.with_name("out"), 2.0, "")
