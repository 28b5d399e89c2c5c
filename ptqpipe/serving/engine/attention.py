"""transformers' attention over our pages: an attention function that models call with a step's tokens in one row.

The function is registered once by name in transformers' interface; which cache and which step it works on is set around
each forward (`PagedAttention.during`). In every layer it stores the new keys and values in their pages and lets each
sequence's queries see that sequence's pages alone, causally; so no mask over the whole cache exists. Grouped heads,
sliding windows, sinks and soft caps are a model's arguments to it. An FP8 cache (scales on the attention modules, see
``runtime/simulate.py``) holds E4M3 codes. Must not know sequences' owners, the scheduler or sampling.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from ptqpipe.errors import UsageError
from ptqpipe.numerics.kernels import cpu_library, triton_attention
from ptqpipe.numerics.kernels.cpu_attention import PagedQueries, PagedSpans, paged_attention, paged_prefill
from ptqpipe.serving.engine.batch import Batch, Span
from ptqpipe.serving.engine.prompt_images import ImageRows

IMPLEMENTATION = "ptqpipe_paged"
MASKED = "ptqpipe_paged_masked"  # the same for models whose own code wants a mask
KV_SCALES = "ptqpipe_kv_scales"  # runtime/simulate.py puts it on attention modules
_EVERYTHING = "_ptqpipe_everything"  # marks a mask that says nothing
_AGAIN = 1 << 20  # more than layers of a model


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Heads and widths of one layer's keys and values, as this rank has them."""

    heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Pages:
    """One layer's cache, ``[blocks, block_size, heads, dim]``; with scales (float32 [heads or 1, 1]) E4M3 codes.

    numbers  what the codes of keys and of values stand for in the model's dtype, float32 [heads, 256] or [1, 256] both
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None
    numbers: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def scales(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Scales of keys and of values of a quantized cache; else None."""
        return None if self.key_scale is None or self.value_scale is None else (self.key_scale, self.value_scale)


@dataclass(frozen=True, slots=True)
class Terms:
    """The parameters of a model's attention: the factor of the scores, a window in tokens, a cap of scores, sinks."""

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(slots=True)
class _Step:
    """A batch with what all layers need of it. ``slots`` int64 [T]: where each token's keys go.

    tables   the spans' blocks in rows, where the pages are
    spans    all of them; None where only the device has them
    singles  of those in front that have one token each, where the CPU's kernels are to see them
    placed   all of them on a device that has kernels of its own
    turns    how often each layer has attended so far
    """

    batch: Batch
    slots: torch.Tensor
    tables: torch.Tensor
    spans: PagedSpans | None
    singles: PagedQueries | None
    placed: triton_attention.DeviceSpans | None
    turns: dict[int, int] = field(default_factory=dict)
    masks: dict[tuple[int, int, int | None, tuple[int, ...]], torch.Tensor] = field(default_factory=dict)


