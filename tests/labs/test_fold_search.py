"""The searches of labs/fold_gain count what the quantizer of inputs leaves, and find what was hidden."""

import pytest
import torch

from labs.fold_gain import fold_search as fold
from ptqpipe.numerics.schemes import Activation, get_scheme
from ptqpipe.runtime.input_quantizers import InputQuantizer


def heavy(tokens: int, channels: int, seed: int = 0) -> torch.Tensor:
    """Inputs with rare large values, as those of down_proj have."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, channels, generator=generator)
    return x * x.abs() * torch.rand(channels, generator=generator).mul(2).exp()


@pytest.mark.parametrize(("scheme", "tolerance"), [("mxfp4", 1e-5), ("nvfp4_w4a4", 0.1)])
def test_the_error_of_an_order_is_what_the_quantizer_of_inputs_leaves(scheme: str, tolerance: float) -> None:
    x, weights = heavy(256, 128), torch.rand(128, generator=torch.Generator().manual_seed(1))
    order = torch.randperm(128, generator=torch.Generator().manual_seed(2))
    quantizer = InputQuantizer.fitted(get_scheme(scheme).activation, x)
    left = (quantizer(x[:, order]) - x[:, order]).square().mean(dim=0) @ weights[order]
    found = fold.Errors.of(x, weights, get_scheme(scheme)).total(order)
    assert found == pytest.approx(float(left), rel=tolerance)


@pytest.mark.parametrize("scheme", ["mxfp4", "nvfp4_w4a4"])
def test_what_a_swap_changes_is_the_difference_of_the_whole(scheme: str) -> None:
    errors = fold.Errors.of(heavy(64, 64), torch.linspace(0.5, 2, 64), get_scheme(scheme))
    start, b = torch.arange(64), errors.block
    change, before = errors.swaps(start[:b], start[b : 2 * b])
    both = start[: 2 * b]
    assert before == pytest.approx(errors.total(both), rel=1e-5)
    for i, j in ((0, 0), (3, b - 1), (b - 1, 5)):
        swapped = both.clone()
        swapped[i], swapped[b + j] = both[b + j], both[i]
        assert float(change[i, j]) == pytest.approx(errors.total(swapped) - errors.total(both), abs=1e-4 * before)


def test_channels_that_are_large_at_other_tokens_than_their_block_go_to_their_like() -> None:
    """Two kinds of tokens, each with a half of the channels large; two channels of each half begin in the other's."""
    x = torch.randn(256, 64, generator=torch.Generator().manual_seed(0))
    first = torch.arange(64) < 32
    first[[7, 9]], first[[50, 60]] = False, True
    x[:128, first] *= 6
    x[128:, ~first] *= 6
    order = fold.search([fold.Errors.of(x, torch.ones(64), get_scheme("mxfp4"))])
    assert sorted(order.tolist()) == list(range(64))
    assert {50, 60} == set(order[:32].tolist()) - set(range(32))


@pytest.mark.parametrize(("activation", "scale"), [(Activation.MXFP4, None), (Activation.NVFP4_STATIC_GLOBAL, 0.01)])
def test_the_noise_of_factors_is_the_quantizers_error_in_the_scale_of_the_inputs(
    activation: Activation, scale: float | None
) -> None:
    x, factors = heavy(32, 64), torch.linspace(0.5, 3, 64).requires_grad_()
    quantizer = InputQuantizer(activation, scale)
    y = x / factors.detach()
    found = fold.noise(x / factors, factors, quantizer)
    torch.testing.assert_close(found, factors * (quantizer(y) - y), rtol=1e-4, atol=1e-5)
    found.square().sum().backward()
    assert factors.grad is not None
    assert bool((factors.grad != 0).any())
