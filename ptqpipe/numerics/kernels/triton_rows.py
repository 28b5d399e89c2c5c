"""Elementwise Triton kernels: decode, the error of a decode, FP8 codes under given scales, the largest magnitude.

They mirror ``QTensor.dequantize``, ``qtensor.squared_error``, ``qtensor.encode`` and ``check_finite``'s amax. Elements
are counted flat, in int32, over pieces of whole rows of at most 2^30 elements. Knows formats; must not know searches,
files or containers. Imports Triton: import it from inside functions.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ptqpipe.numerics.formats import Codec, Format
from ptqpipe.numerics.kernels.triton_codecs import (
    Minifloat,
    bfloat16_bits,
    decode_e8m0,
    decode_signed,
    encode_signed,
    minifloat_of,
)

PIECE = 1 << 30
_NUMBERS, _POWERS, _MINIFLOATS = 0, 1, 2  # kinds of scales
_NO_MINIFLOAT = Minifloat(0, 0, 0, 0.0)


class RowPlan(NamedTuple):
    """Kernel constants of a format: its elements, what a scale's bytes mean, whether the global scale divides."""

    element: Minifloat
    scale_kind: int
    scale: Minifloat
    divides: bool


def plan_of(fmt: Format, *, global_divides: bool) -> RowPlan | None:
    """The constants of a format that the kernels cover, or None."""
    element, scale = minifloat_of(fmt.element), _scale_of(fmt.scale)
    if element is None or scale is None or fmt.element.bits not in (4, 6, 8):
        return None
    return RowPlan(element, *scale, global_divides)


def _scale_of(codec: Codec) -> tuple[int, Minifloat] | None:
    """(kind, constants) of a scale codec. An unsigned codec gets a sign bit above its byte, which is never set."""
    if codec.name == "e8m0":
        return _POWERS, _NO_MINIFLOAT
    if not codec.enumerable:
        return _NUMBERS, _NO_MINIFLOAT
    if codec.name == "ue5m3":
        return _MINIFLOATS, Minifloat(codec.bits + 1, -14, 3, codec.max)
    minifloat = minifloat_of(codec)
    return None if minifloat is None else (_MINIFLOATS, minifloat)


@triton.jit
def block_scale(
    scales: tl.tensor,
    at: tl.tensor,
    live: tl.tensor,
    g: tl.tensor,
    PLAN: tl.constexpr,
) -> tl.tensor:
    """float32 ``value(scale) * global_scale``, or ``value(scale) / global_scale`` where it divides."""
    SCALE: tl.constexpr = PLAN.scale
    code = tl.load(scales + at, mask=live, other=0)
    if PLAN.scale_kind == 0:
        value = code.to(tl.float32)
    elif PLAN.scale_kind == 1:
        value = decode_e8m0(code.to(tl.int32))
    else:
        value = decode_signed(code.to(tl.int32), SCALE)
    global_scale = tl.load(g + at * 0)
    return tl.div_rn(value, global_scale) if PLAN.divides else value * global_scale


@triton.jit
def block_of(at: tl.tensor, geometry: tl.tuple) -> tl.tensor:
    """Which scale the elements ``at`` have, of a `Geometry`."""
    row = at // geometry.columns
    return row // geometry.block_rows * geometry.grid_columns + (at - row * geometry.columns) // geometry.block_columns


@triton.jit
def decoded(
    data: tl.tensor,
    scales: tl.tensor,
    g: tl.tensor,
    at: tl.tensor,
    live: tl.tensor,
    geometry: tl.tuple,
    PLAN: tl.constexpr,
) -> tl.tensor:
    """float32 values of the elements ``at``: ``value(code) * (value(scale) * global_scale)``."""
    ELEMENT: tl.constexpr = PLAN.element
    BITS: tl.constexpr = ELEMENT.bits
    bit = (at & 7) * BITS
    byte = (at >> 3) * BITS + (bit >> 3)
    code = tl.load(data + byte, mask=live, other=0).to(tl.int32)
    if BITS == 6:
        code |= tl.load(data + byte + 1, mask=live & ((bit & 7) > 2), other=0).to(tl.int32) << 8
    code = (code >> (bit & 7)) & ((1 << BITS) - 1)
    return decode_signed(code, ELEMENT) * block_scale(scales, block_of(at, geometry), live, g, PLAN)


