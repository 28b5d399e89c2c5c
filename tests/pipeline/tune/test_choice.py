"""The two codes that a weight may have: where it starts, and where it moves."""

import pytest
import torch

from ptqpipe.numerics.formats import get_format
from ptqpipe.numerics.global_scale import absmax_global
from ptqpipe.numerics.qtensor import QTensor, code_values
from ptqpipe.pipeline.tune.kl.choice import Choice
from ptqpipe.quantization.unit import quantize_rows


def quantized(w: torch.Tensor, name: str = "nvfp4") -> QTensor:
    fmt = get_format(name)
    g = absmax_global(float(w.abs().max()), fmt) if fmt.has_global else None
    return quantize_rows(w, fmt, search="exact", global_scale=g)


def correlated(batches: int, rows: int, columns: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(columns // 8, columns, generator=generator)
    return [
        torch.randn(rows, columns // 8, generator=generator) @ mix
        + 0.1 * torch.randn(rows, columns, generator=generator)
        for _ in range(batches)
    ]


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8", "fp8_channel"])
def test_the_start_is_what_was_given(name: str) -> None:
    w = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    w[0, :32] = 0.0
    q = quantized(w.bfloat16(), name)
    choice = Choice(w, q)
    assert torch.equal(choice.codes(), q.codes)
    torch.testing.assert_close(choice.weight(), q.dequantize(), rtol=2**-22, atol=0.0)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_a_weight_moves_to_the_next_code_on_the_side_of_the_float_weight(name: str) -> None:
    w = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    q = quantized(w, name)
    choice = Choice(w, q)
    choice.v.data.fill_(0.5)
    moved = QTensor.from_codes(choice.codes(), q.scales, fmt=q.fmt, global_scale=q.global_scale).dequantize()
    start = q.dequantize()
    side = torch.sign(w - start)
    changed = (moved != start) & ((w - start).abs() > 1e-6 * w.abs())  # the side of a weight on its code is rounding
    assert changed.float().mean() > 0.8
    assert torch.equal(torch.sign(moved - start)[changed], side[changed])
    values = torch.unique(code_values(torch.arange(16, dtype=torch.uint8), q.fmt.element))
    scale = q.block_scales().repeat_interleave(q.fmt.block[1], 1)
    places = torch.searchsorted(values, (torch.stack([start, moved]) / scale).clamp(-6, 6) - 1e-4)
    assert int((places[0] - places[1]).abs().max()) == 1
