"""report: gathers the numbers of a checkpoint (``gather.py``), renders them, writes the file."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ptqpipe.check.report import Report, check_kind, default_path, is_report, pooled_mse, render
from ptqpipe.check.report.find import claims_own, find_evaluation, find_source
from ptqpipe.check.report.gather import gather
from ptqpipe.check.report.provenance import run_facts
from ptqpipe.check.verify.command import verify
from ptqpipe.checkpoint import check_file, name_of, write_file
from ptqpipe.conversion.output_error import mean_known
from ptqpipe.errors import UsageError, arg, one_line
from ptqpipe.run.machine import Machine
from ptqpipe.run.quantities import decibels

# What the ending of a report's name says that it is; without an ending it is HTML.
KINDS = {"": "html", ".html": "html", ".htm": "html", ".md": "md", ".markdown": "md"}


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
    return target, "\n".join(_terminal_lines(target, report, original, measured))


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


def _terminal_lines(target: Path, report: Report, source: Path | None, evaluation: Path | None) -> list[str]:
    lines = [_summary(report)]
    if report.verdict is not None:
        lines.append(f"{report.verdict[1]}: {report.verdict[0]}")
    for what, path, remedy in (("source", source, arg("source")), ("eval file", evaluation, arg("eval"))):
        lines.append(f"{what}: {path}" if path is not None else f"{what}: not found; give it with {remedy}")
    lines += [f"note: {one_line(note, limit=300)}" for note in report.notes]
    lines += [f"{report.faults} faults: ptqpipe verify {report.name} lists them"] if report.faults else []
    return [*lines, f"written to {target}"]


def _summary(report: Report) -> str:
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
