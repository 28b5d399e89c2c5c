"""The solvers on problems whose answer is known, or checked by another route."""

from dataclasses import replace

import torch

from ptqpipe.calibration.inputs import InputStatistics
from ptqpipe.numerics.formats import get_format
from ptqpipe.numerics.qtensor import encode
from ptqpipe.numerics.search import get_search
from ptqpipe.quantization.transforms import aqas, awq, smooth_swiglu, smoothquant
from ptqpipe.quantization.transforms._search import draw, moment_of
from ptqpipe.quantization.transforms.problem import Consumer, Problem, SolveOptions


def mxfp4(w: torch.Tensor) -> torch.Tensor:
    """A quantizer."""
    fmt = get_format("mxfp4")
    return encode(w, get_search("exact").search(w, fmt), fmt=fmt).dequantize()


def inputs_of(x: torch.Tensor, *, full: bool = True) -> InputStatistics:
    """Statistics of the inputs x [T, K]."""
    moment = x.T @ x / x.shape[0]
    return InputStatistics(
        moment.diagonal().clone(),
        full_moment=moment if full else None,
        tokens=x.shape[0],
        amax=x.abs().amax(0),
        mean=x.mean(0),
    )


def problem_of(w: torch.Tensor, x: torch.Tensor) -> Problem:
    """One consumer of its own channels."""
    k = w.shape[1]
    inputs = inputs_of(x)
    return Problem("e", k, torch.arange(k), inputs.amax, w.abs().amax(0), (Consumer(w, inputs),))


