"""Proves block scales optimal, from the definition of the objective and every scale that the format has.

Independent of the searches that chose them: scales with codes are compared with ``brute_force.py``, scales that are
plain numbers, of which there are too many, with ``least.py``.
"""

import math
from dataclasses import dataclass, replace

import torch

from ptqpipe.numerics.formats import CODECS, Codec, Format
from ptqpipe.numerics.qtensor import QTensor, encode, scale_values, squared_error
from ptqpipe.numerics.search.brute_force import search
from ptqpipe.numerics.search.least import best_scales
from ptqpipe.numerics.search.objective import importance_blocks, magnitude_blocks, scores

_MAGNITUDES = 2048  # about how many different magnitudes a large block of bfloat16 weights has


@dataclass(frozen=True, slots=True)
class Optimality:
    """The result of brute force on a sample of blocks.

    blocks, total   blocks checked, blocks that the weight has
    worse           stored codes with a score above the least one
    tied            stored codes with the least score that are not the smallest such code
    error, best     squared error of those blocks as stored, and at the best scales
    first           (row, column) in the scale grid of the first block that is worse or tied
    """

    blocks: int
    total: int
    worse: int = 0
    tied: int = 0
    error: float = 0.0
    best: float = 0.0
    first: tuple[int, int] | None = None

    @property
    def saved(self) -> float:
        """The part of the stored squared error that the best scales would save."""
        return 1.0 - self.best / self.error if self.error > 0 else 0.0

    def __add__(self, other: "Optimality") -> "Optimality":
        """Both samples of one weight together."""
        return Optimality(
            self.blocks + other.blocks,
            self.total,
            self.worse + other.worse,
            self.tied + other.tied,
            self.error + other.error,
            self.best + other.best,
            self.first if self.first is not None else other.first,
        )


def chosen_scale(codec: Codec) -> Codec:
    """The codec that searches choose scales in: where a layout stores float32, the bfloat16 numbers, as readers round
    them to that."""
    return CODECS["bf16"] if codec.dtype is torch.float32 else codec


def cost(fmt: Format, elements: int) -> int:
    """About how many numbers are scored for a block of ``elements`` weights."""
    if fmt.scale.enumerable:
        return elements * len(fmt.scale.magnitudes)
    octaves = math.log2(fmt.element.max / fmt.element.min_positive) + 3  # of bfloat16 numbers, between two bounds
    return min(elements, _MAGNITUDES) * int(128 * octaves)


def prove(
    q: QTensor, w: torch.Tensor, lines: list[int], *, total: int, importance: torch.Tensor | None = None
) -> Optimality:
    """Compares every block of ``q`` with the best scales for ``w`` ``[N, K]``; ``total`` is passed on.

    q      with a global scale that multiplies
    lines  the rows of the whole weight's scale grid that its rows of blocks are
    importance  [K] what the columns count; for scales with codes alone
    """
    fmt, stored, h = q.fmt, q.scales.reshape(-1), importance_blocks(importance, w, q.fmt)
    x = magnitude_blocks(w, fmt)
    if fmt.scale.enumerable:
        best = search(w, fmt, global_scale=q.global_scale, importance=importance).reshape(-1)
    else:
        searched = replace(fmt, scale=chosen_scale(fmt.scale))
        best = best_scales(x.numpy(), stored, fmt=searched, global_scale=q.global_scale).to(stored.dtype)
    at_stored, at_best = (scores(x, scales, fmt=fmt, global_scale=q.global_scale, h=h) for scales in (stored, best))
    worse = at_stored > at_best
    tied = ~worse & (scale_values(stored, fmt.scale) != scale_values(best, fmt.scale))
    unlike = (worse | tied).nonzero()
    columns = q.scales.shape[1]
    first = None if not len(unlike) else (lines[int(unlike[0]) // columns], int(unlike[0]) % columns)
    again = encode(w, best.reshape(q.scales.shape), fmt=fmt, global_scale=q.global_scale)
    errors = squared_error(q, w), squared_error(again, w)
    return Optimality(len(stored), total, int(worse.sum()), int(tied.sum()), *errors, first)
