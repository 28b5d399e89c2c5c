"""Sums of outer products of bfloat16 rows, compiled; see ``csrc/gram.cpp``."""

import ctypes

import torch

from ptqpipe.numerics.kernels import cpu_library as lib
from ptqpipe.numerics.kernels.cpu_attention import exports

_POINTER, _LONG = ctypes.c_void_p, ctypes.c_int64
_Gram = lib.struct(
    "ptq_gram",
    x=_POINTER, y=_POINTER, x_stride=_LONG, y_stride=_LONG, rows=_LONG, x_columns=_LONG, y_columns=_LONG,
    sums=_POINTER, threads=_LONG,
)  # fmt: skip


def add_gram(sums: torch.Tensor, x: torch.Tensor, y: torch.Tensor | None = None) -> bool:
    """Adds ``x^T y`` to ``sums`` float64 ``[K, L]``, of rows bfloat16 ``[tokens, K]`` and ``[tokens, L]``. Without
    ``y`` adds ``x^T x``; then what is below the diagonal of ``sums`` has no meaning afterwards.

    Each sum is a float32 one over 1024 rows, and a float64 one beyond; how many threads there are does not change it.
    False, with nothing added, for what has no kernel; ValueError for shapes that do not fit.
    """
    last = x if y is None else y
    if not (_readable(x) and _readable(last) and sums.device.type == "cpu" and sums.is_contiguous()):
        return False
    if not (lib.multiplies_bf16() and exports("ptq_add_gram")):
        return False
    if (len(last), sums.dtype, *sums.shape) != (len(x), torch.float64, x.shape[1], last.shape[1]):
        raise ValueError(f"sums {sums.dtype} {list(sums.shape)} of rows {list(x.shape)} and {list(last.shape)}")
    job = _Gram(
        x=x.data_ptr(),
        y=None if y is None else y.data_ptr(),
        x_stride=x.stride(0),
        y_stride=last.stride(0),
        rows=len(x),
        x_columns=x.shape[1],
        y_columns=last.shape[1],
        sums=sums.data_ptr(),
        threads=torch.get_num_threads(),
    )
    return lib.call("ptq_add_gram", ctypes.byref(job)) == lib.OK


def _readable(x: torch.Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and x.stride(1) == 1
