"""Two-sided GPTQ: what an error costs where some outputs matter more, and together."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from ptqpipe.calibration.inputs import OUT_ROWS, Moments
from ptqpipe.numerics.formats import get_format
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.quantization import LoadedWeight, Task, gptq, joined, kronecker
from ptqpipe.quantization.metric import expected_error, output_error
from ptqpipe.quantization.unit import quantize_rows
from ptqpipe.recipe.options import CodeOptions


def moment_of(size: int, *, seed: int) -> torch.Tensor:
    """[size, size] of few strong directions, as moments of activations and gradients are."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(size, 2 * size, generator=generator) * torch.logspace(0, -2, 2 * size)
    return directions @ directions.t()


def quantized(w: torch.Tensor, fmt: str, moments: Moments) -> QTensor:
    runs: dict[tuple[int, int], QTensor] = {}
    task = Task(
        [LoadedWeight(w)],
        get_format(fmt),
        ["w"],
        lambda member, row, q: runs.__setitem__((member, row), q),
        CodeOptions(algorithm="gptq", objective="diagonal"),
        [moments],
    )
    gptq.quantize(task)
    return joined(runs, 0)


@pytest.mark.parametrize(("fmt", "rows"), [("nvfp4", 96), ("mxfp4", 96), ("fp8_channel", 96), ("nvfp4", OUT_ROWS + 24)])
def test_errors_cost_less_where_outputs_are_known(fmt: str, rows: int) -> None:
    w = torch.randn(rows, 64, generator=torch.Generator().manual_seed(0)) * 0.05
    h = moment_of(64, seed=1)
    outputs = [moment_of(len(run), seed=2 + i) for i, run in enumerate(torch.split(w, OUT_ROWS))]
    plain = Moments(h.diagonal().clone(), full_moment=h)
    known = Moments(h.diagonal().clone(), full_moment=h, outputs=outputs)
    errors = [w - quantized(w, fmt, moments).dequantize() for moments in (plain, known)]
    one, two = (expected_error(error, plain, outputs) for error in errors)
    assert two < 0.8 * one
    assert output_error(errors[1], h) > output_error(errors[0], h)  # which is what it gives for that


def test_the_cost_of_an_error_is_that_of_the_product_of_both_moments() -> None:
    g, h = moment_of(24, seed=3), moment_of(32, seed=4)
    error = torch.randn(24, 32, generator=torch.Generator().manual_seed(5))
    wanted = float(torch.kron(g.double(), h.double()) @ error.double().flatten() @ error.double().flatten())
    assert expected_error(error, Moments(h.diagonal(), full_moment=h), [g]) == pytest.approx(wanted, rel=1e-4)


def test_outputs_that_do_not_matter_get_the_codes_of_one_side() -> None:
    w, h = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)), moment_of(32, seed=1)
    plain = Moments(h.diagonal().clone(), full_moment=h)
    known = Moments(h.diagonal().clone(), full_moment=h, outputs=[torch.zeros(32, 32)])
    assert not quantized(w, "nvfp4", known).codes.equal(torch.zeros(32, 32, dtype=torch.uint8))
    assert float((w - quantized(w, "nvfp4", known).dequantize()).norm() / w.norm()) < 0.2
    assert plain.outputs is None


def test_runs_of_rows_that_go_side_by_side_get_the_codes_of_each_by_itself() -> None:
    """Of unequal lengths, no multiple of a group among them, and one whose gradients are zero."""
    sizes = (40, 7, 96, 24)
    parts = torch.split(torch.randn(sum(sizes), 32, generator=torch.Generator().manual_seed(0)), sizes)
    outputs = [moment_of(size, seed=size) * (size != 24) for size in sizes]
    handed: list[int] = []

    def quantize(rows: torch.Tensor) -> QTensor:
        handed.append(len(rows))
        return quantize_rows(rows, get_format("mxfp4"), search="absmax")

    together = kronecker.codes(torch.cat(parts), outputs, quantize)
    assert len(handed) == 96 // kronecker.GROUP
    apart = [kronecker.codes(w, [g], quantize) for w, g in zip(parts, outputs, strict=True)]
    assert together.data.equal(torch.cat([q.data for q in apart]))
    assert together.scales.equal(torch.cat([q.scales for q in apart]))
    assert apart[3].data.equal(quantize(parts[3]).data)
    assert not apart[0].data.equal(quantize(parts[0]).data)


@pytest.mark.parametrize("fmt", ["mxfp4", "fp8_channel"])
def test_weights_that_share_an_input_get_the_codes_of_each_by_itself(fmt: str) -> None:
    h, options = moment_of(64, seed=1), CodeOptions(algorithm="gptq", objective="diagonal")
    moments = Moments(h.diagonal().clone(), full_moment=h)
    metric = gptq.metric_of(moments, get_format(fmt), options, device=h.device, name="w")
    sizes = (48, OUT_ROWS + 24, 16)
    weights = [torch.randn(n, 64, generator=torch.Generator().manual_seed(n)) for n in sizes]
    known = [
        replace(moments, outputs=[moment_of(len(run), seed=n + i) for i, run in enumerate(torch.split(w, OUT_ROWS))])
        for n, w in zip(sizes, weights, strict=True)
    ]

    def chosen(numbers: Sequence[int]) -> list[QTensor]:
        runs: dict[tuple[int, int], QTensor] = {}
        sink = lambda member, row, q: runs.__setitem__((member, row), q)  # noqa: E731
        some = [LoadedWeight(weights[i]) for i in numbers]
        task = Task(some, get_format(fmt), ["w"] * len(some), sink, options, [known[i] for i in numbers])
        gptq.choose(task, [metric] * len(some))
        return [joined(runs, i) for i in range(len(some))]

    for one, (alone,) in zip(chosen(range(3)), map(chosen, ([0], [1], [2])), strict=True):
        assert one.shape == alone.shape
        assert one.data.equal(alone.data)
        assert one.scales.equal(alone.scales)
