"""Claims: FP8 scales of rows, tiles and tensors are the exact ones, and no others, on every instruction set.

Expected values: ``search/exact.py`` in torch, which has its own bounds, and every bfloat16 scored for small
blocks.
"""

import math

import pytest
import torch

from ptqpipe.errors import NumericsError
from ptqpipe.numerics.formats import get_format
from ptqpipe.numerics.kernels import cpu
from ptqpipe.numerics.qtensor import encode
from ptqpipe.numerics.search import brute_force, get_search
from tests.numerics.kernels.cpu_cases import BFLOAT16, FLOAT16, FLOAT32, families, generator, weights_of_columns

if not cpu.available():
    pytest.skip("the CPU kernels are not built: pip install -e . with a C++ compiler", allow_module_level=True)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    cpu.force_isa(None)
    torch.set_num_threads(threads)


def check(w, fmt, *, rule="exact", importance=None, expected=None):
    if expected is None:
        expected = get_search(rule).search(w, fmt, importance=importance)
    data = encode(w, expected, fmt=fmt).data
    for isa in cpu.isas():
        cpu.force_isa(isa)
        done = cpu.block_quantize(w, fmt, rule=rule, importance=importance)
        assert done is not None
        differ = (done[1] != expected).nonzero()
        assert len(differ) == 0, f"{isa}: {len(differ)} scales differ, the first at {differ[0].tolist()}"
        assert torch.equal(done[0], data), isa


FORMATS = ("fp8_channel", "fp8_tensor", "fp8_block")
DTYPES = (BFLOAT16, FLOAT32, FLOAT16)
EXPONENTS = {BFLOAT16: (-100, -40, -6, 0, 20, 90), FLOAT32: (-135, -100, -6, 0, 90), FLOAT16: (-16, -6, 0)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "exponent"), [(dtype, e) for dtype, exponents in EXPONENTS.items() for e in exponents]
)
@pytest.mark.parametrize("name", FORMATS)
def test_scales_and_codes_are_exact(name, dtype, exponent):
    fmt = get_format(name)
    kinds = [(w * 2.0**exponent).to(dtype) for _, w in families(5, 33 * 32, seed=61)]
    for first, importance in enumerate((torch.rand(33 * 32, generator=generator(0)) ** 4, None)):
        some = kinds[first::2]
        for w in [torch.cat(some)] if name == "fp8_channel" else some:  # whose rows are blocks of their own
            check(w, fmt, importance=importance)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (3, 37), (129, 131), (2, 1024), (2, 1040), (3, 2051), (130, 300)])
@pytest.mark.parametrize("name", FORMATS)
def test_any_shape_and_stride(name, shape, dtype):
    """Lanes of the sums wrap at 1024 elements; short tiles count their padding."""
    fmt = get_format(name)
    w = torch.randn(shape, generator=generator(62)).to(dtype)
    expected = get_search("exact").search(w, fmt)
    for same in (w, torch.cat((w, w), dim=1)[:, : shape[1]]):
        check(same, fmt, expected=expected)
    check(w, fmt, importance=torch.rand(shape[1], generator=generator(63)) + 0.01)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_that_are_powers_of_two_are_exact(dtype):
    """Also of a block of zeros; where 2^-127 could be best, which bfloat16 kernels do not try, there is no kernel."""
    fmt = get_format("fp8_block_ue8m0")
    w = torch.randn(129, 300, generator=generator(69)) * torch.exp2(torch.linspace(-4, 4, 129)).unsqueeze(1)
    w[:128, 256:] = 0.0
    for weights in (w, w * 0.01):
        check(weights.to(dtype), fmt)
        check(weights.to(dtype), fmt, importance=torch.rand(300, generator=generator(70)) + 0.01)
    if dtype is not FLOAT16:
        assert cpu.block_quantize((w * 2.0**-130).to(dtype), fmt) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_hostile_weights_of_columns(dtype):
    fmt = get_format("fp8_channel")
    for importance in weights_of_columns(480, seed=64).values():
        for _, w in list(families(2, 480, seed=65))[::2]:
            check(w.to(dtype), fmt, importance=importance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_short_rows_against_every_bfloat16(dtype):
    """Where most elements are subnormal or clipped the bounds are loose; the scales stay those of brute force."""
    fmt = get_format("fp8_channel")
    g = generator(66)
    w = torch.randn(6, 5, generator=g) * torch.exp2(torch.randint(-20, 1, (6, 5), generator=g).float())
    w[4] = torch.tensor([448.0, 1.0, 2.0**-9, 3 * 2.0**-9, 0.0])  # exact at scale 1, and at no smaller one
    w[5] = 0.0
    importance = torch.tensor([2.0**-20, 1.0, 3.0, 0.0, 2.0**20])
    for h in (None, importance):
        check(w.to(dtype), fmt, importance=h, expected=brute_force.search(w.to(dtype), fmt, importance=h))


def beside_midpoints(columns):
    """float32 ``[6, columns]``: numbers of E4M3, midpoints, and what lies next to them, at six scales of bfloat16."""
    g = generator(68)
    steps = torch.randint(8, 16, (6, columns), generator=g).double() + 0.5 * torch.randint(
        0, 2, (6, columns), generator=g
    )
    numbers = torch.ldexp(steps, torch.randint(-10, 5, (6, columns), generator=g).double())
    scale = torch.tensor([1.0, 1.0078125, 1.25, 1.5, 1.9921875, 1.3359375]).double().unsqueeze(1)
    x = (numbers * scale * 2.0**-7).float()
    side = torch.randint(-1, 2, (6, columns), generator=g)
    side[3:] = 0  # ties and exact numbers alone
    return torch.where(side == 0, x, torch.nextafter(x, torch.where(side > 0, x * 2, x * 0)))


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
def test_float32_beside_the_midpoints_is_brute_force(weighted):
    """Bins of significands hold numbers of both sides of a midpoint."""
    w = beside_midpoints(300)
    h = torch.rand(300, generator=generator(69)) if weighted else None
    fmt = get_format("fp8_channel")
    check(w, fmt, importance=h, expected=brute_force.search(w, fmt, importance=h))


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16])
def test_large_tensors_sum_in_runs(dtype):
    """Beyond 2^15 elements scores are given up early, beyond 2^16 bins are finer and are summed in runs."""
    fmt = get_format("fp8_tensor")
    for seed, (_, w) in list(enumerate(families(130, 17 * 32, seed=70)))[::3]:
        importance = None if seed % 2 else torch.rand(17 * 32, generator=generator(seed))
        check((w * 0.02).to(dtype), fmt, importance=importance)