def outlying(k: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [96, k], and inputs [256, k] of which four channels are 40 times the others."""
    generator = torch.Generator().manual_seed(0)
    w, x = torch.randn(96, k, generator=generator), torch.randn(256, k, generator=generator)
    x[:, 3::16] *= 40
    return w, x


def test_smoothquant_gives_the_factors_of_its_formula_up_to_one_constant() -> None:
    w, x = outlying()
    alpha = 0.7
    found = smoothquant.solve(problem_of(w, x), SolveOptions(alpha=alpha)).factors
    formula = x.abs().amax(0).double() ** alpha / w.abs().amax(0).double() ** (1 - alpha)
    ratio = found / formula
    assert torch.allclose(ratio, ratio[0].expand_as(ratio), rtol=1e-6)
    assert abs(float(torch.log2(found.amax() * found.amin()))) < 1e-6  # centred around 1


def test_a_channel_without_input_or_weight_keeps_its_scale() -> None:
    w, x = outlying()
    w[:, 5], x[:, 9] = 0, 0
    found = smoothquant.solve(problem_of(w, x), SolveOptions()).factors
    assert found[5] == 1
    assert found[9] == 1
    assert bool(torch.isfinite(found).all())


def test_heads_that_share_a_channel_give_it_the_largest_of_their_inputs() -> None:
    channel_of = torch.tensor([0, 1, 0, 1])
    problem = Problem("e", 2, channel_of, torch.tensor([1.0, 2.0, 8.0, 1.0]), torch.ones(4))
    found = smoothquant.solve(problem, SolveOptions(alpha=1.0)).factors
    assert torch.allclose(found, torch.tensor([2.0, 0.5], dtype=torch.float64))


def test_smooth_swiglu_evens_out_inputs_to_within_an_octave() -> None:
    w, x = outlying()
    problem = problem_of(w, x)
    found = smooth_swiglu.solve(problem, SolveOptions(alpha=1.0)).factors
    smoothed = problem.input_amax / found
    assert float(smoothed.amax() / smoothed.amin()) <= 2.0
    assert torch.equal(torch.log2(found), torch.log2(found).round())


def test_the_error_by_moments_is_the_mean_error_of_the_outputs() -> None:
    _, x = outlying()
    difference = torch.randn(10, 64, generator=torch.Generator().manual_seed(3))
    direct = float((x @ difference.T).double().square().sum() / x.shape[0])
    assert abs(moment_of(difference, inputs_of(x)) / direct - 1) < 1e-4


def test_without_the_full_moment_blocks_of_sixteen_columns_count_and_then_the_diagonal() -> None:
    _, x = outlying()
    difference = torch.zeros(4, 64)
    difference[:, 16:32] = torch.randn(4, 16, generator=torch.Generator().manual_seed(3))  # inside one block
    inputs = inputs_of(x)
    assert inputs.full_moment is not None
    blocks = torch.stack([inputs.full_moment[i : i + 16, i : i + 16] for i in range(0, 64, 16)])
    only_blocks = replace(inputs, block_moment=blocks, full_moment=None)
    assert abs(moment_of(difference, only_blocks) / moment_of(difference, inputs) - 1) < 1e-5
    one_column = torch.zeros(4, 64)
    one_column[:, 7] = 2.0
    bare = replace(inputs, full_moment=None)
    assert abs(moment_of(one_column, bare) / moment_of(one_column, inputs) - 1) < 1e-5


def test_awq_leaves_less_output_error_than_no_factors_on_the_inputs_themselves() -> None:
    w, x = outlying()
    found = awq.solve(problem_of(w, x), SolveOptions(quantize=mxfp4))

    def error(s: torch.Tensor) -> float:
        return float((x @ (mxfp4(w * s) / s - w).T).square().mean())

    assert error(found.factors.float()) < 0.8 * error(torch.ones(64))
    assert found.error is not None
    assert found.plain_error is not None
    assert found.error < 0.8 * found.plain_error


def test_a_quantizer_without_error_wants_no_factors() -> None:
    w, x = outlying()
    for transform in (awq, aqas):
        found = transform.solve(problem_of(w, x), SolveOptions(quantize=torch.clone, quantize_inputs=torch.clone))
        assert found.plain_error == 0.0
        assert torch.equal(found.factors, torch.ones(64, dtype=torch.float64))


def test_aqas_weighs_both_quantizers_on_inputs_that_it_has_not_seen() -> None:
    w, x = outlying()
    found = aqas.solve(problem_of(w, x), SolveOptions(quantize=mxfp4, quantize_inputs=mxfp4))

    def error(s: torch.Tensor) -> float:
        return float((mxfp4(x / s) @ mxfp4(w * s).T - x @ w.T).square().mean())

    assert error(found.factors.float()) < 0.9 * error(torch.ones(64))


def test_with_activations_in_sixteen_bits_aqas_is_awq() -> None:
    w, x = outlying()
    one, other = (t.solve(problem_of(w, x), SolveOptions(quantize=mxfp4)) for t in (awq, aqas))
    assert torch.equal(one.factors, other.factors)


def test_powers_of_two_are_searched_as_powers_of_two() -> None:
    w, x = outlying()
    found = awq.solve(problem_of(w, x), SolveOptions(quantize=mxfp4, powers_of_two=True)).factors
    assert torch.equal(torch.log2(found), torch.log2(found).round())
    assert int((found != 1).sum()) > 0


def test_drawn_inputs_have_the_moments_that_were_measured() -> None:
    _, x = outlying()
    x[:, 1] = x[:, 0] + 0.1 * x[:, 1]  # correlated channels
    drawn = draw(inputs_of(x), 20000)
    moment, wanted = drawn.T @ drawn / 20000, x.T @ x / x.shape[0]
    assert torch.allclose(moment.diagonal(), wanted.diagonal(), rtol=1e-3)
    correlation = moment[0, 1] / (moment[0, 0] * moment[1, 1]).sqrt()
    assert abs(float(correlation - wanted[0, 1] / (wanted[0, 0] * wanted[1, 1]).sqrt())) < 0.05
    assert torch.equal(drawn, draw(inputs_of(x), 20000))


def test_drawn_inputs_of_heavy_tails_reach_far_and_of_bounded_ones_do_not() -> None:
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(4096, 16, generator=generator)
    x = torch.cat([z.sign() * z.abs() ** 2.5, z.sign()], dim=1)  # 16 heavy channels, 16 of magnitude 1
    drawn = draw(inputs_of(x), 4096)
    peaks = drawn.abs().amax(0) / drawn.square().mean(0).sqrt()
    assert float(peaks[:16].mean()) > 1.5 * float(peaks[16:].mean())
