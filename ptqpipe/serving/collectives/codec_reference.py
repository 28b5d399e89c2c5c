"""Encodes numbers to the bytes of messages and back in plain torch: the definition that every kernel equals bit for
bit.

All arithmetic is float32, one rounding an operation, nothing flushed but what is said here:

    amax     the largest magnitude of a block, found on the bits, so that NaN and infinity are larger than any number
    scale    amax * (1/top) rounded to bfloat16; 0 below 2^-127; NaN for a block that holds NaN or infinity
    code     x * (1/scale), to the nearest, ties to even, at most top; 0 where the scale is 0 or NaN
    decode   code * scale

So a block with one NaN or infinity is NaN as a whole, on every rank, and its neighbours are not touched. Sums are taken
in the order of the ranks, from the first. Must not know processes.
"""

from collections.abc import Sequence
from functools import cache

import torch

from ptqpipe.numerics.formats import CODECS, pack, packed_columns, unpack
from ptqpipe.numerics.qtensor import code_values, magnitude_codes
from ptqpipe.serving.collectives.codecs import WireCodec

_INFINITY = 0x7F800000
_NAN = 0x7FC00000
_SMALLEST = 0x00400000  # 2^-127: the smallest scale whose inverse is a float
_HALF_TO_8 = 0x600000  # the mantissa of 1.75, 448 / 2^8
_MANTISSA_OF_2688 = 0x280000  # of 1.3125, 6 * 448 / 2^11
_E4M3_NAN = 0x7F


def encode(x: torch.Tensor, codec: WireCodec) -> torch.Tensor:
    """uint8 ``[codec.nbytes(n)]``: the message of ``x [n]``, bfloat16, float16 or float32."""
    values = torch.nn.functional.pad(x.float(), (0, -x.numel() % codec.unit))
    if codec.hadamard:
        values = rotate(values * _half_norm(codec.hadamard)[0], codec.hadamard)
    return encode_units(values, codec)


