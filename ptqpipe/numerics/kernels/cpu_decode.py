"""Codes decoded and measured by the compiled kernels, bit-equal to torch.

Mirrors ``QTensor.dequantize`` and ``reference.decode_error``. Knows formats; must not know how scales were found.
"""

import ctypes

import torch

from ptqpipe.errors import FormatError
from ptqpipe.numerics.formats import Codec, Format, packed_columns
from ptqpipe.numerics.kernels import cpu_library as lib
from ptqpipe.numerics.kernels.cpu_tensors import DTYPES, check_global, checked_grid, readable
from ptqpipe.numerics.qtensor import QTensor, code_values


def dequantize(
    data: torch.Tensor,
    scales: torch.Tensor,
    fmt: Format,
    global_scale: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    global_divides: bool = False,
    memory: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """``[N, K]`` float32 or bfloat16: the float32 decode of ``QTensor.dequantize``, rounded to ``dtype``.

    ``data``, ``scales``, ``global_scale`` and ``global_divides`` as in a QTensor. ``memory``: of N x K numbers, for the
    result; fresh without it. None for what has no kernel.
    """
    if dtype not in (torch.float32, torch.bfloat16):
        return None
    shape = (data.shape[0], data.shape[1] * 8 // fmt.element.bits)
    job = _decode_job(data, scales, fmt, shape, global_scale, global_divides)
    if job is None:
        return None
    out = torch.empty(shape, dtype=dtype) if memory is None else memory.view(shape)
    job.out, job.out_dtype = out.data_ptr(), DTYPES[dtype]
    return out if lib.call("ptq_decode_rows", ctypes.byref(job)) == lib.OK else None


def decode_error(
    data: torch.Tensor,
    scales: torch.Tensor,
    fmt: Format,
    w: torch.Tensor,
    global_scale: torch.Tensor | None = None,
    *,
    global_divides: bool = False,
) -> tuple[float, float] | None:
    """(sum (decode - w)^2, sum w^2) in float64, bit-equal to ``reference.decode_error``.

    ``data``, ``scales``, ``global_scale`` and ``global_divides`` as in a QTensor of ``w`` ``[N, K]``. None for what has
    no kernel.
    """
    shape = (w.shape[0], w.shape[1])
    if tuple(data.shape) != (shape[0], packed_columns(shape[1], fmt.element.bits)):
        raise FormatError(f"{fmt.name} data {list(data.shape)} is not that of a {shape[0]}x{shape[1]} weight")
    job = _decode_job(data, scales, fmt, shape, global_scale, global_divides)
    if job is None or not readable(w):
        return None
    sums = torch.zeros(2, dtype=torch.float64)
    job.w, job.w_dtype, job.w_stride, job.sums = w.data_ptr(), DTYPES[w.dtype], w.stride(0), sums.data_ptr()
    if lib.call("ptq_decode_rows", ctypes.byref(job)) != lib.OK:
        return None
    return float(sums[0]), float(sums[1])


def code_difference(q: QTensor, other: QTensor, *, only_compare: bool = False) -> tuple[float, float] | None:
    """(sum (decode of q - decode of other)^2, sum (decode of other)^2) in float64: `decode_error` for weights that are
    codes themselves, of the same shape, without decoding them to memory.

    ``only_compare``: of the first it is said whether it is 0, and of the second nothing. None for what has no kernel.
    """
    if any(part.zeros is not None for part in (q, other)) or q.shape != other.shape:
        return None
    jobs = [
        _decode_job(part.data, part.scales, part.fmt, part.shape, part.global_scale, part.global_divides)
        for part in (q, other)
    ]
    if jobs[0] is None or jobs[1] is None:
        return None
    sums = torch.zeros(2, dtype=torch.float64)
    jobs[0].other, jobs[0].sums, jobs[0].only_compare = ctypes.addressof(jobs[1]), sums.data_ptr(), only_compare
    if lib.call("ptq_decode_rows", ctypes.byref(jobs[0])) != lib.OK:
        return None
    return float(sums[0]), float(sums[1])


def _decode_job(
    data: torch.Tensor,
    scales: torch.Tensor,
    fmt: Format,
    shape: tuple[int, int],
    global_scale: torch.Tensor | None,
    global_divides: bool,
) -> ctypes.Structure | None:
    """The common fields of a decode, or None where there is no kernel. FormatError for a grid of another shape."""
    check_global(fmt, global_scale)
    grid = checked_grid(scales, fmt, shape)
    bytes_in_rows = data.device.type == "cpu" and data.dtype == torch.uint8 and data.numel() > 0 and data.stride(0) >= 0
    if not lib.available() or not bytes_in_rows or (data.shape[1] > 1 and data.stride(1) != 1):
        return None
    if not fmt.element.enumerable or (fmt.has_global and not fmt.scale.enumerable):
        return None
    values = _all_values(fmt.element)
    numbers = scales.contiguous() if fmt.scale.enumerable else scales.float().contiguous()
    table = None
    if fmt.scale.enumerable:
        table = _all_values(fmt.scale)
        if global_scale is not None:
            table = table / global_scale.float() if global_divides else table * global_scale.float()
    block = fmt.block_extent(shape)
    job = lib.Decode(
        data=data.data_ptr(), data_stride=data.stride(0), rows=shape[0], cols=shape[1], scales=numbers.data_ptr(),
        scale_cols=grid[1], block_rows=block[0], block_cols=block[1], values=values.data_ptr(),
        scale_values=None if table is None else table.data_ptr(), code_bits=fmt.element.bits,
        scale_codes=int(fmt.scale.enumerable),
    )  # fmt: skip
    job.kept = (data, numbers, values, table)  # the tensors that it points into must outlive the call
    return job


def _all_values(codec: Codec) -> torch.Tensor:
    """float32 ``[256]``: the value of every byte as a code, NaN for bytes that are none."""
    values = torch.full((256,), float("nan"))
    values[: 1 << codec.bits] = code_values(torch.arange(1 << codec.bits, dtype=torch.uint8), codec)
    return values


def decoded(q: QTensor, *, memory: torch.Tensor | None = None) -> torch.Tensor:
    """float32 [N, K]: ``q.dequantize()``, bit for bit. ``memory``: float32 of N x K numbers, which it may take."""
    if q.data.device.type != "cpu" or q.zeros is not None or not lib.available():
        return q.dequantize()
    numbers = dequantize(q.data, q.scales, q.fmt, q.global_scale, global_divides=q.global_divides, memory=memory)
    return q.dequantize() if numbers is None else numbers


def same_numbers(q: QTensor, other: QTensor) -> bool:
    """Whether the compiled kernel finds that both decode to the same finite numbers, zero and its negative being one;
    False where it does not compare them: on a GPU, or of formats without a kernel."""
    if not lib.available() or any(part.data.device.type != "cpu" for part in (q, other)):
        return False
    difference = code_difference(q, other, only_compare=True)
    return difference is not None and difference[0] == 0
