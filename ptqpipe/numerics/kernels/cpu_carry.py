"""Codes of MXFP4 written in other formats by the compiled kernels, without loss and without being decoded.

What ``cpu_search.py`` gives for the decoded numbers wherever it loses nothing of them, bit for bit:
``quantization/lossless_mxfp4.py`` says why. Knows formats; must not know searches, files or containers.
"""

import ctypes
import math

import torch

from ptqpipe.numerics.formats import FORMATS, Format
from ptqpipe.numerics.kernels import cpu_library as lib
from ptqpipe.numerics.qtensor import QTensor

NO_PLACE = -32768
_BLOCK = 32  # numbers of MXFP4 with one scale
_PLACES, _TO_NVFP4, _TO_E4M3 = 0, 1, 2  # steps of a ptq_carry


def fp4_places(q: QTensor) -> torch.Tensor | None:
    """int16 ``[N, K/32]``: the place of the largest magnitude of every block of a matrix in MXFP4, `NO_PLACE` for
    blocks of zeros. `value_of` says what a place is.

    None for another format, without kernels, and where a scale is NaN.
    """
    job = _job(q, _PLACES)
    if job is None or bool((q.scales == 255).any()):
        return None
    places = torch.empty(q.scales.shape, dtype=torch.int16)
    job.places = places.data_ptr()
    return places if _run(job) else None


def value_of(place: int) -> float:
    """The number at a place: 2^e at 2 (e + 127), 1.5 * 2^e at the next; 0 for `NO_PLACE`."""
    return 0.0 if place == NO_PLACE else math.ldexp(1 + place % 2 / 2, (place >> 1) - 127)


def fp4_to_nvfp4(q: QTensor, exponent: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(data, scales) of NVFP4 at the global scale 2^exponent, with the values of ``q`` in MXFP4: uint8 ``[N, K/2]`` and
    ``[N, K/16]``. None where one block has no such codes."""
    job = _job(q, _TO_NVFP4)
    if job is None:
        return None
    data = torch.empty(q.data.shape, dtype=torch.uint8)
    scales = torch.empty(FORMATS["nvfp4"].scale_shape(q.shape), dtype=torch.uint8)
    job.exponent, job.out, job.out_scales = exponent, data.data_ptr(), scales.data_ptr()
    return (data, scales) if _run(job) else None


def fp4_to_e4m3(q: QTensor, exponents: torch.Tensor, fmt: Format) -> torch.Tensor | None:
    """uint8 ``[N, K]``: E4M3 codes with the values of ``q`` in MXFP4 at the scales 2^exponents, int16, one for each
    block of ``fmt``. None where one number has no such code, or blocks of ``fmt`` do not hold whole ones of MXFP4."""
    job = _job(q, _TO_E4M3)
    height, width = fmt.block_extent(q.shape)
    if job is None or width % _BLOCK:
        return None
    assert exponents.dtype == torch.int16
    assert tuple(exponents.shape) == fmt.scale_shape(q.shape)
    numbers, data = exponents.contiguous(), torch.empty(q.shape, dtype=torch.uint8)
    job.exponents, job.block_rows, job.block_cols, job.out = numbers.data_ptr(), height, width, data.data_ptr()
    return data if _run(job) else None


def _job(q: QTensor, step: int) -> ctypes.Structure | None:
    """The common fields, None where there is no kernel."""
    source = FORMATS["mxfp4"]
    is_mxfp4 = (q.fmt.element, q.fmt.block, q.fmt.scale) == (source.element, source.block, source.scale)
    plain = not q.fmt.has_global and q.zeros is None
    rows = all(
        part.device.type == "cpu"
        and part.numel()
        and part.stride(0) >= 0
        and (part.shape[1] == 1 or part.stride(1) == 1)
        for part in (q.data, q.scales)
    )
    if not (is_mxfp4 and plain and rows and lib.available()):
        return None
    return lib.Carry(
        data=q.data.data_ptr(), scales=q.scales.data_ptr(), data_stride=q.data.stride(0),
        scale_stride=q.scales.stride(0), rows=q.shape[0], cols=q.shape[1], step=step,
    )  # fmt: skip


def _run(job: ctypes.Structure) -> bool:
    """Whether nothing is lost. What the job points into must outlive the call: callers hold it."""
    lost = ctypes.c_int64(0)
    job.lost = ctypes.addressof(lost)
    return lib.call("ptq_carry_codes", ctypes.byref(job)) == lib.OK and lost.value == 0
