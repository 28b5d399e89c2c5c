"""Claims about compiled sums of outer products of bfloat16 rows: exact products, float32 over a chunk, any shape."""

import itertools

import pytest
import torch

from ptqpipe.calibration.moments import mirror
from ptqpipe.numerics.kernels import cpu_gram, cpu_library
from ptqpipe.numerics.kernels.cpu_attention import exports

pytestmark = pytest.mark.skipif(
    not (cpu_library.multiplies_bf16() and exports("ptq_add_gram")), reason="no product of bfloat16 numbers here"
)


def rows(count: int, columns: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, columns, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("count", [1, 2, 7, 1024, 1025, 2500])
@pytest.mark.parametrize("columns", [(1, 1), (16, 16), (5, 40), (33, 7), (200, 250), (192, 400)])
def test_it_is_the_product_in_float64(count: int, columns: tuple[int, int]) -> None:
    x, y = rows(count, columns[0]), rows(count, columns[1], seed=1)
    sums = torch.ones(columns, dtype=torch.float64)
    assert cpu_gram.add_gram(sums, x, y)
    wanted = 1 + x.double().t() @ y.double()
    # A float32 sum of so many products loses at most a part of the sum of their magnitudes.
    bound = 2.0**-22 * count**0.5 * (x.abs().double().t() @ y.abs().double())
    assert bool(((sums - wanted).abs() <= bound).all())


@pytest.mark.parametrize("columns", [1, 8, 17, 192, 193, 450])
def test_of_one_matrix_the_upper_half_is_the_product_and_a_mirror_makes_the_rest(columns: int) -> None:
    x = rows(1500, columns)
    sums, product = torch.zeros(columns, columns, dtype=torch.float64), torch.zeros(columns, columns).double()
    assert cpu_gram.add_gram(sums, x)
    assert cpu_gram.add_gram(product, x, x)
    mirror(sums)
    assert torch.equal(sums, product)
    assert torch.equal(sums, sums.t())


def test_rows_that_lie_apart_are_those_that_are_dense() -> None:
    wide = rows(300, 200)
    x, y = wide[:, 3:100], wide[:, 100:]
    apart, dense = torch.zeros(97, 100).double(), torch.zeros(97, 100).double()
    assert cpu_gram.add_gram(apart, x, y)
    assert cpu_gram.add_gram(dense, x.contiguous(), y.contiguous())
    assert torch.equal(apart, dense)


def test_threads_change_no_bit() -> None:
    x, y = rows(1100, 500), rows(1100, 300, seed=1)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            one, two = torch.zeros(500, 500).double(), torch.zeros(500, 300).double()
            assert cpu_gram.add_gram(one, x)
            assert cpu_gram.add_gram(two, x, y)
            results.append((one.triu(), two))
    finally:
        torch.set_num_threads(before)
    for first, second in itertools.pairwise(results):
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[1], second[1])


def test_what_is_not_finite_stays_in_its_columns() -> None:
    x = rows(64, 40)
    x[5, 7] = float("nan")
    sums = torch.zeros(40, 40).double()
    assert cpu_gram.add_gram(sums, x, x)
    bad = torch.zeros(40, 40, dtype=torch.bool)
    bad[7], bad[:, 7] = True, True
    assert torch.equal(sums.isnan(), bad)


def test_other_numbers_and_other_instruction_sets_are_declined() -> None:
    sums, x = torch.zeros(40, 40).double(), rows(64, 40)
    assert not cpu_gram.add_gram(sums, x.float())
    assert not cpu_gram.add_gram(sums, x, x.float())
    assert not cpu_gram.add_gram(sums, x.t().contiguous().t())
    cpu_library.force_isa("avx2")
    try:
        assert not cpu_gram.add_gram(sums, x)
    finally:
        cpu_library.force_isa(None)
    assert not sums.any()
