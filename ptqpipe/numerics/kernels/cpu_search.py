"""Block scales searched and codes packed by the compiled kernels, bit-equal to torch.

Mirrors ``search/brute_force.py`` (the exact search) and the baselines of ``search/``, ``qtensor.encode`` and
``formats.pack``. Knows formats and rules; must not know files or containers.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import torch

from ptqpipe.numerics.formats import CODECS, Format, pack, packed_columns
from ptqpipe.numerics.kernels import cpu_library as lib, reference
from ptqpipe.numerics.kernels.cpu_tensors import (
    DTYPES,
    ELEMENTS,
    INTEGERS,
    check_global,
    checked_grid,
    column_weights,
    readable,
)
from ptqpipe.numerics.qtensor import check_finite, scale_values, to_blocks

_MINIFLOAT3, _E8M0 = 0, 1
_SCALES = {"e4m3": (_MINIFLOAT3, 7), "ue5m3": (_MINIFLOAT3, 15), "e8m0": (_E8M0, 127)}  # kind, exponent bias
_RULES = {
    "exact": 0, "absmax": 2, "absmax_pz": 3, "four_over_six": 4, "ocp_floor": 5, "ocp_even": 6, "ocp_ceil": 7,
    "powers": 8,
}  # fmt: skip
_WEIGHTED = ("exact", "four_over_six")  # the rules that importance matters to
_GLOBAL_RANGE = 2.0**100  # beyond it, or below its inverse, scales or their inverses may leave the float32 range


def block_quantize(
    w: torch.Tensor,
    fmt: Format,
    *,
    rule: str = "exact",
    global_scale: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Searches block scales and encodes: (data uint8 ``[N, K*bits/8]``, scales ``[N/bn, K/bk]`` as in a QTensor).

    w            ``[N, K]`` bfloat16, float16 or float32, columns adjacent in memory
    rule         "exact": the scales of ``search/brute_force.py``, bit for bit; or a baseline of ``search/`` by name:
                 absmax, absmax_pz, four_over_six, ocp_floor, ocp_even, ocp_ceil
    global_scale float32 0-d, where the format has one
    importance   ``[K]`` non-negative weights of the columns, or None

    E2M1, E2M3, E3M2 or E4M3 elements with E4M3 or UE5M3 scales (with or without a global one) or E8M0 scales, in
    blocks of 2 to 256 columns that fill whole bytes; E4M3 rows, tiles and tensors with bfloat16 scales, or (tiles, the
    exact rule) E8M0 ones; INT4 and INT8 rows and groups with bfloat16 scales; None for the rest. NumericsError for NaN
    and inf.
    """
    if fmt.scale.dtype is not None:
        return _long_quantize(w, fmt, rule=rule, importance=importance)
    if fmt.block[0] != 1 and fmt.scale.name == "e8m0" and rule == "exact":
        return _powers_quantize(w, fmt, importance=importance)
    job = _job(w, fmt, rule=rule, global_scale=global_scale, importance=importance)
    if job is None:
        return None
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
    """The scores (``objective.formula``) of the scales that ``block_quantize`` takes, summed, times global_scale^2.

    Without weights this is the squared error that ``block_quantize`` leaves, up to the float32 rounding of each block's
    score. The sum is in float64, in the order of ``reference.sum_blocks``. None where ``block_quantize`` has no kernel.
    """
    totals = _totals(w, fmt, rule=rule, global_scale=global_scale, importance=importance)
    return None if totals is None else totals[0]


def score_totals(
    w: torch.Tensor,
    fmt: Format,
    *,
    rule: str = "exact",
    global_scales: Sequence[torch.Tensor],
    importance: torch.Tensor | None = None,
) -> list[float] | None:
    """``score_total`` at each of several global scales (float32 0-d): the weights are read and sorted once for all."""
    return _totals(w, fmt, rule=rule, global_scale=torch.stack(list(global_scales)), importance=importance)


def sum_blocks(terms: torch.Tensor) -> float:
    """The sum of float64 ``terms`` ``[blocks]`` of any device in the order of ``reference.sum_blocks``, on the CPU."""
    terms = terms.cpu().contiguous()
    whole = len(terms) // reference.LANES
    lanes, rest = torch.zeros(reference.LANES, dtype=torch.float64), terms[whole * reference.LANES :]
    if not lib.available():
        return reference.sum_blocks(terms)
    lib.call("ptq_add_lanes", *(ctypes.c_void_p(x.data_ptr()) for x in (lanes, terms)), ctypes.c_int64(whole))
    lanes[: len(rest)] += rest
    return reference.fold(lanes)


