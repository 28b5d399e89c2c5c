"""Compiled error feedback and refinement on CPU tensors.

`feed_forward`, `descend` and `choose_block` are the torch references of ``gptq_steps.py``, bit for bit. The
others are the loops around them, over all columns, on as many threads as torch has: their sums over columns come in
the order of the columns, where torch's products have one of their own. A function returns None (False) where there is
no kernel. Knows shapes and codecs; must not know moments or algorithms.
"""

import ctypes

import torch

from ptqpipe.numerics.formats import Codec
from ptqpipe.numerics.kernels import cpu_library as lib
from ptqpipe.numerics.kernels.cpu_tensors import ELEMENTS, INTEGERS

_FEED, _ENTER, _SWEEP = 0, 1, 2
_BLOCKS = (0, 16, 32)  # columns of a scale that is chosen
_FEED_FORWARD, _DESCEND, _CHOOSE_BLOCK = 0, 1, 2
_MOST_COLUMNS = 256
_CODECS = ELEMENTS | INTEGERS


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


def feed_rows(exact: torch.Tensor, s: torch.Tensor, factor: torch.Tensor, element: Codec) -> torch.Tensor | None:
    """uint8 codes [K, n] of weights ``exact`` [K, n] at the scales ``s`` [K, n], with feedback by ``factor`` [K, K],
    whose columns lie one after the other."""
    if not _passes(element, 0, exact, s, factor.t()):
        return None
    codes = torch.empty(exact.shape, dtype=torch.uint8)
    job = _pass(_FEED, exact, element, factor)
    job.s, job.codes = s.data_ptr(), codes.data_ptr()
    return codes if _ran(job) else None


def enter_rows(
    exact: torch.Tensor,
    ladder: torch.Tensor,
    factor: torch.Tensor,
    weight: torch.Tensor,
    block: int,
    below: int,
    count: int,
    element: Codec,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(uint8 codes [K, n], int64 scales [K/block, n] as indices in ``ladder``) of weights ``exact`` [K, n]: of
    ``count`` scales, the first ``below`` under the smallest that does not clip, the best one of every block.

    factor, weight  [K, K], whose columns lie one after the other, and [K]: the metric
    """
    if not _passes(element, block, exact, ladder, factor.t(), weight):
        return None
    codes = torch.empty(exact.shape, dtype=torch.uint8)
    scales = torch.empty((exact.shape[0] // block, exact.shape[1]), dtype=torch.int64)
    job = _pass(_ENTER, exact, element, factor)
    job.block, job.weight, job.below, job.count = block, weight.data_ptr(), below, count
    job.ladder, job.ladder_size = ladder.data_ptr(), len(ladder)
    job.codes, job.scales = codes.data_ptr(), scales.data_ptr()
    return (codes, scales) if _ran(job) else None


def sweep_rows(
    exact: torch.Tensor,
    error: torch.Tensor,
    codes: torch.Tensor,
    s: torch.Tensor,
    moment: torch.Tensor,
    sweeps: int,
    element: Codec,
) -> bool:
    """Refines ``codes`` uint8 [K, n] in place at fixed scales ``s`` [K, n]; whether it did.

    error  [K, n] exact - decoded, of the codes that are given
    moment  [K, K]
    """
    if not _passes(element, 0, exact, error, s, moment) or not codes.is_contiguous():
        return False
    job = _pass(_SWEEP, exact, element, moment)
    job.s, job.error, job.codes, job.sweeps = s.data_ptr(), error.data_ptr(), codes.data_ptr(), sweeps
    return _ran(job)


def sweep_block_rows(
    exact: torch.Tensor,
    error: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    ladder: torch.Tensor,
    moment: torch.Tensor,
    of_blocks: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    how: tuple[int, float, int],
    element: Codec,
) -> bool:
    """Refines ``codes`` uint8 [K, n] and ``scales`` int64 [K/b, n], indices in ``ladder``, in place; whether it did.

    of_blocks  feedback, weight and inverse of every block, [K/b, b, b] but for the weight [K/b, b], and uint8 [K/b]:
               whether its scale may change
    how        scales tried on either side of a block's own, share of a block's cost that a new one has to be below,
               sweeps
    """
    (feedback, weight, inverse, usable), (window, slack, sweeps) = of_blocks, how
    block = weight.shape[1]
    plain = codes.is_contiguous() and scales.is_contiguous() and usable.is_contiguous()
    if not plain or not _passes(element, block, exact, error, ladder, moment, feedback, weight, inverse):
        return False
    job = _pass(_SWEEP, exact, element, moment)
    job.block, job.below, job.count, job.slack, job.sweeps = block, window, 2 * window + 1, slack, sweeps
    job.feedback, job.weight, job.inverse = feedback.data_ptr(), weight.data_ptr(), inverse.data_ptr()
    job.usable, job.ladder, job.ladder_size = usable.data_ptr(), ladder.data_ptr(), len(ladder)
    job.error, job.codes, job.scales = error.data_ptr(), codes.data_ptr(), scales.data_ptr()
    return _ran(job)


def _passes(element: Codec, block: int, *floats: torch.Tensor) -> bool:
    """Whether a pass takes these float32 tensors."""
    plain = all(x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous() for x in floats)
    return plain and element.name in _CODECS and block in _BLOCKS and bool(lib.known_isas())


def _pass(kind: int, exact: torch.Tensor, element: Codec, matrix: torch.Tensor) -> ctypes.Structure:
    return lib.Pass(
        columns=exact.shape[0],
        rows=exact.shape[1],
        kind=kind,
        element=_CODECS[element.name],
        exact=exact.data_ptr(),
        matrix=matrix.data_ptr(),
        threads=torch.get_num_threads(),
    )


def _ran(job: ctypes.Structure) -> bool:
    return lib.call("ptq_columns_pass", ctypes.byref(job)) == lib.OK


def _fits(element: Codec, like: torch.Tensor, *others: torch.Tensor) -> bool:
    """Whether a kernel takes these float32 tensors, of which the first is [columns, rows]."""
    plain = all(x.device.type == "cpu" and x.dtype == torch.float32 and x.is_contiguous() for x in (like, *others))
    return plain and element.name in _CODECS and 0 < like.shape[0] <= _MOST_COLUMNS and bool(lib.known_isas())


def _job(kind: int, like: torch.Tensor, element: Codec, matrix: torch.Tensor) -> ctypes.Structure:
    return lib.Columns(
        columns=like.shape[0],
        rows=like.shape[1],
        kind=kind,
        element=_CODECS[element.name],
        matrix=matrix.data_ptr(),
    )


def _run(job: ctypes.Structure) -> bool:
    return lib.call("ptq_columns_step", ctypes.byref(job)) == lib.OK
