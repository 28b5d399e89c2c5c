"""Claims about the exact search of short blocks: it is brute force, bit for bit, on anything."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from ptqpipe.errors import FormatError, NumericsError
from ptqpipe.numerics.formats import CODECS, Format, get_codec, get_format
from ptqpipe.numerics.qtensor import encode, round_to, squared_error
from ptqpipe.numerics.search import _grid, baselines, brute_force, exact
from tests.numerics.search import cases

DEPLOYED = ("nvfp4", "mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8")
RESEARCH = (
    "e2m1/16/e4m3",
    "e2m1/8/ue5m3",
    "e2m1/4/ue4m4/global",
    "e2m1/256/e4m3/global",
    "e2m3/64/e5m2/global",
    "e4m3/128/e8m0",
    "e1m2/16/e4m3/global",  # integers
    "e3m0/8/e4m3/global",  # powers of two as elements
    "e2m1/4/e3m2/global",
    "e2m1/16/ue1m4",  # scales on an even grid: half of an odd one is not legal
    "e5m2/8/e8m0",
    "e2m1/8/ue7m1",  # squares of scales leave float32
    "e5m0/8/e4m3/global",  # smallest magnitude 2^-15
    "e6m1/4/e8m0",  # smallest magnitude 2^-31: no halving
)


@pytest.mark.slow
@pytest.mark.parametrize("name", DEPLOYED + RESEARCH)
def test_exact_is_brute_force(name: str) -> None:
    fmt = get_format(name)
    blocks = 4 if fmt.block[1] < 64 else 1
    for seed, (kind, w) in enumerate(cases.stacked(fmt, 6, blocks, seed=5).items()):
        g = cases.global_scale(w, fmt, factor=(1.0, 1.9)[seed])
        for h in (None, cases.importances(w.shape[1], seed)["uniform"]):
            found = exact.search(w, fmt, global_scale=g, importance=h)
            assert torch.equal(found, brute_force.search(w, fmt, global_scale=g, importance=h)), (kind, h is not None)


@pytest.mark.parametrize("hostile", ["half of them zero", "2^-30 .. 2^30", "one column alone"])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "e2m1/16/e4m3"])
def test_exact_is_brute_force_with_hostile_weights(name: str, hostile: str) -> None:
    fmt = get_format(name)
    for kind, w in cases.stacked(fmt, 20, 4, seed=6).items():
        h = cases.importances(w.shape[1], 7)[hostile]
        g = cases.global_scale(w, fmt)
        found = exact.search(w, fmt, global_scale=g, importance=h)
        assert torch.equal(found, brute_force.search(w, fmt, global_scale=g, importance=h)), kind


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["nvfp4", "e2m1/16/e4m3", "mxfp4", "e2m1/8/ue5m3"]),
    st.data(),
    st.floats(2.0**-12, 4.0),
    st.booleans(),
)
def test_exact_is_brute_force_for_any_numbers(name: str, data: st.DataObject, factor: float, weighted: bool) -> None:
    fmt = get_format(name)
    one = st.one_of(
        st.floats(-(2.0**20), 2.0**20, width=32),
        st.builds(lambda m, e: math.ldexp(m, e), st.integers(-255, 255), st.integers(-48, 12)),
        st.sampled_from([0.0, -0.0, 0.25, 0.75, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, 448.0]),
    )
    count = fmt.block[1]
    w = torch.tensor([data.draw(st.lists(one, min_size=count, max_size=count)) for _ in range(2)])
    h = None
    if weighted:
        weight = st.floats(0, 2.0**10, width=32)
        h = torch.tensor([1.0, *data.draw(st.lists(weight, min_size=count - 1, max_size=count - 1))])
    g = cases.global_scale(w, fmt, factor=factor)
    found = exact.search(w, fmt, global_scale=g, importance=h)
    assert torch.equal(found, brute_force.search(w, fmt, global_scale=g, importance=h))


@settings(max_examples=40, deadline=None)
@given(st.integers(-40, 20), st.integers(0, 2**32), st.sampled_from(DEPLOYED))
def test_exact_is_brute_force_at_every_magnitude(exponent: int, seed: int, name: str) -> None:
    fmt = get_format(name)
    w = torch.randn(4, 2 * fmt.block[1], generator=cases.generator(seed)) * 2.0**exponent
    g = cases.global_scale(w, fmt)
    assert torch.equal(exact.search(w, fmt, global_scale=g), brute_force.search(w, fmt, global_scale=g))


def test_a_fixed_window_of_codes_is_not_enough() -> None:
    """The published window [-3, +7] starts at code 5 and ends at 12; the block is exact at code 15."""
    fmt = get_format("e2m1/16/e4m3")
    w = torch.tensor([[30.0, 22.5, *[7.5] * 14]]) * 2.0**-9
    scales = exact.search(w, fmt)
    assert scales.tolist() == [[15]]
    assert squared_error(encode(w, scales, fmt=fmt), w) == 0.0
    missed = encode(w, baselines.window(w, fmt), fmt=fmt)
    assert squared_error(missed, w) == pytest.approx(6.25 * 2.0**-18, rel=1e-6)


def test_ties_go_to_the_smaller_code() -> None:
    """Sixes and zeros are exact at the scales 1, 1.5, 2, 3, 4, 6 and 12."""
    fmt = get_format("e2m1/4/e4m3")
    values = [CODECS["e4m3"].magnitudes[code] for code in exact.search(torch.tensor([[6.0, 0.0, 0.0, -6.0]]), fmt)[0]]
    assert values == [1.0]


def test_zero_blocks_get_the_smallest_scale() -> None:
    w = torch.zeros(2, 32)
    w[1, 3] = 1.0
    assert exact.search(w, get_format("nvfp4"), global_scale=torch.tensor(1.0))[0].tolist() == [1, 1]
    assert exact.search(w, get_format("mxfp4"))[0].tolist() == [0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_searched_as_their_float32_values(dtype: torch.dtype) -> None:
    fmt = get_format("nvfp4")
    w = (torch.randn(16, 64, generator=cases.generator(8)) * 0.02).to(dtype)
    g = cases.global_scale(w.float(), fmt)
    assert torch.equal(exact.search(w, fmt, global_scale=g), exact.search(w.float(), fmt, global_scale=g))


def test_no_block_depends_on_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the chunk it is scanned in, nor on which others are left when it is put aside."""
    fmt = get_format("nvfp4")
    w = cases.stacked(fmt, 24, 4, seed=9)["as they are"]
    h = cases.importances(w.shape[1], 10)["uniform"]
    g = cases.global_scale(w, fmt)
    whole = exact.search(w, fmt, global_scale=g, importance=h)
    rows = [exact.search(w[k : k + 1], fmt, global_scale=g, importance=h) for k in range(0, len(w), 7)]
    assert torch.equal(torch.cat(rows), whole[::7])
    monkeypatch.setattr(exact, "CHUNK", 480)
    assert torch.equal(exact.search(w, fmt, global_scale=g, importance=h), whole)


