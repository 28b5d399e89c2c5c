"""What each way of choosing scales leaves of the squared error of a weight, by running the real searches on its source:
abs-max and exact block scales at the abs-max global scale of the fused group, four over six at its own (amax / (6 x
256), arXiv 2512.02010), and the scales that are stored; on the rows that rank global scales when a checkpoint is
converted (``global_scale.sample_rows``), or on all.
"""

from collections.abc import Callable

import torch

from ptqpipe.check.report.content import ScaleChoice
from ptqpipe.models.source import Source, SourceRows, row_runs
from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.global_scale import (
    SAMPLE_ALL,
    SAMPLE_FRACTION,
    SAMPLE_RUNS,
    absmax_global,
    canonical,
    sample_rows,
)
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


def _searches_of(fmt: Format) -> list[tuple[str, str, Callable[[float, Format], torch.Tensor]]]:
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
    named = _searches_of(fmt)
    totals = [0.0] * (len(named) + 1)
    searches = [(search, scale(amax, fmt) if fmt.has_global else None) for _, search, scale in named]
    for start, q in ckpt.runs(weight, expert=expert, runs=_aligned(runs, shape, fmt)):
        w = rows.rows(start, start + q.shape[0])
        for index, (search, g) in enumerate(searches):
            totals[index] += total_error(w, fmt, search=search, global_scale=g)
        totals[-1] += float((q.dequantize().double() - w.double()).square_().sum())
    if totals[0] <= 0:
        return ()
    names = [name for name, _, _ in named] + [STORED]
    return tuple(ScaleChoice(name, total / totals[0]) for name, total in zip(names, totals, strict=True))


def _aligned(runs: list[tuple[int, int]], shape: tuple[int, int], fmt: Format) -> list[tuple[int, int]]:
    """Runs short enough for memory: long ones are cut on block edges."""
    step, columns_step = max(fmt.block[0], 1), _CHUNK_ELEMENTS // shape[1]
    cut = []
    for start, stop in runs:
        length = max(step, columns_step // step * step)
        cut += [(first, min(first + length, stop)) for first in range(start, stop, length)]
    return cut
