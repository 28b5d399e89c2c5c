"""Claims: on every instruction set the compiled search chooses the scales of brute force and packs the codes of encode.

Compared bit for bit. The expected scales come from the oracle of cpu_cases.py, which is held to
``search/brute_force.py`` here; the expected bytes from ``qtensor.encode``.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from ptqpipe.errors import FormatError, NumericsError
from ptqpipe.numerics.formats import get_format
from ptqpipe.numerics.kernels import cpu
from ptqpipe.numerics.qtensor import encode
from ptqpipe.numerics.search.brute_force import search as brute_force
from tests.numerics.kernels.cpu_cases import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    default_global,
    families,
    generator,
    score_every_code,
    tie_points,
    weights_of_columns,
)

if not cpu.available():
    pytest.skip("the CPU kernels are not built: pip install -e . with a C++ compiler", allow_module_level=True)

FORMATS = (
    "nvfp4", "e2m1/16/e4m3", "mxfp4", "mxfp8", "mxfp6_e2m3", "mxfp6_e3m2", "e2m1/8/e4m3/global", "e2m1/32/e4m3/global",
    "e2m1/64/ue5m3", "e2m1/4/e8m0", "e4m3/16/e4m3/global", "e2m3/12/ue5m3/global",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread():
    """The expected values are many small tensors; and whatever a test forced is undone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    cpu.force_isa(None)
    torch.set_num_threads(threads)


def check(w, fmt, *, global_scale=None, importance=None, expected=None):
    """On every instruction set the scales and bytes are those of the oracle (or ``expected``) and encode."""
    if expected is None:
        expected = score_every_code(w, fmt, global_scale=global_scale, importance=importance)[0]
    data = encode(w, expected, fmt=fmt, global_scale=global_scale).data
    for isa in cpu.isas():
        cpu.force_isa(isa)
        done = cpu.block_quantize(w, fmt, global_scale=global_scale, importance=importance)
        assert done is not None
        differ = (done[1] != expected).nonzero()
        assert len(differ) == 0, f"{isa}: {len(differ)} scales differ, the first at {differ[0].tolist()}"
        differ = (done[0] != data).nonzero()
        assert len(differ) == 0, f"{isa}: {len(differ)} bytes differ, the first at {differ[0].tolist()}"


def at_once(weights, fmt):
    """One weight of all rows, where no global scale binds them: a call of the oracle costs nearly the same."""
    return weights if fmt.has_global else [torch.cat(weights)]


@pytest.mark.parametrize("name", FORMATS)
def test_scales_and_bytes_equal_brute_force_on_every_family(name):
    fmt = get_format(name)
    kinds = [w * 0.02 for _, w in families(3, 7 * 192, seed=1)]  # 7 * 192: whole blocks of 4, 8, 12, 16, 32, 64
    for first, dtype in enumerate((BFLOAT16, FLOAT32, FLOAT16)):
        for w in at_once([w.to(dtype) for w in kinds[first::3]], fmt):
            check(w, fmt, global_scale=default_global(w, fmt))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8", "e2m1/64/e8m0", "e2m1/256/e8m0", "e2m1/256/e4m3", "nvfp4"]
)
def test_blocks_of_one_magnitude(name):
    """Their best error can exceed the energy of any one element, so no element alone ends the search."""
    fmt = get_format(name)
    g = generator(26)
    significands = 1 + torch.arange(0, 256, 4 if fmt.block[1] > 32 else 1) / 256
    w = significands.repeat_interleave(4).unsqueeze(1).expand(-1, fmt.block[1])
    w = w * torch.where(torch.rand(w.shape, generator=g) < 0.5, -1.0, 1.0)
    noise = torch.tensor([0.0, 1e-3, 1e-2, 1e-1]).repeat(len(significands)).unsqueeze(1)
    near = w * (1 + noise * torch.randn(w.shape, generator=g))
    importance = torch.exp2(torch.randint(-30, 1, (fmt.block[1],), generator=g).float())
    for x in (w[::4], near, near.bfloat16()):
        scale = default_global(x, fmt)
        check(x, fmt, global_scale=scale)
        check(x, fmt, global_scale=scale, importance=importance)


