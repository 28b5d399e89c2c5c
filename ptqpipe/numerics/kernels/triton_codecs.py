"""Codecs in Triton: magnitudes <-> codes, decided by arithmetic alone, equal to ``qtensor.py`` to the bit.

A codec with IEEE-like subnormals is a `Minifloat`. Kernels get it whole, as one constexpr, and hand it on: constants of
a named tuple are Python numbers, so one that ``tl.static_range`` counts to needs a name of its own, annotated with
``tl.constexpr``, and so does a tuple in a tuple. No hardware conversion is used, so every architecture gives the same
bits. Every launch that includes these functions must say ``enable_fp_fusion=False``: a fused multiply-add rounds
once where ``objective.py`` rounds twice.

Knows numbers only; must not know blocks, tensors or launches. Imports Triton: import it from inside functions.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from ptqpipe.numerics.formats import Codec

_SHAPES = {"e2m1": (0, 1), "e2m3": (0, 3), "e3m2": (-2, 2), "e4m3": (-6, 3), "e5m2": (-14, 2)}


class Minifloat(NamedTuple):
    """A signed codec as the kernels see it.

    emin  exponent of its smallest normal
    mant  mantissa bits
    max   largest magnitude
    """

    bits: int
    emin: int
    mant: int
    max: float


def minifloat_of(codec: Codec) -> Minifloat | None:
    """The kernel's constants of an element codec, or None where the kernels do not know it."""
    shape = _SHAPES.get(codec.name)
    return None if shape is None else Minifloat(codec.bits, *shape, codec.max)


@triton.jit
def magic(y: tl.tensor, CODEC: tl.constexpr) -> tl.tensor:
    """The power of two whose float32 ulp is the codec's step at ``y`` (non-negative, at most the largest)."""
    exponent = tl.maximum(y.to(tl.int32, bitcast=True) & 0x7F800000, (CODEC.emin + 127) << 23)
    return (exponent + ((23 - CODEC.mant) << 23)).to(tl.float32, bitcast=True)


@triton.jit
def round_magnitude(y: tl.tensor, CODEC: tl.constexpr) -> tl.tensor:
    """``y`` from 0 to the largest, float32, rounded to the nearest magnitude, ties to the even code.

    Adding the magic number leaves no bit below the codec's step, and float32's own rounding to even is the codec's,
    since the parity of a multiple of the step is the parity of its code.
    """
    big = magic(y, CODEC)
    return (y + big) - big


@triton.jit
def encode_signed(x: tl.tensor, r: tl.tensor, CODEC: tl.constexpr) -> tl.tensor:
    """int32 codes of ``|x| * r`` with the sign bit of ``x``; saturates."""
    y = tl.minimum(tl.abs(x) * r, CODEC.max)
    big = magic(y, CODEC)
    steps = (y + big).to(tl.int32, bitcast=True) - big.to(tl.int32, bitcast=True)
    exponent = (big.to(tl.int32, bitcast=True) >> 23) - (CODEC.emin + 127 + 23 - CODEC.mant)
    sign = (x.to(tl.int32, bitcast=True) >> 31) & 1
    return steps + (exponent << CODEC.mant) | (sign << (CODEC.bits - 1))


@triton.jit
def decode_magnitude(code: tl.tensor, CODEC: tl.constexpr) -> tl.tensor:
    """float32 magnitudes of int32 magnitude codes (no sign bit)."""
    normal = (code << (23 - CODEC.mant)) + ((CODEC.emin + 126) << 23)
    subnormal = code.to(tl.float32) * (2.0 ** (CODEC.emin - CODEC.mant))
    return tl.where(code < (1 << CODEC.mant), subnormal, normal.to(tl.float32, bitcast=True))


@triton.jit
def decode_signed(code: tl.tensor, CODEC: tl.constexpr) -> tl.tensor:
    """float32 values of int32 codes with a sign bit; NaN for the codes that the codec reserves."""
    magnitude = decode_magnitude(code & ((1 << (CODEC.bits - 1)) - 1), CODEC)
    magnitude = tl.where(magnitude > CODEC.max, float("nan"), magnitude)
    sign = (code >> (CODEC.bits - 1)) << 31
    return (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def floor_minifloat3(v: tl.tensor, EMIN: tl.constexpr, STOP: tl.constexpr) -> tl.tensor:
    """int32 code of the largest number not above ``v`` (float32, non-negative), at most STOP.

    For unsigned codecs of three mantissa bits whose smallest normal is 2^EMIN.
    """
    normal = (v.to(tl.int32, bitcast=True) >> 20) - ((EMIN + 126) << 3)
    subnormal = (tl.minimum(v, 1.0) * 2.0 ** (3 - EMIN)).to(tl.int32)
    return tl.minimum(tl.where(v < 2.0**EMIN, subnormal, normal), STOP)


@triton.jit
def decode_e8m0(code: tl.tensor) -> tl.tensor:
    """float32 ``2^(code - 127)`` of int32 codes 0..254; NaN for 255. 2^-127 is subnormal in float32, and kept."""
    bits = tl.where(code == 0, 0x00400000, code << 23)
    return tl.where(code == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def bfloat16_bits(value: tl.tensor) -> tl.tensor:
    """int16 bits of float32 rounded to bfloat16, to nearest even; one NaN for all of them.

    By hand: the interpreter's own conversion cuts off. A device's products give the NaN 0x7FFFFFFF, whose rounding
    would carry into the sign.
    """
    bits = value.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(value != value, 0x7FC0, rounded).to(tl.int16)
