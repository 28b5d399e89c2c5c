"""Compiled kernels for CPU tensors: block scales searched and codes packed at memory speed, bit-equal to torch.

Mirrors ``search/brute_force.py`` (the exact search), ``qtensor.encode`` and ``packing.pack``. The C++ lies in ``csrc/``
and is called through ctypes, so every call releases the interpreter lock and runs on the caller's thread alone: the
caller brings the threads. Functions return None for combinations without a kernel. Knows formats; must not know
searches' names, files or containers.
"""

import ctypes
from functools import cache
from importlib.util import find_spec

import torch

from ptqpipe.errors import FormatError, NumericsError
from ptqpipe.formats import Format
from ptqpipe.packing import packed_columns
from ptqpipe.qtensor import check_finite

_ABI = 1
_ISAS = ("avx512", "avx2", "baseline")  # best first
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_ELEMENTS = {"e2m1": 0, "e4m3": 1, "e2m3": 2, "e3m2": 3}
_MINIFLOAT3, _E8M0 = 0, 1
_SCALES = {"e4m3": (_MINIFLOAT3, 7), "ue5m3": (_MINIFLOAT3, 15), "e8m0": (_E8M0, 127)}  # kind, exponent bias
_EXACT, _GIVEN = 0, 1
_OK, _NOT_FINITE = 0, 1
_GLOBAL_RANGE = 2.0**90  # beyond it, or below its inverse, scales or their inverses may leave the float32 range


