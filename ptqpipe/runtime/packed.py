"""PackedWeight and packed_linear: the product with a weight that stays packed in memory.

    y = x @ decode(weight).T + bias

The decode is QTensor's. A weight is an *inner* part, whose numbers come from codes and block scales, times one float32
factor a row (the global scale of NVFP4, the scales of FP8 per channel), which multiplies the sums instead of the
weights: so the inner numbers of NVFP4, MXFP4, MXFP8 and FP8 per channel or tensor are bfloat16 numbers, exactly.

Four ways, by dtype and number of rows of x, and the same for every row of a call:

    bfloat16              a kernel that reads the packed bytes: compiled on a CPU (``kernels/cpu_linear.py``), Triton's
                          on CUDA (``kernels/triton_linear.py``), which takes float16, too
    bfloat16, many rows   where that is faster (CPUs with AMX, or without BF16; CUDA): a run of rows is decoded to
                          bfloat16, then torch's product, whose output is rounded before the factor and again after it
    float32               a run of rows is decoded to float32, factor included, then torch's product
    bfloat16, FP8 inputs  weights of FP8 per channel or tensor and inputs of FP8 per token on CUDA devices that multiply
                          FP8: codes times codes (``kernels/cuda_fp8.py``)

Errors, relative to sum_k |x_k w_k|, with u = 2^-24 and v = 2^-8: float32 and the kernels K * 2u, then v for an output
in bfloat16 (v / 8 in float16); the tiles K * u + 2v. FP8 in blocks of 128x128 adds v in the tiles, since its weights do
not fit bfloat16. E2M1 on AVX2 adds 2^-15 (NEON 2^-14) of the largest of each 16 inputs, times |w|. Codes times codes
skip the rounding of the decoded inputs to bfloat16, which is v against the other ways. For CUDA the bounds are those of
float32 sums, which an H100 kept: its largest error was 0.39 of them, tensor cores included.

Knows formats and kernels; must not know modules, models or files, so that it also serves vLLM.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.functional import linear, pad

from ptqpipe.errors import FormatError
from ptqpipe.numerics.formats import WHOLE, Format
from ptqpipe.numerics.kernels import cpu, cpu_linear, cuda_fp8, triton, triton_linear
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.numerics.schemes import Activation
from ptqpipe.runtime.input_quantizers import InputQuantizer, fp8_codes

TILE_BYTES = 4 << 20  # of a decoded run of rows: it stays in a CPU's cache
CUDA_TILE_BYTES = 256 << 20  # few launches
PADDED_ROWS = 32


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A quantized ``[N, K]`` weight as it is multiplied.

    fmt     the format
    shape   (N, K)
    data    uint8 ``[N, K*bits/8]``: the codes, packed as ``formats.py`` says
    scales  of the blocks, as in a QTensor; None where the factors are all there is (FP8 per channel or tensor)
    factor  float32 ``[1]`` or ``[N]``: what multiplies the rows of the inner part; None for 1
    divisor float32 0-d: the global scale where it divides, so that `dequantize` rounds as QTensor does; else None
    operand of a weight in panels (see `arranged`): what the kernel is given; None: the bytes lie in rows
    """

    fmt: Format
    shape: tuple[int, int]
    data: torch.Tensor
    scales: torch.Tensor | None
    factor: torch.Tensor | None
    divisor: torch.Tensor | None = None
    operand: cpu_linear.Operand | None = field(default=None, repr=False, compare=False)

    @classmethod
    def from_qtensor(cls, q: QTensor) -> "PackedWeight":
        """The weight of a QTensor, whose bytes it shares."""
        if q.fmt.block[1] == WHOLE and q.fmt.element.name == "e4m3":
            return cls(q.fmt, q.shape, q.data, None, q.block_scales().reshape(-1).contiguous())
        if q.global_scale is None:
            return cls(q.fmt, q.shape, q.data, q.scales.contiguous(), None)
        g = q.global_scale.to(q.data.device).float()
        factor = (1.0 / g if q.global_divides else g).reshape(1)
        return cls(q.fmt, q.shape, q.data, q.scales.contiguous(), factor, g if q.global_divides else None)

    @property
    def device(self) -> torch.device:
        """The device of the bytes."""
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and factors."""
        return sum(part.nbytes for part in (self.data, self.scales, self.factor) if part is not None)

    def arranged(self) -> "PackedWeight":
        """The same weight in *panels*, the order of bytes that this machine's kernel is fastest on.

        Itself where there is none, or where zeros that pad the rows to 16 and the columns to 64 would add a tenth.
        """
        n, k = self.shape
        padded = -(-n // 16) * 16 * -(-k // 64) * 64
        if self.operand is not None or self.device.type != "cpu" or 10 * padded > 11 * n * k:
            return self
        if not cpu_linear.has_panels(self.fmt, self.scales):
            return self
        data, scales = cpu_linear.code_panels(self.data, self.fmt), cpu_linear.scale_panels(self.scales, self.fmt)
        operand = cpu_linear.operand(data, scales, self.factor, self.fmt, self.shape, panels=True)
        return replace(self, data=data, scales=scales, operand=operand)

    def in_rows(self) -> "PackedWeight":
        """The same weight with its bytes as a QTensor has them."""
        if self.operand is None:
            return self
        n, k = self.shape
        data = cpu_linear.from_panels(self.data, n, k * self.fmt.element.bits // 8)
        scales = self.scales
        if scales is not None and scales.element_size() == 1:
            scales = cpu_linear.from_panels(scales, n, -(-k // self.fmt.block[1])).view(scales.dtype)
        return replace(self, data=data, scales=scales, operand=None)

    def to(self, device: torch.device | str) -> "PackedWeight":
        """The weight on ``device``."""
        if self.device == torch.device(device):
            return self
        rows = self.in_rows()
        scales, factor, divisor = (
            None if part is None else part.to(device) for part in (rows.scales, rows.factor, rows.divisor)
        )
        return PackedWeight(rows.fmt, rows.shape, rows.data.to(device), scales, factor, divisor).arranged()

    def narrow(self, dim: int, start: int, length: int) -> "PackedWeight":
        """Rows (dim 0) or columns (dim 1) ``[start, start+length)`` on block edges. FormatError elsewhere."""
        if self.operand is not None:
            return self.in_rows().narrow(dim, start, length)
        if dim == 1 and self.scales is None:  # one scale per row holds for every part of it
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

    @staticmethod
    def joined(weights: Sequence["PackedWeight"]) -> "list[PackedWeight] | None":
        """The rows of all weights as one weight, then each of them as a part of its bytes: so each has what it had.

        None where their formats or columns differ, where blocks of rows would lie in two, or for panels.
        """
        first = weights[0]
        step = 1 if first.scales is None else first.fmt.block[0]  # 0: all rows share scales
        for one in weights:
            same = (one.fmt, one.shape[1], one.device) == (first.fmt, first.shape[1], first.device)
            kind = None if one.scales is None else one.scales.dtype
            if not same or one.operand is not None or kind != (None if first.scales is None else first.scales.dtype):
                return None
            if not step or (one is not weights[-1] and one.shape[0] % step):
                return None
        data = torch.cat([one.data for one in weights])
        grids = [one.scales for one in weights if one.scales is not None]
        scales = torch.cat(grids) if grids else None
        whole = PackedWeight(first.fmt, (len(data), first.shape[1]), data, scales, _factors(weights))
        rows = torch.split(data, [len(one.data) for one in weights])
        if scales is None:
            return [whole, *(replace(one, data=part) for one, part in zip(weights, rows, strict=True))]
        parts = torch.split(scales, [len(grid) for grid in grids])
        each = zip(weights, rows, parts, strict=True)
        return [whole, *(replace(one, data=part, scales=grid) for one, part, grid in each)]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """``[N, K]``: the float32 decode, bit for bit QTensor's, rounded once to ``dtype``."""
        return self.in_rows()._tile(0, self.shape[0]).to(dtype)

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
        elif self.factor is not None and len(self.factor) == 1:
            q = replace(q, global_scale=self.factor.reshape(()))
        tile = _decoded(q.narrow(0, start, stop - start), torch.float32)
        return tile if self.factor is None or len(self.factor) == 1 else tile * self._factor(start, stop)

    def _inner_tile(self, start: int, stop: int, room: torch.Tensor) -> torch.Tensor:
        """The inner numbers of rows ``[start, stop)`` in the dtype of ``room``, a flat tensor that it may use."""
        weight = cpu_linear.operand(self.data, self.scales, None, self.fmt, self.shape, panels=False)
        if weight is not None and room.dtype == torch.bfloat16:
            out = room[: (stop - start) * self.shape[1]].view(stop - start, self.shape[1])
            cpu_linear.unpack(weight, start, stop, out=out)
            return out
        if room.dtype == torch.bfloat16:
            part = self if (start, stop) == (0, self.shape[0]) else self.narrow(0, start, stop - start)
            unpacked = triton_linear.unpacked(part.data, part.scales, part.fmt, part.shape)
            if unpacked is not None:
                return unpacked
        if self.scales is not None:
            return _decoded(self._inner().narrow(0, start, stop - start), room.dtype)
        return self.data[start:stop].view(torch.float8_e4m3fn).to(room.dtype)

    def _factor(self, start: int, stop: int) -> torch.Tensor:
        """float32 ``[1, 1]`` or ``[stop - start, 1]``."""
        assert self.factor is not None
        return (self.factor if len(self.factor) == 1 else self.factor[start:stop]).unsqueeze(1)


