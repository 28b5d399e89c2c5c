"""Claims of reading a folder of learned codes: damage is one line that names the field, never a traceback."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ptqpipe.errors import CheckpointError, UsageError
from ptqpipe.numerics.formats import get_format
from ptqpipe.quantization.learned_codes import LearnedCodes

NVFP4 = get_format("nvfp4")


def write(folder: Path, change: Callable[[dict[str, Any]], object] = lambda content: None, **tensors: Any) -> Path:
    """A folder with the codes of one 4x32 weight, by the safetensors library."""
    folder.mkdir(exist_ok=True)
    stored = {"w.data": torch.zeros(4, 16, dtype=torch.uint8), "w.scales": torch.ones(4, 2, dtype=torch.uint8)}
    stored |= {"w.global_scale": torch.ones(1)}
    save_file({**stored, **tensors}, folder / "b.safetensors")
    content: dict[str, Any] = {
        "version": 1,
        "digest": "d",
        "model": {"fingerprint": "f"},
        "weights": {"w": {"format": "nvfp4", "shape": [4, 32]}},
    }
    change(content)
    (folder / "rounding.json").write_text(json.dumps(content))
    return folder


def test_codes_are_read_as_they_were_written(tmp_path: Path) -> None:
    with LearnedCodes.open(write(tmp_path / "r")) as rounding:
        q = rounding.of("w", NVFP4, shape=(4, 32))
        assert q.shape == (4, 32)
        assert float(q.dequantize().abs().max()) == 0.0


@pytest.mark.parametrize("method", ["learned", "gptq+learned"])
def test_codes_of_a_method_that_is_gone_are_refused_with_what_to_run_again(method: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "r", lambda content: content.update(method=method))
    again = rf'method {re.escape(method)}, .* again: ptqpipe\.tune\("MODEL", data='
    with pytest.raises(UsageError, match=again) as error:
        LearnedCodes.open(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.pop("model"), "it has no 'model'; tune again"),
        (lambda c: c["model"].pop("fingerprint"), "model has no 'fingerprint'"),
        (lambda c: c.pop("digest"), "it has no 'digest'"),
        (lambda c: c["weights"]["w"].pop("format"), "weights.w has no 'format'"),
        (lambda c: c["weights"]["w"].pop("shape"), "weights.w has no 'shape'"),
        (lambda c: c["weights"]["w"].update(shape=3), "weights.w.shape is 3, expected a list"),
        (lambda c: c["weights"]["w"].update(shape=[4, "x"]), r"weights.w.shape\[1\] is 'x', expected a count"),
        (lambda c: c["weights"].update(w=None), "weights.w is None, expected an object"),
        (lambda c: c.update(blocks={"b": {"file": []}}), r"blocks.b.file is \[\], expected text"),
        (lambda c: c.update(version=2), "has version 2, expected 1"),
        (lambda c: c.update(version={}), "version is {}, expected a count"),
    ],
)
def test_a_damaged_field_is_named(change: Callable[[dict[str, Any]], object], says: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=says):
        LearnedCodes.open(write(tmp_path / "r", change))


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"w.data": torch.zeros(4, 15, dtype=torch.uint8)}, "damaged codes of 'w'"),
        ({"w.data": torch.zeros(4, 16)}, "damaged codes of 'w'"),
        ({"w.scales": torch.zeros(4, 2)}, "scales of 'w' that are none of nvfp4"),
        ({"w.scales": torch.zeros(4, 3, dtype=torch.uint8)}, "damaged codes of 'w'"),
        ({"w.global_scale": torch.ones(2)}, "scales of 'w' that are none of nvfp4"),
    ],
)
def test_codes_of_another_shape_or_dtype_are_refused(tensors: dict[str, Any], says: str, tmp_path: Path) -> None:
    with LearnedCodes.open(write(tmp_path / "r", **tensors)) as rounding, pytest.raises(CheckpointError, match=says):
        rounding.of("w", NVFP4, shape=(4, 32))


def test_another_shape_in_the_recipe_says_both(tmp_path: Path) -> None:
    with (
        LearnedCodes.open(write(tmp_path / "r")) as rounding,
        pytest.raises(UsageError, match="the recipe wants nvfp4"),
    ):
        rounding.of("w", NVFP4, shape=(4, 16))
