"""Claims about the target of asymmetric calibration: the least squares solution, and a lower error at the output."""

import pytest
import torch

from ptqpipe.errors import FormatError, NumericsError
from ptqpipe.numerics.formats import FORMATS
from ptqpipe.quantization import gptq, metric, unit
from ptqpipe.quantization.asymmetric import targets
from tests.quantization.inputs import correlated

TOKENS, N, K = 600, 24, 64


def pair(*, noise: float = 0.3, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [TOKENS, K]: an input, and what is left of it after layers that lost something."""
    x = correlated(TOKENS, K, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    mix = torch.eye(K) + noise * torch.randn(K, K, generator=generator) / K**0.5
    return x, x @ mix + noise * x.std() * torch.randn(TOKENS, K, generator=generator)


def moments(x: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [K, K]: E[x' x'^T] and E[x x'^T]."""
    return tuple((a.double().t() @ seen.double() / TOKENS).float() for a in (seen, x))  # type: ignore[return-value]


def weights(seed: int = 2, rows: int = N) -> torch.Tensor:
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(seed)) * 0.05


def target(w: torch.Tensor, moment: torch.Tensor, cross: torch.Tensor, damping: float = 0.01) -> torch.Tensor:
    of_input = metric.make_metric(moment, damping=damping, order=metric.descending(moment))
    return targets([w], moment, cross, metric=of_input, name="q")[0]


@pytest.mark.parametrize("damping", [0.01, 0.3])
@pytest.mark.parametrize("rows", [N, 3 * K])  # fewer than columns, and more
def test_the_target_is_the_least_squares_solution(damping: float, rows: int) -> None:
    x, seen = pair()
    w = weights(rows=rows)
    moment, cross = moments(x, seen)
    found = target(w, moment, cross, damping=damping)
    # d |T - W|^2 are K further rows: an input sqrt(d) e_k whose output should be W sqrt(d) e_k
    d = damping * float(moment.diagonal().double().mean()) * TOKENS
    extra = d**0.5 * torch.eye(K, dtype=torch.float64)
    a = torch.cat([seen.double(), extra])
    b = torch.cat([x.double() @ w.double().t(), extra @ w.double().t()])
    expected = torch.linalg.lstsq(a, b).solution.t()
    assert float((found - expected).abs().max()) < 1e-4 * float(expected.abs().max())


def test_an_input_that_lost_nothing_leaves_the_weight_as_it_is() -> None:
    x, _ = pair()
    moment, cross = moments(x, x)
    assert torch.equal(target(weights(), moment, cross), weights())


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "fp8_channel"])
def test_quantizing_the_target_brings_outputs_nearer_to_the_float_layer(name: str) -> None:
    x, seen = pair()
    w, fmt = weights(), FORMATS[name]
    moment, cross = moments(x, seen)
    found = metric.make_metric(moment, order=metric.descending(moment))
    errors = []
    for matrix in (w, target(w, moment, cross)):
        g = matrix.abs().amax() / fmt.max_product if fmt.has_global else None
        scales = unit.quantize_rows(matrix, fmt, search="exact", global_scale=g).scales
        q = gptq.codes_at(matrix, scales, fmt, metric=found, global_scale=g)
        errors.append(float((x @ w.t() - seen @ q.dequantize().t()).double().square().sum()))
    assert errors[1] < 0.9 * errors[0]


def test_moments_that_cannot_be_used_are_refused() -> None:
    x, seen = pair()
    moment, cross = moments(x, seen)
    broken = cross.clone()
    broken[3, 5] = float("nan")
    with pytest.raises(NumericsError, match="cross moment of q is not finite"):
        target(weights(), moment, broken)
    with pytest.raises(FormatError, match=r"\[64, 64\] and \[32, 32\]"):
        target(weights(), moment, cross[:32, :32])