class PagedAttention:
    """The pages of every layer, and the attention over them.

    windows  of layers whose masks have one (None: everything), whatever their attention function is given
    """

    def __init__(
        self,
        pages: dict[int, Pages],
        block_size: int,
        *,
        device: torch.device | str = "cpu",
        windows: Mapping[int, int | None] | None = None,
    ) -> None:
        self.pages, self.block_size, self.device = pages, block_size, device
        self.windows = windows or {}

    @staticmethod
    def active() -> "PagedAttention":
        """The one that a forward is within."""
        return _ACTIVE.get()

    def images(self) -> ImageRows | None:
        """Within a step: what of its tokens images decide."""
        step = _STEP.get(None) if _ACTIVE.get(None) is self else None
        return None if step is None else step.batch.images

    def singles(self) -> tuple[torch.Tensor, tuple[PagedQueries, PagedSpans]] | None:
        """Within a step in which every sequence has one token: the slots of the new keys, and what each sees."""
        step = _STEP.get(None) if _ACTIVE.get(None) is self else None
        if step is None or step.singles is None or step.singles.totals.shape != step.slots.shape:
            return None
        assert step.spans is not None
        return step.slots, (step.singles, step.spans)

    def placed_singles(self) -> triton_attention.DeviceSpans | None:
        """Within a step in which every sequence has one token: what each sees, on a device with kernels of its own."""
        step = _STEP.get(None) if _ACTIVE.get(None) is self else None
        placed = None if step is None or step.batch.images is not None else step.placed
        return placed if placed is not None and (placed.most, placed.many) == (1, 0) else None

    @contextmanager
    def during(self, batch: Batch, placed: triton_attention.DeviceSpans | None = None) -> Iterator[None]:
        """Within it a forward of the model's tokens is that of ``batch``.

        placed  its spans, where the device has them already: those of the batch are not looked at then. RuntimeError
                from an attention that the device's kernels do not cover
        """
        step = _STEP.set(self._step(batch, placed))
        active = _ACTIVE.set(self)
        try:
            yield
        finally:
            _ACTIVE.reset(active)
            _STEP.reset(step)

    def _step(self, batch: Batch, placed: triton_attention.DeviceSpans | None) -> _Step:
        if placed is not None:
            return _Step(batch, placed.slots, placed.tables, None, None, placed)
        spans = _spans(batch)
        slots = slots_of(batch, spans.tables, self.block_size)
        placed = triton_attention.place(spans, slots, torch.device(self.device))
        if placed is not None:
            return _Step(batch, placed.slots, placed.tables, spans, None, placed)
        slots, tables = slots.to(self.device), spans.tables.to(self.device)
        return _Step(batch, slots, tables, spans, _singles(batch, spans), None)

    def place(self, layer: int) -> int:
        """Which pages a layer's attention has now: those of the layer, or others where a forward asks it once more, as
        models do that attend twice in a layer (DiffLlama) or have one attention in several layers (Zamba)."""
        turns = _STEP.get().turns
        turns[layer] = turns.get(layer, -1) + 1
        return layer + _AGAIN * turns[layer]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: Terms
    ) -> torch.Tensor:
        """Queries [T, heads, dim] over the pages, with new keys and values [T, kv heads, dim]; [T, heads, dv]."""
        step, pages = _STEP.get(), self.pages[layer]
        self._store(step, pages, key, value)
        images = step.batch.images
        groups = images.groups if images is not None and layer in images.layers else None
        result = None
        if groups is None or not any(groups):
            result = self._attend_all(step, pages, query, terms)
        if result is not None:
            return result
        if step.spans is None:
            raise RuntimeError("no kernel of the device covers this attention")
        singles = self._attend_singles(step, pages, query, terms)
        start = 0 if singles is None else singles.shape[0]
        if singles is not None and start == query.shape[0]:
            return singles
        out = query.new_empty(*query.shape[:2], value.shape[-1])
        if singles is not None:
            out[:start] = singles
        each = groups or ((),) * len(step.tables)
        for span, row, group in list(zip(step.batch.spans, step.tables, each, strict=True))[start:]:
            rows = slice(start, start + span.count)
            if span.count == span.total and pages.key_scale is None:  # all that it sees is at hand
                k, v = key[rows], value[rows]
            else:
                table = row[: len(span.blocks)]
                k = load(pages.keys, table, span.total, pages.key_scale, query.dtype)
                v = load(pages.values, table, span.total, pages.value_scale, query.dtype)
            out[rows] = self._one(step, span, query[rows], (k, v), terms, group)
            start += span.count
        return out

    def _store(self, step: _Step, pages: Pages, key: torch.Tensor, value: torch.Tensor) -> None:
        if step.placed is not None and triton_attention.store(
            pages.keys, pages.values, key, value, step.slots, pages.scales
        ):
            return
        store(pages.keys, step.slots, key, pages.key_scale)
        store(pages.values, step.slots, value, pages.value_scale)

    def _attend_all(self, step: _Step, pages: Pages, query: torch.Tensor, terms: Terms) -> torch.Tensor | None:
        """``[T, heads, dv]`` by the device's kernel or by the compiled one of prompts; None without them."""
        if step.placed is not None:
            return triton_attention.attention(
                query, pages.keys, pages.values, step.placed, scaling=terms.scaling, window=terms.window,
                softcap=terms.softcap, sinks=terms.sinks, scales=pages.scales,
            )  # fmt: skip
        assert step.spans is not None
        return paged_prefill(
            query, pages.keys, pages.values, step.spans, scaling=terms.scaling, window=terms.window,
            softcap=terms.softcap, sinks=terms.sinks, numbers=pages.numbers,
        )  # fmt: skip

    def _attend_singles(self, step: _Step, pages: Pages, query: torch.Tensor, terms: Terms) -> torch.Tensor | None:
        """``[n, heads, dv]`` of the n single queries in front, by the compiled kernel; None without them or it."""
        if step.singles is None:
            return None
        return paged_attention(
            query[: len(step.singles.totals)], pages.keys, pages.values, step.singles, scaling=terms.scaling,
            window=terms.window, softcap=terms.softcap, sinks=terms.sinks, numbers=pages.numbers,
        )  # fmt: skip

    def _one(
        self,
        step: _Step,
        span: Span,
        query: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        terms: Terms,
        groups: tuple[int, ...],
    ) -> torch.Tensor:
        """One sequence: queries [count, heads, dim], keys and values [total, kv heads, dim]; [count, heads, dv].

        groups  first and end, by turns, of tokens that see each other
        """
        key, value = kv
        window = terms.window if terms.window is not None and terms.window < span.total else None
        if span.count == 1 and window is not None:
            key, value, window = key[-window:], value[-window:], None
        mask = None
        if span.count > 1 and (window is not None or span.count != span.total or terms.sinks is not None or groups):
            mask = step.masks.get((span.count, span.total, window, groups))
            if mask is None:
                mask = causal_mask(span.count, span.total, window, groups).to(query.device)
                step.masks[(span.count, span.total, window, groups)] = mask
        if terms.softcap is not None or terms.sinks is not None:
            if mask is None and span.count > 1:
                mask = causal_mask(span.count, span.total, None).to(query.device)
            return explicit_attention(query, key, value, mask, terms)
        return fused_attention(query, key, value, mask, terms.scaling)


