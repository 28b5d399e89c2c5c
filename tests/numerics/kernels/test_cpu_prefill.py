"""The compiled attention over bfloat16 pages against the same sums in float64, within a derived bound; single queries
and pages of codes against it, bit for bit."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ptqpipe.numerics.kernels import cpu_library
from ptqpipe.numerics.kernels.cpu_attention import PagedSpans, paged_prefill

BLOCK = 16
Pages = tuple[torch.Tensor, torch.Tensor]


def _has_kernel() -> bool:
    if not cpu_library.known_isas():
        return False
    query, pages, tables = case([4], heads=1, kv_heads=1, dims=(8, 8))
    return paged_prefill(query[0], *pages, spans(tables, [4], [4]), scaling=1.0) is not None


def case(
    totals: Sequence[int], *, heads: int, kv_heads: int, dims: tuple[int, int], seed: int = 0
) -> tuple[list[torch.Tensor], Pages, list[list[int]]]:
    """(queries [total, heads, dim] of each sequence, pages in random order with NaN behind its end, tables)."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-total // BLOCK) for total in totals]
    order = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    shape = (len(order), BLOCK, kv_heads)
    keys, values = (torch.full((*shape, dim), float("nan"), dtype=torch.bfloat16) for dim in dims)
    queries, tables = [], []
    for total, count in zip(totals, counts, strict=True):
        queries.append(torch.randn(total, heads, dims[0], generator=generator).bfloat16())
        tables.append([order.pop() for _ in range(count)])
        for pages in (keys, values):
            new = torch.randn(total, kv_heads, pages.shape[3], generator=generator) * 2
            pages.view(-1, kv_heads, pages.shape[3])[slots(tables[-1], total)] = new.bfloat16()
    return queries, (keys, values), tables


