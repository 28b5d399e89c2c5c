"""Products with a packed weight on a CPU: the compiled kernels behind ``runtime/packed.py``.

`linear` reads every packed byte once for up to eight rows of x. Sums are float32, in an order that depends on K alone:
neither threads nor the number of rows nor the other rows of a call change a bit of a result. On CPUs with AVX512-BF16
products are those of VDPBF16PS (float32, subnormal inputs taken as zero), elsewhere float32 products and sums.

Knows addresses and formats; must not know modules.
"""

import ctypes

import torch

from ptqpipe.formats import WHOLE, Format
from ptqpipe.kernels import cpu_library as lib

_ELEMENTS = {"e2m1": 0, "e4m3": 1}
_DTYPES = {torch.float32: 0, torch.bfloat16: 2}
_NO_SCALES, _E4M3, _E8M0, _FLOAT = 0, 1, 2, 3
_SCALES = {("e4m3", 16): _E4M3, ("e8m0", 32): _E8M0, ("bf16", 128): _FLOAT}
_WORTH_A_THREAD = 1 << 18  # weights, below which waking another thread costs more than it brings


def linear(
    x: torch.Tensor,
    data: torch.Tensor,
    scales: torch.Tensor | None,
    factor: torch.Tensor | None,
    fmt: Format,
    bias: torch.Tensor | None,
) -> torch.Tensor | None:
    """``[M, N]`` bfloat16: ``x [M, K]`` bfloat16 times a weight as `PackedWeight` describes it, plus ``bias [N]``.

    None for what has no kernel: other dtypes and formats, strided bytes, no compiler.
    """
    job = _job(data, scales, fmt) if x.dtype == torch.bfloat16 and x.device.type == "cpu" else None
    if job is None:
        return None
    x = x.contiguous()
    added = None if bias is None else bias.float().contiguous()
    out = torch.empty(x.shape[0], data.shape[0], dtype=x.dtype)
    job.x, job.m, job.out = x.data_ptr(), x.shape[0], out.data_ptr()
    job.bias = None if added is None else added.data_ptr()
    if factor is not None:
        job.factor, job.factor_step = factor.data_ptr(), int(len(factor) > 1)
    return out if lib.call("ptq_linear_rows", ctypes.byref(job)) == lib.OK else None


def unpack(
    data: torch.Tensor, scales: torch.Tensor | None, fmt: Format, first: int, last: int, *, out: torch.Tensor
) -> bool:
    """Rows ``[first, last)`` of a weight without its factors, to ``out [last - first, K]`` bfloat16; whether it did.

    The float32 product of code and scale, rounded once: exact but for FP8 in blocks of 128x128.
    """
    job = _job(data, scales, fmt)
    if job is None or out.dtype != torch.bfloat16 or not out.is_contiguous():
        return False
    job.out = out.data_ptr()
    return lib.call("ptq_linear_unpack", ctypes.byref(job), ctypes.c_int64(first), ctypes.c_int64(last)) == lib.OK


class _Job(lib.Linear):
    """A job, and what it points to."""

    kept: tuple[torch.Tensor | None, ...] = ()


def _job(data: torch.Tensor, scales: torch.Tensor | None, fmt: Format) -> _Job | None:
    """The weight's part of a job; None where there is no kernel."""
    kind = _kind(fmt, scales)
    if kind is None or data.device.type != "cpu" or data.stride(-1) != 1 or not lib.known_isas():
        return None
    n, k = data.shape[0], data.shape[1] * 8 // fmt.element.bits
    numbers = scales.float().contiguous() if kind == _FLOAT and scales is not None else scales
    job = _Job(
        data=data.data_ptr(), data_stride=data.stride(0), n=n, k=k,
        scales=None if numbers is None else numbers.data_ptr(),
        scale_stride=0 if numbers is None else numbers.shape[1],
        scale_rows=fmt.block[0] if kind == _FLOAT else 1,
        element=_ELEMENTS[fmt.element.name], scale_kind=kind,
        threads=min(torch.get_num_threads(), 1 + n * k // _WORTH_A_THREAD),
    )  # fmt: skip
    job.kept = (data, numbers)
    return job


def _kind(fmt: Format, scales: torch.Tensor | None) -> int | None:
    """How the kernel reads the scales; None where it does not."""
    if fmt.element.name not in _ELEMENTS:
        return None
    if scales is None:
        return _NO_SCALES if fmt.block[1] == WHOLE else None
    return _SCALES.get((fmt.scale.name, fmt.block[1]))
