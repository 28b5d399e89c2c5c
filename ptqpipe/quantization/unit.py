"""A unit of weights, what quantizing it takes and what it gives, and what every algorithm does with a run of its rows.

Weights are read by runs of rows, as often as needed, and every run of quantized rows goes out as soon as it is made. A
run is searched and encoded by the kernel of the device where there is one, else by its torch reference: the two give
the same bits, so nothing above this file knows which one ran.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate
from types import ModuleType
from typing import Any, Protocol

import torch

from ptqpipe.calibration.inputs import Moments
from ptqpipe.errors import NumericsError
from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.kernels import reference
from ptqpipe.numerics.kernels.cpu_tensors import normalize_importance
from ptqpipe.numerics.qtensor import QTensor, check_finite, encode
from ptqpipe.numerics.search import get_search
from ptqpipe.numerics.search.objective import formula, importance_blocks, magnitude_blocks
from ptqpipe.recipe.options import CodeOptions

CHUNK_ELEMENTS = 1 << 22


def kernel_for(device: torch.device, name: str) -> Callable[..., Any] | None:
    """The kernel of this name for a device; None where only the torch reference runs."""
    module: ModuleType
    if device.type == "cuda":
        from ptqpipe.numerics.kernels import triton as module
    else:
        from ptqpipe.numerics.kernels import cpu as module
    return getattr(module, name, None) if module.available() else None


def kernels_of(device: torch.device) -> str:
    """The name of what `kernel_for` returns for a device, for messages."""
    if device.type == "cuda":
        return "its Triton kernels"
    from ptqpipe.numerics.kernels import cpu

    return f"its {cpu.isa()} kernels" if cpu.available() else "torch, without kernels"


def chunks(shape: tuple[int, int], fmt: Format) -> list[tuple[int, int]]:
    """Runs of rows [start, stop) of about CHUNK_ELEMENTS weights on block edges. A function of the shape alone."""
    return row_chunks(shape, block_rows=fmt.block_extent(shape)[0])


def row_chunks(shape: tuple[int, int], *, block_rows: int = 1, elements: int = CHUNK_ELEMENTS) -> list[tuple[int, int]]:
    """Runs of whole blocks of rows [start, stop) of about this many weights."""
    step = max(block_rows, elements // max(1, shape[1]) // block_rows * block_rows)
    return [(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


def quantize_rows(
    w: torch.Tensor,
    fmt: Format,
    *,
    search: str,
    global_scale: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> QTensor:
    """Scales by ``search`` and codes by ``encode`` for rows ``[n, K]`` of whole blocks."""
    kernel = kernel_for(w.device, "block_quantize")
    if kernel is not None:
        done = kernel(w, fmt, rule=search, global_scale=global_scale, importance=importance)
        if done is not None:
            return QTensor(fmt, (w.shape[0], w.shape[1]), done[0], done[1], global_scale)
    scales = get_search(search).search(w, fmt, global_scale=global_scale, importance=importance)
    return encode_rows(w, scales, fmt, global_scale=global_scale)


def search_scales(w: torch.Tensor, fmt: Format, *, search: str, importance: torch.Tensor | None = None) -> torch.Tensor:
    """The scales of `quantize_rows` alone, for a format without a global one."""
    kernel = kernel_for(w.device, "block_quantize")
    done = None if kernel is None else kernel(w, fmt, rule=search, global_scale=None, importance=importance)
    if done is None:
        return get_search(search).search(w, fmt, global_scale=None, importance=importance)
    scales: torch.Tensor = done[1]
    return scales


def encode_rows(
    w: torch.Tensor, scales: torch.Tensor, fmt: Format, *, global_scale: torch.Tensor | None = None
) -> QTensor:
    """``qtensor.encode`` of rows ``[n, K]``, by the device's kernel where the scales are numbers (FP8)."""
    kernel = None if fmt.scale.enumerable else kernel_for(w.device, "fp8_encode")
    data = None if kernel is None else kernel(w, scales, fmt)
    if data is not None:
        return QTensor(fmt, (w.shape[0], w.shape[1]), data, scales, global_scale)
    return encode(w, scales, fmt=fmt, global_scale=global_scale)


def measure(q: QTensor, w: torch.Tensor) -> tuple[float, float]:
    """(sum (decode - w)^2, sum w^2) in float64, in the order of ``kernels.reference``."""
    kernel = kernel_for(w.device, "decode_error")
    done = None if kernel is None else kernel(q.data, q.scales, q.fmt, w, q.global_scale)
    return done if done is not None else reference.decode_error(q, w)


