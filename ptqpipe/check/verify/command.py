"""verify: everything that a packed checkpoint claims, recomputed from its bytes and its source.

Own output (by its record or config) must be exactly what its recipe makes of the source: any deviation is a fault.
Another tool's checkpoint is checked for what makes it wrong or unreadable; matters of style and of better searches are
notes. Never raises for a damaged checkpoint: that is a fault. Memory is a few runs of rows per worker.
"""

import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ptqpipe.calibration.statistics import Statistics
from ptqpipe.check.verify import claims, config, shared_scales as groups, side_files as files, tensor_fates as structure
from ptqpipe.check.verify.findings import Findings
from ptqpipe.check.verify.repeat import (
    check_conversion,
    check_input_scales,
    check_plan,
    prove_unit,
    repeat_unit,
    replan,
)
from ptqpipe.check.verify.report import VerifyReport, header
from ptqpipe.check.verify.weight_checks import WeightReport, check_weight
from ptqpipe.checkpoint import RECORD_FILE
from ptqpipe.checkpoint.layouts import StoredWeight, is_kv_scale
from ptqpipe.conversion.bias_correction import BIAS_REASON as CORRECTED
from ptqpipe.conversion.input_moments import describe_statistics
from ptqpipe.conversion.job import as_quantized
from ptqpipe.conversion.output_error import tuned_judgement
from ptqpipe.conversion.planned_outputs import Outputs
from ptqpipe.conversion.record import Record, claims_ownership, read_record
from ptqpipe.errors import UsageError, arg
from ptqpipe.models.source import Source, SourceRows
from ptqpipe.numerics.search.proof import Optimality
from ptqpipe.quantization.learned_codes import TRAINED_REASON
from ptqpipe.recipe.plan import Unit
from ptqpipe.recipe.weight_map import WeightMap
from ptqpipe.run.machine import counting_bar, default_workers, one_thread_each
from ptqpipe.runtime.expected import unlike_model

SAMPLE_BLOCKS = 512
CACHE_BYTES = 128 << 20  # of a unit that is quantized again; a larger one is read as often as its passes need it
_SAVING_NOTE = 0.001  # of the squared error: what the exact search would save, below which no line is worth it


@dataclass(slots=True)
class _Run:
    """One verification while it runs."""

    ckpt: Source
    source: Source | None
    findings: Findings
    optimal: bool
    sample_blocks: int | None
    origins: WeightMap | None = None
    record: Record | None = None
    planned: Outputs | None = None
    statistics: Statistics | None = None
    weights: list[WeightReport] = field(default_factory=list)


_Job = Callable[[], tuple[Findings, WeightReport | None]]


def verify(
    ckpt: Path,
    *,
    source: Path | None = None,
    statistics: Path | None = None,
    optimal: bool = False,
    all_blocks: bool = False,
    sample_blocks: int = SAMPLE_BLOCKS,
    workers: int | None = None,
    progress: bool = False,
    log: Callable[[str], None] | None = None,
) -> VerifyReport:
    """Checks a checkpoint, against its source where one is given.

    statistics     those that the checkpoint was made with; its weights are then quantized again with them
    optimal        also proves block scales optimal by brute force, ``sample_blocks`` of each weight, spread evenly
    all_blocks     all of them instead (slow)
    workers        threads; the processors by default. The report does not depend on it, its time aside
    progress       with a progress bar
    log            called with what will be checked, before it is
    """
    begun = time.monotonic()
    findings = Findings(own=False, chosen=False)
    if workers is not None and workers < 1:
        raise UsageError(f"{arg('workers', workers)} is too few; use 1 or more")
    opened = _open(ckpt, "checkpoint", findings)
    original = _open(source, "source", findings) if source is not None else None
    moments = Statistics.open(statistics) if statistics is not None else None
    container, weights, kept, foreign = "unknown", [], [], False
    tuned: tuple[str, ...] = ()
    try:
        if opened is not None and (source is None or original is not None):
            if log is not None:
                log(header(ckpt, source, [entry.nbytes for entry in opened.reader.entries.values()]))
            blocks = None if all_blocks else sample_blocks
            run = _Run(opened, original, findings, optimal or all_blocks, blocks, statistics=moments)
            with one_thread_each():
                _verify(run, workers if workers is not None else default_workers(), shown=progress)
            container, weights, foreign = opened.container_name, run.weights, _is_foreign(run)
            tuned = () if run.record is None else tuple(tuned_judgement(run.record.raw))
            kept = [opened.reader.entries[name].nbytes for name in opened.plain]
    finally:
        for reader in (opened, original, moments):
            if reader is not None:
                reader.close()
    return VerifyReport(
        ckpt,
        source,
        container,
        findings.own,
        optimal or all_blocks,
        tuple(dict.fromkeys(findings.items)),
        tuple(weights),
        len(kept),
        sum(kept),
        time.monotonic() - begun,
        foreign,
        tuned,
    )


