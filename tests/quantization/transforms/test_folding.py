"""Folding: matrices against dense algebra in float64, runs against the whole, what is exact and what is not."""

import pytest
import torch

from ptqpipe.models.folding import BLOCKS
from ptqpipe.models.folding.structure import Edge, Matrix, Norm
from ptqpipe.models.folding.tensors import (
    RUN,
    Op,
    Reset,
    Rotate,
    Scale,
    apply,
    hadamard,
    is_exact,
    move_factors,
    power_of_two,
)


def dense(size: int, start: int, length: int, block: int) -> torch.Tensor:
    """The orthogonal [size, size] matrix of a rotation, entry by entry from the definition (-1)^popcount(i & j)."""
    m = torch.eye(size, dtype=torch.float64)
    for begin in range(start, start + length, block):
        for i in range(block):
            for j in range(block):
                m[begin + i, begin + j] = (-1.0) ** (i & j).bit_count() / block**0.5
    return m


@pytest.mark.parametrize("block", BLOCKS)
def test_the_hadamard_matrix_is_orthonormal_and_its_own_inverse(block: int) -> None:
    h = hadamard(block)
    assert torch.allclose(h @ h, torch.eye(block, dtype=torch.float64), atol=1e-14)
    assert torch.equal(h, h.T)
    assert torch.equal(h, dense(block, 0, block, block))


@pytest.mark.parametrize(("axis", "start", "length"), [(0, 0, 256), (0, 32, 64), (1, 0, 96), (1, 64, 32)])
def test_a_rotation_is_the_product_with_its_dense_matrix(axis: int, start: int, length: int) -> None:
    w = torch.randn(256, 96, dtype=torch.float64)
    m = dense(w.shape[axis], start, length, 32)
    expected = m @ w if axis == 0 else w @ m
    assert torch.allclose(apply(w, [Rotate(axis, 32, start, length)]), expected, atol=1e-13)


@pytest.mark.parametrize(("axis", "start", "length"), [(0, 32, 128), (1, 64, 32)])
def test_a_rotation_by_given_matrices_is_the_product_with_each_block(axis: int, start: int, length: int) -> None:
    """Rows in runs as well: each meets the matrices of its own blocks."""
    w = torch.randn(2 * RUN, 96, dtype=torch.float64)
    matrices = torch.linalg.qr(torch.randn(length // 32, 32, 32, dtype=torch.float64))[0]
    whole = torch.eye(w.shape[axis], dtype=torch.float64)
    whole[start : start + length, start : start + length] = torch.block_diag(*matrices)
    op = Rotate(axis, 32, start, length, matrices=matrices)
    found = torch.cat([apply(w[first : first + RUN], [op], first=first) for first in (0, RUN)])
    assert torch.allclose(found, whole.T @ w if axis == 0 else w @ whole, atol=1e-13)


def test_runs_of_rows_give_the_bits_of_the_whole() -> None:
    w = torch.randn(3 * RUN + 5, 64).bfloat16()
    ops: list[Op] = [
        Scale(1, torch.rand(64, dtype=torch.float64) + 0.5),
        Scale(0, torch.rand(200, dtype=torch.float64) + 0.5, start=100),
        Rotate(0, 16, 64, 256),
        Rotate(1, 64, 0, 64),
    ]
    whole = apply(w, ops)
    runs = [apply(w[first : first + RUN], ops, first=first) for first in range(0, w.shape[0], RUN)]
    assert torch.equal(torch.cat(runs), whole)
    assert w.dtype == torch.bfloat16


def test_ops_of_another_expert_leave_a_plane_alone() -> None:
    w = torch.randn(16, 16)
    ops: list[Op] = [Reset(3.0, expert=1), Scale(0, torch.full((16,), 2.0), expert=0)]
    assert torch.equal(apply(w, ops, expert=0), 2 * w.double())
    assert torch.equal(apply(w, ops, expert=1), torch.full((16, 16), 3.0, dtype=torch.float64))


def test_a_norm_with_an_offset_scales_offset_and_weight() -> None:
    g, s = torch.randn(8), torch.rand(8, dtype=torch.float64) + 0.5
    found = apply(g, [Scale(0, s, offset=1.0)])
    assert torch.allclose(1 + found, (1 + g.double()) * s, atol=1e-15)


@pytest.mark.parametrize("repeat", [1, 3])
def test_factors_on_an_edge_cancel_in_the_product(repeat: int) -> None:
    """o (x) repeated heads of v: the function of both weights together stays."""
    head, kv = 4, 2
    channels = head * kv
    v, o = torch.randn(channels, 5, dtype=torch.float64), torch.randn(7, channels * repeat, dtype=torch.float64)
    bias = torch.randn(channels, dtype=torch.float64)
    producer, consumer = Matrix("v", (channels, 5), bias="v.bias"), Matrix("o", (7, channels * repeat))
    edge = Edge("e", "value", producer, (consumer,), channels, repeat=repeat, head_dim=head)
    factors = torch.rand(channels, dtype=torch.float64) + 0.5
    ops: dict[str, list[Op]] = {}
    for name, op in move_factors(edge, factors):
        ops.setdefault(name, []).append(op)

    def output(v: torch.Tensor, bias: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        x = torch.arange(5, dtype=torch.float64) - 2
        heads = (v @ x + bias).reshape(kv, head)
        return o @ heads.repeat_interleave(repeat, dim=0).reshape(-1)

    moved = output(apply(v, ops["v"]), apply(bias, ops["v.bias"]), apply(o, ops["o"]))
    assert torch.allclose(moved, output(v, bias, o), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(apply(v, ops["v"]), v)


def test_the_bias_of_a_norm_is_divided_with_its_weight() -> None:
    edge = Edge("e", "norm", Norm("n", bias="n.bias"), (Matrix("w", (3, 4)),), 4)
    factors = torch.tensor([1.0, 2.0, 4.0, 0.5], dtype=torch.float64)
    found = dict(move_factors(edge, factors))
    assert torch.equal(apply(torch.ones(4), [found["n.bias"]]), 1 / factors)
    assert torch.equal(apply(torch.ones(3, 4), [found["w"]]), factors.expand(3, 4))


def test_only_factors_that_are_powers_of_two_are_exact() -> None:
    powers, others = torch.tensor([0.25, 1.0, 8.0]), torch.tensor([0.25, 1.0, 3.0])
    assert is_exact([Scale(0, powers), Scale(1, powers)])
    assert not is_exact([Scale(0, others)])
    assert not is_exact([Scale(0, powers, offset=1.0)])
    assert not is_exact([Rotate(0, 16, 0, 16)])


@pytest.mark.parametrize(("given", "expected"), [(1.0, 1.0), (1.4, 1.0), (1.42, 2.0), (0.36, 0.5), (0.35, 0.25)])
def test_factors_round_to_the_power_of_two_that_is_nearest_in_the_logarithm(given: float, expected: float) -> None:
    assert float(power_of_two(torch.tensor(given))) == expected
