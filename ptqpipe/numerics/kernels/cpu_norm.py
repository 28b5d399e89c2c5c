"""Root-mean-square norm on a CPU, compiled. Knows addresses; must not know modules."""

import ctypes

import torch

from ptqpipe.errors import FormatError
from ptqpipe.numerics.kernels import cpu_library as lib

_WORTH_A_THREAD = 1 << 16  # numbers, below which waking another thread costs more than it brings


def available() -> bool:
    """Whether the kernels were built for this machine."""
    return bool(lib.known_isas())


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``weight * (x / sqrt(mean(x^2) + eps))`` over the last dimension, bfloat16 ``[..., N]`` and ``[N]``.

    The quotient is rounded to bfloat16 before the product, as modules that compute the mean in float32 do. FormatError
    for an input of another width or dtype.
    """
    x, n = x.contiguous(), len(weight)
    if x.shape[-1] != n or x.dtype != torch.bfloat16:
        raise FormatError(f"an input of {x.shape[-1]} {x.dtype} for a norm of {n} bfloat16")
    out = torch.empty_like(x)
    if out.numel():
        job = norm_job(x.numel() // n, weight, eps)
        job.x, job.out = x.data_ptr(), out.data_ptr()
        status = lib.call("ptq_rms_norm", ctypes.byref(job))
        assert status == lib.OK
    return out


def norm_job(rows: int, weight: torch.Tensor, eps: float) -> ctypes.Structure:
    """The job for ``rows`` but for x and out; it points to the weight, bfloat16 ``[N]``."""
    n = len(weight)
    threads = min(torch.get_num_threads(), 1 + rows * n // _WORTH_A_THREAD)
    return lib.Norm(weight=weight.data_ptr(), rows=rows, n=n, threads=threads, eps=eps)
