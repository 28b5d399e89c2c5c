"""Products with packed weights in Triton: bytes are read once, decoded in registers, summed in float32.

A weight is its inner part (codes and block scales) times one float32 factor a row, which multiplies the sums. Two
kernels, by the number of rows of x:

    lanes   few rows: every lane keeps its own float32 sums over K, which meet in a tree at the end; nothing is padded
    tiles   more rows: ``tl.dot`` of decoded tiles, the weight on the left, so that few rows of x pad few columns

For many rows ``unpack`` decodes a weight once, for a product of torch's.

Both may cut K into parts, whose sums `parts` adds in order: no atomics, the same bits each time. The inner numbers are
bfloat16 numbers exactly, but for scales that are bfloat16 numbers themselves (FP8 in blocks of 128x128): these multiply
codes in float32 in `lanes`, and the sums of each block in `tiles`. A float16 x enters `tiles` as the sum of two
bfloat16 numbers, exactly.

Constants: BITS of a code; KIND of the scales (0 none, 1 E4M3, 2 E8M0, 3 numbers); GROUP bytes of codes that share a
scale, SCALE_ROWS rows that do; FACTOR 0 for none, 1 for one, 2 for one each row; BN rows, BYTES bytes of a tile of the
weight. Fused multiply-adds are welcome, all that is decoded being exact. Knows numbers and addresses; must not know
formats by name. Imports Triton: import it from inside functions.
"""

import triton
import triton.language as tl

from ptqpipe.kernels.triton_codecs import bfloat16_bits, decode_e8m0

_E2M1_BITS = tl.constexpr(0x81C00000 - (1 << 32))  # sign, two bits of exponent and one of mantissa in a float32
_E4M3_BITS = tl.constexpr(0x87F00000 - (1 << 32))


@triton.jit
def e2m1(nibble: tl.tensor) -> tl.tensor:
    """float32 of int32 whose top four bits are a code: its bits are those of a float32, subnormals too, times 2^126."""
    return ((nibble >> 6) & _E2M1_BITS).to(tl.float32, bitcast=True) * 2.0**126


@triton.jit
def e4m3(code: tl.tensor) -> tl.tensor:
    """float32 of int32 codes 0..255, as in `e2m1` with 2^120; NaN for 127 and 255."""
    value = (((code << 24) >> 4) & _E4M3_BITS).to(tl.float32, bitcast=True) * 2.0**120
    return tl.where((code & 127) == 127, float("nan"), value)


