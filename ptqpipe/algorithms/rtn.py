"""Round to nearest: searched scales, then the nearest code of every weight. Needs no data.

Works on units of any size in a few chunks of memory: the weights are read by runs of rows, several times when the
unit is not cached, and every QTensor goes out as soon as it is made. Formats with one scale for all of a unit's weights
are the exception: these are in memory together. The size of a run depends on the shape alone, so
the sums of the statistics, and with them every byte and every reported number, are the same on every machine.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import Protocol

import torch

from ptqpipe.algorithms.rows import (
    checked_amax,
    chunks,
    encode_rows,
    measure,
    quantize_rows,
    row_runs,
    search_scales,
    total_error,
)
from ptqpipe.errors import NumericsError
from ptqpipe.formats import Format
from ptqpipe.global_scale import absmax_global, pick, sample_rows
from ptqpipe.packing import packed_columns
from ptqpipe.qtensor import QTensor
from ptqpipe.search import get_search


class Weight(Protocol):
    """A matrix [N, K] that gives its rows when asked, as often as asked."""

    shape: tuple[int, int]

    def rows(self, start: int, stop: int) -> torch.Tensor: ...


class Matrix:
    """A `Weight` that is in memory."""

    def __init__(self, w: torch.Tensor) -> None:
        self.shape = (w.shape[0], w.shape[1])
        self._w = w

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop)."""
        return self._w[start:stop]


Sink = Callable[[int, int, QTensor], None]
"""Takes (member, first row, quantized rows). A unit whose global scale is revised sends its rows a second time."""


def joined(runs: Mapping[tuple[int, int], QTensor], member: int) -> QTensor:
    """The runs of rows of one member, by (member, first row), as one."""
    parts = [runs[at] for at in sorted(runs) if at[0] == member]
    first = parts[0]
    if len(parts) == 1:
        return first
    shape = (sum(q.shape[0] for q in parts), first.shape[1])
    scales = first.scales if first.fmt.shares_rows else torch.cat([q.scales for q in parts])
    return QTensor(first.fmt, shape, torch.cat([q.data for q in parts]), scales, first.global_scale)


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
    """What holds of every block of a weight that was sent: what ``recheck.py`` puts to the test.

    scales      whether each scale is the argmin of ``search/objective.py`` at the unit's global scale
    codes       whether each code is the nearest to its weight
    importance  the columns' weights ``[K]`` in that objective, None without any
    """

    scales: bool
    codes: bool
    importance: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class UnitResult:
    """What quantizing a unit gave. ``global_scale`` is None for formats without one.

    versus_plain_global  squared error divided by that of the same search at global scale amax/max_product; at most 1
    proven               whether the block scales are the argmin over every code at that global scale
    promises             of each weight
    """

    global_scale: float | None
    versus_plain_global: float
    errors: tuple[WeightError, ...]
    proven: bool
    promises: tuple[Promise, ...]


# The search compares scores and the report decoded errors; they agree to float32 rounding. A global scale must beat
# the plain one by more than that, or the plain one stays.
ROUNDING_MARGIN = 1e-6


def quantize(
    weights: Sequence[Weight],
    fmt: Format,
    *,
    names: Sequence[str],
    search: str,
    search_global: bool,
    sink: Sink,
    device: torch.device | None = None,
) -> UnitResult:
    """Quantizes the weights of one unit (all [N_i, K] of one K) and sends their rows to ``sink``.

    Raises NumericsError naming the weight for NaN, inf, or magnitudes that float32 arithmetic cannot hold.
    """
    device = device or torch.device("cpu")
    if fmt.one_scale:
        return _quantize_as_one(weights, fmt, names=names, search=search, sink=sink, device=device)
    amax = max(_amax(weight, fmt, name) for weight, name in zip(weights, names, strict=True))
    samples = [_sample(weight, fmt).to(device) for weight in weights]
    plain = g = None
    if fmt.has_global:
        plain = g = absmax_global(amax, fmt)
        if search_global and amax > 0:
            g = pick(
                plain, fmt, total=lambda c: sum(total_error(s, fmt, search=search, global_scale=c) for s in samples)
            )
    compare = None if plain is None or g is None or torch.equal(plain, g) else plain
    sums, plain_error = _pass(weights, fmt, search=search, g=g, compare=compare, sink=sink, device=device)
    error = sum(squared for squared, _ in sums)
    if compare is not None and error > plain_error * (1 - ROUNDING_MARGIN):  # the sample misled; the whole decides
        g = plain
        sums, _ = _pass(weights, fmt, search=search, g=g, compare=None, sink=sink, device=device)
        compare = None
    errors = tuple(
        WeightError(squared, energy, _versus_absmax(sample, fmt, search=search, g=g, plain=plain))
        for (squared, energy), sample in zip(sums, samples, strict=True)
    )
    versus_plain = error / plain_error if compare is not None and plain_error else 1.0
    proven = get_search(search).PROVEN
    promises = (Promise(scales=proven, codes=True),) * len(weights)
    return UnitResult(None if g is None else float(g), versus_plain, errors, proven, promises)


