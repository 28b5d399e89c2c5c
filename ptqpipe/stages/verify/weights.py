"""The numbers of one stored weight: legal codes and scales, the error against the source, codes far from their weight.

Measured with the torch reference (``qtensor.py``), never with the kernels that wrote the checkpoint. Works on runs of
rows, so that memory does not grow with the weight. Must not know names of layers, config files or records.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ptqpipe.formats import CODECS, WHOLE, Codec, Format
from ptqpipe.global_scale import absmax_divisor, absmax_global
from ptqpipe.packing import unpack
from ptqpipe.qtensor import QTensor, check_finite, encode, magnitude_codes, scale_values, to_blocks
from ptqpipe.source import Source, SourceRows

CHUNK_ELEMENTS = 1 << 20
_ALIGN = 128  # rows: a multiple of every block that a source or a format has, whole columns aside
_SAMPLE_RUNS = 4
_EXACT = 1e-12  # a relative MSE below float32 rounding
_LOOK = 4.0  # times the typical error: worth a comparison of its own


@dataclass(frozen=True, slots=True)
class Illegal:
    """Counts of stored numbers that no quantizer may write."""

    zero_scales: int = 0  # with codes that are not zero
    empty_scales: int = 0  # zero, over codes that are all zero
    bad_scales: int = 0  # NaN, infinite, negative or reserved
    bad_codes: int = 0  # codes that the element type reserves (NaN, infinity)

    def __add__(self, other: "Illegal") -> "Illegal":
        return Illegal(
            self.zero_scales + other.zero_scales,
            self.empty_scales + other.empty_scales,
            self.bad_scales + other.bad_scales,
            self.bad_codes + other.bad_codes,
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """Errors of one stored weight against its source, from its own decode in float64.

    worst_row, worst_ratio   the row that is worst beside abs-max scales of the same format, and by how much
    absmax_relative_mse      of abs-max scales on a sample of rows
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

    @property
    def relative_mse(self) -> float:
        """squared error / energy; 0 for an all-zero weight stored exactly, inf for one that is not."""
        if self.energy:
            return self.squared_error / self.energy
        return math.inf if self.squared_error else 0.0


