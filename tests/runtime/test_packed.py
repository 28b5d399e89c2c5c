"""packed_linear: the decode is QTensor's, the product is that of the decoded weight within its bound."""

from collections.abc import Iterator

import pytest
import torch

from ptqpipe.api.matrices import quantize
from ptqpipe.errors import FormatError
from ptqpipe.numerics.formats import WHOLE
from ptqpipe.numerics.kernels import cpu, cpu_linear
from ptqpipe.runtime import packed as packed_module
from ptqpipe.runtime.packed import PackedWeight, packed_linear, packed_linears

ISAS = [isa for isa in cpu.isas() if isa != "baseline"]  # which have a layout of their own
FORMATS = ("nvfp4", "mxfp4", "mxfp8", "mxfp6_e2m3", "fp8_channel", "fp8_tensor", "fp8_block")
ROWS = (*range(1, 18), 47, 48, 200, 700)
U, V = 2.0**-24, 2.0**-8


@pytest.fixture(params=ISAS or [pytest.param("none", marks=pytest.mark.skip(reason="no compiled kernels"))])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each instruction set of this machine, in use while a test runs."""
    cpu.force_isa(request.param)
    yield request.param
    cpu.force_isa(None)


def weight(fmt: str, n: int, k: int, *, seed: int = 0) -> tuple[PackedWeight, torch.Tensor]:
    """A packed weight of very different rows, and its float64 decode."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(n, k, generator=g) * torch.exp2(torch.randint(-12, 6, (n, 1), generator=g).float())
    w[0] = 0
    q = quantize(w.bfloat16(), fmt)
    return PackedWeight.from_qtensor(q), q.dequantize().double()


def bound(x: torch.Tensor, w: torch.Tensor, exact: torch.Tensor, *, decoded_bf16: bool) -> torch.Tensor:
    """Two float32 roundings a product and sum, two bfloat16 ones of the result; a third where weights are rounded."""
    sums = x.double().abs() @ w.abs().t()
    return sums * (2 * w.shape[1] * U + (V if decoded_bf16 else 0)) + 2.1 * V * exact.abs() + 1e-30


@pytest.mark.slow
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("shape", [(48, 128), (33, 256), (250, 480), (16, 2080), (5, 2080)])
@pytest.mark.parametrize("layout", ["rows", "panels"])
@pytest.mark.usefixtures("isa")
def test_the_product_is_that_of_the_decoded_weight(fmt: str, shape: tuple[int, int], layout: str) -> None:
    packed, w = weight(fmt, *shape)
    packed = packed.arranged() if layout == "panels" else packed
    for rows in ROWS:
        x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows)).bfloat16()
        y, exact = packed_linear(x, packed).double(), x.double() @ w.t()
        limit = bound(x, w, exact, decoded_bf16=fmt == "fp8_block")
        assert y.shape == (rows, shape[0])
        assert bool(((y - exact).abs() <= limit).all()), f"{fmt} {shape} {rows} rows"


@pytest.mark.parametrize("isa", cpu.isas())
@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "mxfp8", "fp8_channel", "fp8_block"])
def test_every_instruction_set_has_a_kernel_for_few_rows(fmt: str, isa: str) -> None:
    packed, w = weight(fmt, 40, 416 if fmt != "fp8_block" else 384)
    x = torch.randn(9, w.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    bias = torch.randn(40, generator=torch.Generator().manual_seed(2)).bfloat16()
    cpu.force_isa(isa)
    try:
        operand = cpu_linear.operand(packed.data, packed.scales, packed.factor, packed.fmt, packed.shape, panels=False)
        assert operand is not None
        y = cpu_linear.linear(x, operand, bias)
    finally:
        cpu.force_isa(None)
    exact = x.double() @ w.t() + bias.double()
    assert bool(((y.double() - exact).abs() <= bound(x, w, exact, decoded_bf16=False)).all())


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "mxfp8", "fp8_channel"])
@pytest.mark.usefixtures("isa")
def test_all_codes_and_scales_decode_in_the_kernel(fmt: str) -> None:
    """A single one in x reads one column: every code under every scale comes out as QTensor decodes it."""
    packed, _ = weight(fmt, 256, 64)
    g = torch.Generator().manual_seed(3)
    data = torch.randint(0, 256, packed.data.shape, generator=g, dtype=torch.uint8)
    if fmt in ("mxfp8", "fp8_channel"):
        data[(data & 127) == 127] = 0  # NaN
    scales = packed.scales
    if scales is not None:
        codes = torch.arange(256, dtype=torch.uint8).reshape(-1, 1).expand(scales.shape)
        scales = (codes % 127 if fmt == "nvfp4" else 64 + codes % 128).contiguous()
    packed = PackedWeight(packed.fmt, packed.shape, data, scales, packed.factor)
    w = packed.dequantize()
    x = torch.eye(64).bfloat16()
    for layout in (packed, packed.arranged()):
        for rows in (1, 4, 16, 64):
            for start in range(0, 64, rows):
                y = packed_linear(x[start : start + rows], layout)
                assert torch.equal(y, w[:, start : start + rows].t().bfloat16())


