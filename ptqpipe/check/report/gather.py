"""The numbers of one checkpoint gathered for a report: from its bytes, its record, its source, its eval file.

What can be recomputed from bytes is, for checkpoints of any tool; the rest is None. Memory is a few runs of rows per
worker.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ptqpipe._version import __version__
from ptqpipe.check.inspect import inspect
from ptqpipe.check.report import Report
from ptqpipe.check.report.find import read_evaluation
from ptqpipe.check.report.provenance import provenance, rules
from ptqpipe.check.report.scale_choices import NAMES, SAMPLE, STORED
from ptqpipe.check.report.weight_rows import (
    Item,
    describe_weight,
    find_items,
    headline,
    histograms,
    kept_tensors,
    on_threads,
    prove_sample,
    with_choices,
    worst_blocks,
)
from ptqpipe.check.scan import WeightFacts, scan_weight
from ptqpipe.checkpoint import name_of
from ptqpipe.conversion.job import as_quantized
from ptqpipe.conversion.output_error import judged_by, samples_text, tuned_blocks, tuned_by, tuned_from
from ptqpipe.conversion.record import Record, claims_ownership, read_record
from ptqpipe.errors import CheckpointError, UsageError
from ptqpipe.models.source import Source
from ptqpipe.run.machine import Machine, one_thread_each


def gather(
    ckpt: Path,
    *,
    source: Path | None = None,
    evaluation: Path | None = None,
    all_rows: bool = False,
    machine: Machine | None = None,
    log: Callable[[str], None] | None = None,
) -> Report:
    """The content of the report about ``ckpt``.

    source      the checkpoint that it was made from: errors, worst blocks and choices are then recomputed
    evaluation  what ``ptqpipe eval`` wrote
    all_rows    compare the choices on all rows instead of the sample
    machine     its workers, and whether they show a bar; the report does not depend on it
    log         called with what the report is about, before weights are read

    Raises CheckpointError for a damaged or plain checkpoint, UsageError where source or eval file are of another one,
    NumericsError for NaN in the source.
    """
    with Source.open(ckpt) as opened:
        if opened.container is None:
            raise UsageError(f"{ckpt} is not quantized; a report is about a checkpoint that ptqpipe convert wrote")
        record, notes = _record(opened)
        run_id = record.raw.get("run_id") if record is not None else None
        result, words = (None, None) if evaluation is None else read_evaluation(evaluation, run_id=run_id)
        machine = machine or Machine()
        if log is not None:
            log(f"report on {ckpt}, {'without its source' if source is None else f'against {source}'}")
        if source is None:
            with one_thread_each():
                report = _gather(ckpt, opened, None, record, machine=machine, all_rows=all_rows)
        else:
            with Source.open(source) as original, one_thread_each():
                original = as_quantized(original, {} if record is None else record.raw)
                report = _gather(ckpt, opened, original, record, machine=machine, all_rows=all_rows)
        run_rows = tuple((f"evaluation: {what}", value) for what, value in result["made"]) if result is not None else ()
        facts = (*report.provenance, *run_rows)
        return replace(report, evaluation=result, verdict=words, provenance=facts, notes=(*notes, *report.notes))


def _record(opened: Source) -> tuple[Record | None, list[str]]:
    """The record of a checkpoint that has one; a note where it cannot be used."""
    if not claims_ownership(opened.reader):
        return None, []
    try:
        return read_record(opened.reader), []
    except CheckpointError as error:
        message = str(error).replace(f"{opened.reader.path}/", "")  # a report is published
        return None, [f"{message}; the record's numbers are left out"]


def _gather(
    ckpt: Path, opened: Source, original: Source | None, record: Record | None, *, machine: Machine, all_rows: bool
) -> Report:
    items, lost = find_items(opened, original)
    scans = on_threads(
        items,
        lambda i: scan_weight(opened, i.stored.weight, expert=i.expert, rows=i.rows, usage=True),
        machine=machine,
        title="codes and errors",
    )
    weights = [describe_weight(opened, item, scan, record) for item, scan in zip(items, scans, strict=True)]
    choice_names: tuple[str, ...] = (STORED,) if any(w.choices for w in weights) else ()
    if original is not None:
        weights = with_choices(opened, items, scans, weights, machine=machine, all_rows=all_rows)
        choice_names = tuple(n for n in NAMES if any(c.name == n for w in weights for c in w.choices))
    overview = inspect(ckpt)
    raw: Mapping[str, Any] = {} if record is None else record.raw
    judged, blocks = judged_by(raw.get("weights", {})), tuned_blocks(raw)
    before = 2 * overview.params
    if original is not None:
        before = original.reader.nbytes
    return Report(
        name=name_of(ckpt),
        version=__version__,
        producer=overview.producer,
        container=overview.container,
        headline=headline(opened),
        before_bytes=before,
        before_measured=original is not None,
        after_bytes=overview.nbytes,
        params=overview.params,
        weights=tuple(weights),
        kept=kept_tensors(opened, record),
        histograms=histograms(items, scans),
        worst=worst_blocks(scans),
        proof=prove_sample(opened, items, weights, record, machine=machine),
        errors_from="source" if original is not None else "record" if any(w.energy for w in weights) else "",
        choice_names=choice_names,
        choice_sample="" if original is None else "all rows" if all_rows else SAMPLE,
        judged=judged if any(weight.versus_rtn is not None for weight in weights) else "",
        method=tuned_by(raw),
        blocks=blocks,
        blocks_from=tuned_from(raw),
        blocks_judged=samples_text([block.held_out for block in blocks]),
        notes=(*overview.suspicious, *_illegal(items, scans), *lost),
        rules=rules(record),
        provenance=provenance(opened, original, record, overview.producer),
        files=overview.files,
    )


def _illegal(items: Sequence[Item], scans: Sequence[WeightFacts]) -> list[str]:
    names = [item.name for item, scan in zip(items, scans, strict=True) if not scan.decodes]
    count = f"{len(names)} weights have numbers that no quantizer may write, the first {names[0]}" if names else ""
    return [f"{count}; ptqpipe verify lists them"] if names else []
