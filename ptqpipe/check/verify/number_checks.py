"""The checks of a verification that read weights: a job for each of them, on threads."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ptqpipe.check.verify import claims, tensor_fates as structure
from ptqpipe.check.verify.block_proofs import prove_unit
from ptqpipe.check.verify.findings import Findings
from ptqpipe.check.verify.repeat import repeat_unit
from ptqpipe.check.verify.verification import Verification
from ptqpipe.check.verify.weight_checks import WeightReport, check_weight
from ptqpipe.checkpoint import RECORD_FILE
from ptqpipe.checkpoint.layouts import StoredWeight, is_kv_scale
from ptqpipe.conversion.bias_correction import BIAS_REASON as CORRECTED
from ptqpipe.conversion.planned_outputs import Outputs
from ptqpipe.models.source import SourceRows
from ptqpipe.numerics.search.proof import Optimality
from ptqpipe.quantization.learned_codes import TRAINED_REASON
from ptqpipe.recipe.plan import Unit

CACHE_BYTES = 128 << 20  # of a unit that is quantized again; a larger one is read as often as its passes need it


_SAVING_NOTE = 0.001  # of the squared error: what the exact search would save, below which no line is worth it


Job = Callable[[], tuple[Findings, WeightReport | None]]


def number_jobs(run: Verification) -> list[Job]:
    """One job for each stored weight (expert of a stack) and kept tensor, and for own output each unit."""
    jobs: list[Job] = []
    for stored in run.ckpt.stored.values():
        origins = None if run.origins is None else run.origins.find(stored)
        for expert in stored.planes:
            rows = None
            if run.origins is not None and origins is not None:
                rows = run.origins.rows(origins[expert or 0], stored.shape)
            jobs.append(partial(_weight_job, run, stored, expert, rows))
    jobs += [partial(_kept_job, run, name) for name in run.ckpt.plain]
    if run.planned is not None:
        jobs += [partial(_unit_job, run, run.planned, unit) for unit in run.planned.plan.units]
    return jobs


def _weight_job(
    run: Verification, stored: StoredWeight, expert: int | None, rows: SourceRows | None
) -> tuple[Findings, WeightReport | None]:
    findings = Findings(run.findings.own, run.findings.chosen)
    name = stored.key(expert)
    reports = [WeightReport(name, stored.scheme.fmt.name, stored.shape)]

    def check() -> None:
        report = check_weight(
            run.ckpt,
            stored,
            expert,
            rows=rows,
            record=run.record,
            optimal=run.optimal,
            sample_blocks=run.sample_blocks,
            findings=findings,
        )
        reports.append(report)

    findings.guard("numbers", name, check)
    if rows is not None:
        rows.drop()  # the list of jobs keeps it to the end
    return findings, reports[-1]


def _kept_job(run: Verification, name: str) -> tuple[Findings, WeightReport | None]:
    findings = Findings(run.findings.own, run.findings.chosen)
    ckpt, record, source = run.ckpt, run.record, run.source
    if record is not None:
        findings.guard("record", name, lambda: claims.check_kept_hash(ckpt, name, record, findings))
    entry = {} if record is None else record.raw["kept"].get(name, {})
    findings.guard("values", name, lambda: _check_finite(run, name, entry, findings))
    if record is not None and record.plain and name not in record.kept:  # decoded, or changed by a transform
        findings.guard("record", name, lambda: claims.check_float_tensor(ckpt, source, name, record, findings))
        return findings, None
    origin = run.origins.kept.get(name) if run.origins is not None else None
    corrected = entry.get("reason") == CORRECTED  # by an error of the weight; its bytes have a hash
    calibrated = is_kv_scale(name) and not run.findings.own  # another tool's own, whatever the source has
    trained = record is not None and entry.get("reason") == TRAINED_REASON
    if record is not None and trained:
        findings.guard("record", name, lambda: claims.check_trained(ckpt, source, name, record, findings))
    elif source is not None and origin is not None and not calibrated and not corrected:
        findings.guard("kept", name, lambda: structure.check_kept(ckpt, source, name, origin, findings))
    return findings, None


def _check_finite(run: Verification, name: str, entry: Mapping[str, Any], findings: Findings) -> None:
    bad, claimed = structure.check_kept_finite(run.ckpt, name, findings), entry.get("not_finite")
    if claimed != bad and (claimed is not None or (run.record is not None and run.record.converted)):
        has, stored = (text or "finite numbers alone" for text in (claimed, bad))
        findings.fault("record", name, f"has {has} according to {RECORD_FILE}, but {stored} in the checkpoint")


def _unit_job(run: Verification, planned: Outputs, unit: Unit) -> tuple[Findings, WeightReport | None]:
    findings = Findings(run.findings.own, run.findings.chosen)
    record, source = run.record, run.source
    assert record is not None  # a plan was made of it, and of the source
    assert source is not None

    def repeat() -> None:
        repeat_unit(
            run.ckpt,
            source,
            unit,
            record.weights,
            findings,
            cache_bytes=CACHE_BYTES,
            statistics=run.statistics,
        )
        if run.optimal and unit.scheme.fmt.one_scale:
            prove_unit(run.ckpt, source, unit, record.weights, findings)

    findings.guard("repeat", unit.id, repeat)
    return findings, None


def note_savings(reports: list[WeightReport], findings: Findings) -> None:
    proofs = sum((report.optimality for report in reports if report.optimality is not None), Optimality(0, 0))
    if proofs.worse and proofs.saved > _SAVING_NOTE:
        saved = f"the exact search would save {proofs.saved:.1%} of their squared error"
        findings.note("optimal", "block scales", f"{proofs.worse} of {proofs.blocks} blocks are not optimal: {saved}")
