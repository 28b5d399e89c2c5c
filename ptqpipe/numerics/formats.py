"""Number formats as rows of two tables, ``CODECS`` (element and scale codecs) and ``FORMATS``; codes as packed bytes.

A *codec* is a finite set of numbers with their codes. A *format* is an element codec, a block shape, a
scale codec, and whether one float32 global scale multiplies every block scale. Nothing here knows tensors
of a model, files or containers: on-disk layouts live in ``containers/``, activation schemes in
``schemes.py``.

Packing has one rule for every code width: each row is a little-endian bit stream. Code ``k`` of a row occupies bits
``[k*bits, (k+1)*bits)`` of that row's stream, bit 0 being the lowest bit of byte 0. For 4 bits this is "even k in the
low nibble, odd k in the high nibble" (compressed-tensors, ModelOpt, Quark, gpt-oss); for 6 bits it is four codes in
three bytes (compressed-tensors' mxfp6-pack-quantized); for 8 bits it is the identity. GGUF splits nibbles by halves and
is not this layout.

Sources: OCP Microscaling Formats (MX) v1.0, sections 5.2-5.4 (E2M1, E2M3, E3M2, E8M0), OCP 8-bit
floating point v1.0 (E4M3, E5M2). UE5M3 and UE4M4 are research scale codecs without reserved codes.

The tables need no torch, which takes seconds to import: ``ptqpipe formats`` prints them without it.
"""

import math
import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from ptqpipe.errors import FormatError, UnknownFormat

if TYPE_CHECKING:
    import torch

WHOLE = 0  # a block extent of 0 means "the whole axis"


@dataclass(frozen=True, slots=True)
class Codec:
    """A finite set of numbers and their codes.

    Without a ``grid`` the code of a number is its magnitude's index in ``magnitudes`` (ascending, finite), with the
    sign in bit ``bits - 1`` when ``signed``. Other codes (two's complement, a zero point) list the number of every
    code in ``grid``; their ``magnitudes`` are those that every sign has. Codecs that are too large to enumerate
    (float32, bfloat16, float16 scales) have ``magnitudes == ()`` and the ``float_type`` that torch has for them: their
    "code" is the number itself, stored in that dtype.
    """

    name: str
    bits: int
    signed: bool
    magnitudes: tuple[float, ...]
    float_type: str = ""
    grid: tuple[float, ...] = ()

    @property
    def dtype(self) -> "torch.dtype | None":
        """torch's dtype of a codec that is a float type; None for one that can be enumerated."""
        if not self.float_type:
            return None
        import torch

        dtype: torch.dtype = getattr(torch, self.float_type)
        return dtype

    @property
    def symmetric(self) -> bool:
        """Whether a number and its negative have the same code but for a sign bit: searches may look at magnitudes."""
        return not self.grid

    @property
    def values(self) -> tuple[float, ...]:
        """The number of each of the 2^bits codes of an enumerable codec; NaN for codes that are reserved."""
        if self.grid:
            return self.grid
        reserved = (math.nan,) * ((1 << (self.bits - self.signed)) - len(self.magnitudes))
        negative = (*(-m for m in self.magnitudes), *reserved) if self.signed else ()
        return (*self.magnitudes, *reserved, *negative)

    @property
    def enumerable(self) -> bool:
        """Whether every code can be listed."""
        return bool(self.magnitudes)

    @property
    def max(self) -> float:
        """The largest finite magnitude that every sign has."""
        if self.dtype is not None:
            import torch

            return float(torch.finfo(self.dtype).max)
        return self.magnitudes[-1]

    @property
    def min_positive(self) -> float:
        if self.dtype is not None:
            import torch

            return float(torch.finfo(self.dtype).smallest_normal)
        return next(m for m in self.magnitudes if m > 0)

    @property
    def first_scale_code(self) -> int:
        """The smallest code that is a legal (positive) scale."""
        return next(i for i, m in enumerate(self.magnitudes) if m > 0)

    @property
    def power_of_two(self) -> bool:
        """Whether every positive magnitude is a power of two."""
        return self.enumerable and all(m == 0 or math.frexp(m)[0] == 0.5 for m in self.magnitudes)


def minifloat(
    name: str,
    exponent_bits: int,
    mantissa_bits: int,
    *,
    bias: int | None = None,
    signed: bool = True,
    reserved: int = 0,
) -> Codec:
    """A codec with IEEE-like subnormals; ``reserved`` top magnitude codes are NaN or inf and left out.

    Magnitude code ``e << mantissa_bits | m`` has the value ``m * 2^(1-bias-mantissa_bits)`` for ``e == 0`` and
    ``(2^mantissa_bits + m) * 2^(e-bias-mantissa_bits)`` otherwise; ``bias`` defaults to ``2^(exponent_bits-1) - 1``.
    """
    if bias is None:
        bias = (1 << (exponent_bits - 1)) - 1 if exponent_bits else 0
    count = (1 << (exponent_bits + mantissa_bits)) - reserved
    values: list[float] = []
    for code in range(count):
        e, m = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        significand = m if e == 0 else (1 << mantissa_bits) + m
        values.append(math.ldexp(significand, max(e, 1) - bias - mantissa_bits))
    return Codec(name, exponent_bits + mantissa_bits + signed, signed, tuple(values))