@pytest.mark.parametrize("name", ["nvfp4", "e2m1/16/e4m3", "mxfp4", "mxfp8"])
@pytest.mark.parametrize("exponent", [-40, -30, -20, -9, 0, 9, 20])
def test_every_magnitude(name, exponent):
    fmt = get_format(name)
    w = (torch.randn(5, 160, generator=generator(exponent)) * 2.0**exponent).bfloat16()
    check(w, fmt, global_scale=default_global(w, fmt))


@pytest.mark.parametrize("name", ["nvfp4", "e2m1/16/e4m3", "e2m1/16/ue5m3", "mxfp4", "mxfp8", "e2m1/8/e4m3/global"])
def test_weighted_scales_equal_brute_force(name):
    fmt = get_format(name)
    for seed, importance in enumerate(weights_of_columns(480, seed=3).values()):
        for w in at_once([w.bfloat16() for _, w in families(2, 480, seed=4)][seed % 2 :: 2], fmt):
            check(w, fmt, global_scale=default_global(w, fmt), importance=importance)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8"])
def test_any_number_of_blocks_and_any_dtype(name, dtype):
    """A block's scale is the same wherever its row ends: the first column has the largest weight."""
    fmt = get_format(name)
    whole = torch.randn(3, 50 * fmt.block[1], generator=generator(99)).to(dtype)
    g = default_global(whole, fmt)
    importance = torch.rand(whole.shape[1], generator=generator(5))
    importance[0] = 1.0
    for rows, h in ((1, None), (3, importance)):
        expected = score_every_code(whole[:rows], fmt, global_scale=g, importance=h)[0]
        for blocks in (1, 2, 7, 15, 16, 17, 31, 32, 33, 50):
            columns = blocks * fmt.block[1]
            w, part = whole[:rows, :columns].contiguous(), expected[:, :blocks].contiguous()
            check(w, fmt, global_scale=g, importance=None if h is None else h[:columns], expected=part)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
def test_rows_may_be_strided(name):
    fmt = get_format(name)
    whole = torch.randn(9, 320, generator=generator(8)).bfloat16()
    for w in (whole[::2], whole[:, 32:224], whole[1:4, 64:], whole[:1].expand(4, 320)):
        check(w, fmt, global_scale=default_global(w, fmt))
    assert cpu.block_quantize(whole.t(), fmt, global_scale=default_global(whole, fmt)) is None


def test_the_published_window_is_not_enough():
    """{30, 22.5, 7.5 x 14} * 2^-9 is exact at code 15, ten codes above its abs-max code: its half is no scale."""
    fmt = get_format("e2m1/16/e4m3")
    w = torch.tensor([[30.0, 22.5] + [7.5] * 14]) * 2.0**-9
    done = cpu.block_quantize(w, fmt)
    assert done is not None
    assert int(done[1]) == 15
    check(w, fmt)


def test_subnormal_scale_codes():
    """Blocks far below the tensor's largest: odd codes <= 15 have no half, and some blocks vanish at every code."""
    fmt = get_format("nvfp4")
    g = generator(11)
    w = torch.randn(64, 160, generator=g) * torch.exp2(-torch.arange(64).float() / 3).unsqueeze(1)
    w[0, 0] = 40.0
    check(w, fmt, global_scale=default_global(w, fmt))
    importance = torch.exp2(torch.randint(-8, 8, (160,), generator=g).float())
    check(w, fmt, global_scale=default_global(w, fmt), importance=importance)


