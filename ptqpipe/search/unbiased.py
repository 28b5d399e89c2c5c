"""As exact, for weights enlarged by the little that rounding takes away: the decoded ones keep their size.

The scale and the codes of least squared error make a block smaller: sum w q = sum q^2 at the best scale, so of the
weights' own direction the part 1 - D is left, D being the squared error over the squares. That error points the same
way in every row, adds up from layer to layer, and a model feels it more than what points anywhere. So rounding
(``algorithms/rtn.py``) multiplies the weights of a unit by 1 / (1 - D) first, D as measured on a sample of its rows,
and both scales and codes are exact for those. Weights that the format holds without error have D = 0 and stay as they
are. Why, and by how much the model's divergence falls: docs/search.md.
"""

import torch

from ptqpipe.search.exact import search

__all__ = ["MOST", "PROVEN", "enlarge", "factor_for", "search"]

PROVEN = True

STEPS = 4096  # of factors between 1 and 2: coarse, so that they do not hang on the last bits of a sum
MOST = 1 + 1 / 16  # the largest factor: where more than a sixteenth is lost, size is not what is wrong


def factor_for(error: float, energy: float) -> float:
    """The factor for weights of which rounding leaves the squared error ``error``; ``energy``: the sum of their
    squares."""
    if not 0 < error < energy:
        return 1.0 if not error >= energy > 0 else MOST
    return min(MOST, 1 + round(error / (energy - error) * STEPS) / STEPS)


def enlarge(w: torch.Tensor, factor: float) -> torch.Tensor:
    """``w`` times ``factor`` in float32; ``w`` itself for 1."""
    return w if factor == 1 else w.float() * factor
