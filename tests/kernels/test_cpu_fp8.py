"""Claims: FP8 scales of rows, tiles and tensors are the exact ones, and no others, on every instruction set.

Expected values: ``search/exact.py`` in torch, which has its own proof and bounds, and brute force over every bfloat16
for small blocks.
"""

import math

import pytest
import torch

from ptqpipe.errors import NumericsError
from ptqpipe.formats import get_format
from ptqpipe.kernels import cpu
from ptqpipe.qtensor import encode
from ptqpipe.search import get_search
from tests.kernels.cpu_cases import BFLOAT16, FLOAT32, families, generator, weights_of_columns

if not cpu.available():
    pytest.skip("the CPU kernels are not built: pip install -e . with a C++ compiler", allow_module_level=True)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    cpu.force_isa(None)
    torch.set_num_threads(threads)


def check(w, fmt, *, rule="exact", importance=None, search=None):
    expected = get_search(search or rule).search(w, fmt, importance=importance)
    data = encode(w, expected, fmt=fmt).data
    for isa in cpu.isas():
        cpu.force_isa(isa)
        done = cpu.block_quantize(w, fmt, rule=rule, importance=importance)
        assert done is not None
        differ = (done[1] != expected).nonzero()
        assert len(differ) == 0, f"{isa}: {len(differ)} scales differ, the first at {differ[0].tolist()}"
        assert torch.equal(done[0], data), isa


@pytest.mark.parametrize("exponent", [-100, -40, -6, 0, 20, 90])
@pytest.mark.parametrize("name", ["fp8_channel", "fp8_tensor", "fp8_block"])
def test_scales_and_codes_are_exact(name, exponent):
    fmt = get_format(name)
    for seed, (_, w) in enumerate(families(5, 33 * 32, seed=61)):
        importance = None if seed % 2 else torch.rand(33 * 32, generator=generator(seed)) ** 4
        check((w * 2.0**exponent).bfloat16(), fmt, importance=importance)


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (3, 37), (129, 131), (2, 1024), (2, 1040), (3, 2051), (130, 300)])
@pytest.mark.parametrize("name", ["fp8_channel", "fp8_tensor", "fp8_block"])
def test_any_shape_and_stride(name, shape):
    """Lanes of the sums wrap at 1024 elements; short tiles count their padding."""
    fmt = get_format(name)
    w = torch.randn(shape, generator=generator(62)).bfloat16()
    check(w, fmt)
    check(torch.cat((w, w), dim=1)[:, : shape[1]], fmt)
    check(w, fmt, importance=torch.rand(shape[1], generator=generator(63)) + 0.01)


def test_hostile_weights_of_columns():
    fmt = get_format("fp8_channel")
    for importance in weights_of_columns(480, seed=64).values():
        for _, w in list(families(2, 480, seed=65))[::2]:
            check(w.bfloat16(), fmt, importance=importance)


def test_short_rows_against_every_bfloat16():
    """Where most elements are subnormal or clipped the bounds are loose; the scales stay those of brute force."""
    fmt = get_format("fp8_channel")
    g = generator(66)
    w = torch.randn(6, 5, generator=g) * torch.exp2(torch.randint(-20, 1, (6, 5), generator=g).float())
    w[4] = torch.tensor([448.0, 1.0, 2.0**-9, 3 * 2.0**-9, 0.0])  # exact at scale 1, and at no smaller one
    w[5] = 0.0
    check(w.bfloat16(), fmt, search="brute_force")
    importance = torch.tensor([2.0**-20, 1.0, 3.0, 0.0, 2.0**20])
    check(w.bfloat16(), fmt, importance=importance, search="brute_force")


@pytest.mark.parametrize("rule", ["absmax", "absmax_pz"])
def test_abs_max_rounds_its_scale_up(rule):
    for name in ("fp8_channel", "fp8_tensor", "fp8_block"):
        fmt = get_format(name)
        for exponent in (-120, -6, 0, 100):
            w = (torch.randn(131, 140, generator=generator(67)) * 2.0**exponent).bfloat16()
            check(w, fmt, rule=rule)
            done = cpu.block_quantize(w, fmt, rule=rule)
            assert done is not None
            assert bool(((done[0] & 0x7F) < 0x7F).all())


def test_zeros_subnormals_and_the_largest_numbers():
    fmt = get_format("fp8_channel")
    w = torch.zeros(4, 64).bfloat16()
    w[1, 5] = -0.0
    w[2] = torch.arange(64, dtype=torch.int16).view(BFLOAT16)  # subnormal bfloat16
    w[3] = torch.linspace(-1, 1, 64) * torch.finfo(BFLOAT16).max
    check(w, fmt)
    check(w, fmt, rule="absmax")


def test_damage_raises_and_other_sources_decline():
    fmt = get_format("fp8_block")
    w = torch.randn(200, 200).bfloat16()
    assert cpu.block_quantize(w.to(FLOAT32), fmt) is None
    assert cpu.block_quantize(w, fmt, rule="ocp_floor") is None
    assert cpu.score_total(w, fmt) is None
    w[150, 199] = math.inf
    for rule in ("exact", "absmax"):
        with pytest.raises(NumericsError, match=r"the first at \[150, 199\]"):
            cpu.block_quantize(w, fmt, rule=rule)