def test_weights_that_are_not_adjacent_in_memory_are_searched_alike() -> None:
    fmt = get_format("nvfp4")
    w = torch.randn(64, 32, generator=cases.generator(11))
    g = cases.global_scale(w, fmt)
    turned = w.t()
    assert torch.equal(
        exact.search(turned, fmt, global_scale=g), exact.search(turned.contiguous(), fmt, global_scale=g)
    )


def test_the_number_of_threads_changes_nothing() -> None:
    fmt = get_format("nvfp4")
    w = torch.randn(64, 512, generator=cases.generator(12))
    g = cases.global_scale(w, fmt)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = exact.search(w, fmt, global_scale=g)
        torch.set_num_threads(2)
        assert torch.equal(exact.search(w, fmt, global_scale=g), one)
    finally:
        torch.set_num_threads(threads)


def test_tiles_are_short_blocks_too() -> None:
    fmt = Format("tile", CODECS["e2m1"], (4, 4), CODECS["e4m3"], partial_blocks=True)
    w = torch.randn(10, 14, generator=cases.generator(13))
    for h in (None, torch.rand(14, generator=cases.generator(14))):
        assert torch.equal(exact.search(w, fmt, importance=h), brute_force.search(w, fmt, importance=h))


@pytest.mark.parametrize("name", ["e2m1/16/bf16", "e2m1/16/bf16/global", "e4m3/32/fp16"])
def test_blocks_with_fine_scales_are_searched_over_all_of_them(name: str) -> None:
    fmt = get_format(name)
    w = torch.randn(1, 2 * fmt.block[1], generator=cases.generator(15)) * 0.02
    g = torch.tensor(0.3) if fmt.has_global else None
    assert torch.equal(exact.search(w, fmt, global_scale=g), brute_force.search(w, fmt, global_scale=g))


# MX formats: the candidates that numerics proves


