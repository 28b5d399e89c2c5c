"""Triton kernels for CUDA tensors: block scales searched, codes packed, decoded and measured, bit-equal to torch.

The same functions as ``cpu.py``: they mirror ``search/brute_force.py`` (the exact search), ``qtensor.encode``,
``formats.pack``, ``QTensor.dequantize`` and ``qtensor.squared_error``, and return None for what has no kernel. Under
Triton's interpreter they take CPU tensors instead, which is how they are tested without a GPU. Triton is optional and
imported on first use only. Knows formats; must not know searches' names, files or containers.
"""

from collections.abc import Callable
from functools import cache, wraps
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch

from ptqpipe.errors import FormatError, UsageError
from ptqpipe.numerics.formats import Format, packed_columns
from ptqpipe.numerics.kernels.cpu_search import sum_blocks
from ptqpipe.numerics.kernels.cpu_tensors import check_global, column_weights
from ptqpipe.numerics.qtensor import check_finite

if TYPE_CHECKING:
    from ptqpipe.numerics.kernels.triton_search import BlockPlan

P = ParamSpec("P")
R = TypeVar("R")

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_BLOCK_LANES = 128  # blocks a program: one to a thread of four warps, so that 32 magnitudes stay in registers
_ROW_LANES = 1024  # elements a program
_INTERPRETER_LANES = 1 << 14  # the interpreter pays by the operation, not by the lane