@pytest.mark.parametrize("name", FORMATS)
def test_a_wider_copy_has_the_scales_of_its_source(name):
    fmt = get_format(name)
    importance = torch.rand(544, generator=generator(71))
    for narrow, exponent in ((BFLOAT16, 0), (BFLOAT16, -90), (FLOAT16, -6)):
        for _, w in families(130, 544, seed=72):
            source = (w * 2.0**exponent).to(narrow)
            for h in (None, importance):
                ours, wide = (cpu.block_quantize(x, fmt, importance=h) for x in (source, source.float()))
                assert ours is not None
                assert wide is not None
                assert torch.equal(ours[0], wide[0])
                assert torch.equal(ours[1], wide[1])


@pytest.mark.parametrize("rule", ["absmax", "absmax_pz"])
def test_abs_max_rounds_its_scale_up(rule):
    for name in ("fp8_channel", "fp8_tensor", "fp8_block"):
        fmt = get_format(name)
        for exponent, dtype in ((-120, BFLOAT16), (-6, FLOAT16), (0, FLOAT32), (-130, FLOAT32), (100, FLOAT32)):
            w = (torch.randn(131, 140, generator=generator(67)) * 2.0**exponent).to(dtype)
            check(w, fmt, rule=rule)
            done = cpu.block_quantize(w, fmt, rule=rule)
            assert done is not None
            assert bool(((done[0] & 0x7F) < 0x7F).all())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_subnormals_and_the_largest_numbers(dtype):
    fmt = get_format("fp8_channel")
    w = torch.zeros(5, 64).to(dtype)
    w[1, 5] = -0.0
    subnormal = torch.arange(64, dtype=torch.int32 if dtype == FLOAT32 else torch.int16)
    w[2] = subnormal.view(dtype)
    w[3] = torch.linspace(-1, 1, 64) * torch.finfo(dtype).max
    w[4] = torch.linspace(-3, 3, 64).to(dtype) * torch.finfo(dtype).smallest_normal  # subnormal and normal
    check(w, fmt)
    check(w, fmt, importance=torch.arange(64).float())
    check(w, fmt, rule="absmax")


def test_damage_raises_and_other_sources_decline():
    fmt = get_format("fp8_block")
    for dtype in DTYPES:
        w = torch.randn(200, 200).to(dtype)
        assert cpu.block_quantize(w, fmt, rule="ocp_floor") is None
        assert cpu.score_total(w, fmt) is None
        assert cpu.block_quantize(w.double(), fmt) is None
        for bad in (math.inf, math.nan):
            w[150, 199] = bad
            for rule in ("exact", "absmax"):
                with pytest.raises(NumericsError, match=r"the first at \[150, 199\]"):
                    cpu.block_quantize(w, fmt, rule=rule)
