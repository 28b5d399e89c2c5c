"""report A B C: checkpoints of one model compared, from their records and their eval files."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ptqpipe.check.report import Report, render_comparison
from ptqpipe.check.report.command import target_of
from ptqpipe.check.report.find import find_evaluation, read_source
from ptqpipe.check.report.gather import gather
from ptqpipe.checkpoint import name_of, write_file
from ptqpipe.errors import UsageError, argv
from ptqpipe.run.machine import Machine


def compare(
    ckpts: Sequence[Path],
    *,
    out: Path | None = None,
    kind: str | None = None,
    machine: Machine | None = None,
    log: Callable[[str], None] | None = None,
) -> tuple[Path, str]:
    """Compares checkpoints; gives where the comparison is, and lines about it.

    log  called with each checkpoint, before its weights are read

    Raises UsageError for checkpoints of different models, and what `gather` raises.
    """
    _check_one_model(ckpts)
    target, kind = target_of(Path(f"{name_of(ckpts[0])}-and-{len(ckpts) - 1}-more"), out=out, kind=kind)
    files = [find_evaluation(ckpt) for ckpt in ckpts]
    reports = []
    for ckpt, file in zip(ckpts, files, strict=True):
        if log is not None:
            log(f"reading {ckpt}")
        reports.append(gather(ckpt, evaluation=file, machine=machine))
    notes = _notes(reports)
    write_file(target, render_comparison(reports, kind=kind, notes=notes))
    lines = [_line(report) for report in reports]
    return target, "\n".join([*lines, *(f"note: {note}" for note in notes), f"written to {target}"])


def _check_one_model(ckpts: Sequence[Path]) -> None:
    by_fingerprint: dict[str, tuple[Path, str]] = {}
    for ckpt in ckpts:
        source = read_source(ckpt)
        if source.get("fingerprint"):
            by_fingerprint.setdefault(str(source["fingerprint"]), (ckpt, str(source.get("name"))))
    if len(by_fingerprint) > 1:
        (a, first), (b, second), *_ = by_fingerprint.values()
        same = f", another model of that name than {a} was" if first == second else f", {a} from {first}"
        raise UsageError(f"{b} was made from {second}{same}; give checkpoints of one model")


def _notes(reports: Sequence[Report]) -> list[str]:
    missing = [report.name for report in reports if report.verdict is None]
    lines = []
    if missing:  # goes into the file: a shell's command, whoever asks
        call = shlex.join(["ptqpipe", "eval", missing[0], *argv(source="MODEL")])
        lines.append(f"not measured: {', '.join(missing)}; run {call}")
    texts = {_text_of(report.evaluation) for report in reports if report.evaluation is not None and report.verdict}
    if len(texts) > 1:
        lines.append("the divergences are of different texts or windows: compare them with care, or measure again")
    return lines


def _text_of(evaluation: Mapping[str, Any]) -> tuple[tuple[str, str | None, int | None], ...]:
    return tuple((row["data"], row["sha256"], row["window"]) for row in evaluation["perplexity"])


def _line(report: Report) -> str:
    words = f"{report.verdict[1]}: {report.verdict[0]}" if report.verdict else "not measured"
    return f"{report.name}: {report.bits_per_weight:.3f} bits per weight; {words}"