def integers(name: str, bits: int, *, zero: int | None = None) -> Codec:
    """Integers in two's complement, or, with ``zero``, unsigned codes minus this zero point: 8 gives -8 to 7 to INT4.

    ``magnitudes`` end at the largest integer that both signs have, so that abs-max scales clip neither.
    """
    codes = range(1 << bits)
    if zero is None:
        grid = tuple(float(code - ((code >> (bits - 1)) << bits)) for code in codes)
    else:
        grid = tuple(float(code - zero) for code in codes)
    top = int(min(-min(grid), max(grid)))
    if top < 1:
        raise FormatError(f"{name}: zero point {zero} leaves one sign no number; use 1 to {len(grid) - 2}")
    return Codec(name, bits, True, tuple(map(float, range(top + 1))), grid=grid)


CODECS: dict[str, Codec] = {
    codec.name: codec
    for codec in (
        minifloat("e2m1", 2, 1),
        minifloat("e2m3", 2, 3),
        minifloat("e3m2", 3, 2),
        minifloat("e4m3", 4, 3, reserved=1),  # S.1111.111 is NaN, there is no inf
        minifloat("e5m2", 5, 2, reserved=4),  # the top exponent is inf and NaN
        minifloat("ue5m3", 5, 3, signed=False),
        minifloat("ue4m4", 4, 4, signed=False),
        Codec("e8m0", 8, False, tuple(math.ldexp(1.0, code - 127) for code in range(255))),  # 255 is NaN
        Codec("fp32", 32, False, (), "float32"),
        Codec("fp16", 16, False, (), "float16"),
        Codec("bf16", 16, False, (), "bfloat16"),
        integers("int4", 4, zero=8),  # in words, where codes count from the least integer
        integers("int8", 8, zero=128),
        integers("int8_signed", 8),  # in bytes
    )
}


