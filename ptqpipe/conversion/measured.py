"""Stored weights measured against their source: their errors, beside those of abs-max scales, codes that are not the
nearest, and whether block scales are optimal, by brute force (``search/proof.py``).

Measured with the torch reference (``qtensor.py``), never with the kernels that wrote the checkpoint, on runs of rows:
memory does not grow with the weight. Only what a conversion counts of its own rows (`counting`) is decoded by the
kernel, and found again by the reference when the checkpoint is verified. Judges nothing; must not know records or
config files.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ptqpipe.models.source import Source, SourceRows, row_runs
from ptqpipe.numerics.formats import Format, unpack
from ptqpipe.numerics.global_scale import absmax_divisor, absmax_global
from ptqpipe.numerics.kernels.cpu_decode import decoded, same_numbers
from ptqpipe.numerics.qtensor import (
    QTensor,
    check_finite,
    code_places,
    encode,
    magnitude_codes,
    scale_values,
    to_blocks,
)
from ptqpipe.numerics.search.enlarged import enlarge
from ptqpipe.numerics.search.proof import Optimality, chosen_scale, cost, prove

_SAMPLE_RUNS = 4
_EXACT = 1e-12  # a relative MSE below float32 rounding
SCORE_BUDGET = 1 << 25  # scored elements per weight, when proofs take a sample of its blocks
_LOOK = 4.0  # times the typical error: worth a comparison of its own


CHANGES = "changed"  # what the record calls the next, of each weight that its source stores below 8 bits


class Changes(NamedTuple):
    """How far a weight that was stored below 8 bits differs from what it was.

    weights        numbers that are others than before (zero and its negative are one)
    blocks         blocks with such a number
    largest_error  the largest difference of a number
    """

    weights: int = 0
    blocks: int = 0
    largest_error: float = 0.0

    @classmethod
    def of(cls, values: torch.Tensor, w: torch.Tensor, fmt: Format) -> "Changes":
        """Those of the decoded ``values`` of rows in ``fmt`` against the rows ``w`` that they stand for, exactly."""
        if torch.equal(values, w):  # the usual case, without float64
            return cls()
        error = to_blocks((values.double() - w.double()).abs(), fmt)
        changed = error != 0
        return cls(int(changed.sum()), int(changed.any(dim=1).sum()), float(error.max()))

    @classmethod
    def sum(cls, parts: Iterable["Changes"], fmt: Format | None = None) -> "Changes":
        """Of all parts together; of runs of the rows of one weight where ``fmt`` has one scale for all rows."""
        weights, blocks, errors = zip(cls(), *parts, strict=True)
        return cls(sum(weights), int(any(blocks)) if fmt is not None and fmt.one_scale else sum(blocks), max(errors))


def counting(
    weights: Sequence[SourceRows], sink: Callable[[int, int, QTensor], None], changed: dict[tuple[int, int], Changes]
) -> Callable[[int, int, QTensor], None]:
    """A sink that passes rows on, and puts into ``changed`` what becomes of weights that are stored below 8 bits."""

    def write_rows(member: int, row: int, q: QTensor) -> None:
        sink(member, row, q)
        if weights[member].below_8_bits:
            run = row, row + q.shape[0]
            source = weights[member].quantized(*run)
            same = source is not None and same_numbers(q, source)
            changed[member, row] = (
                Changes() if same else Changes.of(decoded(q).cpu(), weights[member].rows(*run), q.fmt)
            )

    return write_rows if any(weight.below_8_bits for weight in weights) else sink


def changes_of(
    weights: Sequence[SourceRows], fmt: Format, changed: Mapping[tuple[int, int], Changes]
) -> list[dict[str, Any]]:
    """What the record says of the changes of each weight, from what `counting` found."""
    by_member = [[changes for (member, _), changes in changed.items() if member == i] for i in range(len(weights))]
    sums = [Changes.sum(changes, fmt) for changes in by_member]
    return [{CHANGES: changes._asdict()} if w.below_8_bits else {} for w, changes in zip(weights, sums, strict=True)]


def certificate(entries: Mapping[str, Mapping[str, Any]]) -> str:
    """What the record certifies of all weights that were stored below 8 bits; empty where none was."""
    changes = [Changes(**entry[CHANGES]) for entry in entries.values() if CHANGES in entry]
    total = Changes.sum(changes)
    text = f"{total.weights} weights changed; {total.blocks} blocks requantized, largest error {total.largest_error:g}"
    return text if changes else ""


@dataclass(frozen=True, slots=True)
class Measured:
    """Errors of one stored weight against its source, from its own decode in float64.

    worst_row, worst_ratio   the row that is worst relative to abs-max scales of the same format, and by what factor
    absmax_relative_mse      of abs-max scales on a sample of rows
    changes                  of a weight that the source stores below 8 bits; of others nothing is counted
    other_codes, far_codes   codes that are not the nearest to their weight; those that are two or more steps away
    first_other              row of the first code that is not the nearest one bit for bit, the sign of zero included
    """

    squared_error: float
    energy: float
    absmax_relative_mse: float
    worst_row: int
    worst_ratio: float
    other_codes: int
    far_codes: int
    first_other: int | None
    changes: Changes

    @property
    def relative_mse(self) -> float:
        """squared error / energy; 0 for an all-zero weight stored exactly, inf for one that is not."""
        if self.energy:
            return self.squared_error / self.energy
        return math.inf if self.squared_error else 0.0


def measure_weight(
    ckpt: Source, weight: str, rows: SourceRows, *, expert: int | None = None, factor: float = 1.0
) -> Measured:
    """Compares a stored weight, or one expert of a stack, with its source; its scales must be legal.

    factor  what the weights were multiplied by before their nearest codes were taken

    Raises NumericsError where the source holds NaN or inf.
    """
    stored = ckpt.stored[weight]
    fmt, (n, _) = stored.scheme.fmt, stored.shape
    row_error, row_energy = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    squared = energy = amax = reach = 0.0
    other = far = 0
    first = None
    changed: list[Changes] = []
    for start, q in ckpt.runs(weight, expert=expert):
        stop = start + q.shape[0]
        w = rows.rows(start, stop)
        reach = _reach(q)
        check_finite(w, f"'{weight}' of the source")
        exact = w.double()
        values = q.dequantize()
        diff = (values.double() - exact).square_()
        power = exact.square()
        row_error[start:stop], row_energy[start:stop] = diff.sum(dim=1), power.sum(dim=1)
        squared, energy = squared + float(diff.sum()), energy + float(power.sum())
        amax = max(amax, float(w.abs().amax()))
        differing, distant, row = _compare_codes(q.multiplying(), enlarge(w, factor))
        other, far = other + differing, far + distant
        first = start + row if first is None and row is not None else first
        changed += [Changes.of(values, w, q.fmt)] if rows.below_8_bits else []
    amax = reach if reach > _LOOK * amax else amax  # a fused sibling with larger numbers decided the scale
    fmt = replace(fmt, scale=chosen_scale(fmt.scale))  # for abs-max scales, beside which the stored ones are judged
    sample = _sample_relative_mse(rows, stored.shape, fmt, amax)
    worst, ratio = _worst_row(rows, row_error, row_energy, fmt=fmt, amax=amax, typical=sample)
    changes = Changes.sum(changed, stored.scheme.fmt)
    return Measured(squared, energy, sample, worst, ratio, other, far, first, changes)


def _reach(q: QTensor) -> float:
    """The magnitude that the scale of the whole weight fits, about; 0 without one. Siblings may share it."""
    if q.fmt.one_scale:
        return float(scale_values(q.scales, q.fmt.scale).float().max()) * q.fmt.element.max
    scale = q.multiplying().global_scale
    if scale is None:
        return 0.0
    return float(scale) * absmax_divisor(q.fmt)


def _compare_codes(q: QTensor, w: torch.Tensor) -> tuple[int, int, int | None]:
    """(codes unlike the nearest in value, those two or more steps away, first row with any other byte)."""
    nearest = encode(w, q.scales, fmt=q.fmt, global_scale=q.global_scale)
    where = (nearest.data != q.data).any(dim=1).nonzero()
    if not len(where):
        return 0, 0, None
    rows = where[:, 0]
    own, best = (unpack(part.data[rows], q.fmt.element.bits) for part in (q, nearest))
    steps = (code_places(own, q.fmt.element) - code_places(best, q.fmt.element)).abs()
    return int((steps > 0).sum()), int((steps > 1).sum()), int(rows[0])


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
    rows: SourceRows,
    error: torch.Tensor,
    energy: torch.Tensor,
    *,
    fmt: Format,
    amax: float,
    typical: float,
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


def prove_weight(
    ckpt: Source, weight: str, rows: SourceRows, *, expert: int | None, sample_blocks: int | None, factor: float = 1.0
) -> Optimality:
    """Proves the scales of ``sample_blocks`` blocks of a stored weight (``search/proof.py``); of all of them for None.

    Whole rows of blocks, spread evenly from top to bottom. ``factor``: what the weights were multiplied by before.
    """
    stored = ckpt.stored[weight]
    fmt = stored.scheme.fmt
    grid = fmt.scale_shape(stored.shape)
    height, width = fmt.block_extent(stored.shape)
    lines = _sampled_lines(grid, cost(fmt, height * width), sample_blocks)
    total = grid[0] * grid[1]
    proofs = (
        prove(q.multiplying(), enlarge(w, factor), lines_of_run, total=total)
        for lines_of_run, q, w in _lines(ckpt, weight, expert, lines, rows)
    )
    return sum(proofs, Optimality(0, total))


def prove_joint(ckpt: Source, members: Sequence[tuple[str, SourceRows]]) -> Optimality:
    """One scale for several weights (FP8 per tensor over a fused group): scored as the one block that they are."""
    runs = [(q, rows.rows(0, q.shape[0])) for weight, rows in members for q in [ckpt.quantized(weight)]]
    first = runs[0][0]
    if any(not torch.equal(q.scales, first.scales) for q, _ in runs):
        return Optimality(1, 1, worse=1, first=(0, 0))
    shape = (sum(q.shape[0] for q, _ in runs), first.shape[1])
    joint = replace(first, shape=shape, data=torch.cat([q.data for q, _ in runs]))
    return prove(joint.multiplying(), torch.cat([w for _, w in runs]), [0], total=1)


def _sampled_lines(grid: tuple[int, int], cost: int, sample_blocks: int | None) -> list[int]:
    """Rows of the scale grid to check, spread evenly."""
    if sample_blocks is None:
        return list(range(grid[0]))
    blocks = min(sample_blocks, max(1, SCORE_BUDGET // cost))
    count = min(grid[0], max(1, blocks // grid[1]))
    return sorted({(2 * i + 1) * grid[0] // (2 * count) for i in range(count)})


def _lines(
    ckpt: Source, weight: str, expert: int | None, lines: list[int], rows: SourceRows
) -> Iterator[tuple[list[int], QTensor, torch.Tensor]]:
    """(rows of the scale grid, their QTensor, their weights) of these rows of blocks.

    Single rows are gathered into one matrix: scoring has a cost per call.
    """
    stored = ckpt.stored[weight]
    fmt, shape = stored.scheme.fmt, stored.shape
    height, grid = fmt.block_extent(shape)[0], fmt.scale_shape(shape)
    if fmt.shares_rows:  # its columns are blocks of all rows
        runs = [(0, shape[0])]
    elif len(lines) == grid[0]:
        runs = row_runs(shape, fmt)
    else:
        runs = [(line * height, min((line + 1) * height, shape[0])) for line in lines]
    runs_of_rows = (
        (start, q, rows.rows(start, start + q.shape[0])) for start, q in ckpt.runs(weight, expert=expert, runs=runs)
    )
    if height > 1 or len(lines) == grid[0]:
        for start, q, w in runs_of_rows:
            yield list(range(start // height, -(-(start + q.shape[0]) // height))), q, w
    else:
        pieces = list(runs_of_rows)
        data, scales = (torch.cat([getattr(q, name) for _, q, _ in pieces]) for name in ("data", "scales"))
        q = replace(pieces[0][1], shape=(len(pieces), shape[1]), data=data, scales=scales)
        yield lines, q, torch.cat([w for _, _, w in pieces])