@triton.jit
def scales_of(
    scales: tl.tensor,
    rows: tl.tensor,
    live: tl.tensor,
    block: tl.tensor,
    blocks: tl.tensor,
    KIND: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
) -> tl.tensor:
    """float32 ``[BN, G]``: the scales of ``rows [BN]`` at the columns ``block [G]`` of a grid of ``blocks`` columns."""
    at = (rows // SCALE_ROWS).to(tl.int64)[:, None] * blocks + block[None, :]
    code = tl.load(scales + at, mask=live[:, None] & (block < blocks)[None, :], other=0)
    if KIND == 1:
        value = e4m3(code.to(tl.int32))
    elif KIND == 2:
        value = decode_e8m0(code.to(tl.int32))
    else:
        value = code.to(tl.float32)
    return value


@triton.jit
def times(values: tl.tensor, scale: tl.tensor, BN: tl.constexpr, BYTES: tl.constexpr, RUN: tl.constexpr) -> tl.tensor:
    """``values [BN, BYTES]`` times ``scale [BN, BYTES / RUN]``, each for RUN columns."""
    return tl.reshape(tl.reshape(values, (BN, BYTES // RUN, RUN)) * scale[:, :, None], (BN, BYTES))


@triton.jit
def decoded(
    data: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    live: tl.tensor,
    first: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    blocks: tl.tensor,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BN: tl.constexpr,
    BYTES: tl.constexpr,
    RUN: tl.constexpr,
) -> tl.tuple:
    """Two times float32 ``[BN, BYTES]``, the low and the high code of each byte; twice the same where a byte is one.

    Bytes ``[first, first + BYTES)`` of each row; zero where there is none. KIND 0 leaves the codes' values. A scale
    is read for RUN bytes, a divisor of GROUP; where that is 4, a lane reads no more at once than four bytes of a row,
    so that four warps lie side by side, and what belongs to a column already is where it is needed.
    """
    at = first + tl.arange(0, BYTES)
    if RUN == 4:
        at = tl.max_contiguous(tl.multiple_of(at, 4), 4)
    inside = live[:, None] & (at < width)[None, :]
    byte = tl.load(data + rows.to(tl.int64)[:, None] * stride + at[None, :], mask=inside, other=0).to(tl.int32)
    if BITS == 4:
        low = e2m1(byte << 28)
        high = e2m1((byte >> 4) << 28)
    else:
        low = e4m3(byte)
        high = low
    if KIND != 0:
        block = (first + RUN * tl.arange(0, BYTES // RUN)) // GROUP
        scale = scales_of(scales, rows, live, block, blocks, KIND, SCALE_ROWS)
        low = times(low, scale, BN, BYTES, RUN)
        high = times(high, scale, BN, BYTES, RUN) if BITS == 4 else low
    return low, high


@triton.jit
def halves(word: tl.tensor, FLOAT16: tl.constexpr) -> tl.tuple:
    """float32 of the two 16-bit numbers of int32 words, the low one first."""
    if FLOAT16:
        low = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        high = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        low = (word << 16).to(tl.float32, bitcast=True)
        high = (word & -65536).to(tl.float32, bitcast=True)
    return low, high


@triton.jit
def finished(
    sums: tl.tensor, factor: tl.tensor, bias: tl.tensor, n: tl.tensor, live: tl.tensor,
    FACTOR: tl.constexpr, BIAS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """float32 sums times the factor of their row, plus the bias."""
    if FACTOR == 1:
        sums = sums * tl.load(factor)
    elif FACTOR == 2:
        sums = sums * tl.load(factor + n, mask=live, other=0.0)
    if BIAS:
        sums = sums + tl.load(bias + n, mask=live, other=0.0).to(tl.float32)
    return sums


@triton.jit
def put(out: tl.tensor, at: tl.tensor, value: tl.tensor, live: tl.tensor) -> None:
    """Stores float32 as float32 or float16, or where ``out`` is int16 as the bits of bfloat16."""
    if out.dtype.element_ty == tl.int16:
        tl.store(out + at, bfloat16_bits(value), mask=live)
    else:
        tl.store(out + at, value.to(out.dtype.element_ty), mask=live)


@triton.jit
def lanes_kernel(
    out: tl.tensor,
    x: tl.tensor,
    data: tl.tensor,
    scales: tl.tensor,
    factor: tl.tensor,
    bias: tl.tensor,
    n: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    blocks: tl.tensor,
    chunk: tl.tensor,
    M: tl.constexpr,
    FLOAT16: tl.constexpr,
    FACTOR: tl.constexpr,
    BIAS: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BN: tl.constexpr,
    BYTES: tl.constexpr,
) -> None:
    """``out [parts, M, n]``: program (i, part) sums ``chunk`` bytes of BN rows of the weight for every row of x.

    x    of M rows of ``width`` items: int32 words of two numbers for codes of 4 bits, else numbers
    """
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    live = rows < n
    begin = tl.program_id(1) * chunk
    acc: tl.tuple = ()
    for _ in tl.static_range(M):
        acc = acc + (tl.zeros([BN, BYTES], tl.float32),)  # noqa: RUF005 - Triton has no starred tuples
    for first in range(begin, tl.minimum(begin + chunk, width), BYTES):
        low, high = decoded(
            data, scales, rows, live, first, width, stride, blocks, BITS, KIND, GROUP, SCALE_ROWS, BN, BYTES, 4
        )
        at = first + tl.arange(0, BYTES)
        sums: tl.tuple = ()
        for m in tl.static_range(M):
            item = tl.load(x + m * width + at, mask=at < width, other=0)
            if BITS == 4:
                even, odd = halves(item, FLOAT16)
                now = acc[m] + low * even[None, :] + high * odd[None, :]
            else:
                now = acc[m] + low * item.to(tl.float32)[None, :]
            sums = sums + (now,)  # noqa: RUF005
        acc = sums
    for m in tl.static_range(M):
        total = finished(tl.sum(acc[m], axis=1), factor, bias, rows, live, FACTOR, BIAS)
        put(out, (tl.program_id(1) * M + m).to(tl.int64) * n + rows, total, live)


@triton.jit
def product(w: tl.tensor, x: tl.tensor, acc: tl.tensor, EXACT: tl.constexpr) -> tl.tensor:
    """``acc [BN, BM] + w [BN, BK] @ x [BK, BM]``: float32 w whose numbers fit bfloat16, x bfloat16 or float16.

    EXACT multiplies in float32 instead, the same products: the interpreter cannot multiply bfloat16.
    """
    if EXACT:
        return tl.dot(w, x.to(tl.float32), acc, input_precision="ieee")
    if x.dtype == tl.bfloat16:
        return tl.dot(w.to(tl.bfloat16), x, acc)
    whole = x.to(tl.float32)
    top = whole.to(tl.bfloat16)
    # The 11 bits of a float16 are 8 and 3; an inf is all in the first part.
    rest = tl.where(top.to(tl.float32) == whole, 0.0, whole - top.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(w.to(tl.bfloat16), top, tl.dot(w.to(tl.bfloat16), rest, acc))


@triton.jit
def tiles_kernel(
    out: tl.tensor,
    x: tl.tensor,
    data: tl.tensor,
    scales: tl.tensor,
    factor: tl.tensor,
    bias: tl.tensor,
    m: tl.tensor,
    n: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    blocks: tl.tensor,
    chunk: tl.tensor,
    EXACT: tl.constexpr,
    FACTOR: tl.constexpr,
    BIAS: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BYTES: tl.constexpr,
) -> None:
    """``out [parts, m, n]``: program (i, part) sums ``chunk`` bytes of BN rows of the weight for all rows of x.

    There are at most BM of these. Where scales are numbers, BYTES is a part of GROUP, and the scale of a block
    multiplies the sums of that part.
    """
    PER: tl.constexpr = 8 // BITS
    BK: tl.constexpr = BYTES * PER
    rows, tokens = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BM)
    live = rows < n
    begin = tl.program_id(1) * chunk
    lines = x + tokens.to(tl.int64)[:, None] * (width * PER)
    acc = tl.zeros([BN, BM], tl.float32)
    for first in range(begin, tl.minimum(begin + chunk, width), BYTES):
        EARLY: tl.constexpr = 0 if KIND == 3 else KIND
        low, high = decoded(
            data, scales, rows, live, first, width, stride, blocks, BITS, EARLY, GROUP, SCALE_ROWS, BN, BYTES, GROUP
        )
        w = tl.reshape(tl.join(low, high), (BN, BK)) if BITS == 4 else low
        at = first * PER + tl.arange(0, BK)
        inputs = tl.load(lines + at[None, :], mask=(tokens < m)[:, None] & (at < width * PER)[None, :], other=0.0)
        if KIND == 3:
            block = first // GROUP + tl.arange(0, 1)
            scale = scales_of(scales, rows, live, block, blocks, KIND, SCALE_ROWS)
            acc += product(w, tl.trans(inputs), tl.zeros([BN, BM], tl.float32), EXACT) * scale
        else:
            acc = product(w, tl.trans(inputs), acc, EXACT)
    total = finished(acc, factor, bias, rows[:, None], live[:, None], FACTOR, BIAS)
    at = (tl.program_id(1) * m + tokens).to(tl.int64)[None, :] * n + rows[:, None]
    put(out, at, total, live[:, None] & (tokens < m)[None, :])


@triton.jit
def unpack_kernel(
    out: tl.tensor,
    data: tl.tensor,
    scales: tl.tensor,
    n: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    blocks: tl.tensor,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    BN: tl.constexpr,
    BYTES: tl.constexpr,
    RUN: tl.constexpr,
) -> None:
    """The bits of bfloat16 ``out [n, width * 8 / BITS]``: the inner numbers of BN rows, BYTES bytes of each."""
    PER: tl.constexpr = 8 // BITS
    rows = tl.program_id(1) * BN + tl.arange(0, BN)
    live = rows < n
    first = tl.program_id(0) * BYTES
    low, high = decoded(
        data, scales, rows, live, first, width, stride, blocks, BITS, KIND, GROUP, SCALE_ROWS, BN, BYTES, RUN
    )
    values = tl.reshape(tl.join(low, high), (BN, BYTES * PER)) if BITS == 4 else low
    at = first * PER + tl.arange(0, BYTES * PER)
    there = rows.to(tl.int64)[:, None] * (width * PER) + at[None, :]
    tl.store(out + there, bfloat16_bits(values), mask=live[:, None] & (at < width * PER)[None, :])


@triton.jit
def parts_kernel(
    out: tl.tensor,
    sums: tl.tensor,
    factor: tl.tensor,
    bias: tl.tensor,
    count: tl.tensor,
    n: tl.tensor,
    PARTS: tl.constexpr,
    FACTOR: tl.constexpr,
    BIAS: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """``out [count]``: the float32 ``sums [PARTS, count]`` added from the first part to the last, then finished."""
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    live = at < count
    total = tl.load(sums + at, mask=live, other=0.0)
    for part in tl.static_range(1, PARTS):
        total += tl.load(sums + part * count + at, mask=live, other=0.0)
    put(out, at, finished(total, factor, bias, at % n, live, FACTOR, BIAS), live)