def weighted_error(q: QTensor, w: torch.Tensor, importance: torch.Tensor) -> float:
    """sum_k h_k sum (decode - w)_k^2 in float64."""
    total = 0.0
    for start, stop in chunks(q.shape, q.fmt):
        part = q if (start, stop) == (0, q.shape[0]) else q.narrow(0, start, stop - start)
        diff = part.dequantize().double() - w[start:stop].double()
        total += float((diff.square_().sum(dim=0) * importance.to(diff.device).double()).sum())
    return total


def total_error(
    w: torch.Tensor,
    fmt: Format,
    *,
    search: str,
    global_scale: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> float:
    """The squared error that ``search`` leaves on ``w``: its scores where scales are codes, else by decoding.

    With ``importance`` the weighted one, up to the power of two of ``normalize_importance``.
    """
    if not fmt.scale.enumerable:
        q = quantize_rows(w, fmt, search=search, importance=importance)
        return measure(q, w)[0] if importance is None else weighted_error(q, w, normalize_importance(importance))
    kernel = kernel_for(w.device, "score_total")
    done = None if kernel is None else kernel(w, fmt, rule=search, global_scale=global_scale, importance=importance)
    if done is not None:
        return float(done)
    block_scores = []
    for start, stop in chunks((w.shape[0], w.shape[1]), fmt):  # a dozen numbers for each weight, for a while
        rows = w[start:stop]
        codes = get_search(search).search(rows, fmt, global_scale=global_scale, importance=importance).reshape(-1)
        h = importance_blocks(importance, rows, fmt)
        block_scores.append(formula(magnitude_blocks(rows, fmt), codes, fmt=fmt, global_scale=global_scale, h=h)[0])
    total = reference.sum_blocks(torch.cat(block_scores))
    return total if global_scale is None else total * float(global_scale) ** 2


def total_errors(
    w: torch.Tensor,
    fmt: Format,
    *,
    search: str,
    global_scales: Sequence[torch.Tensor],
    importance: torch.Tensor | None = None,
) -> list[float]:
    """`total_error` at each global scale: at all in one pass where the device has a kernel for that."""
    kernel = kernel_for(w.device, "score_totals") if fmt.scale.enumerable else None
    done = None if kernel is None else kernel(w, fmt, rule=search, global_scales=global_scales, importance=importance)
    if done is not None:
        return list(done)
    return [total_error(w, fmt, search=search, global_scale=g, importance=importance) for g in global_scales]


def checked_amax(w: torch.Tensor, name: str) -> float:
    """max |w|; NumericsError naming the weight and the first NaN or inf."""
    if w.numel() == 0:
        return 0.0
    kernel = kernel_for(w.device, "amax")
    done = None if kernel is None else kernel(w)
    amax = float(w.abs().amax()) if done is None else float(done[0])  # NaN propagates
    if not amax < float("inf"):
        try:
            check_finite(w, f"'{name}'")
        except NumericsError as error:
            raise NumericsError(str(error), weight=name) from None
    return amax


CPU = torch.device("cpu")


class Weight(Protocol):
    """A matrix [N, K] that gives its rows when asked, as often as asked.

    rows       their numbers
    quantized  the codes that they are stored in below 8 bits; None where they are not
    """

    shape: tuple[int, int]

    def rows(self, start: int, stop: int) -> torch.Tensor: ...

    def quantized(self, start: int, stop: int) -> QTensor | None: ...


class LoadedWeight:
    """A `Weight` that is in memory."""

    def __init__(self, w: torch.Tensor) -> None:
        self.shape = (w.shape[0], w.shape[1])
        self._w = w

    def rows(self, start: int, stop: int) -> torch.Tensor:
        return self._w[start:stop]

    def quantized(self, start: int, stop: int) -> QTensor | None:
        return None


RowWriter = Callable[[int, int, QTensor], None]
"""Takes (member, first row, quantized rows). A unit whose global scale is revised sends its rows a second time."""


def joined(runs: Mapping[tuple[int, int], QTensor], member: int) -> QTensor:
    """The runs of rows of one member, by (member, first row), as one."""
    parts = [runs[place] for place in sorted(runs) if place[0] == member]
    first = parts[0]
    if len(parts) == 1:
        return first
    shape = (sum(q.shape[0] for q in parts), first.shape[1])
    scales = first.scales if first.fmt.shares_rows else torch.cat([q.scales for q in parts])
    return QTensor(first.fmt, shape, torch.cat([q.data for q in parts]), scales, first.global_scale)


@dataclass(frozen=True, slots=True)
class Task:
    """A unit to be quantized: weights [N_i, K] of one K that share a global scale.

    names    of the weights, for messages
    sink     takes the rows of every weight
    options  of the rule
    inputs   moments of every weight's input; weights that share an input share the object. None without statistics
    importance  [K] what the columns of every weight count in the search of its scales, without statistics; None: all
                the same
    codes    one QTensor for each weight, chosen before; None where the algorithm is to choose
    device   that computes
    """

    weights: Sequence[Weight]
    fmt: Format
    names: Sequence[str]
    sink: RowWriter
    options: CodeOptions = field(default_factory=CodeOptions)
    inputs: Sequence[Moments] | None = None
    importance: Sequence[torch.Tensor | None] | None = None
    codes: Sequence[QTensor] | None = None
    device: torch.device = CPU

    @property
    def search(self) -> str:
        return self.options.search_for(self.fmt.name)

    @property
    def search_global(self) -> bool:
        return self.options.global_scale == "search"


@dataclass(frozen=True, slots=True)
class WeightError:
    """Errors of one quantized weight, measured on its decode in float64.

    squared_error   sum (decode - w)^2
    energy          sum w^2
    versus_absmax   squared error divided by that of abs-max scales, on the sampled rows (all rows of a small weight)
    """

    squared_error: float
    energy: float
    versus_absmax: float

    @property
    def relative_mse(self) -> float:
        """squared error / energy; 0 for an all-zero weight."""
        return self.squared_error / self.energy if self.energy else 0.0


@dataclass(frozen=True, slots=True)
class Promise:
    """What is promised of every block of a weight that was written, and what ``recheck.py`` checks.

    scales      whether each scale is the argmin of ``search/objective.py`` at the unit's global scale
    codes       whether each code is the nearest to its weight
    importance  the columns' weights ``[K]`` in that objective, None without any
    factor      what the weights were multiplied by before (``search/enlarged.py``)
    """

    scales: bool
    codes: bool
    importance: torch.Tensor | None = None
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class UnitResult:
    """What quantizing a unit gave. ``global_scale`` is None for formats without one.

    versus_plain_global  squared error divided by that of the same search at global scale amax/max_product; at most 1
    proven               whether the block scales are the argmin over every code at that global scale
    promises             of each weight
    record_fields        of each weight: what the record of a checkpoint says besides of how it was quantized
    """

    global_scale: float | None
    versus_plain_global: float
    errors: tuple[WeightError, ...]
    proven: bool
    promises: tuple[Promise, ...]
    record_fields: tuple[Mapping[str, Any], ...]


# The search compares scores and the report decoded errors; they agree to float32 rounding. A global scale must beat
# the plain one by more than that, or the plain one stays.
ROUNDING_MARGIN = 1e-6


def check_decode(names: Sequence[str], errors: Sequence[WeightError], fmt: Format) -> None:
    """NumericsError for a weight with a number so large that the nearest code of the format decodes to infinity."""
    for name, error in zip(names, errors, strict=True):
        if not math.isfinite(error.squared_error):
            raise NumericsError(
                f"{name} has a number next to the largest of float32 (3.4e38), whose nearest in {fmt.name} is beyond "
                "it: it would be read as infinity; repair the source, or keep the weight (an ignore rule)"
            )


def gather(weights: Sequence[Weight], device: torch.device) -> list[torch.Tensor]:
    """Every weight of a unit, whole, in memory that lies together."""
    if len(weights) == 1:
        return [weights[0].rows(0, weights[0].shape[0]).to(device)]
    dtypes = [weight.rows(0, 1).dtype for weight in weights]
    rows = sum(weight.shape[0] for weight in weights)
    memory = torch.empty(rows, weights[0].shape[1], dtype=reduce(torch.promote_types, dtypes), device=device)
    ends = list(accumulate(weight.shape[0] for weight in weights))
    whole = [memory[end - weight.shape[0] : end] for weight, end in zip(weights, ends, strict=True)]
    for weight, w in zip(weights, whole, strict=True):
        for start, stop in row_chunks(weight.shape):
            w[start:stop] = weight.rows(start, stop)
    return whole


def gathered_bytes(shapes: Sequence[tuple[int, int]], fmt: Format, *, element_bytes: float) -> int:
    """What a unit with one scale for all of its weights takes in memory: the weights and as many codes."""
    elements = sum(rows * columns for rows, columns in shapes)
    return int(elements * (element_bytes + fmt.element.bits / 8))


def joint(whole: Sequence[torch.Tensor]) -> torch.Tensor:
    """View of the `gather`ed weights as one [sum N, K] matrix."""
    rows = sum(w.shape[0] for w in whole)
    first = whole[0]
    return first if len(whole) == 1 else first.as_strided((rows, first.shape[1]), first.stride())


def largest(task: Task) -> float:
    """max |w| over the unit. NumericsError naming the weight for NaN and inf."""
    return max(
        checked_amax(weight.rows(*run), name)
        for weight, name in zip(task.weights, task.names, strict=True)
        for run in chunks(weight.shape, task.fmt)
    )