def encode_units(values: torch.Tensor, codec: WireCodec) -> torch.Tensor:
    """:func:`encode` of whole units of float32 that are rotated already."""
    blocks = values.reshape(-1, codec.block)
    scale_codes, scales, exponents = _scales(blocks, codec)
    if codec.group:  # the exponent first, which is exact, then the scale
        power = _power(exponents).repeat_interleave(codec.group // codec.block)
        scales = code_values(scale_codes, CODECS["e4m3"])
        scaled = blocks * (1 / power).unsqueeze(1) * (1 / scales).unsqueeze(1)
    else:
        scaled = blocks * (1 / scales).unsqueeze(1)
    usable = (scales > 0).unsqueeze(1)
    codes = _codes(torch.where(usable, scaled, 0), torch.signbit(blocks), codec)
    codes = torch.where(scales.isnan().unsqueeze(1), torch.zeros_like(codes), codes)
    parts = [pack(codes, codec.code_bits).flatten(), scale_codes]
    return torch.cat([*parts, exponents] if codec.group else parts)


def decode(data: torch.Tensor, elements: int, codec: WireCodec) -> torch.Tensor:
    """float32 ``[elements]``: the values of a message of that many elements."""
    values = decode_units(data, codec)
    if codec.hadamard:
        values = rotate(values, codec.hadamard) * _half_norm(codec.hadamard)[1]
    return values[:elements]


def decode_units(data: torch.Tensor, codec: WireCodec) -> torch.Tensor:
    """:func:`decode` of whole units, still rotated."""
    units = data.numel() // codec.unit_bytes
    blocks = units * codec.unit // codec.block
    ends = (units * packed_columns(codec.unit, codec.code_bits), blocks * codec.scale_bytes)
    code_bytes, scale_codes, exponents = data.tensor_split((ends[0], ends[0] + ends[1]))
    codes = unpack(code_bytes.reshape(-1, packed_columns(codec.block, codec.code_bits)), codec.code_bits)
    scales = _scale_values(scale_codes, exponents, codec)
    return (_code_values(codes, codec) * scales.unsqueeze(1)).flatten()


def reduce(
    messages: Sequence[torch.Tensor | None], own: torch.Tensor, codec: WireCodec, *, requantize: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """(message of the sum, its decoded values in ``own``'s dtype).

    messages    one per rank, in order; None where ``own [n]`` stands, which is added as it is
    requantize  False: no message (empty), and the sum rounded to the dtype alone
    """
    total: torch.Tensor | None = None
    for message in messages:
        if message is None:
            term = torch.nn.functional.pad(own.float(), (0, -own.numel() % codec.unit))
            if codec.hadamard:
                term = rotate(term * _half_norm(codec.hadamard)[0], codec.hadamard)
        else:
            term = decode_units(message, codec)
        total = term if total is None else total + term
    assert total is not None, "there is a rank"
    if requantize:
        message = encode_units(total, codec)
        return message, decode(message, own.numel(), codec).to(own.dtype)
    if codec.hadamard:
        total = rotate(total, codec.hadamard) * _half_norm(codec.hadamard)[1]
    return torch.empty(0, dtype=torch.uint8), total[: own.numel()].to(own.dtype)


def rotate(values: torch.Tensor, size: int) -> torch.Tensor:
    """Sylvester's Hadamard matrix of ``size`` times each run of that many: butterflies of distance 1, 2, 4, ..."""
    shape, step = values.shape, 1
    while step < size:
        pairs = values.reshape(-1, 2, step)
        values = torch.stack((pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]), dim=1)
        step *= 2
    return values.reshape(shape)


@cache
def _half_norm(size: int) -> tuple[float, float]:
    """Powers of two whose product is 1/size: one before the rotation, one after the rotation back. Both are exact."""
    bits = size.bit_length() - 1
    return 2.0 ** -(bits // 2), 2.0 ** -(bits - bits // 2)


def _float_of(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int32).view(torch.float32)


def _scales(blocks: torch.Tensor, codec: WireCodec) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(bytes of the scales, float32 scales ``[blocks]``, exponents ``[groups]``) of float32 ``[blocks, block]``."""
    top = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(dim=1) if len(blocks) else torch.zeros(0, dtype=torch.int32)
    bad = top >= _INFINITY
    none = torch.empty(0, dtype=torch.uint8)
    if codec.scale == "e8m0":
        code = (top >> 23) - 8 + ((top & 0x7FFFFF) > _HALF_TO_8).int()
        code = torch.where(bad, 255, code.clamp(min=0)).to(torch.uint8)
        return code, _scale_values(code, none, codec), none
    if codec.scale == "e4m3":
        whole = torch.where(bad, 0, top).reshape(-1, codec.group // codec.block).amax(dim=1)
        exponents = (whole >> 23) - 11 + ((whole & 0x7FFFFF) > _MANTISSA_OF_2688).int()
        exponents = exponents.clamp(min=0).to(torch.uint8)
        inverse = (1 / _power(exponents)).repeat_interleave(codec.group // codec.block)
        wanted = _float_of(top) * inverse * _reciprocal(codec.top)
        code = magnitude_codes(torch.where(bad, 0, wanted), CODECS["e4m3"]).to(torch.uint8)
        code = torch.where(bad, _E4M3_NAN, code).to(torch.uint8)
        return code, _scale_values(code, exponents, codec), exponents
    bits = (_float_of(top) * _reciprocal(codec.top)).view(torch.int32)
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & ~0xFFFF
    bits = torch.where(bits < _SMALLEST, 0, bits)
    bits = torch.where(bad, _NAN, bits)
    return (bits >> 16).to(torch.int16).view(torch.uint8), _float_of(bits), none


@cache
def _reciprocal(top: float) -> float:
    """1/top as a float32 number."""
    return float(torch.tensor(1 / top, dtype=torch.float64).float())


def _power(codes: torch.Tensor) -> torch.Tensor:
    """float32 2^(code - 127) of E8M0 codes, NaN for 255."""
    bits = codes.int() << 23
    return _float_of(torch.where(codes == 255, _NAN, torch.where(codes == 0, _SMALLEST, bits)))


def _scale_values(codes: torch.Tensor, exponents: torch.Tensor, codec: WireCodec) -> torch.Tensor:
    """float32 ``[blocks]``."""
    if codec.scale == "bf16":
        return codes.clone().view(torch.bfloat16).float()
    if codec.scale == "e8m0":
        return _power(codes)
    return code_values(codes, CODECS["e4m3"]) * _power(exponents).repeat_interleave(codec.group // codec.block)


def _codes(scaled: torch.Tensor, negative: torch.Tensor, codec: WireCodec) -> torch.Tensor:
    """uint8 codes of ``scaled``; floating elements keep the sign of a zero."""
    if not codec.integers:
        sign = negative.to(torch.uint8) << (codec.code_bits - 1)
        return magnitude_codes(scaled.abs(), CODECS[codec.element]).to(torch.uint8) | sign
    whole = scaled.round().clamp(-codec.top, codec.top).to(torch.int16)
    return (whole & ((1 << codec.code_bits) - 1)).to(torch.uint8)


def _code_values(codes: torch.Tensor, codec: WireCodec) -> torch.Tensor:
    """float32 values of uint8 codes."""
    if not codec.integers:
        return code_values(codes, CODECS[codec.element])
    shift = 8 - codec.code_bits
    return ((codes << shift).view(torch.int8) >> shift).float()