@pytest.mark.parametrize(
    "factor", [2.0**-30, 2.0**-14, 2.0**-13, 2.0**-12, 0.01, 0.3, 0.5, 1.0, 12 / 7, 3.0, 100.0, 2.0**20]
)
def test_any_global_scale_saturated_or_vanishing(factor):
    fmt = get_format("nvfp4")
    w = torch.randn(6, 160, generator=generator(12)).bfloat16()
    g = default_global(w, fmt)
    assert g is not None
    check(w, fmt, global_scale=g * factor)
    check(w, fmt, global_scale=g * factor, importance=torch.rand(160, generator=generator(13)) ** 4)


def test_ties_take_the_smaller_scale_and_the_even_code():
    fmt = get_format("e2m1/16/e4m3")
    w = tie_points(64, 320, generator(14))
    check(w, fmt)
    check(w * 2.0**-9, fmt)
    w = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2).unsqueeze(0)
    one = torch.tensor([[56]], dtype=torch.uint8)  # E4M3 code of 1.0
    check(w, get_format("mxfp4") if w.shape[1] == 32 else fmt)
    assert encode(w, one, fmt=fmt).codes.tolist() == [[0, 2, 2, 4, 4, 6, 6, 7] * 2]


def test_float32_between_the_ties():
    """One ulp either side of every boundary of E2M1 at scale 1."""
    fmt = get_format("e2m1/16/e4m3")
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    ends = torch.cat((torch.nextafter(ties, torch.tensor(0.0)), torch.nextafter(ties, torch.tensor(9.0)), ties))
    w = torch.zeros(16, 16)
    for row in range(16):
        w[row] = torch.cat((torch.tensor([6.0]), ends.roll(row)[:15]))
    check(w, fmt)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp6_e3m2", "mxfp8", "e2m1/16/e4m3"])
def test_zero_blocks_signed_zeros_and_subnormal_weights(name):
    fmt = get_format(name)
    zero = torch.zeros(2, 64)
    zero[1] = -0.0
    check(zero, fmt, global_scale=torch.tensor(0.01) if fmt.has_global else None)
    bits = torch.randint(0, 0x0100, (4, 320), generator=generator(15), dtype=torch.int32).to(torch.int16)
    tiny = bits.view(BFLOAT16) * torch.tensor([1.0, -1.0]).bfloat16().repeat(160)  # subnormal and just normal bfloat16
    check(tiny, fmt, global_scale=torch.tensor(2.0**-90) if fmt.has_global else None)
    halves = (bits * 4).view(FLOAT16)  # subnormal float16
    check(halves, fmt, global_scale=default_global(halves, fmt))
    mixed = torch.randn(2, 320, generator=generator(16)).bfloat16()
    mixed[:, 5::7] = tiny[:2, 5::7]
    check(mixed, fmt, global_scale=default_global(mixed, fmt))


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8", "mxfp6_e2m3"])
def test_powers_of_two_at_both_ends_of_their_range(name):
    fmt = get_format(name)
    top = torch.randn(2, 320, generator=generator(17)).clamp(-3, 3) * 2.0**126
    check(top, fmt)
    check(top.bfloat16(), fmt)
    exponents = (-149, -140, -130, -126, -120, -100, -81, -80, -79)
    normal = torch.randn(2, 320, generator=generator(18))
    w = torch.cat([normal * 2.0 ** (exponent + 20) * 2.0**-20 for exponent in exponents])
    check(w, fmt)
    check(w, fmt, importance=torch.exp2(torch.randint(-20, 20, (320,), generator=generator(19)).float()))


finite = st.floats(min_value=-(2.0**20), max_value=2.0**20, width=32).filter(lambda v: v == 0 or abs(v) > 2.0**-60)


