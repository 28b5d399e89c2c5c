"""Refinement: coordinate descent that lowers the output error of any quantized weight, and never raises it.

With all other codes fixed, tr(E H E^T) is a parabola in one decoded value, so the code nearest to its minimum is the
best one (``columns.descend``). With all other blocks fixed it is a quadratic form in one block, so a block's scale and
codes are tried together, and taken where they are better than what there was. A sweep does the second for every block
(for formats that have scales along rows) and then the first for every column.
"""

from dataclasses import dataclass

import torch

from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.kernels.cpu_decode import decoded
from ptqpipe.numerics.qtensor import QTensor, code_values
from ptqpipe.quantization.gptq_steps import (
    BLOCK,
    as_qtensor,
    choose_block,
    column_scales,
    descend,
    has_block_scales,
    in_one,
    scale_ladder,
)

ENOUGH = 1e-6  # a gain below this share of a block's cost is rounding


@dataclass(slots=True)
class _State:
    """A weight in the middle of it. [K, n] but for ``scales``: uint8 [n, K/b].

    slope  moment @ error: half of the derivative by each decoded value, negated
    """

    exact: torch.Tensor
    codes: torch.Tensor
    error: torch.Tensor
    slope: torch.Tensor
    scales: torch.Tensor


def refine(
    q: QTensor, w: torch.Tensor, *, moment: torch.Tensor, sweeps: int, blocks: "Blocks | None" = None
) -> QTensor:
    """``q`` with scales and codes that fit ``w`` [n, K] better in ``moment`` [K, K] (damped), after ``sweeps`` sweeps.

    The global scale stays. ``blocks`` are those of `block_metrics`, where the caller has them.
    """
    exact = w.float().t().contiguous()
    codes, error = q.codes.t().contiguous(), (exact - decoded(q).t()).contiguous()
    blocks = blocks or block_metrics(moment, q.fmt)
    done = _in_one(q, exact, error, codes, moment, sweeps, blocks)
    if done is not None:
        return done
    state = _State(exact, codes, error, moment @ error, q.scales.clone())
    for _ in range(sweeps):
        if blocks is not None:
            _sweep_blocks(state, q.fmt, q.global_scale, moment, blocks)
        _sweep_columns(state, q.fmt, q.global_scale, moment)
    return as_qtensor(state.codes, state.scales, q.fmt, q.global_scale)


def _in_one(
    q: QTensor,
    exact: torch.Tensor,
    error: torch.Tensor,
    codes: torch.Tensor,
    moment: torch.Tensor,
    sweeps: int,
    blocks: "Blocks | None",
) -> QTensor | None:
    """`refine` by a kernel; ``codes`` are overwritten."""
    element, scales = q.fmt.element, q.scales
    if blocks is None:
        s = column_scales(scales, q.fmt, shape=q.shape, global_scale=q.global_scale).t().contiguous()
        done = in_one("sweep_rows", exact, error, codes, s, moment, sweeps, element)
    else:
        ladder = scale_ladder(q.fmt, q.global_scale, exact.device)
        first = q.fmt.scale.first_scale_code
        scale_steps = (scales.t().long() - first).contiguous()
        of_blocks = (blocks.feedback, blocks.weight, blocks.inverse, blocks.usable)
        tried = (_window(q.fmt), 1.0 - ENOUGH, sweeps)
        done = in_one("sweep_block_rows", exact, error, codes, scale_steps, ladder, moment, of_blocks, tried, element)
        scales = (scale_steps.t() + first).to(torch.uint8)
    return as_qtensor(codes, scales, q.fmt, q.global_scale) if done else None


def _window(fmt: Format) -> int:
    return 2 if fmt.scale.power_of_two else 6