@cache
def interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels (TRITON_INTERPRET=1 when Triton was imported)."""
    if find_spec("triton") is None:
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


def available() -> bool:
    """Whether kernels can run here: Triton is installed, and there is a CUDA device or the interpreter."""
    return find_spec("triton") is not None and (torch.cuda.is_available() or interpreting())


def require() -> None:
    """UsageError saying what is missing, unless :func:`available`."""
    if find_spec("triton") is None:
        raise UsageError("device 'cuda' needs Triton, which is not installed; pip install triton, or use device 'cpu'")
    if not available():
        raise UsageError("device 'cuda' was asked for, but torch finds no CUDA device; use device 'cpu'")


def _where_it_lies(
    function: Callable[Concatenate[torch.Tensor, P], R],
) -> Callable[Concatenate[torch.Tensor, P], R]:
    """Runs a function of a tensor on that tensor's GPU: Triton launches on the current one, wherever tensors are."""

    @wraps(function)
    def run(tensor: torch.Tensor, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if tensor.device.type != "cuda":
            return function(tensor, *args, **kwargs)
        with torch.cuda.device(tensor.device):
            return function(tensor, *args, **kwargs)

    return run


@_where_it_lies
def block_quantize(
    w: torch.Tensor,
    fmt: Format,
    *,
    rule: str = "exact",
    global_scale: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Searches block scales and encodes: (data uint8 ``[N, K*bits/8]``, scale codes uint8 ``[N, K/B]``).

    w            ``[N, K]`` bfloat16, float16 or float32
    rule         "exact": the scales of ``search/brute_force.py``, bit for bit; "absmax": those of ``baselines.absmax``
    global_scale float32 0-d, where the format has one
    importance   ``[K]`` non-negative weights of the columns, or None

    E2M1 with E4M3 or UE5M3 scales, with or without a global one, and E2M1, E2M3, E3M2, E4M3 with E8M0 scales, in
    blocks of 8, 16 or 32; None for the rest. NumericsError for NaN and inf.
    """
    plan = _block_plan(w, fmt, global_scale=global_scale) if rule in ("exact", "absmax") else None
    if plan is None:
        return None
    from ptqpipe.numerics.kernels import triton_block

    if rule == "absmax":
        importance = None
    data, scales, damaged = triton_block.quantize(
        w.contiguous(),
        plan,
        absmax=rule == "absmax",
        lanes=_lanes(_BLOCK_LANES, w.numel() // plan.block),
        global_scale=global_scale,
        importance=None if importance is None else column_weights(importance.to(w.device), w),
    )
    if int(damaged):
        check_finite(w)
    return data, scales


@_where_it_lies
def score_total(
    w: torch.Tensor,
    fmt: Format,
    *,
    rule: str = "exact",
    global_scale: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> float | None:
    """The least score of every block (``objective.py``), summed in float64, times global_scale^2.

    The terms are those of ``cpu.score_total``, and so is the order of the sum (``reference.sum_blocks``, on the CPU):
    a choice among global scales does not depend on the device. None where ``block_quantize`` has no kernel.
    """
    plan = _block_plan(w, fmt, global_scale=global_scale) if rule in ("exact", "absmax") else None
    if plan is None:
        return None
    from ptqpipe.numerics.kernels import triton_block

    if rule == "absmax":
        importance = None
    scores, damaged = triton_block.scores(
        w.contiguous(),
        plan,
        absmax=rule == "absmax",
        lanes=_lanes(_BLOCK_LANES, w.numel() // plan.block),
        global_scale=global_scale,
        importance=None if importance is None else column_weights(importance.to(w.device), w),
    )
    if int(damaged):
        check_finite(w)
    total = sum_blocks(scores)
    return total if global_scale is None else total * float(global_scale.double().square())


@_where_it_lies
def dequantize(
    data: torch.Tensor,
    scales: torch.Tensor,
    fmt: Format,
    global_scale: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    global_divides: bool = False,
) -> torch.Tensor | None:
    """``[N, K]`` float32, bfloat16 or float16: the float32 decode of ``QTensor.dequantize``, rounded to ``dtype``.

    ``data``, ``scales``, ``global_scale`` and ``global_divides`` as in a QTensor. None for what has no kernel.
    """
    if not _runs_on(data.device) or dtype not in _DTYPES:
        return None
    from ptqpipe.numerics.kernels import triton_rows

    plan = triton_rows.plan_of(fmt, global_divides=global_divides)
    if plan is None or data.numel() == 0:
        return None
    check_global(fmt, global_scale)
    shape = (data.shape[0], data.shape[1] * 8 // fmt.element.bits)
    out = torch.empty(shape, dtype=dtype, device=data.device)
    triton_rows.dequantize(
        out,
        data.contiguous(),
        scales.contiguous(),
        _global_or_one(global_scale, data.device),
        plan=plan,
        geometry=triton_rows.Geometry.of(fmt, shape),
        lanes=_lanes(_ROW_LANES, out.numel()),
    )
    return out


@_where_it_lies
def decode_error(
    data: torch.Tensor,
    scales: torch.Tensor,
    fmt: Format,
    w: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    *,
    global_divides: bool = False,
) -> tuple[float, float] | None:
    """(sum (decode - w)^2, sum w^2) in float64, the same for the same inputs.

    The terms are those of ``reference.decode_error``, the order of their sum is not: its 16 lanes would leave a GPU
    idle. ``data``, ``scales``, ``global_scale`` and ``global_divides`` as in a QTensor of ``w`` ``[N, K]``. None for
    what has no kernel.
    """
    if not _runs(w):
        return None
    from ptqpipe.numerics.kernels import triton_rows

    plan = triton_rows.plan_of(fmt, global_divides=global_divides)
    if plan is None:
        return None
    check_global(fmt, global_scale)
    shape = (w.shape[0], w.shape[1])
    if tuple(data.shape) != (shape[0], packed_columns(shape[1], fmt.element.bits)):
        raise FormatError(f"{fmt.name} data {list(data.shape)} is not that of a {shape[0]}x{shape[1]} weight")
    return triton_rows.decode_error(
        w.contiguous(),
        data.contiguous(),
        scales.contiguous(),
        _global_or_one(global_scale, w.device),
        plan=plan,
        geometry=triton_rows.Geometry.of(fmt, shape),
        lanes=_lanes(_ROW_LANES, w.numel()),
    )


@_where_it_lies
def fp8_encode(w: torch.Tensor, scales: torch.Tensor, fmt: Format) -> torch.Tensor | None:
    """uint8 ``[N, K]``: the codes of ``qtensor.encode`` for an 8-bit element and scales that are numbers.

    w       ``[N, K]`` bfloat16, float16 or float32
    scales  ``[N/bn, K/bk]`` of the dtype of ``fmt.scale``: one per row, tile or tensor

    None for formats without a kernel. NumericsError for NaN and inf.
    """
    if not _runs(w) or fmt.element.bits != 8 or fmt.scale.enumerable or fmt.has_global:
        return None
    from ptqpipe.numerics.kernels import triton_codecs, triton_rows

    element = triton_codecs.minifloat_of(fmt.element)
    if element is None:
        return None
    data, damaged = triton_rows.fp8_encode(
        w.contiguous(),
        scales.contiguous(),
        element=element,
        geometry=triton_rows.Geometry.of(fmt, (w.shape[0], w.shape[1])),
        lanes=_lanes(_ROW_LANES, w.numel()),
    )
    if int(damaged):
        check_finite(w)
    return data


@_where_it_lies
def amax(w: torch.Tensor) -> tuple[float, int] | None:
    """(max |w|, row-major index of the first NaN or inf or -1 without one) of a matrix.

    The maximum is inf or NaN when there is such an index. None where there is no kernel.
    """
    if not _runs(w):
        return None
    from ptqpipe.numerics.kernels import triton_rows

    largest = float(triton_rows.amax(w.contiguous(), lanes=_lanes(_ROW_LANES, w.numel())))
    if largest < float("inf"):
        return largest, -1
    return largest, int((~torch.isfinite(w)).reshape(-1).int().argmax())


def _of_columns(name: str) -> Callable[..., Any]:
    """The function of this name of ``triton_columns.py``; it gives None for tensors without a kernel."""

    @_where_it_lies
    def run(x: torch.Tensor, /, *args: Any) -> Any:
        if not _runs(x):
            return None
        from ptqpipe.numerics.kernels import triton_columns

        return getattr(triton_columns, name)(x, *args)

    return run


feed_forward = _of_columns("feed_forward")
descend = _of_columns("descend")
choose_block = _of_columns("choose_block")
enter_rows = _of_columns("enter_rows")
sweep_block_rows = _of_columns("sweep_block_rows")


def _block_plan(w: torch.Tensor, fmt: Format, *, global_scale: torch.Tensor | None) -> "BlockPlan | None":
    """The constants of a block search, or None where there is no kernel. FormatError for what does not fit."""
    check_global(fmt, global_scale)
    if not _runs(w):
        return None
    from ptqpipe.numerics.kernels import triton_block

    fmt.scale_shape((w.shape[0], w.shape[1]))  # raises where blocks do not divide
    return triton_block.plan_of(fmt)


def _runs(w: torch.Tensor) -> bool:
    return w.dtype in _DTYPES and w.numel() > 0 and _runs_on(w.device)


def _runs_on(device: torch.device) -> bool:
    return available() and (device.type == "cuda") != interpreting()


def _lanes(lanes: int, count: int) -> int:
    """Lanes a program for ``count`` of them: ``lanes`` on a GPU, few large programs under the interpreter."""
    if not interpreting():
        return lanes
    return min(_INTERPRETER_LANES, max(16, 1 << (count - 1).bit_length()))


def _global_or_one(global_scale: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """float32 ``[1]`` on ``device``."""
    if global_scale is None:
        return torch.ones(1, dtype=torch.float32, device=device)
    return global_scale.to(device, torch.float32).reshape(1)
