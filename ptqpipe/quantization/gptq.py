"""GPTQ: codes chosen column by column, each compensating for the output error of those before it.

Two ways to get the block scales, both with static activation order (the checkpoint needs no permutation):

* ``codes_at``: scales are fixed first, on the weights in their own order, and the columns are then visited by their
  second moment, the largest first;
* ``codes_at_entry``: whole blocks are visited, by their summed second moment, and a block's scale is chosen when its
  turn comes, on the weights with all feedback so far, together with its codes.

The result is then refined (``refine.py``). Rows are independent, and a run of rows is quantized as the whole matrix
would be, unless moments of the gradients at the outputs are known: then ``kronecker.py`` goes through the rows, too.

Source: Frantar et al. 2022 (columns, damping, lazy blocks of 128).
"""

from collections.abc import Callable, Sequence

import torch

from ptqpipe.calibration.inputs import Moments
from ptqpipe.errors import FormatError, NumericsError, arg
from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.qtensor import QTensor, check_finite, code_values
from ptqpipe.quantization import calibrated, kronecker
from ptqpipe.quantization.gptq_steps import (
    BLOCK,
    absmax_index,
    as_qtensor,
    choose_block,
    column_scales,
    feed_forward,
    has_block_scales,
    in_one,
    scale_ladder,
)
from ptqpipe.quantization.metric import Metric, descending, make_metric
from ptqpipe.quantization.refine import block_metrics, refine
from ptqpipe.quantization.unit import Task, UnitResult
from ptqpipe.recipe.options import CodeOptions

GROUP_SWEEPS = 1  # of refinement for a group of rows, where there are groups
BELOW, ABOVE = 6, 8  # scales tried beside the one that just does not clip


def quantize(task: Task) -> UnitResult:
    """Quantizes a unit by error feedback in the metric of every weight's input. NumericsError for unusable moments."""
    inputs = task.inputs or ()

    def prepare(index: int) -> Metric:
        return metric_of(inputs[index], task.fmt, task.options, device=task.device, name=task.names[index])

    return calibrated.quantize(task, _feedback(task, prepare))


def choose(task: Task, metrics: Sequence[Metric]) -> None:
    """The same in ``metrics``, one for each weight (`metric_of`), without a comparison with plain rounding: for a
    caller that judges the codes itself."""
    calibrated.choose(task, _feedback(task, metrics.__getitem__))


def _feedback(task: Task, prepare: Callable[[int], Metric]) -> calibrated.Feedback:
    fmt, options = task.fmt, task.options
    entry = at_entry(options.scales, fmt)

    def choose(
        w: torch.Tensor,
        metric: Metric,
        g: torch.Tensor | None,
        nearest: Callable[[torch.Tensor], QTensor],
        outputs: Sequence[torch.Tensor] | None,
    ) -> QTensor:
        two = outputs is not None and kronecker.possible(fmt)
        sweeps = min(options.refine_passes, GROUP_SWEEPS) if two else options.refine_passes
        blocks = block_metrics(metric.moment, fmt) if sweeps else None

        def one_sided(rows: torch.Tensor) -> QTensor:
            if entry:
                q = codes_at_entry(rows, fmt, metric=metric, global_scale=g)
            else:
                q = codes_at(rows, nearest(rows).scales, fmt, metric=metric, global_scale=g)
            return refine(q, rows, moment=metric.moment, sweeps=sweeps, blocks=blocks) if sweeps else q

        return kronecker.codes(w, outputs, one_sided) if outputs is not None and two else one_sided(w)

    shifted = kronecker.possible(fmt) and any(moments.outputs is not None for moments in task.inputs or ())
    moves = entry or shifted or bool(options.refine_passes and has_block_scales(fmt))
    return calibrated.Feedback(prepare, choose, moves_scales=moves)


def metric_of(moments: Moments, fmt: Format, options: CodeOptions, *, device: torch.device, name: str) -> Metric:
    """The metric of the input of the weight ``name``, in the order in which its columns are visited. NumericsError for
    unusable moments."""
    if moments.full_moment is None:
        raise NumericsError(
            f"gptq needs the full second moment of the input of '{name}'; calibrate with "
            f"{arg('moments', 'diagonal,full')}, or convert with {arg('algorithm', 'rtn')}"
        )
    moment = moments.full_moment.to(device)
    group = fmt.block[1] if at_entry(options.scales, fmt) else 1
    order = descending(moment, group=group) if options.order == "static" else None
    return make_metric(moment, damping=options.damping, order=order, name=f"the input of '{name}'")


