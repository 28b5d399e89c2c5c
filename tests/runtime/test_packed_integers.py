"""packed_linear of E2M1 on AVX2 and NEON, whose products are of whole numbers: 16 columns of x stand over one power of
two, so a part of the largest of them may be lost, and no more."""

from collections.abc import Iterator

import pytest
import torch

from ptqpipe.api.matrices import quantize
from ptqpipe.numerics.kernels import cpu
from ptqpipe.runtime.packed import PackedWeight, packed_linear
from tests.runtime.test_packed import U, V, bound, weight

IN_INTEGERS = next((isa for isa in cpu.isas() if isa in ("avx2", "neon")), None)
LOST = 2.0**-14 if IN_INTEGERS == "neon" else 2.0**-15  # of the largest of 16 columns of x, at most

pytestmark = [
    pytest.mark.skipif(IN_INTEGERS is None, reason="this machine has no kernel for AVX2 or NEON"),
    pytest.mark.usefixtures("in_integers"),
]


@pytest.fixture
def in_integers() -> Iterator[None]:
    """That instruction set, in use while a test runs."""
    cpu.force_isa(IN_INTEGERS)
    yield
    cpu.force_isa(None)


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_inputs_far_below_the_largest_of_16_lose_less_than_stated(fmt: str) -> None:
    g = torch.Generator().manual_seed(12)
    w, x = torch.randn(48, 512, generator=g), torch.randn(5, 512, generator=g)
    w[:, ::16] = 0  # else what the largest contribute hides the loss
    x[:, ::16] *= 2.0**11
    packed = PackedWeight.from_qtensor(quantize(w.bfloat16(), fmt))
    w = packed.dequantize().double()
    x = x.bfloat16()
    y = packed_linear(x, packed.arranged()).double()
    exact = x.double() @ w.t()
    largest = x.double().abs().reshape(5, -1, 16).amax(-1).repeat_interleave(16, 1)
    lost = LOST * largest @ w.abs().t()
    assert bool(((y - exact).abs() <= bound(x, w, exact, decoded_bf16=False) + lost).all())
    assert bool(((y - exact).abs() > bound(x, w, exact, decoded_bf16=False)).any())  # the part that is stated is needed


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("largest", [2.0**-126, 2.0**-60, 1.0, 2.0**100])
def test_inputs_and_scales_of_any_size_stay_within_the_bound(fmt: str, largest: float) -> None:
    """One outlier in each 16 columns, the others any power of two below it or zero, under the smallest and the largest
    scales: no product of a scale and a sum is lost where the result is not."""
    g = torch.Generator().manual_seed(14)
    packed, _ = weight(fmt, 64, 256)
    assert packed.scales is not None
    ends = (1, 2, 7, 8, 120, 126) if fmt == "nvfp4" else (0, 1, 30, 127, 140)
    codes = torch.tensor(ends)[torch.randint(len(ends), (64, 1), generator=g)]
    scales = codes.expand(packed.scales.shape).to(torch.uint8).contiguous()
    packed = PackedWeight(packed.fmt, packed.shape, packed.data, scales, None)
    w = packed.dequantize().double()
    down = torch.exp2(-torch.randint(0, 20, (50, 256), generator=g).float())
    x = torch.randn(50, 256, generator=g) * down * largest * (torch.rand(50, 256, generator=g) < 0.9)
    x[:, 5::16] = largest
    x = x.bfloat16()
    y = packed_linear(x, packed.arranged())
    few = torch.cat([packed_linear(some, packed.arranged()) for some in x.split([1, 2, 3, 4, 40])])
    assert torch.equal(y, few)
    exact = x.double() @ w.t()
    tops = x.double().abs().reshape(50, -1, 16).amax(-1).clamp_min(2.0**-100).repeat_interleave(16, 1)
    sums = x.double().abs() @ w.abs().t()
    limit = sums * 2 * 256 * U + 2.1 * V * exact.abs() + LOST * tops @ w.abs().t() + 2.0**-133
    assert bool(((y.double() - exact).abs() <= limit).all())


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4"])
def test_few_and_many_rows_have_the_same_bits_in_integers(fmt: str) -> None:
    """Codes are decoded on the way for few rows and before for many, which go in turns; sums are the same."""
    packed, _ = weight(fmt, 48, 1120)
    packed = packed.arranged()
    assert packed.operand is not None
    x = torch.randn(101, 1120, generator=torch.Generator().manual_seed(15)).bfloat16()
    x[7, 1000], x[60, 3] = float("nan"), float("inf")
    whole = packed_linear(x, packed)
    parts = [1, 2, 3, 4, 5, 6, 7, 48, 25]
    some = torch.cat([packed_linear(part, packed) for part in x.split(parts)])
    assert bool(whole[[7, 60]].isnan().all())
    assert torch.equal(some.view(torch.int16), whole.view(torch.int16))
    assert bool(torch.isfinite(whole[[0, 6, 8, 59, 61, 100]]).all())


def test_inputs_of_one_size_are_exact_in_integers() -> None:
    """Numbers of x that are within 6 binades of the largest of their 16 are whole: with scales of 1 the sum is the
    exact one, rounded once to bfloat16."""
    g = torch.Generator().manual_seed(13)
    w = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[torch.randint(8, (32, 256), generator=g)]
    w *= torch.randint(0, 2, w.shape, generator=g) * 2 - 1
    w[:, ::32] = 6
    packed = PackedWeight.from_qtensor(quantize(w, "mxfp4", scale_search="absmax")).arranged()
    assert torch.equal(packed.dequantize(), w)
    x = torch.randint(2, 129, (9, 256), generator=g) / 32.0
    y = packed_linear(x.bfloat16(), packed)
    assert torch.equal(y, (x.double() @ w.double().t()).bfloat16())
