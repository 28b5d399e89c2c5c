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
from pathlib import Path
from typing import Any

from ptqpipe.checkpoint.files import RECORD_FILE
from ptqpipe.containers import StoredWeight
from ptqpipe.formats import WHOLE
from ptqpipe.plan import Slice
from ptqpipe.source import Source
from ptqpipe.stages.common.extra_tensors import BIAS_REASON as CORRECTED
from ptqpipe.stages.common.machine import default_workers, one_thread_each
from ptqpipe.stages.common.moments import describe_statistics
from ptqpipe.stages.common.outputs import Outputs
from ptqpipe.stages.verify.asked import check_identity, check_lists, check_rules
from ptqpipe.stages.verify.claims import check_coverage, check_kept_hash, check_written_files
from ptqpipe.stages.verify.config import check_config, check_readers
from ptqpipe.stages.verify.findings import Finding, Findings, Severity
from ptqpipe.stages.verify.floats import REWRITTEN, check_float, check_float_fates, check_float_tensor
from ptqpipe.stages.verify.groups import check_groups, check_scalars, note_rounded_globals
from ptqpipe.stages.verify.judge import Options, check_weight, note_savings
from ptqpipe.stages.verify.origin import Origins
from ptqpipe.stages.verify.record import Record, claims_ownership, read_record
from ptqpipe.stages.verify.repeat import check_input_scales, prove_unit, repeat_unit
from ptqpipe.stages.verify.replan import check_conversion, check_plan, replan
from ptqpipe.stages.verify.structure import (
    check_dangling,
    check_fates,
    check_files,
    check_kept,
    check_kept_finite,
    check_kv_scales,
    check_model_config,
    check_sizes,
    is_kv_scale,
    plain_tensors,
)
from ptqpipe.stages.verify.text import VerifyReport, WeightReport, render, to_json
from ptqpipe.statistics import Statistics

__all__ = ["Finding", "Severity", "VerifyReport", "WeightReport", "render", "to_json", "verify"]

SAMPLE_BLOCKS = 512
CACHE_BYTES = 128 << 20  # of a unit that is quantized again; a larger one is read as often as its passes need it
_OWN_FILES = frozenset({"config.json", "hf_quant_config.json", RECORD_FILE})


@dataclass(slots=True)
class _Run:
    """One verification while it runs."""

    ckpt: Source
    source: Source | None
    findings: Findings
    options: Options
    origins: Origins | None = None
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
) -> VerifyReport:
    """Checks a checkpoint, against its source where one is given.

    statistics     those that it was made with: its weights are then quantized again with them
    optimal        also proves block scales optimal by brute force, ``sample_blocks`` of each weight, spread evenly
    all_blocks     all of them instead (slow)
    workers        threads; the processors by default. The report does not depend on it, its time aside
    """
    begun = time.monotonic()
    findings = Findings(own=False, chosen=False)
    opened = _open(ckpt, "checkpoint", findings)
    original = _open(source, "source", findings) if source is not None else None
    known = Statistics.open(statistics) if statistics is not None else None
    container, weights, kept = "unknown", [], []
    try:
        if opened is not None and (source is None or original is not None):
            options = Options(optimal or all_blocks, None if all_blocks else sample_blocks)
            run = _Run(opened, original, findings, options, statistics=known)
            with one_thread_each():
                _verify(run, workers if workers is not None else default_workers())
            container, weights = opened.container_name, run.weights
            kept = [opened.reader.entries[name].nbytes for name in plain_tensors(opened)]
    finally:
        for reader in (opened, original, known):
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
    )


def _open(path: Path | None, what: str, findings: Findings) -> Source | None:
    """A checkpoint's headers and config; None and a fault where they cannot be read."""
    opened: list[Source] = []
    if path is not None:
        findings.guard("open", what, lambda: opened.append(Source.open(path)))
    return opened[0] if opened else None


