"""Products with packed weights in Triton: codes are read once, decoded in registers, summed in float32.

A weight is its inner part (codes and block scales) times one float32 factor a row, which multiplies the sums. It is
read in *items* of 16 bits: four codes of 4 bits, or two of 8. The first codes of all items of a tile are one operand of
``tl.dot``, the second codes another, and so on, each with those numbers of x that it multiplies; so no code has to move
to where its neighbours in K are. The weight is on the left, so that few rows of x pad few columns. For many rows
``unpack`` decodes a weight once, for a product of torch's.

`tiles_kernel` may cut K into parts, whose sums `parts_kernel` adds in order: no atomics, the same bits each time. The
inner numbers are bfloat16 numbers exactly, but for scales that are bfloat16 or float32 numbers themselves (FP8 in
blocks of 128x128): these multiply the sums of each block. A float16 x enters as the sum of two bfloat16 numbers,
exactly.

A device decodes two codes at once, in the halves of a register: the bits of a code are put where a bfloat16 has its
sign, the low bits of its exponent and the high ones of its mantissa, which makes a number, subnormals too, that is a
power of two too small; a product with another power of two, or with a scale that has it, makes that good. No step
rounds.

Constants: BITS of a code; KIND of the scales (0 none, 1 E4M3, 2 E8M0, 3 numbers); GROUP items of codes that share a
scale, SCALE_ROWS rows that do; FACTOR 0 for none, 1 for one, 2 for one each row; BN rows, ITEMS items of a tile of the
weight; EXACT for float32 in place of bfloat16 and of the device's own instructions, the same numbers: Triton's
interpreter has neither. Fused multiply-adds are welcome, all that is decoded being exact. Knows numbers and addresses;
must not know formats by name. Imports Triton: import it from inside functions.
"""

import triton
import triton.language as tl