def _factors(weights: Sequence[PackedWeight]) -> torch.Tensor | None:
    """float32 ``[1]`` where all weights have the same one, else ``[N]`` of all rows; None where none has any."""
    factors = [one.factor for one in weights]
    if all(factor is None for factor in factors):
        return None
    each = [torch.ones(1, device=one.device) if one.factor is None else one.factor for one in weights]
    if all(len(factor) == 1 and torch.equal(factor, each[0]) for factor in each):
        return each[0]
    return torch.cat([factor.expand(one.shape[0]) for factor, one in zip(each, weights, strict=True)])


def _decoded(q: QTensor, dtype: torch.dtype) -> torch.Tensor:
    kernels = {"cpu": cpu.dequantize, "cuda": triton.dequantize}.get(q.data.device.type)
    if kernels is not None:
        numbers = kernels(q.data, q.scales.contiguous(), q.fmt, q.global_scale, dtype, global_divides=q.global_divides)
        if numbers is not None:
            return numbers
    return q.dequantize().to(dtype)


def packed_linear(
    x: torch.Tensor,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    quantizer: InputQuantizer | None = None,
) -> torch.Tensor:
    """``x [..., K]``, quantized by ``quantizer``, times the weight: ``[..., N]`` in the dtype of x. Not differentiable.

    FormatError for an x of another width.
    """
    if x.shape[-1] != weight.shape[1]:
        raise FormatError(f"an input of {x.shape[-1]} columns for a weight of {weight.shape[0]}x{weight.shape[1]}")
    shape = (*x.shape[:-1], weight.shape[0])
    if not x.numel():
        return x.new_empty(shape)
    rows = x.reshape(-1, x.shape[-1])
    y = None
    if quantizer is not None:
        y = _codes_product(rows, weight, bias, quantizer)
        rows = rows if y is not None else quantizer(rows)
    y = _kernel(rows, weight, bias) if y is None else y
    return (_tiles(rows, weight, bias) if y is None else y).reshape(shape)