def _is_foreign(run: _Run) -> bool:
    """Whether the record names another model than the source as the one that the checkpoint was made from."""
    made_from = None if run.record is None else run.record.raw.get("source")
    if run.source is None or not isinstance(made_from, Mapping):
        return False
    return made_from.get("fingerprint") != run.source.reader.fingerprint()


def _open(path: Path | None, what: str, findings: Findings) -> Source | None:
    """A checkpoint's headers and config; None and a fault where they cannot be read."""
    opened: list[Source] = []
    if path is not None:
        findings.guard("open", what, lambda: opened.append(Source.open(path, dangling=True)))
    return opened[0] if opened else None


def _verify(run: _Run, workers: int, *, shown: bool) -> None:
    """All checks, the cheap ones first; the numbers by ``workers`` threads, reported in the order of the files."""
    ckpt, findings = run.ckpt, run.findings
    findings.guard("record", RECORD_FILE, lambda: _read_own_record(run))
    findings.guard("source", "the source", lambda: _as_quantized(run))
    if run.source is not None:
        findings.guard("names", "the source", lambda: _find_origins(run))
    if ckpt.container is None and not (run.record is not None and run.record.plain):
        findings.fault("config", "config.json", "describes no quantization; this is a plain checkpoint")
    if run.statistics is not None and run.record is None:
        why = f"there is no {RECORD_FILE} that says what the checkpoint was made with: its weights are not repeated"
        findings.note("statistics", str(run.statistics.path), why)
    _check_headers(run)
    jobs = _jobs(run)
    pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="verify")
    with counting_bar(len(jobs), "checks", shown=shown) as advance, pool:
        for result, report in pool.map(lambda job: job(), jobs):
            findings.extend(result.items)
            advance(1, "" if report is None else report.name)
            if report is not None:
                run.weights.append(report)
    _note_savings(run.weights, findings)


def _read_own_record(run: _Run) -> None:
    findings = run.findings
    findings.own = findings.chosen = claims_ownership(run.ckpt.reader)
    if findings.own:
        run.record = read_record(run.ckpt.reader)
        findings.chosen = run.record.conversion is not None


def _as_quantized(run: _Run) -> None:
    """The source gets the factors that were folded in before it was quantized. Records of former versions have none of
    them: such a checkpoint is checked without its source, and a note says so."""
    if run.source is not None and run.record is not None:
        run.source = as_quantized(run.source, run.record.raw)
    raw = None if run.record is None else run.record.raw.get("transformed")
    if run.source is None or not isinstance(raw, Mapping) or not isinstance(raw.get("from"), Mapping):
        return
    if raw["from"].get("fingerprint") == run.source.reader.fingerprint():
        run.findings.note(
            "source",
            RECORD_FILE,
            f"says that {raw.get('transform')} was folded into the model before it was quantized: its weights are not "
            "compared with the source's, everything else is checked",
        )
        run.source = None


def _find_origins(run: _Run) -> None:
    assert run.source is not None
    run.origins = WeightMap.of(run.source, container=run.ckpt.container)


def _check_headers(run: _Run) -> None:
    """Everything that needs no weight: names, config, groups, files, the plan."""
    ckpt, source, findings, record = run.ckpt, run.source, run.findings, run.record
    checks: list[tuple[str, str, Callable[[], None]]] = [
        ("index", "the index", lambda: structure.check_sizes(ckpt, findings)),
        ("config", "config.json", lambda: config.check_config(ckpt, findings)),
        ("config", "config.json", lambda: config.check_model(ckpt, findings)),
        ("config", "config.json", lambda: _check_names(ckpt, findings)),
        ("scales", "global scales", lambda: groups.check_scalars(ckpt, findings)),
        ("groups", "fused groups", lambda: _check_groups(run)),
        ("scales", "kv cache", lambda: groups.check_kv_scales(ckpt, findings)),
        ("names", "tensors", lambda: structure.check_dangling(ckpt, source, findings)),
    ]
    if record is not None:
        own = [
            ("record", claims.check_itself),
            ("record", claims.check_coverage),
            *([("record", claims.check_float)] if record.plain else []),
            ("files", files.check_written_files),
            ("record", claims.check_identity),
            ("record", lambda *given: claims.check_lists(*given, source=source)),
            *([] if record.plain else [("record", claims.check_rules)]),
        ]
        checks += [(name, RECORD_FILE, partial(check, ckpt, record, findings)) for name, check in own]
    if source is not None:
        checks += _source_checks(run, source, record)
    for name, where, check in checks:
        findings.guard(name, where, check)
    config.check_readers(ckpt, source, findings)
    groups.note_rounded_globals(ckpt, findings)


