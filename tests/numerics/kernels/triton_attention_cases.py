"""The claims about Triton's attention over pages. ``test_triton_attention.py`` runs this file in a process.

Once with TRITON_INTERPRET=1, which has to be set before Triton is imported, on CPU tensors; and once on a CUDA device
where there is one. Expected values are sums in float64 of each sequence alone.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from ptqpipe.numerics.kernels import triton as kernels, triton_attention
from ptqpipe.numerics.kernels.cpu_attention import PagedSpans
from ptqpipe.serving.engine.attention import PagedAttention, Pages, Terms, store as store_by_torch
from ptqpipe.serving.engine.batch import Batch, Span

DEVICE = torch.device("cpu" if kernels.interpreting() else "cuda")
BLOCK = 16
HALF_ULP = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float32: 2.0**-24}
interpreted = pytest.mark.skipif(not kernels.interpreting(), reason="pages of codes have torch's attention on a GPU")
Pair = tuple[torch.Tensor, torch.Tensor]


class Case:
    """Sequences of ``totals`` tokens: queries of all of them, pages in random order with NaN behind each end."""

    def __init__(
        self, totals: Sequence[int], *, heads: int, kv_heads: int, dims: tuple[int, int],
        dtype: torch.dtype = torch.bfloat16, scales: Pair | None = None,
    ) -> None:  # fmt: skip
        g = torch.Generator().manual_seed(sum(totals))
        self.totals, self.scales = totals, scales
        counts = [-(-total // BLOCK) for total in totals]
        order = torch.randperm(sum(counts) + 3, generator=g).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in counts]
        held = dtype if scales is None else torch.float8_e4m3fn
        pages = [torch.full((sum(counts) + 3, BLOCK, kv_heads, dim), float("nan")) for dim in dims]
        self.queries = [torch.randn(total, heads, dims[0], generator=g).to(dtype) for total in totals]
        for page in pages:
            for table, total in zip(self.tables, totals, strict=True):
                new = torch.randn(total, kv_heads, page.shape[3], generator=g) * 2
                page.flatten(0, 1)[slots(table, total)] = new
        self.keys, self.values = (page.to(held) for page in pages)

    def numbers(self, row: int) -> list[torch.Tensor]:
        """Keys and values of a sequence, float64 [total, heads, dim]."""
        at, found = slots(self.tables[row], self.totals[row]), []
        for pages, scale in zip((self.keys, self.values), self.scales or (torch.ones(1),) * 2, strict=True):
            x = pages.float().double().flatten(0, 1)[at] * scale.double().reshape(-1, 1)
            found.append(x.repeat_interleave(self.queries[row].shape[1] // x.shape[1], 1))
        return found

    def ask(self, spans: Sequence[tuple[int, int, int]], **options: Any) -> list[torch.Tensor]:
        """Results of spans (sequence, first, end) in one call, on the CPU."""
        where = placed([self.tables[row][: -(-end // BLOCK)] for row, _, end in spans], [x[1:] for x in spans])
        query = torch.cat([self.queries[row][first:end] for row, first, end in spans])
        scales = None if self.scales is None else (self.scales[0].to(DEVICE), self.scales[1].to(DEVICE))
        if (sinks := options.pop("sinks", None)) is not None:
            options["sinks"] = sinks.to(DEVICE)
        found = triton_attention.attention(
            query.to(DEVICE), self.keys.to(DEVICE), self.values.to(DEVICE), where, scales=scales, **options
        )
        assert found is not None
        return list(torch.split(found.cpu(), [end - first for _, first, end in spans]))


def slots(table: list[int], total: int) -> torch.Tensor:
    """Where a sequence's tokens are."""
    return torch.tensor([table[at // BLOCK] * BLOCK + at % BLOCK for at in range(total)])


def placed(tables: Sequence[list[int]], spans: Sequence[Sequence[int]]) -> triton_attention.DeviceSpans:
    """Spans (first, end) of sequences, on the device."""
    longest = max(map(len, tables))
    padded = torch.tensor([table + [0] * (longest - len(table)) for table in tables])
    starts = torch.tensor([0, *torch.tensor([end - first for first, end in spans]).cumsum(0).tolist()])
    new = torch.cat([slots(table, end)[first:] for table, (first, end) in zip(tables, spans, strict=True)])
    found = triton_attention.place(PagedSpans(padded, torch.tensor([x[1] for x in spans]), starts, 0), new, DEVICE)
    assert found is not None
    return found


def assert_exact(
    found: torch.Tensor, case: Case, span: tuple[int, int, int], *, scaling: float, window: int | None = None,
    softcap: float | None = None, sinks: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Within the bound that ``triton_attention.py`` states, of a cap twice 2^-22 of it, too."""
    row, first, end = span
    q = case.queries[row][first:end].double()
    k, v = (x[:end] for x in case.numbers(row))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scaling
    u = HALF_ULP[case.queries[row].dtype]
    three = 2.0**-20 if u == 2.0**-24 else 0.0  # what a product of three is off by
    doubt = torch.einsum("qhd,khd->hqk", q.abs(), k.abs()) * scaling * (q.shape[2] * 2.0**-24 + three)
    doubt += scores.abs() * 2.0**-22
    if softcap is not None:
        scores, doubt = torch.tanh(scores / softcap) * softcap, doubt + softcap * 2.0**-21
    distance = torch.arange(first, end)[:, None] - torch.arange(end)[None, :]
    seen = (distance >= 0) & (distance < (window or end))
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, end - first, 1)], 2)
        doubt = torch.cat([doubt, torch.zeros(len(sinks), end - first, 1)], 2)
        v = torch.cat([v, torch.zeros(1, *v.shape[1:])])
    weights = torch.softmax(scores, 2)
    out = torch.einsum("hqk,khd->qhd", weights, v)
    e = (u + 2.0**-20 + 2 * doubt.masked_fill(weights == 0, 0.0).amax(2)).T[:, :, None]
    spread = (torch.einsum("hqk,khd->qhd", weights, v * v) - out * out).clamp_min(0.0).sqrt()
    magnitude = torch.einsum("hqk,khd->qhd", weights, v.abs())
    bound = e * spread + (end * 2.0**-24 + e * e + three) * magnitude + 2 * u * out.abs() + 2.0**-24
    assert found.shape == out.shape
    assert float(((found.double() - out).abs() / bound).max()) <= 1.0


DIMS = [
    (1, 1, (64, 64)), (6, 2, (80, 80)), (7, 1, (128, 128)), (40, 2, (64, 64)), (2, 2, (192, 128)), (3, 1, (24, 5)),
    (4, 2, (256, 256)),
]  # fmt: skip
MIXED = [(0, 4, 5), (1, 0, 40), (2, 299, 300), (3, 30, 38), (4, 520, 529), (5, 0, 1)]  # of sequences as long as that
TOTALS = [5, 40, 300, 38, 529, 1]


@pytest.mark.parametrize(("heads", "kv_heads", "dims"), DIMS)
def test_equals_the_sums_in_float64(heads: int, kv_heads: int, dims: tuple[int, int]) -> None:
    case = Case([5, 40, 300, 38], heads=heads, kv_heads=kv_heads, dims=dims)
    for span, found in zip(MIXED, case.ask(MIXED[:4], scaling=0.2), strict=False):
        assert_exact(found, case, span, scaling=0.2)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "window": {"window": 20}, "itself": {"window": 1}, "wide": {"window": 300}, "cap": {"softcap": 3.0},
    "sinks": {"sinks": torch.tensor([-1.0, 0, 3, 12])},
    "all": {"window": 70, "softcap": 2.0, "sinks": torch.arange(4.0)},
}  # fmt: skip
ONE, ALL = torch.bfloat16, "all"  # what the interpreter, which takes seconds for a case, has all the others of


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(x, name) for x in HALF_ULP for name in OPTIONS if DEVICE.type == "cuda" or x is ONE or name == ALL],
)
def test_windows_caps_and_sinks(name: str, dtype: torch.dtype) -> None:
    options = OPTIONS[name]
    case = Case(TOTALS, heads=4, kv_heads=2, dims=(32, 32), dtype=dtype)
    for span, found in zip(MIXED, case.ask(MIXED, scaling=0.2, **options), strict=True):
        assert_exact(found, case, span, scaling=0.2, **options)


@interpreted
@pytest.mark.parametrize(
    ("dtype", "by_head"), [(x, kind) for x in HALF_ULP for kind in ("k", "v", "kv", "") if x is ONE or kind == "kv"]
)
def test_codes_stand_for_their_number_times_the_scale(by_head: str, dtype: torch.dtype) -> None:
    one, each = torch.tensor([[0.37]]), torch.tensor([[0.5], [1.7]])
    scales = tuple(each if kind in by_head else one for kind in "kv")
    case = Case(TOTALS, heads=4, kv_heads=2, dims=(32, 16), dtype=dtype, scales=(scales[0], scales[1]))
    for span, found in zip(MIXED, case.ask(MIXED, scaling=0.2), strict=True):
        assert_exact(found, case, span, scaling=0.2)


@interpreted
def test_every_code_is_its_number() -> None:
    """A query that sees itself alone gets its value."""
    codes = torch.arange(256, dtype=torch.uint8)
    numbers = codes.view(torch.float8_e4m3fn).float()
    case = Case([256], heads=1, kv_heads=1, dims=(16, 16), dtype=torch.float16, scales=(torch.ones(1, 1),) * 2)
    case.values.view(torch.uint8).flatten(0, 1)[slots(case.tables[0], 256)] = codes[:, None, None].expand(-1, 1, 16)
    spans = [(0, row, row + 1) for row in range(256)]
    for found, number in zip(case.ask(spans, scaling=1.0, window=1), numbers, strict=True):
        assert torch.equal(found[0].float().nan_to_num(1e5), number.expand(1, 16).nan_to_num(1e5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_result_depends_on_its_own_span_alone(dtype: torch.dtype) -> None:
    case = Case([300, 40, 1300, 38, 700], heads=6, kv_heads=2, dims=(32, 32), dtype=dtype)
    spans = [(0, 299, 300), (1, 0, 40), (2, 1299, 1300), (3, 30, 38), (4, 690, 700)]
    together = case.ask(spans, scaling=0.3)
    backwards = case.ask(spans[::-1], scaling=0.3)[::-1]
    for at, span in enumerate(spans):
        assert torch.equal(case.ask([span], scaling=0.3)[0], together[at])
        assert torch.equal(backwards[at], together[at])


def test_the_keys_of_few_queries_are_cut_into_parts() -> None:
    """As many as their number asks for, of which one fits all the same."""
    case = Case([2100, 200, 257], heads=2, kv_heads=1, dims=(16, 16), dtype=torch.float32)
    spans = [(0, 2099, 2100), (1, 195, 200), (2, 256, 257)]
    for found, span in zip(case.ask(spans, scaling=0.5), spans, strict=True):
        assert_exact(found, case, span, scaling=0.5)
        assert torch.equal(case.ask([span], scaling=0.5)[0], found)


@pytest.mark.parametrize("cuts", [(9, 30, 100), (64,), (127, 128, 129)])
def test_pieces_of_a_prompt_equal_the_whole(cuts: tuple[int, ...]) -> None:
    case = Case([150], heads=4, kv_heads=2, dims=(32, 32))
    whole = case.ask([(0, 0, 150)], scaling=0.2)[0]
    for first, end in zip([0, *cuts], [*cuts, 150], strict=True):
        found = case.ask([(0, first, end)], scaling=0.2)[0]
        assert_exact(found, case, (0, first, end), scaling=0.2)
        if end - first > triton_attention.FEW:
            assert torch.equal(found, whole[first:end])


def test_nan_reaches_its_own_sequence_and_head_alone() -> None:
    case = Case([70, 30], heads=2, kv_heads=2, dims=(16, 16), dtype=torch.float32)
    case.keys[case.tables[0][2], 1, 0, 3] = float("nan")
    first, second = case.ask([(0, 69, 70), (1, 0, 30)], scaling=0.2)
    assert bool(first[0, 0].isnan().all())
    assert not bool(first[0, 1].isnan().any())
    assert not bool(second.isnan().any())


def test_huge_scores_do_not_overflow() -> None:
    case = Case([70], heads=2, kv_heads=2, dims=(16, 16), dtype=torch.float32)
    case.queries[0] *= 1e4
    keys, values = case.numbers(0)
    for span in ((0, 69, 70), (0, 0, 70)):
        found = case.ask([span], scaling=1.0)[0]
        assert bool(found.isfinite().all())
        best = int((keys[:, 0] @ case.queries[0][69, 0].double()).argmax())
        torch.testing.assert_close(found[-1, 0].double(), values[best, 0], rtol=2.0**-20, atol=0.0)


@pytest.mark.parametrize("dtype", HALF_ULP)
@pytest.mark.parametrize(
    "by_head", [None, pytest.param(True, marks=interpreted), pytest.param(False, marks=interpreted)]
)
def test_new_keys_and_values_are_stored_as_torch_does(by_head: bool | None, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(4)
    held = dtype if by_head is None else torch.float8_e4m3fn
    one, other = (torch.rand(3 if by_head else 1, 1, generator=g) + 0.01 for _ in range(2))
    scales = None if by_head is None else (one, other)
    where = torch.randperm(5 * BLOCK, generator=g)[:37]
    new = [
        (torch.randn(37, dim, 3, generator=g) * torch.exp2(torch.randint(-14, 12, (37, dim, 3), generator=g).float()))
        .to(dtype)
        .transpose(1, 2)
        for dim in (40, 24)
    ]
    new[0][3, 1, 5], new[1][4, 2, 6] = float("nan"), float("-inf")
    pages = [torch.zeros(5, BLOCK, 3, dim).to(held) for dim in (40, 24)]
    wanted = [page.clone() for page in pages]
    for page, x, scale in zip(wanted, new, scales or (None, None), strict=True):
        store_by_torch(page, where, x, scale)
    keys, values, key, value, at, one, other = (x.to(DEVICE) for x in (*pages, *new, where, one, other))
    assert triton_attention.store(keys, values, key, value, at, None if scales is None else (one, other))
    for found, page in zip((keys, values), wanted, strict=True):
        bits = (x.cpu().contiguous().view(torch.uint8) for x in (found, page))
        assert torch.equal(*bits)


@pytest.mark.parametrize("codes", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_of_the_engine_goes_through_them(codes: bool, dtype: torch.dtype) -> None:
    scales = (torch.tensor([[0.3], [0.7]]), torch.tensor([[0.2]])) if codes else None
    case = Case(TOTALS, heads=4, kv_heads=2, dims=(32, 24), dtype=dtype, scales=scales)
    pages = Pages(
        case.keys.to(DEVICE), case.values.to(DEVICE), *(() if scales is None else (x.to(DEVICE) for x in scales))
    )
    engine = PagedAttention({0: pages}, BLOCK, device=DEVICE)
    nothing = torch.zeros(sum(end - first for _, first, end in MIXED), dtype=torch.int64)
    spans = tuple(Span(end - first, end, tuple(case.tables[row])) for row, first, end in MIXED)
    g = torch.Generator().manual_seed(5)
    new = [torch.randn(len(nothing), 2, dim, generator=g).to(dtype) for dim in (32, 24)]
    at = torch.cat([slots(case.tables[row], end)[first:] for row, first, end in MIXED])
    for held, x, scale in zip((case.keys, case.values), new, scales or (None, None), strict=True):
        store_by_torch(held, at, x, scale)
    query = torch.cat([case.queries[row][first:end] for row, first, end in MIXED])
    with engine.during(Batch(nothing, nothing, spans)):
        key, value = (x.to(DEVICE) for x in new)
        found = engine.attend(0, query.to(DEVICE), key, value, Terms(0.2, window=100)).cpu()
    for span, part in zip(MIXED, torch.split(found, [end - first for _, first, end in MIXED]), strict=True):
        assert_exact(part, case, span, scaling=0.2, window=100)
    for one, other in ((pages.keys, case.keys), (pages.values, case.values)):
        assert torch.equal(*(x.cpu().contiguous().view(torch.uint8) for x in (one, other)))


def test_what_has_no_kernel_gives_none() -> None:
    case = Case([20], heads=2, kv_heads=2, dims=(16, 16))
    where = placed(case.tables, [(0, 20)])
    query, keys, values = (x.to(DEVICE) for x in (case.queries[0], case.keys, case.values))
    assert triton_attention.attention(query.float(), keys, values, where, scaling=1.0) is None
    wide = torch.zeros(3, BLOCK, 2, 320, dtype=torch.bfloat16, device=DEVICE)
    assert triton_attention.attention(query, wide, wide, where, scaling=1.0) is None
    assert not triton_attention.store(keys, values, query.float(), query.float(), where.slots)
