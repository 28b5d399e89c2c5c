"""Whether the block scales of a stored weight are optimal, by brute force (``search/proof.py``) against its source."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from ptqpipe.check.verify.findings import Findings
from ptqpipe.checkpoint import RECORD_FILE
from ptqpipe.conversion.record import Claim
from ptqpipe.models.source import Source, SourceRows, row_runs
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.numerics.search.enlarged import enlarge
from ptqpipe.numerics.search.proof import Optimality, cost, prove
from ptqpipe.recipe.options import PROPAGATED
from ptqpipe.recipe.plan import Unit

SCORE_BUDGET = 1 << 25  # scored elements per weight, when proofs take a sample of its blocks


def prove_weight(
    ckpt: Source,
    weight: str,
    rows: SourceRows,
    *,
    expert: int | None,
    sample_blocks: int | None,
    claim: Claim | None = None,
) -> Optimality:
    """Proves the scales of ``sample_blocks`` blocks of a stored weight (``search/proof.py``); of all of them for None.

    Whole rows of blocks, spread evenly from top to bottom. ``claim``: what its record says of it.
    """
    factor = 1.0 if claim is None else claim.enlarged
    importance = rows.energies if claim is not None and claim.weighting == PROPAGATED else None
    stored = ckpt.stored[weight]
    fmt = stored.scheme.fmt
    grid = fmt.scale_shape(stored.shape)
    height, width = fmt.block_extent(stored.shape)
    lines = _sampled_lines(grid, cost(fmt, height * width), sample_blocks)
    total = grid[0] * grid[1]
    proofs = (
        prove(q.multiplying(), enlarge(w, factor), blocks, total=total, importance=importance)
        for blocks, q, w in _lines(ckpt, weight, expert, lines, rows)
    )
    return sum(proofs, Optimality(0, total))


def prove_joint(ckpt: Source, members: Sequence[tuple[str, SourceRows]]) -> Optimality:
    """One scale for several weights (FP8 per tensor over a fused group): scored as the one block that they are."""
    runs = [(q, rows.rows(0, q.shape[0])) for weight, rows in members for q in [ckpt.quantized(weight)]]
    first = runs[0][0]
    if any(not torch.equal(q.scales, first.scales) for q, _ in runs):
        return Optimality(1, 1, worse=1, first=(0, 0))
    shape = (sum(q.shape[0] for q, _ in runs), first.shape[1])
    joint = replace(first, shape=shape, data=torch.cat([q.data for q, _ in runs]))
    return prove(joint.multiplying(), torch.cat([w for _, w in runs]), [0], total=1)


def _sampled_lines(grid: tuple[int, int], cost: int, sample_blocks: int | None) -> list[int]:
    if sample_blocks is None:
        return list(range(grid[0]))
    blocks = min(sample_blocks, max(1, SCORE_BUDGET // cost))
    count = min(grid[0], max(1, blocks // grid[1]))
    return sorted({(2 * i + 1) * grid[0] // (2 * count) for i in range(count)})


def _lines(
    ckpt: Source, weight: str, expert: int | None, lines: list[int], rows: SourceRows
) -> Iterator[tuple[list[int], QTensor, torch.Tensor]]:
    """(rows of the scale grid, their QTensor, their weights) of these rows of blocks.

    Single rows are gathered into one matrix: scoring has a cost per call.
    """
    stored = ckpt.stored[weight]
    fmt, shape = stored.scheme.fmt, stored.shape
    height, grid = fmt.block_extent(shape)[0], fmt.scale_shape(shape)
    if fmt.shares_rows:  # its columns are blocks of all rows
        runs = [(0, shape[0])]
    elif len(lines) == grid[0]:
        runs = row_runs(shape, fmt)
    else:
        runs = [(line * height, min((line + 1) * height, shape[0])) for line in lines]
    runs_of_rows = (
        (start, q, rows.rows(start, start + q.shape[0])) for start, q in ckpt.runs(weight, expert=expert, runs=runs)
    )
    if height > 1 or len(lines) == grid[0]:
        for start, q, w in runs_of_rows:
            yield list(range(start // height, -(-(start + q.shape[0]) // height))), q, w
    else:
        pieces = list(runs_of_rows)
        data, scales = (torch.cat([getattr(q, name) for _, q, _ in pieces]) for name in ("data", "scales"))
        q = replace(pieces[0][1], shape=(len(pieces), shape[1]), data=data, scales=scales)
        yield lines, q, torch.cat([w for _, _, w in pieces])


def prove_unit(ckpt: Source, source: Source, unit: Unit, claims: Mapping[str, Claim], findings: Findings) -> None:
    """Proves the one scale of a unit that has one for all of its weights."""
    if any(member.weight not in ckpt.stored or member.stack is not None for member in unit.members):
        return
    members = [(m.weight, SourceRows(source, m.source, shape=m.shape)) for m in unit.members]
    judge_proof(unit.members[0].weight, prove_joint(ckpt, members), claims.get(unit.members[0].key), findings)


def judge_proof(name: str, proof: Optimality, claim: Claim | None, findings: Findings) -> None:
    """A fault where a claim of optimality is wrong."""
    if claim is not None and claim.proven and (proof.worse or proof.tied):
        bad = f"{proof.worse + proof.tied} of {proof.blocks} block scales"
        where = "" if proof.first is None else f", the first at {list(proof.first)} of the scale grid"
        findings.fault("optimal", name, f"{bad} are not the proven optimum that {RECORD_FILE} claims{where}")
