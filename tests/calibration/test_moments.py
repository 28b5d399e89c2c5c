"""Claims of streamed moments: whatever the pieces, the sums are those of all rows; quantiles keep their bound."""

import math

import pytest
import torch

from ptqpipe.calibration.moments import (
    BINS,
    FIRST_WEIGHT,
    LARGEST,
    MAX_ROWS,
    QUANTILE_ERROR,
    RunningMoments,
    first_tokens,
    stand_in,
)
from ptqpipe.calibration.statistics import QUANTILES

CPU = torch.device("cpu")


def rows(tokens: int, columns: int = 48, *, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    """float32 [tokens, columns] with an offset, whose columns differ in size."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, columns, generator=generator) * torch.logspace(-3, 3, columns) * spread
    return x + torch.linspace(-1, 1, columns)


def collected(parts: list[torch.Tensor], *, block: bool = True, full: bool = True) -> RunningMoments:
    """All parts, one after another."""
    moments = RunningMoments.empty(parts[0].shape[1], block=block, full=full, device=CPU)
    assert all(moments.add(part) for part in parts)
    return moments


def test_a_million_small_numbers_after_a_large_one_are_not_lost() -> None:
    moments = RunningMoments.empty(1, block=False, full=True, device=CPU)
    assert moments.add(torch.full((1, 1), 2.0**13))
    for _ in range(128):
        assert moments.add(torch.full((8192, 1), 2.0**-6))
    found = moments.tensors(block=False)
    count = 128 * 8192 + 1
    mean = (2.0**13 + (count - 1) * 2.0**-6) / count
    square = (2.0**26 + (count - 1) * 2.0**-12) / count  # a float32 sum would stay at 2^26
    assert float(found["mean"]) == pytest.approx(mean, rel=2.0**-23)
    assert float(found["second_moment"]) == pytest.approx(square, rel=2.0**-23)
    assert float(found["full_moment"]) == pytest.approx(square, rel=2.0**-23)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_moments_of_pieces_are_those_of_all_rows(dtype: torch.dtype) -> None:
    x = rows(1000).to(dtype)
    found = collected(list(torch.split(x, 130))).tensors(block=True)
    exact = x.double()
    gram = exact.t() @ exact / 1000
    assert torch.equal(found["amax"], exact.abs().amax(0).float())
    assert torch.allclose(found["mean"].double(), exact.mean(0), rtol=1e-6, atol=1e-9)
    assert torch.allclose(found["second_moment"].double(), gram.diagonal(), rtol=1e-6)
    bound = 1e-5 * (gram.diagonal()[:, None] * gram.diagonal()).sqrt()  # float32 dot products of 130 terms
    assert ((found["full_moment"].double() - gram).abs() <= bound).all()
    assert torch.equal(found["full_moment"], found["full_moment"].t())
    for i in range(3):
        part = slice(16 * i, 16 * i + 16)
        assert torch.equal(found["block_moment"][i], found["full_moment"][part, part])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("full", [False, True])
def test_first_tokens_count_more_in_second_moments_alone(dtype: torch.dtype, full: bool) -> None:
    windows = rows(10 * 30).to(dtype).view(10, 30, 48)
    first = first_tokens((10, 30), 300)
    found, plain, whole = (RunningMoments.empty(48, block=True, full=full, device=CPU) for _ in range(3))
    kept = windows.clone()
    assert found.add(windows.view(300, 48), first)
    assert torch.equal(windows, kept)
    assert plain.add(windows.view(300, 48))
    assert whole.add(torch.cat([windows.view(300, 48), *[windows[:, 0]] * int(FIRST_WEIGHT - 1)]))
    assert found.tokens == 300
    assert found.quantiles() == plain.quantiles()
    mine, of_all, repeated = (each.tensors(block=True) for each in (found, plain, whole))
    for name in ("amax", "mean"):
        assert torch.equal(mine[name], of_all[name])
    for name in mine.keys() - {"amax", "mean"}:
        assert torch.allclose(mine[name], repeated[name], rtol=1e-5, atol=1e-5 * float(repeated[name].abs().max()))
        assert not torch.allclose(mine[name], of_all[name], rtol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_first_tokens_as_large_as_a_dtype_or_the_sums_allow_stay_finite(dtype: torch.dtype) -> None:
    largest = min(torch.finfo(dtype).max, 0.99 * LARGEST)
    x = torch.full((MAX_ROWS, 16), largest).to(dtype)
    for block, full in ((False, True), (True, False)):
        moments = RunningMoments.empty(16, block=block, full=full, device=CPU)
        assert moments.add(x, first_tokens((MAX_ROWS, 1), MAX_ROWS))
        for name, tensor in moments.tensors(block=block).items():
            expected = float(x[0, 0]) ** (2 if "moment" in name else 1)
            assert torch.allclose(tensor, torch.full_like(tensor, expected), rtol=1e-4), name


def test_rows_that_are_not_one_for_each_token_have_no_first_tokens() -> None:
    x = torch.arange(24.0).view(12, 2)
    assert x[first_tokens((3, 4), 12)].tolist() == x[[0, 4, 8]].tolist()
    assert not len(x[first_tokens((3, 5), 12)])


def test_sums_of_many_columns_are_exact_and_leave_the_rows_alone() -> None:
    x = rows(300, 600).double()
    before = x.clone()
    moments = collected([x], full=False)
    assert torch.equal(x, before)
    assert torch.allclose(moments.total, x.sum(0), rtol=1e-12, atol=1e-9)
    assert torch.allclose(moments.squares, (x * x).sum(0), rtol=1e-12)


def test_blocks_alone_are_those_of_the_full_moment() -> None:
    x = rows(500).double()
    alone = collected([x], full=False).tensors(block=True)
    whole = collected([x]).tensors(block=True)
    assert "full_moment" not in alone
    assert torch.allclose(alone["block_moment"], whole["block_moment"], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("spread", [1.0, 1e-20, 1e6])
def test_quantiles_are_within_their_bound_of_sorted_elements(spread: float) -> None:
    x = rows(4000, spread=spread) * spread
    found = collected([x], block=False, full=False).quantiles()
    ordered = x.abs().flatten().double().sort().values
    for p in QUANTILES:
        exact = float(ordered[math.ceil(p * ordered.numel()) - 1])
        assert found[p] == pytest.approx(exact, rel=QUANTILE_ERROR)
        assert found[p] <= float(x.abs().max())


def test_quantiles_of_zeros_and_of_nothing_are_zero() -> None:
    assert set(collected([torch.zeros(10, 16)]).quantiles().values()) == {0.0}
    assert set(RunningMoments.empty(16, block=True, full=True, device=CPU).quantiles().values()) == {0.0}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, LARGEST, -1e30])
def test_a_value_that_is_not_finite_or_has_a_square_that_is_not_adds_nothing(bad: float) -> None:
    moments = collected([rows(20)])
    x = rows(20)
    x[7, 3] = bad
    assert not moments.add(x)
    assert moments.tokens == 20
    assert int(moments.histogram.sum()) == 20 * 48


def test_moments_of_the_largest_values_are_finite() -> None:
    moments = collected([torch.full((MAX_ROWS, 16), LARGEST * 0.99)])
    assert all(bool(torch.isfinite(tensor).all()) for tensor in moments.tensors(block=True).values())


def test_merging_is_adding_the_rows() -> None:
    parts = [rows(70, seed=seed).double() for seed in range(3)]
    merged = collected(parts[:1])
    for part in parts[1:]:
        merged.merge(collected([part]))
    whole = collected(parts)
    assert merged.tokens == whole.tokens == 210
    assert torch.equal(merged.histogram, whole.histogram)
    for name, tensor in whole.tensors(block=True).items():
        assert torch.allclose(merged.tensors(block=True).get(name, tensor), tensor, rtol=1e-6, atol=1e-9)


def test_a_stand_in_is_as_large_as_the_largest() -> None:
    small, large = collected([rows(50)]), collected([rows(80, seed=1) * 3])
    whole, quantiles = stand_in([small, large])
    assert torch.equal(whole.amax, torch.maximum(small.amax, large.amax))
    assert quantiles == {p: max(small.quantiles()[p], large.quantiles()[p]) for p in QUANTILES}
    assert whole.tokens == 130
    assert small.tokens == 50  # the others stay as they are


def test_the_stated_size_is_that_of_the_tensors() -> None:
    for block, full in ((False, False), (True, False), (True, True)):
        moments = RunningMoments.empty(64, block=block, full=full, device=CPU)
        held = sum(tensor.nbytes for tensor in (moments.amax, *moments.sums()))
        assert RunningMoments.nbytes(64, block=block, full=full) == held
    assert moments.histogram.numel() == BINS
