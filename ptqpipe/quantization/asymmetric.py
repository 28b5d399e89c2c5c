"""Corrects a weight for the input that its layer will see: that of a quantized model, not of the float one.

In a quantized model a layer is given x' (what quantized layers before it return, itself quantized, perhaps) instead of
x. Its output should still be W x, on average over tokens. With H = E[x' x'^T] and C = E[x x'^T],

    E|W x - Q x'|^2 + d |Q - W|^2 = tr((T - Q) (H + d) (T - Q)^T) + const,    T = W + W (C - H) (H + d)^-1

so the weight to quantize is T, in the metric of H.

Source: the asymmetric calibration of GPTAQ (Li et al. 2025, arXiv 2504.02692), which adds the difference of the two
inputs column by column; here it is one solve before GPTQ, which then is GPTQ as it was.
"""

from collections.abc import Sequence

import torch

from ptqpipe.calibration.inputs import is_finite
from ptqpipe.errors import FormatError, NumericsError
from ptqpipe.quantization.metric import Metric, check_moment


def targets(
    weights: Sequence[torch.Tensor],
    moment: torch.Tensor,
    cross: torch.Tensor,
    *,
    metric: Metric,
    name: str = "the input",
) -> list[torch.Tensor]:
    """T float32 [N, K] for each of the ``weights`` [N, K] that are given one input.

    moment   float32 [K, K] E[x' x'^T] of the input that there will be
    cross    float32 [K, K] E[x x'^T], x the input that the weights were made for
    metric   of ``moment``: its damping is how much T prefers to stay at w

    The two triangular solutions are in float32: what they round is far below the damping.
    Raises NumericsError for moments that are not finite, FormatError for one of another shape.
    """
    check_moment(moment, name)
    if cross.shape != moment.shape or any(w.shape[1] != len(moment) for w in weights):
        shapes = " and ".join(str(list(w.shape)) for w in weights)
        raise FormatError(
            f"the moments of {name} are {list(moment.shape)} and {list(cross.shape)}, the weights are {shapes}"
        )
    if not is_finite(cross):
        raise NumericsError(f"the cross moment of {name} is not finite; run in float32")
    floats, difference = [w.float() for w in weights], cross - moment
    if sum(len(w) for w in floats) < len(moment):  # fewer right sides than columns
        return [w + _divided(w @ difference, metric) for w in floats]
    change = _divided(difference, metric)
    return [torch.addmm(w, w, change) for w in floats]


def _divided(rows: torch.Tensor, metric: Metric) -> torch.Tensor:
    """``rows`` [n, K] (H + d)^-1, by the factors of H + d that the metric has."""
    sides = torch.linalg.solve_triangular(
        metric.factor, rows.t()[metric.order], upper=True, unitriangular=True
    ) / metric.weight.unsqueeze(1)
    solution = torch.linalg.solve_triangular(metric.factor.t(), sides, upper=False, unitriangular=True)
    return torch.empty_like(solution).index_copy_(0, metric.order, solution).t()
