"""Claims: the compiled baselines are those of ``numerics/search``, bit for bit; totals are sums of objective scores.

Expected values: the torch search of the same name, ``qtensor.encode``, and ``objective.formula`` summed by
``kernels.reference``.
"""

import pytest
import torch

from ptqpipe.errors import FormatError
from ptqpipe.numerics.formats import Format, get_format
from ptqpipe.numerics.kernels import cpu, reference
from ptqpipe.numerics.qtensor import QTensor, encode
from ptqpipe.numerics.search import get_search
from ptqpipe.numerics.search.objective import formula, importance_blocks, magnitude_blocks
from tests.numerics.kernels.cpu_cases import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    default_global,
    families,
    generator,
    weights_of_columns,
)

if not cpu.available():
    pytest.skip("the CPU kernels are not built: pip install -e . with a C++ compiler", allow_module_level=True)

CASES = [
    (name, rule)
    for name in ("nvfp4", "e2m1/16/e4m3", "e2m1/8/ue5m3", "e2m1/32/ue5m3/global", "e4m3/16/e4m3/global")
    for rule in ("absmax", "absmax_pz", "four_over_six")
    if not (name.startswith("e4m3") and rule == "four_over_six")
] + [
    (name, rule)
    for name in ("mxfp4", "mxfp8", "mxfp6_e2m3", "mxfp6_e3m2", "e2m1/16/e8m0")
    for rule in ("absmax", "absmax_pz", "ocp_floor", "ocp_even", "ocp_ceil")
]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    cpu.force_isa(None)
    torch.set_num_threads(threads)


def total(w: torch.Tensor, codes: torch.Tensor, fmt: Format, g, importance=None) -> float:
    """What ``score_total`` has to return for these scales."""
    h = importance_blocks(importance, w, fmt)
    scores, _ = formula(magnitude_blocks(w, fmt), codes.reshape(-1), fmt=fmt, global_scale=g, h=h)
    found = reference.sum_blocks(scores)
    return found if g is None else found * float(g) ** 2


def check(w, fmt, rule, *, global_scale=None, importance=None):
    """Scales, bytes and the total of a rule, on every instruction set."""
    expected = get_search(rule).search(w, fmt, global_scale=global_scale, importance=importance)
    data = encode(w, expected, fmt=fmt, global_scale=global_scale).data
    weights = importance if rule in ("exact", "four_over_six") else None
    sum_of_scores = total(w, expected, fmt, global_scale, weights)
    for isa in cpu.isas():
        cpu.force_isa(isa)
        done = cpu.block_quantize(w, fmt, rule=rule, global_scale=global_scale, importance=importance)
        assert done is not None
        differ = (done[1] != expected).nonzero()
        assert len(differ) == 0, f"{isa}: {len(differ)} scales differ, the first at {differ[0].tolist()}"
        assert torch.equal(done[0], data), isa
        found = cpu.score_total(w, fmt, rule=rule, global_scale=global_scale, importance=importance)
        assert found == sum_of_scores, isa


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_baselines_equal_their_torch_searches(name, rule):
    fmt = get_format(name)
    for seed, (_, w) in enumerate(families(3, 480, seed=31)):
        w = (w * 0.02).to((BFLOAT16, FLOAT32, FLOAT16)[seed % 3])
        check(w, fmt, rule, global_scale=default_global(w, fmt))


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_baselines_at_every_magnitude(name, rule):
    """Blocks from 2^-149 to 2^127: underflow to zero, subnormal scales, saturation, the ends of E8M0."""
    fmt = get_format(name)
    w = torch.randn(70, 96, generator=generator(32)).clamp(-1.9, 1.9)
    w = torch.ldexp(w, torch.arange(-149, 131, 4)[:70].clamp(max=126).unsqueeze(1))
    g = torch.tensor(2.0**-9) if fmt.has_global else None
    for kind in (w, w.bfloat16()):
        if rule == "four_over_six":  # its scores are float32: as far as they do not overflow
            kind = kind[20:50]
        check_scales_only(kind, fmt, rule, g)


