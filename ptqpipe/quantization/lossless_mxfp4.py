"""Weights in MXFP4 that NVFP4 or FP8 holds without loss: their codes are written anew, nothing is decoded or searched.

Where no number of a unit changes, the error is 0, the least there is. The exact search takes the least of the scales
with that error, and the codes tell which one it is. The numbers of E2M1 are 2^e and 1.5 * 2^e, and so are those of a
block in MXFP4. Let L be its largest.

NVFP4  A scale s that loses nothing has L / s in E2M1. So s is L / 6 or more, and 2^e or 1.5 * 2^e: 2/3 has no end in
       binary. For L = 1.5 * 2^j the least such number is L / 6 itself. For L = 2^j it is 1.5 * 2^(j-3), at which L
       would be 16/3, which has no code; the next is L / 4. So the scale is the power of two that makes L a 4 or a 6.
       It multiplies every number of the block by one power of two, not below 1, and E2M1 has all of these up to 6.
       Where it is below 2^-9, the least scale of E4M3, that one is the least, if it loses nothing.
FP8    Of a block, row or tile with one scale: the power of two that makes L a 256 or a 384. A smaller one would make it
       32 times 9 to 14, or 13 or 14, each with an odd factor that L has not: the scale would have no end in binary.

Below these scales L misses every code by far more than float32 rounds, so no score there is 0. What is beyond them
(numbers too small for E4M3, a global scale out of range, NaN) is left to the search, and so is a whole unit where one
block of it is.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from ptqpipe.numerics.formats import CODECS, FORMATS, Format
from ptqpipe.numerics.global_scale import absmax_global, exact_global, sample_rows
from ptqpipe.numerics.kernels import cpu
from ptqpipe.numerics.kernels.cpu_carry import NO_PLACE, value_of
from ptqpipe.numerics.kernels.cpu_decode import decoded
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.quantization.driver import absmax_error
from ptqpipe.quantization.unit import (
    Promise,
    Task,
    UnitResult,
    Weight,
    WeightError,
    kernel_for,
    row_chunks,
    total_error,
)

_TOP_E4M3 = 8  # exponent of 256 and 384
_SCALES = {"e8m0": (-127, 127), "bf16": (-126, 100)}  # exponents; beyond 2^100 inverses of scales become subnormal

Transcoder = Callable[[QTensor, int, int], QTensor | None]
"""(rows in MXFP4, number of the weight, first row) -> the same numbers in the unit's format, None where one is lost."""


def transcode(task: Task) -> UnitResult | None:
    """What round to nearest with the exact search gives for a unit in MXFP4, to the byte; None where not every number
    keeps its value, or the unit is another. Rows may have been sent by then: they are sent again."""
    possible = task.search == "exact" and task.inputs is None and kernel_for(task.device, "fp4_places") is not None
    wanted = _is_nvfp4(task.fmt) or _is_fp8(task.fmt)
    if not (possible and wanted and all(task.fmt.fits(weight.shape) for weight in task.weights)):
        return None
    places = _places_of(task.weights)
    if places is None:
        return None
    top = max(int(largest.max()) for largest in places)
    amax = value_of(top)
    if top == NO_PLACE or not amax < torch.finfo(torch.float32).max:
        return None
    if _is_nvfp4(task.fmt):
        g = exact_global(amax, task.fmt, ()) if task.search_global else None
        transcoder = None if g is None or not _loses_at_plain(task, amax) else _to_nvfp4(g)
    else:
        g, transcoder = None, _to_fp8(task, places)
    if transcoder is None:
        return None
    errors: list[WeightError] = []
    for member in range(len(task.weights)):
        error = _written(task, member, transcoder, amax)
        if error is None:
            return None
        errors.append(error)
    versus, promise = 1.0 if g is None else 0.0, Promise(scales=True, codes=True)
    own = None if g is None else float(g)
    return UnitResult(own, versus, tuple(errors), True, (promise,) * len(errors), ({},) * len(errors))


def _is_nvfp4(fmt: Format) -> bool:
    same = FORMATS["nvfp4"]
    structure, wanted = ((f.element, f.block, f.scale, f.has_global, f.has_zeros) for f in (fmt, same))
    return structure == wanted