@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.usefixtures("isa")
def test_scales_that_are_negative_or_nan_reach_their_own_row_alone(rows: int) -> None:
    packed, w = weight("nvfp4", 48, 128)
    assert packed.scales is not None
    packed.scales[3, 2], packed.scales[40, 7] = 0x7F, packed.scales[40, 7] | 0x80
    w[40, 112:] *= -1
    x = torch.randn(rows, 128, generator=torch.Generator().manual_seed(9)).bfloat16()
    y, exact = packed_linear(x, packed.arranged()).double(), x.double() @ w.t()
    others = [row for row in range(48) if row != 3]
    assert bool(y[:, 3].isnan().all())
    assert bool(((y - exact).abs() <= bound(x, w, exact, decoded_bf16=False))[:, others].all())


@pytest.mark.parametrize("rows", [1, 2, 6, 16, 64])
@pytest.mark.parametrize("fmt", ["mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8"])
@pytest.mark.usefixtures("isa")
def test_powers_of_two_that_are_nan_or_the_least_reach_their_own_row_alone(fmt: str, rows: int) -> None:
    packed, w = weight(fmt, 48, 192)  # three units of 64 columns, where scales are read for two at a time
    assert packed.scales is not None
    packed.scales[3, 1] = packed.scales[20, 5] = 0xFF
    packed.scales[33, 2] = 0
    w[33, 64:96] = 0  # 2^-127 times a code: less than the bound
    x = torch.randn(rows, 192, generator=torch.Generator().manual_seed(11)).bfloat16()
    y, exact = packed_linear(x, packed.arranged()).double(), x.double() @ w.t()
    others = [row for row in range(48) if row not in (3, 20)]
    assert bool(y[:, [3, 20]].isnan().all())
    assert bool(((y - exact).abs() <= bound(x, w, exact, decoded_bf16=False))[:, others].all())


@pytest.mark.parametrize("rows", [1, 6, 16])
@pytest.mark.parametrize("fmt", ["fp8_channel", "fp8_block", "mxfp8"])
@pytest.mark.usefixtures("isa")
def test_codes_that_are_nan_reach_their_own_row_alone(fmt: str, rows: int) -> None:
    packed, w = weight(fmt, 48, 256)
    packed.data[3, 200], packed.data[40, 0] = 0x7F, 0xFF
    x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(10)).bfloat16()
    x[0, 200] = 0
    y, exact = packed_linear(x, packed.arranged()).double(), x.double() @ w.t()
    others = [row for row in range(48) if row not in (3, 40)]
    assert bool(y[:, [3, 40]].isnan().all())
    assert bool(((y - exact).abs() <= bound(x, w, exact, decoded_bf16=fmt == "fp8_block"))[:, others].all())


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.usefixtures("isa")
def test_panels_hold_the_same_bytes(fmt: str) -> None:
    packed, _ = weight(fmt, 250, 480)
    arranged = packed.arranged()
    back = arranged.in_rows()
    assert (arranged.operand is not None) == (cpu_linear.limit(panels=True) > 0)
    assert torch.equal(back.data, packed.data)
    assert packed.scales is back.scales or torch.equal(*(x.view(torch.uint8) for x in (back.scales, packed.scales)))  # type: ignore[union-attr]
    assert torch.equal(arranged.dequantize(), packed.dequantize())


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "fp8_channel"])
@pytest.mark.usefixtures("isa")
def test_a_row_does_not_depend_on_the_others_nor_on_threads(fmt: str) -> None:
    packed, _ = weight(fmt, 2048, 512)
    packed = packed.arranged()
    x = torch.randn(13, 512, generator=torch.Generator().manual_seed(4)).bfloat16()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = packed_linear(x, packed)
        assert torch.equal(torch.cat([packed_linear(row.unsqueeze(0), packed) for row in x]), whole)
        torch.set_num_threads(3)
        for _ in range(20):
            assert torch.equal(packed_linear(x, packed), whole)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("fmt", ["nvfp4", "fp8_channel"])
