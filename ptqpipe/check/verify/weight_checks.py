"""Checks the numbers of one stored weight: its legality, its error, its codes, its record, its block scales.

Works on runs of rows, so that memory does not grow with the weight.
"""

from dataclasses import dataclass, replace

import torch

from ptqpipe.check.scan import AbsmaxErrors, WeightFacts, absmax_errors, scan_weight, usual_error
from ptqpipe.check.verify.block_proofs import judge_proof, prove_weight
from ptqpipe.check.verify.claims import SUM_TOLERANCE, check_hashes, check_numbers
from ptqpipe.check.verify.findings import Findings
from ptqpipe.check.verify.shared_scales import scalar_fault
from ptqpipe.checkpoint import RECORD_FILE
from ptqpipe.checkpoint.layouts import PartKind, StoredWeight
from ptqpipe.conversion.measured import CHANGES
from ptqpipe.conversion.record import UNKNOWN, Claim, Record
from ptqpipe.models.source import Source, SourceRows
from ptqpipe.numerics.formats import get_format
from ptqpipe.numerics.qtensor import Illegal
from ptqpipe.numerics.search.proof import Optimality
from ptqpipe.run.quantities import number

TOTAL_RATIO = 4.0  # error of a weight over that of abs-max scales: error feedback stays below it
DATA_RATIO = 64.0  # the same where data chose the codes: error at inputs that are always small costs nothing
ROW_RATIO = 16.0  # the same of its worst row; other tools' checkpoints reach 3
NEAREST_SHARE = 0.1  # a checkpoint rounds to nearest if fewer of its codes are unlike ours (bfloat16 division: 0.035)
ROUNDED = 1e-5  # a relayout that inverted a global scale may change decodes in the last place


@dataclass(frozen=True, slots=True)
class WeightReport:
    """One quantized weight. The errors are None without a source, and where the stored numbers are illegal.

    energy         squares of the source's weights, summed
    versus_absmax  squared error over that of scales amax/max (powers of two rounded up), on a sample of rows
    versus_rtn     output error over that of plain rounding, as the record of a calibrated weight claims
    nearest        whether its codes are the nearest ones, as far as is known: others trade this error for the output's
    """

    name: str
    format: str
    shape: tuple[int, int]
    relative_mse: float | None = None
    energy: float = 0.0
    versus_absmax: float | None = None
    optimality: Optimality | None = None
    versus_rtn: float | None = None
    nearest: bool = True


def check_weight(
    ckpt: Source,
    stored: StoredWeight,
    expert: int | None,
    *,
    rows: SourceRows | None,
    record: Record | None,
    optimal: bool,
    sample_blocks: int | None,
    findings: Findings,
) -> WeightReport:
    """The numbers of one weight, or of one expert of a stack, against ``rows`` of the source; ``findings`` gets faults.

    optimal        also prove its block scales by brute force, ``sample_blocks`` of them; all for None
    """
    name = stored.key(expert)
    fmt = stored.scheme.fmt
    claim = record.weights.get(name) if record is not None else None
    output = None if claim is None else claim.numbers.get("versus_rtn")
    nearest = claim is None or claim.nearest
    report = WeightReport(name, fmt.name, stored.shape, versus_rtn=output, nearest=nearest)
    if claim is not None:
        check_hashes(ckpt, stored.weight, expert, claim, findings)
        moved = record is not None and not record.converted
        _check_claim(stored, name, claim, findings, moved=moved)
        _check_scalars(ckpt, stored, name, expert or 0, claim, findings, moved=moved)
    factor = 1.0 if claim is None else claim.enlarged
    scales = ckpt.global_scales(stored)
    sound = not len(scales) or scalar_fault(scales[(expert or 0) if len(scales) > 1 else 0]) is None
    facts = scan_weight(ckpt, stored.weight, expert=expert, rows=rows if sound else None, nearest=factor)
    _check_legal(facts, findings)
    if not sound or rows is None or facts.illegal != Illegal():  # a global scale is reported with the others
        return report
    absmax = absmax_errors(facts, rows)
    ours = claim is not None and claim.search != UNKNOWN
    _judge(facts, absmax, claim if ours else None, findings)
    if claim is not None and ours:
        keys = ("squared_error", "energy", "relative_mse") if claim.numbers.keys() & {"squared_error"} else ()
        tolerance = ROUNDED if record is not None and name in record.rounded else SUM_TOLERANCE
        check_numbers(name, claim, {key: getattr(facts, key) for key in keys}, findings, tolerance=tolerance)
        counted = facts.changes._asdict() if rows.below_8_bits else None
        if record is not None and record.converted and claim.entry.get(CHANGES) != counted:
            claimed = f"claims {CHANGES} {claim.entry.get(CHANGES)!r:.120} in {RECORD_FILE}"
            findings.fault("record", name, f"{claimed}; compared with the source it is {counted}")
    proof = None
    joint = claim is not None and fmt.one_scale  # one scale for the fused group: proven by unit
    if optimal and not joint and (claim is None or claim.provable):
        proof = prove_weight(ckpt, stored.weight, rows, expert=expert, sample_blocks=sample_blocks, claim=claim)
        judge_proof(name, proof, claim, findings)
    return replace(
        report,
        relative_mse=facts.relative_mse,
        energy=facts.energy or 0.0,
        versus_absmax=facts.relative_mse / absmax.relative_mse if absmax.relative_mse else None,
        optimality=proof,
    )


