"""Compiled steps of error feedback and refinement on CPU tensors, bit-equal to ``algorithms/columns.py``.

Each function is the torch reference of its name and takes its tensors in its order; it returns None (False) where there
is no kernel. Knows shapes and codecs; must not know moments or algorithms.
"""

import ctypes

import torch

from ptqpipe.formats import Codec
from ptqpipe.kernels import cpu_library as lib
from ptqpipe.kernels.cpu_tensors import ELEMENTS

_FEED_FORWARD, _DESCEND, _CHOOSE_BLOCK = 0, 1, 2
_MOST_COLUMNS = 256


def feed_forward(
    exact: torch.Tensor, target: torch.Tensor, s: torch.Tensor, feedback: torch.Tensor, element: Codec
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(uint8 codes, float32 errors), each [columns, rows]; float32 inputs, ``target`` is left as it was."""
    if not _fits(element, exact, target, s, feedback):
        return None
    codes, error = torch.empty(exact.shape, dtype=torch.uint8), torch.empty_like(exact)
    job = _job(_FEED_FORWARD, exact, element, feedback)
    job.exact, job.target, job.s = exact.data_ptr(), target.data_ptr(), s.data_ptr()
    job.codes, job.error = codes.data_ptr(), error.data_ptr()
    return (codes, error) if _run(job) else None


def descend(
    exact: torch.Tensor,
    error: torch.Tensor,
    codes: torch.Tensor,
    slope: torch.Tensor,
    s: torch.Tensor,
    moment: torch.Tensor,
    element: Codec,
) -> bool:
    """Updates ``error``, ``codes`` and ``slope`` in place; whether it did."""
    if not _fits(element, exact, error, slope, s, moment) or not codes.is_contiguous():
        return False
    job = _job(_DESCEND, exact, element, moment)
    job.exact, job.error, job.slope, job.s = (x.data_ptr() for x in (exact, error, slope, s))
    job.codes = codes.data_ptr()
    return _run(job)


def choose_block(
    target: torch.Tensor,
    ladder: torch.Tensor,
    first: torch.Tensor,
    count: int,
    feedback: torch.Tensor,
    weight: torch.Tensor,
    element: Codec,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """(uint8 codes [columns, rows], int64 scale indices [rows], float32 costs [rows])."""
    if not _fits(element, target, ladder, feedback, weight) or first.dtype != torch.int64 or not first.is_contiguous():
        return None
    codes = torch.empty(target.shape, dtype=torch.uint8)
    scales, cost = torch.empty(target.shape[1], dtype=torch.int64), torch.empty(target.shape[1])
    job = _job(_CHOOSE_BLOCK, target, element, feedback)
    job.target, job.weight, job.ladder = target.data_ptr(), weight.data_ptr(), ladder.data_ptr()
    job.ladder_size, job.count, job.first = len(ladder), count, first.data_ptr()
    job.codes, job.scales, job.cost = codes.data_ptr(), scales.data_ptr(), cost.data_ptr()
    return (codes, scales, cost) if _run(job) else None


def _fits(element: Codec, like: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether a kernel takes these float32 tensors, of which the first is [columns, rows]."""
    plain = all(x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous() for x in (like, *others))
    return plain and element.name in ELEMENTS and 0 < like.shape[0] <= _MOST_COLUMNS and bool(lib.known_isas())


def _job(kind: int, like: torch.Tensor, element: Codec, matrix: torch.Tensor) -> ctypes.Structure:
    return lib.Columns(
        columns=like.shape[0],
        rows=like.shape[1],
        kind=kind,
        element=ELEMENTS[element.name],
        matrix=matrix.data_ptr(),
    )


def _run(job: ctypes.Structure) -> bool:
    return lib.call("ptq_columns_step", ctypes.byref(job)) == lib.OK