@pytest.mark.parametrize("rows", [1, 5, 40, 600])
@pytest.mark.usefixtures("isa")
def test_products_that_are_computed_together_are_those_that_are_computed_alone(fmt: str, rows: int) -> None:
    parts = [weight(fmt, n, 512, seed=n)[0] for n in (96, 20, 2000)]
    x = torch.randn(2, rows, 512, generator=torch.Generator().manual_seed(rows)).bfloat16()
    biases = [None, torch.randn(20).bfloat16(), None]
    for layout in (parts, [part.arranged() for part in parts]):
        together = packed_linears(x, list(zip(layout, biases, strict=True)))
        for y, part, bias in zip(together, layout, biases, strict=True):
            assert torch.equal(y, packed_linear(x, part, bias))


@pytest.mark.skipif(
    not cpu_linear.Bf16Panels.fastest(), reason="this machine has no kernel for bfloat16 panels, or a faster way"
)
@pytest.mark.parametrize("shape", [(48, 128), (33, 70), (5, 2080), (250, 480)])
@pytest.mark.usefixtures("isa")
def test_a_bfloat16_weight_multiplies_in_panels(shape: tuple[int, int]) -> None:
    g = torch.Generator().manual_seed(8)
    w, bias = torch.randn(shape, generator=g).bfloat16(), torch.randn(shape[0], generator=g).bfloat16()
    operand = cpu_linear.Bf16Panels(w).operand()
    assert operand is not None
    for rows in ROWS:
        x = torch.randn(rows, shape[1], generator=g).bfloat16()
        y, exact = cpu_linear.linear(x, operand, bias).double(), x.double() @ w.double().t() + bias.double()
        assert bool(((y - exact).abs() <= bound(x, w.double(), exact, decoded_bf16=False)).all()), f"{rows} rows"


@pytest.mark.skipif(
    not cpu_linear.Bf16Panels.fastest(), reason="this machine has no kernel for bfloat16 panels, or a faster way"
)
@pytest.mark.parametrize("shape", [(48, 128), (33, 70), (5, 2080)])
@pytest.mark.usefixtures("isa")
def test_rows_come_out_of_bfloat16_panels_and_some_of_them_multiply(shape: tuple[int, int]) -> None:
    g = torch.Generator().manual_seed(8)
    w, x = torch.randn(shape, generator=g).bfloat16(), torch.randn(3, shape[1], generator=g).bfloat16()
    panels = cpu_linear.Bf16Panels(w)
    index = torch.randint(shape[0], (2, 7), generator=g)
    assert torch.equal(panels.rows(index), w[index])
    assert panels.rows(index[:, :0]).shape == (2, 0, shape[1])
    for outside in (-1, shape[0]):
        with pytest.raises(IndexError):
            panels.rows(torch.tensor([0, outside]))
    every = panels.operand()
    assert every is not None
    whole = cpu_linear.linear(x, every, None)
    for first, last in ((0, min(16, shape[0])), (16, shape[0]), (32, shape[0])):
        some = panels.operand(slice(first, last))
        if first < last:
            assert some is not None
            assert torch.equal(cpu_linear.linear(x, some, None), whole[:, first:last])
    assert panels.operand(slice(3, shape[0])) is None


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_decode_is_qtensors(fmt: str) -> None:
    q = quantize(torch.randn(256, 256, generator=torch.Generator().manual_seed(5)).bfloat16(), fmt)
    assert torch.equal(PackedWeight.from_qtensor(q).dequantize(), q.dequantize())


@pytest.mark.parametrize("fmt", FORMATS)
def test_narrowing_commutes_with_decoding(fmt: str) -> None:
    q = quantize(torch.randn(256, 256, generator=torch.Generator().manual_seed(6)).bfloat16(), fmt)
    packed, w = PackedWeight.from_qtensor(q).arranged(), q.dequantize()
    if q.fmt.block != (WHOLE, WHOLE):
        assert torch.equal(packed.narrow(0, 128, 128).dequantize(), w[128:])
    part = packed.narrow(1, 128, 128)
    assert torch.equal(part.dequantize(), w[:, 128:])
    x = torch.randn(3, 128).bfloat16()
    assert torch.equal(packed_linear(x, part.arranged()), packed_linear(torch.nn.functional.pad(x, (128, 0)), packed))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("seeds", [(0, 0, 0), (0, 1, 2)])  # of equal global scales, and of different ones
