"""The numbers of one stored weight for a report: how its codes are used and, against its source, error by block.

One pass over the bytes in runs of rows, decoded by the torch reference. A second one says what each way of choosing
scales leaves of the squared error, by running the real searches on the source: abs-max and exact block scales at the
abs-max global scale of the fused group, four over six at its own (amax / (6 x 256), arXiv 2512.02010), and the scales
that are stored; on the rows that rank global scales when a checkpoint is converted (``global_scale.sample_rows``), or
on all. Must not know records, files or rendering.
"""

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from ptqpipe.check.report import Codes, ScaleChoice, WorstBlock
from ptqpipe.models.source import Source, SourceRows, row_runs
from ptqpipe.numerics.formats import Codec, Format
from ptqpipe.numerics.global_scale import (
    SAMPLE_ALL,
    SAMPLE_FRACTION,
    SAMPLE_RUNS,
    absmax_global,
    canonical,
    sample_rows,
)
from ptqpipe.numerics.qtensor import Illegal, QTensor, check_finite, illegal_numbers, scale_values, to_blocks
from ptqpipe.quantization import total_error

ABSMAX = "abs-max"
STORED = "as stored"
NAMES = (ABSMAX, "OCP floor", "four over six", "exact", STORED)  # the order in which reports show them
_CHUNK_ELEMENTS = 1 << 21
_FOUR_OVER_SIX_DIVISOR = 6.0 * 256.0
SAMPLE = (
    f"all rows of weights of up to {SAMPLE_ALL:,} elements, of larger ones about one in {SAMPLE_FRACTION} (at least "
    f"{SAMPLE_ALL:,} elements) in up to {SAMPLE_RUNS} runs spread evenly from the first row to the last"
)
WORST_PER_WEIGHT = 3
SHOWN_VALUES = 16  # of a block
FLOAT_BINS = 1024  # float scales are counted by float32's exponent and two further bits: quarters of an octave


