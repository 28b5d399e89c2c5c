"""Claims about low-rank compensation: it is the optimum that Eckart and Young name, in the metric of the moment."""

import pytest
import torch

from ptqpipe.errors import FormatError, NumericsError
from ptqpipe.numerics.formats import get_format
from ptqpipe.numerics.global_scale import absmax_global
from ptqpipe.numerics.qtensor import Factors, QTensor, encode
from ptqpipe.numerics.schemes import LowRank
from ptqpipe.numerics.search import get_search
from ptqpipe.quantization.lorc import Weighting, best_factors, correct, stored_factors
from tests.quantization.inputs import correlated, second_moment

SHAPES = [(48, 96), (96, 48), (64, 64)]
KINDS = ("none", "diagonal", "full")


def error(shape: tuple[int, int], *, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weighting(kind: str, columns: int, *, damping: float = 0.01) -> Weighting:
    h = second_moment(correlated(512, columns, seed=3))
    second, full = (None if kind == "none" else h.diagonal()), (h if kind == "full" else None)
    return Weighting.of(second, full, damping=damping)


def root_of(known: Weighting, columns: int) -> torch.Tensor:
    """H^1/2 by another route than the code's: the symmetric root, from the eigenvalues of H."""
    h = torch.eye(columns, dtype=torch.float64) if known.moment is None else known.moment
    values, vectors = torch.linalg.eigh(torch.diag(h) if h.dim() == 1 else h)
    return vectors @ torch.diag(values.clamp(min=0).sqrt()) @ vectors.t()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [1, 5, 48])
def test_what_is_left_is_the_tail_of_the_singular_values(shape: tuple[int, int], kind: str, rank: int) -> None:
    e, known = error(shape), weighting(kind, shape[1])
    left, right = best_factors(e, rank, weighting=known)
    assert left.shape == (shape[0], rank)
    assert right.shape == (rank, shape[1])
    tail = torch.linalg.svdvals(e.double() @ root_of(known, shape[1]))[rank:].square().sum()
    total = known.energy(e.double())
    assert known.energy(e.double() - left @ right) == pytest.approx(float(tail), rel=1e-9, abs=1e-10 * total)


@pytest.mark.parametrize("shape", SHAPES)
def test_no_other_factors_of_the_rank_do_better(shape: tuple[int, int]) -> None:
    """Alternating least squares from random starts, which reaches minima of the same objective by descent alone."""
    e, known = error(shape).double(), weighting("full", shape[1])
    left, right = best_factors(e.float(), 4, weighting=known)
    best = known.energy(e - left @ right)
    h = known.moment
    assert h is not None
    for seed in range(3):
        r = error((4, shape[1]), seed=seed + 10).double()
        for _ in range(60):
            thin = torch.linalg.solve(r @ h @ r.t(), r @ h @ e.t()).t()
            r = torch.linalg.solve(thin.t() @ thin, thin.t() @ e)
        assert best <= known.energy(e - thin @ r) * (1 + 1e-12)


def test_weighting_by_the_moment_lowers_the_output_error_and_not_the_weight_error() -> None:
    x = correlated(512, 64)
    e, h = error((80, 64)), second_moment(x)
    plain, weighted = (best_factors(e, 8, weighting=w) for w in (Weighting(), Weighting.of(None, h, damping=0.0)))
    left = [e.double() - thin @ flat for thin, flat in (plain, weighted)]
    outputs = [float((x.double() @ d.t()).square().sum()) for d in left]
    weights = [float(d.square().sum()) for d in left]
    assert outputs[1] < 0.9 * outputs[0]
    assert weights[0] < weights[1]


def test_the_signs_do_not_depend_on_the_eigenvectors_that_were_found() -> None:
    left, right = best_factors(error((40, 96)), 6, weighting=Weighting())
    other = best_factors(-error((40, 96)), 6, weighting=Weighting())
    assert bool((left.gather(0, left.abs().argmax(dim=0, keepdim=True)) > 0).all())
    assert torch.allclose(other[0], left)
    assert torch.allclose(other[1], -right)


