"""Claims about global scales: they read the same both ways, and candidates and samples are what they should be."""

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st

from ptqpipe.errors import NumericsError
from ptqpipe.numerics.formats import CODECS, get_format
from ptqpipe.numerics.global_scale import (
    POINTS,
    SAMPLE_ALL,
    SAMPLE_RUNS,
    absmax_global,
    candidates,
    canonical,
    is_canonical,
    pick,
    sample_rows,
    significant_bits,
)
from ptqpipe.numerics.qtensor import QTensor

NVFP4 = get_format("nvfp4")
LARGEST_STEP = 1.41e-4  # of canonical(), for E4M3 scales


def decoded(g: torch.Tensor, *, divides: bool) -> torch.Tensor:
    """What every E4M3 scale times every E2M1 code decodes to."""
    scales = torch.arange(1, 127).to(torch.uint8).reshape(-1, 1)
    data = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8).expand(126, -1)
    return QTensor(NVFP4, (126, 16), data, scales, g, global_divides=divides).dequantize()


@pytest.mark.parametrize(
    ("name", "bits", "largest"),
    [("e4m3", 4, LARGEST_STEP), ("ue5m3", 4, LARGEST_STEP), ("ue4m4", 5, 2.0**-12), ("bf16", 8, 2.0**-11.9)],
)
def test_a_canonical_scale_is_never_far(name: str, bits: int, largest: float) -> None:
    """Every number of 24 - bits bits in an octave, which stands for all: the widest gap bounds the change."""
    assert significant_bits(CODECS[name]) == bits
    count = 1 << (23 - bits)
    g = (1 + torch.arange(count + 1).double() / count).float()
    d = 1.0 / g
    passes = 1.0 / d == g
    for odd in range(1, 1 << bits, 2):
        v = torch.full_like(d, odd)
        passes &= v / d == v * g
    kept = g[passes].double()
    assert (kept[0], kept[-1]) == (1.0, 2.0)
    half_gaps = (kept[1:] - kept[:-1]) / 2 / (kept[1:] + kept[:-1]) * 2
    assert float(half_gaps.max()) <= largest
    assert float(passes.float().mean()) > 0.69


@settings(max_examples=150, deadline=None)
@given(st.floats(2.0**-99, 2.0**99, width=32))
def test_a_canonical_scale_decodes_alike_as_multiplier_and_as_divisor(wanted: float) -> None:
    g = canonical(torch.tensor(wanted), NVFP4)
    d = 1.0 / g
    assert 1.0 / d == g
    assert torch.equal(decoded(g, divides=False), decoded(d, divides=True))
    assert abs(float(g) / wanted - 1) <= LARGEST_STEP
    assert is_canonical(g, NVFP4)
    assert torch.equal(canonical(g, NVFP4), g)


def test_most_scales_are_not_canonical() -> None:
    """So that the claim above is one: four in five decode differently, one in six does not survive 1/(1/g)."""
    drawn = torch.exp2(torch.rand(600, generator=torch.Generator().manual_seed(0)) * 20 - 15)
    passing = [is_canonical(g, NVFP4) for g in drawn]
    alike = [torch.equal(decoded(g, divides=False), decoded(1.0 / g, divides=True)) for g in drawn]
    round_trips = [bool(1.0 / (1.0 / g) == g) for g in drawn]
    assert passing == [a and b for a, b in zip(alike, round_trips, strict=True)]
    assert 0.12 < sum(passing) / 600 < 0.25
    assert 0.78 < sum(round_trips) / 600 < 0.88


def test_float32_scales_leave_room_for_the_round_trip_alone() -> None:
    fmt = get_format("e2m1/16/fp32/global")
    g = canonical(torch.tensor(0.1), fmt)
    assert 1.0 / (1.0 / g) == g
    assert is_canonical(g, fmt)


def test_absmax_global_puts_the_largest_weight_on_the_largest_product() -> None:
    for amax in (1e-6, 0.02, 1.0, 37.0):
        g = absmax_global(amax, NVFP4)
        assert g.dtype == torch.float32
        assert g.shape == ()
        assert float(g) == pytest.approx(amax / 2688, rel=LARGEST_STEP)
        assert is_canonical(g, NVFP4)


def test_scales_with_a_range_of_their_own_share_only_the_largest_element() -> None:
    assert float(absmax_global(12.0, get_format("e2m1/16/bf16/global"))) == 2.0
    assert float(absmax_global(12.0, get_format("e2m1/16/e8m0/global"))) == 2.0


def test_a_group_of_zeros_has_the_global_scale_one() -> None:
    assert float(absmax_global(0.0, NVFP4)) == 1.0


@pytest.mark.parametrize("amax", [math.nan, math.inf, 2.0**113, 2.0**-90])
def test_magnitudes_that_float32_cannot_scale_are_refused(amax: float) -> None:
    with pytest.raises(NumericsError, match=r"outside 2\^-100 .. 2\^100") as error:
        absmax_global(amax, NVFP4)
    assert "\n" not in str(error.value)


def test_candidates_are_the_plain_scale_and_one_octave_with_headroom() -> None:
    plain = absmax_global(0.3, NVFP4)
    found = candidates(plain, NVFP4)
    assert len(found) == 1 + POINTS
    assert torch.equal(found[0], plain)
    for k, g in enumerate(found[1:]):
        assert float(g / plain) == pytest.approx(1.5 * 2 ** (k / POINTS), rel=2 * LARGEST_STEP)
        assert is_canonical(g, NVFP4)


def test_pick_takes_the_least_total_and_the_plain_scale_at_equality() -> None:
    plain = absmax_global(1.0, NVFP4)
    asked: list[float] = []

    def totals(scales: Sequence[torch.Tensor]) -> list[float]:
        asked.extend(map(float, scales))
        return [abs(float(g / plain) - 2.0) for g in scales]

    best = pick(plain, NVFP4, totals=totals, points=8)
    assert float(best / plain) == pytest.approx(1.5 * 2 ** (3 / 8), rel=1e-3)  # 1.945
    assert asked == [float(g) for g in candidates(plain, NVFP4, points=8)]
    assert torch.equal(pick(plain, NVFP4, totals=lambda scales: [1.0] * len(scales)), plain)


@settings(max_examples=400, deadline=None)
@given(st.integers(1, 40000), st.integers(1, 700), st.sampled_from(["nvfp4", "fp8_block", "fp8_channel"]))
def test_samples_are_runs_of_whole_blocks_over_the_whole_matrix(rows: int, sixteens: int, name: str) -> None:
    fmt = get_format(name)
    shape = (rows, 16 * sixteens)
    runs = sample_rows(shape, fmt)
    unit = fmt.block_extent(shape)[0]
    assert all(start < stop for start, stop in runs)
    assert all(a[1] <= b[0] for a, b in pairwise(runs))
    assert all(start % unit == 0 and (stop % unit == 0 or stop == rows) for start, stop in runs)
    taken = sum(stop - start for start, stop in runs)
    if rows * shape[1] <= SAMPLE_ALL:
        assert runs == [(0, rows)]
    else:
        assert runs[-1][1] == rows or len(runs) == 1
        assert runs[0][0] == 0
        assert (taken + unit) * shape[1] > SAMPLE_ALL  # the last unit of rows may be short
        # no more than a sixteenth, or 2^20 elements, plus one unit for each run
        assert taken <= max(rows / 16, SAMPLE_ALL / shape[1]) + unit * (SAMPLE_RUNS + 1)