def at_entry(scales: str, fmt: Format) -> bool:
    """Whether the scales of this format are chosen at block entry: "auto" does where they are finer than powers of
    two."""
    return has_block_scales(fmt) and (scales == "entry" or (scales == "auto" and not fmt.scale.power_of_two))


def codes_at(
    w: torch.Tensor, scales: torch.Tensor, fmt: Format, *, metric: Metric, global_scale: torch.Tensor | None = None
) -> QTensor:
    """The codes of ``w`` [n, K] at ``scales`` (those of a QTensor of w) that error feedback chooses.

    Raises NumericsError for NaN and inf in ``w``.
    """
    check_finite(w)
    s = column_scales(scales, fmt, shape=(w.shape[0], w.shape[1]), global_scale=global_scale)
    exact, s = w.float().t()[metric.order].contiguous(), s.t()[metric.order].contiguous()
    fed = _fed(exact, s, metric.factor, fmt)
    codes = torch.empty_like(fed).index_copy_(0, metric.order, fed)
    return as_qtensor(codes, scales, fmt, global_scale)


def _fed(exact: torch.Tensor, s: torch.Tensor, factor: torch.Tensor, fmt: Format) -> torch.Tensor:
    """uint8 codes [K, n] of ``exact`` at the scales ``s``, columns in the metric's order."""
    done = in_one("feed_rows", exact, s, factor, fmt.element)
    if done is not None:
        return done  # type: ignore[no-any-return]
    codes = torch.empty(exact.shape, dtype=torch.uint8, device=exact.device)
    error = torch.empty_like(exact)
    for start in range(0, len(exact), BLOCK):
        run = slice(start, min(start + BLOCK, len(exact)))
        target = torch.addmm(exact[run], factor[:start, run].t(), error[:start])
        feedback = factor[run, run].contiguous()
        codes[run], error[run] = feed_forward(exact[run], target, s[run], feedback=feedback, element=fmt.element)
    return codes


def codes_at_entry(
    w: torch.Tensor, fmt: Format, *, metric: Metric, global_scale: torch.Tensor | None = None
) -> QTensor:
    """Scales and codes of ``w`` [n, K]; the metric's order must keep the format's blocks together.

    Raises NumericsError for NaN and inf in ``w``, FormatError for a format without block scales along rows.
    """
    if not has_block_scales(fmt):
        raise FormatError(f"{fmt.name} has no block scales along its rows to choose at block entry; fix them first")
    check_finite(w)
    size, order = fmt.block[1], metric.order
    ladder = scale_ladder(fmt, global_scale, w.device)
    entered, chosen = _entered(w.float().t()[order].contiguous(), ladder, metric, fmt)
    codes = torch.empty_like(entered).index_copy_(0, order, entered)
    scales = torch.empty_like(chosen).index_copy_(0, order[::size] // size, chosen)
    return as_qtensor(codes, (scales.t() + fmt.scale.first_scale_code).to(torch.uint8), fmt, global_scale)


def _entered(
    exact: torch.Tensor, ladder: torch.Tensor, metric: Metric, fmt: Format
) -> tuple[torch.Tensor, torch.Tensor]:
    """(uint8 codes [K, n], int64 scales [K/b, n] as indices in ``ladder``) of ``exact``, columns in the metric's
    order."""
    size, count = fmt.block[1], BELOW + ABOVE + 1
    factor, weight, element = metric.factor, metric.weight, fmt.element
    done = in_one("enter_rows", exact, ladder, factor, weight, size, BELOW, count, element)
    if done is not None:
        return done  # type: ignore[no-any-return]
    codes = torch.empty(exact.shape, dtype=torch.uint8, device=exact.device)
    error = torch.empty_like(exact)
    scales = torch.empty((len(exact) // size, exact.shape[1]), dtype=torch.int64, device=exact.device)
    for block in range(len(scales)):
        start = block * size
        run = slice(start, start + size)
        target = torch.addmm(exact[run], factor[:start, run].t(), error[:start])
        codes[run], scales[block], _ = choose_block(
            target,
            ladder,
            (absmax_index(target, ladder, element) - BELOW).clamp(min=0),
            count=count,
            feedback=factor[run, run].contiguous(),
            weight=weight[run],
            element=element,
        )
        error[run] = exact[run] - code_values(codes[run], element) * ladder[scales[block]]
    return codes, scales
