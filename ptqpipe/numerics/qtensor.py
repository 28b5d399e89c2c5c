"""QTensor: a quantized matrix. encode, decode, blocks, and the one definition of its error.

    decoded value = value(code) * (value(scale) * global_scale)        float32, in that order

Everything that is reported about a quantized weight is measured on this decode. A checkpoint whose container
stores the global scale as a divisor decodes as ``value(code) * (value(scale) / divisor)``
(``global_divides``); the two agree bit for bit when the divisor is canonical (see ``global_scale.py``).
Where blocks have zero points, value(code) - value(zero) takes the place of value(code).

Knows formats and packing; must not know searches, files or containers.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import torch

from ptqpipe.errors import FormatError, NumericsError
from ptqpipe.numerics.formats import Codec, Format, pack, packed_columns, unpack


@dataclass(frozen=True, slots=True)
class QTensor:
    """A quantized ``[N, K]`` matrix.

    fmt           the format
    shape         (N, K) of the weight
    data          uint8 ``[N, K*bits/8]``: the codes, packed as ``formats.py`` says
    scales        uint8 codes ``[N/bn, K/bk]`` of ``fmt.scale``; its dtype's numbers when that codec is not
                  enumerable (float32, bfloat16, float16)
    global_scale  float32 0-d, None when the format has none
    global_divides  whether ``global_scale`` divides the block scales instead of multiplying them
    zeros         uint8 codes of ``fmt.element`` ``[N/bn, K/bk]``, None when the format has no zero points

    >>> q = ptqpipe.quantize(torch.ones(128, 256), "nvfp4")
    >>> q.shape, q.data.shape, q.scales.shape, float(q.dequantize()[0, 0])
    ((128, 256), torch.Size([128, 128]), torch.Size([128, 16]), 1.0)
    """

    fmt: Format
    shape: tuple[int, int]
    data: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor | None = None
    global_divides: bool = False
    zeros: torch.Tensor | None = None

    def __post_init__(self) -> None:
        want_data = (self.shape[0], packed_columns(self.shape[1], self.fmt.element.bits))
        if tuple(self.data.shape) != want_data or self.data.dtype != torch.uint8:
            raise FormatError(
                f"{self.fmt.name} data of a {self.shape[0]}x{self.shape[1]} weight must be uint8 {list(want_data)}, "
                f"got {self.data.dtype} {list(self.data.shape)}"
            )
        want = self.fmt.scale_shape(self.shape)
        if tuple(self.scales.shape) != want:
            raise FormatError(
                f"{self.fmt.name} scales of a {self.shape[0]}x{self.shape[1]} weight must be {list(want)}, "
                f"got {list(self.scales.shape)}"
            )
        if self.fmt.has_global != (self.global_scale is not None):
            raise FormatError(f"{self.fmt.name} {'needs a' if self.fmt.has_global else 'has no'} global scale")
        stored_zeros = None if self.zeros is None else (self.zeros.dtype, tuple(self.zeros.shape))
        if stored_zeros != ((torch.uint8, want) if self.fmt.has_zeros else None):
            wanted = f"needs uint8 zero points {list(want)}" if self.fmt.has_zeros else "has no zero points"
            raise FormatError(f"{self.fmt.name} {wanted}, got {'none' if stored_zeros is None else stored_zeros}")

    def __repr__(self) -> str:
        return f"<QTensor {self.fmt.name} {self.shape[0]}x{self.shape[1]}, {self.nbytes} bytes>"

    @classmethod
    def from_codes(
        cls, codes: torch.Tensor, scales: torch.Tensor, *, fmt: Format, global_scale: torch.Tensor | None = None
    ) -> "QTensor":
        """From unpacked uint8 codes ``[N, K]``."""
        shape = (codes.shape[0], codes.shape[1])
        return cls(fmt, shape, pack(codes, fmt.element.bits), scales, global_scale)

    @property
    def codes(self) -> torch.Tensor:
        """Unpacked uint8 codes ``[N, K]``."""
        return unpack(self.data, self.fmt.element.bits)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales (and global scale and zero points)."""
        more = 0 if self.zeros is None else self.zeros.nbytes
        return self.data.nbytes + self.scales.nbytes + (4 if self.global_scale is not None else 0) + more

    def block_scales(self) -> torch.Tensor:
        """float32 ``[N/bn, K/bk]``: what multiplies a code's value."""
        scales = scale_values(self.scales, self.fmt.scale)
        if self.global_scale is None:
            return scales
        return scales / self.global_scale if self.global_divides else scales * self.global_scale

    def dequantize(self) -> torch.Tensor:
        """float32 ``[N, K]``, exactly as defined at the top of this file."""
        values = to_blocks(code_values(self.codes, self.fmt.element), self.fmt)
        if self.zeros is not None:
            values = values - code_values(self.zeros, self.fmt.element).reshape(-1, 1)
        return from_blocks(values * self.block_scales().reshape(-1, 1), fmt=self.fmt, shape=self.shape)

    def multiplying(self) -> "QTensor":
        """With the global scale as a factor, as searches and :func:`encode` take it."""
        if self.global_scale is None or not self.global_divides:
            return self
        return replace(self, global_scale=1.0 / self.global_scale, global_divides=False)

    def narrow(self, dim: int, start: int, length: int) -> "QTensor":
        """Rows (dim 0) or columns (dim 1) ``[start, start+length)``; FormatError unless both ends lie on block edges.

        Along an axis that shares its scales the part keeps them, and may begin anywhere.
        """
        step, end = self.fmt.step(dim), start + length
        inside = 0 <= start < end <= self.shape[dim]
        if not inside or start % step or (end % step and end != self.shape[dim]):
            raise FormatError(
                f"narrow({dim}, {start}, {length}) of a {self.fmt.name} {self.shape[0]}x{self.shape[1]} does not lie "
                f"on block edges; use multiples of {step}"
            )
        first, last = self.fmt.scale_run(dim, start, end)
        bits = self.fmt.element.bits
        at, count = (start, length) if dim == 0 else (packed_columns(start, bits), packed_columns(length, bits))
        return replace(
            self,
            shape=(length, self.shape[1]) if dim == 0 else (self.shape[0], length),
            data=self.data.narrow(dim, at, count),
            scales=self.scales.narrow(dim, first, last - first),
            zeros=None if self.zeros is None else self.zeros.narrow(dim, first, last - first),
        )


