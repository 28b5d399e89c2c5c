"""The compiled attention over pages against the same sums in float64, on every instruction set of this machine."""

import math
from typing import Any

import pytest
import torch

from ptqpipe.numerics.kernels import cpu_library
from ptqpipe.numerics.kernels.cpu_attention import PagedQueries, paged_attention

ISAS = cpu_library.known_isas()
pytestmark = pytest.mark.skipif(not ISAS, reason="the extension was not built")
BLOCK = 4


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Any:
    cpu_library.force_isa(request.param)
    yield request.param
    cpu_library.force_isa(None)


def case(
    totals: list[int], *, heads: int, kv_heads: int, dims: tuple[int, int], dtype: torch.dtype, seed: int = 0
) -> Any:
    """(query, keys, values, where): pages in random order, what lies between them large."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-total // BLOCK) for total in totals]
    blocks = torch.randperm(sum(counts) + 3, generator=generator)
    keys, values = ((torch.randn(len(blocks), BLOCK, kv_heads, dim, generator=generator) * 2).to(dtype) for dim in dims)
    query = torch.randn(len(totals), heads, dims[0], generator=generator)
    tables = torch.zeros(len(totals), max(counts), dtype=torch.int64)
    at = 0
    for row, count in enumerate(counts):
        tables[row, :count] = blocks[at : at + count]
        at += count
    return query, keys, values, PagedQueries(tables, torch.tensor(totals), sum(totals))


def expected(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, where: PagedQueries, *, scaling: float,
    window: int | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """In float64, one query and head at a time."""
    out = torch.zeros(*query.shape[:2], values.shape[3], dtype=torch.float64)
    group = query.shape[1] // keys.shape[2]
    for row, total in enumerate(where.totals.tolist()):
        k, v = (x.double()[where.tables[row]].flatten(0, 1)[:total] for x in (keys, values))
        seen = slice(max(0, total - window) if window else 0, None)
        for head in range(query.shape[1]):
            scores = k[seen, head // group] @ query[row, head].double() * scaling
            if softcap:
                scores = torch.tanh(scores / softcap) * softcap
            extra = math.exp(float(sinks[head])) if sinks is not None else 0.0
            weights = scores.exp() / (scores.exp().sum() + extra)
            out[row, head] = weights @ v[seen, head // group]
    return out


def bound(keys: torch.Tensor, values: torch.Tensor) -> float:
    """Scores of up to 200 with float32 sums have errors up to 1e-4, their exponentials the same relative ones."""
    return 2e-4 * float(values.float().abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dims"),
    [(4, 4, (16, 16)), (6, 2, (64, 64)), (8, 1, (128, 128)), (3, 3, (24, 10)), (4, 2, (192, 128))],
)
def test_equals_the_sums_in_float64(
    isa: str, heads: int, kv_heads: int, dims: tuple[int, int], dtype: torch.dtype
) -> None:
    given = case([1, 4, 5, 63, 64, 65, 150], heads=heads, kv_heads=kv_heads, dims=dims, dtype=dtype)
    found = paged_attention(*given, scaling=0.2)
    assert found is not None
    torch.testing.assert_close(found.double(), expected(*given, scaling=0.2), rtol=0, atol=bound(*given[1:3]))


@pytest.mark.parametrize(
    "options", [{"window": 7}, {"window": 1000}, {"softcap": 3.0}, {"window": 70, "softcap": 2.0}], ids=str
)
def test_windows_and_caps(isa: str, options: dict[str, Any]) -> None:
    given = case([3, 7, 8, 130], heads=4, kv_heads=2, dims=(32, 32), dtype=torch.float32)
    found = paged_attention(*given, scaling=0.2, **options)
    assert found is not None
    torch.testing.assert_close(
        found.double(), expected(*given, scaling=0.2, **options), rtol=0, atol=bound(*given[1:3])
    )


def test_sinks_take_weight_from_tokens(isa: str) -> None:
    given = case([3, 90], heads=4, kv_heads=2, dims=(32, 32), dtype=torch.float32)
    sinks = torch.tensor([-1.0, 0.0, 3.0, 12.0])
    found = paged_attention(*given, scaling=0.2, sinks=sinks)
    assert found is not None
    torch.testing.assert_close(
        found.double(), expected(*given, scaling=0.2, sinks=sinks), rtol=0, atol=bound(*given[1:3])
    )


def test_codes_stand_for_the_numbers_of_their_table(isa: str) -> None:
    query, keys, values, where = case([5, 40], heads=4, kv_heads=2, dims=(32, 16), dtype=torch.float32)
    codes = [x.to(torch.float8_e4m3fn) for x in (keys, values)]
    scales = torch.tensor([[0.5], [1.7]])
    table = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float() * scales
    found = paged_attention(query, *codes, where, scaling=0.2, numbers=(table, table))
    assert found is not None
    decoded = [x.float() * scales for x in codes]
    torch.testing.assert_close(
        found.double(), expected(query, *decoded, where, scaling=0.2), rtol=0, atol=bound(*decoded)
    )


def test_threads_and_neighbours_change_no_bit(isa: str) -> None:
    given = case([700, 3, 650, 900], heads=8, kv_heads=4, dims=(64, 64), dtype=torch.bfloat16)
    query, keys, values, where = given
    together = paged_attention(*given, scaling=0.1)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    threaded = paged_attention(*given, scaling=0.1)
    torch.set_num_threads(before)
    assert together is not None
    assert threaded is not None
    assert torch.equal(together, threaded)
    for row in range(4):
        one = PagedQueries(where.tables[row : row + 1].contiguous(), where.totals[row : row + 1].contiguous(), 0)
        alone = paged_attention(query[row : row + 1], keys, values, one, scaling=0.1)
        assert alone is not None
        assert torch.equal(alone[0], together[row])


def test_nan_is_not_lost(isa: str) -> None:
    query, keys, values, where = case([70], heads=2, kv_heads=2, dims=(16, 16), dtype=torch.float32)
    keys[where.tables[0, 2], 1, 0, 3] = float("nan")
    found = paged_attention(query, keys, values, where, scaling=0.2)
    assert found is not None
    assert bool(found[0, 0].isnan().all())
    assert not bool(found[0, 1].isnan().any())


def test_huge_scores_do_not_overflow(isa: str) -> None:
    query, keys, values, where = case([70], heads=2, kv_heads=2, dims=(16, 16), dtype=torch.float32)
    found = paged_attention(query * 1e4, keys, values, where, scaling=1.0)
    assert found is not None
    assert bool(found.isfinite().all())
    best = (keys[where.tables[0]].flatten(0, 1)[:70, 0] @ query[0, 0]).argmax()
    assert torch.equal(found[0, 0], values[where.tables[0]].flatten(0, 1)[best, 0])


def test_what_has_no_kernel_is_none() -> None:
    query, keys, values, where = case([5], heads=2, kv_heads=2, dims=(16, 16), dtype=torch.float16)
    assert paged_attention(query, keys, values, where, scaling=1.0) is None