def slots_of(batch: Batch, tables: torch.Tensor, block_size: int) -> torch.Tensor:
    """Slot of each token in the paged cache, int64 [T]."""
    if batch.tokens.shape[0] == len(batch.spans):  # one each
        ends = [(span.blocks, span.total - 1) for span in batch.spans]
        return torch.tensor([blocks[end // block_size] * block_size + end % block_size for blocks, end in ends])
    places = []
    for span, table in zip(batch.spans, tables, strict=True):
        positions = torch.arange(span.total - span.count, span.total)
        places.append(table[positions // block_size] * block_size + positions % block_size)
    return torch.cat(places)


def _singles(batch: Batch, spans: PagedSpans) -> PagedQueries | None:
    """The spans in front that have one token each; None if there are none."""
    totals = [span.total for span in itertools.takewhile(lambda span: span.count == 1, batch.spans)]
    count = len(totals)
    return PagedQueries(spans.tables[:count], spans.totals[:count], sum(totals)) if count else None


def _spans(batch: Batch) -> PagedSpans:
    spans = batch.spans
    starts = torch.tensor([0, *itertools.accumulate(span.count for span in spans)], dtype=torch.int64)
    totals = torch.tensor([span.total for span in spans], dtype=torch.int64)
    return PagedSpans(tables_of(spans), totals, starts, sum(span.count * span.total for span in spans))


def tables_of(spans: Sequence[Span]) -> torch.Tensor:
    """Their blocks in rows of the longest's length, int64 [n, most blocks]; 0 behind the last."""
    longest = max(len(span.blocks) for span in spans)
    return torch.tensor([span.blocks + (0,) * (longest - len(span.blocks)) for span in spans], dtype=torch.int64)


def numbers_of(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Decoding table of E4M3 with a scale [heads or 1, 1], in a model's dtype; float32 [heads or 1, 256]."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(scale.device)
    return (codes * scale).to(dtype).float().contiguous()


# Of the context: two halves of a step (``overlap.py``) take turns in one thread, each with its own.
_ACTIVE: ContextVar[PagedAttention] = ContextVar("ptqpipe_paged_attention")
_STEP: ContextVar[_Step] = ContextVar("ptqpipe_paged_attention_step")


def store(pages: torch.Tensor, slots: torch.Tensor, x: torch.Tensor, scale: torch.Tensor | None) -> None:
    """Puts ``x`` [T, heads, dim] into the slots of ``pages``; with a scale as E4M3 codes of x / scale, saturating."""
    if scale is not None:
        x = (x.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        pages, x = pages.view(torch.uint8), x.view(torch.uint8)  # torch has no indexed copy of float8
    pages.flatten(0, 1).index_copy_(0, slots, x)


def load(
    pages: torch.Tensor, table: torch.Tensor, total: int, scale: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """The first ``total`` tokens of a sequence's pages, [total, heads, dim]."""
    if scale is None:
        return pages[table].flatten(0, 1)[:total]
    codes = pages.view(torch.uint8)[table].flatten(0, 1)[:total].view(torch.float8_e4m3fn)
    return (codes.float() * scale).to(dtype)


def causal_mask(count: int, total: int, window: int | None, groups: tuple[int, ...] = ()) -> torch.Tensor:
    """Bool [count, total]: what the last ``count`` of ``total`` tokens see. ``groups``: first and end, by turns, of
    tokens that see each other, too."""
    row = torch.arange(total - count, total)[:, None]
    column = torch.arange(total)[None, :]
    seen = column <= row
    for first, end in zip(groups[::2], groups[1::2], strict=True):
        seen |= (row >= first) & (row < end) & (column >= first) & (column < end)
    return seen if window is None else seen & (column > row - window)


def fused_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, scaling: float
) -> torch.Tensor:
    """torch's own attention of one sequence. Without a mask: causal for several queries, everything for one.

    bfloat16 on a CPU without products of such numbers is computed in float32, which has a library's product there.
    """
    if query.dtype == torch.bfloat16 and query.device.type == "cpu" and not cpu_library.multiplies_bf16():
        return fused_attention(query.float(), key.float(), value.float(), mask, scaling).bfloat16()
    count, heads, _ = query.shape
    kv_heads = key.shape[1]
    k, v = key.transpose(0, 1)[None], value.transpose(0, 1)[None]
    if count == 1:  # the heads of a group are the rows of one product: nothing is repeated
        q = query.view(1, kv_heads, heads // kv_heads, -1)
        return scaled_dot_product_attention(q, k, v, scale=scaling).reshape(1, heads, -1)
    grouped = heads != kv_heads
    if grouped and query.device.type != "cpu":  # where not every way of torch's takes groups
        k, v, grouped = *(x.repeat_interleave(heads // kv_heads, dim=1) for x in (k, v)), False
    q, causal = query.transpose(0, 1)[None], mask is None
    out = scaled_dot_product_attention(q, k, v, mask, scale=scaling, is_causal=causal, enable_gqa=grouped)
    return out[0].transpose(0, 1)


def explicit_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, terms: Terms
) -> torch.Tensor:
    """Attention in elementary operations, for soft caps and sinks: scores and sums in float32."""
    count, heads, dim = query.shape
    kv_heads = key.shape[1]
    q = query.float().view(count, kv_heads, heads // kv_heads, dim)
    scores = torch.einsum("qhgd,khd->hgqk", q, key.float()) * terms.scaling
    if terms.softcap is not None:
        scores = torch.tanh(scores / terms.softcap) * terms.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if terms.sinks is not None:  # a score of a token that is not there
        sinks = terms.sinks.float().view(kv_heads, -1, 1, 1).expand(-1, -1, count, 1)
        weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    else:
        weights = torch.softmax(scores, dim=-1)
    return torch.einsum("hgqk,khd->qhgd", weights, value.float()).flatten(1, 2).to(query.dtype)


def number_of(module: Any) -> int:
    """The layer of an attention module; -1 where it has none of its own."""
    index = getattr(module, "layer_idx", None)
    return -1 if index is None else int(index)


def layer_of(place: int) -> int:
    """The layer whose attention has these pages."""
    return (place + 1) % _AGAIN - 1


def register() -> None:
    """Enters the function into transformers' interface. It needs no masks, so its first name has no row among those."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, paged_attention_forward)
    ALL_ATTENTION_FUNCTIONS.register(MASKED, paged_attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(MASKED, _everything)


def implementation(config: Any) -> str:
    """The name by which a model of a config attends."""
    return MASKED if "indexed_attention" in (getattr(config, "layer_types", None) or ()) else IMPLEMENTATION


def _everything(
    batch_size: int, q_length: int, kv_length: int, device: torch.device | str = "cpu", **ignored: Any
) -> torch.Tensor:
    """A mask for an indexer whose choice is everything, as long as the context is (`runner.context_length`)."""
    one = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
    mask = one.expand(batch_size, 1, int(q_length), int(kv_length))
    setattr(mask, _EVERYTHING, True)
    return mask


def paged_attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **ignored: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' signature: [1, heads, T, dim] in, [1, T, heads, dim] out. UsageError for what it cannot do."""
    masked = attention_mask is not None and not hasattr(attention_mask, _EVERYTHING)
    if masked or ignored.get("position_bias") is not None:
        raise UsageError(f"{type(module).__name__} brings its own attention mask or bias; the engine cannot serve it")
    active = _ACTIVE.get()
    layer = active.place(number_of(module))
    window = active.windows.get(layer, sliding_window)
    terms = Terms(query.shape[-1] ** -0.5 if scaling is None else scaling, window, softcap, s_aux)
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
    return active.attend(layer, q, k, v, terms).unsqueeze(0), None