def _totals(
    w: torch.Tensor, fmt: Format, *, rule: str, global_scale: torch.Tensor | None, importance: torch.Tensor | None
) -> list[float] | None:
    """``score_total`` at a global scale (0-d), at several ``[n]``, or without one."""
    job = _job(w, fmt, rule=rule, global_scale=global_scale, importance=importance)
    if job is None:
        return None
    totals = torch.zeros(job.n_global, dtype=torch.float64)
    job.totals = totals.data_ptr()
    if not _run(job, w):
        return None
    sums: list[float] = (totals if global_scale is None else totals * global_scale.double().square()).tolist()
    return sums


def _long_quantize(
    w: torch.Tensor, fmt: Format, *, rule: str, importance: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """:func:`block_quantize` for bfloat16 scales, of E4M3 elements and integers."""
    element = _number_element(fmt)
    supported = element is not None and fmt.scale.dtype == torch.bfloat16
    if (
        not supported
        or rule not in ("exact", "powers", "absmax", "absmax_pz")
        or not readable(w)
        or not lib.available()
    ):
        return None
    shape = (w.shape[0], w.shape[1])
    scales = torch.empty(fmt.scale_shape(shape), dtype=torch.bfloat16)
    h = None if importance is None or rule not in ("exact", "powers") else column_weights(importance, w)
    block = fmt.block_extent(shape)
    job = lib.Long(
        w=w.data_ptr(), rows=shape[0], cols=shape[1], row_stride=w.stride(0), block_rows=block[0], block_cols=block[1],
        dtype=DTYPES[w.dtype], element=element, rule=_RULES[rule],
        importance=None if h is None else h.data_ptr(), scales=scales.data_ptr(),
    )  # fmt: skip
    status = lib.call("ptq_quantize_long", ctypes.byref(job))
    if status == lib.NOT_FINITE:
        check_finite(w)
    data = fp8_encode(w, scales, fmt) if status == lib.OK else None
    return None if data is None else (data, scales)


def _number_element(fmt: Format) -> int | None:
    """The element's number in ``csrc/api.h`` where there are kernels for scales that are numbers: E4M3, and integers in
    rows."""
    if fmt.has_global or fmt.has_zeros:
        return None
    if fmt.element.name == "e4m3":
        return ELEMENTS["e4m3"]
    by_rows = fmt.block[0] == 1 and CODECS.get(fmt.element.name) == fmt.element
    return INTEGERS.get(fmt.element.name) if by_rows else None


def _powers_quantize(
    w: torch.Tensor, fmt: Format, *, importance: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """:func:`block_quantize` for E4M3 elements and E8M0 scales, which the bfloat16 numbers hold from 2^-126 on.

    None, too, where a block has the smallest of them: 2^-127 could be better for it.
    """
    numbers = replace(fmt, scale=CODECS["bf16"])
    pair = _long_quantize(w, numbers, rule="powers", importance=importance)
    if pair is None:
        return None
    data, scales = pair
    codes = (scales.view(torch.int16) >> 7).to(torch.uint8)
    least = codes == 1
    if bool(least.any()):
        zero = (to_blocks(w, fmt)[least.reshape(-1)] == 0).all()
        return (data, codes.masked_fill_(least, 0)) if bool(zero) else None
    return data, codes


def fp8_encode(w: torch.Tensor, scales: torch.Tensor, fmt: Format) -> torch.Tensor | None:
    """uint8 ``[N, K*bits/8]``: the codes of ``qtensor.encode`` for E4M3 or integers and scales that are numbers.

    w       ``[N, K]`` bfloat16, float16 or float32
    scales  ``[N/bn, K/bk]`` of the dtype of ``fmt.scale``: one per row, tile or tensor; E8M0 codes of tiles

    None for formats without a kernel. NumericsError for NaN and inf.
    """
    element = _number_element(fmt)
    supported = not fmt.scale.enumerable or (fmt.scale.name == "e8m0" and fmt.block[0] != 1)
    if element is None or not supported or not readable(w) or not lib.available():
        return None
    shape = (w.shape[0], w.shape[1])
    grid = checked_grid(scales, fmt, shape)
    block = fmt.block_extent(shape)
    numbers = scale_values(scales, fmt.scale).contiguous()
    data = torch.empty(shape, dtype=torch.uint8)
    job = lib.Encode(
        w=w.data_ptr(), rows=shape[0], cols=shape[1], row_stride=w.stride(0), scales=numbers.data_ptr(),
        scale_cols=grid[1], block_rows=block[0], block_cols=block[1], dtype=DTYPES[w.dtype],
        element=element, data=data.data_ptr(),
    )  # fmt: skip
    status = lib.call("ptq_encode_rows", ctypes.byref(job))
    if status == lib.NOT_FINITE:
        check_finite(w)
    return pack(data, fmt.element.bits) if status == lib.OK else None


def amax(w: torch.Tensor) -> tuple[float, int] | None:
    """(max |w|, row-major index of the first NaN or inf or -1 without one) of a matrix, in one pass.

    The maximum is inf or NaN when there is such an index; 0 for an empty matrix.
    """
    if not readable(w) or not lib.available():
        return None
    job = lib.Amax(
        w=w.data_ptr(), rows=w.shape[0], cols=w.shape[1], row_stride=w.stride(0), dtype=DTYPES[w.dtype], unused=0
    )
    largest, first_bad = ctypes.c_float(), ctypes.c_int64()
    status = lib.call("ptq_amax_of", ctypes.byref(job), ctypes.byref(largest), ctypes.byref(first_bad))
    return None if status == lib.UNSUPPORTED else (largest.value, first_bad.value)


def _job(
    w: torch.Tensor, fmt: Format, *, rule: str, global_scale: torch.Tensor | None, importance: torch.Tensor | None
) -> ctypes.Structure | None:
    """The common fields of a search, or None where there is no kernel for it. FormatError for unfit shapes."""
    check_global(fmt, global_scale)
    block = fmt.block[1]
    element, scale = ELEMENTS.get(fmt.element.name), _SCALES.get(fmt.scale.name)
    in_rows = fmt.block[0] == 1 and 2 <= block <= 256 and block * fmt.element.bits % 8 == 0
    if not in_rows or element is None or scale is None or rule not in _RULES or not readable(w) or not lib.available():
        return None
    fmt.scale_shape((w.shape[0], w.shape[1]))  # raises where blocks do not divide
    kind, bias = scale
    if kind == _E8M0 and fmt.has_global:
        return None
    factors = torch.ones(1) if global_scale is None else global_scale.detach().reshape(-1).float().contiguous()
    if not bool(((factors >= 1 / _GLOBAL_RANGE) & (factors <= _GLOBAL_RANGE)).all()):
        return None
    h = None if importance is None or rule not in _WEIGHTED else column_weights(importance, w)
    job = lib.Blocks(
        w=w.data_ptr(), rows=w.shape[0], cols=w.shape[1], row_stride=w.stride(0), dtype=DTYPES[w.dtype], block=block,
        element=element, scale_kind=kind, scale_bias=bias, scale_top=len(fmt.scale.magnitudes) - 1, rule=_RULES[rule],
        flush_code=_flush_code(fmt), importance=None if h is None else h.data_ptr(),
        global_scales=factors.data_ptr(), n_global=len(factors),
    )  # fmt: skip
    job.kept = (w, factors, h)  # the tensors that it points into must outlive the call
    return job


def _flush_code(fmt: Format) -> int:
    """What ``baselines.absmax`` gives a block whose scale rounds to zero: a code that zeroes all its elements."""
    wanted = fmt.scale.min_positive * max(64.0, fmt.element.max / fmt.element.min_positive)
    large = (code for code, value in enumerate(fmt.scale.magnitudes) if value >= wanted)
    return next(large, fmt.scale.first_scale_code)


def _run(job: ctypes.Structure, w: torch.Tensor) -> bool:
    """Runs a search: False where the kernel declines, NumericsError for NaN and inf."""
    status = lib.call("ptq_quantize_blocks", ctypes.byref(job))
    if status == lib.NOT_FINITE:
        check_finite(w)
    return status == lib.OK
