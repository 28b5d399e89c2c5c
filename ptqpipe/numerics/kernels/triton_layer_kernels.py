"""What a decoder layer does between its products in Triton: norms, rotary embedding, the gate; a token at a time.

    norm    RMSNorm of a row, of which a residual may be a part that is added first
    rotary  queries and keys of one token turned, keys and values put where its slot is
    gate    the activation of the gate, from a table of all bfloat16 numbers, times the other half

Numbers are bfloat16, read as such and written as their bits. They are rounded wherever torch's operators round, so that
every launch must say ``enable_fp_fusion=False``; sums are float32 in Triton's order. Knows numbers and addresses; must
not know layers. Imports Triton: import it from inside functions.
"""

import triton
import triton.language as tl

from ptqpipe.numerics.kernels.triton_codecs import bfloat16_bits


@triton.jit
def rounded(value: tl.tensor) -> tl.tensor:
    """float32 of the bfloat16 number next to it."""
    return (bfloat16_bits(value).to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def factor_of(x: tl.tensor, eps: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """float32: one over the root of the mean square of WIDTH numbers, behind which ``x`` has zeros."""
    return tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)


@triton.jit
def norm_kernel(
    out: tl.tensor,
    total: tl.tensor,
    x: tl.tensor,
    added: tl.tensor,
    weight: tl.tensor,
    x_row: tl.tensor,
    added_row: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Program (row): the norm of x ``[rows, WIDTH]``; with ADD of x plus ``added``, which ``total`` gets."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, LANES)
    live = at < WIDTH
    scale = tl.load(weight + at, mask=live, other=0.0).to(tl.float32)
    number = tl.load(x + row * x_row + at, mask=live, other=0.0).to(tl.float32)
    if ADD:
        number = rounded(number + tl.load(added + row * added_row + at, mask=live, other=0.0).to(tl.float32))
        tl.store(total + row * WIDTH + at, bfloat16_bits(number), mask=live)
    y = scale * rounded(number * factor_of(number, eps, WIDTH))
    tl.store(out + row * WIDTH + at, bfloat16_bits(y), mask=live)


@triton.jit
def normed(
    x: tl.tensor, factor: tl.tensor, weight: tl.tensor, at: tl.tensor, live: tl.tensor, NORM: tl.constexpr
) -> tl.tensor:
    """Numbers of a head times its factor and their weights; as they are without NORM."""
    if NORM:
        x = rounded(rounded(x * factor) * tl.load(weight + at, mask=live, other=0.0).to(tl.float32))
    return x


@triton.jit(do_not_specialize=["slots"])
def rotary_kernel(
    out: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    cosine: tl.tensor,
    sine: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    slots: tl.tensor,
    q_row: tl.tensor,
    k_row: tl.tensor,
    v_row: tl.tensor,
    query_eps: tl.tensor,
    key_eps: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    NORM: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """Program (token, head): the query's heads, turned, to out ``[T, HEADS, DIM]``; behind them the key's, turned, and
    the value's, to the slot of the token in pages ``[slots, KV_HEADS, DIM]``."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, LANES)
    live = at < DIM
    if head >= HEADS + KV_HEADS:
        head = head - HEADS - KV_HEADS
        number = tl.load(value + token * v_row + head * DIM + at, mask=live, other=0)
        tl.store(values + (tl.load(slots + token) * KV_HEADS + head) * DIM + at, number, mask=live)
    else:
        # Half a head away is the other number of the plane that is turned.
        other = tl.where(at < DIM // 2, at + DIM // 2, at - DIM // 2)
        c = tl.load(cosine + token * DIM + at, mask=live, other=0.0).to(tl.float32)
        s = tl.load(sine + token * DIM + at, mask=live, other=0.0).to(tl.float32)
        if head < HEADS:
            source, weight, eps = query + token * q_row + head * DIM, query_norm, query_eps
        else:
            source, weight, eps = key + token * k_row + (head - HEADS) * DIM, key_norm, key_eps
        x = tl.load(source + at, mask=live, other=0.0).to(tl.float32)
        y = tl.load(source + other, mask=live, other=0.0).to(tl.float32)
        factor = factor_of(x, eps, DIM) if NORM else eps
        x = normed(x, factor, weight, at, live, NORM)
        y = normed(y, factor, weight, other, live, NORM)
        y = tl.where(at < DIM // 2, -y, y)
        rotated = bfloat16_bits(rounded(x * c) + rounded(y * s))
        if head < HEADS:
            tl.store(out + (token * HEADS + head) * DIM + at, rotated, mask=live)
        else:
            slot = tl.load(slots + token)
            tl.store(keys + (slot * KV_HEADS + head - HEADS) * DIM + at, rotated, mask=live)


@triton.jit
def gate_kernel(
    out: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    table: tl.tensor,
    gate_row: tl.tensor,
    up_row: tl.tensor,
    width: tl.tensor,
    LANES: tl.constexpr,
) -> None:
    """Program (row, LANES numbers of it): of the bits of gate the table's number, times up; ``[rows, width]``."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * LANES + tl.arange(0, LANES)
    live = at < width
    bits = tl.load(gate + row * gate_row + at, mask=live, other=0).to(tl.int32) & 0xFFFF
    y = tl.load(up + row * up_row + at, mask=live, other=0.0).to(tl.float32)
    x = (tl.load(table + bits, mask=live, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    tl.store(out + row * width + at, bfloat16_bits(x * y), mask=live)
