"""Claims about the objective: it is the squared error, and its proofs hold in floating point."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from ptqpipe.errors import FormatError, NumericsError
from ptqpipe.numerics.formats import CODECS, get_format
from ptqpipe.numerics.kernels.cpu_tensors import normalize_importance
from ptqpipe.numerics.qtensor import QTensor, encode, magnitude_codes, squared_error
from ptqpipe.numerics.search.objective import (
    LANES,
    exact_weights,
    importance_blocks,
    lane_sum,
    magnitude_blocks,
    scores,
    weigh,
)
from tests.numerics.search import cases


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8", "e2m1/8/ue5m3", "e2m1/16/bf16"])
def test_a_score_is_the_squared_error_of_the_decode(name: str) -> None:
    """Up to rounding: each y has three roundings, which moves its distance to the grid by at most 3 * 2^-24 y."""
    fmt = get_format(name)
    w = torch.randn(1, 64 * fmt.block[1], generator=cases.generator(0))
    g = cases.global_scale(w, fmt)
    x = magnitude_blocks(w, fmt)
    fitted = x.amax(dim=1) / fmt.element.max / (1.0 if g is None else g)
    scales = magnitude_codes(fitted, fmt.scale).to(torch.uint8) if fmt.scale.enumerable else fitted.to(fmt.scale.dtype)
    q = encode(w, scales.reshape(1, -1), fmt=fmt, global_scale=g)
    per_block = QTensor(fmt, w.shape, q.data, q.scales, g).dequantize().double().reshape(
        len(x), -1
    ) - w.double().reshape(len(x), -1)
    step = q.block_scales().reshape(-1).double()
    slack = (2 * per_block.abs() + 1e-6 * step.unsqueeze(1)) * 3 * 2.0**-24 * x.double() * 2
    expected = per_block.square().sum(dim=1)
    score = scores(x, scales, fmt=fmt, global_scale=g) * (1.0 if g is None else float(g) ** 2)
    tolerance = slack.sum(dim=1) + expected * (fmt.block[1] + 8) * 2.0**-24
    assert ((score - expected).abs() <= tolerance).all()
    assert float(score.sum()) == pytest.approx(squared_error(q, w), rel=1e-5)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.floats(0, 2.0**20, width=32), min_size=16, max_size=16),
    st.integers(16, 126),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_half_of_a_scale_whose_codes_can_double_is_as_good(
    values: list[float], code: int, plain: bool, seed: int
) -> None:
    """From code 16 on E4M3 has the half of every scale, eight codes below."""
    fmt = get_format("e2m1/16/e4m3")
    w = torch.tensor([values])
    if float(w.max()) == 0:
        return
    w = w / w.max() * (3.5 * CODECS["e4m3"].magnitudes[code]) * (1 - 2.0**-20)
    x = magnitude_blocks(w, fmt)
    h = None if plain else torch.exp2(torch.randint(-24, 1, x.shape, generator=cases.generator(seed)).float())
    whole, half = (scores(x, torch.tensor([c], dtype=torch.uint8), fmt=fmt, h=h) for c in (code, code - 8))
    assert bool(half <= whole)


def test_dust_would_break_the_halving_proof_if_it_were_not_flushed() -> None:
    """(2^-76)^2 underflows and (2^-75)^2 does not."""
    fmt = get_format("e2m1/16/e4m3")
    w = torch.zeros(1, 16)
    w[0, 0], w[0, 1] = 8.0, 8.0 * 2.0**-76 * 1.5
    whole, half = (torch.tensor([c], dtype=torch.uint8) for c in (80, 72))  # 8 and 4
    raw = w.abs()
    assert float(scores(raw, whole, fmt=fmt)) == 0.0 < float(scores(raw, half, fmt=fmt))
    assert magnitude_blocks(w, fmt)[0, 1] == 0.0
    assert float(scores(magnitude_blocks(w, fmt), half, fmt=fmt)) == 0.0


def test_only_elements_below_a_fraction_of_their_own_block_are_flushed() -> None:
    fmt = get_format("e2m1/4/e4m3")
    w = torch.tensor([[1.0, 2.0**-32, -(2.0**-33), 0.0, 2.0**-33, 2.0**-34, 2.0**-60, 2.0**-66 * 1.9]])
    assert magnitude_blocks(w, fmt).tolist() == [[1.0, 2.0**-32, 0.0, 0.0], [2.0**-33, 2.0**-34, 2.0**-60, 0.0]]


def test_a_scale_that_zeroes_the_whole_block_scores_infinity() -> None:
    fmt = get_format("e2m1/4/e4m3")
    one = torch.tensor([56], dtype=torch.uint8)
    for value, infinite in ((0.25, True), (math.nextafter(0.25, 1) + 2.0**-26, False), (0.1, True), (0.0, True)):
        x = magnitude_blocks(torch.tensor([[value, 0.0, 0.0, value / 2]]), fmt)
        assert math.isinf(float(scores(x, one, fmt=fmt))) is infinite


def test_scores_at_power_of_two_scales_neither_underflow_nor_overflow() -> None:
    """The score is relative to the scale until the last product, which is float64."""
    fmt = get_format("mxfp4")
    for exponent in (-120, 0, 120):
        x = torch.full((1, 32), 2.3) * 2.0**exponent
        score = scores(x, torch.tensor([127 + exponent], dtype=torch.uint8), fmt=fmt)
        assert float(score) == pytest.approx(32 * 0.09 * 4.0**exponent, rel=1e-4)  # 2.3 is 0.3 from 2


def test_sums_run_in_element_order() -> None:
    fmt = get_format("e2m1/8/e4m3")
    x = magnitude_blocks(torch.randn(20, 8, generator=cases.generator(1)), fmt)
    codes = torch.full((20,), 50, dtype=torch.uint8)
    expected = []
    grid = np.array(CODECS["e2m1"].magnitudes, dtype=np.float32)
    scale = np.float32(CODECS["e4m3"].magnitudes[50])
    for row in x.numpy():
        acc = np.float32(0)
        for value in row:
            y = np.float32(value * np.float32(np.float32(1) / scale))
            d = np.abs(np.float32(y - grid)).min()
            acc = np.float32(acc + np.float32(d * d))
        expected.append(np.float32(acc * np.float32(scale * scale)))
    assert torch.equal(scores(x, codes, fmt=fmt), torch.tensor(np.array(expected)).double())


def test_long_sums_run_in_lanes_whatever_is_beside_them() -> None:
    t = torch.rand(3, 2 * LANES + 100, generator=cases.generator(2))
    lanes = [0.0] * LANES
    for k, value in enumerate(t[1].tolist()):
        lanes[k % LANES] += value
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [a + b for a, b in zip(lanes[:half], lanes[half:], strict=True)]
    assert float(lane_sum(t)[1]) == lanes[0]
    assert torch.equal(lane_sum(t[1:2]), lane_sum(t)[1:2])


def test_lanes_are_folded_in_halves() -> None:
    """Half an ulp of 1 is lost beside it, twice that is not: lanes 256 and 768 meet before they meet lane 0."""
    t = torch.zeros(1, LANES)
    t[0, 0], t[0, 256], t[0, 768] = 1.0, 2.0**-53, 2.0**-53
    assert float(lane_sum(t)) == 1.0 + 2.0**-52


def test_short_blocks_of_fine_scales_are_summed_as_padded_ones() -> None:
    t = torch.rand(2, 20, generator=cases.generator(3))
    assert torch.equal(lane_sum(t), lane_sum(torch.nn.functional.pad(t, (0, 5))))


def test_only_short_blocks_of_minifloat_scales_are_weighed_in_float32() -> None:
    assert [name for name, codec in CODECS.items() if not exact_weights(codec)] == [
        "e2m1", "e2m3", "e3m2", "e4m3", "e5m2", "ue5m3", "ue4m4", "int4", "int8", "int8_signed",
    ]  # fmt: skip
    acc, value = torch.tensor([1 / 3]), torch.tensor([0.6875])
    assert float(weigh(acc, value, CODECS["e4m3"])) == float(np.float32(np.float32(1 / 3) * np.float32(0.6875**2)))
    assert float(weigh(acc, value, CODECS["bf16"])) == float(acc) * 0.6875**2


def test_importance_is_scaled_by_a_power_of_two_and_floored() -> None:
    h = normalize_importance(torch.tensor([3.0, 6.0, 0.0, 2.0**-40]))
    assert h.tolist() == [0.75, 1.5, 2.0**-24, 2.0**-24]
    for top in (1e-40, 3e38):  # a subnormal, and nearly the largest
        assert 1.0 <= float(normalize_importance(torch.tensor([top, top / 2]))[0]) < 2.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_unusable_importance_is_refused(bad: float) -> None:
    with pytest.raises(NumericsError, match="importance must be finite, non-negative and not all zero"):
        normalize_importance(torch.tensor([1.0, bad]))


def test_importance_that_is_all_zero_or_of_another_length_is_refused() -> None:
    with pytest.raises(NumericsError, match="not all zero"):
        normalize_importance(torch.zeros(4))
    with pytest.raises(FormatError, match=r"one weight for each of 32 columns, got \[16\]"):
        importance_blocks(torch.ones(16), torch.ones(2, 32), get_format("nvfp4"))


def test_importance_belongs_to_columns() -> None:
    h = torch.arange(1.0, 9.0)
    spread = importance_blocks(h, torch.ones(2, 8), get_format("e2m1/4/e4m3"))
    assert spread is not None
    assert torch.equal(spread * 8, torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]] * 2).float())