def _verify(run: _Run, workers: int) -> None:
    """All checks, the cheap ones first; the numbers by ``workers`` threads, reported in the order of the files."""
    ckpt, findings = run.ckpt, run.findings
    findings.guard("record", RECORD_FILE, lambda: _read_own_record(run))
    if run.source is not None:
        findings.guard("names", "the source", lambda: _find_origins(run))
    plain = run.record is not None and run.record.plain
    if ckpt.container is None and not plain:
        findings.fault("config", "config.json", "describes no quantization; this is a plain checkpoint")
    _check_headers(run)
    jobs = _jobs(run)
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="verify") as pool:
        for found, report in pool.map(lambda job: job(), jobs):
            findings.extend(found.items)
            if report is not None:
                run.weights.append(report)
    note_savings(run.weights, findings)


def _read_own_record(run: _Run) -> None:
    findings = run.findings
    findings.own = findings.chosen = claims_ownership(run.ckpt.reader)
    if findings.own:
        run.record = read_record(run.ckpt.reader)
        findings.chosen = run.record.conversion is not None


def _find_origins(run: _Run) -> None:
    assert run.source is not None
    run.origins = Origins.of(run.source, container=run.ckpt.container_name)


def _check_headers(run: _Run) -> None:
    """Everything that needs no weight: names, config, groups, files, the plan."""
    ckpt, source, findings, record = run.ckpt, run.source, run.findings, run.record
    guard = findings.guard
    guard("index", "the index", lambda: check_sizes(ckpt, findings))
    guard("config", "config.json", lambda: check_config(ckpt, findings))
    guard("scales", "global scales", lambda: check_scalars(ckpt, findings))
    guard("groups", "fused groups", lambda: _check_groups(run))
    guard("scales", "kv cache", lambda: check_kv_scales(ckpt, findings))
    kept = frozenset(plain_tensors(source)) if source is not None else frozenset()
    guard("names", "tensors", lambda: check_dangling(ckpt, findings, kept=kept))
    if record is not None:
        guard("record", RECORD_FILE, lambda: check_coverage(ckpt, record, findings))
        if record.plain:
            guard("record", RECORD_FILE, lambda: check_float(ckpt, record, findings))
        guard("files", RECORD_FILE, lambda: check_written_files(ckpt, record, findings))
        guard("record", RECORD_FILE, lambda: check_identity(ckpt, record, findings))
        guard("record", RECORD_FILE, lambda: check_lists(ckpt, source, record, findings))
        if not record.plain:
            guard("record", RECORD_FILE, lambda: check_rules(ckpt, record, findings))
    if source is not None:
        rewritten = REWRITTEN if record is not None and record.plain else frozenset()
        if record is not None and record.plain:
            guard("names", "tensors", lambda: check_float_fates(ckpt, source, record, findings))
        elif run.origins is not None:
            origins = run.origins
            guard("names", "tensors", lambda: check_fates(ckpt, origins, findings))
        guard("files", "files", lambda: check_files(ckpt, source, findings, own_files=_OWN_FILES))
        guard("config", "config.json", lambda: check_model_config(ckpt, source, findings, rewritten=rewritten))
        if record is not None and record.conversion is not None and ckpt.container is not None:
            guard("plan", RECORD_FILE, lambda: _check_plan(run, source, record))
    check_readers(ckpt, source, findings)
    note_rounded_globals(ckpt, findings)


def _check_groups(run: _Run) -> None:
    conversion = run.record.conversion if run.record is not None else None
    fuse = None if conversion is None else conversion["recipe"].get("fuse")
    if isinstance(fuse, list) and all(isinstance(leaves, list) and all(map(_is_text, leaves)) for leaves in fuse):
        check_groups(run.ckpt, run.findings, fuse)
    else:
        check_groups(run.ckpt, run.findings)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _check_plan(run: _Run, source: Source, record: Record) -> None:
    planned = replan(record, source)
    if record.converted:
        check_plan(run.ckpt, source, record, planned, run.findings)
    check_conversion(source, record, planned, run.findings)
    check_input_scales(run.ckpt, planned, record, run.findings)
    made_with = record.raw.get("statistics")
    if run.statistics is not None and isinstance(made_with, Mapping):
        if made_with.get("digest") != run.statistics.digest:
            run.findings.fault("statistics", str(run.statistics.path), "is not what the checkpoint was made with")
            run.statistics = None
        elif made_with != json.loads(json.dumps(describe_statistics(run.statistics))):
            run.findings.fault("record", "statistics", f"do not say of {run.statistics.path} what that says of itself")
    run.planned = planned


