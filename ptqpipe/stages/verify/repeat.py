"""Our own output quantized once more from its record and its source: every code, scale and reported number again.

The searches and kernels that wrote the checkpoint run again, so this finds any change of the bytes but no error of the
search itself; that is what ``weights.py`` (torch reference) and ``optimal.py`` (brute force) are for.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ptqpipe.containers import Role
from ptqpipe.formats import WHOLE
from ptqpipe.plan import Member, Unit
from ptqpipe.qtensor import QTensor
from ptqpipe.source import Source, SourceRows
from ptqpipe.stages.common import low_rank
from ptqpipe.stages.common.input_scales import LARGEST
from ptqpipe.stages.common.outputs import Outputs
from ptqpipe.stages.common.quantize_unit import choose_codes
from ptqpipe.stages.verify.claims import SUM_TOLERANCE, check_numbers
from ptqpipe.stages.verify.findings import Findings
from ptqpipe.stages.verify.judge import judge_proof
from ptqpipe.stages.verify.optimal import prove_joint
from ptqpipe.stages.verify.record import Claim, Record
from ptqpipe.stages.verify.weights import multiplying
from ptqpipe.statistics import Statistics

# Relative: a low-rank part from another processor's eigenvectors, rounded otherwise here and there.
LOW_RANK_TOLERANCE = 1e-4


def repeat_unit(
    ckpt: Source,
    source: Source,
    unit: Unit,
    claims: Mapping[str, Claim],
    findings: Findings,
    *,
    cache_bytes: int,
    statistics: Statistics | None = None,
    with_statistics: bool = False,
) -> None:
    """Quantizes a unit again and compares its rows with the stored ones, its numbers with the claimed ones.

    A unit that was made with statistics is repeated where they are at hand: matrix products give the same bits on the
    same kind of processor only. For that reason a low-rank part is compared by what it leaves.

    with_statistics  whether the checkpoint was made with any
    """
    if any(member.weight not in ckpt.stored or member.key not in claims for member in unit.members):
        return  # missing weights are reported by name elsewhere
    if _learned(unit, claims, findings) or (unit.rule.calibrated and statistics is None):
        return
    cache = sum(member.elements for member in unit.members) * 2 <= cache_bytes
    rows = [SourceRows(source, m.source, shape=m.shape, cache=cache) for m in unit.members]
    differing: dict[tuple[int, int], str] = {}

    held: low_rank.Chunks = {}

    def compare(member: int, row: int, q: QTensor) -> None:  # a second pass over a row replaces what the first found
        if unit.scheme.low_rank is not None:
            held[(member, row)] = q
        differing.pop((member, row), None)
        problem = _unlike(ckpt, unit.members[member], row, q)
        if problem:
            differing[(member, row)] = problem

    codes = choose_codes(unit, rows, statistics=statistics, sink=compare)
    result = codes.result
    _check_told(unit, codes.told, claims, findings)
    for (index, row), problem in sorted(differing.items()):
        findings.fault("repeat", unit.members[index].key, f"rows from {row} on: {problem} of the recorded recipe")
    if unit.scheme.low_rank is not None and (statistics is not None or not with_statistics):
        again, _ = low_rank.correct_unit(unit, rows, held, result.errors, statistics=statistics, sink=lambda *_: None)
        for member, error in zip(unit.members, again, strict=True):
            claimed = claims[member.key].numbers.get("squared_error", 0.0)
            if not math.isclose(claimed, error.squared_error, rel_tol=LOW_RANK_TOLERANCE):
                message = f"leaves {claimed:.6g}, that of the recorded recipe {error.squared_error:.6g}"
                findings.fault("repeat", member.key, f"the low-rank part {message}")
    for member, error in zip(unit.members, result.errors, strict=True):
        name = member.key
        claim = claims[name]
        ratio = 1.0
        if unit.scheme.low_rank is not None and error.squared_error:
            ratio = claim.numbers.get("squared_error", 0.0) / error.squared_error
        actual = {"versus_absmax": error.versus_absmax * ratio, "versus_plain_global": result.versus_plain_global}
        check_numbers(name, claim, actual, findings)
        wanted = (unit.scheme.fmt.name, unit.scheme.name, unit.rule.search, result.proven, result.global_scale)
        if (claim.format, claim.scheme, claim.search, claim.proven, claim.global_scale) != wanted:
            findings.fault("record", name, f"claims format, scheme, search, proven, global scale that are not {wanted}")


def _check_told(unit: Unit, told: Sequence[Mapping[str, Any]], claims: Mapping[str, Claim], findings: Findings) -> None:
    """What the record says of how each weight was quantized with statistics."""
    for member, outcome in zip(unit.members, told, strict=True):
        found = claims[member.key].told
        for key, wanted in outcome.items():
            number = isinstance(wanted, float) and isinstance(found.get(key), float | int)
            if not (math.isclose(found[key], wanted, rel_tol=SUM_TOLERANCE) if number else found.get(key) == wanted):
                findings.fault("record", member.key, f"claims {key} {found.get(key)!r:.40}, recomputed {wanted!r:.40}")


def _learned(unit: Unit, claims: Mapping[str, Claim], findings: Findings) -> bool:
    """Whether a unit has learned codes, which are not at hand; a fault where a record does not say what its rule
    does."""
    learned = False
    for member in unit.members:
        claim = claims[member.key]
        learned = learned or claim.algorithm == "learned"
        wanted = (unit.rule.algorithm, unit.rule.weighting)
        if claim.algorithm != "learned" and (claim.algorithm, claim.weighting) != wanted:
            findings.fault("record", member.key, f"claims {claim.algorithm}, the recipe says {wanted[0]}")
    return learned


def prove_unit(ckpt: Source, source: Source, unit: Unit, claims: Mapping[str, Claim], findings: Findings) -> None:
    """Proves the one scale of a unit that has one for all of its weights."""
    if any(member.weight not in ckpt.stored or member.stack is not None for member in unit.members):
        return
    members = [(m.weight, SourceRows(source, m.source, shape=m.shape)) for m in unit.members]
    judge_proof(unit.members[0].weight, prove_joint(ckpt, members), claims.get(unit.members[0].key), findings)


def _unlike(ckpt: Source, member: Member, row: int, q: QTensor) -> str:
    """What of a run of rows is not as stored; empty when nothing is."""
    expert = member.source.expert if member.stack is not None else None
    whole = q.fmt.block[0] == WHOLE
    found = ckpt.quantized(member.weight, expert=expert, rows=None if whole else (row, row + q.shape[0]))
    data = found.data[row : row + q.shape[0]] if whole else found.data
    if data.shape != q.data.shape or found.scales.shape != q.scales.shape:
        return "the shapes are not those"
    g, wanted = multiplying(found).global_scale, q.global_scale
    if (g is None) != (wanted is None) or (g is not None and wanted is not None and not torch.equal(g, wanted)):
        return "the global scale is not that"
    if not torch.equal(found.scales.float(), q.scales.float()):
        return f"{int((found.scales.float() != q.scales.float()).sum())} block scales are not those"
    if not torch.equal(data, q.data):
        return f"{int((data != q.data).sum())} bytes of codes are not those"
    return ""


def check_input_scales(ckpt: Source, planned: Outputs, record: Record, findings: Findings) -> None:
    """Every static input scale is the one that the record claims; without statistics that is the recipe's constant."""
    roles: Sequence[Role] = (Role.INPUT_GLOBAL, Role.INPUT_GLOBAL_DIVISOR)
    measured = isinstance(record.raw.get("statistics"), Mapping)
    for name, stored in ckpt.stored.items():
        largest = LARGEST.get(stored.scheme.activation)
        if largest is None:
            continue
        constant = torch.tensor(planned.recipe.input_amax, dtype=torch.float32) / largest
        for part in stored.parts:
            if part.role not in roles:
                continue
            for expert, value in enumerate(ckpt.reader.read(part.name).float().reshape(-1)):
                claim = record.weights.get(name if stored.experts is None else f"{name}[{expert}]")
                own = claim.input_scale if claim is not None else None
                claimed = constant if not measured else torch.tensor(own or 0.0)
                wanted = 1.0 / claimed if part.role is Role.INPUT_GLOBAL_DIVISOR else claimed
                if not torch.equal(value, wanted):
                    given = f"is {value.item():.9g}, {'the record' if measured else 'the recipe'} gives"
                    findings.fault("scales", part.name, f"{given} {wanted.item():.9g}")
