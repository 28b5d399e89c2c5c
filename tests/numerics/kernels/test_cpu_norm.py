"""The compiled norm rounds where a module in bfloat16 does: checked bit for bit against float32 operations of torch."""

import pytest
import torch

from ptqpipe.numerics.kernels import cpu, cpu_layer

pytestmark = pytest.mark.skipif(not cpu_layer.norms_available(), reason="the CPU kernels are not built")


def in_torch(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Float32 inside, as transformers' modules have it."""
    y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


@pytest.mark.parametrize("isa", cpu.isas())
@pytest.mark.parametrize("n", [1, 7, 64, 100, 2048, 2050])
def test_it_is_torchs_norm(n: int, isa: str) -> None:
    g = torch.Generator().manual_seed(n)
    weight = torch.randn(n, generator=g).bfloat16()
    x = (torch.randn(2, 37, n, generator=g) * torch.exp2(torch.randint(-20, 20, (2, 37, 1), generator=g))).bfloat16()
    x[0, 3] = 0
    cpu.force_isa(isa)
    try:
        y = cpu_layer.rms_norm(x, weight, 1e-5)
    finally:
        cpu.force_isa(None)
    wanted = in_torch(x, weight, 1e-5)
    # The order of a float32 sum differs, which moves a number across a rounding once in thousands.
    ulps = (y.view(torch.int16).int() - wanted.view(torch.int16).int()).abs()
    assert int(ulps.max()) <= 2
    assert float((ulps > 0).float().mean()) < 0.005


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(bad: float) -> None:
    x, weight = torch.ones(3, 40).bfloat16(), torch.ones(40).bfloat16()
    x[1, 5] = bad
    y = cpu_layer.rms_norm(x, weight, 1e-5)
    assert torch.equal(y.isnan(), in_torch(x, weight, 1e-5).isnan())
    assert bool(y[1, 5].isnan())
    assert bool(y[[0, 2]].isfinite().all())


def test_rows_that_are_not_dense_and_none_at_all() -> None:
    weight = torch.rand(16).bfloat16()
    x = torch.randn(8, 32).bfloat16()
    assert torch.equal(cpu_layer.rms_norm(x[:, ::2], weight, 1e-5), in_torch(x[:, ::2], weight, 1e-5))
    assert cpu_layer.rms_norm(torch.empty(0, 16, dtype=torch.bfloat16), weight, 1e-5).shape == (0, 16)


def test_threads_do_not_change_a_bit() -> None:
    x, weight = torch.randn(700, 512).bfloat16(), torch.rand(512).bfloat16()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = cpu_layer.rms_norm(x, weight, 1e-6)
        torch.set_num_threads(3)
        assert torch.equal(cpu_layer.rms_norm(x, weight, 1e-6), alone)
    finally:
        torch.set_num_threads(threads)
