"""The claims about Triton's products with packed weights. ``test_triton_linear.py`` runs this file in a process.

Once with TRITON_INTERPRET=1, which has to be set before Triton is imported, on CPU tensors; and once on a CUDA device
where there is one. Expected values are float64 products with QTensor's decode.
"""

from dataclasses import replace

import pytest
import torch

from ptqpipe.api.matrices import quantize
from ptqpipe.numerics.formats import get_codec
from ptqpipe.numerics.kernels import triton as kernels, triton_linear
from ptqpipe.runtime.packed import PackedWeight

DEVICE = "cpu" if kernels.interpreting() else "cuda"
# An odd number of rows that no tile divides, columns that no step divides; FP8 in blocks has short blocks at both ends.
SHAPES = {
    "nvfp4": (33, 1136),
    "mxfp4": (33, 1120),
    "mxfp8": (33, 608),
    "fp8_channel": (33, 602),
    "fp8_tensor": (65, 130),
    "fp8_block": (131, 300),
}
ROWS = (1, 3, 16, 33)  # tiles of 8, of 16 and of 64 rows
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def linear(
    x: torch.Tensor, w: PackedWeight, bias: torch.Tensor | None = None, parts: int | None = None
) -> torch.Tensor:
    """The kernel's product, on the CPU."""
    there = [None if t is None else t.to(DEVICE) for t in (w.data, w.scales, w.factor, bias)]
    data, scales, factor, added = there
    assert data is not None
    y = triton_linear.linear(x.to(DEVICE), data, scales, factor, w.fmt, w.shape, added, parts=parts)
    assert y is not None
    return y.cpu()


def weight(fmt: str, n: int, k: int) -> tuple[PackedWeight, torch.Tensor]:
    """A packed weight of very different rows, and its float64 decode."""
    g = torch.Generator().manual_seed(0)
    w = torch.randn(n, k, generator=g) * torch.exp2(torch.randint(-12, 6, (n, 1), generator=g).float())
    w[0] = 0
    q = quantize(w.bfloat16(), fmt)
    return PackedWeight.from_qtensor(q), q.dequantize().double()


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Two float32 roundings a product and sum, one of the result, half of float16's smallest number."""
    exact = x.double() @ w.t()
    sums = x.double().abs() @ w.abs().t()
    if bias is not None:
        exact, sums = exact + bias.double(), sums + bias.double().abs()
    limit = sums * (2 * w.shape[1] * 2.0**-24) + ROUNDING[x.dtype] * exact.abs() + 2.0**-25
    assert y.dtype == x.dtype
    assert bool(((y.double() - exact).abs() <= limit).all())


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("fmt", SHAPES)
def test_the_product_is_that_of_the_decoded_weight(fmt: str, rows: int) -> None:
    packed, w = weight(fmt, *SHAPES[fmt])
    for dtype in ROUNDING:
        x = numbers(rows, w.shape[1], seed=rows, dtype=dtype)
        assert_close(linear(x, packed), x, w)


@pytest.mark.parametrize("rows", [2, 3, 16])
@pytest.mark.parametrize("fmt", ["nvfp4", "fp8_channel", "fp8_block"])
def test_parts_of_k_add_up_to_the_same(fmt: str, rows: int) -> None:
    packed, w = weight(fmt, *SHAPES[fmt])
    bias = numbers(w.shape[0], seed=7, dtype=torch.float32)
    x = numbers(rows, w.shape[1], seed=rows)
    for parts in (1, 2, 3, 50):
        assert_close(linear(x, packed, bias, parts), x, w, bias)


@pytest.mark.parametrize("rows", [3, 16])
def test_scales_of_blocks_may_be_float32(rows: int) -> None:
    packed, w = weight("fp8_block", *SHAPES["fp8_block"])
    assert packed.scales is not None
    fmt = replace(packed.fmt, scale=get_codec("fp32"))
    packed = replace(packed, fmt=fmt, scales=packed.scales.float() * 1.0001)
    x = numbers(rows, w.shape[1], seed=rows)
    factor = float(torch.tensor(1.0001))
    assert_close(linear(x, packed), x, w * factor)


def test_a_device_with_many_processors_cuts_k() -> None:
    plan = triton_linear.plan_of(weight("nvfp4", 16, 64)[0].fmt, torch.ones(1))
    assert plan is not None
    for shape, parts in (((64, 1 << 18), triton_linear.PARTS), ((65536, 65536), 1)):
        tile = triton_linear.tile_of(plan, 1, shape, torch.bfloat16, parts=None, processors=132)
        assert tile.parts == parts


@pytest.mark.parametrize("rows", [1, 16])
def test_the_bias_is_added_before_the_one_rounding(rows: int) -> None:
    packed, w = weight("nvfp4", 33, 160)
    x = numbers(rows, 160, seed=1)
    bias = numbers(33, seed=2)
    y = linear(x, packed, bias)
    assert_close(y, x, w, bias)
    assert torch.equal(y[:, 0], bias[0].expand(rows))  # a row of zeros


@pytest.mark.parametrize("rows", [1, 4, 64])
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "mxfp8", "fp8_channel", "fp8_block"])
def test_every_code_and_scale_decodes_exactly(fmt: str, rows: int) -> None:
    """A row of the identity reads one column: every code, every scale, as QTensor decodes them."""
    columns = 64
    packed, _ = weight(fmt, 256, columns)
    g = torch.Generator().manual_seed(3)
    data = torch.randint(0, 256, packed.data.shape, generator=g, dtype=torch.uint8)
    if packed.fmt.element.bits == 8:
        data[(data & 127) == 127] = 0  # NaN, which would reach the columns of every other one
    scales = packed.scales
    if scales is not None and scales.element_size() == 1:
        codes = torch.arange(256, dtype=torch.uint8).reshape(-1, 1).expand(scales.shape)
        # Powers of two whose products with every code are bfloat16 numbers, none of them subnormal or infinite.
        scales = (codes % 127 if fmt == "nvfp4" else 16 + codes % 220).contiguous()
    packed = PackedWeight(packed.fmt, packed.shape, data, scales, packed.factor)
    w = packed.dequantize()
    for start in range(0, min(columns, 4 * rows), rows):
        y = linear(torch.eye(columns)[start : start + rows].bfloat16(), packed)
        assert torch.equal(y, w[:, start : start + rows].t().bfloat16())