class _Blocks(ctypes.Structure):
    """``struct ptq_blocks`` of csrc/api.h, field by field."""

    _fields_ = (
        ("w", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("cols", ctypes.c_int64),
        ("row_stride", ctypes.c_int64),
        ("dtype", ctypes.c_int32),
        ("block", ctypes.c_int32),
        ("element", ctypes.c_int32),
        ("scale_kind", ctypes.c_int32),
        ("scale_bias", ctypes.c_int32),
        ("scale_top", ctypes.c_int32),
        ("rule", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("importance", ctypes.c_void_p),
        ("global_scales", ctypes.c_void_p),
        ("n_global", ctypes.c_int64),
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("totals", ctypes.c_void_p),
    )


@cache
def _library() -> ctypes.CDLL | None:
    """The compiled extension, or None when it was not built."""
    spec = find_spec("ptqpipe.kernels._cpu")
    if spec is None or spec.origin is None:
        return None
    library = ctypes.CDLL(spec.origin)
    if library.ptq_abi() != _ABI:
        return None
    return library


@cache
def _known_isas() -> tuple[str, ...]:
    """The instruction sets of this machine that have kernels, best first."""
    library = _library()
    return () if library is None else tuple(name for name in _ISAS if library.ptq_has(name.encode()))


_forced: str | None = None


def available() -> bool:
    """Whether the extension was built and this CPU runs it."""
    return bool(_known_isas())


def isa() -> str:
    """The instruction set in use: "avx512", "avx2", "baseline", or "none" without the extension."""
    known = _known_isas()
    return _forced or (known[0] if known else "none")


def isas() -> tuple[str, ...]:
    """Every instruction set that :func:`force_isa` accepts here, best first."""
    return _known_isas()


def force_isa(name: str | None) -> None:
    """Uses the kernels of one instruction set from now on (tests, benchmarks); None goes back to the best one.

    Raises FormatError for a name that this machine does not run. Results do not depend on it, speed does.
    """
    global _forced
    if name is not None and name not in _known_isas():
        raise FormatError(f"no kernels for {name!r} here; this machine has {', '.join(_known_isas()) or 'none'}")
    _forced = name


def block_quantize(
    w: torch.Tensor,
    fmt: Format,
    *,
    rule: str = "exact",
    global_scale: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Searches block scales and encodes: (data uint8 ``[N, K*bits/8]``, scale codes uint8 ``[N, K/B]``).

    w            ``[N, K]`` bfloat16, float16 or float32, columns adjacent in memory
    rule         "exact": the scales of ``search/brute_force.py``, bit for bit
    global_scale float32 0-d, where the format has one
    importance   float32 ``[K]`` weights of ``objective.normalize_importance``, or None

    None when there is no kernel for the combination. NumericsError for NaN and inf.
    """
    job = _job(w, fmt, global_scale=global_scale, importance=importance)
    if job is None or rule != "exact":
        return None
    job.rule = _EXACT
    data = torch.empty(w.shape[0], packed_columns(w.shape[1], fmt.element.bits), dtype=torch.uint8)
    scales = torch.empty(fmt.scale_shape((w.shape[0], w.shape[1])), dtype=torch.uint8)
    job.data, job.scales = data.data_ptr(), scales.data_ptr()
    return (data, scales) if _run(job, w) else None


def score_total(
    w: torch.Tensor,
    fmt: Format,
    *,
    rule: str = "exact",
    global_scale: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> float | None:
    """The least score of every block, summed in float64 in a fixed order, times global_scale^2.

    For the exact rule without weights this is the squared error that ``block_quantize`` leaves, up to float32 rounding
    of each block's score. None where ``block_quantize`` has no kernel.
    """
    scales = None if global_scale is None else global_scale.reshape(1)
    totals = score_totals(w, fmt, rule=rule, global_scales=scales, importance=importance)
    return None if totals is None else totals[0]


def score_totals(
    w: torch.Tensor,
    fmt: Format,
    *,
    rule: str = "exact",
    global_scales: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> list[float] | None:
    """:func:`score_total` for each of ``global_scales`` (float32 ``[n]``), reading ``w`` once."""
    job = _job(w, fmt, global_scale=global_scales, importance=importance)
    if job is None or rule != "exact":
        return None
    totals = torch.empty(job.n_global, dtype=torch.float64)
    job.rule, job.totals = _EXACT, totals.data_ptr()
    if not _run(job, w):
        return None
    if global_scales is not None:
        totals *= global_scales.double().square()
    return [float(total) for total in totals]


class _Job(_Blocks):
    """A struct with the tensors that it points into, which must outlive the call."""

    kept: tuple[torch.Tensor | None, ...]


def _job(
    w: torch.Tensor, fmt: Format, *, global_scale: torch.Tensor | None, importance: torch.Tensor | None
) -> _Job | None:
    """The common fields of a call, or None where there is no kernel for it."""
    if fmt.has_global != (global_scale is not None):
        raise FormatError(f"{fmt.name} {'needs a' if fmt.has_global else 'has no'} global scale")
    block = fmt.block[1]
    supported = fmt.block[0] == 1 and 2 <= block <= 256 and block * fmt.element.bits % 8 == 0
    element, scale = _ELEMENTS.get(fmt.element.name), _SCALES.get(fmt.scale.name)
    if not supported or element is None or scale is None or not _readable(w) or not available():
        return None
    fmt.scale_shape((w.shape[0], w.shape[1]))  # raises where blocks do not divide
    kind, bias = scale
    globals_ = torch.ones(1) if global_scale is None else global_scale.detach().reshape(-1).float().contiguous()
    if kind == _E8M0 and global_scale is not None:
        return None
    if not bool(((globals_ >= 1 / _GLOBAL_RANGE) & (globals_ <= _GLOBAL_RANGE)).all()):
        return None
    h = None if importance is None else _normalized(importance, w.shape[1])
    job = _Job(
        w=w.data_ptr(), rows=w.shape[0], cols=w.shape[1], row_stride=w.stride(0), dtype=_DTYPES[w.dtype], block=block,
        element=element, scale_kind=kind, scale_bias=bias, scale_top=len(fmt.scale.magnitudes) - 1,
        importance=None if h is None else h.data_ptr(), global_scales=globals_.data_ptr(), n_global=len(globals_),
    )  # fmt: skip
    job.kept = (w, globals_, h)
    return job


def _readable(w: torch.Tensor) -> bool:
    """Whether a kernel can read ``w``: a CPU matrix of a known dtype with adjacent columns."""
    known = w.device.type == "cpu" and w.dim() == 2 and w.dtype in _DTYPES
    return known and (w.shape[1] == 1 or w.stride(1) == 1) and w.stride(0) >= 0


def _normalized(importance: torch.Tensor, columns: int) -> torch.Tensor:
    """What ``objective.normalize_importance`` returns, which this layer cannot import: float32 ``[K]``."""
    h = importance.detach().float().contiguous()
    if h.shape != (columns,):
        raise FormatError(f"importance must have one weight for each of {columns} columns, got {list(h.shape)}")
    top = h.amax()
    if not bool(torch.isfinite(h).all()) or bool((h < 0).any()) or not bool(top > 0):
        raise NumericsError("importance must be finite, non-negative and not all zero; check the statistics")
    return torch.ldexp(h, 1 - torch.frexp(top).exponent).clamp(min=2.0**-24)


def _run(job: _Job, w: torch.Tensor) -> bool:
    """Runs a job: False where the kernel declines, NumericsError for NaN and inf."""
    if w.shape[0] == 0 or w.shape[1] == 0:
        return False
    library = _library()
    assert library is not None
    status = library.ptq_quantize_blocks(isa().encode(), ctypes.byref(job))
    if status == _NOT_FINITE:
        check_finite(w)
    return bool(status == _OK)
