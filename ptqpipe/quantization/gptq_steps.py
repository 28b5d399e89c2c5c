"""Codes of a few columns at a time, for many rows: the inner steps of error feedback and of refinement.

All tensors lie as [columns, rows], so that one step works on adjacent numbers, and every product and sum is rounded by
itself in the order written here: the kernels, where a device has them, give the same bits. `in_one` is for the loops
around these steps.
"""

from typing import Any

import torch

from ptqpipe.numerics.formats import Codec, Format
from ptqpipe.numerics.qtensor import QTensor, code_values, from_blocks, nearest_codes, scale_values, to_blocks
from ptqpipe.quantization.unit import kernel_for

BLOCK = 128  # columns between two updates of all later ones


def has_block_scales(fmt: Format) -> bool:
    """Whether the format's blocks lie in rows and their scales are a list to choose from."""
    return fmt.block[0] == 1 and fmt.block[1] > 1 and fmt.scale.enumerable


def column_scales(
    scales: torch.Tensor, fmt: Format, *, shape: tuple[int, int], global_scale: torch.Tensor | None
) -> torch.Tensor:
    """float32 [N, K]: what multiplies each code's value, at a QTensor's ``scales``."""
    values = scale_values(scales, fmt.scale)
    values = values if global_scale is None else values * global_scale
    ones = torch.ones(shape, device=scales.device)
    return from_blocks(to_blocks(ones, fmt) * values.reshape(-1, 1), fmt=fmt, shape=shape)


def nearest(target: torch.Tensor, s: torch.Tensor, element: Codec) -> tuple[torch.Tensor, torch.Tensor]:
    """(uint8 codes, float32 decoded values) nearest to ``target`` at scales ``s``, as ``qtensor.encode`` rounds."""
    codes = nearest_codes(target, 1.0 / s, element)
    return codes, code_values(codes, element) * s


def in_one(name: str, exact: torch.Tensor, *arguments: Any) -> Any:
    """What the kernel of this name makes of all columns of ``exact`` [columns, rows] in one pass; None where it is for
    the caller to go through them. Its sums come in the order of the columns, those of torch's products in their own."""
    kernel = kernel_for(exact.device, name)
    return None if kernel is None else kernel(exact, *arguments)


def feed_forward(
    exact: torch.Tensor, target: torch.Tensor, s: torch.Tensor, *, feedback: torch.Tensor, element: Codec
) -> tuple[torch.Tensor, torch.Tensor]:
    """(uint8 codes, float32 errors exact - decoded), each [b, n]: columns rounded one after the other.

    exact     [b, n] the weights
    target    [b, n] the weights with the feedback of all earlier columns; overwritten
    s         [b, n] the scale of every weight
    feedback  [b, b] what the error of column j adds to column i > j, at [j, i]
    """
    kernel = kernel_for(exact.device, "feed_forward")
    done = None if kernel is None else kernel(exact, target, s, feedback, element)
    if done is not None:
        return done  # type: ignore[no-any-return]
    codes = torch.empty(exact.shape, dtype=torch.uint8, device=exact.device)
    error = torch.empty_like(exact)
    for i in range(len(exact)):
        codes[i], decoded = nearest(target[i], s[i], element)
        torch.sub(exact[i], decoded, out=error[i])
        target[i + 1 :] += feedback[i, i + 1 :].unsqueeze(1) * error[i]
    return codes, error


def descend(
    exact: torch.Tensor,
    error: torch.Tensor,
    codes: torch.Tensor,
    slope: torch.Tensor,
    s: torch.Tensor,
    *,
    moment: torch.Tensor,
    element: Codec,
) -> None:
    """One step of coordinate descent in every column, in turn; ``error``, ``codes``, ``slope`` [b, n] are updated.

    slope   sum over all columns j of moment[i, j] * error[j]
    moment  [b, b] of these columns; a column of no moment is rounded to its weight
    """
    kernel = kernel_for(exact.device, "descend")
    if kernel is not None and kernel(exact, error, codes, slope, s, moment, element):
        return
    for i, curvature in enumerate(moment.diagonal().tolist()):  # all at once: a GPU is waited for each time
        decoded = exact[i] - error[i]
        target = decoded + slope[i] * (1.0 / torch.tensor(curvature)) if curvature > 0 else exact[i]
        codes[i], decoded = nearest(target, s[i], element)
        before = error[i].clone()
        torch.sub(exact[i], decoded, out=error[i])
        slope += moment[:, i].unsqueeze(1) * (error[i] - before)


def choose_block(
    target: torch.Tensor,
    ladder: torch.Tensor,
    first: torch.Tensor,
    *,
    count: int,
    feedback: torch.Tensor,
    weight: torch.Tensor,
    element: Codec,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes uint8 [b, n], scales int64 [n] as indices, cost float32 [n]) of one block of columns, chosen together: the
    least cost of ``count`` scales for every row.

    target    [b, n] what the block should be
    ladder    float32 [scales], ascending: every legal scale, the global one included
    first     int64 [n]: the smallest scale to try, an index
    feedback, weight  [b, b] and [b]: the metric of the block as ``metric.Metric`` has it; codes are fed forward in it

    cost = sum over columns i, in order, of weight_i * r_i^2, where r_i is what rounding leaves at column i. Ties go to
    the smaller scale. Not an argmin over codes: within a scale they are chosen one after the other.
    """
    kernel = kernel_for(target.device, "choose_block")
    done = None if kernel is None else kernel(target, ladder, first, count, feedback, weight, element)
    if done is not None:
        return done  # type: ignore[no-any-return]
    index = (first.unsqueeze(0) + torch.arange(count, device=target.device).unsqueeze(1)).clamp(0, len(ladder) - 1)
    s = ladder[index]  # [count, n]
    near = target.unsqueeze(1).repeat(1, count, 1)
    codes = torch.empty(near.shape, dtype=torch.uint8, device=target.device)
    cost = torch.zeros_like(s)
    for i in range(len(target)):
        codes[i], decoded = nearest(near[i], s, element)
        left = near[i] - decoded
        cost += left * left * weight[i]
        near[i + 1 :] += feedback[i, i + 1 :].view(-1, 1, 1) * (target[i] - decoded)
    best = cost.argmin(dim=0, keepdim=True)
    chosen = codes.gather(1, best.expand(len(target), -1).unsqueeze(1))[:, 0]
    return chosen, index.gather(0, best)[0], cost.gather(0, best)[0]


def scale_ladder(fmt: Format, global_scale: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """float32: every legal scale of an enumerable scale codec, ascending, the global scale included."""
    codes = torch.arange(fmt.scale.first_scale_code, len(fmt.scale.magnitudes), dtype=torch.uint8, device=device)
    values = scale_values(codes, fmt.scale)
    return values if global_scale is None else values * global_scale.to(device)


def absmax_index(block: torch.Tensor, ladder: torch.Tensor, element: Codec) -> torch.Tensor:
    """int64 [n]: the smallest scale that does not clip ``block`` [b, n], the largest where all clip."""
    wanted = block.abs().amax(dim=0) / element.max
    return torch.bucketize(wanted, ladder).clamp(max=len(ladder) - 1)


def as_qtensor(codes: torch.Tensor, scales: torch.Tensor, fmt: Format, global_scale: torch.Tensor | None) -> QTensor:
    """From codes [K, n] in the weight's column order and the QTensor's ``scales``."""
    return QTensor.from_codes(codes.t().contiguous(), scales, fmt=fmt, global_scale=global_scale)
