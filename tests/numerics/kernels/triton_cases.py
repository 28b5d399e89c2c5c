"""The claims about the Triton kernels. ``test_triton_kernels.py`` runs this file in processes of its own.

Once with TRITON_INTERPRET=1, which has to be set before Triton is imported, on CPU tensors; and once on a CUDA device
where there is one, with more blocks. Expected values come from the torch reference on the CPU.
"""

from dataclasses import replace

import pytest
import torch

from ptqpipe.errors import FormatError, NumericsError
from ptqpipe.numerics.formats import Format, get_format, packed_columns
from ptqpipe.numerics.kernels import triton as kernels
from ptqpipe.numerics.kernels.reference import sum_blocks
from ptqpipe.numerics.qtensor import QTensor, encode, squared_error
from ptqpipe.numerics.search import baselines, brute_force
from ptqpipe.numerics.search.objective import formula, importance_blocks, magnitude_blocks, scores
from tests.numerics.search import edges, hostile

INTERPRETED = kernels.interpreting()
DEVICE = "cpu" if INTERPRETED else "cuda"
EACH = 5 if INTERPRETED else 2000  # blocks of each family
COLUMNS = 3  # blocks a row

FORMATS = ("nvfp4", "e2m1/16/e4m3", "e2m1/32/e4m3", "e2m1/8/ue5m3", "mxfp4", "mxfp8", "mxfp6_e2m3", "mxfp6_e3m2")


def families(fmt: Format, seed: int) -> list[torch.Tensor]:
    """Adversarial blocks float32 ``[EACH, B]`` of every magnitude 2^-40 .. 2^20, one tensor a family."""
    gen = torch.Generator().manual_seed(seed)
    shape = (EACH, fmt.block[1])
    size = 2.0 ** torch.randint(-40, 21, (EACH, 1), generator=gen)
    normal = torch.randn(shape, generator=gen)
    magnitudes = torch.tensor(fmt.element.magnitudes)
    points = magnitudes[torch.randint(0, len(magnitudes), shape, generator=gen)]
    middles = ((magnitudes[1:] + magnitudes[:-1]) / 2)[torch.randint(0, len(magnitudes) - 1, shape, generator=gen)]
    legal = torch.tensor([m for m in fmt.scale.magnitudes if 2.0**-18 <= m <= 2.0**18])
    scale = legal[torch.randint(0, len(legal), (EACH, 1), generator=gen)]
    outlier = normal * 0.01
    outlier[:, 3] = 200.0 * torch.rand(EACH, generator=gen)
    alone = torch.zeros(shape)
    alone[:, -1] = -size[:, 0]
    dust = points.clone()
    dust[:, 0] = 2.0 ** torch.randint(-140, -20, (EACH,), generator=gen).float()
    return [
        normal * size,
        normal.sign() * 2.0 ** (torch.rand(shape, generator=gen) * 40 - 30),
        points * scale,
        points * size,
        -middles * scale,
        torch.nextafter(middles * scale, torch.zeros(shape)),
        torch.nextafter(middles * scale, torch.full(shape, 1e30)),
        outlier,
        alone,
        dust,
        torch.full(shape, 1.0) * size * 1.37,
        torch.zeros(shape) * normal,  # with zeros of both signs
        normal * 2.0**-140,  # subnormal
    ]


def weight(fmt: Format, seed: int) -> torch.Tensor:
    """The families, shuffled, as float32 ``[rows, COLUMNS * B]``."""
    blocks = torch.cat(families(fmt, seed))
    blocks = blocks[torch.randperm(len(blocks), generator=torch.Generator().manual_seed(seed))]
    rows = len(blocks) // COLUMNS
    return blocks[: rows * COLUMNS].reshape(rows, COLUMNS * fmt.block[1])


def assert_exact(
    w: torch.Tensor, fmt: Format, *, g: torch.Tensor | None = None, importance: torch.Tensor | None = None
) -> None:
    """The kernel's scales are those of brute force, its bytes those of ``encode``."""
    done = kernels.block_quantize(w.to(DEVICE), fmt, global_scale=g, importance=importance)
    assert done is not None
    scales = brute_force.search(w, fmt, global_scale=g, importance=importance)
    assert torch.equal(done[1].cpu(), scales)
    assert torch.equal(done[0].cpu(), encode(w, scales, fmt=fmt, global_scale=g).data)