@dataclass(frozen=True, slots=True)
class Format:
    """element codec x block shape x scale codec x global scale.

    ``block`` is (rows, columns) of the weight ``[out, in]`` that share one scale; ``WHOLE`` (0) spans the axis.
    ``partial_blocks`` says whether the last block along an axis may be short (readers of 128x128 FP8 allow it; what is
    written has short blocks of rows alone).
    ``has_zeros`` says that every block has a zero point, too: an element code whose number is subtracted.
    """

    name: str
    element: Codec
    block: tuple[int, int]
    scale: Codec
    has_global: bool = False
    partial_blocks: bool = False
    has_zeros: bool = False

    @property
    def one_scale(self) -> bool:
        """Whether a weight has a single block scale, whatever its shape (FP8 per tensor)."""
        return self.block == (WHOLE, WHOLE)

    @property
    def shares_rows(self) -> bool:
        """Whether all rows of a weight share their block scales."""
        return self.block[0] == WHOLE

    @property
    def max_product(self) -> float:
        """Largest element magnitude times largest scale: 2688 for NVFP4 (6 x 448)."""
        return self.element.max * self.scale.max

    def block_extent(self, shape: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of one block of a weight of this ``shape``, with WHOLE resolved."""
        return (self.block[0] or shape[0], self.block[1] or shape[1])

    def holds(self, other: "Format") -> bool:
        """Whether a block of ``other`` may be written without loss, as far as the ranges of scales allow: every number
        of its elements is one of ours, and its scales are powers of two."""
        exact = set(other.element.magnitudes) <= set(self.element.magnitudes)
        return exact and self.element.symmetric and other.element.symmetric and other.scale.power_of_two

    def step(self, dim: int) -> int:
        """Rows (dim 0) or columns (dim 1) can be cut at multiples of this: anywhere where all of them share scales."""
        return self.block[dim] or 1

    def scale_run(self, dim: int, start: int, stop: int) -> tuple[int, int]:
        """[first, last) along an axis of the scale grid: the scales of rows or columns [start, stop)."""
        extent = self.block[dim]
        return (start // extent, -(-stop // extent)) if extent else (0, 1)

    def scale_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Shape of the scale grid of a weight of this ``shape``; FormatError where blocks do not divide."""
        rows, cols = self.block_extent(shape)
        if not self.partial_blocks and (shape[0] % rows or shape[1] % cols):
            raise FormatError(
                f"{self.name} needs shapes in multiples of {rows}x{cols}, got {shape[0]}x{shape[1]}; "
                "keep this tensor (an ignore rule) or choose another format"
            )
        return (-(-shape[0] // rows), -(-shape[1] // cols))

    def fits(self, shape: tuple[int, int]) -> bool:
        """Whether a weight of this ``shape`` may be written: whole blocks (of rows, the last may be short where the
        format allows it), and rows that pack into whole bytes."""
        rows, cols = self.block_extent(shape)
        whole = (self.partial_blocks or shape[0] % rows == 0) and shape[1] % cols == 0
        return whole and shape[0] > 0 and shape[1] > 0 and shape[1] * self.element.bits % 8 == 0

    def bits_per_weight(self, shape: tuple[int, int]) -> float:
        """Stored bits per weight: elements, scales, zero points and the global scale."""
        grid = self.scale_shape(shape)
        own = self.scale.bits + self.element.bits * self.has_zeros
        extra = grid[0] * grid[1] * own + 32 * self.has_global
        return self.element.bits + extra / (shape[0] * shape[1])


def _rows() -> tuple[Format, ...]:
    c = CODECS
    return (
        Format("nvfp4", c["e2m1"], (1, 16), c["e4m3"], has_global=True),
        Format("mxfp4", c["e2m1"], (1, 32), c["e8m0"]),
        Format("mxfp6_e2m3", c["e2m3"], (1, 32), c["e8m0"]),
        Format("mxfp6_e3m2", c["e3m2"], (1, 32), c["e8m0"]),
        Format("mxfp8", c["e4m3"], (1, 32), c["e8m0"]),
        # FP8 scales are chosen among the bfloat16 numbers: transformers casts them to the model's dtype, so any
        # other float32 scale would be two different models in two readers.
        Format("fp8_channel", c["e4m3"], (1, WHOLE), c["bf16"]),
        Format("fp8_tensor", c["e4m3"], (WHOLE, WHOLE), c["bf16"]),
        Format("fp8_block", c["e4m3"], (128, 128), c["bf16"], partial_blocks=True),
        Format("fp8_block_ue8m0", c["e4m3"], (128, 128), c["e8m0"], partial_blocks=True),
        Format("int4_g32", c["int4"], (1, 32), c["bf16"]),
        Format("int4_g128", c["int4"], (1, 128), c["bf16"]),
        Format("int8_channel", c["int8"], (1, WHOLE), c["bf16"]),
        Format("int8_signed_channel", c["int8_signed"], (1, WHOLE), c["bf16"]),
    )


FORMATS: dict[str, Format] = {fmt.name: fmt for fmt in _rows()}

_MINIFLOAT = re.compile(r"(u?)e([0-8])m([0-7])")
_RESEARCH = re.compile(r"(u?e\dm\d)/(\d{1,9})/(u?e\dm\d|fp32|fp16|bf16)(/global)?")


def get_codec(name: str) -> Codec:
    """The codec called ``name``: a row of ``CODECS`` or any minifloat ``[u]eXmY`` of 3 to 8 bits."""
    codec = CODECS.get(name)
    if codec is not None:
        return codec
    match = _MINIFLOAT.fullmatch(name)
    if match is not None:
        signed, exponent, mantissa = not match[1], int(match[2]), int(match[3])
        if 3 <= exponent + mantissa + signed <= 8 and 1 <= exponent <= 7:  # 8 leave float32
            return minifloat(name, exponent, mantissa, signed=signed)
    raise UnknownFormat(f"unknown codec {name!r}; known are {', '.join(CODECS)} and minifloats eXmY of 3 to 8 bits")


@cache
def get_format(name: str) -> Format:
    """The format called ``name``: a row of ``FORMATS``, or a research format written ``element/block/scale[/global]``.

    ``e2m1/8/ue5m3`` is E2M1 in blocks of 1x8 with UE5M3 scales; ``e2m1/16/e4m3/global`` is NVFP4 itself.
    Blocks of 4 to 256. Raises FormatError with the known names.
    """
    key = name.lower().replace("-", "_")
    if key in FORMATS:
        return FORMATS[key]
    match = _RESEARCH.fullmatch(name.lower())
    if match is None:
        raise UnknownFormat(
            f"unknown format {name!r}; known are {', '.join(FORMATS)}, "
            "or element/block/scale[/global] such as e2m1/8/ue5m3"
        )
    block = int(match[2])
    if not 4 <= block <= 256:
        raise UnknownFormat(f"block size {block} of {name!r} is out of range; use 4 to 256")
    element = get_codec(match[1])
    if not element.signed:
        raise UnknownFormat(f"{element.name} of {name!r} has no sign; use a signed minifloat for elements")
    scale = get_codec(match[3])
    return Format(name.lower(), element, (1, block), scale, has_global=match[4] is not None)


def packed_columns(columns: int, bits: int) -> int:
    """Bytes per row of ``columns`` codes of ``bits`` bits; FormatError unless they fill whole bytes."""
    if columns * bits % 8:
        raise FormatError(f"{columns} codes of {bits} bits do not fill whole bytes; pad or keep this tensor")
    return columns * bits // 8


def pack(codes: "torch.Tensor", bits: int) -> "torch.Tensor":
    """uint8 codes ``[..., K]`` -> uint8 bytes ``[..., K*bits/8]``."""
    import torch

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


def unpack(data: "torch.Tensor", bits: int) -> "torch.Tensor":
    """uint8 bytes ``[..., B]`` -> uint8 codes ``[..., B*8/bits]``; the inverse of :func:`pack`."""
    import torch

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
