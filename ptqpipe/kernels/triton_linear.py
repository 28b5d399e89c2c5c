"""Linear layers whose weights stay packed on a CUDA device: the Triton kernels behind ``runtime/packed.py``.

Sums are float32, in an order that depends on the shape of the weight, the multiprocessors of the device and the class
of the number of rows of x (`tile_of`): two calls of the same class give a row the same bits whatever the others hold.
Under Triton's interpreter CPU tensors are taken, which is how the kernels are tested without a GPU. They have not been
timed on one: the sizes of tiles are counts of registers and bytes, which ``scripts/bench_triton.py`` can judge.

Knows formats; must not know modules or files. Triton is imported on first use only.
"""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from ptqpipe.formats import WHOLE, Format
from ptqpipe.kernels.triton import available, interpreting

if TYPE_CHECKING:
    from ptqpipe.kernels import triton_products

FEW = 4  # rows of x up to which every lane multiplies on its own: it keeps the sums of each in registers
MANY = 256  # rows of x from which decoding once costs less than decoding in every tile: by counting, not measured
PROGRAMS = 4  # a multiprocessor, below which K is cut
PARTS = 16  # of K at most
_ELEMENTS = {"e2m1": 4, "e4m3": 8}
_NONE, _NUMBERS = 0, 3  # as in triton_products.py, and so are these:
_SCALES = {"e4m3": 1, "e8m0": 2}


@dataclass(frozen=True, slots=True)
class Plan:
    """What the kernels know of a format: bits of a code, kind of scales, bytes of a row and rows that share one."""

    bits: int
    kind: int
    group: int
    scale_rows: int


def plan_of(fmt: Format, scales: torch.Tensor | None) -> Plan | None:
    """The constants of a format that the kernels cover, or None."""
    bits, (rows, columns) = _ELEMENTS.get(fmt.element.name), fmt.block
    if bits is None:
        return None
    if scales is None:
        return Plan(bits, _NONE, 1, 1) if columns == WHOLE else None
    if fmt.scale.name == "bf16" and bits == 8 and columns == 128 and rows != WHOLE:
        return Plan(bits, _NUMBERS, columns, rows)
    kind = _SCALES.get(fmt.scale.name)
    if kind is None or rows != 1 or columns not in (8, 16, 32, 64, 128):
        return None
    return Plan(bits, kind, columns * bits // 8, 1)


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

    E2M1 and E4M3 with E4M3 or E8M0 scales of 8 to 128 columns, E4M3 with bfloat16 scales of 128 columns, and both with
    factors alone. None for the rest, for other dtypes and devices, and for empty tensors.
    """
    plan = plan_of(fmt, scales)
    if plan is None or x.dtype not in (torch.bfloat16, torch.float16) or not x.numel() or not data.numel():
        return None
    if not available() or (x.device.type == "cuda") == interpreting() or data.stride(-1) != 1:
        return None
    if tuple(data.shape) != (shape[0], shape[1] * plan.bits // 8) or x.shape[1] != shape[1]:
        return None
    from ptqpipe.kernels import triton_products

    weight = triton_products.Weight(
        data,
        None if scales is None else _bytes(scales.contiguous()),
        factor,
        None if bias is None else bias.contiguous(),
        *(plan.bits, plan.kind, plan.group, plan.scale_rows),
    )
    tile = tile_of(plan, x.shape[0], shape, parts=parts, processors=1 if interpreting() else _processors(x.device))
    few = x.shape[0] <= FEW
    if interpreting():
        return triton_products.multiply(x.contiguous(), weight, tile, lanes=few, exact=True)
    with torch.cuda.device(x.device):
        return triton_products.multiply(x.contiguous(), weight, tile, lanes=few, exact=False)


def tile_of(
    plan: Plan, m: int, shape: tuple[int, int], *, parts: int | None, processors: int
) -> "triton_products.Tile":
    """The sizes for ``m`` rows of x. The classes of m are 1, 2, 3, 4, and up to 16, 32, 64, and more."""
    from ptqpipe.kernels.triton_products import Tile

    n, width = shape[0], shape[1] * plan.bits // 8
    if m <= FEW:
        # A warp reads 512 bytes of a row, 16 a lane; 32 sums a lane for each row of x, 64 in all.
        rows, columns, tokens = (8 if m <= 2 else 4), 512, m
        columns = max(min(columns, 1 << (width - 1).bit_length()), plan.group)
    else:
        # 64 codes a step; blocks of 128 columns with scales of their own are steps themselves.
        tokens = next((size for size in (16, 32, 64) if m <= size), 128)
        rows, columns = (128 if tokens == 128 else 64), (plan.group if plan.kind == _NUMBERS else 8 * plan.bits)
        columns = max(columns, plan.group)
    if parts is None:
        programs = -(-n // rows) * -(-m // tokens) if m > FEW else -(-n // rows)
        steps = -(-width // columns)
        parts = max(1, min(PARTS, steps // 4, -(-PROGRAMS * processors // programs))) if m <= 64 else 1
    return Tile(rows, columns, tokens, parts)


def _bytes(scales: torch.Tensor) -> torch.Tensor:
    return scales.view(torch.uint8) if scales.element_size() == 1 else scales


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