def global_scale(w: torch.Tensor, fmt: Format, factor: float = 1.0) -> torch.Tensor | None:
    """amax / max_product times ``factor``, where the format has a global scale."""
    return w.float().abs().amax() / fmt.max_product * factor if fmt.has_global else None


@pytest.mark.parametrize("name", FORMATS)
def test_scales_and_bytes_are_those_of_brute_force(name: str) -> None:
    fmt = get_format(name)
    w = weight(fmt, seed=1)
    assert_exact(w, fmt, g=global_scale(w, fmt, 1.37))


@pytest.mark.parametrize("name", ["e2m1/16/e4m3", "mxfp4", "mxfp8", "mxfp6_e2m3", "mxfp6_e3m2"])
def test_the_codes_at_the_edges_are_those_counted_by_hand(name: str) -> None:
    w, codes = edges.edges_of(name)
    done = kernels.block_quantize(w.to(DEVICE), get_format(name))
    assert done is not None
    assert done[1].flatten().tolist() == codes


@pytest.mark.parametrize("name", ["nvfp4", "e2m1/8/ue5m3", "mxfp4", "mxfp8", "mxfp6_e2m3"])
def test_weighted_scales_are_those_of_brute_force(name: str) -> None:
    fmt = get_format(name)
    w = weight(fmt, seed=2)
    importance = torch.rand(w.shape[1], generator=torch.Generator().manual_seed(3)) ** 12
    assert_exact(w, fmt, g=global_scale(w, fmt), importance=importance)


def at_once(cases: list[hostile.Case]) -> list[hostile.Case]:
    """Without global scales two weights of all rows, one with an importance: the interpreter takes as long for many
    blocks as for one. float32 holds the numbers of every dtype; what dtypes are read is claimed below."""
    if cases[0].fmt.has_global:
        return cases
    return [replace(part[0], w=torch.cat([each.w.float() for each in part])) for part in (cases[::2], cases[1::2])]


@pytest.mark.parametrize("name", FORMATS)
def test_blocks_drawn_to_break_bounds(name: str) -> None:
    fmt = get_format(name)
    shape, cases = (1 if INTERPRETED else 64, 3 * fmt.block[1]), []
    for seed, size in enumerate(hostile.SIZES):
        dtype, importance = hostile.DTYPES[seed % 3], ("none", "2^-30 .. 2^30")[seed % 2]
        if INTERPRETED and size == "smallest of the dtype":
            dtype = torch.float32  # the interpreter widens subnormal bfloat16 to other numbers than a device does
        kinds = tuple(hostile.KINDS)
        cases.append(hostile.make(fmt, shape, kinds=kinds, size=size, dtype=dtype, importance=importance, seed=seed))
    for case in at_once(cases):
        done = kernels.block_quantize(
            case.w.to(DEVICE), fmt, global_scale=case.global_scale, importance=case.importance
        )
        assert done is not None
        fault = case.fault("triton", done[1].cpu(), case.expected())
        assert not fault, fault


