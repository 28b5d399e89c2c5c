"""pipeline: what convert does with a text, under a budget or when it is to be measured, by the other stages in order.

    generate -> statistics -> transform -> plan -> tune -> convert -> verify -> eval -> report

as far as the call needs them. Each stage writes into a hidden folder beside the output and resumes by itself, so a run
that was interrupted anywhere ends with the same bytes. Statistics there are small (a few numbers for each input
channel), and so are a transform's factors (``folded.py``); moments for GPTQ never lie on disk (``pipeline/tune``), and
codes go as they are written into the output.

Must not know how any stage works; what a quality does is in ``presets.py``.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ptqpipe.check.evaluate.eval_file import is_result
from ptqpipe.check.report import is_report
from ptqpipe.checkpoint import (
    RECORD_FILE,
    Mode,
    Paths,
    RankLock,
    RunIdentity,
    abandon,
    check_disjoint,
    check_file,
    check_output,
    check_place,
    clear,
    completed_run,
    discard,
    empty,
    has_begun,
    journal_name,
    json_bytes,
    locked,
    output_errors,
    read_journal,
    read_json_object,
    refuse_held,
    run_id_of,
    shown,
    write_file,
)
from ptqpipe.errors import AlreadyComplete, OutputError, OutputExists, PtqError, UsageError, WrongOutput, arg
from ptqpipe.pipeline import messages as text
from ptqpipe.pipeline.disk_space import check_disk
from ptqpipe.pipeline.ledger import Ledger
from ptqpipe.pipeline.prepare_stages import prepare
from ptqpipe.pipeline.run_plan import Pipeline, described
from ptqpipe.pipeline.stages import steps_of
from ptqpipe.recipe.options import PipelineOptions, RecipeOptions
from ptqpipe.run.machine import Machine, peak_bytes, progress_prefix, reset_peak
from ptqpipe.run.quantities import memory_size

CALL_FILE = "pipeline.json"  # of a folder of ``work_dir``
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PipelineResult:
    """What a run made.

    record      the content of ptqpipe.json
    evaluation  the content of OUT.eval.json, None where nothing was measured
    report      OUT.report.html, None where none was asked for
    seconds     of this run, without what an interrupted one took
    peak_bytes  the most memory that a stage of this run had resident
    """

    out: Path
    record: Mapping[str, Any] = field(repr=False)
    evaluation: Mapping[str, Any] | None = field(repr=False)
    report: Path | None
    seconds: float
    peak_bytes: int


def pipeline(
    model: str | Path,
    *,
    recipe: RecipeOptions | None = None,
    recipe_path: Path | None = None,
    out: Path | None = None,
    work: PipelineOptions | None = None,
    mode: Mode = "new",
    machine: Machine | None = None,
    say: Say = lambda line: None,
) -> PipelineResult:
    """Quantizes a model as well as ``work`` asks for, in one run.

    model, recipe, recipe_path, out  as `convert` takes them
    mode                             "resume" continues a run that was interrupted, to the same bytes
    say                              is called with each line for people: what will be done, and every finished stage

    Raises, before any work, UsageError for options that contradict each other or the reader, and OutputError for an
    output that is there or a disk that is too small; then what the stages raise. AlreadyComplete where nothing is left
    to resume.
    """
    prepared = prepare(model, recipe, recipe_path, out, work or PipelineOptions(), mode, machine or Machine())
    return run(prepared, say=say)


def run(run: Pipeline, *, say: Say = lambda line: None) -> PipelineResult:
    begun, paths = time.monotonic(), Paths.of(run.out)
    check_place(run.out)
    with ExitStack() as stack:
        lock = _open(run, paths, stack)
        steps, printed = steps_of(run), set[str]()  # several stages look at the same data
        peaks = [0]
        for line in text.header(run, steps):
            say(line)
        for file in run.ledger.remove_damaged():
            say(f"  warning: {file} is not as it was written; what it is a part of is made again")
        try:
            for number, step in enumerate(steps, 1):
                started, label = time.monotonic(), f"[{number}/{len(steps)}] {step.name}"
                reset_peak()
                with progress_prefix(label), suppress(AlreadyComplete):
                    step.run()
                peaks.append(peak_bytes())
                say(f"{label}  {time.monotonic() - started:.1f} s, peak {memory_size(peaks[-1])}")
                for line in dict.fromkeys(one for one in run.notes if one not in printed):
                    say(f"  {line}")
                printed.update(run.notes)
                run.notes.clear()
        except BaseException as error:
            _close_if_empty(run)
            if isinstance(error, OSError | PtqError) and not lock.in_place():
                raise OutputError(
                    f"{shown(str(run.begun))} was removed, renamed or unmounted while this run was writing in it; put "
                    f"it back and {arg('resume', True)}, or start again"
                ) from None
            raise
        with output_errors(run.begun):
            discard(paths, run.begun)
    record = read_json_object(run.out / RECORD_FILE)
    return PipelineResult(run.out, record, run.evaluation, run.report, time.monotonic() - begun, max(peaks))


def _open(run: Pipeline, paths: Paths, stack: ExitStack) -> RankLock:
    """Refuses or accepts what lies at the output and beside it, and makes the hidden folder of the run. ``stack`` gets
    its lock, which keeps other runs from every stage of this one, and its journal."""
    begun, identity = run.begun, run.identity
    refuse_held(paths.partial)
    with output_errors(begun):
        lock = stack.enter_context(locked(begun))
    clear(paths)
    for name, own, what in (("eval.json", is_result, "an eval file"), ("report.html", is_report, "a report")):
        if getattr(run.work, name.partition(".")[0]):
            check_file(run.beside(name), own=own, what=f"{what} of ptqpipe")
    journal = begun / journal_name(0)
    former = read_journal(journal).identity if journal.exists() and run.mode != "overwrite" else None
    if former is None and run.mode != "overwrite":
        with output_errors(begun):
            empty(begun, keep=lock.name)  # of a call that was killed before it had begun, or while it was cleared
    if run.mode == "new" and former is not None:
        raise OutputExists(
            f"{begun} is left from an unfinished run; {arg('resume', True)} continues it, {arg('overwrite', True)} "
            "discards it"
        )
    if run.mode != "resume":
        check_output(run.out, mode=run.mode)
    changed = "" if former is None else _changed(former.parts, identity)
    if changed:
        raise UsageError(
            f"{begun} was started with another value of {changed}; give what it had and {arg('resume', True)}, or "
            f"{arg('overwrite', True)} to start over"
        )
    if run.mode == "overwrite":
        abandon(paths)
    elif former is None or not former.replaces:
        _refuse_others(run, paths, begun=former is not None)
    if run.work.work_dir is not None:
        _keep(run, stack)
    if former is None:
        check_disk(run.out, run.weights_bytes + run.codes_bytes)
        with output_errors(begun):
            empty(begun, keep=lock.name)  # the stages of another call
    new = RunIdentity(run_id_of(identity), "", identity, replaces=run.mode == "overwrite")
    run.ledger = Ledger(begun, run.folder, former or new, paths.out)
    stack.callback(run.ledger.close)
    return lock


def _changed(former: Mapping[str, Any], identity: Mapping[str, str]) -> str:
    """What another call decided otherwise, as a message has it; empty for nothing."""
    names = [*identity, *(name for name in former if name not in identity)]
    changed = [name for name in names if former.get(name) != identity.get(name)]
    return described(changed[0]).removeprefix("the ") if changed else ""


def _keep(run: Pipeline, stack: ExitStack) -> None:
    """Makes the folder of ``work_dir`` one of this call, since what lies there is used as this call's own. ``stack``
    gets its lock.
    UsageError for a folder with other files, for that of a call that decided otherwise, and for one in the model or the
    output."""
    folder, call_file = run.folder, run.folder / CALL_FILE
    for place, name in ((run.path, "the source"), (run.out, "the output")):
        check_disjoint(Paths.of(place).out, folder, names=f"the stages' folder and {name}", option="work_dir")
    with output_errors(folder):
        others = folder.is_dir() and any(folder.glob("[!.]*"))
    if others and not call_file.exists():
        raise UsageError(
            f"{arg('work_dir', folder)} has files that no run left there; name an empty folder, or a new one"
        )
    with output_errors(folder):
        stack.enter_context(locked(folder))
    if call_file.exists():
        changed = _changed(read_json_object(call_file), run.identity)
        if changed:
            raise UsageError(
                f"{arg('work_dir', folder)} has the stages of a run with another value of {changed}; name another "
                "folder"
            )
    else:
        write_file(call_file, json_bytes(dict(run.identity)).decode())


def _refuse_others(run: Pipeline, paths: Paths, *, begun: bool) -> None:
    """Refuses an output that is there and not of this run, and the unfinished conversion of another call beside it.
    Returns for a plain conversion to resume. ``begun``: whether a run of several stages is under way."""
    there, name = paths.out.exists() and any(paths.out.iterdir()), shown(str(run.out))
    record = read_json_object(run.out / RECORD_FILE) if there and completed_run(run.out) is not None else {}
    entry = record.get("pipeline")
    own = isinstance(entry, Mapping) and entry.get("run") == run_id_of(run.identity)
    if own and not begun:
        raise AlreadyComplete(f"{name} is already complete, by this very run; nothing is left to do", run.out)
    if own or (run.preset is None and run.work.budget is None):
        return
    if there:
        none = "" if begun else "has no unfinished run next to it and "
        raise WrongOutput(
            f"{name} {none}is no output of this run; {arg('overwrite', True)} replaces it, or choose another "
            f"{arg('out')}"
        )
    if not begun and has_begun(paths):
        raise WrongOutput(
            f"{shown(str(paths.partial))} is left from an unfinished run of another call; give that call again with "
            f"{arg('resume', True)}, or {arg('overwrite', True)} discards it"
        )


def _close_if_empty(run: Pipeline) -> None:
    """A run that failed before its first stage had made anything leaves nothing behind."""
    journal = run.begun / journal_name(0)
    if not journal.exists():
        return
    remaining = {path.name for path in run.begun.iterdir() if not path.name.startswith("lock-")}
    if remaining == {journal.name} and run.work.work_dir is None and not Paths.of(run.out).partial.exists():
        journal.unlink()
