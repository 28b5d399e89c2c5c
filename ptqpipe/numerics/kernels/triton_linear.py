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

from ptqpipe.numerics.formats import WHOLE, Format
from ptqpipe.numerics.kernels.triton import available, interpreting

MANY = 64  # rows of x at most: of more, decoding once, for torch's product, costs less than decoding in every tile
PARTS = 16  # of K at most
# By the rows of x that a program takes: rows of the weight, warps, and programs a multiprocessor, below which K is cut.
_SIZES = {8: (32, 2, 5), 16: (32, 2, 5), 32: (64, 4, 4), MANY: (128, 8, 1)}
_ELEMENTS = {"e2m1": 4, "e4m3": 8}
_NONE, _NUMBERS = 0, 3  # KIND of triton_products.py, and so are these:
_SCALES = {"e4m3": 1, "e8m0": 2}
_SUM_LANES = 1024  # numbers that a program of parts_kernel adds


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """Kernel constants of a format: bits of a code, kind of scales, items of 16 bits and rows that share one."""

    bits: int
    kind: int
    group: int
    scale_rows: int


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """A packed weight ``[N, K]`` and a bias as the kernels read them.

    data    int16 ``[N, width]``, the last stride 1: items of four codes of 4 bits or two of 8
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
        return 0 if self.factor is None else 1 + (len(self.factor) > 1)

    def arguments(self) -> tuple[torch.Tensor, ...]:
        """Four tensors for the kernels; the bytes stand in for what there is not."""
        return tuple(self.data if part is None else part for part in (self.data, self.scales, self.factor, self.bias))


@dataclass(frozen=True, slots=True)
class Tile:
    """``rows`` rows and ``items`` items of a weight per step, room for ``tokens`` rows of x; K in ``parts`` at most."""

    rows: int
    items: int
    tokens: int
    parts: int = 1
    warps: int = 4
    stages: int = 3

    def chunk(self, width: int) -> int:
        """Items of a row of ``width`` that one part sums: whole steps."""
        return _over(_over(width, self.items), self.parts) * self.items


_UNPACKED = Tile(8, 128, 0)  # that a program of unpack_kernel decodes


def plan_of(fmt: Format, scales: torch.Tensor | None) -> LinearPlan | None:
    """The constants of a format that the kernels cover, or None."""
    bits, (rows, columns) = _ELEMENTS.get(fmt.element.name), fmt.block
    if bits is None:
        return None
    if scales is None:
        return LinearPlan(bits, _NONE, 1, 1) if columns == WHOLE else None
    if not fmt.scale.enumerable and bits == 8 and columns == 128 and rows != WHOLE:
        return LinearPlan(bits, _NUMBERS, columns // 2, rows)
    kind = _SCALES.get(fmt.scale.name)
    if kind is None or rows != 1 or columns not in (8, 16, 32, 64, 128):
        return None
    return LinearPlan(bits, kind, columns * bits // 16, 1)


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
    factors alone. None for the rest, for more than `MANY` rows, for other dtypes and devices, for empty tensors, and
    for rows that are an odd number of bytes or begin at one.
    """
    weight = _weight(data, scales, factor, fmt, shape, None if bias is None else bias.contiguous())
    if weight is None or x.dtype not in (torch.bfloat16, torch.float16) or not x.numel():
        return None
    if x.shape[0] > MANY or x.shape[1] != shape[1] or x.device != data.device:
        return None
    processors = 1 if interpreting() else _processors(x.device)
    tile = tile_of(weight.plan, x.shape[0], shape, x.dtype, parts=parts, processors=processors)
    if interpreting():
        return _multiply(x.contiguous(), weight, tile, exact=True)
    with torch.cuda.device(x.device):
        return _multiply(x.contiguous(), weight, tile, exact=False)


def unpacked(
    data: torch.Tensor, scales: torch.Tensor | None, fmt: Format, shape: tuple[int, int]
) -> torch.Tensor | None:
    """bfloat16 ``[N, K]``: the inner numbers of a weight, codes times block scales, rounded where they do not fit.

    Arguments and what has no kernel as in `linear`.
    """
    weight = _weight(data, scales, None, fmt, shape, None)
    if weight is None:
        return None
    out = torch.empty(shape, dtype=torch.bfloat16, device=data.device)
    if interpreting():
        _unpack(out, weight, _UNPACKED)
    else:
        with torch.cuda.device(data.device):
            _unpack(out, weight, _UNPACKED)
    return out


