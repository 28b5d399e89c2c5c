"""As exact, after enlarging the weights a little, since rounding shrinks them: lower error of the model.

At the scale and codes of least squared error, sum w q = sum q^2: of the weights' own direction the part D is lost, D
being the squared error over the sum of squares. Rounding errors point anywhere, but this one points the same way in
every block, and inputs are larger along the weights that a model has learned than anywhere else: its cost is that of
its squared size times some rho > 1. So rounding (``quantization/rtn.py``) measures D on a sample of a unit's rows,
multiplies the weights by 1 + SHARE D / (1 - D), and takes the exact scales and nearest codes of those. The share
rho / (1 + rho) balances both errors. Weights that the format holds without error have D = 0 and stay as they are.
What that does to models: docs/search.md.
"""

import torch

from ptqpipe.numerics.search.exact import search

__all__ = ["MOST", "enlarge", "factor_for", "search"]

SHARE = 0.8  # of what is lost; all of it measured no better, and worse on one of five models
STEPS = 4096  # of factors between 1 and 2: coarse, so that they do not hang on the last bits of a sum
MOST = 1 + 1 / 16  # the largest factor: where more than that is lost, size is not what is wrong


def factor_for(error: float, energy: float) -> float:
    """The factor for weights whose rounding leaves the squared error ``error``; ``energy``: their sum of
    squares."""
    if not error < energy:
        return 1.0 if error <= 0 else MOST
    return min(MOST, 1 + round(SHARE * error / (energy - error) * STEPS) / STEPS)


def enlarge(w: torch.Tensor, factor: float, *, memory: torch.Tensor | None = None) -> torch.Tensor:
    """``w`` times ``factor`` in float32; ``w`` itself for 1. ``memory``: float32, at least as large, which it may
    take: fresh memory costs ten times the product."""
    if factor == 1:
        return w
    w = w.float() if w.dtype == torch.float64 else w
    out = torch.empty(w.shape, device=w.device) if memory is None else memory[: w.numel()].view(w.shape)
    return torch.mul(w, torch.full((1,), factor, device=w.device), out=out)
