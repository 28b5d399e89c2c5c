"""Linear layers whose weights stay packed on a CUDA device: the Triton kernels behind ``runtime/packed.py``.

Sums are float32, in an order that depends on the shape of the weight, the multiprocessors of the device and the class
of the number of rows of x (`tile_of`): two calls of the same class give a row the same bits whatever the others hold.
Under Triton's interpreter CPU tensors are taken, which is how the kernels are tested without a GPU. The sizes of tiles
are those that an H100 was fastest with; ``scripts/bench_triton.py`` measures what they give.

Knows formats; must not know modules or files. Triton is imported on first use only.
"""

from dataclasses import dataclass
from functools import cache

import torch

from ptqpipe.formats import WHOLE, Format
from ptqpipe.kernels.triton import available, interpreting

FEW = 4  # rows of x up to which every lane multiplies on its own: it keeps the sums of each in registers
MANY = 64  # rows of x at most: of more, decoding once, for torch's product, costs less than decoding in every tile
PROGRAMS = 2  # a multiprocessor, below which K is cut
PARTS = 16  # of K at most
_ELEMENTS = {"e2m1": 4, "e4m3": 8}
_NONE, _NUMBERS = 0, 3  # KIND of triton_products.py, and so are these:
_SCALES = {"e4m3": 1, "e8m0": 2}
_SUM_LANES = 1024  # numbers that a program of parts_kernel adds


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """What the kernels know of a format: bits of a code, kind of scales, bytes of a row and rows that share one."""

    bits: int
    kind: int
    group: int
    scale_rows: int


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A packed weight ``[N, K]`` and a bias as the kernels read them.

    data    uint8 ``[N, width]``, the last stride 1
    scales  contiguous ``[ceil(N / scale_rows), blocks]`` of bytes or of floats, by the plan's kind; or None
    factor  float32 ``[1]`` or ``[N]``, or None; bias ``[N]`` or None, contiguous
    """

    data: torch.Tensor
    scales: torch.Tensor | None
    factor: torch.Tensor | None
    bias: torch.Tensor | None
    plan: LinearPlan

    @property
    def factor_kind(self) -> int:
        """FACTOR of the kernels."""
        return 0 if self.factor is None else 1 + (len(self.factor) > 1)

    def arguments(self) -> tuple[torch.Tensor, ...]:
        """Four tensors for the kernels; the bytes stand in for what there is not."""
        return tuple(self.data if part is None else part for part in (self.data, self.scales, self.factor, self.bias))


@dataclass(frozen=True, slots=True)
class Tile:
    """``rows`` rows and ``width`` bytes of a weight per step, room for ``tokens`` rows of x; K in ``parts`` at most."""

    rows: int
    width: int
    tokens: int
    parts: int = 1
    warps: int = 4

    def chunk(self, width: int) -> int:
        """Bytes of a row of ``width`` that one part sums: whole steps."""
        return _over(_over(width, self.width), self.parts) * self.width


_UNPACKED = Tile(8, 256, 0)  # that a program of unpack_kernel decodes


def plan_of(fmt: Format, scales: torch.Tensor | None) -> LinearPlan | None:
    """The constants of a format that the kernels cover, or None."""
    bits, (rows, columns) = _ELEMENTS.get(fmt.element.name), fmt.block
    if bits is None:
        return None
    if scales is None:
        return LinearPlan(bits, _NONE, 1, 1) if columns == WHOLE else None
    if not fmt.scale.enumerable and bits == 8 and columns == 128 and rows != WHOLE:
        return LinearPlan(bits, _NUMBERS, columns, rows)
    kind = _SCALES.get(fmt.scale.name)
    if kind is None or rows != 1 or columns not in (8, 16, 32, 64, 128):
        return None
    return LinearPlan(bits, kind, columns * bits // 8, 1)


def linear(
    x: torch.Tensor,
    data: torch.Tensor,
    scales: torch.Tensor | None,
    factor: torch.Tensor | None,
    fmt: Format,
    shape: tuple[int, int],
    bias: torch.Tensor | None = None,
    *,
    parts: int | None = None,
) -> torch.Tensor | None:
    """``[M, N]`` in the dtype of x: ``x [M, K]`` bfloat16 or float16 times a weight ``[N, K]``, plus ``bias [N]``.

    data, scales, factor  as in a `PackedWeight` whose bytes lie in rows; a row of ``data`` may be part of a longer one
    parts                 into how many parts K is cut at most; None for as many as keep the device busy

    E2M1 and E4M3 with E4M3 or E8M0 scales of 8 to 128 columns, E4M3 with float scales of 128 columns, and both with
    factors alone. None for the rest, for more than `MANY` rows, for other dtypes and devices, and for empty tensors.
    """
    plan = plan_of(fmt, scales)
    if plan is None or x.dtype not in (torch.bfloat16, torch.float16) or not x.numel() or not data.numel():
        return None
    if x.shape[0] > MANY:
        return None
    if not available() or (x.device.type == "cuda") == interpreting() or data.stride(-1) != 1:
        return None
    if tuple(data.shape) != (shape[0], shape[1] * plan.bits // 8) or x.shape[1] != shape[1]:
        return None
    weight = LinearWeight(
        data,
        None if scales is None else _bytes(scales.contiguous()),
        factor,
        None if bias is None else bias.contiguous(),
        plan,
    )
    tile = tile_of(plan, x.shape[0], shape, parts=parts, processors=1 if interpreting() else _processors(x.device))
    few = x.shape[0] <= FEW
    if interpreting():
        return _multiply(x.contiguous(), weight, tile, lanes=few, exact=True)
    with torch.cuda.device(x.device):
        return _multiply(x.contiguous(), weight, tile, lanes=few, exact=False)


def unpacked(
    data: torch.Tensor, scales: torch.Tensor | None, fmt: Format, shape: tuple[int, int]
) -> torch.Tensor | None:
    """bfloat16 ``[N, K]``: the inner numbers of a weight, codes times block scales, rounded where they do not fit.

    Arguments and what has no kernel as in `linear`.
    """
    plan = plan_of(fmt, scales)
    if plan is None or not data.numel() or not available() or (data.device.type == "cuda") == interpreting():
        return None
    if data.stride(-1) != 1 or tuple(data.shape) != (shape[0], shape[1] * plan.bits // 8):
        return None
    weight = LinearWeight(data, None if scales is None else _bytes(scales.contiguous()), None, None, plan)
    out = torch.empty(shape, dtype=torch.bfloat16, device=data.device)
    if interpreting():
        _unpack(out, weight, _UNPACKED)
    else:
        with torch.cuda.device(data.device):
            _unpack(out, weight, _UNPACKED)
    return out


def _unpack(out: torch.Tensor, weight: LinearWeight, tile: Tile) -> None:
    """Fills ``out [N, K]``, a program for each ``tile`` of bytes."""
    from ptqpipe.kernels import triton_products

    plan, (n, width) = weight.plan, weight.data.shape
    size = max(tile.width, plan.group)
    data, scales, *_ = weight.arguments()
    triton_products.unpack_kernel[(_over(width, size), _over(n, tile.rows))](
        out.view(torch.int16), data, scales, n, width, data.stride(0),
        0 if weight.scales is None else weight.scales.shape[1],
        BITS=plan.bits, KIND=plan.kind, GROUP=plan.group, SCALE_ROWS=plan.scale_rows,
        BN=tile.rows, BYTES=size, RUN=plan.group if plan.kind == _NUMBERS else 4, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def tile_of(plan: LinearPlan, m: int, shape: tuple[int, int], *, parts: int | None, processors: int) -> Tile:
    """The sizes for ``m`` rows of x, at most `MANY`. The classes of m are 1, 2, 3, 4, and up to 16, 32, 64."""
    n, width = shape[0], shape[1] * plan.bits // 8
    if m <= FEW:
        # Four bytes a lane, of each row; 4 sums a lane for each of these and each row of x.
        rows, columns, warps = 4, (1024 if m <= 2 else 256), (4 if m <= 2 else 2)
        rows = 64 if interpreting() else rows  # it pays by the operation, not by the lane
        tokens, columns = m, max(4, min(columns, 1 << (width - 1).bit_length()))
    else:
        tokens = next(size for size in (16, 32, MANY) if m <= size)
        rows, columns, warps = 64, 16 * plan.bits, 4  # 128 codes
        columns = columns if plan.kind == _NUMBERS else max(columns, plan.group)
    if parts is None:
        wanted = PROGRAMS * processors // _over(n, rows)
        parts = max(1, min(PARTS, _over(width, columns) // 4, wanted))
    return Tile(rows, columns, tokens, parts, warps)


def _bytes(scales: torch.Tensor) -> torch.Tensor:
    return scales.view(torch.uint8) if scales.element_size() == 1 else scales


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _multiply(x: torch.Tensor, weight: LinearWeight, tile: Tile, *, lanes: bool, exact: bool) -> torch.Tensor:
    """``[M, N]`` of a contiguous x ``[M, K]`` by one of the two kernels; ``exact`` where Triton interprets."""
    from ptqpipe.kernels import triton_products

    data, plan, (m, n) = weight.data, weight.plan, (x.shape[0], weight.data.shape[0])
    chunk, blocks = tile.chunk(data.shape[1]), 0 if weight.scales is None else weight.scales.shape[1]
    parts = _over(data.shape[1], chunk)
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    target = out if parts == 1 else torch.empty(parts, m, n, dtype=torch.float32, device=x.device)
    factor, bias = (weight.factor_kind, weight.bias is not None) if parts == 1 else (0, False)
    if lanes:
        if plan.bits == 4:  # pairs of numbers, which words must hold
            x = (x if x.storage_offset() % 2 == 0 else x.clone()).view(torch.int32)
        triton_products.lanes_kernel[(_over(n, tile.rows), parts)](
            _bits(target), x, *weight.arguments(), n, data.shape[1], data.stride(0), blocks, chunk,
            M=m, FLOAT16=out.dtype == torch.float16, FACTOR=factor, BIAS=bias, BITS=plan.bits, KIND=plan.kind,
            GROUP=plan.group, SCALE_ROWS=plan.scale_rows, BN=tile.rows, BYTES=tile.width,
            num_warps=tile.warps, enable_fp_fusion=True,
        )  # fmt: skip
    else:
        triton_products.tiles_kernel[(_over(n, tile.rows), parts)](
            _bits(target), x, *weight.arguments(), m, n, data.shape[1], data.stride(0), blocks, chunk,
            EXACT=exact, FACTOR=factor, BIAS=bias, BITS=plan.bits, KIND=plan.kind, GROUP=plan.group,
            SCALE_ROWS=plan.scale_rows, BM=tile.tokens, BN=tile.rows, BYTES=tile.width,
            num_warps=tile.warps, enable_fp_fusion=True,
        )  # fmt: skip
    if parts > 1:
        triton_products.parts_kernel[(_over(m * n, _SUM_LANES),)](
            _bits(out), target, *weight.arguments()[2:], m * n, n,
            PARTS=parts, FACTOR=weight.factor_kind, BIAS=weight.bias is not None, LANES=_SUM_LANES,
            num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def _bits(out: torch.Tensor) -> torch.Tensor:
    """What `put` stores to."""
    return out.view(torch.int16) if out.dtype == torch.bfloat16 else out


def _over(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)