def _weight(
    data: torch.Tensor,
    scales: torch.Tensor | None,
    factor: torch.Tensor | None,
    fmt: Format,
    shape: tuple[int, int],
    bias: torch.Tensor | None,
) -> LinearWeight | None:
    """The weight as the kernels read it; None where they have no kernel for it."""
    plan = plan_of(fmt, scales)
    if plan is None or not data.numel() or not available() or (data.device.type == "cuda") == interpreting():
        return None
    if tuple(data.shape) != (shape[0], shape[1] * plan.bits // 8) or data.stride(-1) != 1:
        return None
    if data.shape[1] % 2 or data.stride(0) % 2 or data.storage_offset() % 2:
        return None
    numbers = None if scales is None else _bytes(scales.contiguous())
    return LinearWeight(data.view(torch.int16), numbers, factor, bias, plan)


def _unpack(out: torch.Tensor, weight: LinearWeight, tile: Tile) -> None:
    """Fills ``out [N, K]``, a program for each ``tile`` of items."""
    from ptqpipe.numerics.kernels import triton_products

    plan, (n, width) = weight.plan, weight.data.shape
    size = max(tile.items, plan.group)
    data, scales, *_ = weight.arguments()
    triton_products.unpack_kernel[(_over(width, size), _over(n, tile.rows))](
        out.view(torch.int16), data, scales, n, width, data.stride(0),
        0 if weight.scales is None else weight.scales.shape[1],
        BITS=plan.bits, KIND=plan.kind, GROUP=plan.group, SCALE_ROWS=plan.scale_rows,
        BN=tile.rows, ITEMS=size, num_warps=tile.warps, enable_fp_fusion=True,
    )  # fmt: skip


def tile_of(
    plan: LinearPlan, m: int, shape: tuple[int, int], dtype: torch.dtype, *, parts: int | None, processors: int
) -> Tile:
    """The sizes for ``m`` rows of x, at most `MANY`. The classes of m are up to 8 (from Triton 3.6 on), 16, 32, 64."""
    n, width = shape[0], shape[1] * plan.bits // 16
    tokens = next(size for size in _SIZES if max(m, _least_rows()) <= size)
    rows, warps, programs = _SIZES[tokens]
    items = (32 if tokens == MANY else 64) * plan.bits // 4  # as many codes of 8 bits as of 4
    if dtype == torch.float16:  # two operands in place of one
        items, warps = items // 2, max(warps, min(8, tokens // 4))
    items = min(items, plan.group) if plan.kind == _NUMBERS else max(items, plan.group)
    if parts is None:
        parts = max(1, min(PARTS, _over(width, items) // 4, programs * processors // _over(n, rows)))
    return Tile(rows, items, tokens, parts, warps)


def _bytes(scales: torch.Tensor) -> torch.Tensor:
    return scales.view(torch.uint8) if scales.element_size() == 1 else scales


@cache
def _least_rows() -> int:
    """Rows of x that a program takes at least: Triton 3.4 has no product of fewer than 16, and 3.5 was not tried."""
    import triton

    return 8 if tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6) else 16


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _multiply(x: torch.Tensor, weight: LinearWeight, tile: Tile, *, exact: bool) -> torch.Tensor:
    """``[M, N]`` of a contiguous x ``[M, K]``; ``exact`` where Triton interprets."""
    from ptqpipe.numerics.kernels import triton_products

    data, plan, (m, n) = weight.data, weight.plan, (x.shape[0], weight.data.shape[0])
    chunk, blocks = tile.chunk(data.shape[1]), 0 if weight.scales is None else weight.scales.shape[1]
    parts = _over(data.shape[1], chunk)
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    target = out if parts == 1 else torch.empty(parts, m, n, dtype=torch.float32, device=x.device)
    factor, bias = (weight.factor_kind, weight.bias is not None) if parts == 1 else (0, False)
    triton_products.tiles_kernel[(_over(n, tile.rows), parts)](
        _bits(target), x, *weight.arguments(), m, n, data.shape[1], data.stride(0), blocks, chunk,
        EXACT=exact, FACTOR=factor, BIAS=bias, BITS=plan.bits, KIND=plan.kind, GROUP=plan.group,
        SCALE_ROWS=plan.scale_rows, BM=tile.tokens, BN=tile.rows, ITEMS=tile.items, STAGES=tile.stages,
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
    return out.view(torch.int16) if out.dtype == torch.bfloat16 else out


def _over(a: int, b: int) -> int:
    """``a / b``, rounded up."""
    return -(-a // b)
