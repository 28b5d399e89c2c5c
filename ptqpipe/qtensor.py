"""QTensor: a quantized matrix. encode, decode, blocks, and the one definition of its error.

    decoded value = value(code) * (value(scale) * global_scale)        float32, in that order

Everything that is reported about a quantized weight is measured on this decode. A checkpoint whose container
stores the global scale as a divisor decodes as ``value(code) * (value(scale) / divisor)``
(``global_divides``); the two agree bit for bit when the divisor is canonical (see ``global_scale.py``).
A weight with a low-rank part has its product added, float32, at the end.

Knows formats and packing; must not know searches, files or containers.
"""

from dataclasses import dataclass, replace
from functools import cache

import torch

from ptqpipe.errors import FormatError, NumericsError
from ptqpipe.formats import Codec, Format
from ptqpipe.packing import pack, packed_columns, unpack

_PRODUCT_ELEMENTS = 1 << 21  # in float64 at a time


@dataclass(frozen=True, slots=True)
class Factors:
    """A low-rank part of a weight: ``left [N, r] diag(scale) right [r, K]``.

    left, right  bfloat16, or float8_e4m3fn with a scale
    scale        float32 ``[r]``, None for ones
    """

    left: torch.Tensor
    right: torch.Tensor
    scale: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the product."""
        return self.left.shape[0], self.right.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes as they are stored."""
        return self.left.nbytes + self.right.nbytes + (0 if self.scale is None else self.scale.nbytes)

    def product(self) -> torch.Tensor:
        """float32 ``[N, K]``: the float64 product, rounded once. So its bits hardly depend on the order of the sums."""
        right = self.right.to(torch.float32).double()
        if self.scale is not None:
            right *= self.scale.double().unsqueeze(1)
        out = torch.empty(self.shape, dtype=torch.float32, device=self.left.device)
        step = max(1, _PRODUCT_ELEMENTS // max(1, self.shape[1]))
        for start in range(0, self.shape[0], step):
            out[start : start + step] = self.left[start : start + step].to(torch.float32).double() @ right
        return out

    def narrow(self, dim: int, start: int, length: int) -> "Factors":
        """The part of rows (dim 0) or columns (dim 1) ``[start, start+length)`` of the product."""
        if dim == 0:
            return replace(self, left=self.left[start : start + length])
        return replace(self, right=self.right[:, start : start + length])


@dataclass(frozen=True, slots=True)
class QTensor:
    """A quantized ``[N, K]`` matrix.

    fmt           the format
    shape         (N, K) of the weight
    data          uint8 ``[N, K*bits/8]``: the codes, packed as ``packing.py`` says
    scales        uint8 codes ``[N/bn, K/bk]`` of ``fmt.scale``; its dtype's numbers when that codec is not
                  enumerable (float32, bfloat16, float16)
    global_scale  float32 0-d, None when the format has none
    global_divides  whether ``global_scale`` divides the block scales instead of multiplying them
    low_rank      what is added to the decode, None for nothing
    """

    fmt: Format
    shape: tuple[int, int]
    data: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor | None = None
    global_divides: bool = False
    low_rank: Factors | None = None

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
        if self.low_rank is not None and self.low_rank.shape != self.shape:
            raise FormatError(
                f"the low-rank part of a {self.shape[0]}x{self.shape[1]} weight is {list(self.low_rank.shape)}"
            )

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
        """Bytes of codes and scales (and global scale, and low-rank part)."""
        more = 0 if self.low_rank is None else self.low_rank.nbytes
        return self.data.nbytes + self.scales.nbytes + (4 if self.global_scale is not None else 0) + more

    def block_scales(self) -> torch.Tensor:
        """float32 ``[N/bn, K/bk]``: what multiplies a code's value."""
        scales = scale_values(self.scales, self.fmt.scale)
        if self.global_scale is None:
            return scales
        return scales / self.global_scale if self.global_divides else scales * self.global_scale

    def dequantize(self) -> torch.Tensor:
        """float32 ``[N, K]``, exactly as defined at the top of this file."""
        values = code_values(self.codes, self.fmt.element)
        decoded = from_blocks(
            to_blocks(values, self.fmt) * self.block_scales().reshape(-1, 1), fmt=self.fmt, shape=self.shape
        )
        return decoded if self.low_rank is None else decoded + self.low_rank.product()

    def narrow(self, dim: int, start: int, length: int) -> "QTensor":
        """Rows (dim 0) or columns (dim 1) ``[start, start+length)``; both ends must lie on block edges."""
        extent = self.fmt.block_extent(self.shape)[dim]
        end = start + length
        whole = self.fmt.block[dim] == 0
        if whole and (start, length) != (0, self.shape[dim]):
            raise FormatError(
                f"{self.fmt.name} shares a scale over the whole of dim {dim}; it cannot be narrowed there"
            )
        if (
            start < 0
            or length <= 0
            or end > self.shape[dim]
            or start % extent
            or (end % extent and end != self.shape[dim])
        ):
            raise FormatError(
                f"narrow({dim}, {start}, {length}) of a {self.fmt.name} {self.shape[0]}x{self.shape[1]} does not lie "
                f"on block edges; use multiples of {extent}"
            )
        scales = self.scales.narrow(dim, start // extent, -(-end // extent) - start // extent)
        low_rank = None if self.low_rank is None else self.low_rank.narrow(dim, start, length)
        if dim == 0:
            data = self.data.narrow(0, start, length)
            return replace(self, shape=(length, self.shape[1]), data=data, scales=scales, low_rank=low_rank)
        bits = self.fmt.element.bits
        data = self.data.narrow(1, packed_columns(start, bits), packed_columns(length, bits))
        return replace(self, shape=(self.shape[0], length), data=data, scales=scales, low_rank=low_rank)


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
    table = torch.full((1 << codec.bits,), float("nan"))
    magnitudes = torch.tensor(codec.magnitudes, dtype=torch.float64).float()
    table[: len(magnitudes)] = magnitudes
    if codec.signed:
        half = 1 << (codec.bits - 1)
        table[half : half + len(magnitudes)] = -magnitudes
    return table.to(device)


@cache
def _boundaries(codec: Codec, device: torch.device) -> torch.Tensor:
    """float32 thresholds: the code of ``v`` is the number of thresholds below ``v``.

    Threshold i is the midpoint of magnitudes i and i+1; where the even code is the upper one it is moved down by
    one ulp, so that a tie goes to the even code.
    """
    magnitudes = torch.tensor(codec.magnitudes, dtype=torch.float64)
    middle = ((magnitudes[:-1] + magnitudes[1:]) / 2).float()
    below = torch.nextafter(middle, torch.zeros_like(middle))
    odd = torch.arange(len(middle)) % 2 == 1
    return torch.where(odd, below, middle).to(device)


def magnitude_codes(y: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Nearest magnitude codes of non-negative float32 ``y``: ties to the even code, saturating. int64."""
    return torch.bucketize(y, _boundaries(codec, y.device), right=False)


def round_to(y: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Non-negative float32 ``y`` rounded to the nearest magnitude (float32), as :func:`magnitude_codes` does."""
    return _value_table(codec, y.device)[magnitude_codes(y, codec)]


def code_values(codes: torch.Tensor, codec: Codec) -> torch.Tensor:
    """float32 values of uint8 codes of an enumerable codec."""
    return _value_table(codec, codes.device)[codes.int()]


def scale_values(scales: torch.Tensor, codec: Codec) -> torch.Tensor:
    """float32 values of a QTensor's ``scales``."""
    return code_values(scales, codec) if codec.enumerable else scales.float()


def encode(w: torch.Tensor, scales: torch.Tensor, *, fmt: Format, global_scale: torch.Tensor | None = None) -> QTensor:
    """Encodes ``w`` ``[N, K]`` (any float dtype) with the given block scales: the only rounding that is written.

    y = |w| * (1 / (value(scale) * global_scale)) in float32, then the nearest magnitude, ties to the even code,
    saturating at the largest; the sign is the sign bit of ``w``, so tiny negatives become -0. This is the same ``y``
    that every search scores, so the codes written are the codes searched. Raises NumericsError for NaN and inf.
    """
    check_finite(w)
    q = QTensor(fmt, (w.shape[0], w.shape[1]), _no_codes(w, fmt), scales, global_scale)
    x = to_blocks(w.float(), fmt)
    y = x.abs() * (1.0 / q.block_scales().reshape(-1, 1))
    codes = magnitude_codes(y, fmt.element).to(torch.uint8)
    codes |= torch.signbit(x).to(torch.uint8) << (fmt.element.bits - 1)
    codes = from_blocks(codes, fmt=fmt, shape=q.shape)
    return replace(q, data=pack(codes, fmt.element.bits))


def _no_codes(w: torch.Tensor, fmt: Format) -> torch.Tensor:
    """A placeholder of the right shape without memory behind it."""
    columns = packed_columns(w.shape[1], fmt.element.bits)
    return torch.empty(1, dtype=torch.uint8, device=w.device).expand(w.shape[0], columns)


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


def relative_mse(q: QTensor, w: torch.Tensor) -> float:
    """sum (decode - w)^2 / sum w^2."""
    energy = float((w.double() ** 2).sum())
    return squared_error(q, w) / energy if energy else 0.0
