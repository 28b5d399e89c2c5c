"""Attention over pages in Triton: queries of ragged spans, keys and values read where they are, sums in float32.

A program has BM rows of one span for one head of keys and values: row r is the span's query r // GROUP, of the head
r % GROUP of those that share these keys. So grouped heads read a page once, and few queries fill the 16 rows that a
product needs at least. It goes over the keys in steps of BN, which lie at multiples of BN of the sequence: what a row
does not see changes nothing of it, and its sums are in the same order whatever else the program or the batch holds.

    spans   softmax and mean in one pass; or, of spans of few queries (SPLIT), those of a part of the keys
    parts   the means of the parts put together, by a tree whose order is the same for any number of parts
    store   new keys and values into their slots, as they are or as E4M3 codes

Scores are in units of ln 2, so that exp2 gives their weights. A code of the cache is a number of the queries' dtype
exactly; its scale multiplies scores and means. Constants: HEADS of keys, GROUP heads of queries for each; KEY_DIM and
VALUE_DIM, which the powers of two KD and VD pad; BLOCK tokens a page; CODES whether pages hold codes, whose scales are
one or by head (KEY_SCALES, VALUE_SCALES); EXACT where Triton interprets. Knows numbers and addresses; must not know
sequences, tensors or formats by name. Imports Triton: import it from inside functions.
"""

import triton
import triton.language as tl

from ptqpipe.numerics.kernels.triton_codecs import encode_signed
from ptqpipe.numerics.kernels.triton_products import e4m3, put

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def numbers(stored: tl.tensor, like: tl.tensor, CODES: tl.constexpr, EXACT: tl.constexpr) -> tl.tensor:
    """What ``stored`` are, in the dtype of ``like``, exactly; in float32 for the interpreter, which multiplies that."""
    if CODES:
        stored = e4m3(stored.to(tl.int32))
    if EXACT:
        value = stored.to(tl.float32)
    else:
        value = stored.to(like.dtype)
    return value


@triton.jit
def product(a: tl.tensor, b: tl.tensor, acc: tl.tensor, EXACT: tl.constexpr) -> tl.tensor:
    """``acc + a @ b`` in float32; float32 numbers are multiplied as they are."""
    if EXACT:
        return tl.dot(a.to(tl.float32), b, acc, input_precision="ieee")
    return tl.dot(a, b, acc, input_precision="tf32x3")  # of other dtypes as it is


@triton.jit
def begin_of(count: tl.tensor, total: tl.tensor, window: tl.tensor, BN: tl.constexpr) -> tl.tensor:
    """The first key of a span's parts: that of the first step in which its first query sees something."""
    return tl.maximum(total - count - window + 1, 0) // BN * BN


@triton.jit
def length_of(
    begin: tl.tensor, total: tl.tensor, BN: tl.constexpr, PARTS: tl.constexpr, LEAST: tl.constexpr
) -> tl.tensor:
    """Number of keys of a part: whole steps, at least LEAST, and at most PARTS parts."""
    return tl.maximum(tl.cdiv(tl.cdiv(total - begin, PARTS), BN) * BN, LEAST)


@triton.jit
def finished(top: tl.tensor, weight: tl.tensor, acc: tl.tensor, sink: tl.tensor, SINKS: tl.constexpr) -> tl.tensor:
    """``acc [rows, VD]``, a sum by weights relative to 2^top, over the ``weight`` of all; with that of the sinks."""
    if SINKS:
        extra = sink * _LOG2E
        most = tl.maximum(top, extra)
        share = tl.exp2(top - most)
        weight = weight * share + tl.exp2(extra - most)
        acc = acc * share[:, None]
    return acc / weight[:, None]