def _check_claim(stored: StoredWeight, name: str, claim: Claim, findings: Findings, *, moved: bool) -> None:
    """Checks what the record claims that needs no source. A weight whose layout was changed may have no errors."""
    fmt = stored.scheme.fmt
    if claim.shape != stored.shape or claim.format != fmt.name:
        claimed = f"{claim.format} {list(claim.shape)}"
        findings.fault("record", name, f"is {claimed} in {RECORD_FILE}, stored is {fmt.name} {list(stored.shape)}")
    keys = ("squared_error", "energy", "relative_mse")
    error, energy = (claim.numbers.get(key) for key in keys[:2])
    missing = [key for key in keys if key not in claim.numbers]
    if missing and not (moved and len(missing) == len(keys)):
        findings.fault("record", name, f"has no {missing[0]} in {RECORD_FILE}")
    elif error is not None and energy is not None:
        check_numbers(name, claim, {"relative_mse": error / energy if energy else 0.0}, findings)
    if claim.entry.get("rotation", 0) != stored.scheme.rotation:
        claimed = f"has rotation {claim.entry.get('rotation', 0)} in {RECORD_FILE}"
        findings.fault(
            "record", name, f"{claimed}, config.json rotates its inputs by blocks of {stored.scheme.rotation}"
        )
    gained = claim.numbers.get("versus_rtn", 1.0)
    if gained > 1.0 or (claim.reverted and gained != 1.0):
        findings.fault(
            "record", name, f"claims versus_rtn {gained}, reverted {claim.reverted}: these contradict each other"
        )
    # The record counts scales as the format has them; a layout may store them wider (bfloat16 numbers as F32).
    bits = replace(stored.scheme, fmt=get_format(fmt.name)).bits_per_weight(stored.shape)
    if claim.numbers.get("bits_per_weight") != bits:
        claimed_bits = claim.numbers.get("bits_per_weight")
        findings.fault("record", name, f"has {claimed_bits} bits_per_weight in {RECORD_FILE}, expected {bits}")


def _check_scalars(
    ckpt: Source, stored: StoredWeight, name: str, expert: int, claim: Claim, findings: Findings, *, moved: bool
) -> None:
    """The global scale and the input's are the stored ones; ``moved``: or what inverting them again and again gives."""
    for what, claimed, multiplies, divides in (
        ("global_scale", claim.global_scale, PartKind.GLOBAL, PartKind.GLOBAL_DIVISOR),
        ("input_scale", claim.input_scale, PartKind.INPUT_GLOBAL, PartKind.INPUT_GLOBAL_DIVISOR),
    ):
        part = stored.part(multiplies) or stored.part(divides)
        if part is None or claimed is None:
            if claimed is not None or (part is not None and (claim.search != UNKNOWN or what == "global_scale")):
                findings.fault("record", name, f"has {what} {claimed} in {RECORD_FILE}; {stored.scheme.name} differs")
            continue
        value = ckpt.reader.read(part.name).float().reshape(-1)[expert]
        chain = [torch.tensor(claimed, dtype=torch.float32)]
        for _ in range(5 if moved else 1):
            chain.append(1.0 / chain[-1])
        if not any(torch.equal(value, x) for x in chain[part.role is divides :: 2]):
            shown = f"{float(value):.9g}{' (divides)' * (part.role is divides)}"
            findings.fault("record", name, f"claims {what} {claimed:.9g}, stored is {shown}")


def _check_legal(facts: WeightFacts, findings: Findings) -> None:
    counts, name = facts.illegal, facts.name
    if counts.bad_scales:
        findings.fault(
            "scales", name, f"{counts.bad_scales} block scales are NaN, infinite or negative, expected positive ones"
        )
    if counts.zero_scales:
        findings.fault(
            "scales", name, f"{counts.zero_scales} block scales are zero although their blocks have codes that are not"
        )
    if counts.empty_scales:
        message = f"{counts.empty_scales} block scales of all-zero blocks are zero; write positive ones"
        findings.choice("scales", name, message)
    if counts.bad_codes:
        findings.fault("codes", name, f"{counts.bad_codes} codes are NaN or infinite in {facts.fmt.element.name}")


def _judge(facts: WeightFacts, beside: AbsmaxErrors, claim: Claim | None, findings: Findings) -> None:
    """Errors and codes that no quantizer leaves; ``claim`` is that of our own record."""
    name, elements = facts.name, facts.shape[0] * facts.shape[1]
    by_data = claim is not None and not (claim.nearest and claim.weighting == "none")
    # A source that was quantized once may lie on the grid of abs-max scales; codes that data chose leave it.
    absmax = max(beside.relative_mse, usual_error(facts.fmt) if by_data else 1e-12)
    if facts.relative_mse > (DATA_RATIO if by_data else TOTAL_RATIO) * absmax:
        numbers = f"relative MSE is {number(facts.relative_mse, 3)} where abs-max scales give {number(absmax, 3)}"
        message = f"{numbers}: these are not the numbers of the source's weight"
        findings.fault("error", name, message)
    elif beside.worst_ratio > ROW_RATIO and claim is None:  # ours are quantized once more and compared bit by bit
        ratio = f"{number(beside.worst_ratio, 3)} times the error of abs-max scales"
        message = f"row {beside.worst_row} has {ratio}: it is damaged or misplaced"
        findings.fault("error", name, message)
    if claim is not None and not claim.nearest:
        return  # the codes follow from the recipe and the statistics; their bytes have hashes
    if claim is not None and facts.first_other is not None:
        findings.fault(
            "codes", name, f"row {facts.first_other} has codes that are not the nearest to the source's weights"
        )
    elif facts.far_codes and facts.other_codes <= NEAREST_SHARE * elements:
        message = f"{facts.far_codes} codes are two or more steps from the source, all others at most one: damaged"
        findings.fault("codes", name, message)