def _sweep_columns(state: _State, fmt: Format, global_scale: torch.Tensor | None, moment: torch.Tensor) -> None:
    columns, rows = state.exact.shape
    s = column_scales(state.scales, fmt, shape=(rows, columns), global_scale=global_scale).t().contiguous()
    for start in range(0, columns, BLOCK):
        run = slice(start, min(start + BLOCK, columns))
        before = state.error[run].clone()
        near = state.slope[run].clone()
        corner = moment[run, run].contiguous()
        descend(state.exact[run], state.error[run], state.codes[run], near, s[run], moment=corner, element=fmt.element)
        state.slope.addmm_(moment[:, run], state.error[run] - before)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The metric of every block by itself: float32 [K/b, b, b] but for ``weight`` [K/b, b].

    usable  uint8 [K/b], on the CPU: whether the block's moment is positive definite
    """

    feedback: torch.Tensor
    weight: torch.Tensor
    inverse: torch.Tensor
    usable: torch.Tensor


def _sweep_blocks(
    state: _State, fmt: Format, global_scale: torch.Tensor | None, moment: torch.Tensor, blocks: Blocks
) -> None:
    ladder, size = scale_ladder(fmt, global_scale, state.exact.device), fmt.block[1]
    columns, usable, step = len(moment), blocks.usable.tolist(), size * max(1, BLOCK // size)
    for start in range(0, columns, step):  # their own slope moves with every block, that of all columns once
        run = slice(start, min(start + step, columns))
        before, near = state.error[run].clone(), state.slope[run].clone()
        for block in range(start // size, run.stop // size):
            if usable[block]:
                here = slice(block * size, (block + 1) * size)
                moved = _sweep_block(state, near[here.start - start : here.stop - start], ladder, fmt, blocks, block)
                near.addmm_(moment[run, here], moved)
        state.slope.addmm_(moment[:, run], state.error[run] - before)


def _sweep_block(
    state: _State, slope: torch.Tensor, ladder: torch.Tensor, fmt: Format, blocks: Blocks, block: int
) -> torch.Tensor:
    """Chooses the scale and the codes of one block; what its errors [b, n] have moved by.

    slope  [b, n] of its columns now
    """
    size, window = fmt.block[1], _window(fmt)
    run = slice(block * size, (block + 1) * size)
    feedback, weight, inverse = blocks.feedback[block], blocks.weight[block], blocks.inverse[block]
    decoded = state.exact[run] - state.error[run]
    # the block's part of the objective is (target - decoded)^T moment (target - decoded), up to a constant
    target = decoded + inverse @ slope
    current = state.scales[:, block].long() - fmt.scale.first_scale_code
    codes, scales, cost = choose_block(
        target,
        ladder,
        (current - window).clamp(min=0),
        count=2 * window + 1,
        feedback=feedback,
        weight=weight,
        element=fmt.element,
    )
    better = cost < _cost(target - decoded, feedback, weight) * (1.0 - ENOUGH)
    codes = torch.where(better, codes, state.codes[run])
    chosen = torch.where(better, scales, current)
    error = state.exact[run] - code_values(codes, fmt.element) * ladder[chosen]
    moved = error - state.error[run]
    state.codes[run], state.error[run] = codes, error
    state.scales[:, block] = (chosen + fmt.scale.first_scale_code).to(torch.uint8)
    return moved


def block_metrics(moment: torch.Tensor, fmt: Format) -> Blocks | None:
    """The diagonal blocks of ``moment`` [K, K], factored as ``metric.make_metric`` does; None for a format without
    block scales along rows."""
    if not has_block_scales(fmt):
        return None
    size = fmt.block[1]
    count = len(moment) // size
    parts = moment.reshape(count, size, count, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1).double()
    lower, failed = torch.linalg.cholesky_ex(parts.flip(1, 2))
    upper = lower.flip(1, 2)
    diagonal = upper.diagonal(dim1=1, dim2=2)
    eye = torch.eye(size, dtype=torch.float64, device=moment.device)
    inverse = torch.cholesky_inverse(torch.where(failed.view(-1, 1, 1) == 0, lower, eye)).flip(1, 2)
    feedback = (upper / diagonal.unsqueeze(1)).float().contiguous()
    usable = (failed == 0).to("cpu", torch.uint8)
    return Blocks(feedback, diagonal.square().float().contiguous(), inverse.float().contiguous(), usable)


def _cost(left: torch.Tensor, feedback: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """float32 [n]: the cost of what is left [b, n] of a target, in the metric of ``columns.choose_block``."""
    return (feedback.t() @ left).square_().mul_(weight.unsqueeze(1)).sum(dim=0)
