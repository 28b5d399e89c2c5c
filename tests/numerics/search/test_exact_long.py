"""Claims about the exact search of long blocks (FP8 rows, tiles, tensors): brute force over every bfloat16 scale."""

import math

import pytest
import torch

from ptqpipe import quantize
from ptqpipe.errors import NumericsError
from ptqpipe.numerics.formats import CODECS, Format, get_format
from ptqpipe.numerics.kernels.cpu_tensors import column_weights
from ptqpipe.numerics.qtensor import encode, squared_error
from ptqpipe.numerics.search import _long, _long_floor, baselines, brute_force, exact
from ptqpipe.numerics.search._grid import element_grid, ladder
from ptqpipe.numerics.search._long_floor import strips
from ptqpipe.numerics.search.objective import magnitude_blocks, scores
from tests.numerics.search import cases

CHANNEL, TENSOR = get_format("fp8_channel"), get_format("fp8_tensor")
TILE = Format("tile", CODECS["e4m3"], (18, 18), CODECS["bf16"], partial_blocks=True)
HALF = Format("half", CODECS["e4m3"], (1, 0), CODECS["fp16"])
NARROW = Format("narrow", CODECS["e2m1"], (1, 0), CODECS["bf16"])  # hardly any normal range: the bound is loose
GLOBAL = Format("global", CODECS["e4m3"], (1, 0), CODECS["bf16"], has_global=True)
COLUMNS = 260


def long_weights(seed: int) -> dict[str, torch.Tensor]:
    """One row of each kind, float32 ``[1, 260]``."""
    g = cases.generator(seed)
    normal = torch.randn(1, COLUMNS, generator=g)
    uniform = torch.rand(1, COLUMNS, generator=g)
    outlier = normal * 1e-3
    outlier[0, 7] = -40.0
    return {
        "normal": normal * 0.02,
        "2^-40": normal * 2.0**-40,
        "2^20": normal * 2.0**20,
        "wild": normal * torch.exp2(torch.randn(1, COLUMNS, generator=g) * 6),
        "heavy tails": normal / (uniform + 1e-3),
        "one outlier": outlier,
        "sparse": normal * (uniform < 0.02),
        "constant": torch.full((1, COLUMNS), 1.5),
        "between 448 and 480": torch.where(uniform < 0.1, 448 + 32 * uniform, normal.abs()) * 2.0**-9,
        "dust": torch.where(uniform < 0.5, normal, normal * 2.0**-30),
        "zero": torch.zeros(1, COLUMNS),
    }


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weighted", [False, True])
def test_rows_are_brute_force(dtype: torch.dtype, weighted: bool) -> None:
    w = torch.cat(list(long_weights(20).values())).to(dtype)
    h = cases.importances(COLUMNS, 21)["2^-30 .. 2^30"] if weighted else None
    assert torch.equal(exact.search(w, CHANNEL, importance=h), brute_force.search(w, CHANNEL, importance=h))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["uniform", "half of them zero", "one column alone"])
def test_rows_are_brute_force_with_hostile_weights(name: str) -> None:
    kinds = long_weights(22)
    w = torch.cat([kinds[kind] for kind in ("normal", "wild", "one outlier", "dust")]).bfloat16()
    h = cases.importances(COLUMNS, 23)[name]
    assert torch.equal(exact.search(w, CHANNEL, importance=h), brute_force.search(w, CHANNEL, importance=h))


@pytest.mark.slow
@pytest.mark.parametrize("fmt", [TENSOR, TILE, HALF, NARROW, GLOBAL], ids=lambda fmt: fmt.name)
def test_other_long_blocks_are_brute_force(fmt: Format) -> None:
    w = torch.randn((20, 20) if fmt is TILE else (2, COLUMNS), generator=cases.generator(24)) * 0.03
    g = torch.tensor(0.0123) if fmt.has_global else None
    h = cases.importances(w.shape[1], 25)["uniform"]
    for x, weights in ((w.half(), None), (w, h)):  # rows have every pair above
        found = exact.search(x, fmt, global_scale=g, importance=weights)
        assert torch.equal(found, brute_force.search(x, fmt, global_scale=g, importance=weights)), x.dtype


def test_float16_scales_end_at_their_smallest_normal_number() -> None:
    """Rows so small that the best scale would be below 2^-14: half of a scale there is no legal scale."""
    w = torch.randn(2, COLUMNS, generator=cases.generator(26)) * torch.tensor([[2.0**-9], [2.0**-16]])
    found = exact.search(w, HALF)
    assert torch.equal(found, brute_force.search(w, HALF))
    assert (found.float() < 2.0**-12).all()


def test_zero_rows_get_the_smallest_scale() -> None:
    assert exact.search(torch.zeros(2, COLUMNS), CHANNEL).tolist() == [[2.0**-126], [2.0**-126]]