@pytest.mark.parametrize(("dtype", "most"), [("bf16", 2.0**-8), ("fp8", 2.0**-3)])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e20])
def test_stored_factors_are_rounded_once(dtype: str, most: float, size: float) -> None:
    """Half a step is 2^-9 of a bfloat16 and 2^-4 of an E4M3, on both sides; tiny entries of E4M3 are subnormal."""
    left, right = best_factors(error((48, 96)), 4, weighting=Weighting())
    right *= size
    factors = stored_factors(left, right, dtype)
    exact = left @ right
    found = factors.product()
    assert found.dtype is torch.float32
    assert float((found - exact).norm() / exact.norm()) < most
    assert (factors.scale is None) == (dtype == "bf16")


def test_the_product_has_the_bits_of_its_parts() -> None:
    factors = stored_factors(*best_factors(error((70, 96)), 5, weighting=Weighting()), "fp8")
    whole = factors.product()
    assert torch.equal(factors.narrow(0, 17, 20).product(), whole[17:37])
    assert torch.equal(factors.narrow(1, 32, 16).product(), whole[:, 32:48])


class Rows:
    def __init__(self, w: torch.Tensor) -> None:
        self.shape = (w.shape[0], w.shape[1])
        self.w = w

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return self.w[start:stop]


def quantized(w: torch.Tensor, name: str) -> QTensor:
    fmt = get_format(name)
    g = absmax_global(float(w.abs().max()), fmt) if fmt.has_global else None
    return encode(w, get_search("exact").search(w, fmt, global_scale=g), fmt=fmt, global_scale=g)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "fp8_channel"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_the_error_falls_with_the_rank(name: str, dtype: str) -> None:
    w, known = error((64, 128), seed=1), weighting("full", 128)
    q = quantized(w, name)
    found = [correct(Rows(w), [(0, q)], LowRank(rank, dtype), weighting=known) for rank in (1, 4, 16, 64)]
    ratios = [c.versus_codes for c in found]
    assert ratios == sorted(ratios, reverse=True)
    assert len(set(ratios)) == 4
    assert ratios[-1] < (1e-4 if dtype == "bf16" else 1e-2)  # the full rank: nothing is left but the rounding
    assert [c.dropped for c in found] == [False] * 4


def test_squared_error_is_that_of_the_decode() -> None:
    w = error((32, 64), seed=2).bfloat16()
    q = quantized(w, "nvfp4")
    done = correct(Rows(w), [(0, q)], LowRank(3), weighting=Weighting())
    row, decoded = done.rows[0]
    assert row == 0
    left = w.double() - decoded.dequantize().double()
    assert done.squared_error == pytest.approx(float(left.square().sum()), rel=1e-12)
    assert torch.equal(decoded.data, q.data)
    assert done.squared_error < float((w.double() - q.dequantize().double()).square().sum())


def test_a_weight_without_error_gets_factors_of_zeros() -> None:
    w = torch.zeros(32, 64)
    done = correct(Rows(w), [(0, quantized(w, "mxfp4"))], LowRank(2), weighting=Weighting())
    assert done.dropped
    assert done.versus_codes == 1.0
    assert torch.equal(done.rows[0][1].dequantize(), w)


def test_an_input_of_zeros_weights_nothing_and_a_damaged_one_is_refused() -> None:
    assert Weighting.of(torch.zeros(16), torch.zeros(16, 16), damping=0.01).kind == "none"
    assert Weighting.of(torch.zeros(16), None, damping=0.01).kind == "none"
    with pytest.raises(NumericsError, match="input of 'a'"):
        Weighting.of(torch.full((16,), float("nan")), None, damping=0.01, name="the input of 'a'")
    negative = -torch.eye(16)
    with pytest.raises(NumericsError):
        Weighting.of(None, negative, damping=0.01)


def test_a_part_of_another_shape_is_refused() -> None:
    q = quantized(error((32, 64)), "nvfp4")
    with pytest.raises(FormatError, match="low-rank part of a 32x64 weight"):
        QTensor(q.fmt, q.shape, q.data, q.scales, q.global_scale, low_rank=Factors(torch.ones(3, 1), torch.ones(1, 64)))