@pytest.mark.parametrize("name", FORMATS)
def test_absmax_scales_are_those_of_the_torch_search(name: str) -> None:
    fmt = get_format(name)
    middles = torch.tensor([float(2**k * (8 + m) + 2 ** (k - 1)) for k in range(-6, 6) for m in range(8)])
    tied = torch.zeros(len(middles) // COLUMNS, COLUMNS * fmt.block[1])
    tied[:, :: fmt.block[1]] = (middles * fmt.element.max).reshape(-1, COLUMNS)
    w = torch.cat((weight(fmt, seed=13), tied, -tied * 2.0**-7, tied * 2.0**-121))
    g = torch.tensor(1.0) if fmt.has_global else None
    done = kernels.block_quantize(w.to(DEVICE), fmt, rule="absmax", global_scale=g)
    assert done is not None
    scales = baselines.absmax(w, fmt, global_scale=g)
    assert torch.equal(done[1].cpu(), scales)
    assert torch.equal(done[0].cpu(), encode(w, scales, fmt=fmt, global_scale=g).data)


@pytest.mark.parametrize(
    ("name", "dtype"), [("nvfp4", torch.bfloat16), ("nvfp4", torch.float16), ("mxfp4", torch.bfloat16)]
)
def test_sixteen_bit_weights_are_read_as_they_are(name: str, dtype: torch.dtype) -> None:
    fmt = get_format(name)
    w = (torch.randn(8 * EACH, 64, generator=torch.Generator().manual_seed(4)) * 0.02).to(dtype)
    assert_exact(w, fmt, g=global_scale(w, fmt))


@pytest.mark.parametrize("factor", [2.0**-30, 2.0**-8, 2.0**12])
def test_global_scales_that_saturate_or_underflow_change_nothing(factor: float) -> None:
    fmt = get_format("nvfp4")
    w = torch.randn(EACH, 32, generator=torch.Generator().manual_seed(5)) * 2.0 ** torch.arange(-8, 8, 0.5)
    assert_exact(w, fmt, g=global_scale(w, fmt, factor))


@pytest.mark.parametrize("g", [1.0, 2.0**-130])  # every scale of the second is inverted to infinity: no score at all
def test_zero_blocks_get_the_smallest_scale(g: float) -> None:
    fmt, w, scale = get_format("nvfp4"), torch.zeros(1, 32), torch.tensor(g)
    done = kernels.block_quantize(w.to(DEVICE), fmt, global_scale=scale)
    assert done is not None
    assert done[1].tolist() == [[1, 1]]
    assert torch.equal(done[1].cpu(), brute_force.search(w, fmt, global_scale=scale))


def test_magnitudes_far_beyond_every_scale_are_searched_whole() -> None:
    fmt = get_format("e2m1/8/e4m3")
    w = torch.randn(EACH, 16, generator=torch.Generator().manual_seed(6)) * 2.0**60
    assert_exact(w, fmt)


def test_odd_subnormal_scale_codes_are_found() -> None:
    w = torch.tensor([[30.0, 22.5] + [7.5] * 14]) * 2.0**-9
    done = kernels.block_quantize(w.to(DEVICE), get_format("e2m1/16/e4m3"))
    assert done is not None
    assert done[1].tolist() == [[15]]  # 15 * 2^-9 times 2, 1.5 and 0.5: no error at all


@pytest.mark.parametrize(("name", "largest", "code"), [("e2m1/16/e4m3", 7.9, 1), ("mxfp4", 8.9, 118)])
def test_clipping_far_beyond_the_largest_magnitude_can_be_best(name: str, largest: float, code: int) -> None:
    # At the scale 2^-9 the halves are exact and the largest is clipped to 6; at twice that scale it is nearly exact
    # and the halves go to zero, which costs a little more: 15/4 + 0.1^2 > 1.9^2, and 31/4 + 0.9^2 > 2.9^2.
    fmt = get_format(name)
    w = torch.full((1, fmt.block[1]), 0.5 * 2.0**-9)
    w[0, 4] = -largest * 2.0**-9
    done = kernels.block_quantize(w.to(DEVICE), fmt)
    assert done is not None
    assert done[1].tolist() == [[code]]
    assert_exact(w, fmt)


def test_elements_too_small_to_square_do_not_break_ties() -> None:
    # 768 is exact at 128 and at 192. The square of the other element would round to 3 and to 1 float32 quanta of
    # 2^-149 there, and 3 * 128^2 > 1 * 192^2: 192 would win by underflow alone.
    w = torch.zeros(1, 16)
    w[0, 0], w[0, 9] = 768.0, 128.0 * (2.6 * 2.0**-149) ** 0.5
    done = kernels.block_quantize(w.to(DEVICE), get_format("e2m1/16/e4m3"))
    assert done is not None
    assert done[1].tolist() == [[(7 + 7) << 3]]


def test_ties_between_scales_go_to_the_smaller_code() -> None:
    w = torch.tensor([[3.0, -1.0] + [0.0] * 30])
    done = kernels.block_quantize(w.to(DEVICE), get_format("mxfp4"))
    assert done is not None
    assert done[1].tolist() == [[126]]  # 6 and 2 times 1/2; 3 and 1 times 1 is as exact
    assert done[0].tolist() == [[0xC7] + [0] * 15]


def test_rows_of_a_view_are_read_where_they_lie() -> None:
    w = torch.randn(6, 64, generator=torch.Generator().manual_seed(7))[::2, 16:48]
    assert_exact(w, get_format("mxfp4"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_weights_raise(bad: float) -> None:
    w = torch.randn(4, 32).to(DEVICE)
    w[2, 17] = bad
    with pytest.raises(NumericsError, match=r"\[2, 17\]"):
        kernels.block_quantize(w, get_format("mxfp4"))
    with pytest.raises(NumericsError, match=r"\[2, 17\]"):
        kernels.fp8_encode(w, torch.ones(4, 1, dtype=torch.bfloat16, device=DEVICE), get_format("fp8_channel"))


@pytest.mark.parametrize("name", [*FORMATS, "fp8_channel", "fp8_tensor", "fp8_block"])
def test_every_code_and_scale_decodes_as_in_torch(name: str) -> None:
    fmt = get_format(name)
    columns = 512
    gen = torch.Generator().manual_seed(8)
    data = torch.randint(0, 256, (64, packed_columns(columns, fmt.element.bits)), generator=gen, dtype=torch.uint8)
    grid = fmt.scale_shape((64, columns))
    if fmt.scale.enumerable:
        scales = torch.arange(grid[0] * grid[1]).reshape(grid).to(torch.uint8)  # every byte, reserved ones too
    else:
        scales = (torch.rand(grid, generator=gen) * 0.1).to(fmt.scale.dtype)
    g = torch.tensor(0.0123) if fmt.has_global else None
    divides = name == "nvfp4"
    want = QTensor(fmt, (64, columns), data, scales, g, divides).dequantize()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        got = kernels.dequantize(data.to(DEVICE), scales.to(DEVICE), fmt, g, dtype, global_divides=divides)
        assert got is not None
        expected = want.to(dtype)
        assert torch.equal(torch.isnan(got.cpu()), torch.isnan(expected))
        assert torch.equal(torch.nan_to_num(got.cpu()), torch.nan_to_num(expected))
        assert torch.equal(
            torch.signbit(got.cpu())[~torch.isnan(expected)], torch.signbit(want[~torch.isnan(expected)])
        )


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "mxfp6_e2m3", "fp8_block"])
def test_the_error_is_that_of_the_decode(name: str) -> None:
    fmt = get_format(name)
    w = torch.randn(130, 192, generator=torch.Generator().manual_seed(9)).bfloat16()
    g = global_scale(w, fmt)
    code = torch.tensor(0.01).bfloat16() if not fmt.scale.enumerable else torch.tensor(100).to(torch.uint8)
    q = encode(w, code.expand(fmt.scale_shape((130, 192))).contiguous(), fmt=fmt, global_scale=g)
    done = kernels.decode_error(q.data.to(DEVICE), q.scales.to(DEVICE), fmt, w.to(DEVICE), g)
    assert done is not None
    # Both sum 24960 non-negative float64 terms: the orders differ by at most 24960 * 2^-53 of the sum.
    assert done[0] == pytest.approx(squared_error(q, w), rel=3e-12)
    assert done[1] == pytest.approx(float(w.double().square().sum()), rel=3e-12)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_the_total_of_absmax_scales_is_that_of_the_formula(name: str) -> None:
    fmt = get_format(name)
    w = torch.randn(40, 64, generator=torch.Generator().manual_seed(10))
    w[3, :32] = 0.0
    g = torch.tensor(0.0019) if fmt.has_global else None
    codes = baselines.absmax(w, fmt, global_scale=g).reshape(-1)
    each, _ = formula(magnitude_blocks(w, fmt), codes, fmt=fmt, global_scale=g, h=None)
    total = sum_blocks(each) * (1.0 if g is None else float(g.double().square()))
    assert kernels.score_total(w.to(DEVICE), fmt, rule="absmax", global_scale=g) == total


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_the_total_is_that_of_the_scores_to_the_bit(name: str, *, weighted: bool) -> None:
    fmt = get_format(name)
    w = torch.randn(40, 64, generator=torch.Generator().manual_seed(10))
    w[3, :32] = 0.0
    importance = torch.linspace(0.001, 3.0, 64) if weighted else None
    gs = torch.tensor([0.0017, 0.0021]) if fmt.has_global else None
    want, found = [], []
    for g in (None,) if gs is None else gs:
        codes = brute_force.search(w, fmt, global_scale=g, importance=importance).reshape(-1)
        h = importance_blocks(importance, w, fmt)
        each = scores(magnitude_blocks(w, fmt), codes, fmt=fmt, global_scale=g, h=h)
        total = sum_blocks(torch.where(torch.isinf(each), 0.0, each))  # the zero blocks, whose error is zero
        want.append(total if g is None else total * float(g.double().square()))
        found.append(kernels.score_total(w.to(DEVICE), fmt, global_scale=g, importance=importance))
    assert found == want


@pytest.mark.parametrize("name", ["fp8_channel", "fp8_tensor", "fp8_block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_codes_are_those_of_encode(name: str, dtype: torch.dtype) -> None:
    fmt = get_format(name)
    gen = torch.Generator().manual_seed(11)
    w = (torch.randn(200, 300, generator=gen) * 2.0 ** torch.randint(-12, 2, (200, 300), generator=gen)).to(dtype)
    scales = (torch.rand(fmt.scale_shape((200, 300)), generator=gen) * 0.02 + 1e-4).bfloat16()
    got = kernels.fp8_encode(w.to(DEVICE), scales.to(DEVICE), fmt)
    assert got is not None
    assert torch.equal(got.cpu(), encode(w, scales, fmt=fmt).data)


def test_fp8_codes_are_those_of_torch_float8() -> None:
    w = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    w = w[w.abs() <= 448].reshape(1, -1)  # beyond, torch gives NaN where we saturate
    got = kernels.fp8_encode(
        w.to(DEVICE), torch.ones(1, 1, dtype=torch.bfloat16, device=DEVICE), get_format("fp8_channel")
    )
    assert got is not None
    assert torch.equal(got.cpu(), w.to(torch.float8_e4m3fn).view(torch.uint8))


def test_amax_is_the_largest_magnitude_and_names_the_first_that_is_not_finite() -> None:
    w = torch.randn(37, 91, generator=torch.Generator().manual_seed(12)).bfloat16()
    w[5, 6] = -9.5
    assert kernels.amax(w.to(DEVICE)) == (9.5, -1)
    w[7, 8] = -float("inf")
    assert kernels.amax(w.to(DEVICE)) == (float("inf"), 7 * 91 + 8)
    w[20, 0] = float("nan")
    damaged = kernels.amax(w.to(DEVICE))
    assert damaged is not None
    assert torch.tensor(damaged[0]).isnan()
    assert damaged[1] == 7 * 91 + 8


def test_what_has_no_kernel_gives_none() -> None:
    w = torch.randn(128, 128).to(DEVICE)
    for name in ("fp8_channel", "fp8_block", "e2m1/64/e4m3", "e2m1/16/fp32", "e4m3/16/e4m3", "e2m1/16/e5m2"):
        assert kernels.block_quantize(w, get_format(name)) is None
    assert kernels.block_quantize(w, get_format("mxfp4"), rule="four_over_six") is None
    assert kernels.score_total(w, get_format("mxfp4"), rule="four_over_six") is None
    assert kernels.block_quantize(w.double(), get_format("mxfp4")) is None
    assert kernels.amax(w[:0]) is None


def test_misfits_raise() -> None:
    w = torch.randn(2, 64).to(DEVICE)
    with pytest.raises(NumericsError, match="importance must be finite"):
        kernels.block_quantize(w, get_format("mxfp4"), importance=-torch.ones(64))
    with pytest.raises(FormatError, match="one weight for each of 64 columns"):
        kernels.block_quantize(w, get_format("mxfp4"), importance=torch.ones(32))
    with pytest.raises(FormatError, match="nvfp4 needs a global scale"):
        kernels.block_quantize(w, get_format("nvfp4"))
    with pytest.raises(FormatError, match="mxfp4 has no global scale"):
        kernels.block_quantize(w, get_format("mxfp4"), global_scale=torch.tensor(1.0))
    with pytest.raises(FormatError, match="multiples of 1x32"):
        kernels.block_quantize(w[:, :48], get_format("mxfp4"))