def check_decode(names: Sequence[str], errors: Sequence[WeightError], fmt: Format) -> None:
    """NumericsError for a weight with a number so large that the nearest code of the format decodes to infinity."""
    for name, error in zip(names, errors, strict=True):
        if not math.isfinite(error.squared_error):
            raise NumericsError(
                f"{name} has a number next to the largest of float32 (3.4e38), whose nearest in {fmt.name} is beyond "
                "it: it would be read as infinity; repair the source, or keep the weight (an ignore rule)"
            )


def _pass(
    weights: Sequence[Weight],
    fmt: Format,
    *,
    search: str,
    g: torch.Tensor | None,
    compare: torch.Tensor | None,
    sink: Sink,
    device: torch.device,
) -> tuple[list[tuple[float, float]], float]:
    """Quantizes every row at ``g``: per weight (squared error, energy), and the whole error at ``compare``."""
    sums: list[tuple[float, float]] = []
    compared = 0.0
    for index, weight in enumerate(weights):
        squared = energy = 0.0
        for start, stop in chunks(weight.shape, fmt):
            w = weight.rows(start, stop).to(device)
            q = quantize_rows(w, fmt, search=search, global_scale=g)
            sink(index, start, q)
            error, power = measure(q, w)
            squared, energy = squared + error, energy + power
            if compare is not None:
                compared += total_error(w, fmt, search=search, global_scale=compare)
        sums.append((squared, energy))
    return sums, compared


def _quantize_as_one(
    weights: Sequence[Weight],
    fmt: Format,
    *,
    names: Sequence[str],
    search: str,
    sink: Sink,
    device: torch.device,
) -> UnitResult:
    """Formats with one scale per tensor: readers fuse the unit's weights and keep one scale, so it is one tensor.

    Its weights are in memory together, as the source has them, and their codes (`gathered_bytes`).
    """
    whole = gather(weights, device)
    for w, name in zip(whole, names, strict=True):
        checked_amax(w, name)
    all_rows = joint(whole)
    scales = search_scales(all_rows, fmt, search=search)
    plain = search_scales(all_rows, fmt, search="absmax")
    at_plain = measure(_encode_whole(all_rows, plain, fmt), all_rows)[0]
    versus = measure(_encode_whole(all_rows, scales, fmt), all_rows)[0] / (at_plain or 1.0)
    errors = []
    for index, w in enumerate(whole):
        q = _encode_whole(w, scales, fmt)
        sink(index, 0, q)
        squared, energy = measure(q, w)
        errors.append(WeightError(squared, energy, versus))
    proven = get_search(search).PROVEN
    return UnitResult(None, 1.0, tuple(errors), proven, (Promise(scales=proven, codes=True),) * len(weights))


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
        for start, stop in row_runs(weight.shape):
            w[start:stop] = weight.rows(start, stop)
    return whole


def gathered_bytes(shapes: Sequence[tuple[int, int]], fmt: Format, *, element_bytes: float) -> int:
    """What a unit with one scale for all of its weights takes in memory: the weights and as many codes."""
    elements = sum(rows * columns for rows, columns in shapes)
    return int(elements * (element_bytes + fmt.element.bits / 8))


def joint(whole: Sequence[torch.Tensor]) -> torch.Tensor:
    """What `gather` gave, as one matrix of the same memory."""
    rows = sum(w.shape[0] for w in whole)
    first = whole[0]
    return first if len(whole) == 1 else first.as_strided((rows, first.shape[1]), first.stride())


def _encode_whole(w: torch.Tensor, scales: torch.Tensor, fmt: Format) -> QTensor:
    """A matrix at its one scale, encoded by runs of rows."""
    data = torch.empty(w.shape[0], packed_columns(w.shape[1], fmt.element.bits), dtype=torch.uint8, device=w.device)
    for start, stop in row_runs((w.shape[0], w.shape[1])):
        data[start:stop] = encode_rows(w[start:stop], scales, fmt).data
    return QTensor(fmt, (w.shape[0], w.shape[1]), data, scales, None)


def _amax(weight: Weight, fmt: Format, name: str) -> float:
    return max(checked_amax(weight.rows(start, stop), name) for start, stop in chunks(weight.shape, fmt))


def _sample(weight: Weight, fmt: Format) -> torch.Tensor:
    """The rows on which global scales are ranked and abs-max is compared: all of a small weight, else about 1/16."""
    runs = sample_rows(weight.shape, fmt)
    return torch.cat([weight.rows(start, stop) for start, stop in runs])


def _versus_absmax(
    sample: torch.Tensor, fmt: Format, *, search: str, g: torch.Tensor | None, plain: torch.Tensor | None
) -> float:
    baseline = total_error(sample, fmt, search="absmax", global_scale=plain)
    return total_error(sample, fmt, search=search, global_scale=g) / baseline if baseline else 1.0
