"""Claims about quantized matrices: how a weight is rounded, decoded, cut, and how its error is measured."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from ptqpipe.errors import FormatError, NumericsError
from ptqpipe.numerics.formats import CODECS, Codec, Format, get_codec, get_format, pack
from ptqpipe.numerics.qtensor import (
    QTensor,
    check_finite,
    code_values,
    encode,
    from_blocks,
    magnitude_codes,
    round_to,
    squared_error,
    to_blocks,
)

ELEMENTS = ("e2m1", "e2m3", "e3m2", "e4m3", "e5m2", "e1m2", "e3m0", "ue5m3", "ue4m4")


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def unit_format(element: str, columns: int) -> Format:
    """Elements of this codec, one E8M0 scale a row: code 127 is the scale 1."""
    return Format("unit", get_codec(element), (1, columns), CODECS["e8m0"])


def encode_at_one(w: torch.Tensor, element: str) -> torch.Tensor:
    fmt = unit_format(element, w.shape[1])
    return encode(w, torch.full((w.shape[0], 1), 127, dtype=torch.uint8), fmt=fmt).codes


# Rounding


def test_e2m1_ties_go_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    assert round_to(ties, CODECS["e2m1"]).tolist() == [0, 1, 1, 2, 2, 4, 4]


@pytest.mark.parametrize("name", ELEMENTS)
def test_ties_go_to_the_even_code_and_one_ulp_decides(name: str) -> None:
    codec = get_codec(name)
    for code, (low, high) in enumerate(zip(codec.magnitudes, codec.magnitudes[1:], strict=False)):
        tie = torch.tensor((low + high) / 2)
        assert float(tie) == (low + high) / 2
        around = torch.stack(
            [torch.nextafter(tie, torch.tensor(0.0)), tie, torch.nextafter(tie, torch.tensor(math.inf))]
        )
        even = code if code % 2 == 0 else code + 1
        assert magnitude_codes(around, codec).tolist() == [code, even, code + 1]


@pytest.mark.parametrize(("name", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_eight_bit_rounding_is_that_of_torch(name: str, dtype: torch.dtype) -> None:
    codec = CODECS[name]
    bits = torch.arange(0, 0x7F800000, 4099, dtype=torch.int32)  # every binade of float32, subnormals too
    y = torch.cat([bits.view(torch.float32), torch.rand(20000, generator=generator(0)) * codec.max])
    expected = y.clamp(max=codec.max).to(dtype)
    assert torch.equal(round_to(y, codec), expected.float())
    assert torch.equal(magnitude_codes(y, codec), expected.view(torch.uint8).long())


@pytest.mark.parametrize("name", ELEMENTS)
def test_what_lies_above_the_largest_magnitude_saturates(name: str) -> None:
    codec = get_codec(name)
    above = torch.tensor([codec.max, codec.max * 1.01, codec.max * 2, 3e38])
    assert round_to(above, codec).tolist() == [codec.max] * 4


@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2", "e4m3", "e5m2", "e1m2", "e3m0"])
def test_encoding_decoded_codes_gives_them_back(name: str) -> None:
    """Negative zero included: its sign bit survives both ways."""
    codec = get_codec(name)
    count = len(codec.magnitudes)
    sign = 1 << (codec.bits - 1)
    codes = torch.tensor([[*range(count), *range(sign, sign + count)]], dtype=torch.uint8)
    if codes.shape[1] * codec.bits % 8:
        codes = codes.repeat(1, 8)
    values = code_values(codes, codec)
    assert torch.equal(values.abs() > 0, (codes & (sign - 1)) > 0)
    assert bool(torch.signbit(values[0, count]))
    assert torch.equal(encode_at_one(values, name), codes)


def test_tiny_negatives_become_negative_zero() -> None:
    w = torch.tensor([[-0.1, 0.1, -0.0, 0.0]])
    assert encode_at_one(w, "e2m1").tolist() == [[8, 0, 8, 0]]


def test_codes_that_the_codec_reserves_decode_to_nan() -> None:
    assert torch.isnan(code_values(torch.tensor([127, 255], dtype=torch.uint8), CODECS["e4m3"])).all()
    assert torch.isnan(code_values(torch.tensor([255], dtype=torch.uint8), CODECS["e8m0"])).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_sources_dtype_changes_no_code(dtype: torch.dtype) -> None:
    w = torch.randn(4, 32, generator=generator(3)).to(dtype)
    scales = torch.randint(1, 127, (4, 2), generator=generator(4)).to(torch.uint8)
    g = torch.tensor(0.003)
    fmt = get_format("nvfp4")
    assert torch.equal(
        encode(w, scales, fmt=fmt, global_scale=g).data, encode(w.float(), scales, fmt=fmt, global_scale=g).data
    )


def test_subnormal_weights_round_to_zero_at_an_ordinary_scale() -> None:
    assert encode_at_one(torch.full((1, 4), 1e-40), "e2m1").tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (math.nan, r"the tensor has 1 NaN and 0 inf, the first at \[1, 2\]"),
        (math.inf, r"the tensor has 0 NaN and 1 inf, the first at \[1, 2\]"),
        (-math.inf, r"the tensor has 0 NaN and 1 inf, the first at \[1, 2\]"),
    ],
)
def test_nan_and_inf_raise_and_are_located(bad: float, message: str) -> None:
    w = torch.zeros(2, 4)
    w[1, 2] = bad
    with pytest.raises(NumericsError, match=message):
        encode_at_one(w, "e2m1")


def test_check_finite_accepts_the_largest_numbers_and_nothing_at_all() -> None:
    check_finite(torch.tensor([3.4e38, -3.4e38, 0.0]))
    check_finite(torch.empty(0, 4))
    with pytest.raises(NumericsError, match="'w' has 2 NaN"):
        check_finite(torch.tensor([math.nan, 1.0, math.nan]), "'w'")


# Decode


def test_decode_multiplies_the_scales_first() -> None:
    """value(code) * (value(scale) * global_scale), each product rounded to float32; the other order differs."""
    fmt = get_format("nvfp4")
    codes = torch.randint(0, 16, (64, 64), generator=generator(5)).to(torch.uint8)
    scales = torch.randint(1, 127, (64, 4), generator=generator(6)).to(torch.uint8)
    g = torch.tensor(0.0123456789)
    q = QTensor.from_codes(codes, scales, fmt=fmt, global_scale=g)
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    value = e2m1[codes.long()]
    scale = scales.view(torch.float8_e4m3fn).float().repeat_interleave(16, 1)
    assert torch.equal(q.dequantize(), value * (scale * g))
    assert not torch.equal(q.dequantize(), (value * scale) * g)
    assert torch.equal(q.codes, codes)


def test_a_divisor_divides_the_block_scales() -> None:
    fmt = get_format("nvfp4")
    scales = torch.randint(1, 127, (2, 2), generator=generator(7)).to(torch.uint8)
    divisor = torch.tensor(1922.145)
    q = QTensor(fmt, (2, 32), torch.zeros(2, 16, dtype=torch.uint8), scales, divisor, global_divides=True)
    assert torch.equal(q.block_scales(), scales.view(torch.float8_e4m3fn).float() / divisor)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("fp8_block", (130, 300)), ("fp8_tensor", (6, 10)), ("fp8_channel", (6, 10)), ("nvfp4", (6, 32))],
)
def test_blocks_and_back_is_the_identity(name: str, shape: tuple[int, int]) -> None:
    fmt = get_format(name)
    w = torch.randn(shape, generator=generator(8))
    blocks = to_blocks(w, fmt)
    rows, cols = fmt.block_extent(shape)
    grid = fmt.scale_shape(shape)
    assert blocks.shape == (grid[0] * grid[1], rows * cols)
    assert torch.equal(from_blocks(blocks, fmt=fmt, shape=shape), w)
    assert float(blocks.abs().sum()) == pytest.approx(float(w.abs().sum()), rel=1e-5)  # padding is zero


def test_blocks_follow_the_order_of_the_scale_grid() -> None:
    fmt = Format("tile", CODECS["e4m3"], (2, 3), CODECS["bf16"], partial_blocks=True)
    w = torch.arange(15.0).reshape(3, 5)
    assert to_blocks(w, fmt).tolist() == [
        [0, 1, 2, 5, 6, 7],
        [3, 4, 0, 8, 9, 0],
        [10, 11, 12, 0, 0, 0],
        [13, 14, 0, 0, 0, 0],
    ]


def test_tiles_decode_with_their_own_scale() -> None:
    fmt = Format("tile", CODECS["e4m3"], (2, 3), CODECS["bf16"], partial_blocks=True)
    codes = torch.full((3, 5), 56, dtype=torch.uint8)  # E4M3 1.0
    scales = torch.tensor([[1.0, 2.0], [4.0, 8.0]], dtype=torch.bfloat16)
    expected = [[1, 1, 1, 2, 2], [1, 1, 1, 2, 2], [4, 4, 4, 8, 8]]
    assert QTensor.from_codes(codes, scales, fmt=fmt).dequantize().tolist() == expected


# Narrow


def random_scales(fmt: Format, shape: tuple[int, int], seed: int) -> torch.Tensor:
    grid = fmt.scale_shape(shape)
    if not fmt.scale.enumerable:
        return torch.rand(grid, generator=generator(seed)).add(0.01).to(fmt.scale.dtype)
    middle = len(fmt.scale.magnitudes) // 2
    return torch.randint(middle - 4, middle + 4, grid, generator=generator(seed)).to(torch.uint8)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(["nvfp4", "mxfp4", "mxfp6_e2m3", "mxfp8", "fp8_channel", "fp8_block"]), st.data())
def test_narrow_commutes_with_encode(name: str, data: st.DataObject) -> None:
    fmt = get_format(name)
    shape = (300, 384) if name == "fp8_block" else (6, 96)
    w = torch.randn(shape, generator=generator(9))
    scales = random_scales(fmt, shape, 10)
    g = torch.tensor(0.37) if fmt.has_global else None
    whole = encode(w, scales, fmt=fmt, global_scale=g)
    dim = data.draw(st.sampled_from([0, 1] if fmt.block[1] else [0]))
    extent = fmt.block_extent(shape)[dim]
    blocks = -(-shape[dim] // extent)
    first = data.draw(st.integers(0, blocks - 1))
    last = data.draw(st.integers(first + 1, blocks))
    start, stop = first * extent, min(last * extent, shape[dim])
    part = whole.narrow(dim, start, stop - start)
    again = encode(w.narrow(dim, start, stop - start), scales.narrow(dim, first, last - first), fmt=fmt, global_scale=g)
    assert torch.equal(part.data, again.data)
    assert torch.equal(part.scales, again.scales)
    assert torch.equal(part.dequantize(), whole.dequantize().narrow(dim, start, stop - start))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("nvfp4", (1, 8, 16)),
        ("nvfp4", (1, 0, 24)),
        ("nvfp4", (0, 3, 4)),
        ("nvfp4", (0, 2, 0)),
        ("nvfp4", (0, -1, 2)),
    ],
)
def test_narrow_off_the_block_edges_is_refused(name: str, arguments: tuple[int, int, int]) -> None:
    fmt = get_format(name)
    q = encode(torch.ones(6, 96), random_scales(fmt, (6, 96), 0), fmt=fmt, global_scale=torch.tensor(1.0))
    with pytest.raises(FormatError, match="does not lie on block edges; use multiples of"):
        q.narrow(*arguments)


@pytest.mark.parametrize("name", ["fp8_channel", "fp8_tensor"])
@pytest.mark.parametrize(("dim", "start", "length"), [(0, 1, 3), (0, 0, 6), (1, 5, 43), (1, 0, 96)])
def test_a_part_along_an_axis_that_shares_a_scale_keeps_it(name: str, dim: int, start: int, length: int) -> None:
    fmt = get_format(name)
    q = encode(torch.randn(6, 96, generator=generator(13)), random_scales(fmt, (6, 96), 14), fmt=fmt)
    part = q.narrow(dim, start, length)
    assert torch.equal(part.dequantize(), q.dequantize().narrow(dim, start, length))
    if fmt.one_scale:
        assert torch.equal(part.scales, q.scales)
    with pytest.raises(FormatError, match="does not lie on block edges"):
        q.narrow(dim, start, 97)


# Construction


def test_parts_that_do_not_fit_together_are_refused() -> None:
    fmt = get_format("nvfp4")
    data, scales, g = torch.zeros(2, 16, dtype=torch.uint8), torch.ones(2, 2, dtype=torch.uint8), torch.tensor(1.0)
    with pytest.raises(FormatError, match=r"data of a 2x32 weight must be uint8 \[2, 16\]"):
        QTensor(fmt, (2, 32), data[:, :15], scales, g)
    with pytest.raises(FormatError, match=r"must be uint8 \[2, 16\], got torch.int8"):
        QTensor(fmt, (2, 32), data.to(torch.int8), scales, g)
    with pytest.raises(FormatError, match=r"scales of a 2x32 weight must be \[2, 2\]"):
        QTensor(fmt, (2, 32), data, scales[:, :1], g)
    with pytest.raises(FormatError, match="nvfp4 needs a global scale"):
        QTensor(fmt, (2, 32), data, scales)
    with pytest.raises(FormatError, match="mxfp4 has no global scale"):
        QTensor(get_format("mxfp4"), (2, 32), data, scales[:, :1], g)
    assert QTensor(fmt, (2, 32), data, scales, g).nbytes == 32 + 4 + 4


# Errors


def test_squared_error_is_that_of_the_decode_in_float64() -> None:
    fmt = get_format("mxfp4")
    w = torch.randn(3, 64, generator=generator(11)).bfloat16()
    q = encode(w, random_scales(fmt, (3, 64), 12), fmt=fmt)
    by_hand = math.fsum(
        (a - b) ** 2 for a, b in zip(q.dequantize().flatten().tolist(), w.flatten().tolist(), strict=True)
    )
    # The sum is float64 over 192 terms; fsum is exact, so 192 * 2^-53 bounds the difference.
    assert squared_error(q, w) == pytest.approx(by_hand, rel=192 * 2.0**-53)


def test_zeros_have_no_error() -> None:
    fmt = get_format("mxfp4")
    w = torch.zeros(1, 32)
    assert squared_error(encode(w, torch.zeros(1, 1, dtype=torch.uint8), fmt=fmt), w) == 0.0


def test_from_codes_packs_as_packing_says() -> None:
    codes = torch.randint(0, 64, (2, 32), generator=generator(13)).to(torch.uint8)
    q = QTensor.from_codes(codes, torch.full((2, 1), 127, dtype=torch.uint8), fmt=get_format("mxfp6_e2m3"))
    assert torch.equal(q.data, pack(codes, 6))


def largest_gap(codec: Codec) -> float:
    return max(b - a for a, b in zip(codec.magnitudes, codec.magnitudes[1:], strict=False))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(["e2m1", "e2m3", "e3m2", "e4m3"]), st.integers(0, 2**32))
def test_the_nearest_code_is_nearest(name: str, seed: int) -> None:
    codec = CODECS[name]
    y = torch.rand(64, generator=generator(seed)) * codec.max * 1.2
    table = torch.tensor(codec.magnitudes, dtype=torch.float64)
    distance = (y.double().unsqueeze(1) - table).abs()
    taken = distance.gather(1, magnitude_codes(y, codec).unsqueeze(1))[:, 0]
    assert torch.equal(taken, distance.amin(dim=1))
    assert float(taken[y <= codec.max].max()) <= largest_gap(codec) / 2