def _jobs(run: _Run) -> list[_Job]:
    """One job a stored weight (an expert of a stack), a kept tensor, and for own output a unit."""
    jobs: list[_Job] = []
    for stored in run.ckpt.stored.values():
        slices = _slices(run, stored)
        for expert in range(stored.experts or 1):
            number = expert if stored.experts is not None else None
            jobs.append(_weight_job(run, stored, number, None if slices is None else slices[expert]))
    jobs += [_kept_job(run, name) for name in plain_tensors(run.ckpt)]
    if run.planned is not None and run.record is not None and run.source is not None:
        jobs += [_unit_job(run, index) for index in range(len(run.planned.plan.units))]
    return jobs


def _slices(run: _Run, stored: StoredWeight) -> tuple[Slice, ...] | None:
    return run.origins.find(stored) if run.origins is not None else None


def _weight_job(run: _Run, stored: StoredWeight, expert: int | None, where: Slice | None) -> _Job:
    def job() -> tuple[Findings, WeightReport | None]:
        found = Findings(run.findings.own, run.findings.chosen)
        name = stored.weight if expert is None else f"{stored.weight}[{expert}]"
        reports = [WeightReport(name, stored.scheme.fmt.name, stored.shape)]

        def check() -> None:
            report = check_weight(
                run.ckpt,
                stored,
                expert,
                origins=run.origins,
                where=where,
                record=run.record,
                options=run.options,
                found=found,
            )
            reports.append(report)

        found.guard("numbers", name, check)
        return found, reports[-1]

    return job


def _kept_job(run: _Run, name: str) -> _Job:
    def job() -> tuple[Findings, WeightReport | None]:
        found = Findings(run.findings.own, run.findings.chosen)
        record, source = run.record, run.source
        if record is not None:
            found.guard("record", name, lambda: check_kept_hash(run.ckpt, name, record, found))
        entry = {} if record is None else record.raw["kept"].get(name, {})
        found.guard("values", name, lambda: _check_finite(run, name, entry, found))
        corrected = entry.get("reason") == CORRECTED  # by an error of the weight; its bytes have a hash
        origin = run.origins.kept.get(name) if run.origins is not None else None
        if record is not None and record.plain and name not in record.kept:  # decoded, or changed by a transform
            found.guard("record", name, lambda: check_float_tensor(run.ckpt, source, name, record, found))
            return found, None
        calibrated = is_kv_scale(name) and not run.findings.own  # another tool's own, whatever the source has
        if source is not None and origin is not None and not calibrated and not corrected:
            found.guard("kept", name, lambda: check_kept(run.ckpt, source, name, origin, found))
        return found, None

    return job


def _check_finite(run: _Run, name: str, entry: Mapping[str, Any], found: Findings) -> None:
    bad, claimed = check_kept_finite(run.ckpt, name, found), entry.get("not_finite")
    if claimed != bad and (claimed is not None or (run.record is not None and run.record.converted)):
        found.fault(
            "record", name, f"has {claimed or 'only numbers'} by {RECORD_FILE}, stored are {bad or 'only numbers'}"
        )


def _unit_job(run: _Run, index: int) -> _Job:
    def job() -> tuple[Findings, WeightReport | None]:
        found = Findings(run.findings.own, run.findings.chosen)
        planned, record, source = run.planned, run.record, run.source
        assert planned is not None
        assert record is not None
        assert source is not None
        unit = planned.plan.units[index]

        def repeat() -> None:
            repeat_unit(
                run.ckpt,
                source,
                unit,
                record.weights,
                found,
                cache_bytes=CACHE_BYTES,
                statistics=run.statistics,
                with_statistics=isinstance(record.raw.get("statistics"), Mapping),
            )
            if run.options.optimal and unit.scheme.fmt.block == (WHOLE, WHOLE):
                prove_unit(run.ckpt, source, unit, record.weights, found)

        found.guard("repeat", unit.id, repeat)
        return found, None

    return job
