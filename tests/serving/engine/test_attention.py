"""A step's attention over bfloat16 pages equals the explicit sums of each sequence, whatever a step holds."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ptqpipe.numerics.kernels import cpu_library
from ptqpipe.serving.engine import attention
from ptqpipe.serving.engine.attention import PagedAttention, Pages, Terms, causal_mask, explicit_attention
from ptqpipe.serving.engine.batch import Batch, Span

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 32, 16


@pytest.fixture(params=[*cpu_library.known_isas(), "torch"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "torch":
        for name in ("paged_prefill", "paged_attention"):
            monkeypatch.setattr(attention, name, lambda *given, **options: None)
    else:
        cpu_library.force_isa(request.param)
    yield
    cpu_library.force_isa(None)


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


def test_without_products_of_bfloat16_torch_gets_float32(path: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own bfloat16 product is many times as slow there, and its weights are rounded once more."""
    seen = []
    torchs = attention.scaled_dot_product_attention

    def noted(query: torch.Tensor, *others: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append(query.dtype)
        return torchs(query, *others, **options)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", noted)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(50, n, DIM, generator=generator).bfloat16() for n in (HEADS, KV_HEADS, KV_HEADS))
    found = attention.fused_attention(q, k, v, None, 0.2)
    assert found.dtype == torch.bfloat16
    assert seen[-1] == (torch.bfloat16 if cpu_library.multiplies_bf16() else torch.float32)
    if seen[-1] == torch.float32:  # sums of float32, rounded once
        q, k, v = q.double(), k.double(), v.double()
        scores = torch.einsum("qhgd,khd->hgqk", q.view(50, KV_HEADS, -1, DIM), k) * 0.2
        scores = scores.masked_fill(~causal_mask(50, 50, None), float("-inf"))
        exact = torch.einsum("hgqk,khd->qhgd", torch.softmax(scores, -1), v).flatten(1, 2)
        torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-4)