@dataclass(slots=True)
class Scan:
    """The result of one pass over a stored weight.

    name          of the weight
    whole         whether the weight has one scale: a "block" is then a row, so that there is something to rank
    code_counts   [2^bits] of the element codec
    scale_counts  [2^bits] of the scale codec, or of ``FLOAT_BINS``
    illegal       runs of rows with numbers that no quantizer may write
    squared_error, energy, amax   None without a source, and where the stored numbers are illegal
    """

    name: str
    whole: bool
    code_counts: torch.Tensor
    scale_counts: torch.Tensor
    illegal: int = 0
    squared_error: float | None = None
    energy: float | None = None
    amax: float | None = None
    _blocks: int = 0
    _worst: list[tuple[float, int, int, WorstBlock]] = field(default_factory=list)

    def count(self, q: QTensor, *, scales: bool) -> None:
        """Counts the codes of a run of rows, and its scales where they are not those of another run."""
        self.code_counts += _code_counts(q)
        if scales:
            self.scale_counts += _scale_counts(q)
        counts = illegal_numbers(q)
        self.illegal += 0 if counts == Illegal(empty_scales=counts.empty_scales) else 1

    def compare(self, q: QTensor, w: torch.Tensor, start: int) -> None:
        """Sums the errors of the run of rows from ``start`` on against its source ``w``; keeps the worst blocks."""
        exact, decoded = w.float(), q.dequantize()
        error = (decoded.double() - exact.double()).square_()
        power = exact.double().square_()
        fmt = q.fmt
        if self.whole:
            height, width = 1, q.shape[1]
            blocks, energies = error.sum(dim=1), power.sum(dim=1)
        else:
            height, width = fmt.block_extent(q.shape)
            blocks, energies = to_blocks(error, fmt).sum(dim=1), to_blocks(power, fmt).sum(dim=1)
        self.squared_error = (self.squared_error or 0.0) + float(blocks.sum())
        self.energy = (self.energy or 0.0) + float(energies.sum())
        self.amax = max(self.amax or 0.0, float(exact.abs().amax()))
        self._blocks += len(blocks)
        across = -(-q.shape[1] // width)
        for value, index in zip(*(t.tolist() for t in blocks.topk(min(WORST_PER_WEIGHT, len(blocks)))), strict=True):
            if len(self._worst) == WORST_PER_WEIGHT and value <= self._worst[0][0]:
                break
            row, column = index // across * height, index % across * width
            block = _block(self.name, q, exact, decoded, (row, column), (height, width), start)
            relative = value / float(energies[index]) if float(energies[index]) else 0.0
            entry = (value, -(start + row), -column, replace(block, ratio=value, relative=relative))
            if len(self._worst) < WORST_PER_WEIGHT:
                heapq.heappush(self._worst, entry)
            else:
                heapq.heapreplace(self._worst, entry)

    def forget_source(self) -> None:
        """Drops what was compared: of illegal numbers no error means anything."""
        self.squared_error = self.energy = self.amax = None
        self._worst = []

    @property
    def worst(self) -> list[WorstBlock]:
        """The blocks with the largest errors, divided by the mean one."""
        mean = (self.squared_error or 0.0) / max(1, self._blocks)
        if mean <= 0 or self._blocks < 2:
            return []
        return [replace(b, ratio=b.ratio / mean) for _, _, _, b in sorted(self._worst, reverse=True)]


def scan_weight(ckpt: Source, weight: str, *, expert: int | None, rows: SourceRows | None) -> Scan:
    """Counts every code and scale of a stored weight; with ``rows`` also its error against the source.

    NumericsError where the source holds NaN or inf.
    """
    fmt = ckpt.stored[weight].scheme.fmt
    name = weight if expert is None else f"{weight}[{expert}]"
    scales = 1 << fmt.scale.bits if fmt.scale.enumerable else FLOAT_BINS
    codes, scale_codes = (torch.zeros(size, dtype=torch.int64) for size in (1 << fmt.element.bits, scales))
    scan = Scan(name, fmt.one_scale, codes, scale_codes)
    for start, q in ckpt.runs(weight, expert=expert):
        scan.count(q, scales=start == 0 or not fmt.shares_rows)
        if rows is not None and not scan.illegal:
            w = rows.rows(start, start + q.shape[0])
            check_finite(w, f"'{name}' of the source")
            scan.compare(q, w, start)
    if scan.illegal:
        scan.forget_source()
    return scan


def _code_counts(q: QTensor) -> torch.Tensor:
    """int64 [2^bits]: how often each element code occurs."""
    bits = q.fmt.element.bits
    if bits not in (4, 8):
        return torch.bincount(q.codes.flatten(), minlength=1 << bits)
    counts = torch.bincount(q.data.flatten(), minlength=256)
    if bits == 8:
        return counts
    pairs = counts.view(16, 16)  # [high nibble, low nibble]
    return pairs.sum(dim=0) + pairs.sum(dim=1)


def _scale_counts(q: QTensor) -> torch.Tensor:
    if q.fmt.scale.enumerable:
        return torch.bincount(q.scales.view(torch.uint8).flatten(), minlength=1 << q.fmt.scale.bits)
    bins = (q.scales.float().flatten().view(torch.int32) >> 21) & (FLOAT_BINS - 1)
    return torch.bincount(bins, minlength=FLOAT_BINS)


def codes_of(scan: Scan, element: Codec, scale: Codec) -> Codes:
    """The counts of a scan as the report shows them."""
    size = torch.tensor(element.values).abs()
    elements = int(scan.code_counts.sum())
    largest, zero = (int(scan.code_counts[mask].sum()) for mask in (size >= element.max, size == 0))
    blocks = int(scan.scale_counts.sum())
    if not scale.enumerable:
        return Codes(elements, largest, zero, blocks, None, None, None, None)
    counts = scan.scale_counts
    has_zero = scale.magnitudes[0] == 0
    first = scale.first_scale_code
    return Codes(
        elements,
        largest,
        zero,
        blocks,
        saturated=int(counts[len(scale.magnitudes) - 1]),
        subnormal=int(counts[first : _first_normal(scale)].sum()),
        smallest=int(counts[first]),
        zero_scales=int(counts[0]) if has_zero else 0,
    )


def _first_normal(codec: Codec) -> int:
    """The code of the smallest normal number: subnormals and the first normal octave are evenly spaced from zero."""
    if codec.magnitudes[0] != 0:
        return codec.first_scale_code
    step = codec.min_positive
    even = next((code for code, value in enumerate(codec.magnitudes) if value != code * step), len(codec.magnitudes))
    return max(codec.first_scale_code, (even - 1) // 2)


def _block(
    name: str,
    q: QTensor,
    w: torch.Tensor,
    decoded: torch.Tensor,
    first: tuple[int, int],
    extent: tuple[int, int],
    start: int,
) -> WorstBlock:
    """One block with its values: all of a short one, else those with the largest errors, in their order."""
    row, column = first
    a = w[row : row + extent[0], column : column + extent[1]]
    b = decoded[row : row + extent[0], column : column + extent[1]]
    flat = (a - b).abs().flatten()
    if len(flat) > 2 * SHOWN_VALUES:
        shown = sorted(flat.topk(SHOWN_VALUES).indices.tolist())
    else:
        shown = list(range(len(flat)))
    width = a.shape[1]
    grid = q.fmt.block_extent(q.shape)
    scale = float(q.block_scales()[row // grid[0], column // grid[1]])
    return WorstBlock(
        name,
        q.fmt.name,
        start + row,
        column,
        a.numel(),
        0.0,
        0.0,
        scale,
        tuple((start + row + i // width, column + i % width) for i in shown),
        tuple(float(a.flatten()[i]) for i in shown),
        tuple(float(b.flatten()[i]) for i in shown),
    )


def scale_axis(codec: Codec) -> tuple[float, ...]:
    """The number that each code of a histogram stands for."""
    if codec.enumerable:
        return tuple(scale_values(torch.arange(len(codec.magnitudes), dtype=torch.uint8), codec).tolist())
    return tuple(math.ldexp(1.0 + (code & 3) / 4, max(code >> 2, 1) - 127) for code in range(FLOAT_BINS))


def _ways(fmt: Format) -> list[tuple[str, str, Callable[[float, Format], torch.Tensor]]]:
    """The scale searches of a format, abs-max first: (name in the report, search, global scale of an amax)."""
    searches: list[tuple[str, str, Callable[[float, Format], torch.Tensor]]] = [(ABSMAX, "absmax", absmax_global)]
    if fmt.scale.name == "e8m0":
        searches.append(("OCP floor", "ocp_floor", absmax_global))
    if fmt.element.name == "e2m1" and not fmt.scale.power_of_two:
        searches.append(("four over six", "four_over_six", _four_over_six_global))
    if fmt.scale.enumerable or fmt.scale.dtype is not torch.float32:
        searches.append(("exact", "exact", absmax_global))
    return searches


def _four_over_six_global(amax: float, fmt: Format) -> torch.Tensor:
    return canonical(torch.tensor(amax / _FOUR_OVER_SIX_DIVISOR), fmt) if amax else torch.tensor(1.0)


def compare_choices(
    ckpt: Source, weight: str, *, expert: int | None, rows: SourceRows, amax: float, all_rows: bool
) -> tuple[ScaleChoice, ...]:
    """Errors of all scale choices relative to abs-max, the stored scales last. ``amax`` is that of the fused group.

    Empty for formats with one scale per weight (its rows cannot be sampled), and where abs-max makes no error.
    """
    fmt, shape = ckpt.stored[weight].scheme.fmt, rows.shape
    if fmt.one_scale:
        return ()
    runs = row_runs(shape, fmt) if all_rows else sample_rows(shape, fmt)
    ways = _ways(fmt)
    totals = [0.0] * (len(ways) + 1)
    searches = [(search, scale(amax, fmt) if fmt.has_global else None) for _, search, scale in ways]
    for start, q in ckpt.runs(weight, expert=expert, runs=_aligned(runs, shape, fmt)):
        w = rows.rows(start, start + q.shape[0])
        for index, (search, g) in enumerate(searches):
            totals[index] += total_error(w, fmt, search=search, global_scale=g)
        totals[-1] += float((q.dequantize().double() - w.double()).square_().sum())
    if totals[0] <= 0:
        return ()
    names = [name for name, _, _ in ways] + [STORED]
    return tuple(ScaleChoice(name, total / totals[0]) for name, total in zip(names, totals, strict=True))


def _aligned(runs: list[tuple[int, int]], shape: tuple[int, int], fmt: Format) -> list[tuple[int, int]]:
    """Runs short enough for memory: long ones are cut on block edges."""
    step, columns_step = max(fmt.block[0], 1), _CHUNK_ELEMENTS // shape[1]
    cut = []
    for start, stop in runs:
        length = max(step, columns_step // step * step)
        cut += [(first, min(first + length, stop)) for first in range(start, stop, length)]
    return cut
