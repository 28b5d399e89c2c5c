"""Two-sided GPTQ: what an error costs where some outputs matter more, and together."""

import pytest
import torch

from ptqpipe.algorithms import LoadedWeight, Task, gptq, joined
from ptqpipe.algorithms.metric import expected_error, output_error
from ptqpipe.formats import get_format
from ptqpipe.inputs import OUT_ROWS, Moments
from ptqpipe.options import CodeOptions
from ptqpipe.qtensor import QTensor


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
        CodeOptions(algorithm="gptq", weighting="diagonal"),
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
