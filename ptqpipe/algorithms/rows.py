"""Quantizes a run of rows for every algorithm: by the kernel of the device where there is one, else by its torch
reference.

The two give the same bits, so nothing above this file knows which one ran.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ptqpipe.errors import NumericsError
from ptqpipe.formats import Format
from ptqpipe.kernels import reference
from ptqpipe.kernels.importance import normalize_importance
from ptqpipe.qtensor import QTensor, check_finite, encode
from ptqpipe.search import get_search
from ptqpipe.search.objective import formula, importance_blocks, magnitude_blocks

CHUNK_ELEMENTS = 1 << 22


def kernel_for(device: torch.device, name: str) -> Callable[..., Any] | None:
    """The kernel of this name for a device; None where only the torch reference runs."""
    module: ModuleType
    if device.type == "cuda":
        from ptqpipe.kernels import triton as module
    else:
        from ptqpipe.kernels import cpu as module
    return getattr(module, name, None) if module.available() else None


def kernels_of(device: torch.device) -> str:
    """The name of what `kernel_for` returns for a device, for messages."""
    if device.type == "cuda":
        return "its Triton kernels"
    from ptqpipe.kernels import cpu

    return f"its {cpu.isa()} kernels" if cpu.available() else "torch, without kernels"


def chunks(shape: tuple[int, int], fmt: Format) -> list[tuple[int, int]]:
    """Runs of rows [start, stop) of about CHUNK_ELEMENTS weights on block edges. A function of the shape alone."""
    return row_runs(shape, block_rows=fmt.block_extent(shape)[0])


def row_runs(shape: tuple[int, int], *, block_rows: int = 1) -> list[tuple[int, int]]:
    """Runs of whole blocks of rows [start, stop) of about CHUNK_ELEMENTS weights."""
    step = max(block_rows, CHUNK_ELEMENTS // max(1, shape[1]) // block_rows * block_rows)
    return [(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


def quantize_rows(
    w: torch.Tensor,
    fmt: Format,
    *,
    search: str,
    global_scale: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> QTensor:
    """Scales by ``search`` and codes by ``encode`` for rows ``[n, K]`` of whole blocks."""
    kernel = kernel_for(w.device, "block_quantize")
    if kernel is not None:
        done = kernel(w, fmt, rule=search, global_scale=global_scale, importance=importance)
        if done is not None:
            return QTensor(fmt, (w.shape[0], w.shape[1]), done[0], done[1], global_scale)
    scales = get_search(search).search(w, fmt, global_scale=global_scale, importance=importance)
    return encode_rows(w, scales, fmt, global_scale=global_scale)


def search_scales(w: torch.Tensor, fmt: Format, *, search: str, importance: torch.Tensor | None = None) -> torch.Tensor:
    """The scales of `quantize_rows` alone, for a format without a global one."""
    kernel = kernel_for(w.device, "block_quantize")
    done = None if kernel is None else kernel(w, fmt, rule=search, global_scale=None, importance=importance)
    if done is None:
        return get_search(search).search(w, fmt, global_scale=None, importance=importance)
    scales: torch.Tensor = done[1]
    return scales


def encode_rows(
    w: torch.Tensor, scales: torch.Tensor, fmt: Format, *, global_scale: torch.Tensor | None = None
) -> QTensor:
    """``qtensor.encode`` of rows ``[n, K]``, by the device's kernel where the scales are numbers (FP8)."""
    kernel = None if fmt.scale.enumerable else kernel_for(w.device, "fp8_encode")
    data = None if kernel is None else kernel(w, scales, fmt)
    if data is not None:
        return QTensor(fmt, (w.shape[0], w.shape[1]), data, scales, global_scale)
    return encode(w, scales, fmt=fmt, global_scale=global_scale)


def measure(q: QTensor, w: torch.Tensor) -> tuple[float, float]:
    """(sum (decode - w)^2, sum w^2) in float64, in the order of ``kernels.reference``."""
    kernel = None if q.low_rank is not None else kernel_for(w.device, "decode_error")
    done = None if kernel is None else kernel(q.data, q.scales, q.fmt, w, q.global_scale)
    return done if done is not None else reference.decode_error(q, w)


def weighted_error(q: QTensor, w: torch.Tensor, importance: torch.Tensor) -> float:
    """sum_k h_k sum (decode - w)_k^2 in float64."""
    total = 0.0
    for start, stop in chunks(q.shape, q.fmt):
        part = q if (start, stop) == (0, q.shape[0]) else q.narrow(0, start, stop - start)
        diff = part.dequantize().double() - w[start:stop].double()
        total += float((diff.square_().sum(dim=0) * importance.double()).sum())
    return total


def total_error(
    w: torch.Tensor,
    fmt: Format,
    *,
    search: str,
    global_scale: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> float:
    """The squared error that ``search`` leaves on ``w``: its scores where scales are codes, else by decoding.

    With ``importance`` the weighted one, up to the power of two of ``kernels/importance.py``.
    """
    if not fmt.scale.enumerable:
        q = quantize_rows(w, fmt, search=search, importance=importance)
        return measure(q, w)[0] if importance is None else weighted_error(q, w, normalize_importance(importance))
    kernel = kernel_for(w.device, "score_total")
    done = None if kernel is None else kernel(w, fmt, rule=search, global_scale=global_scale, importance=importance)
    if done is not None:
        return float(done)
    codes = get_search(search).search(w, fmt, global_scale=global_scale, importance=importance).reshape(-1)
    h = importance_blocks(importance, w, fmt)
    found, _ = formula(magnitude_blocks(w, fmt), codes, fmt=fmt, global_scale=global_scale, h=h)
    total = reference.sum_blocks(found)
    return total if global_scale is None else total * float(global_scale) ** 2


def checked_amax(w: torch.Tensor, name: str) -> float:
    """max |w|; NumericsError naming the weight and the first NaN or inf."""
    if w.numel() == 0:
        return 0.0
    kernel = kernel_for(w.device, "amax")
    done = None if kernel is None else kernel(w)
    amax = float(w.abs().amax()) if done is None else float(done[0])  # NaN propagates
    if not amax < float("inf"):
        try:
            check_finite(w, f"'{name}'")
        except NumericsError as error:
            raise NumericsError(str(error), weight=name) from None
    return amax