def test_joined_weights_are_parts_of_one(fmt: str, seeds: tuple[int, ...]) -> None:
    heights = (128, 256, 40)
    made = [weight(fmt, n, 256, seed=seed) for n, seed in zip(heights, seeds, strict=True)]
    whole, *parts = PackedWeight.joined([packed for packed, _ in made]) or []
    assert whole.shape == (sum(heights), 256)
    for part, (packed, _) in zip(parts, made, strict=True):
        assert torch.equal(part.dequantize(), packed.dequantize())
        assert part.data.untyped_storage().data_ptr() == whole.data.untyped_storage().data_ptr()
        if part.scales is not None and whole.scales is not None:
            assert part.scales.is_contiguous()
            assert part.scales.untyped_storage().data_ptr() == whole.scales.untyped_storage().data_ptr()
    w = torch.cat([decoded for _, decoded in made])
    for rows in (1, 48, 700):
        x = torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows))
        y, exact = packed_linear(x.bfloat16(), whole).double(), x.bfloat16().double() @ w.t()
        assert bool(((y - exact).abs() <= bound(x.bfloat16(), w, exact, decoded_bf16=fmt == "fp8_block")).all())
        y, exact = packed_linear(x, whole).double(), x.double() @ w.t()
        assert bool(((y - exact).abs() <= x.double().abs() @ w.abs().t() * (2 * 256 + 3) * U + 1e-30).all())


def test_weights_that_do_not_go_together_are_not_joined() -> None:
    one, _ = weight("nvfp4", 32, 256)
    blocks, part = weight("fp8_block", 40, 256)[0], weight("fp8_block", 128, 256)[0]
    assert PackedWeight.joined([one, weight("mxfp4", 32, 256)[0]]) is None
    assert PackedWeight.joined([one, weight("nvfp4", 32, 128)[0]]) is None
    assert PackedWeight.joined([part, blocks]) is not None
    assert PackedWeight.joined([blocks, part]) is None  # of whose blocks one would have rows of both
    panels = one.arranged()
    if panels.operand is not None:
        assert PackedWeight.joined([panels, panels]) is None


def test_float32_inputs_meet_the_exact_decode() -> None:
    packed, w = weight("nvfp4", 96, 256)
    packed = packed.arranged()
    x = torch.randn(4, 3, 256, generator=torch.Generator().manual_seed(7))
    exact = x.double() @ w.t()
    sums = x.double().abs() @ w.abs().t()
    y = packed_linear(x, packed)
    assert y.dtype == torch.float32
    assert bool(((y - exact).abs() <= sums * 2 * 256 * U + 1e-30).all())


@pytest.mark.usefixtures("isa")
def test_nan_and_inf_reach_the_rows_that_hold_them_alone() -> None:
    packed, _ = weight("nvfp4", 64, 128)
    packed = packed.arranged()
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(8)).bfloat16()
    clean = packed_linear(x, packed)
    x[1, 5], x[2, 9] = float("nan"), float("inf")
    y = packed_linear(x, packed)
    assert torch.equal(y[[0, 3]], clean[[0, 3]])
    assert bool(y[1].isnan().all())
    assert not bool(torch.isfinite(y[2]).any())


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [(0,), (2, 0), (0, 3)])
def test_no_rows_are_no_rows(fmt: str, dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    packed, _ = weight(fmt, 128, 128)
    packed = packed.arranged()
    x = torch.zeros(*rows, 128, dtype=dtype)
    for y in (packed_linear(x, packed), *packed_linears(x, [(packed, None), (packed, None)])):
        assert (y.shape, y.dtype) == ((*rows, 128), dtype)


@pytest.mark.parametrize("fmt", ["nvfp4", "fp8_channel"])
def test_torchs_bfloat16_products_have_few_numbers_of_rows(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN keeps what it compiles for each; the rows that are added do not show."""
    monkeypatch.setattr(cpu_linear, "limit", lambda *, panels: 0)
    product, seen = torch.nn.functional.linear, set()

    def counted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        seen.add(x.shape[0])
        return product(x, w)

    monkeypatch.setattr(packed_module, "linear", counted)
    packed, w = weight(fmt, 48, 256)
    x = torch.randn(100, 256, generator=torch.Generator().manual_seed(9)).bfloat16()
    for rows in range(1, 101):
        y, exact = packed_linear(x[:rows], packed), x[:rows].double() @ w.t()
        assert y.shape == (rows, 48)
        assert bool(((y - exact).abs() <= bound(x[:rows], w, exact, decoded_bf16=False)).all())
    assert seen == {32, 64, 96, 128}


def test_an_input_of_another_width_is_refused() -> None:
    packed, _ = weight("nvfp4", 32, 64)
    with pytest.raises(FormatError, match="an input of 48 columns for a weight of 32x64"):
        packed_linear(torch.zeros(1, 48), packed)
