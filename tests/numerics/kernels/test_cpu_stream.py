"""Claims: the compiled amax, decode, decode error and FP8 codes are those of torch, bit for bit.

Expected values: ``QTensor.dequantize``, ``qtensor.encode``, torch reductions, and for the float64 sums
``kernels.reference``, which is held to ``math.fsum`` here.
"""

import math
import struct

import numpy as np
import pytest
import torch

from ptqpipe.errors import FormatError, NumericsError
from ptqpipe.numerics.formats import CODECS, get_format, packed_columns
from ptqpipe.numerics.kernels import cpu, cpu_search, reference
from ptqpipe.numerics.kernels.cpu_decode import same_numbers
from ptqpipe.numerics.qtensor import QTensor, encode
from tests.numerics.kernels.cpu_cases import BFLOAT16, FLOAT16, FLOAT32, generator

built = pytest.mark.skipif(
    not cpu.available(), reason="the CPU kernels are not built: pip install -e . with a C++ compiler"
)


@pytest.fixture(params=cpu.isas() or ("none",), autouse=True)
def _isa(request):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if request.param != "none":
        cpu.force_isa(request.param)
    yield
    cpu.force_isa(None)
    torch.set_num_threads(threads)


def random_qtensor(name: str, shape: tuple[int, int], seed: int) -> QTensor:
    """Random bytes, random legal scales."""
    fmt, g = get_format(name), generator(seed)
    data = torch.randint(0, 256, (shape[0], packed_columns(shape[1], fmt.element.bits)), generator=g).to(torch.uint8)
    if fmt.element.name == "e4m3":
        data[(data & 0x7F) == 0x7F] = 3  # NaN
    grid = fmt.scale_shape(shape)
    if fmt.scale.enumerable:
        low, high = (1, 127) if fmt.scale.bits == 8 and fmt.scale.name == "e4m3" else (100, 150)
        scales = torch.randint(low, high, grid, generator=g).to(torch.uint8)
    else:
        scales = torch.exp2(torch.randn(grid, generator=g)).to(fmt.scale.dtype)
    global_scale = torch.tensor(0.00317) if fmt.has_global else None
    return QTensor(fmt, shape, data, scales, global_scale)


QTENSORS = [
    ("nvfp4", (5, 48)), ("nvfp4", (3, 1600)), ("mxfp4", (3, 96)), ("mxfp8", (4, 1120)), ("mxfp6_e2m3", (3, 96)),
    ("mxfp6_e3m2", (2, 608)), ("e2m1/4/ue5m3", (3, 20)), ("e2m1/256/e4m3/global", (2, 1024)), ("fp8_channel", (7, 37)),
    ("fp8_channel", (3, 1031)), ("fp8_tensor", (5, 530)), ("fp8_block", (260, 300)), ("e2m1/16/fp32", (3, 80)),
    ("e4m3/32/fp16", (3, 64)),
]  # fmt: skip


@built
@pytest.mark.parametrize(("name", "shape"), QTENSORS)
def test_decode_is_dequantize(name, shape):
    q = random_qtensor(name, shape, seed=41)
    for data, scales in ((q.data, q.scales), (q.data.repeat(1, 2)[:, : q.data.shape[1]], q.scales)):
        found = cpu.dequantize(data, scales, q.fmt, q.global_scale)
        assert found is not None
        assert torch.equal(found, q.dequantize())
        half = cpu.dequantize(data, scales, q.fmt, q.global_scale, BFLOAT16)
        assert half is not None
        assert torch.equal(half, q.dequantize().bfloat16())


@built
def test_decode_divides_where_the_container_stores_a_divisor():
    q = random_qtensor("nvfp4", (4, 160), seed=42)
    divided = QTensor(q.fmt, q.shape, q.data, q.scales, torch.tensor(317.3), global_divides=True)
    found = cpu.dequantize(q.data, q.scales, q.fmt, torch.tensor(317.3), global_divides=True)
    assert found is not None
    assert torch.equal(found, divided.dequantize())
    w = torch.randn(4, 160, generator=generator(43))
    error = cpu.decode_error(q.data, q.scales, q.fmt, w, torch.tensor(317.3), global_divides=True)
    assert error == reference.decode_error(divided, w)