def _check_names(ckpt: Source, findings: Findings) -> None:
    """The tensors are those of the model that config.json names."""
    for line in unlike_model(ckpt):
        findings.fault("config", "config.json", line)


def _source_checks(run: _Run, source: Source, record: Record | None) -> list[tuple[str, str, Callable[[], None]]]:
    """(check, where, action) of what needs the headers and files of the source."""
    ckpt, findings, origins = run.ckpt, run.findings, run.origins
    checks: list[tuple[str, str, Callable[[], None]]] = []
    rewritten: frozenset[str] = frozenset()
    if record is not None and record.plain:
        rewritten = claims.REWRITTEN
        checks.append(("names", "tensors", lambda: claims.check_float_fates(ckpt, source, record, findings)))
    elif origins is not None:
        checks.append(("names", "tensors", lambda: structure.check_fates(ckpt, origins, findings)))
    checks += [
        ("files", "files", lambda: files.check_files(ckpt, source, findings)),
        ("config", "config.json", lambda: structure.check_model_config(ckpt, source, findings, rewritten=rewritten)),
    ]
    if record is not None and record.conversion is not None and ckpt.container is not None:
        checks.append(("plan", RECORD_FILE, lambda: _check_plan(run, source, record)))
    return checks


def _check_groups(run: _Run) -> None:
    """Fused groups by the recorded recipe's own table, where it is one."""
    conversion = run.record.conversion if run.record is not None else None
    fuse = None if conversion is None else conversion["recipe"].get("fuse")
    if isinstance(fuse, list) and all(isinstance(leaves, list) and all(map(_is_text, leaves)) for leaves in fuse):
        groups.check_groups(run.ckpt, run.findings, fuse)
    else:
        groups.check_groups(run.ckpt, run.findings)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _check_plan(run: _Run, source: Source, record: Record) -> None:
    planned = replan(record, source)
    if record.converted:
        check_plan(run.ckpt, source, record, planned, run.findings)
    check_conversion(source, record, planned, run.findings)
    check_input_scales(run.ckpt, planned, record, run.findings)
    made_with = record.raw.get("statistics")
    if run.statistics is not None:
        if not isinstance(made_with, Mapping) or made_with.get("digest") != run.statistics.digest:
            run.findings.fault("statistics", str(run.statistics.path), "is not what the checkpoint was made with")
            run.statistics = None
        elif made_with != json.loads(json.dumps(describe_statistics(run.statistics))):
            run.findings.fault("record", "statistics", f"differ from those in {run.statistics.path}")
    run.planned = planned


def _jobs(run: _Run) -> list[_Job]:
    """One job for each stored weight (expert of a stack) and kept tensor, and for own output each unit."""
    jobs: list[_Job] = []
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
    run: _Run, stored: StoredWeight, expert: int | None, rows: SourceRows | None
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


def _kept_job(run: _Run, name: str) -> tuple[Findings, WeightReport | None]:
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


def _check_finite(run: _Run, name: str, entry: Mapping[str, Any], findings: Findings) -> None:
    bad, claimed = structure.check_kept_finite(run.ckpt, name, findings), entry.get("not_finite")
    if claimed != bad and (claimed is not None or (run.record is not None and run.record.converted)):
        has, stored = (text or "finite numbers alone" for text in (claimed, bad))
        findings.fault("record", name, f"has {has} according to {RECORD_FILE}, but {stored} in the checkpoint")


def _unit_job(run: _Run, planned: Outputs, unit: Unit) -> tuple[Findings, WeightReport | None]:
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


def _note_savings(reports: list[WeightReport], findings: Findings) -> None:
    """One note for what the exact search would save."""
    proofs = sum((report.optimality for report in reports if report.optimality is not None), Optimality(0, 0))
    if proofs.worse and proofs.saved > _SAVING_NOTE:
        saved = f"the exact search would save {proofs.saved:.1%} of their squared error"
        findings.note("optimal", "block scales", f"{proofs.worse} of {proofs.blocks} blocks are not optimal: {saved}")