def check_scales_only(w, fmt, rule, g):
    """Totals of weights near the ends of float32 leave it; scales and bytes do not."""
    expected = get_search(rule).search(w, fmt, global_scale=g)
    data = encode(w, expected, fmt=fmt, global_scale=g).data
    for isa in cpu.isas():
        cpu.force_isa(isa)
        done = cpu.block_quantize(w, fmt, rule=rule, global_scale=g)
        assert done is not None
        differ = (done[1] != expected).nonzero()
        assert len(differ) == 0, f"{isa}: {len(differ)} scales differ, the first at {differ[0].tolist()}"
        assert torch.equal(done[0], data), isa


@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_significands_at_the_edges_of_the_ocp_rules(name):
    """1, 1.5, 1.75 and their neighbours: where floor, even and ceil change their mind."""
    fmt = get_format(name)
    edges = torch.tensor([1.0, 1.5, 1.75, fmt.element.max, 7.0, 7.25, 3.5])
    ends = torch.cat((edges, torch.nextafter(edges, edges * 0), torch.nextafter(edges, edges * 9)))
    w = ends.unsqueeze(1).repeat(1, 32)
    for rule in ("absmax", "ocp_floor", "ocp_even", "ocp_ceil"):
        for exponent in (-130, -126, -40, 0, 60):
            check_scales_only(torch.ldexp(w, torch.tensor(exponent)), fmt, rule, None)


def test_four_over_six_weighted():
    fmt = get_format("nvfp4")
    for importance in weights_of_columns(480, seed=33).values():
        for _, w in list(families(2, 480, seed=34))[::3]:
            check(w, fmt, "four_over_six", global_scale=default_global(w, fmt), importance=importance)


@pytest.mark.parametrize("name", ["nvfp4", "e2m1/16/e4m3", "mxfp4", "mxfp8", "e2m1/8/ue5m3"])
def test_totals_are_sums_of_the_exact_scores(name):
    fmt = get_format(name)
    for _, w in families(3, 7 * 32, seed=35):
        w = (w * 0.02).bfloat16()
        check(w, fmt, "exact", global_scale=default_global(w, fmt))
        check(w, fmt, "exact", global_scale=default_global(w, fmt), importance=torch.rand(7 * 32))


def test_the_total_at_any_global_scale_is_that_of_its_search():
    fmt = get_format("nvfp4")
    w = torch.randn(7, 320, generator=generator(36)).bfloat16()
    g = default_global(w, fmt)
    assert g is not None
    scales = g * torch.tensor([2.0**-20, 0.4, 1.0, 1.5, 1.71, 2.0, 2.9, 2.0**20])
    for rule in ("exact", "absmax", "four_over_six"):
        totals = [cpu.score_total(w, fmt, rule=rule, global_scale=one) for one in scales]
        assert totals == [total(w, get_search(rule).search(w, fmt, global_scale=one), fmt, one) for one in scales]
        assert cpu.score_totals(w, fmt, rule=rule, global_scales=list(scales)) == totals


def test_the_total_is_the_squared_error():
    """To float32 rounding of each block's score: 16 additions and a product, each half an ulp of 2^-24."""
    fmt = get_format("nvfp4")
    w = torch.randn(64, 512, generator=generator(37)).bfloat16()
    g = default_global(w, fmt)
    data, scales = cpu.block_quantize(w, fmt, global_scale=g)
    diff = QTensor(fmt, (64, 512), data, scales, g).dequantize().double() - w.double()
    assert cpu.score_total(w, fmt, global_scale=g) == pytest.approx(float((diff * diff).sum()), rel=64 * 2.0**-24)


def test_rules_decline_formats_that_their_torch_searches_refuse():
    w, g = torch.randn(2, 64), torch.tensor(0.01)
    for name, rule in (("nvfp4", "ocp_floor"), ("nvfp4", "ocp_even"), ("mxfp4", "four_over_six"), ("mxfp8", "window")):
        fmt = get_format(name)
        assert cpu.block_quantize(w, fmt, rule=rule, global_scale=g if fmt.has_global else None) is None
        assert cpu.score_total(w, fmt, rule=rule, global_scale=g if fmt.has_global else None) is None
    with pytest.raises(FormatError, match="needs a global scale"):
        cpu.score_total(w, get_format("nvfp4"))
