"""Claims: the dtype that a model is stored in, where it holds the same numbers, changes no scale and no code."""

from pathlib import Path

import pytest
import torch

import ptqpipe
from ptqpipe.numerics.qtensor import QTensor
from tests import tiny


@pytest.mark.parametrize("search", ["exact", "absmax"])
@pytest.mark.parametrize("scheme", ["fp8", "fp8_tensor", "fp8_block", "nvfp4", "mxfp8"])
def test_a_float32_copy_of_a_bfloat16_model_is_quantized_to_the_same_bytes(
    tmp_path: Path, scheme: str, search: str
) -> None:
    source = tiny.llama(layers=1)
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        model = tiny.save(tmp_path / str(dtype), {name: w.to(dtype) for name, w in source.items()})
        done = ptqpipe.convert(model, format=scheme, scale_search=search, out=tmp_path / f"{dtype} out")
        with ptqpipe.load_tensors(done.out) as loaded:
            found[dtype] = {name: loaded[name] for name in done.record["weights"]}
    assert len(found[torch.bfloat16]) >= 4  # fp8_block keeps what does not fill its tiles
    for name, ours in found[torch.bfloat16].items():
        wide = found[torch.float32][name]
        assert isinstance(ours, QTensor)
        assert isinstance(wide, QTensor)
        assert torch.equal(ours.data, wide.data), name
        assert torch.equal(ours.scales, wide.scales), name
        assert ours.global_scale == wide.global_scale, name
