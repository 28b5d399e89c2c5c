"""Codes <-> bytes. One rule for every code width: each row is a little-endian bit stream.

Code ``k`` of a row occupies bits ``[k*bits, (k+1)*bits)`` of that row's stream, bit 0 being the lowest bit of
byte 0. For 4 bits this is "even k in the low nibble, odd k in the high nibble" (compressed-tensors, ModelOpt,
Quark, gpt-oss); for 6 bits it is four codes in three bytes (compressed-tensors' mxfp6-pack-quantized); for 8
bits it is the identity. GGUF splits nibbles by halves and is not this layout.
"""

import math

import torch

from ptqpipe.errors import FormatError


def packed_columns(columns: int, bits: int) -> int:
    """Bytes per row of ``columns`` codes of ``bits`` bits; FormatError unless they fill whole bytes."""
    if columns * bits % 8:
        raise FormatError(f"{columns} codes of {bits} bits do not fill whole bytes; pad or keep this tensor")
    return columns * bits // 8


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 codes ``[..., K]`` -> uint8 bytes ``[..., K*bits/8]``."""
    columns = codes.shape[-1]
    packed_columns(columns, bits)
    if bits == 8:
        return codes
    if bits == 4:
        return codes[..., 0::2] | (codes[..., 1::2] << 4)
    per_word, word_bytes = _word(bits)
    words = codes.to(torch.int64).reshape(*codes.shape[:-1], columns // per_word, per_word)
    shifts = torch.arange(per_word, device=codes.device) * bits
    word = (words << shifts).sum(dim=-1, keepdim=True)
    out = (word >> (8 * torch.arange(word_bytes, device=codes.device))) & 0xFF
    return out.to(torch.uint8).flatten(-2)


def unpack(data: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 bytes ``[..., B]`` -> uint8 codes ``[..., B*8/bits]``; the inverse of :func:`pack`."""
    if bits == 8:
        return data
    if bits == 4:
        return torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)
    per_word, word_bytes = _word(bits)
    words = data.to(torch.int64).reshape(*data.shape[:-1], data.shape[-1] // word_bytes, word_bytes)
    word = (words << (8 * torch.arange(word_bytes, device=data.device))).sum(dim=-1, keepdim=True)
    codes = (word >> (bits * torch.arange(per_word, device=data.device))) & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten(-2)


def _word(bits: int) -> tuple[int, int]:
    """The smallest run of codes that fills whole bytes: (codes, bytes). 6 bits: (4, 3)."""
    total = math.lcm(bits, 8)
    return total // bits, total // 8
