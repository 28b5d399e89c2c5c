"""verify: everything that a packed checkpoint claims, recomputed from its bytes and its source.

Own output (by its record or config) must be exactly what its recipe makes of the source: any deviation is a fault.
Another tool's checkpoint is checked for what makes it wrong or unreadable; matters of style and of better searches are
notes. Never raises for a damaged checkpoint: that is a fault. Memory is a few runs of rows per worker.
"""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ptqpipe.calibration.statistics import Statistics
from ptqpipe.check.verify.findings import Findings
from ptqpipe.check.verify.header_checks import check_headers
from ptqpipe.check.verify.number_checks import note_savings, number_jobs
from ptqpipe.check.verify.report import VerifyReport, header
from ptqpipe.check.verify.verification import Verification
from ptqpipe.checkpoint import RECORD_FILE
from ptqpipe.conversion.job import as_quantized
from ptqpipe.conversion.output_error import tuned_judgement
from ptqpipe.conversion.record import claims_ownership, read_record
from ptqpipe.errors import UsageError, arg
from ptqpipe.models.source import Source
from ptqpipe.recipe.weight_map import WeightMap
from ptqpipe.run.machine import counting_bar, default_workers, one_thread_each

SAMPLE_BLOCKS = 512


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
            run = Verification(opened, original, findings, optimal or all_blocks, blocks, statistics=moments)
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


def _is_foreign(run: Verification) -> bool:
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


def _verify(run: Verification, workers: int, *, shown: bool) -> None:
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
    check_headers(run)
    jobs = number_jobs(run)
    pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="verify")
    with counting_bar(len(jobs), "checks", shown=shown) as advance, pool:
        for result, report in pool.map(lambda job: job(), jobs):
            findings.extend(result.items)
            advance(1, "" if report is None else report.name)
            if report is not None:
                run.weights.append(report)
    note_savings(run.weights, findings)


def _read_own_record(run: Verification) -> None:
    findings = run.findings
    findings.own = findings.chosen = claims_ownership(run.ckpt.reader)
    if findings.own:
        run.record = read_record(run.ckpt.reader)
        findings.chosen = run.record.conversion is not None


def _as_quantized(run: Verification) -> None:
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


def _find_origins(run: Verification) -> None:
    assert run.source is not None
    run.origins = WeightMap.of(run.source, container=run.ckpt.container)
