"""PackedWeight and packed_linear: the product with a weight that stays packed in memory.

    y = x @ decode(weight).T + bias

The decode is QTensor's. A weight is an *inner* part, whose numbers come from codes and block scales, times one float32
factor a row (the global scale of NVFP4, the scales of FP8 per channel), which multiplies the sums instead of the
weights: so the inner numbers of NVFP4, MXFP4, MXFP8 and FP8 per channel or tensor are bfloat16 numbers, exactly.

Three ways, by dtype and number of rows of x, and the same for every row of a call:

    few rows, bfloat16    a compiled kernel that reads the packed bytes (``kernels/cpu_linear.py``), on CUDA Triton's
    bfloat16              a run of rows is decoded to bfloat16, then torch's product, whose output is rounded before the
                          factor and again after it
    float32               a run of rows is decoded to float32, factor included, then torch's product

Errors, relative to sum_k |x_k w_k|, with u = 2^-24 and v = 2^-8: float32 and the kernel K * 2u, then v for an output in
bfloat16; the tiles K * u + 2v. FP8 in blocks of 128x128 adds v in the tiles, since its weights do not fit bfloat16.

Knows formats and kernels; must not know modules, models or files, so that it also serves vLLM.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.functional import linear

from ptqpipe.errors import FormatError
from ptqpipe.formats import WHOLE, Format
from ptqpipe.kernels import cpu, cpu_linear
from ptqpipe.qtensor import QTensor

FEW_ROWS = 16  # of x; from here on decoding tiles and torch's product is faster
TILE_BYTES = 4 << 20  # of a decoded run of rows


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A quantized ``[N, K]`` weight as it is multiplied.

    fmt     the format
    shape   (N, K)
    data    uint8 ``[N, K*bits/8]``: the codes, packed as ``packing.py`` says
    scales  of the blocks, as in a QTensor; None where the factors are all there is
    factor  float32 ``[1]`` or ``[N]``: what multiplies the rows of the inner part; None for 1
    divisor float32 0-d: the global scale where it divides, so that `dequantize` rounds as QTensor does; else None
    """

    fmt: Format
    shape: tuple[int, int]
    data: torch.Tensor
    scales: torch.Tensor | None
    factor: torch.Tensor | None
    divisor: torch.Tensor | None = None

    @classmethod
    def from_qtensor(cls, q: QTensor) -> "PackedWeight":
        """The weight of a QTensor, whose bytes it shares. FormatError for one with a low-rank part."""
        if q.low_rank is not None:
            raise FormatError("a packed weight has no low-rank part; multiply that on its own")
        if q.fmt.block[1] == WHOLE:
            return cls(q.fmt, q.shape, q.data, None, q.block_scales().reshape(-1).contiguous())
        if q.global_scale is None:
            return cls(q.fmt, q.shape, q.data, q.scales.contiguous(), None)
        g = q.global_scale.float()
        factor = (1.0 / g if q.global_divides else g).reshape(1)
        return cls(q.fmt, q.shape, q.data, q.scales.contiguous(), factor, g if q.global_divides else None)

    @property
    def device(self) -> torch.device:
        """Where the bytes are."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and factors."""
        return sum(part.nbytes for part in (self.data, self.scales, self.factor) if part is not None)

    def to(self, device: torch.device | str) -> "PackedWeight":
        """The weight on ``device``."""
        rest = (None if part is None else part.to(device) for part in (self.scales, self.factor, self.divisor))
        return PackedWeight(self.fmt, self.shape, self.data.to(device), *rest)

    def narrow(self, dim: int, start: int, length: int) -> "PackedWeight":
        """Rows (dim 0) or columns (dim 1) ``[start, start+length)`` on block edges. FormatError elsewhere."""
        if dim == 1 and self.scales is None:  # one scale a row holds for every part of it
            data = self.data.narrow(1, start, length)
            return replace(self, shape=(self.shape[0], length), data=data)
        factor = self.factor
        if dim == 0 and factor is not None and len(factor) > 1:
            factor = factor.narrow(0, start, length)
        if self.scales is None:
            data = self.data.narrow(0, start, length)
            return replace(self, shape=(length, self.shape[1]), data=data, factor=factor)
        part = self._inner().narrow(dim, start, length)
        return replace(self, shape=part.shape, data=part.data, scales=part.scales.contiguous(), factor=factor)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """``[N, K]``: the float32 decode, bit for bit QTensor's, rounded once to ``dtype``."""
        return self._tile(0, self.shape[0]).to(dtype)

    def _inner(self) -> QTensor:
        """The blocks as a QTensor, its global scale 1."""
        assert self.scales is not None
        one = torch.ones((), device=self.device) if self.fmt.has_global else None
        return QTensor(self.fmt, self.shape, self.data, self.scales, one)

    def _tile(self, start: int, stop: int) -> torch.Tensor:
        """float32 rows ``[start, stop)``, factor included. ``start`` lies on a block edge."""
        if self.scales is None:
            return self.data[start:stop].view(torch.float8_e4m3fn).float() * self._factor(start, stop)
        q = self._inner()
        if self.divisor is not None:
            q = replace(q, global_scale=self.divisor, global_divides=True)
        elif self.factor is not None:
            q = replace(q, global_scale=self.factor.reshape(()))
        return _decoded(q.narrow(0, start, stop - start), torch.float32)

    def _inner_tile(self, start: int, stop: int, room: torch.Tensor) -> torch.Tensor:
        """The inner numbers of rows ``[start, stop)`` in the dtype of ``room``, a flat tensor that it may use."""
        out = room[: (stop - start) * self.shape[1]].view(stop - start, self.shape[1])
        if cpu_linear.unpack(self.data, self.scales, self.fmt, start, stop, out=out):
            return out
        if self.scales is not None:
            return _decoded(self._inner().narrow(0, start, stop - start), room.dtype)
        return self.data[start:stop].view(torch.float8_e4m3fn).to(room.dtype)

    def _factor(self, start: int, stop: int) -> torch.Tensor:
        """float32 ``[1, 1]`` or ``[stop - start, 1]``."""
        assert self.factor is not None
        return (self.factor if len(self.factor) == 1 else self.factor[start:stop]).unsqueeze(1)


