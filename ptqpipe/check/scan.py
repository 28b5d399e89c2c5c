"""The facts of one stored weight, from one pass over its bytes in runs of rows: which codes and scales it has, whether
a quantizer may write them, and, against its source, its errors, its worst blocks, and codes that are not the nearest.

Decoded by the torch reference (``qtensor.py``), never by the kernels that wrote the checkpoint; memory does not grow
with the weight. Judges and prints nothing: that is for verify and report.
"""

import functools
import heapq
import math
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from ptqpipe.check.report.content import WorstBlock
from ptqpipe.conversion.measured import Changes
from ptqpipe.models.source import Source, SourceRows, row_runs
from ptqpipe.numerics.formats import Format, unpack
from ptqpipe.numerics.global_scale import absmax_divisor, absmax_global
from ptqpipe.numerics.qtensor import (
    Illegal,
    QTensor,
    check_finite,
    code_places,
    encode,
    illegal_numbers,
    magnitude_codes,
    scale_values,
    to_blocks,
)
from ptqpipe.numerics.search.enlarged import enlarge
from ptqpipe.numerics.search.proof import chosen_scale

WORST_PER_WEIGHT = 3
SHOWN_VALUES = 16  # of a block
FLOAT_BINS = 1024  # float scales are counted by float32's exponent and two further bits: quarters of an octave
_LOOK = 4.0  # times the typical error: worth a comparison of its own
_SAMPLE_RUNS = 4
_EXACT = 1e-12  # a relative MSE below float32 rounding

_LEGAL, _UNCHANGED = Illegal(), Changes()