def slots(table: list[int], total: int) -> torch.Tensor:
    return torch.tensor([table[at // BLOCK] * BLOCK + at % BLOCK for at in range(total)])


def spans(tables: list[list[int]], totals: Sequence[int], counts: Sequence[int]) -> PagedSpans:
    longest = max(map(len, tables))
    padded = torch.tensor([table + [0] * (longest - len(table)) for table in tables])
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()])
    pairs = sum(total * count for total, count in zip(totals, counts, strict=True))
    return PagedSpans(padded, torch.tensor(totals), starts, pairs)


def of_all(
    queries: list[torch.Tensor], pages: Pages, tables: list[list[int]], *, cuts: Sequence[int] = (), **options: Any
) -> list[torch.Tensor]:
    """Each sequence's results, computed in chunks that end at ``cuts`` and at its end."""
    made: list[list[torch.Tensor]] = [[] for _ in queries]
    at = 0
    for cut in (*cuts, max(map(len, queries))):
        rows = [slice(min(at, len(query)), min(cut, len(query))) for query in queries]
        live = [i for i, row in enumerate(rows) if row.stop > row.start]
        where = spans([tables[i] for i in live], [rows[i].stop for i in live], [rows[i].stop - at for i in live])
        found = paged_prefill(torch.cat([queries[i][rows[i]] for i in live]), *pages, where, **options)
        assert found is not None
        for i, first in zip(live, where.starts.tolist(), strict=False):
            made[i].append(found[first : first + rows[i].stop - at])
        at = cut
    return [torch.cat(parts) for parts in made]


def exact(
    query: torch.Tensor, pages: Pages, table: list[int], *, scaling: float, window: int | None = None,
    softcap: float | None = None, sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(result in float64, bound of the error), both [total, heads, dim].

    Each weight is off by its rounding to bfloat16 (2^-8), that of the exponential (2.9e-6) and the error of its score:
    of a float32 sum of dim products at most dim 2^-24 of the sum of magnitudes, of a cap 2^-22 of its range and twice
    the exponential's error. Errors e of the weights move a mean by at most e times the mean distance to it, the squares
    of e and of float32 sums over tokens are of 2^-14; a result is rounded to bfloat16 (2^-8).
    """
    total, heads, dim = query.shape
    k, v = (x.flatten(0, 1)[slots(table, total)].double() for x in pages)
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    q = query.double()
    scores = torch.einsum("qhd,khd->hqk", q, k) * scaling
    doubt = torch.einsum("qhd,khd->hqk", q.abs(), k.abs()) * abs(scaling) * (dim + 4) * 2.0**-24
    if softcap is not None:
        scores, doubt = torch.tanh(scores / softcap) * softcap, doubt + softcap * 6e-6
    distance = torch.arange(total)[:, None] - torch.arange(total)[None, :]
    seen = (distance >= 0) & (distance < (total if window is None else window))
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        extra = sinks.double().view(-1, 1, 1).expand(-1, total, 1)
        scores, v = torch.cat([scores, extra], 2), torch.cat([v, torch.zeros(1, heads, v.shape[2])])
        doubt = torch.cat([doubt, torch.zeros(heads, total, 1)], 2)
    weights = torch.softmax(scores, 2)
    out = torch.einsum("hqk,khd->qhd", weights, v)
    e = (2.0**-8 + 6e-6 + 2 * doubt.masked_fill(weights == 0, 0.0).amax(2)).T[:, :, None]
    spread = torch.einsum("hqk,khd->qhd", weights, v * v) - out * out  # of a mean distance at least the square
    magnitude = torch.einsum("hqk,khd->qhd", weights, v.abs())
    return out, e * spread.clamp_min(0.0).sqrt() + 2.0**-8 * out.abs() + 2.0**-14 * magnitude


def assert_near(found: torch.Tensor, out: torch.Tensor, bound: torch.Tensor) -> None:
    worst = ((found.double() - out).abs() / bound.clamp_min(1e-30)).max()
    assert float(worst) <= 1.0


pytestmark = pytest.mark.skipif(not _has_kernel(), reason="no kernel: not built, or no AVX-512 with BF16")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dims"),
    [(1, 1, (24, 24)), (3, 3, (64, 64)), (3, 1, (80, 80)), (8, 1, (128, 128)), (32, 4, (64, 64)), (9, 3, (64, 64)),
     (4, 2, (192, 128)), (2, 1, (17, 5)), (40, 1, (16, 16)), (16, 2, (256, 256))],
)  # fmt: skip
def test_equals_the_sums_in_float64(heads: int, kv_heads: int, dims: tuple[int, int]) -> None:
    queries, pages, tables = case([2, 63, 64, 65, 150], heads=heads, kv_heads=kv_heads, dims=dims)
    scaling = dims[0] ** -0.5
    for query, table, found in zip(queries, tables, of_all(queries, pages, tables, scaling=scaling), strict=True):
        assert_near(found, *exact(query, pages, table, scaling=scaling))


@pytest.mark.parametrize(
    "options",
    [{"window": 1}, {"window": 7}, {"window": 64}, {"window": 100}, {"window": 1000}, {"softcap": 3.0},
     {"softcap": 30.0, "window": 70}, {"sinks": torch.tensor([-1.0, 0.0, 3.0, 12.0])},
     {"sinks": torch.tensor([-1.0, 0.0, 3.0, 12.0]), "window": 9}, {"scaling": -0.3}],
    ids=lambda given: " ".join(given),
)  # fmt: skip
def test_windows_caps_sinks_and_negative_factors(options: dict[str, Any]) -> None:
    queries, pages, tables = case([5, 130, 300], heads=4, kv_heads=2, dims=(32, 32))
    options = {"scaling": 0.2, **options}
    for query, table, found in zip(queries, tables, of_all(queries, pages, tables, **options), strict=True):
        assert_near(found, *exact(query, pages, table, **options))


@pytest.mark.parametrize("options", [{}, {"window": 50}, {"sinks": torch.arange(8.0)}, {"softcap": 4.0}], ids=str)
@pytest.mark.parametrize("cuts", [(1, 2), (31, 32, 33), (64, 128), (100, 263), tuple(range(16, 336, 16))], ids=str)
def test_how_a_sequence_is_cut_changes_no_bit(cuts: tuple[int, ...], options: dict[str, Any]) -> None:
    given = case([340, 70, 128], heads=8, kv_heads=2, dims=(48, 40))
    whole = of_all(*given, scaling=0.15, **options)
    for a, b in zip(whole, of_all(*given, cuts=cuts, scaling=0.15, **options), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (8, 2), (8, 1), (13, 1), (32, 1), (33, 1)])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 50}, {"window": 64, "sinks": torch.arange(33.0)}, {"softcap": 4.0}, {"dims": (64, 64)},
     {"dims": (17, 5)}, {"dims": (128, 256)}],
    ids=lambda given: " ".join(given),
)  # fmt: skip
def test_a_token_at_a_time_changes_no_bit(heads: int, kv_heads: int, options: dict[str, Any]) -> None:
    """Single queries go another way through their keys: with at most 32 of them for a key-value head."""
    options = {"dims": (48, 40), **options}
    if "sinks" in options:
        options["sinks"] = options["sinks"][:heads]
    given = case([200, 70, 129], heads=heads, kv_heads=kv_heads, dims=options.pop("dims"))
    whole = of_all(*given, scaling=0.15, **options)
    cuts = (*range(1, 5), *range(60, 70), *range(125, 133), *range(190, 200))
    for a, b in zip(whole, of_all(*given, cuts=cuts, scaling=0.15, **options), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_damaged_value_reaches_single_queries_that_see_it(bad: float) -> None:
    queries, pages, tables = case([150], heads=4, kv_heads=2, dims=(16, 16))
    pages[1].view(-1, 2, 16)[slots(tables[0], 150)[100], 1, 3] = bad
    cuts = tuple(range(90, 150))
    whole, single = (of_all(queries, pages, tables, cuts=some, scaling=0.2, window=30)[0] for some in ((), cuts))
    assert torch.equal(whole.isfinite(), single.isfinite())
    assert torch.equal(whole.nan_to_num(), single.nan_to_num())
    assert not bool(single[100:130, 2:, 3].isfinite().any())


@pytest.mark.parametrize("per_head", [False, True], ids=["one scale", "a scale a head"])
@pytest.mark.parametrize(("heads", "kv_heads", "dims"), [(4, 2, (64, 64)), (3, 3, (17, 40)), (40, 1, (32, 32))])
def test_codes_give_the_bits_of_the_numbers_that_they_stand_for(
    heads: int, kv_heads: int, dims: tuple[int, int], per_head: bool
) -> None:
    g = torch.Generator().manual_seed(3)
    queries, pages, tables = case([150, 40], heads=heads, kv_heads=kv_heads, dims=dims)
    scale = torch.rand(kv_heads if per_head else 1, 1, generator=g) + 0.01
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    numbers = (codes.float() * scale).bfloat16().float().contiguous()
    stored = [torch.randint(0, 256, x.shape, generator=g, dtype=torch.uint8) for x in pages]
    for x in stored:
        x[(x & 127) == 127] = 0  # NaN
    by_head = torch.arange(kv_heads).view(-1, 1) if per_head else torch.zeros(kv_heads, 1, dtype=torch.int64)
    decoded = tuple(numbers[by_head, x.long()].bfloat16() for x in stored)
    fp8 = tuple(x.view(torch.float8_e4m3fn) for x in stored)
    for cuts in ((), tuple(range(1, 150)), (64, 100)):
        wanted = of_all(queries, (decoded[0], decoded[1]), tables, cuts=cuts, scaling=0.02)
        found = of_all(queries, (fp8[0], fp8[1]), tables, cuts=cuts, scaling=0.02, numbers=(numbers, numbers))
        for a, b in zip(wanted, found, strict=True):
            assert torch.equal(a, b)
            assert bool(a.isfinite().all())


@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (16, 2), (24, 3)])
def test_threads_and_neighbours_change_no_bit(heads: int, kv_heads: int) -> None:
    queries, pages, tables = case([300, 20, 500], heads=heads, kv_heads=kv_heads, dims=(64, 64))
    before = torch.get_num_threads()
    made = []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            made.append(of_all(queries, pages, tables, scaling=0.1))
    finally:
        torch.set_num_threads(before)
    alone = [of_all([query], pages, [table], scaling=0.1)[0] for query, table in zip(queries, tables, strict=True)]
    for other in (*made[1:], alone):
        for a, b in zip(made[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("which", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("at", [0, 37, 70, 71])
def test_a_damaged_token_is_seen_by_those_that_see_it_alone(which: int, at: int) -> None:
    queries, pages, tables = case([100, 90], heads=4, kv_heads=2, dims=(16, 16))
    sound = of_all(queries, pages, tables, scaling=0.2, window=30)
    pages[which].view(-1, 2, 16)[slots(tables[0], 100)[at], 1, 3] = float("nan")
    damaged = of_all(queries, pages, tables, scaling=0.2, window=30)
    assert torch.equal(damaged[1], sound[1])
    assert torch.equal(damaged[0][:, :2], sound[0][:, :2])  # heads of the other key-value head
    touched = torch.zeros(100, dtype=torch.bool)
    touched[at : at + 30] = True
    hit = damaged[0][touched][:, 2:]
    assert bool((hit if which == 0 else hit[:, :, 3]).isnan().all())
    assert torch.equal(damaged[0][~touched], sound[0][~touched])


def test_huge_scores_do_not_overflow() -> None:
    queries, pages, tables = case([90], heads=2, kv_heads=1, dims=(16, 16))
    found = of_all([queries[0] * 2.0**14], pages, tables, scaling=1.0)[0]
    k, v = (x.flatten(0, 1)[slots(tables[0], 90), 0] for x in pages)
    scores = torch.einsum("qhd,kd->qhk", queries[0].double(), k.double())
    best = scores.masked_fill(~torch.ones(90, 90, dtype=torch.bool).tril()[:, None], float("-inf")).argmax(2)
    assert torch.equal(found, v[best])


def test_rows_of_queries_need_not_be_dense() -> None:
    queries, pages, tables = case([70], heads=4, kv_heads=2, dims=(32, 32))
    dense = of_all(queries, pages, tables, scaling=0.2)[0]
    by_heads = queries[0].transpose(0, 1).contiguous().transpose(0, 1)
    assert torch.equal(of_all([by_heads], pages, tables, scaling=0.2)[0], dense)
    by_dims = queries[0].transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(of_all([by_dims], pages, tables, scaling=0.2)[0], dense)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_has_no_kernel_is_none(dtype: torch.dtype) -> None:
    queries, pages, tables = case([5], heads=2, kv_heads=2, dims=(16, 16))
    where = spans(tables, [5], [5])
    keys, values = pages
    assert paged_prefill(queries[0].to(dtype), keys, values, where, scaling=1.0) is None
    assert paged_prefill(queries[0], keys.to(dtype), values.to(dtype), where, scaling=1.0) is None


def test_other_instruction_sets_have_none() -> None:
    queries, pages, tables = case([5], heads=2, kv_heads=2, dims=(16, 16))
    cpu_library.force_isa("baseline")
    try:
        assert paged_prefill(queries[0], *pages, spans(tables, [5], [5]), scaling=1.0) is None
    finally:
        cpu_library.force_isa(None)