def row_runs(shape: tuple[int, int], fmt: Format) -> list[tuple[int, int]]:
    """Runs of rows of about CHUNK_ELEMENTS weights, on the edges of blocks of every format."""
    step = max(_ALIGN, CHUNK_ELEMENTS // max(1, shape[1]) // _ALIGN * _ALIGN)
    if fmt.block[0] > 1:
        step = math.lcm(step, fmt.block[0])
    return [(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


def stored_runs(
    ckpt: Source, weight: str, expert: int | None, *, runs: list[tuple[int, int]] | None = None
) -> Iterator[tuple[int, QTensor]]:
    """(first row, rows as a QTensor) of a stored weight, one run at a time."""
    stored = ckpt.stored[weight]
    fmt = stored.scheme.fmt
    runs = row_runs(stored.shape, fmt) if runs is None else runs
    if fmt.block[0] != WHOLE:
        for start, stop in runs:
            yield start, ckpt.quantized(weight, expert=expert, rows=(start, stop))
        return
    whole = ckpt.quantized(weight, expert=expert)  # one scale for all rows: every run of rows keeps it
    for start, stop in runs:
        thin = None if whole.low_rank is None else whole.low_rank.narrow(0, start, stop - start)
        yield start, replace(whole, shape=(stop - start, whole.shape[1]), data=whole.data[start:stop], low_rank=thin)


def illegal_numbers(q: QTensor) -> Illegal:
    """Counts codes and scales of a run of rows that no quantizer may write."""
    zero, bad = _scale_faults(q.scales, q.fmt.scale)
    bad_codes = _reserved(q.data, q.fmt.element)
    zeros = int(zero.sum())
    lost = 0
    if zeros:
        mask = (1 << (q.fmt.element.bits - 1)) - 1
        rows, columns = q.fmt.block_extent(q.shape)
        used = ((q.codes & mask) != 0).nonzero()
        hit = torch.zeros_like(zero)
        hit[used[:, 0] // rows, used[:, 1] // columns] = True
        lost = int((zero & hit).sum())
    return Illegal(lost, zeros - lost, int(bad.sum()), bad_codes)


def _scale_faults(scales: torch.Tensor, codec: Codec) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks of zero scales, and of scales that are NaN, infinite, negative or reserved."""
    if not codec.enumerable:
        values = scales.float()
        return values == 0, ~torch.isfinite(values) | (values < 0)
    codes = scales.int()
    magnitude = codes & ((1 << (codec.bits - 1)) - 1) if codec.signed else codes
    value_zero = torch.tensor([m == 0 for m in codec.magnitudes] + [False])
    zero = value_zero[magnitude.clamp(max=len(codec.magnitudes))]
    negative = (codes != magnitude) & ~zero
    return zero, negative | (magnitude >= len(codec.magnitudes))


def _reserved(data: torch.Tensor, codec: Codec) -> int:
    """How many packed codes the element type reserves."""
    half = 1 << (codec.bits - 1)
    if len(codec.magnitudes) >= half:
        return 0
    return int(((unpack(data, codec.bits) & (half - 1)) >= len(codec.magnitudes)).sum())


def multiplying(q: QTensor) -> QTensor:
    """``q`` with its global scale as a factor and without what is added to it, as searches and ``encode`` take it."""
    q = q if q.low_rank is None else replace(q, low_rank=None)
    if q.global_scale is None or not q.global_divides:
        return q
    return replace(q, global_scale=1.0 / q.global_scale, global_divides=False)


def chosen_scale(codec: Codec) -> Codec:
    """The codec that searches choose scales in: where a layout stores float32, the bfloat16 numbers, as readers round
    them to that."""
    return CODECS["bf16"] if codec.dtype is torch.float32 else codec


def measure_weight(ckpt: Source, weight: str, rows: SourceRows, *, expert: int | None = None) -> Measured:
    """Compares a stored weight, or one expert of a stack, with its source; its scales must be legal.

    Raises NumericsError where the source holds NaN or inf.
    """
    stored = ckpt.stored[weight]
    fmt, (n, _) = stored.scheme.fmt, stored.shape
    row_error, row_energy = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    squared = energy = amax = reach = 0.0
    other = far = 0
    first = None
    for start, q in stored_runs(ckpt, weight, expert):
        stop = start + q.shape[0]
        w = rows.rows(start, stop)
        reach = _reach(q)
        check_finite(w, f"'{weight}' of the source")
        exact = w.double()
        diff = (q.dequantize().double() - exact).square_()
        power = exact.square()
        row_error[start:stop], row_energy[start:stop] = diff.sum(dim=1), power.sum(dim=1)
        squared, energy = squared + float(diff.sum()), energy + float(power.sum())
        amax = max(amax, float(w.abs().amax()))
        differing, distant, row = _compare_codes(multiplying(q), w)
        other, far = other + differing, far + distant
        first = start + row if first is None and row is not None else first
    amax = reach if reach > _LOOK * amax else amax  # a fused sibling with larger numbers decided the scale
    fmt = replace(fmt, scale=chosen_scale(fmt.scale))  # for abs-max scales, beside which the stored ones are judged
    sample = _sample_relative_mse(rows, stored.shape, fmt, amax)
    worst, ratio = _worst_row(rows, row_error, row_energy, fmt=fmt, amax=amax, typical=sample)
    return Measured(squared, energy, sample, worst, ratio, other, far, first)


def _reach(q: QTensor) -> float:
    """The magnitude that the scale of the whole weight was made for, about; 0 without one. Siblings may share it."""
    if q.fmt.block == (WHOLE, WHOLE):
        return float(scale_values(q.scales, q.fmt.scale).float().max()) * q.fmt.element.max
    scale = multiplying(q).global_scale
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
    bits = q.fmt.element.bits
    steps = (_signed(unpack(q.data[rows], bits), bits) - _signed(unpack(nearest.data[rows], bits), bits)).abs()
    return int((steps > 0).sum()), int((steps > 1).sum()), int(rows[0])


def _signed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes as places on the number line: negative for negative numbers, both zeros 0."""
    half = 1 << (bits - 1)
    magnitude = (codes & (half - 1)).to(torch.int16)
    return torch.where(codes >= half, -magnitude, magnitude)


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
    if fmt.block == (WHOLE, WHOLE):
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
    """(row, ratio): the largest error of a row beside the larger of that of abs-max scales there and in general.

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


def scalar_fault(value: torch.Tensor) -> str | None:
    """What is wrong with a global scale, None if it and its reciprocal are finite and positive."""
    number = float(value.float().reshape(()))
    if math.isfinite(number) and number > 0 and math.isfinite(float(1.0 / value.float())):
        return None
    return f"is {number}, expected a finite positive number"