def _decoded(q: QTensor, dtype: torch.dtype) -> torch.Tensor:
    if q.data.device.type == "cpu":
        found = cpu.dequantize(
            q.data, q.scales.contiguous(), q.fmt, q.global_scale, dtype, global_divides=q.global_divides
        )
        if found is not None:
            return found
    return q.dequantize().to(dtype)


def packed_linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x [..., K]`` times the weight, ``[..., N]`` in the dtype of x. Not differentiable.

    FormatError for an x of another width.
    """
    if x.shape[-1] != weight.shape[1]:
        raise FormatError(f"an input of {x.shape[-1]} columns for a weight of {weight.shape[0]}x{weight.shape[1]}")
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] <= FEW_ROWS:
        y = _few_rows(rows, weight, bias)
        if y is not None:
            return y.reshape(*x.shape[:-1], -1)
    return _tiles(rows, weight, bias).reshape(*x.shape[:-1], -1)


def _few_rows(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor | None:
    """The kernel of the device, None where there is none."""
    if x.device.type == "cpu":
        return cpu_linear.linear(x, weight.data, weight.scales, weight.factor, weight.fmt, bias)
    return None


def _tiles(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    exact = x.dtype == torch.float32
    dtype = x.dtype if x.dtype in (torch.float32, torch.bfloat16) else torch.float32
    y = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    inputs: Any = x.to(dtype)
    runs = _runs(weight, dtype)
    room = torch.empty(runs[0][1] * weight.shape[1], dtype=dtype, device=x.device)  # one buffer for all of them
    for start, stop in runs:
        tile = weight._tile(start, stop) if exact else weight._inner_tile(start, stop, room)
        out = linear(inputs, tile)
        if not exact and weight.factor is not None:
            out = out * weight._factor(start, stop).squeeze(1)
        y[:, start:stop] = out
    return y if bias is None else y + bias


def _runs(weight: PackedWeight, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Runs of rows on block edges, `TILE_BYTES` each when they are decoded; the first is the longest."""
    n, k = weight.shape
    block = weight.fmt.block[0] or 1
    step = max(block, TILE_BYTES // max(1, k * dtype.itemsize) // block * block)
    return [(start, min(start + step, n)) for start in range(0, n, step)]
