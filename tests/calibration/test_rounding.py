"""Learned rounding: where it starts, that it gains on samples it has not seen, and how parameters are put together."""

import pytest
import torch

from ptqpipe.calibration.assembly import assemble
from ptqpipe.calibration.rounding import Choice, Settings, learn
from ptqpipe.models.slices import Member, Slice
from ptqpipe.numerics.formats import get_format
from ptqpipe.numerics.global_scale import absmax_global
from ptqpipe.numerics.qtensor import QTensor, code_values
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


def test_learned_codes_gain_on_samples_that_were_not_trained_on() -> None:
    w = torch.randn(24, 64, generator=torch.Generator().manual_seed(2))
    q = quantized(w)
    xs = correlated(16, 64, 64, seed=3)
    fresh = torch.cat(correlated(64, 64, 64, seed=3)[16:])
    learned = learn(
        {"w": w},
        {"w": q},
        forward=lambda x, batch, weights: x @ weights["w"].t(),
        inputs=lambda batch: xs[batch],
        targets=lambda batch: xs[batch] @ w.t(),
        batches=16,
        windows_per_batch=8,
        settings=Settings(steps=300),
    )
    assert learned.kept
    after = QTensor.from_codes(learned.codes["w"], q.scales, fmt=q.fmt, global_scale=q.global_scale).dequantize()
    error = [float((fresh @ (w - at).t()).square().sum()) for at in (q.dequantize(), after)]
    assert error[1] < 0.5 * error[0]
    assert learned.learned_loss < learned.start_loss
    assert 0.0 < learned.moved < 0.5


def test_the_start_is_kept_where_nothing_is_gained() -> None:
    w = torch.randn(8, 32, generator=torch.Generator().manual_seed(4))
    q = quantized(w)
    xs = correlated(4, 16, 32, seed=5)
    learned = learn(
        {"w": w},
        {"w": q},
        forward=lambda x, batch, weights: x @ weights["w"].t(),
        inputs=lambda batch: xs[batch],
        targets=lambda batch: xs[batch] @ q.dequantize().t(),
        batches=4,
        windows_per_batch=8,
        settings=Settings(steps=20),
    )
    assert not learned.kept
    assert torch.equal(learned.codes["w"], q.codes)
    assert learned.moved == 0.0


def experts(count: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    return {
        f"b.experts.{e}.{leaf}.weight": torch.randn(6, 4, generator=generator)
        for e in range(count)
        for leaf in ("w1", "w3")
    }


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_of_experts_make_the_stack_that_was_loaded(*, transposed: bool) -> None:
    weights = experts(3)
    stacks = [torch.stack([weights[f"b.experts.{e}.{leaf}.weight"] for e in range(3)]) for leaf in ("w1", "w3")]
    parameter = torch.cat(stacks, dim=1)
    parameter = parameter.transpose(1, 2).contiguous() if transposed else parameter
    members = {key: Member(key, (6, 4), Slice(key)) for key in weights}
    (found,) = assemble({"gate_up": parameter}, {"gate_up": sorted(weights)}, members, weights)
    assert torch.equal(found.build(weights), parameter)
    assert set(found.keys) == set(weights)
    other = parameter + 1.0
    assert assemble({"gate_up": other}, {"gate_up": sorted(weights)}, members, weights) == []


def test_rows_that_alternate_in_a_stack_go_back_to_their_places() -> None:
    parameter = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(7))
    members, weights = {}, {}
    for expert in range(2):
        for start, leaf in enumerate(("gate", "up")):
            member = Member(f"experts.{expert}.{leaf}", (3, 4), Slice("experts.gate_up", start, 2, expert))
            members[member.key] = member
            weights[member.key] = parameter[expert, start::2]
    (found,) = assemble({"gate_up": parameter}, {"gate_up": ["experts.gate_up"]}, members, weights)
    assert torch.equal(found.build(weights), parameter)
