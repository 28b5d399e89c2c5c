"""The codecs of the quantized all-reduce, one row each, and the sizes of their messages.

A message is a run of whole *units* (the last one filled up with zeros): first the codes of all of them, packed as
``formats.py`` says, then a scale for every block, then, for NVFP4, an exponent for every 1024 elements. A unit is the
smallest run that can be decoded alone: a block, or more where exponents or a rotation span several blocks.

    int8 int6 int4  symmetric integers -top..top in two's complement; bfloat16 scale amax/top
    fp8             E4M3; bfloat16 scale amax/448
    mxfp8           E4M3 in blocks of 32; E8M0 scale, the smallest power of two that is no less than amax/448
    nvfp4           E2M1 in blocks of 16; E4M3 scale times a power of two for 1024 elements (as small as it can be),
                    in the place of the global scale, which would need a pass over the whole tensor first

Scales are rounded to the nearest: that moves amax by less than half a code, so the largest number of a block has the
largest code, and what was decoded comes out the same when it is encoded again. Nothing is ever float16.
Must not know transports or processes. How numbers become bytes is ``codec_reference.py``'s.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch

from ptqpipe.errors import UsageError
from ptqpipe.numerics.formats import get_codec, packed_columns

ScaleKind = Literal["bf16", "e8m0", "e4m3"]

DTYPES = (torch.bfloat16, torch.float32, torch.float16)
BLOCKS = (32, 64, 128, 256)
ROTATIONS = (16, 32, 64, 128, 256)
GROUP = 1024  # elements of NVFP4 that share an exponent


@dataclass(frozen=True, slots=True)
class WireCodec:
    """Numbers <-> bytes of a message.

    element   what a code is: int8, int6, int4, or the name of a codec in ``formats.py``
    block     elements that share a scale
    scale     bf16 (2 bytes), or a byte of E8M0 or E4M3
    hadamard  elements that are rotated together before they are rounded, 0 for none: a power of two
    group     elements that share a power of two on top of the scales, 0 for none
    """

    name: str
    element: str
    block: int
    scale: ScaleKind
    hadamard: int = 0
    group: int = 0

    @property
    def integers(self) -> bool:
        """Whether codes are symmetric integers; else they are those of a row of ``formats.CODECS``."""
        return self.element.startswith("int")

    @property
    def code_bits(self) -> int:
        return int(self.element[3:]) if self.integers else get_codec(self.element).bits

    @property
    def top(self) -> float:
        """The largest magnitude of a code."""
        return (1 << self.code_bits - 1) - 1 if self.integers else get_codec(self.element).max

    @property
    def scale_bytes(self) -> int:
        """Bytes of a block's scale."""
        return 2 if self.scale == "bf16" else 1

    @property
    def unit(self) -> int:
        return math.lcm(self.block, self.hadamard or 1, self.group or 1)

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit: codes, scales, exponent."""
        scales = self.unit // self.block * self.scale_bytes
        return packed_columns(self.unit, self.code_bits) + scales + (self.unit // self.group if self.group else 0)

    @property
    def bits(self) -> float:
        """Bits on the wire an element: 8.25 for int8 in blocks of 64."""
        return self.unit_bytes * 8 / self.unit

    def units(self, elements: int) -> int:
        """Number of units of ``elements``."""
        return -(-elements // self.unit)

    def nbytes(self, elements: int) -> int:
        """Bytes of a message of ``elements``."""
        return self.units(elements) * self.unit_bytes


CODECS = ("int8", "int6", "int4", "fp8", "mxfp8", "nvfp4")


def get_wire_codec(name: str, block: int = 64, *, hadamard: int = 0) -> WireCodec:
    """The codec called ``name``.

    block     elements a scale for int8, int6, int4 and fp8; mxfp8 (32) and nvfp4 (16) have their own
    hadamard  elements that are rotated together, 0 for none. A NaN then takes that many elements with it
    Raises UsageError with what there is.
    """
    if name not in CODECS:
        raise UsageError(f"unknown codec {name!r} for an all-reduce; known are {', '.join(CODECS)}")
    if name not in ("mxfp8", "nvfp4") and block not in BLOCKS:
        raise UsageError(f"block {block} of {name}; expected one of {', '.join(map(str, BLOCKS))}")
    if hadamard and hadamard not in ROTATIONS:
        raise UsageError(f"hadamard {hadamard}; expected 0 (none) or one of {', '.join(map(str, ROTATIONS))}")
    if name == "mxfp8":
        return WireCodec(name, "e4m3", 32, "e8m0", hadamard)
    if name == "nvfp4":
        return WireCodec(name, "e2m1", 16, "e4m3", hadamard, GROUP)
    if name == "fp8":
        return WireCodec(name, "e4m3", block, "bf16", hadamard)
    return WireCodec(name, name, block, "bf16", hadamard)
