"""What every algorithm does with a run of rows: the kernel of the device where there is one, else its torch reference.

The two give the same bits, so nothing above this file knows which one ran.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ptqpipe.errors import NumericsError
from ptqpipe.formats import Format
from ptqpipe.qtensor import QTensor, check_finite, encode, squared_error
from ptqpipe.search import get_search

CHUNK_ELEMENTS = 1 << 22


def kernel_for(device: torch.device, name: str) -> Callable[..., Any] | None:
    """The kernel of this name for a device; None where only the torch reference runs."""
    module: ModuleType
    if device.type == "cuda":
        from ptqpipe.kernels import triton as module
    else:
        from ptqpipe.kernels import cpu as module
    return getattr(module, name, None) if module.available() else None


def chunks(shape: tuple[int, int], fmt: Format) -> list[tuple[int, int]]:
    """Runs of rows [start, stop) of about CHUNK_ELEMENTS weights on block edges. A function of the shape alone."""
    block_rows = fmt.block_extent(shape)[0]
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
    """Scales by ``search`` and codes by ``encode`` for rows ``[n, K]`` that hold whole blocks."""
    kernel = kernel_for(w.device, "block_quantize")
    if kernel is not None:
        done = kernel(w, fmt, rule=search, global_scale=global_scale, importance=importance)
        if done is not None:
            return QTensor(fmt, (w.shape[0], w.shape[1]), done[0], done[1], global_scale)
    scales = get_search(search).search(w, fmt, global_scale=global_scale, importance=importance)
    return encode(w, scales, fmt=fmt, global_scale=global_scale)


def measure(q: QTensor, w: torch.Tensor) -> tuple[float, float]:
    """(sum (decode - w)^2, sum w^2) in float64."""
    kernel = kernel_for(w.device, "decode_error")
    if kernel is not None:
        done = kernel(q.data, q.scales, q.fmt, w, q.global_scale)
        if done is not None:
            return float(done[0]), float(done[1])
    return squared_error(q, w), float(w.double().square().sum())


def total_error(w: torch.Tensor, fmt: Format, *, search: str, global_scale: torch.Tensor | None = None) -> float:
    """The squared error that ``search`` leaves on ``w``, without keeping the codes where a kernel can do without."""
    kernel = kernel_for(w.device, "score_total")
    if kernel is not None:
        done = kernel(w, fmt, rule=search, global_scale=global_scale)
        if done is not None:
            return float(done)
    return measure(quantize_rows(w, fmt, search=search, global_scale=global_scale), w)[0]


def checked_amax(w: torch.Tensor, name: str) -> float:
    """max |w|; NumericsError naming the weight and the first NaN or inf."""
    if w.numel() == 0:
        return 0.0
    amax = float(w.abs().amax())  # NaN propagates
    if not amax < float("inf"):
        check_finite(w, f"'{name}'")
        raise NumericsError(f"'{name}' has magnitudes beyond float32; rescale the source")
    return amax
