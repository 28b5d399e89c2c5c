"""Block scales proven optimal again, from the definition of the objective and every code that the format has.

Independent of the searches: each candidate is scored by ``objective.scores``. Scales that are plain floats have too
many codes, so those that two obvious bounds exclude are left out: a scale at which the whole block rounds to zero, and
one so small that the largest element's clipping alone costs more than the stored scale's whole score.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ptqpipe.formats import WHOLE, Format
from ptqpipe.qtensor import QTensor, encode, scale_values, to_blocks
from ptqpipe.search.brute_force import all_scales, search
from ptqpipe.search.objective import flush, scores
from ptqpipe.source import Source, SourceRows
from ptqpipe.stages.verify.weights import chosen_scale, multiplying, row_runs, stored_runs

SCORE_BUDGET = 1 << 25  # scored elements a weight, when sampling
NEAR = 1e-5  # relative; float32 counts and products round by less
_CHUNK = 1 << 20
_MAGNITUDES = 2048  # about how many different magnitudes a large block of bfloat16 weights has


@dataclass(frozen=True, slots=True)
class Optimality:
    """What brute force says about the blocks that it saw.

    blocks, total   blocks checked, blocks that the weight has
    worse           stored codes with a score above the least one
    tied            stored codes with the least score that are not the smallest such code
    error, best     squared error of those blocks as stored, and at the best scales
    first           (row, column) in the scale grid of the first block that is worse or tied
    """

    blocks: int
    total: int
    worse: int
    tied: int
    error: float
    best: float
    first: tuple[int, int] | None

    @property
    def saved(self) -> float:
        """The part of the stored squared error that the best scales would save."""
        return 1.0 - self.best / self.error if self.error > 0 else 0.0


def prove_weight(
    ckpt: Source, weight: str, rows: SourceRows, *, expert: int | None, sample_blocks: int | None
) -> Optimality:
    """Scores every code for ``sample_blocks`` blocks of a stored weight; all of them for None.

    Whole rows of blocks, spread evenly from top to bottom.
    """
    stored = ckpt.stored[weight]
    fmt = stored.scheme.fmt
    grid = fmt.scale_shape(stored.shape)
    height, width = fmt.block_extent(stored.shape)
    lines = _sampled_lines(grid, _cost(fmt, height * width), sample_blocks)
    result = Optimality(0, grid[0] * grid[1], 0, 0, 0.0, 0.0, None)
    for where, q, w in _lines(ckpt, weight, expert, lines, rows):
        result = _add(result, _prove(multiplying(q), w, where))
    return result


def prove_joint(ckpt: Source, members: Sequence[tuple[str, SourceRows]]) -> Optimality:
    """One scale for several weights (FP8 per tensor over a fused group): scored as the one block that they are."""
    runs = [(q, rows.rows(0, q.shape[0])) for weight, rows in members for q in [ckpt.quantized(weight)]]
    first = runs[0][0]
    if any(not torch.equal(q.scales, first.scales) for q, _ in runs):
        return Optimality(1, 1, 1, 0, 0.0, 0.0, (0, 0))
    shape = (sum(q.shape[0] for q, _ in runs), first.shape[1])
    joint = replace(first, shape=shape, data=torch.cat([q.data for q, _ in runs]), low_rank=None)
    return _add(
        Optimality(0, 1, 0, 0, 0.0, 0.0, None), _prove(multiplying(joint), torch.cat([w for _, w in runs]), [0])
    )


def _cost(fmt: Format, elements: int) -> int:
    """About how many numbers are scored for a block."""
    if fmt.scale.enumerable:
        return elements * len(fmt.scale.magnitudes)
    octaves = math.log2(fmt.element.max / fmt.element.min_positive) + 3  # of bfloat16 numbers, between the two bounds
    return min(elements, _MAGNITUDES) * int(128 * octaves)


def _sampled_lines(grid: tuple[int, int], cost: int, sample_blocks: int | None) -> list[int]:
    """Rows of the scale grid to check, spread evenly."""
    if sample_blocks is None:
        return list(range(grid[0]))
    blocks = min(sample_blocks, max(1, SCORE_BUDGET // cost))
    count = min(grid[0], max(1, blocks // grid[1]))
    return sorted({(2 * i + 1) * grid[0] // (2 * count) for i in range(count)})


def _lines(
    ckpt: Source, weight: str, expert: int | None, lines: list[int], rows: SourceRows
) -> Iterator[tuple[list[int], QTensor, torch.Tensor]]:
    """(rows of the scale grid, their QTensor, their weights) of the wanted rows of blocks.

    Single rows are gathered into one matrix: scoring has a cost per call.
    """
    stored = ckpt.stored[weight]
    fmt, shape = stored.scheme.fmt, stored.shape
    height, grid = fmt.block_extent(shape)[0], fmt.scale_shape(shape)
    if fmt.block[0] == WHOLE:
        runs = [(0, shape[0])]
    elif len(lines) == grid[0]:
        runs = row_runs(shape, fmt)
    else:
        runs = [(line * height, min((line + 1) * height, shape[0])) for line in lines]
    found = (
        (start, q, rows.rows(start, start + q.shape[0])) for start, q in stored_runs(ckpt, weight, expert, runs=runs)
    )
    if height > 1 or len(lines) == grid[0]:
        for start, q, w in found:
            yield list(range(start // height, -(-(start + q.shape[0]) // height))), q, w
    else:
        pieces = list(found)
        data, scales = (torch.cat([getattr(q, name) for _, q, _ in pieces]) for name in ("data", "scales"))
        q = replace(pieces[0][1], shape=(len(pieces), shape[1]), data=data, scales=scales, low_rank=None)
        yield lines, q, torch.cat([w for _, _, w in pieces])


def _add(a: Optimality, b: Optimality) -> Optimality:
    return replace(
        a,
        blocks=a.blocks + b.blocks,
        worse=a.worse + b.worse,
        tied=a.tied + b.tied,
        error=a.error + b.error,
        best=a.best + b.best,
        first=a.first if a.first is not None else b.first,
    )


def _prove(q: QTensor, w: torch.Tensor, lines: list[int]) -> Optimality:
    """All blocks of ``q``, which holds these rows of the scale grid."""
    fmt, codes = q.fmt, q.scales.reshape(-1)
    x = to_blocks(w.float(), fmt).abs()
    x = flush(x, x.amax(dim=1, keepdim=True))
    if fmt.scale.enumerable:
        best = search(w, fmt, global_scale=q.global_scale).reshape(-1)
    else:
        best = torch.cat([_best_float(x[i : i + 1], codes[i : i + 1], fmt, q.global_scale) for i in range(len(x))])
    stored_score = scores(x, codes, fmt=fmt, global_scale=q.global_scale)
    best_score = scores(x, best, fmt=fmt, global_scale=q.global_scale)
    worse = stored_score > best_score
    tied = ~worse & (scale_values(codes, fmt.scale) != scale_values(best, fmt.scale))
    unlike = (worse | tied).nonzero()
    columns = q.scales.shape[1]
    first = None if not len(unlike) else (lines[int(unlike[0]) // columns], int(unlike[0]) % columns)
    at_best = encode(w, best.reshape(q.scales.shape), fmt=fmt, global_scale=q.global_scale)
    exact = w.double()
    error = float((q.dequantize().double() - exact).square_().sum())
    least = float((at_best.dequantize().double() - exact).square_().sum())
    return Optimality(len(codes), 0, int(worse.sum()), int(tied.sum()), error, least, first)


def _best_float(x: torch.Tensor, stored: torch.Tensor, fmt: Format, global_scale: torch.Tensor | None) -> torch.Tensor:
    """The best scale of one block ``[1, elements]`` among all numbers of the scale's dtype; ``[1]``.

    Equal magnitudes are scored once, with their count as the weight; that rounds otherwise than the definition, by less
    than NEAR, so the candidates that come so near to the least are scored again by the definition.
    """
    codes = all_scales(chosen_scale(fmt.scale)).to(stored.dtype)
    g = 1.0 if global_scale is None else float(global_scale)
    limit = float(scores(x, stored, fmt=fmt, global_scale=global_scale)[0])
    amax, value = float(x.amax()), codes.double() * g
    zeroes = value * fmt.element.min_positive / 2 > amax * (1 + NEAR)
    clipped = (amax * (1 - NEAR) - fmt.element.max * value).clamp(min=0).square() / g**2
    rest = codes[~zeroes & ~(clipped > limit * (1 + NEAR))]
    if not len(rest):
        return codes[:1]
    magnitudes, counts = torch.unique(x, return_counts=True)
    rough = _scored(magnitudes, rest, fmt, global_scale, counts.float())
    rest = rest[rough <= rough.min() * (1 + NEAR)]
    exact = _scored(x[0], rest, fmt, global_scale, None)
    least = int((exact == exact.min()).int().argmax())  # the first: candidates ascend
    return rest[least : least + 1] if bool(torch.isfinite(exact[least])) else codes[:1]


def _scored(
    x: torch.Tensor, codes: torch.Tensor, fmt: Format, global_scale: torch.Tensor | None, counts: torch.Tensor | None
) -> torch.Tensor:
    """float64 ``[codes]``: the score of one block ``[elements]`` at each of the scales."""
    step = max(1, _CHUNK // len(x))
    found = []
    for start in range(0, len(codes), step):
        part = codes[start : start + step]
        h = None if counts is None else counts.expand(len(part), -1)
        found.append(scores(x.expand(len(part), -1), part, fmt=fmt, global_scale=global_scale, h=h))
    return torch.cat(found)