def test_mxfp4_needs_one_or_two_candidates() -> None:
    """With m = amax / 2^e0 in [4, 8): e0; e0 + 1 only for m > 7; e0 - 1 only for m <= (7 + 31/16) / 2."""
    fmt = get_format("mxfp4")
    w = torch.randn(512, 256, generator=cases.generator(16)) * torch.exp2(
        torch.randn(512, 1, generator=cases.generator(17)) * 6
    )
    w[:64] = w[:64] ** 3
    amax = w.reshape(-1, 32).abs().amax(dim=1)
    e0 = torch.frexp(amax).exponent - 1 - 2
    m = torch.ldexp(amax, -e0)
    offset = exact.search(w, fmt).flatten().int() - 127 - e0
    assert set(offset.tolist()) <= {-1, 0, 1}
    assert (m[offset == 1] > 7).all()
    assert (m[offset == -1] <= 8.9375 / 2).all()
    assert (offset == 1).sum() > 100


def test_mxfp8_needs_the_next_power_only_when_something_would_be_clipped() -> None:
    fmt = get_format("mxfp8")
    w = torch.randn(512, 256, generator=cases.generator(18))
    amax = w.reshape(-1, 32).abs().amax(dim=1)
    e0 = torch.frexp(amax).exponent - 1 - 8
    m = torch.ldexp(amax, -e0)
    offset = exact.search(w, fmt).flatten().int() - 127 - e0
    assert set(offset.tolist()) <= {0, 1}
    assert (m[offset == 1] > 448).all()
    assert (m[offset == 0] <= 464).all()  # up to the middle of 448 and 480 saturation costs no more than rounding


# Rounding by magic numbers


@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2", "e4m3", "e5m2", "e1m2", "e3m0", "e2m5", "e6m1"])
def test_the_scan_rounds_as_encode_does(name: str) -> None:
    codec = get_codec(name)
    grid = _grid.element_grid(codec)
    middles = torch.tensor([(a + b) / 2 for a, b in zip(codec.magnitudes, codec.magnitudes[1:], strict=False)])
    around = [middles, torch.nextafter(middles, torch.zeros(1)), torch.nextafter(middles, torch.full((1,), math.inf))]
    spread = torch.exp2(torch.rand(4000, generator=cases.generator(19)) * 80 - 60)
    y = torch.cat([*around, spread, torch.tensor(codec.magnitudes), torch.tensor([0.0, 2.0**60, 3e38])])
    d = y.clone()
    _grid.deviations(d, torch.empty_like(y), torch.empty_like(y), grid=grid, saturates=True)
    assert torch.equal(d.abs(), (y - round_to(y, codec)).abs())
    inside = y <= grid.wrap
    d = y[inside].clone()
    _grid.deviations(d, torch.empty_like(d), torch.empty_like(d), grid=grid, saturates=False)
    assert torch.equal(d.abs(), (y - round_to(y, codec)).abs()[inside])


def test_a_table_that_is_no_minifloat_is_refused() -> None:
    codebook = Format("nf3", type(CODECS["e2m1"])("nf3", 3, True, (0.0, 0.3, 0.5, 1.0)), (1, 16), CODECS["e4m3"])
    with pytest.raises(FormatError, match="nf3 is no minifloat"):
        exact.search(torch.ones(1, 16), codebook)


# Refusals


def test_float32_scales_are_refused_with_the_search_to_use() -> None:
    with pytest.raises(FormatError, match="fp32 scales, over which nothing can be proven; use the refit search"):
        exact.search(torch.ones(1, 16), get_format("e2m1/16/fp32"))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_inf_raise(bad: float) -> None:
    w = torch.ones(2, 32)
    w[1, 20] = bad
    with pytest.raises(NumericsError, match="the first at"):
        exact.search(w, get_format("nvfp4"), global_scale=torch.tensor(1.0))


def test_a_global_scale_out_of_range_raises() -> None:
    for g in (1e-42, math.inf, 0.0, math.nan, -1.0, 2.0**101):
        with pytest.raises(NumericsError, match=r"outside 2\^-100 .. 2\^100"):
            exact.search(torch.ones(1, 16), get_format("nvfp4"), global_scale=torch.tensor(g))


def test_importance_of_another_length_is_refused() -> None:
    with pytest.raises(FormatError, match="one weight for each of 32 columns"):
        exact.search(torch.ones(1, 32), get_format("mxfp4"), importance=torch.ones(16))