@built
@pytest.mark.parametrize("name", ["e2m1/16/e4m3", "mxfp8", "mxfp6_e2m3", "mxfp6_e3m2", "e5m2/32/e8m0"])
def test_every_code_under_every_scale(name):
    """Reserved codes of elements and scales decode to NaN."""
    fmt = get_format(name)
    codes = torch.arange(1 << fmt.element.bits, dtype=torch.uint8)
    every = codes.repeat(max(1, fmt.block[1] // len(codes)))
    q = QTensor.from_codes(
        every.repeat(256, 1),
        torch.arange(256, dtype=torch.uint8).unsqueeze(1).repeat(1, len(every) // fmt.block[1]),
        fmt=fmt,
    )
    found = cpu.dequantize(q.data, q.scales, fmt)
    assert found is not None
    assert torch.equal(found.isnan(), q.dequantize().isnan())
    assert torch.equal(found.nan_to_num(7.0), q.dequantize().nan_to_num(7.0))
    half = cpu.dequantize(q.data, q.scales, fmt, dtype=BFLOAT16)
    assert half is not None
    assert torch.equal(half.isnan(), q.dequantize().bfloat16().isnan())
    assert torch.equal(half.nan_to_num(7.0), q.dequantize().bfloat16().nan_to_num(7.0))


@built
@pytest.mark.parametrize(("name", "shape"), QTENSORS)
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32])
def test_decode_error_has_the_bits_of_its_reference(name, shape, dtype):
    q = random_qtensor(name, shape, seed=44)
    w = (q.dequantize() * (1 + 0.1 * torch.randn(shape, generator=generator(45)))).clamp(-6e4, 6e4).to(dtype)
    assert cpu.decode_error(q.data, q.scales, q.fmt, w, q.global_scale) == reference.decode_error(q, w)
    strided = torch.cat((w, w), dim=1)[:, : shape[1]]
    assert cpu.decode_error(q.data, q.scales, q.fmt, strided, q.global_scale) == reference.decode_error(q, w)


@built
@pytest.mark.parametrize(("name", "shape"), QTENSORS)
def test_the_difference_of_codes_is_that_of_their_numbers(name, shape):
    """Of the same numbers, of those with one code changed, and of numbers in another format."""
    q, changed = random_qtensor(name, shape, seed=54), random_qtensor(name, shape, seed=54)
    changed.data[-1, -1] ^= 1
    other = encode(q.dequantize(), torch.ones(shape[0], 1, dtype=torch.bfloat16), fmt=get_format("fp8_channel"))
    for one in (q, changed, other):
        expected = reference.decode_error(q, one.dequantize())
        assert cpu.code_difference(q, one) == expected
        compared = cpu.code_difference(q, one, only_compare=True)
        assert compared is not None
        assert (compared[0] == 0) is (expected[0] == 0) is (one is q)


@built
def test_no_number_is_the_same_as_itself_and_zero_is_as_its_negative():
    q = random_qtensor("mxfp4", (2, 64), seed=55)
    for nan in (0, 1):
        q.scales[1, 1] = 255 if nan else 120
        found = cpu.code_difference(q, q)
        assert found is not None
        assert math.isnan(found[0]) is bool(nan)
    zeros = QTensor(q.fmt, q.shape, torch.zeros_like(q.data), torch.full_like(q.scales, 120))
    negative = QTensor(q.fmt, q.shape, torch.full_like(q.data, 0x88), torch.full_like(q.scales, 120))
    assert cpu.code_difference(zeros, negative) == (0.0, 0.0)
    assert same_numbers(zeros, negative)
    elsewhere = QTensor(q.fmt, q.shape, zeros.data.to("meta"), zeros.scales.to("meta"))
    assert not same_numbers(elsewhere, zeros)
    assert not same_numbers(zeros, elsewhere)


def test_the_reference_sums_in_the_order_it_states():
    """16 lanes by column, rows in order, halves folded: in plain Python floats; and near the true sum."""
    q = random_qtensor("nvfp4", (9, 48), seed=46)
    w = torch.randn(9, 48, generator=generator(47))
    lanes = [0.0] * 16
    diff = (q.dequantize().double() - w.double()).tolist()
    for row in diff:
        for column, d in enumerate(row):
            lanes[column % 16] += d * d
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [lanes[i] + lanes[i + half] for i in range(half)]
    assert reference.decode_error(q, w)[0] == lanes[0]
    true = math.fsum(d * d for row in diff for d in row)
    assert lanes[0] == pytest.approx(true, rel=1e-13)
    terms = torch.rand(1003, generator=generator(48), dtype=torch.float64)
    assert reference.sum_blocks(terms) == pytest.approx(math.fsum(terms.tolist()), rel=1e-13)


@built
@pytest.mark.parametrize("count", [0, 1, 15, 16, 33, 1003])
def test_the_compiled_sum_of_blocks_is_the_references(count):
    terms = torch.randn(count, generator=generator(52), dtype=torch.float64).exp()
    assert cpu_search.sum_blocks(terms) == reference.sum_blocks(terms)


def test_the_reference_does_not_depend_on_its_chunks(monkeypatch):
    q = random_qtensor("fp8_block", (300, 260), seed=49)
    w = torch.randn(300, 260, generator=generator(50))
    terms = torch.rand(1000, generator=generator(51), dtype=torch.float64)
    whole = reference.decode_error(q, w), reference.sum_blocks(terms)
    monkeypatch.setattr(reference, "_CHUNK", 64)
    assert (reference.decode_error(q, w), reference.sum_blocks(terms)) == whole


@built
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32])
def test_amax_and_the_first_damaged_weight(dtype):
    w = torch.randn(37, 129, generator=generator(52)).to(dtype)
    assert cpu.amax(w) == (float(w.float().abs().amax()), -1)
    assert cpu.amax(w[::3, 5:77]) == (float(w[::3, 5:77].float().abs().amax()), -1)
    w[30, 100] = -w.abs().amax() * 2
    assert cpu.amax(w) == (float(w.float().abs().amax()), -1)
    assert cpu.amax(torch.zeros(3, 5, dtype=dtype)) == (0.0, -1)
    assert cpu.amax(torch.full((3, 5), torch.finfo(dtype).max, dtype=dtype)) == (torch.finfo(dtype).max, -1)
    tiny = torch.full((3, 5), torch.finfo(dtype).smallest_normal / 4, dtype=dtype)
    assert cpu.amax(tiny) == (float(tiny[0, 0]), -1)
    for bad in (math.nan, math.inf, -math.inf):
        damaged = w.clone()
        damaged[17, 128] = bad
        damaged[18, 0] = math.nan
        largest, first = cpu.amax(damaged)
        assert not math.isfinite(largest)
        assert first == 17 * 129 + 128