@triton.jit
def dequantize_kernel(
    out: tl.tensor,
    data: tl.tensor,
    scales: tl.tensor,
    g: tl.tensor,
    count: tl.tensor,
    geometry: tl.tuple,
    PLAN: tl.constexpr,
    BFLOAT16: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """``out`` ``[count]`` float32 or float16, or the bits of bfloat16 as int16: the decode, rounded to that dtype."""
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    live = at < count
    value = decoded(data, scales, g, at, live, geometry, PLAN)
    if BFLOAT16:
        tl.store(out + at, bfloat16_bits(value), mask=live)
    else:
        tl.store(out + at, value.to(out.dtype.element_ty), mask=live)


@triton.jit
def decode_error_kernel(
    sums: tl.tensor,
    w: tl.tensor,
    data: tl.tensor,
    scales: tl.tensor,
    g: tl.tensor,
    count: tl.tensor,
    geometry: tl.tuple,
    PLAN: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """``sums`` float64 ``[2, programs]``: sum (decode - w)^2 and sum w^2 of a program's elements."""
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    live = at < count
    value = decoded(data, scales, g, at, live, geometry, PLAN)
    x = tl.load(w + at, mask=live, other=0.0).to(tl.float64)
    d = tl.where(live, value.to(tl.float64) - x, 0.0)
    tl.store(sums + tl.program_id(0), tl.sum(d * d, axis=0))
    tl.store(sums + tl.num_programs(0) + tl.program_id(0), tl.sum(x * x, axis=0))


@triton.jit
def fp8_encode_kernel(
    data: tl.tensor,
    damaged: tl.tensor,
    w: tl.tensor,
    scales: tl.tensor,
    count: tl.tensor,
    geometry: tl.tuple,
    ELEMENT: tl.constexpr,
    LANES: tl.constexpr,
) -> None:
    """``data`` uint8 ``[count]``: 8-bit codes of ``w``; ``damaged`` is set to 1 where ``w`` is not finite."""
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    live = at < count
    scale = tl.load(scales + block_of(at, geometry), mask=live, other=1.0).to(tl.float32)
    x = tl.load(w + at, mask=live, other=0.0).to(tl.float32)
    r = tl.div_rn(tl.full([LANES], 1.0, tl.float32), scale)
    code = encode_signed(x, r, ELEMENT)
    tl.store(data + at, code.to(tl.uint8), mask=live)
    bad = (x.to(tl.int32, bitcast=True) & 0x7FFFFFFF) >= 0x7F800000
    tl.store(damaged + at * 0, tl.full([LANES], 1, tl.int32), mask=bad)


@triton.jit
def amax_kernel(highest: tl.tensor, w: tl.tensor, count: tl.tensor, LANES: tl.constexpr) -> None:
    """``highest`` int32 ``[programs]``: the largest float32 bits of |w|, which order as magnitudes do, NaN on top."""
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    x = tl.load(w + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(highest + tl.program_id(0), tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0))


class Geometry(NamedTuple):
    """Columns of a weight and of its scale grid, rows and columns of a block."""

    columns: int
    block_rows: int
    block_columns: int
    grid_columns: int

    @classmethod
    def of(cls, fmt: Format, shape: tuple[int, int]) -> "Geometry":
        """The geometry of a weight of this ``shape``; FormatError where blocks do not divide."""
        rows, columns = fmt.block_extent(shape)
        return cls(shape[1], rows, columns, fmt.scale_shape(shape)[1])

    def pieces(self, rows: int) -> Iterator[tuple[slice, slice]]:
        """(rows, rows of the scale grid) of pieces that flat int32 counts can address, on block edges."""
        step = max(1, PIECE // self.columns // self.block_rows) * self.block_rows
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            yield slice(start, stop), slice(start // self.block_rows, -(-stop // self.block_rows))


def dequantize(
    out: torch.Tensor,
    data: torch.Tensor,
    scales: torch.Tensor,
    g: torch.Tensor,
    *,
    plan: RowPlan,
    geometry: Geometry,
    lanes: int,
) -> None:
    """Fills contiguous ``out`` ``[N, K]``."""
    bfloat16 = out.dtype == torch.bfloat16
    for rows, grid in geometry.pieces(out.shape[0]):
        part = out[rows].view(torch.int16) if bfloat16 else out[rows]
        dequantize_kernel[(triton.cdiv(part.numel(), lanes),)](
            part, data[rows], scales[grid], g, part.numel(), geometry,
            PLAN=plan, BFLOAT16=bfloat16, LANES=lanes, enable_fp_fusion=False,
        )  # fmt: skip


def decode_error(
    w: torch.Tensor,
    data: torch.Tensor,
    scales: torch.Tensor,
    g: torch.Tensor,
    *,
    plan: RowPlan,
    geometry: Geometry,
    lanes: int,
) -> tuple[float, float]:
    """(sum (decode - w)^2, sum w^2), both float64, of contiguous ``w`` ``[N, K]``."""
    total = torch.zeros(2, dtype=torch.float64, device=w.device)
    for rows, grid in geometry.pieces(w.shape[0]):
        part = w[rows]
        programs = triton.cdiv(part.numel(), lanes)
        sums = torch.empty(2, programs, dtype=torch.float64, device=w.device)
        decode_error_kernel[(programs,)](
            sums, part, data[rows], scales[grid], g, part.numel(), geometry,
            PLAN=plan, LANES=lanes, enable_fp_fusion=False,
        )  # fmt: skip
        total += sums.sum(dim=1)
    squared, energy = total.tolist()
    return squared, energy


def fp8_encode(
    w: torch.Tensor, scales: torch.Tensor, *, element: Minifloat, geometry: Geometry, lanes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(data uint8 ``[N, K]``, damaged int32 ``[1]``) of contiguous ``w`` ``[N, K]`` and ``scales`` ``[N/bn, K/bk]``."""
    data = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    damaged = torch.zeros(1, dtype=torch.int32, device=w.device)
    for rows, grid in geometry.pieces(w.shape[0]):
        part = w[rows]
        fp8_encode_kernel[(triton.cdiv(part.numel(), lanes),)](
            data[rows], damaged, part, scales[grid], part.numel(), geometry,
            ELEMENT=element, LANES=lanes, enable_fp_fusion=False,
        )  # fmt: skip
    return data, damaged


def amax(w: torch.Tensor, *, lanes: int) -> torch.Tensor:
    """float32 0-d: max |w| of contiguous ``w``; NaN if it has one."""
    flat = w.reshape(-1)
    highs = []
    for start in range(0, flat.numel(), PIECE):
        part = flat[start : start + PIECE]
        programs = triton.cdiv(part.numel(), lanes)
        highest = torch.empty(programs, dtype=torch.int32, device=w.device)
        amax_kernel[(programs,)](highest, part, part.numel(), LANES=lanes, enable_fp_fusion=False)
        highs.append(highest.amax())
    return torch.stack(highs).amax().view(torch.float32)