def _is_fp8(fmt: Format) -> bool:
    plain = not (fmt.has_global or fmt.has_zeros or fmt.one_scale or fmt.shares_rows)
    return plain and fmt.element == CODECS["e4m3"] and fmt.scale in (CODECS["bf16"], CODECS["e8m0"])


def _places_of(weights: Sequence[Weight]) -> list[torch.Tensor] | None:
    """int16 ``[N, K/32]`` of each weight: the places of its blocks' largest numbers. None unless all are in MXFP4."""
    places_of_all = []
    for weight in weights:
        runs = []
        for run in row_chunks(weight.shape):
            q = weight.quantized(*run)
            places = None if q is None else cpu.fp4_places(q)
            if places is None:
                return None
            runs.append(places)
        places_of_all.append(torch.cat(runs))
    return places_of_all


def _loses_at_plain(task: Task, amax: float) -> bool:
    """Whether the plain global scale leaves an error on the sampled rows; usually the first of them have one."""
    plain = absmax_global(amax, task.fmt)
    return any(
        total_error(w, task.fmt, search="exact", global_scale=plain) > 0
        for weight in task.weights
        for w in _sampled(weight, task.fmt)
    )


def _sampled(weight: Weight, fmt: Format) -> Iterator[torch.Tensor]:
    for run in sample_rows(weight.shape, fmt):
        q = weight.quantized(*run)
        assert q is not None  # `_places_of` has seen all of them
        yield decoded(q)


def _to_nvfp4(g: torch.Tensor) -> Transcoder:
    exponent = math.frexp(float(g))[1] - 1

    def transcoder(q: QTensor, member: int, row: int) -> QTensor | None:
        done = cpu.fp4_to_nvfp4(q, exponent)
        return None if done is None else QTensor(FORMATS["nvfp4"], q.shape, *done, g)

    return transcoder


def _to_fp8(task: Task, places: Sequence[torch.Tensor]) -> Transcoder | None:
    """None where a scale is out of the range of its codec."""
    fmt = task.fmt
    least, most = _SCALES[fmt.scale.name]
    exponents = []
    for weight, block_places in zip(task.weights, places, strict=True):
        top = _of_blocks(block_places, fmt, weight.shape)
        wanted = torch.where(top == NO_PLACE, least, (top >> 1) - 127 - _TOP_E4M3)  # as `value_of` has the exponent
        if not bool(((wanted >= least) & (wanted <= most)).all()):
            return None
        exponents.append(wanted.to(torch.int16))

    def transcoder(q: QTensor, member: int, row: int) -> QTensor | None:
        first, last = fmt.scale_run(0, row, row + q.shape[0])
        own = exponents[member][first:last]
        data = cpu.fp4_to_e4m3(q, own, fmt)
        scales = (own + 127).to(torch.uint8) if fmt.scale.enumerable else ((own + 127) << 7).view(torch.bfloat16)
        return None if data is None else QTensor(fmt, q.shape, data, scales)

    return transcoder


def _of_blocks(places: torch.Tensor, fmt: Format, shape: tuple[int, int]) -> torch.Tensor:
    """int16 ``[N/bn, K/bk]``: the largest of the places ``[N, K/32]`` in each block of ``fmt``."""
    grid, (height, width) = fmt.scale_shape(shape), fmt.block_extent(shape)
    wide = width // (shape[1] // places.shape[1])
    full = torch.full((grid[0] * height, grid[1] * wide), NO_PLACE, dtype=torch.int16)  # the last block may be short
    full[: places.shape[0], : places.shape[1]] = places
    return full.reshape(grid[0], height, grid[1], wide).amax(dim=(1, 3))


def _written(task: Task, member: int, transcoder: Transcoder, amax: float) -> WeightError | None:
    """Sends every row of one weight; None where a number is lost."""
    weight, fmt = task.weights[member], task.fmt
    energy = 0.0
    for start, stop in row_chunks(weight.shape, block_rows=fmt.block_extent(weight.shape)[0]):
        source = weight.quantized(start, stop)
        q = None if source is None else transcoder(source, member, start)
        measured = None if q is None or source is None else cpu.code_difference(q, source)
        if q is None or measured is None or measured[0] != 0:
            return None
        task.sink(member, start, q)
        energy += measured[1]
    absmax = absmax_error(fmt, amax)
    loses = any(absmax(w) > 0 for w in _sampled(weight, fmt))
    return WeightError(0.0, energy, 0.0 if loses else 1.0)
