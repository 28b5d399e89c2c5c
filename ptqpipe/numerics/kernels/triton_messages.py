"""The kernels and launches behind ``triton_collective.py``. Imports Triton: import it from inside functions."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ptqpipe.numerics.kernels.triton import interpreting

_ELEMENTS = 2048  # a program's
_RECIPROCAL = float(torch.tensor(1 / 127, dtype=torch.float64).float())


@triton.jit
def scale_of(top: tl.tensor, RECIPROCAL: tl.constexpr) -> tl.tensor:
    """float32 bits (int32) of the scale of blocks whose largest magnitude has the bits ``top``."""
    s = (top.to(tl.float32, bitcast=True) * RECIPROCAL).to(tl.int32, bitcast=True)
    s = (s + 0x7FFF + ((s >> 16) & 1)) & -65536
    s = tl.where(s < 0x00400000, 0, s)
    return tl.where(top >= 0x7F800000, 0x7FC00000, s)


@triton.jit
def codes_of(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """float32 whole numbers -127..127 of ``x [B, N]`` under float32 ``scale [B]``; 0 where that is 0 or NaN."""
    usable = scale > 0
    inverse = tl.div_rn(1.0, tl.where(usable, scale, 1.0))
    y = tl.where(usable[:, None], x * inverse[:, None], 0.0)
    y = tl.minimum(tl.maximum(y, -127.0), 127.0)
    return (y + 12582912.0) - 12582912.0  # float32's own rounding, ties to even


@triton.jit
def quantize(x: tl.tensor, RECIPROCAL: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """(codes as float32 ``[B, N]``, bits of the scales ``[B]``)."""
    top = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    bits = scale_of(top, RECIPROCAL)
    return codes_of(x, bits.to(tl.float32, bitcast=True)), bits


@triton.jit
def load_message(
    message: tl.tensor, at: tl.tensor, block: tl.tensor, live: tl.tensor, there: tl.tensor, blocks: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """float32 ``[B, N]``: the decoded values of a message."""
    codes = tl.load(message + at, mask=there, other=0).to(tl.int8, bitcast=True).to(tl.float32)
    scales = (message + blocks * BLOCK).to(tl.pointer_type(tl.int16))
    bits = tl.load(scales + block, mask=live, other=0).to(tl.int32) << 16
    return codes * bits.to(tl.float32, bitcast=True)[:, None]


@triton.jit
def store_message(
    message: tl.tensor, q: tl.tensor, bits: tl.tensor, at: tl.tensor, block: tl.tensor, live: tl.tensor,
    there: tl.tensor, blocks: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    tl.store(message + at, q.to(tl.int8).to(tl.uint8, bitcast=True), mask=there)
    scales = (message + blocks * BLOCK).to(tl.pointer_type(tl.int16))
    tl.store(scales + block, (bits >> 16).to(tl.int16), mask=live)


@triton.jit
def rounded(v: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """float32 to DTYPE, ties to even. By the bits for bfloat16, which the interpreter cuts off."""
    if DTYPE == tl.bfloat16:  # noqa: SIM300
        u = v.to(tl.int32, bitcast=True)
        near = (u + 0x7FFF + ((u >> 16) & 1)) >> 16
        near = tl.where(v != v, 0x7FC0, near)
        return near.to(tl.int16).to(tl.bfloat16, bitcast=True)
    return v.to(DTYPE)


@triton.jit
def encode_kernel(
    x: tl.tensor, message: tl.tensor, n: tl.tensor, blocks: tl.tensor, RECIPROCAL: tl.constexpr,
    BLOCK: tl.constexpr, LANES: tl.constexpr,
) -> None:  # fmt: skip
    """``x [n]`` to its message."""
    block = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    live = block < blocks
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    v = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32)
    q, bits = quantize(v, RECIPROCAL)
    store_message(message, q, bits, at, block, live, live[:, None] & (at >= 0), blocks, BLOCK)


@triton.jit
def decode_kernel(
    message: tl.tensor, out: tl.tensor, n: tl.tensor, blocks: tl.tensor, BLOCK: tl.constexpr, LANES: tl.constexpr
) -> None:
    """A message to ``out [n]``."""
    block = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    live = block < blocks
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    v = load_message(message, at, block, live, live[:, None] & (at >= 0), blocks, BLOCK)
    tl.store(out + at, rounded(v, out.dtype.element_ty), mask=at < n)


@triton.jit
def reduce_kernel(
    first: tl.tensor, own: tl.tensor, message: tl.tensor, out: tl.tensor, spacing: tl.tensor, n: tl.tensor,
    blocks: tl.tensor, RECIPROCAL: tl.constexpr, RANKS: tl.constexpr, START: tl.constexpr, OWN: tl.constexpr,
    BLOCK: tl.constexpr, LANES: tl.constexpr,
) -> None:  # fmt: skip
    """The sum of messages, the one of rank START at ``first``; rank OWN's is ``own`` itself, if it is not negative."""
    block = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    live = block < blocks
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    there = live[:, None] & (at >= 0)
    total = tl.full((LANES, BLOCK), -0.0, tl.float32)  # adds nothing, not even to -0
    for rank in tl.static_range(RANKS):
        if rank == OWN:
            total += tl.load(own + at, mask=at < n, other=0.0).to(tl.float32)
        else:
            total += load_message(first + (rank - START) * spacing, at, block, live, there, blocks, BLOCK)
    q, bits = quantize(total, RECIPROCAL)
    store_message(message, q, bits, at, block, live, there, blocks, BLOCK)
    v = q * bits.to(tl.float32, bitcast=True)[:, None]
    tl.store(out + at, rounded(v, out.dtype.element_ty), mask=at < n)


def _lanes(n: int, block: int) -> tuple[int, int, tuple[int]]:
    """(blocks of n elements, blocks a program, grid). The interpreter pays by the operation, not by the lane."""
    blocks = -(-n // block)
    lanes = max(1, (1 << 16 if interpreting() else _ELEMENTS) // block)
    return blocks, lanes, (-(-blocks // lanes),)


def encode(x: torch.Tensor, message: torch.Tensor, block: int) -> None:
    blocks, lanes, grid = _lanes(x.numel(), block)
    encode_kernel[grid](
        x, message, x.numel(), blocks, RECIPROCAL=_RECIPROCAL, BLOCK=block, LANES=lanes, enable_fp_fusion=False
    )


def decode(message: torch.Tensor, out: torch.Tensor, block: int) -> None:
    blocks, lanes, grid = _lanes(out.numel(), block)
    decode_kernel[grid](message, out, out.numel(), blocks, BLOCK=block, LANES=lanes, enable_fp_fusion=False)


def reduce(
    messages: Sequence[torch.Tensor | None],
    spacing: int,
    own: torch.Tensor,
    message: torch.Tensor,
    out: torch.Tensor,
    *,
    block: int,
) -> None:
    blocks, lanes, grid = _lanes(out.numel(), block)
    start, first = next((rank, part) for rank, part in enumerate(messages) if part is not None)
    reduce_kernel[grid](
        first, own, message, out, spacing, out.numel(), blocks, RECIPROCAL=_RECIPROCAL, RANKS=len(messages),
        START=start, OWN=next((rank for rank, part in enumerate(messages) if part is None), -1), BLOCK=block,
        LANES=lanes, enable_fp_fusion=False,
    )  # fmt: skip