@pytest.mark.parametrize("fmt", SHAPES)
def test_unpacked_weights_are_the_inner_numbers(fmt: str) -> None:
    packed, _ = weight(fmt, *SHAPES[fmt])
    scales = None if packed.scales is None else packed.scales.to(DEVICE)
    found = triton_linear.unpacked(packed.data.to(DEVICE), scales, packed.fmt, packed.shape)
    assert found is not None
    inner = replace(packed, factor=None if packed.scales is not None else torch.ones(1), divisor=None)
    assert torch.equal(found.cpu(), inner.dequantize().bfloat16())
    part = packed.data[5:23].to(DEVICE)  # rows of a longer weight, where blocks are of one row
    if packed.scales is None:
        again = triton_linear.unpacked(part, None, packed.fmt, (18, packed.shape[1]))
        assert again is not None
        assert torch.equal(again, found[5:23])


def test_the_fifteen_numbers_of_e2m1_in_order_of_their_codes() -> None:
    packed, _ = weight("mxfp4", 16, 32)
    data = torch.arange(16, dtype=torch.uint8).reshape(16, 1).expand(16, 16) * 17
    packed = PackedWeight(
        packed.fmt, packed.shape, data.contiguous(), torch.full((16, 1), 127, dtype=torch.uint8), None
    )
    want = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    for rows in (1, 16):
        y = linear(torch.eye(32)[:rows].bfloat16(), packed)
        assert y[0].tolist() == want + [-value for value in want]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp8", "fp8_channel"])
def test_nan_and_negative_scales_reach_their_own_row_alone(fmt: str, rows: int) -> None:
    packed, w = weight(fmt, 33, 160)
    if fmt == "fp8_channel":
        packed.data[3, 7] = 0xFF
    else:
        assert packed.scales is not None
        packed.scales[3, 2] = 0x7F if fmt == "nvfp4" else 0xFF
        if fmt == "nvfp4":
            packed.scales[20, 1] |= 0x80
            w[20, 16:32] *= -1
    others = [row for row in range(33) if row != 3]
    x = numbers(rows, 160, seed=4)
    y = linear(x, packed)
    assert bool(y[:, 3].isnan().all())
    assert_close(y[:, others], x, w[others])


@pytest.mark.parametrize("rows", [1, 16])
def test_an_inf_or_nan_in_x_reaches_its_own_row_alone(rows: int) -> None:
    packed, w = weight("fp8_channel", 20, 64)
    packed.data[2] = 0x38  # ones, so that an inf stays one
    for dtype in ROUNDING:
        x = numbers(rows + 1, 64, seed=5, dtype=dtype)
        x[0, 9] = float("inf")
        y = linear(x, packed)
        assert float(y[0, 2]) == float("inf")
        assert_close(y[1:, 3:], x[1:], w[3:])


def test_a_row_of_x_gets_the_same_bits_whatever_the_others_hold() -> None:
    packed, _ = weight("nvfp4", 33, 1136)
    for rows in ROWS:
        x = numbers(rows, 1136, seed=6)
        y = linear(x, packed, parts=3)
        x[1:] = numbers(rows, 1136, seed=7)[1:] * 100
        assert torch.equal(linear(x, packed, parts=3)[0], y[0])


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_views_are_read_where_they_lie(rows: int) -> None:
    packed, w = weight("fp8_channel", 33, 256)
    part = packed.narrow(1, 30, 130)  # bytes of a longer row, at an even place
    x = numbers(rows * 2, 400, seed=8)[::2, 5:135]
    assert_close(linear(x, part), x, w[:, 30:160])
    packed, w = weight("nvfp4", 33, 128)
    x = numbers(1 + rows * 128, seed=9)[1:].reshape(rows, 128)  # not on a word
    assert_close(linear(x, packed), x, w)


def test_what_has_no_kernel_gives_none() -> None:
    packed, _ = weight("nvfp4", 16, 64)
    data, scales = packed.data.to(DEVICE), packed.scales
    assert scales is not None
    x = numbers(2, 64, seed=11).to(DEVICE)
    ask = (scales.to(DEVICE), None, packed.fmt, packed.shape)
    assert triton_linear.linear(x.float(), data, *ask) is None
    assert triton_linear.linear(x[:0], data, *ask) is None
    assert triton_linear.linear(x[:, :32], data, *ask) is None
    assert triton_linear.linear(x[:1].expand(triton_linear.MANY + 1, -1), data, *ask) is None
    eight, _ = weight("fp8_channel", 16, 64)
    assert eight.factor is not None
    factor = eight.factor.to(DEVICE)
    for first, count in ((1, 62), (0, 61)):  # bytes at an odd place, and an odd number of them: no items of two
        part, shape = eight.data.to(DEVICE).narrow(1, first, count), (16, count)
        assert triton_linear.linear(x[:, :count], part, None, factor, eight.fmt, shape) is None
        assert triton_linear.unpacked(part, None, eight.fmt, shape) is None
    six, _ = weight("mxfp6_e2m3", 16, 64)
    assert six.scales is not None
    assert triton_linear.linear(x, six.data.to(DEVICE), six.scales.to(DEVICE), None, six.fmt, six.shape) is None
