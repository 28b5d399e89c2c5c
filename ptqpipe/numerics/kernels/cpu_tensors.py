"""What the kernels of searching and decoding accept: tensors, scale grids, global scales and column weights.

With the numbers of their types in ``csrc/api.h``.
"""

import math

import torch

from ptqpipe.errors import FormatError, NumericsError
from ptqpipe.numerics.formats import Format

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
ELEMENTS = {"e2m1": 0, "e4m3": 1, "e2m3": 2, "e3m2": 3}
INTEGERS = {"int4": 5, "int8": 6, "int8_signed": 7}


def readable(w: torch.Tensor) -> bool:
    """Whether a kernel can read ``w``: a CPU matrix of a known dtype with adjacent columns."""
    matrix = w.device.type == "cpu" and w.dim() == 2 and w.dtype in DTYPES and w.numel() > 0
    return matrix and (w.shape[1] == 1 or w.stride(1) == 1) and w.stride(0) >= 0


def checked_grid(scales: torch.Tensor, fmt: Format, shape: tuple[int, int]) -> tuple[int, int]:
    """The shape of the scale grid; FormatError when ``scales`` are not those of a QTensor of this shape on the CPU."""
    grid = fmt.scale_shape(shape)
    dtype = fmt.scale.dtype or torch.uint8
    if tuple(scales.shape) != grid or scales.device.type != "cpu" or scales.dtype != dtype:
        raise FormatError(
            f"{fmt.name} scales of a {shape[0]}x{shape[1]} weight must be {dtype} {list(grid)} on the CPU, "
            f"got {scales.dtype} {list(scales.shape)} on {scales.device.type}"
        )
    return grid


def check_global(fmt: Format, global_scale: torch.Tensor | None) -> None:
    """FormatError unless there is a global scale exactly where the format has one."""
    if fmt.has_global != (global_scale is not None):
        raise FormatError(f"{fmt.name} {'needs a' if fmt.has_global else 'has no'} global scale")


def normalize_importance(importance: torch.Tensor) -> torch.Tensor:
    """float32 ``[K]``: weights times the power of two that brings the largest into [1, 2), floored at 2^-24.

    Raises NumericsError for a weight that is negative, NaN or inf, and when all are zero.
    """
    h = importance.detach().float().contiguous()
    top = h.amax()
    if not bool(torch.isfinite(h).all()) or bool((h < 0).any()) or not bool(top > 0):
        raise NumericsError("importance must be finite, non-negative and not all zero; check the statistics")
    exponent = math.frexp(float(top))[1] - 1  # a number here: a GPU's own powers of two need not be exact
    return (h.double() * 2.0**-exponent).float().clamp(min=2.0**-24)


def column_weights(importance: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """:func:`normalize_importance`, where ``w`` is; FormatError unless there is one weight for each column of it."""
    if importance.shape != (w.shape[1],):
        columns, shape = w.shape[1], list(importance.shape)
        raise FormatError(f"importance must have one weight for each of {columns} columns, got {shape}")
    return normalize_importance(importance).to(w.device)