from ptqpipe.numerics.kernels.triton_codecs import bfloat16_bits, decode_e8m0

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
def pairs_of_e2m1(item: tl.tensor) -> tl.tuple:
    """bfloat16 of the four codes of int16 items, the lowest bits first, times 2^-126.

    Shifted until a code has the upper four bits of its half, bit 15 is its sign, and six places below, its other bits
    are those of an exponent and a mantissa.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 at, low;
        shl.b32 at, $4, 12;
        shr.u32 low, at, 6;
        lop3.b32 low, at, low, 0x80008000, 0xE4;
        and.b32 $0, low, 0x81C081C0;
        shl.b32 at, $4, 8;
        shr.u32 low, at, 6;
        lop3.b32 low, at, low, 0x80008000, 0xE4;
        and.b32 $1, low, 0x81C081C0;
        shl.b32 at, $4, 4;
        shr.u32 low, at, 6;
        lop3.b32 low, at, low, 0x80008000, 0xE4;
        and.b32 $2, low, 0x81C081C0;
        shr.u32 low, $4, 6;
        lop3.b32 low, $4, low, 0x80008000, 0xE4;
        and.b32 $3, low, 0x81C081C0;
        }
        """,
        "=&r,=&r,=&r,=r,r",
        [item],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def pairs_of_e4m3(item: tl.tensor) -> tl.tuple:
    """bfloat16 of the two codes of int16 items, as in `pairs_of_e2m1` with 2^-120; NaN for 127 and 255.

    Seven bits that are all ones overflow into bit 15 when one is added: less its own 512th, that has a NaN's bits.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 at, low, nan, less;
        shl.b32 at, $2, 8;
        shr.u32 low, at, 4;
        lop3.b32 low, at, low, 0x80008000, 0xE4;
        and.b32 low, low, 0x87F087F0;
        and.b32 nan, at, 0x7F007F00;
        add.u32 nan, nan, 0x01000100;
        and.b32 nan, nan, 0x80008000;
        shr.u32 less, nan, 9;
        sub.u32 nan, nan, less;
        or.b32 $0, low, nan;
        shr.u32 low, $2, 4;
        lop3.b32 low, $2, low, 0x80008000, 0xE4;
        and.b32 low, low, 0x87F087F0;
        and.b32 nan, $2, 0x7F007F00;
        add.u32 nan, nan, 0x01000100;
        and.b32 nan, nan, 0x80008000;
        shr.u32 less, nan, 9;
        sub.u32 nan, nan, less;
        or.b32 $1, low, nan;
        }
        """,
        "=&r,=r,r",
        [item],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def pairs_times(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """``a * b`` of bfloat16, two products an instruction, subnormals kept; a sum with -0, which devices before Hopper
    have, too."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }",
        "=r,r,r",
        [a, b],
        dtype=tl.bfloat16,
        is_pure=True,
        pack=2,
    )


@triton.jit
def each_of(scale: tl.tensor, BN: tl.constexpr, ITEMS: tl.constexpr, GROUP: tl.constexpr) -> tl.tensor:
    """``scale [BN, ITEMS / GROUP]`` for each item, ``[BN, ITEMS]``."""
    wide = tl.broadcast_to(scale[:, :, None], (BN, ITEMS // GROUP, GROUP))
    return tl.reshape(wide, (BN, ITEMS))


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
    ITEMS: tl.constexpr,
    EXACT: tl.constexpr,
) -> tl.tuple:
    """The first, second, ... numbers of items ``[first, first + ITEMS)`` of each row, ``[BN, ITEMS]`` each: float32 if
    EXACT, else bfloat16, which with KIND 1 are 2^-8 (2^-2 of 8 bits) of the numbers.

    Zero where there is no item. KIND 0 leaves the codes' values.
    """
    at = first + tl.arange(0, ITEMS)
    inside = live[:, None] & (at < width)[None, :]
    item = tl.load(data + rows.to(tl.int64)[:, None] * stride + at[None, :], mask=inside, other=0)
    if KIND != 0:
        block = first // GROUP + tl.arange(0, ITEMS // GROUP)
        scale = scales_of(scales, rows, live, block, blocks, KIND, SCALE_ROWS)
    numbers: tl.tuple = ()
    if EXACT:
        word = item.to(tl.int32)
        for place in tl.static_range(16 // BITS):
            value = e2m1((word >> (4 * place)) << 28) if BITS == 4 else e4m3((word >> (8 * place)) & 255)
            if KIND != 0:
                value = value * each_of(scale, BN, ITEMS, GROUP)
            numbers = numbers + (value,)  # noqa: RUF005 - Triton has no starred tuples
    else:
        codes = pairs_of_e2m1(item) if BITS == 4 else pairs_of_e4m3(item)
        if KIND == 1:
            more = each_of((scale * 2.0**118).to(tl.bfloat16), BN, ITEMS, GROUP)
        else:
            more = tl.full([BN, ITEMS], 2.0**126 if BITS == 4 else 2.0**120, tl.bfloat16)
        for place in tl.static_range(16 // BITS):
            value = pairs_times(codes[place], more)
            if KIND == 2:
                value = pairs_times(value, each_of(scale.to(tl.bfloat16), BN, ITEMS, GROUP))
            numbers = numbers + (value,)  # noqa: RUF005
    return numbers


@triton.jit
def parted(x: tl.tensor, ROWS: tl.constexpr, ITEMS: tl.constexpr, PER: tl.constexpr) -> tl.tuple:
    """Splits ``x [ROWS, PER * ITEMS]`` into PER of ``[ROWS, ITEMS]``: the first codes of all items, the second, ..."""
    parts: tl.tuple = tl.split(tl.reshape(x, (ROWS, ITEMS, 2, 2) if PER == 4 else (ROWS, ITEMS, 2)))
    if PER == 4:
        one, three = tl.split(parts[0])
        two, four = tl.split(parts[1])
        parts = (one, two, three, four)
    return parts


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
def product(w: tl.tensor, x: tl.tensor, acc: tl.tensor, EXACT: tl.constexpr) -> tl.tensor:
    """``acc [BN, BM] + w [BN, ITEMS] @ x [ITEMS, BM]``, x bfloat16 or float16."""
    if EXACT:
        return tl.dot(w, x.to(tl.float32), acc, input_precision="ieee")
    if x.dtype == tl.bfloat16:
        return tl.dot(w, x, acc)
    whole = x.to(tl.float32)
    top = whole.to(tl.bfloat16)
    # The 11 bits of a float16 are 8 and 3; an inf is all in the first part.
    rest = tl.where(top.to(tl.float32) == whole, 0.0, whole - top.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(w, top, tl.dot(w, rest, acc))


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
    ITEMS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """``out [parts, m, n]``: program (i, part) sums ``chunk`` items of BN rows of the weight for all rows of x.

    There are at most BM of these. Where scales are numbers, ITEMS is a part of GROUP, and the scale of a block
    multiplies the sums of that part.
    """
    PER: tl.constexpr = 16 // BITS
    EARLY: tl.constexpr = 0 if KIND == 3 else KIND
    rows, tokens = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BM)
    live = rows < n
    begin = tl.program_id(1) * chunk
    lines = x + tokens.to(tl.int64)[:, None] * (width * PER)
    acc = tl.zeros([BN, BM], tl.float32)
    for first in tl.range(begin, tl.minimum(begin + chunk, width), ITEMS, num_stages=STAGES):
        w = decoded(
            data, scales, rows, live, first, width, stride, blocks, BITS, EARLY, GROUP, SCALE_ROWS, BN, ITEMS, EXACT
        )
        at = first * PER + tl.arange(0, ITEMS * PER)
        inputs = tl.load(lines + at[None, :], mask=(tokens < m)[:, None] & (at < width * PER)[None, :], other=0.0)
        part = parted(inputs, BM, ITEMS, PER)
        sums = tl.zeros([BN, BM], tl.float32) if KIND == 3 else acc
        for place in tl.static_range(PER):
            sums = product(w[place], tl.trans(part[place]), sums, EXACT)
        if KIND == 3:
            block = first // GROUP + tl.arange(0, 1)
            acc += sums * scales_of(scales, rows, live, block, blocks, KIND, SCALE_ROWS)
        else:
            acc = sums
    if KIND == 1 and not EXACT:
        acc = acc * (2.0**8 if BITS == 4 else 2.0**2)
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
    ITEMS: tl.constexpr,
) -> None:
    """The bits of bfloat16 ``out [n, width * 16 / BITS]``: the inner numbers of BN rows, ITEMS items of each."""
    PER: tl.constexpr = 16 // BITS
    rows = tl.program_id(1) * BN + tl.arange(0, BN)
    live = rows < n
    first = tl.program_id(0) * ITEMS
    w = decoded(data, scales, rows, live, first, width, stride, blocks, BITS, KIND, GROUP, SCALE_ROWS, BN, ITEMS, True)
    joined = tl.join(w[0], w[1]) if PER == 2 else tl.join(tl.join(w[0], w[2]), tl.join(w[1], w[3]))
    values = tl.reshape(joined, (BN, ITEMS * PER))
    at = first * PER + tl.arange(0, ITEMS * PER)
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
