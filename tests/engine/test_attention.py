"""A step's attention over bfloat16 pages equals the explicit sums of each sequence, whatever a step holds."""

import pytest
import torch

from ptqpipe.engine import attention
from ptqpipe.engine.attention import PagedAttention, Pages, Terms, causal_mask, explicit_attention
from ptqpipe.engine.batch import Batch, Span

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 32, 16


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        for name in ("paged_prefill", "paged_attention"):
            monkeypatch.setattr(attention, name, lambda *given, **options: None)


@pytest.mark.parametrize(
    "counts",
    [((70, 70),), ((1, 5), (1, 40)), ((1, 40), (1, 17), (70, 70), (30, 100)), ((30, 100), (1, 33), (2, 2)),
     ((1, 1), (1, 9), (5, 90))],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize(
    "terms",
    [Terms(0.2), Terms(0.2, window=20), Terms(0.2, softcap=5.0), Terms(0.2, sinks=torch.arange(6.0))],
    ids=["plain", "window", "softcap", "sinks"],
)
def test_a_step_equals_its_sequences(counts: tuple[tuple[int, int], ...], terms: Terms) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (32, BLOCK, KV_HEADS, DIM)
    pages = Pages(torch.zeros(shape, dtype=torch.bfloat16), torch.zeros(shape, dtype=torch.bfloat16))
    blocks = iter(torch.randperm(32, generator=generator).tolist())
    spans, whole = [], []
    for count, total in counts:
        spans.append(Span(count, total, tuple(next(blocks) for _ in range(-(-total // BLOCK)))))
        whole.append([torch.randn(total, n, DIM, generator=generator).bfloat16() for n in (HEADS, KV_HEADS, KV_HEADS)])
        for page, x in zip((pages.keys, pages.values), whole[-1][1:], strict=True):
            for at in range(total - count):
                page[spans[-1].blocks[at // BLOCK], at % BLOCK] = x[at]
    paged = PagedAttention({0: pages}, BLOCK)
    rows = [torch.cat([x[i][total - n :] for x, (n, total) in zip(whole, counts, strict=True)]) for i in range(3)]
    nothing = torch.zeros(0, dtype=torch.int64)
    with paged.during(Batch(nothing, nothing, tuple(spans))):
        found = paged.attend(0, rows[0], rows[1], rows[2], terms)
    at = 0
    for (count, total), (q, k, v) in zip(counts, whole, strict=True):
        mask = causal_mask(count, total, terms.window)
        expected = explicit_attention(q[total - count :].float(), k.float(), v.float(), mask, terms)
        # Weights and results are rounded to bfloat16, 2^-8 each, of means of values of at most 5.
        torch.testing.assert_close(found[at : at + count].float(), expected, rtol=2**-8, atol=5 * 2**-8)
        at += count
