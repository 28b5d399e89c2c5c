"""GPTQ: codes chosen column by column, each making up for the output error of those before it. Scales are fixed first.

The scales are chosen on the weights in their own order; the columns are then visited in the metric's order (static
activation order), so no scale belongs to columns that are apart and the checkpoint needs no permutation.

Works on any format with enumerable elements: E2M1, E4M3, ... at the block scales that are given. Rows are independent:
a run of rows is quantized as the whole matrix would be. Knows tensors and formats; must not know statistics files.
"""

import torch

from ptqpipe.algorithms.metric import Metric
from ptqpipe.formats import Codec, Format
from ptqpipe.qtensor import QTensor, check_finite, code_values, magnitude_codes, to_blocks
from ptqpipe.qtensor import from_blocks as unblock

BLOCK = 128  # columns between two updates of all later ones


def quantize(
    w: torch.Tensor, scales: torch.Tensor, fmt: Format, *, metric: Metric, global_scale: torch.Tensor | None = None
) -> QTensor:
    """The codes of ``w`` [n, K] at ``scales`` (those of a QTensor of w) that error feedback chooses.

    Raises NumericsError for NaN and inf in ``w``.
    """
    check_finite(w)
    s = column_scales(scales, fmt, shape=(w.shape[0], w.shape[1]), global_scale=global_scale)
    order = metric.order
    exact = w.float().t()[order]  # [K, n]: what is done at once lies in one line
    s = s.t()[order]
    codes = torch.empty(exact.shape, dtype=torch.uint8, device=w.device)
    error = torch.empty_like(exact)
    for start in range(0, len(exact), BLOCK):
        stop = min(start + BLOCK, len(exact))
        target = torch.addmm(exact[start:stop], metric.factor[:start, start:stop].t(), error[:start])
        for i in range(start, stop):
            codes[i], decoded = nearest(target[i - start], s[i], fmt.element)
            torch.sub(exact[i], decoded, out=error[i])
            target[i - start + 1 :].addr_(metric.factor[i, i + 1 : stop], error[i])
    placed = torch.empty_like(codes)
    placed[order] = codes
    return QTensor.from_codes(placed.t().contiguous(), scales, fmt=fmt, global_scale=global_scale)


def column_scales(
    scales: torch.Tensor, fmt: Format, *, shape: tuple[int, int], global_scale: torch.Tensor | None
) -> torch.Tensor:
    """float32 [N, K]: what multiplies each code's value."""
    like = torch.ones(shape, device=scales.device)
    template = QTensor.from_codes(like.to(torch.uint8), scales, fmt=fmt, global_scale=global_scale)
    return unblock(to_blocks(like, fmt) * template.block_scales().reshape(-1, 1), fmt=fmt, shape=shape)


def nearest(target: torch.Tensor, s: torch.Tensor, element: Codec) -> tuple[torch.Tensor, torch.Tensor]:
    """(uint8 codes, float32 decoded values) nearest to ``target`` at scales ``s``, as ``qtensor.encode`` rounds."""
    codes = magnitude_codes(target.abs() * (1.0 / s), element).to(torch.uint8)
    codes |= torch.signbit(target).to(torch.uint8) << (element.bits - 1)
    return codes, code_values(codes, element) * s