@pytest.mark.slow
@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(values=st.lists(finite, min_size=32, max_size=32), data=st.data())
def test_any_block_at_all(values, data):
    w = torch.tensor(values, dtype=FLOAT32).unsqueeze(0)
    name = data.draw(st.sampled_from(("nvfp4", "e2m1/16/e4m3", "mxfp4", "mxfp8", "e2m1/8/e4m3/global")))
    fmt = get_format(name)
    scale = data.draw(st.floats(min_value=2.0**-30, max_value=2.0**10, width=32))
    weights = data.draw(
        st.none() | st.lists(st.floats(min_value=0, max_value=2.0**20, width=32), min_size=32, max_size=32)
    )
    importance = None if weights is None or max(weights) == 0 else torch.tensor(weights)
    check(w, fmt, global_scale=torch.tensor(scale) if fmt.has_global else None, importance=importance)


@pytest.mark.parametrize("name", [*FORMATS, "e2m1/16/ue5m3"])
def test_the_fast_oracle_is_brute_force(name):
    """On a block or more of every family, with magnitudes down to the subnormal ones."""
    fmt = get_format(name)
    importance = torch.rand(192, generator=generator(20)) ** 3
    w = torch.cat([w for _, w in families(1, 192, seed=21)])
    for x in (w, w.bfloat16() * 2.0**-40):
        g = default_global(x, fmt)
        for h in (None, importance):
            codes, _ = score_every_code(x, fmt, global_scale=g, importance=h)
            assert torch.equal(codes, brute_force(x, fmt, global_scale=g, importance=h))


@pytest.mark.slow
def test_a_million_blocks():
    """Of every family, each with a global scale of its own between 1 and 1.84 times the abs-max one."""
    fmt = get_format("nvfp4")
    blocks = 0
    for seed, (_, w) in enumerate(families(256, 16 * 302, seed=24)):
        w = (w * 2.0 ** (seed - 12)).bfloat16()
        g = default_global(w, fmt)
        assert g is not None
        g = g * (1.0 + 0.07 * seed)
        check(w, fmt, global_scale=g)
        blocks += w.numel() // 16
    assert blocks > 1_000_000


def test_damaged_weights_raise():
    for name in ("nvfp4", "mxfp4"):
        fmt = get_format(name)
        g = torch.tensor(0.01) if fmt.has_global else None
        for bad in (float("nan"), float("inf"), float("-inf")):
            w = torch.randn(5, 320, generator=generator(22)).bfloat16()
            w[3, 317] = bad
            with pytest.raises(NumericsError, match=r"the first at \[3, 317\]"):
                cpu.block_quantize(w, fmt, global_scale=g)
            with pytest.raises(NumericsError, match=r"the first at \[3, 317\]"):
                cpu.score_total(w, fmt, global_scale=g)


def test_calls_that_make_no_sense_raise_and_missing_kernels_decline():
    nvfp4, w = get_format("nvfp4"), torch.randn(2, 64)
    g = torch.tensor(0.01)
    with pytest.raises(FormatError, match="needs a global scale"):
        cpu.block_quantize(w, nvfp4)
    with pytest.raises(FormatError, match="multiples of 1x16"):
        cpu.block_quantize(torch.randn(2, 24), nvfp4, global_scale=g)
    with pytest.raises(FormatError, match="one weight for each of 64 columns"):
        cpu.block_quantize(w, nvfp4, global_scale=g, importance=torch.ones(32))
    for weights in (-torch.ones(64), torch.zeros(64), torch.full((64,), float("nan"))):
        with pytest.raises(NumericsError, match="importance must be finite"):
            cpu.block_quantize(w, nvfp4, global_scale=g, importance=weights)
    assert cpu.block_quantize(w, nvfp4, rule="no such rule", global_scale=g) is None
    assert cpu.block_quantize(w.double(), nvfp4, global_scale=g) is None
    assert cpu.block_quantize(w, get_format("e2m1/16/fp32")) is None
    assert cpu.block_quantize(w, nvfp4, global_scale=torch.tensor(2.0**-101)) is None
    with pytest.raises(FormatError, match="no kernels for 'sse9'"):
        cpu.force_isa("sse9")