def test_runs_and_strips_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(40, 3000, generator=cases.generator(27)).bfloat16() * 0.02
    h = cases.importances(3000, 28)["uniform"]
    tile = Format("tile", CODECS["e4m3"], (16, 128), CODECS["bf16"], partial_blocks=True)
    for fmt in (CHANNEL, TENSOR, tile):
        monkeypatch.undo()
        whole = exact.search(w, fmt), exact.search(w, fmt, importance=h)
        monkeypatch.setattr(_long, "STRIP", 7000)
        monkeypatch.setattr(_long_floor, "SEGMENT", 5000)
        assert torch.equal(exact.search(w, fmt), whole[0]), fmt.name
        assert torch.equal(exact.search(w, fmt, importance=h), whole[1]), fmt.name


def test_no_row_depends_on_its_neighbours() -> None:
    w = torch.cat(list(long_weights(29).values())).bfloat16()
    whole = exact.search(w, CHANNEL)
    assert torch.equal(torch.cat([exact.search(row.unsqueeze(0), CHANNEL) for row in w]), whole)


def test_the_threshold_between_the_two_ways_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    w = torch.randn(4, 200, generator=cases.generator(30)).bfloat16()
    scanned = exact.search(w, CHANNEL)
    monkeypatch.setattr(exact, "SCAN_MAX", 64)
    assert torch.equal(exact.search(w, CHANNEL), scanned)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_fewer_than_two_scales_a_row_are_scored(dtype: torch.dtype) -> None:
    """So that the search reads the weights three times, not 128."""
    scored: list[int] = []

    class Counting(_long._BestFirst):
        __slots__ = ()

        def _scores(self, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            scored.append(len(rows))
            return super()._scores(rows, index)

    w = torch.randn(64, 2048, generator=cases.generator(31)).to(dtype) * 0.02
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_long, "_BestFirst", Counting)
        exact.search(w, CHANNEL)
        assert 64 <= sum(scored) < 2 * 64
        scored.clear()
        exact.search(w, TENSOR)
    assert 1 <= sum(scored) <= 3


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bins", [5, 8, 10])
def test_no_score_is_below_its_bound(bins: int, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At all significands of float32 rows, in the five octaves below the largest element."""
    monkeypatch.setattr(_long_floor, "FEW_BINS", bins)
    for fmt in (CHANNEL, NARROW, HALF):
        steps = ladder(fmt, global_scale=None, grid=element_grid(fmt.element), device=torch.device("cpu"))
        scales = _long_floor.Scales.make(
            fmt, global_scale=None, grid=element_grid(fmt.element), device=torch.device("cpu")
        )
        count = len(scales.inv)
        for kind, w in long_weights(33).items():
            h = column_weights(torch.rand(COLUMNS, generator=cases.generator(34)), w) if weighted else None
            (strip,) = strips(w, fmt, h=h, largest=1)
            floor = _long_floor.floor_of(strip, w.abs().amax(dim=1), scales=scales)
            spread = None if h is None else h.expand(count, COLUMNS)
            for octave in range(5):
                index = (int(steps.start(floor.amax)) // count - octave) * count + torch.arange(count)
                if int(index[0]) < 0 or int(index[-1]) >= len(steps.codes):
                    continue
                x = magnitude_blocks(w, fmt).expand(count, -1)
                found = scores(x, steps.codes[index], fmt=fmt, h=spread)
                assert bool((floor.floor[0] * (1 - 2.0**-20) <= found).all()), (fmt.name, kind, octave)


def test_searched_rows_beat_abs_max_by_what_was_measured() -> None:
    """6.42e-4 against 7.0e-4 for normal rows of 2048 (numerics: abs-max is 6 to 41 % worse than a search)."""
    w = torch.randn(64, 2048, generator=cases.generator(32)).bfloat16() * 0.02
    rules = (exact.search, baselines.absmax)
    searched, plain = (squared_error(encode(w, rule(w, CHANNEL), fmt=CHANNEL), w) for rule in rules)
    assert 1.06 < plain / searched < 1.41


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("fmt", [CHANNEL, TENSOR, TILE], ids=lambda fmt: fmt.name)
def test_nan_and_inf_raise(bad: float, fmt: Format) -> None:
    w = torch.ones(20, 300)
    w[3, 4] = bad
    with pytest.raises(NumericsError, match=r"1 NaN|1 inf"):
        exact.search(w, fmt)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_least_score_is_within_1e_4_of_the_least_error_in_float64(dtype: torch.dtype) -> None:
    """Scores are sums in float32: beside one outlier they cannot tell scales apart that float64 can."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(16, 128, generator=generator)
    w[:, 0] = 10 ** (4 * torch.rand(16, generator=generator))
    w = w.to(dtype)
    values = w.double()
    error = (quantize(w, "fp8_dynamic").dequantize().double() - values).square().sum(1)
    nearest = (values.abs().amax(1) / 448).bfloat16().view(torch.int16)
    least = torch.full_like(error, math.inf)
    for step in range(-7 * 128, 129):  # every bfloat16 scale of eight octaves
        scale = (nearest + step).view(torch.bfloat16).double()[:, None]
        codes = (values / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn)
        least = torch.minimum(least, (codes.double() * scale - values).square().sum(1))
    assert bool((error <= least * (1 + 1e-4)).all())
    assert bool((error >= least * (1 - 1e-12)).all())