def packed_linears(x: torch.Tensor, weights: Sequence[tuple[PackedWeight, torch.Tensor | None]]) -> list[torch.Tensor]:
    """``x [..., K]`` times each weight, biases added: what `packed_linear` returns, in one pass where kernels can."""
    rows = x.reshape(-1, x.shape[-1])
    jobs = [(weight.operand, bias) for weight, bias in weights if weight.operand is not None]
    if (
        len(jobs) < len(weights)
        or not len(rows)
        or x.dtype != torch.bfloat16
        or len(rows) > cpu_linear.limit(panels=True)
    ):
        return [packed_linear(x, weight, bias) for weight, bias in weights]
    return [y.reshape(*x.shape[:-1], -1) for y in cpu_linear.linear_each(rows, jobs)]


def _kernel(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor | None:
    """By the kernel of the device; None where there is none for that number of rows."""
    if x.device.type == "cuda":
        return triton_linear.linear(x, weight.data, weight.scales, weight.factor, weight.fmt, weight.shape, bias)
    if x.device.type != "cpu" or x.dtype != torch.bfloat16:
        return None
    if x.shape[0] > cpu_linear.limit(panels=weight.operand is not None):
        return None
    job = weight.operand or cpu_linear.operand(
        weight.data, weight.scales, weight.factor, weight.fmt, weight.shape, panels=False
    )
    return None if job is None else cpu_linear.linear(x, job, bias)


def _codes_product(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, quantizer: InputQuantizer
) -> torch.Tensor | None:
    """FP8 codes of x times those of the weight; None where formats or the device have it otherwise."""
    if quantizer.activation is not Activation.FP8_TOKEN or x.dtype != torch.bfloat16 or not x.numel():
        return None
    if quantizer.rotation:
        return None
    if weight.scales is not None or weight.factor is None or weight.operand or not weight.data.is_contiguous():
        return None
    if weight.fmt.element.name != "e4m3" or not cuda_fp8.fits(x.device, weight.shape):
        return None
    codes, scales = fp8_codes(x.float())
    return cuda_fp8.scaled_mm_linear(codes, scales, weight.data, weight.factor, bias)


def _tiles(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    weight = weight.in_rows()
    exact = x.dtype == torch.float32
    dtype = x.dtype if x.dtype in (torch.float32, torch.bfloat16) else torch.float32
    inputs: Any = _padded(x.to(dtype))
    runs = _runs(weight, dtype)
    y = x.new_empty(x.shape[0], weight.shape[0] if len(runs) > 1 else 0)
    room = torch.empty(runs[0][1] * weight.shape[1] if x.device.type == "cpu" else 0, dtype=dtype)  # for all of them
    for start, stop in runs:
        tile = weight._tile(start, stop) if exact else weight._inner_tile(start, stop, room)
        out = linear(inputs, tile)[: x.shape[0]]
        if not exact and weight.factor is not None:
            out *= weight._factor(start, stop).squeeze(1)
        if len(runs) > 1:
            y[:, start:stop] = out
        else:
            y = out.to(x.dtype)
    return y if bias is None else y + bias


def _padded(x: torch.Tensor) -> torch.Tensor:
    """bfloat16 rows on a CPU with rows of zeros after them, to a multiple of `PADDED_ROWS`.

    oneDNN, which multiplies bfloat16 there, keeps what it compiled for each number of rows, up to 1024 of them: 0.9 GiB
    for the four shapes of layers of a 4-million-parameter model.
    """
    missing = -x.shape[0] % PADDED_ROWS
    if x.device.type != "cpu" or x.dtype != torch.bfloat16 or not missing:
        return x
    return pad(x, (0, 0, 0, missing))


def _runs(weight: PackedWeight, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Runs of rows on block edges, `TILE_BYTES` each when they are decoded; the first is the longest."""
    n, k = weight.shape
    block = weight.fmt.block[0] or 1
    tile_bytes = CUDA_TILE_BYTES if weight.device.type == "cuda" else TILE_BYTES
    step = max(block, tile_bytes // max(1, k * dtype.itemsize) // block * block)
    return [(start, min(start + step, n)) for start in range(0, n, step)]