@built
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32])
@pytest.mark.parametrize(
    ("name", "shape"),
    [("fp8_channel", (7, 37)), ("fp8_tensor", (5, 530)), ("fp8_block", (260, 300)), ("fp8_channel", (3, 256))],
)
def test_fp8_codes_are_those_of_encode(name, shape, dtype):
    fmt = get_format(name)
    for exponent in (-12, 0, 9):
        w = (torch.randn(shape, generator=generator(53)) * 2.0**exponent).clamp(-6e4, 6e4).to(dtype)
        scales = (torch.rand(fmt.scale_shape(shape), generator=generator(54)) * 2.0 ** (exponent - 7) + 1e-9).bfloat16()
        assert torch.equal(cpu.fp8_encode(w, scales, fmt), encode(w, scales, fmt=fmt).data)
        wide = torch.cat((w, w), dim=1)[:, : shape[1]]
        assert torch.equal(cpu.fp8_encode(wide, scales, fmt), encode(w, scales, fmt=fmt).data)


@built
def test_every_bfloat16_rounds_to_e4m3_as_torch_rounds():
    """All finite bfloat16 at scale 1 against torch's own float8 (saturating, since torch's overflows to NaN)."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    w = bits.view(BFLOAT16)
    w = w[torch.isfinite(w)].unsqueeze(0)
    scales = torch.ones(1, 1, dtype=BFLOAT16)
    expected = w.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(cpu.fp8_encode(w, scales, get_format("fp8_channel")), expected)


@built
def test_ties_of_e4m3_go_to_the_even_code():
    magnitudes = torch.tensor(CODECS["e4m3"].magnitudes, dtype=torch.float64)
    middle = ((magnitudes[:-1] + magnitudes[1:]) / 2).float()
    low = torch.arange(126)
    expected = torch.where(low % 2 == 0, low, low + 1).to(torch.uint8).unsqueeze(0)
    w = middle.unsqueeze(0)
    scales = torch.ones(1, 1, dtype=BFLOAT16)
    fmt = get_format("fp8_channel")
    assert torch.equal(cpu.fp8_encode(w, scales, fmt), expected)
    assert torch.equal(cpu.fp8_encode(torch.nextafter(w, w * 0), scales, fmt), low.to(torch.uint8).unsqueeze(0))
    assert torch.equal(cpu.fp8_encode(torch.nextafter(w, w * 9), scales, fmt), (low + 1).to(torch.uint8).unsqueeze(0))


@built
def test_damage_and_misfits_raise():
    fmt = get_format("fp8_channel")
    w = torch.randn(3, 37).bfloat16()
    scales = torch.ones(3, 1, dtype=BFLOAT16)
    w[2, 36] = math.nan
    with pytest.raises(NumericsError, match=r"the first at \[2, 36\]"):
        cpu.fp8_encode(w, scales, fmt)
    with pytest.raises(FormatError, match=r"must be torch.bfloat16 \[3, 1\]"):
        cpu.fp8_encode(w, scales.float(), fmt)
    q = random_qtensor("nvfp4", (4, 64), seed=55)
    with pytest.raises(FormatError, match="needs a global scale"):
        cpu.dequantize(q.data, q.scales, q.fmt)
    with pytest.raises(FormatError, match=r"must be torch.uint8 \[4, 4\]"):
        cpu.dequantize(q.data, q.scales[:2], q.fmt, q.global_scale)
    with pytest.raises(FormatError, match="is not that of a 4x32 weight"):
        cpu.decode_error(q.data, q.scales, q.fmt, torch.randn(4, 32), q.global_scale)
    assert cpu.dequantize(q.data, q.scales, q.fmt, q.global_scale, torch.float64) is None
    assert cpu.decode_error(q.data, q.scales, q.fmt, torch.randn(4, 64).double(), q.global_scale) is None
    assert cpu.amax(torch.randn(3)) is None


def test_numpy_accumulates_in_order():
    """What ``reference.add_rows`` builds on: 1e16 + 1 + 1 loses both ones in order, and only in order."""
    terms = np.array([[1e16], [1.0], [1.0]])
    assert np.add.accumulate(terms, axis=0)[-1, 0] == 1e16
    assert struct.pack("<d", float(terms[1:].sum() + terms[0, 0])) != struct.pack("<d", 1e16)