@dataclass(slots=True)
class WeightFacts:
    """One pass over a stored weight.

    illegal        numbers that no quantizer may write
    code_counts    int64 [2^bits] of the element codec
    scale_counts   int64 [2^bits] of the scale codec, or [``FLOAT_BINS``]
    squared_error, energy, amax   against the source in float64; None without one, and where codes are illegal
    row_error, row_energy         float64 [N]: the same by row
    reach          the magnitude that the scale of the whole weight fits, about; 0 without one
    changes        of a weight that the source stores below 8 bits; of others nothing is counted
    other_codes, far_codes        codes that are not the nearest to their weight; those two or more steps away
    first_other    row of the first code that is not the nearest one bit for bit, the sign of zero included
    """

    name: str
    fmt: Format
    shape: tuple[int, int]
    illegal: Illegal = _LEGAL
    code_counts: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    scale_counts: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    squared_error: float | None = None
    energy: float | None = None
    amax: float | None = None
    row_error: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    row_energy: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    reach: float = 0.0
    changes: Changes = _UNCHANGED
    other_codes: int = 0
    far_codes: int = 0
    first_other: int | None = None
    _blocks: int = 0
    _worst: list[tuple[float, int, int, WorstBlock]] = field(default_factory=list)

    @property
    def decodes(self) -> bool:
        """Whether readers make numbers of all codes: those below a zero scale may be zero, and nothing else."""
        return self.illegal == Illegal(empty_scales=self.illegal.empty_scales)

    @property
    def relative_mse(self) -> float:
        """squared error / energy; 0 for an all-zero weight stored exactly, inf for one that is not."""
        if self.energy:
            return (self.squared_error or 0.0) / self.energy
        return math.inf if self.squared_error else 0.0

    @property
    def worst(self) -> list[WorstBlock]:
        """The blocks with the largest errors, divided by the mean one; of a weight with one scale its rows."""
        mean = (self.squared_error or 0.0) / max(1, self._blocks)
        if mean <= 0 or self._blocks < 2:
            return []
        return [replace(b, ratio=b.ratio / mean) for _, _, _, b in sorted(self._worst, reverse=True)]

    def _count(self, q: QTensor, *, scales: bool) -> None:
        self.code_counts += _code_counts(q)
        if scales:
            self.scale_counts += _scale_counts(q)

    def _compare(self, q: QTensor, w: torch.Tensor, start: int, *, values: torch.Tensor, blocks: bool) -> None:
        """Sums the errors of the decoded ``values`` of rows from ``start`` on against their source ``w``."""
        exact = w.double()
        error, power = (values.double() - exact).square_(), exact.square()
        rows = slice(start, start + q.shape[0])
        self.row_error[rows], self.row_energy[rows] = error.sum(dim=1), power.sum(dim=1)
        self.squared_error = (self.squared_error or 0.0) + float(error.sum())
        self.energy = (self.energy or 0.0) + float(power.sum())
        self.amax = max(self.amax or 0.0, float(w.abs().amax()))
        if blocks:
            self._rank(q, w.float(), start, values=values, error=error, power=power)

    def _rank(
        self, q: QTensor, w: torch.Tensor, start: int, *, values: torch.Tensor, error: torch.Tensor, power: torch.Tensor
    ) -> None:
        if self.fmt.one_scale:
            (height, width), by_block = (1, q.shape[1]), (error, power)
        else:
            (height, width), by_block = q.fmt.block_extent(q.shape), (to_blocks(error, q.fmt), to_blocks(power, q.fmt))
        sums, energies = (part.sum(dim=1) for part in by_block)
        self._blocks += len(sums)
        across = -(-q.shape[1] // width)
        for value, index in zip(*(t.tolist() for t in sums.topk(min(WORST_PER_WEIGHT, len(sums)))), strict=True):
            if len(self._worst) == WORST_PER_WEIGHT and value <= self._worst[0][0]:
                break
            row, column = index // across * height, index % across * width
            block = _block(self.name, q, w, values, (row, column), (height, width), start)
            relative = value / float(energies[index]) if float(energies[index]) else 0.0
            entry = (value, -(start + row), -column, replace(block, ratio=value, relative=relative))
            if len(self._worst) < WORST_PER_WEIGHT:
                heapq.heappush(self._worst, entry)
            else:
                heapq.heapreplace(self._worst, entry)

    def _compare_codes(self, q: QTensor, w: torch.Tensor, start: int) -> None:
        nearest = encode(w, q.scales, fmt=q.fmt, global_scale=q.global_scale)
        where = (nearest.data != q.data).any(dim=1).nonzero()
        if not len(where):
            return
        rows = where[:, 0]
        own, best = (unpack(part.data[rows], q.fmt.element.bits) for part in (q, nearest))
        steps = (code_places(own, q.fmt.element) - code_places(best, q.fmt.element)).abs()
        self.other_codes += int((steps > 0).sum())
        self.far_codes += int((steps > 1).sum())
        self.first_other = start + int(rows[0]) if self.first_other is None else self.first_other


def scan_weight(
    ckpt: Source,
    weight: str,
    *,
    expert: int | None,
    rows: SourceRows | None,
    usage: bool = False,
    nearest: float | None = None,
) -> WeightFacts:
    """One pass over a stored weight, or over one expert of a stack; errors where there are ``rows`` of the source.

    usage    also counts every code and scale, and ranks the blocks
    nearest  also compares the codes with the nearest ones to the source's weights times this number

    NumericsError where the source holds NaN or inf.
    """
    stored = ckpt.stored[weight]
    fmt, name = stored.scheme.fmt, weight if expert is None else f"{weight}[{expert}]"
    facts = WeightFacts(name, fmt, stored.shape)
    if usage:
        bins = 1 << fmt.scale.bits if fmt.scale.enumerable else FLOAT_BINS
        facts.code_counts, facts.scale_counts = (
            torch.zeros(n, dtype=torch.int64) for n in (1 << fmt.element.bits, bins)
        )
    if rows is not None:
        facts.row_error, facts.row_energy = torch.zeros(2, stored.shape[0], dtype=torch.float64)
    changed = []
    for start, q in ckpt.runs(weight, expert=expert):
        facts.illegal = Illegal(*map(sum, zip(facts.illegal, illegal_numbers(q), strict=True)))
        if usage:
            facts._count(q, scales=start == 0 or not fmt.shares_rows)
        if rows is None or not facts.decodes:
            continue
        w = rows.rows(start, start + q.shape[0])
        check_finite(w, f"'{name}' of the source")
        values = q.dequantize()
        facts._compare(q, w, start, values=values, blocks=usage)
        facts.reach = _reach(q)
        changed += [Changes.of(values, w, q.fmt)] if rows.below_8_bits else []
        if nearest is not None and facts.illegal == Illegal():
            facts._compare_codes(q.multiplying(), enlarge(w, nearest), start)
    facts.changes = Changes.sum(changed, fmt)
    if not facts.decodes:  # of illegal numbers no error means anything
        facts.squared_error = facts.energy = facts.amax = None
        facts._worst = []
    return facts


def _reach(q: QTensor) -> float:
    if q.fmt.one_scale:
        return float(scale_values(q.scales, q.fmt.scale).float().max()) * q.fmt.element.max
    scale = q.multiplying().global_scale
    return 0.0 if scale is None else float(scale) * absmax_divisor(q.fmt)


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


class AbsmaxErrors(NamedTuple):
    """What abs-max scales on the source of a weight.

    relative_mse            on a sample of its rows
    worst_row, worst_ratio  the row whose stored error is worst relative to theirs, and by what factor
    """

    relative_mse: float
    worst_row: int
    worst_ratio: float


def absmax_errors(facts: WeightFacts, rows: SourceRows) -> AbsmaxErrors:
    """Abs-max scales on the ``rows`` that a weight was scanned against."""
    amax = facts.amax or 0.0
    amax = facts.reach if facts.reach > _LOOK * amax else amax  # a fused sibling with larger numbers decided the scale
    fmt = replace(facts.fmt, scale=chosen_scale(facts.fmt.scale))
    sample = _sample_relative_mse(rows, facts.shape, fmt, amax)
    worst = _worst_row(rows, facts.row_error, facts.row_energy, fmt=fmt, amax=amax, typical=sample)
    return AbsmaxErrors(sample, *worst)


def _sample_relative_mse(rows: SourceRows, shape: tuple[int, int], fmt: Format, amax: float) -> float:
    """Relative MSE of abs-max scales on at most ``_SAMPLE_RUNS`` runs of rows, spread evenly."""
    runs = row_runs(shape, fmt)
    step = -(-len(runs) // _SAMPLE_RUNS)
    error = energy = 0.0
    for start, stop in runs[::step]:
        w = rows.rows(start, stop)
        error += float(_absmax_rows(w, fmt, amax).sum())
        energy += float(w.double().square().sum())
    return error / energy if energy else 0.0


@functools.cache
def usual_error(fmt: Format) -> float:
    """What abs-max scales leave of normally distributed weights: squared error over their squares."""
    w = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    return float(_absmax_rows(w, fmt, float(w.abs().max())).sum() / w.square().sum())


def _absmax_rows(w: torch.Tensor, fmt: Format, amax: float) -> torch.Tensor:
    """float64 ``[rows]``: squared error of abs-max scales, a scale of the whole weight from ``amax``."""
    if amax == 0:
        return torch.zeros(w.shape[0], dtype=torch.float64)
    plain = absmax_global(amax, fmt) if fmt.has_global else None
    q = encode(w, _absmax_scales(w, fmt, plain, amax), fmt=fmt, global_scale=plain)
    return (q.dequantize().double() - w.double()).square_().sum(dim=1)


def _absmax_scales(w: torch.Tensor, fmt: Format, plain: torch.Tensor | None, amax: float) -> torch.Tensor:
    """Block scales amax / largest element: rounded to nearest, powers of two upwards."""
    wanted = to_blocks(w.float(), fmt).abs().amax(dim=1) / fmt.element.max
    if fmt.one_scale:
        wanted = torch.full_like(wanted, amax / fmt.element.max)
    wanted = wanted if plain is None else wanted / plain
    grid = fmt.scale_shape((w.shape[0], w.shape[1]))
    if fmt.scale.dtype is not None:
        return wanted.clamp(min=torch.finfo(fmt.scale.dtype).smallest_normal).to(fmt.scale.dtype).reshape(grid)
    codes = magnitude_codes(wanted, fmt.scale)
    if fmt.scale.power_of_two:
        codes = codes + (scale_values(codes.to(torch.uint8), fmt.scale) < wanted)
    return codes.clamp(fmt.scale.first_scale_code, len(fmt.scale.magnitudes) - 1).to(torch.uint8).reshape(grid)


def _worst_row(
    rows: SourceRows, error: torch.Tensor, energy: torch.Tensor, *, fmt: Format, amax: float, typical: float
) -> tuple[int, float]:
    """(row, ratio): the largest error of a row divided by the larger of that of abs-max scales there and in general.

    Rows of tiny numbers are bad in any format, so what looks bad in general is compared with itself.
    """
    relative = torch.where(energy > 0, error / energy.clamp(min=1e-300), torch.where(error > 0, math.inf, 0.0))
    ratios = relative / max(typical, _EXACT)
    for start, stop in row_runs((len(error), rows.shape[1]), fmt):
        if not bool((ratios[start:stop] > _LOOK).any()):
            continue
        power = energy[start:stop]
        beside = _absmax_rows(rows.rows(start, stop), fmt, amax) / power.clamp(min=1e-300)
        ratios[start:stop] = relative[start:stop] / torch.where(power > 0, beside, 0.0).clamp(min=max(typical, _EXACT))
    worst = int(ratios.argmax())
    return worst, float(ratios[worst])