def to_blocks(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """``[N, K]`` -> ``[blocks, elements]``, blocks in row-major order of the scale grid, short ones zero-padded."""
    rows, cols = fmt.block_extent((x.shape[0], x.shape[1]))
    grid = fmt.scale_shape((x.shape[0], x.shape[1]))
    pad = (grid[0] * rows - x.shape[0], grid[1] * cols - x.shape[1])
    if any(pad):
        x = torch.nn.functional.pad(x, (0, pad[1], 0, pad[0]))
    if rows == 1:
        return x.reshape(-1, cols)
    return x.reshape(grid[0], rows, grid[1], cols).permute(0, 2, 1, 3).reshape(-1, rows * cols)


def from_blocks(blocks: torch.Tensor, *, fmt: Format, shape: tuple[int, int]) -> torch.Tensor:
    """The inverse of :func:`to_blocks` for a weight of ``shape``."""
    rows, cols = fmt.block_extent(shape)
    if rows == 1:
        return blocks.reshape(shape)
    grid = fmt.scale_shape(shape)
    full = blocks.reshape(grid[0], grid[1], rows, cols).permute(0, 2, 1, 3).reshape(grid[0] * rows, grid[1] * cols)
    return full[: shape[0], : shape[1]].contiguous()


@cache
def _value_table(codec: Codec, device: torch.device) -> torch.Tensor:
    """float32 ``[2^bits]``: the value of every code; NaN for codes that the codec reserves."""
    return torch.tensor(codec.values, dtype=torch.float64).float().to(device)


@cache
def _ordered_codes(codec: Codec, device: torch.device) -> torch.Tensor:
    """uint8: the codes of a codec with a grid, in ascending order of their numbers."""
    return torch.tensor(codec.grid, dtype=torch.float64).argsort().to(torch.uint8).to(device)


@cache
def _place_table(codec: Codec, device: torch.device) -> torch.Tensor:
    """int16 ``[2^bits]``: the place of every code's number among those of the codec, 0 for zero."""
    values = _value_table(codec, torch.device("cpu"))
    distinct = torch.unique(values[~values.isnan()])
    places = torch.searchsorted(distinct, values) - torch.searchsorted(distinct, torch.zeros(1))
    return places.to(torch.int16).to(device)


@cache
def _boundaries(codec: Codec, device: torch.device) -> torch.Tensor:
    """float32 thresholds: the index of the number nearest to ``v`` is the number of thresholds below ``v``.

    The numbers are the magnitudes, those of the grid in order for a codec that has one. Threshold i is the midpoint of
    numbers i and i+1; where the even code is the upper one it is moved down by one ulp, so that a tie goes to the even
    code.
    """
    numbers = torch.tensor(sorted(codec.grid) or codec.magnitudes, dtype=torch.float64)
    middle = ((numbers[:-1] + numbers[1:]) / 2).float()
    below = torch.nextafter(middle, torch.full_like(middle, -math.inf) if codec.grid else torch.zeros_like(middle))
    codes = _ordered_codes(codec, torch.device("cpu")).int() if codec.grid else torch.arange(len(numbers))
    odd = codes[:-1] % 2 == 1
    return torch.where(odd, below, middle).to(device)


def magnitude_codes(y: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Nearest magnitude codes of non-negative float32 ``y``: ties to the even code, saturating. int64."""
    return torch.bucketize(y, _boundaries(codec, y.device), right=False)


def round_to(y: torch.Tensor, codec: Codec) -> torch.Tensor:
    """float32 ``y`` rounded to the nearest number of the codec, ties to the even code, saturating.

    ``y`` is not negative for a symmetric codec, whose magnitudes alone are looked at.
    """
    if codec.symmetric:
        return _value_table(codec, y.device)[magnitude_codes(y, codec)]
    return code_values(_grid_codes(y, codec), codec)


def _grid_codes(y: torch.Tensor, codec: Codec) -> torch.Tensor:
    """uint8: the codes nearest to float32 ``y``, of a codec with a grid."""
    return _ordered_codes(codec, y.device)[torch.bucketize(y, _boundaries(codec, y.device), right=False)]


def nearest_codes(
    x: torch.Tensor, inverse: torch.Tensor, element: Codec, zeros: torch.Tensor | None = None
) -> torch.Tensor:
    """uint8: the codes nearest to float32 ``x * inverse`` (+ ``zeros``); shapes broadcast.

    For a symmetric codec y = |x| * inverse decides the magnitude, and the sign bit is that of ``x``.
    """
    if not element.symmetric or zeros is not None:
        y = x * inverse if zeros is None else x * inverse + zeros
        if not element.symmetric:
            return _grid_codes(y, element)
        x, inverse = y, torch.ones((), device=y.device)
    codes = magnitude_codes(x.abs() * inverse, element).to(torch.uint8)
    return codes.bitwise_or_(torch.signbit(x).to(torch.uint8) << (element.bits - 1)) if element.signed else codes


def code_places(codes: torch.Tensor, codec: Codec) -> torch.Tensor:
    """int16: places of uint8 codes on the number line, 0 for zero and for its negative; neighbours differ by 1."""
    return _looked_up(_place_table(codec, codes.device), codes)


def code_values(codes: torch.Tensor, codec: Codec) -> torch.Tensor:
    """float32 values of uint8 codes of an enumerable codec."""
    return _looked_up(_value_table(codec, codes.device), codes)


def _looked_up(table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """``table[codes]``, of the codes' shape; as index_select, which takes a third of the time of the brackets."""
    return table.index_select(0, codes.flatten().int()).view(codes.shape)


def scale_values(scales: torch.Tensor, codec: Codec) -> torch.Tensor:
    """float32 values of a QTensor's ``scales``."""
    return code_values(scales, codec) if codec.enumerable else scales.float()


def encode(
    w: torch.Tensor,
    scales: torch.Tensor,
    *,
    fmt: Format,
    global_scale: torch.Tensor | None = None,
    zeros: torch.Tensor | None = None,
) -> QTensor:
    """Encodes ``w`` ``[N, K]`` (any float dtype) with the given block scales: the only rounding that is written.

    y = |w| * (1 / (value(scale) * global_scale)) in float32, then the nearest magnitude, ties to the even code,
    saturating at the largest; the sign is the sign bit of ``w``, so tiny negatives become -0. Codecs that are not
    symmetric take w for |w|; zero points add their value to y. This is the same ``y`` that every search scores, so the
    codes written are the codes searched. Raises NumericsError for NaN and inf.
    """
    check_finite(w)
    q = QTensor(fmt, (w.shape[0], w.shape[1]), _no_codes(w, fmt), scales, global_scale, zeros=zeros)
    inverse = 1.0 / q.block_scales().reshape(-1, 1)
    added = None if zeros is None else code_values(zeros, fmt.element).reshape(-1, 1)
    codes = nearest_codes(to_blocks(w.float(), fmt), inverse, fmt.element, added)
    return replace(q, data=pack(from_blocks(codes, fmt=fmt, shape=q.shape), fmt.element.bits))


def _no_codes(w: torch.Tensor, fmt: Format) -> torch.Tensor:
    columns = packed_columns(w.shape[1], fmt.element.bits)
    return torch.empty(1, dtype=torch.uint8, device=w.device).expand(w.shape[0], columns)


def scale_faults(scales: torch.Tensor, codec: Codec) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks like ``scales``: those that are zero, and those that are NaN, infinite, negative or reserved."""
    values = scale_values(scales, codec)
    return values == 0, ~torch.isfinite(values) | (values < 0)


def used_blocks(q: QTensor) -> torch.Tensor:
    """bool ``[N/bn, K/bk]``: blocks with a code that is not zero, or reserved; the others decode to zeros."""
    values = to_blocks(code_values(q.codes, q.fmt.element), q.fmt)
    zero = 0.0 if q.zeros is None else code_values(q.zeros, q.fmt.element).reshape(-1, 1)
    return (values != zero).any(dim=1).reshape(q.scales.shape)


class Illegal(NamedTuple):
    """Counts of stored numbers that no quantizer may write."""

    zero_scales: int = 0  # with codes that are not zero
    empty_scales: int = 0  # zero, over codes that are all zero
    bad_scales: int = 0  # NaN, infinite, negative or reserved
    bad_codes: int = 0  # codes that the element type reserves (NaN, infinity)


def illegal_numbers(q: QTensor) -> Illegal:
    """Counts codes and scales that no quantizer may write."""
    zero, bad = scale_faults(q.scales, q.fmt.scale)
    zeros = int(zero.sum())
    lost = int((zero & used_blocks(q)).sum()) if zeros else 0
    reserved = _value_table(q.fmt.element, q.data.device).isnan()
    bad_codes = int(reserved[q.codes.int()].sum()) if bool(reserved.any()) else 0
    return Illegal(lost, zeros - lost, int(bad.sum()), bad_codes)


def check_finite(w: torch.Tensor, name: str = "the tensor") -> None:
    """NumericsError naming the first NaN or inf of ``w``, if there is one."""
    if w.numel() == 0 or bool(torch.isfinite(w.abs().amax())):  # amax propagates NaN
        return
    bad = ~torch.isfinite(w)
    count = int(bad.sum())
    first = bad.nonzero()[0].tolist()
    nan = int(torch.isnan(w).sum())
    raise NumericsError(
        f"{name} has {nan} NaN and {count - nan} inf, the first at {first}; the source checkpoint is damaged"
    )


def squared_error(q: QTensor, w: torch.Tensor) -> float:
    """sum (decode - w)^2 in float64, the differences taken exactly from the float32 decode."""
    diff = q.dequantize().double() - w.double()
    return float((diff * diff).sum())
