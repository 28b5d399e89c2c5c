"""Corrects a weight for the input that its layer will see: that of a quantized model, not of the float one.

In a quantized model a layer is given x' (what quantized layers before it return, itself quantized, perhaps) instead of
x. Its output should still be W x, on average over tokens. With H = E[x' x'^T] and C = E[x x'^T],

    E|W x - Q x'|^2 + d |Q - W|^2 = tr((T - Q) (H + d) (T - Q)^T) + const,    T = W + W (C - H) (H + d)^-1

so the weight to quantize is T, in the metric of H. Knows moments and columns; must not know formats, files or models.

Source: the asymmetric calibration of GPTAQ (Li et al. 2025, arXiv 2504.02692), which adds the difference of the two
inputs column by column; here it is one solve before GPTQ, which then is GPTQ as it was.
"""

import torch

from ptqpipe.algorithms.metric import DAMPING, check_moment, make_metric
from ptqpipe.errors import FormatError, NumericsError


def target(
    w: torch.Tensor,
    moment: torch.Tensor,
    cross: torch.Tensor,
    *,
    damping: float = DAMPING,
    name: str = "the input",
) -> torch.Tensor:
    """T float32 [N, K] for a weight ``w`` [N, K].

    moment   float32 [K, K] E[x' x'^T] of the input that there will be
    cross    float32 [K, K] E[x x'^T], x the input that the weight was made for
    damping  share of the mean diagonal of ``moment``: how much T prefers to stay at w; more where ``make_metric`` needs
             more

    Raises NumericsError for moments that are not finite or all zero, FormatError for one of another shape.
    """
    check_moment(moment, name)
    if cross.shape != moment.shape or w.shape[1] != moment.shape[0]:
        raise FormatError(
            f"the moments of {name} are {list(moment.shape)} and {list(cross.shape)}, the weight is {list(w.shape)}"
        )
    if not bool(torch.isfinite(cross).all()):
        raise NumericsError(f"the cross moment of {name} is not finite; run in float32")
    damped = make_metric(moment, damping=damping, name=name).moment.double()
    # (H + d) is symmetric: (C - H) (H + d)^-1 is the transpose of the solution for (C - H)^T.
    change = torch.cholesky_solve((cross.double() - moment.double()).t(), torch.linalg.cholesky(damped))
    return (w.double() + w.double() @ change.t()).float()