@triton.jit(do_not_specialize=["starts", "totals", "places", "tables", "width", "window", "tiles", "tokens", "parts"])
def spans_kernel(
    out: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scale: tl.tensor,
    value_scale: tl.tensor,
    sinks: tl.tensor,
    starts: tl.tensor,
    totals: tl.tensor,
    places: tl.tensor,
    tables: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    width: tl.tensor,
    window: tl.tensor,
    tiles: tl.tensor,
    tokens: tl.tensor,
    parts: tl.tensor,
    factor: tl.tensor,
    cap: tl.tensor,
    EXACT: tl.constexpr,
    FEW: tl.constexpr,
    SPLIT: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    CODES: tl.constexpr,
    KEY_SCALES: tl.constexpr,
    VALUE_SCALES: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    KD: tl.constexpr,
    VD: tl.constexpr,
    PARTS: tl.constexpr,
    LEAST: tl.constexpr,
    DIRECT: tl.constexpr,
) -> None:
    """Program (tile of rows of a head of a span, part). SPLIT: of spans of at most FEW queries, else of the others.

    out      ``[T, HEADS * GROUP, VALUE_DIM]`` with DIRECT; else float32: sums ``[tokens, heads, parts, VALUE_DIM]`` of
             values, then the tops ``[tokens, heads, parts]`` of scores, then the sums of weights of this shape
    starts   int64 ``[spans + 1]``, of each span's queries; totals int64 ``[spans]``: tokens, these the last
    places   int64 ``[spans]``: where the queries of each span with few stand among ``tokens``
    tables   int64 ``[spans, width]``: pages
    window   how many tokens a query sees, itself included
    factor   of products, for scores; with CAP for what exp2 takes of them, and cap the largest score
    """
    tile = tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles % HEADS
    span = tl.program_id(0) // tiles // HEADS
    start = tl.load(starts + span).to(tl.int32)
    count = tl.load(starts + span + 1).to(tl.int32) - start
    total = tl.load(totals + span).to(tl.int32)
    before = total - count
    low = tl.maximum(before + tile * BM // GROUP - window + 1, 0)
    high = tl.minimum(before + (tile * BM + BM - 1) // GROUP + 1, total)
    if SPLIT:
        begin = begin_of(count, total, window, BN)
        length = length_of(begin, total, BN, PARTS, LEAST)
        begin += tl.program_id(1) * length
        high = tl.minimum(high, begin + length)
        mine = (count <= FEW) & (begin < total)
    else:
        begin = low // BN * BN
        mine = count > FEW
    if not (mine & (tile * BM < count * GROUP)):
        return

    rows = tile * BM + tl.arange(0, BM)
    token = rows // GROUP
    place = before + token
    whose = head * GROUP + rows % GROUP
    live = token < count
    d = tl.arange(0, KD)
    e = tl.arange(0, VD)
    at_query = (start + token).to(tl.int64) * q_token + whose.to(tl.int64) * q_head
    q = tl.load(query + at_query[:, None] + d[None, :], mask=live[:, None] & (d < KEY_DIM)[None, :], other=0.0)
    table = tables + span.to(tl.int64) * width
    if CODES:
        factor = factor * tl.load(key_scale + (head if KEY_SCALES else 0))

    top = tl.full([BM], float("-inf"), tl.float32)
    weight = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, VD], tl.float32)
    for first in range(begin, high, BN):
        n = first + tl.arange(0, BN)
        inside = (n >= low) & (n < high)
        block = tl.load(table + n // BLOCK, mask=inside, other=0)
        line = (block.to(tl.int64) * BLOCK + n % BLOCK) * HEADS + head
        k = tl.load(keys + line[:, None] * KEY_DIM + d[None, :], mask=inside[:, None] & (d < KEY_DIM)[None, :], other=0)
        scores = product(q, tl.trans(numbers(k, q, CODES, EXACT)), tl.zeros([BM, BN], tl.float32), EXACT) * factor
        if CAP:  # tanh
            scores = (1.0 - 2.0 / (tl.exp2(scores) + 1.0)) * cap
        seen = inside[None, :] & (n[None, :] <= place[:, None]) & (n[None, :] > place[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        most = tl.maximum(top, tl.max(scores, axis=1))
        base = tl.where(most == float("-inf"), 0.0, most)  # of a row that has not seen anything yet
        p = numbers(tl.exp2(scores - base[:, None]), q, False, EXACT)  # rounded, and as that in both sums
        again = tl.exp2(top - base)
        weight = weight * again + tl.sum(p.to(tl.float32), axis=1)
        v = tl.load(
            values + line[:, None] * VALUE_DIM + e[None, :], mask=inside[:, None] & (e < VALUE_DIM)[None, :], other=0
        )
        acc = product(p, numbers(v, q, CODES, EXACT), acc * again[:, None], EXACT)
        top = most

    wide = live[:, None] & (e < VALUE_DIM)[None, :]
    if DIRECT:
        sink = tl.load(sinks + whose, mask=live, other=0.0).to(tl.float32) if SINKS else top
        y = finished(top, weight, acc, sink, SINKS)
        if CODES:
            y = y * tl.load(value_scale + (head if VALUE_SCALES else 0))
        line = (start + token).to(tl.int64) * (HEADS * GROUP) + whose
        put(out, line[:, None] * VALUE_DIM + e[None, :], y, wide)
    else:
        line = ((tl.load(places + span).to(tl.int32) + token).to(tl.int64) * (HEADS * GROUP) + whose) * parts
        line += tl.program_id(1)
        lines = tokens.to(tl.int64) * parts * (HEADS * GROUP)
        tl.store(out + line[:, None] * VALUE_DIM + e[None, :], acc, mask=wide)
        tl.store(out + lines * VALUE_DIM + line, top, mask=live)
        tl.store(out + lines * (VALUE_DIM + 1) + line, weight, mask=live)


@triton.jit(do_not_specialize=["starts", "totals", "places", "window", "most", "tokens", "parts"])
def parts_kernel(
    out: tl.tensor,
    sums: tl.tensor,
    value_scale: tl.tensor,
    sinks: tl.tensor,
    starts: tl.tensor,
    totals: tl.tensor,
    places: tl.tensor,
    window: tl.tensor,
    most: tl.tensor,
    tokens: tl.tensor,
    parts: tl.tensor,
    FEW: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CODES: tl.constexpr,
    VALUE_SCALES: tl.constexpr,
    SINKS: tl.constexpr,
    BN: tl.constexpr,
    VD: tl.constexpr,
    PARTS: tl.constexpr,
    LEAST: tl.constexpr,
) -> None:
    """``out [T, HEADS * GROUP, VALUE_DIM]`` of spans of at most FEW queries from the ``sums`` of their parts.

    Program (query ``i % most`` of span ``i // most``, head of queries).
    """
    span = tl.program_id(0) // most
    token = tl.program_id(0) % most
    head = tl.program_id(1)
    start = tl.load(starts + span).to(tl.int32)
    count = tl.load(starts + span + 1).to(tl.int32) - start
    if (count > FEW) | (token >= count):
        return
    total = tl.load(totals + span).to(tl.int32)
    begin = begin_of(count, total, window, BN)
    part = tl.arange(0, PARTS)[None, :]
    live = part < tl.cdiv(total - begin, length_of(begin, total, BN, PARTS, LEAST))
    line = ((tl.load(places + span).to(tl.int32) + token).to(tl.int64) * (HEADS * GROUP) + head) * parts + part
    lines = tokens.to(tl.int64) * parts * (HEADS * GROUP)
    e = tl.arange(0, VD)[None, None, :]
    tops = tl.load(sums + lines * VALUE_DIM + line, mask=live, other=float("-inf"))
    weights = tl.load(sums + lines * (VALUE_DIM + 1) + line, mask=live, other=0.0)
    means = tl.load(sums + line[:, :, None] * VALUE_DIM + e, mask=live[:, :, None] & (e < VALUE_DIM), other=0.0)
    top = tl.max(tops, axis=1)
    share = tl.exp2(tops - top[:, None])
    weight = tl.sum(weights * share, axis=1)
    acc = tl.sum(means * share[:, :, None], axis=1)
    sink = tl.load(sinks + head + tl.zeros([1], tl.int32)).to(tl.float32) if SINKS else top
    y = finished(top, weight, acc, sink, SINKS)
    if CODES:
        y = y * tl.load(value_scale + (head // GROUP if VALUE_SCALES else 0))
    at = tl.arange(0, VD)[None, :]
    place = (start + token).to(tl.int64) * (HEADS * GROUP) + head
    put(out, place * VALUE_DIM + at, y, at < VALUE_DIM)


@triton.jit
def stored(x: tl.tensor, scale: tl.tensor, CODES: tl.constexpr, CODEC: tl.constexpr) -> tl.tensor:
    """Numbers as the pages have them: with CODES the codes of x / scale, saturating, NaN for NaN."""
    if CODES:
        y = tl.div_rn(x.to(tl.float32), scale)
        code = encode_signed(y, tl.full(y.shape, 1.0, tl.float32), CODEC)
        x = tl.where(y != y, (code & 128) | 127, code).to(tl.uint8)
    return x


@triton.jit(do_not_specialize=["slots"])
def store_kernel(
    keys: tl.tensor,
    values: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    key_scale: tl.tensor,
    value_scale: tl.tensor,
    slots: tl.tensor,
    k_token: tl.tensor,
    k_head: tl.tensor,
    v_token: tl.tensor,
    v_head: tl.tensor,
    HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CODES: tl.constexpr,
    KEY_SCALES: tl.constexpr,
    VALUE_SCALES: tl.constexpr,
    CODEC: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Program (token, LANES numbers of its keys and of its values): puts them where the slot of the token is."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * LANES + tl.arange(0, LANES)
    slot = tl.load(slots + token)
    head = at // KEY_DIM
    live = head < HEADS
    x = tl.load(key + token * k_token + head.to(tl.int64) * k_head + at % KEY_DIM, mask=live, other=0.0)
    scale = tl.load(key_scale + (head if KEY_SCALES else head * 0), mask=live, other=1.0) if CODES else 1.0
    tl.store(keys + slot * (HEADS * KEY_DIM) + at, stored(x, scale, CODES, CODEC), mask=live)
    head = at // VALUE_DIM
    live = head < HEADS
    x = tl.load(value + token * v_token + head.to(tl.int64) * v_head + at % VALUE_DIM, mask=live, other=0.0)
    scale = tl.load(value_scale + (head if VALUE_SCALES else head * 0), mask=live, other=1.0) if CODES else 1.0
    tl.store(values + slot * (HEADS * VALUE_DIM) + at, stored(x, scale, CODES, CODEC), mask=live)
