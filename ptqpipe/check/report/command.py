"""report: the numbers of one checkpoint gathered for people: from its bytes, its record, its source, its eval file.

Works for checkpoints of any tool: what can be recomputed from bytes is, the rest is None. Memory is a few runs of rows
per worker. Rendering is ``ptqpipe.report``.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ptqpipe._version import __version__
from ptqpipe.check.evaluate.eval_file import read_result
from ptqpipe.check.evaluate.verdict import thresholds, verdict
from ptqpipe.check.inspect import inspect
from ptqpipe.check.report import KeptTensor, Report, check_kind, default_path, is_report, pooled_mse, render
from ptqpipe.check.report.find import claims_own, find_evaluation, find_source
from ptqpipe.check.report.provenance import provenance, rules, run_facts
from ptqpipe.check.report.scale_choices import NAMES, SAMPLE, STORED
from ptqpipe.check.report.weight_rows import (
    Item,
    describe_weight,
    find_items,
    histograms,
    on_threads,
    prove_sample,
    with_choices,
    worst_blocks,
)
from ptqpipe.check.scan import WeightFacts, scan_weight
from ptqpipe.check.verify.command import verify
from ptqpipe.checkpoint import check_file, name_of, write_file
from ptqpipe.checkpoint.layouts import is_kv_scale
from ptqpipe.checkpoint.tensor_names import layer_of, role_of
from ptqpipe.conversion.job import as_quantized
from ptqpipe.conversion.output_error import judged_by, mean_known, samples_text, tuned_blocks, tuned_by, tuned_from
from ptqpipe.conversion.record import Record, claims_ownership, read_record
from ptqpipe.errors import CheckpointError, UsageError, arg, one_line
from ptqpipe.models.source import Source
from ptqpipe.run.machine import Machine, one_thread_each
from ptqpipe.run.quantities import decibels

# What the ending of a report's name says that it is; without an ending it is HTML.
KINDS = {"": "html", ".html": "html", ".htm": "html", ".md": "md", ".markdown": "md"}


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
        result = read_result(evaluation, run_id=run_id) if evaluation is not None else None
        word = verdict(result) if result is not None else None
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
        words = None if word is None else (word.level, word.words, f"{word.like}. {thresholds()}")
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
        headline=_headline(opened),
        before_bytes=before,
        before_measured=original is not None,
        after_bytes=overview.nbytes,
        params=overview.params,
        weights=tuple(weights),
        kept=_kept(opened, record),
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
    """A note on weights that no reader decodes, if there are any."""
    names = [item.name for item, scan in zip(items, scans, strict=True) if not scan.decodes]
    count = f"{len(names)} weights have numbers that no quantizer may write, the first {names[0]}" if names else ""
    return [f"{count}; ptqpipe verify lists them"] if names else []


def _kept(opened: Source, record: Record | None) -> tuple[KeptTensor, ...]:
    raw = record.raw.get("kept") if record is not None else None
    tensors = []
    for name in opened.plain:
        entry = opened.reader.entries[name]
        claim = raw.get(name) if isinstance(raw, Mapping) else None
        reason = str(claim.get("reason", "")) if isinstance(claim, Mapping) else ""
        reason = "scale of the kv cache" if not reason and is_kv_scale(name) else reason
        tensors.append(KeptTensor(name, role_of(name), layer_of(name), entry.dtype, entry.shape, entry.nbytes, reason))
    return tuple(tensors)


def _headline(opened: Source) -> tuple[str, ...]:
    """Descriptions of the schemes, the one with most weights first."""
    counts: dict[str, int] = defaultdict(int)
    words: dict[str, str] = {}
    for stored in opened.stored.values():
        counts[stored.scheme.label] += math.prod(stored.shape) * (stored.experts or 1)
        words[stored.scheme.label] = stored.scheme.describe()
    return tuple(words[name] for name in sorted(counts, key=lambda name: (-counts[name], name)))


def make_report(
    ckpt: Path,
    *,
    source: Path | None = None,
    evaluation: Path | None = None,
    out: Path | None = None,
    kind: str | None = None,
    all_rows: bool = False,
    command: str = "",
    machine: Machine | None = None,
    log: Callable[[str], None] | None = None,
) -> tuple[Path, str]:
    """Gathers, renders, writes; gives where the report is and lines about it.

    source, evaluation  searched for where they are not given (``find.py``)
    kind                "html" or "md"; by the ending of ``out`` where it is not given
    command             the call, which the report shows
    log                 called with what the report is about, before weights are read

    Raises what :func:`gather` raises, and OutputError where ``out`` exists and is no report: before anything is read.
    """
    target, kind = target_of(ckpt, out=out, kind=kind)
    original = find_source(ckpt) if source is None else source
    if all_rows and original is None:
        raise UsageError(
            f"{arg('all_rows')} says on how many rows of the source searches are compared; add {arg('source')}"
        )
    measured = find_evaluation(ckpt) if evaluation is None else evaluation
    machine = machine or Machine()
    report = gather(ckpt, source=original, evaluation=measured, all_rows=all_rows, machine=machine, log=log)
    own = claims_own(ckpt)
    faults = len(verify(ckpt, workers=machine.workers, progress=machine.progress).faults) if own else None
    run_rows = tuple((f"this report: {what}", value) for what, value in run_facts(command).items() if value)
    report = replace(report, faults=faults, provenance=(*report.provenance, *run_rows))
    write_file(target, render(report, kind=kind))
    return target, "\n".join(_told(target, report, original, measured))


def target_of(ckpt: Path, *, out: Path | None, kind: str | None) -> tuple[Path, str]:
    """The path and kind of a report. UsageError for another ending, OutputError for a file that is no report."""
    if kind is None:
        kind = "html" if out is None else KINDS.get(out.suffix.lower())
    if kind is None:
        raise UsageError(
            f"{out} ends in neither .html nor .md, the two kinds of reports; change the name, or give {arg('kind')}"
        )
    target = out if out is not None else default_path(name_of(ckpt), kind=kind)
    check_kind(kind)
    check_file(target, own=is_report, what="a report of ptqpipe")
    return target, kind


def _told(target: Path, report: Report, source: Path | None, evaluation: Path | None) -> list[str]:
    """Lines for the terminal: a report's inputs, verdict, notes and path."""
    lines = [_summary(report)]
    if report.verdict is not None:
        lines.append(f"{report.verdict[1]}: {report.verdict[0]}")
    for what, path, remedy in (("source", source, arg("source")), ("eval file", evaluation, arg("eval"))):
        lines.append(f"{what}: {path}" if path is not None else f"{what}: not found; give it with {remedy}")
    lines += [f"note: {one_line(note, limit=300)}" for note in report.notes]
    lines += [f"{report.faults} faults: ptqpipe verify {report.name} lists them"] if report.faults else []
    return [*lines, f"written to {target}"]


def _summary(report: Report) -> str:
    """Sizes and errors in one line."""
    error = decibels(pooled_mse(report.weights))
    parts = [f"{len(report.weights)} weights at {report.bits_per_weight:.3f} bits", f"{len(report.kept)} tensors kept"]
    if report.versus_rtn is not None:
        parts.append(f"output error {report.versus_rtn:.3f} times plain rounding's, on {report.judged}")
    tuned = mean_known(block.ratio for block in report.blocks)
    if tuned is not None:
        parts.append(
            f"the decoder layers' output error {tuned:.3f} times that of {report.blocks_from}, on "
            f"{report.blocks_judged}"
        )
    parts += [f"weight error {error:.2f} dB"] if error is not None and not report.by_data else []
    parts += [f"errors unknown (give {arg('source')})"] if error is None else []
    return f"{report.name}: {', '.join(parts)}"
