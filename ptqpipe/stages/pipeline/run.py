"""pipeline: what convert does with a text, under a budget or when it is to be measured, by the other stages in order.

    generate -> statistics -> transform -> plan -> tune -> convert -> verify -> eval -> report

as far as the call needs them. Each stage writes into a hidden folder beside the output and resumes by itself, so a run
that was interrupted anywhere ends with the same bytes. Statistics there are small (a few numbers for each input
channel), and so are a transform's factors (``folded.py``); moments for GPTQ never lie on disk (``stages/tune``), and
codes go as they are written into the output.

Must not know how any stage works; what a quality does is in ``table.py``.
"""

import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ptqpipe.checkpoint import (
    RECORD_FILE,
    Mode,
    Paths,
    check_disjoint,
    check_file,
    check_place,
    completed_run,
    json_bytes,
    output_errors,
    read_json_object,
    run_id_of,
    write_file,
)
from ptqpipe.errors import AlreadyComplete, OutputError, OutputExists, UsageError, WrongOutput
from ptqpipe.evaluation.result import is_result
from ptqpipe.machine import Machine, bars_of
from ptqpipe.options import PipelineOptions, RecipeOptions
from ptqpipe.quantities import disk_size
from ptqpipe.report import is_report
from ptqpipe.stages.pipeline import text
from ptqpipe.stages.pipeline.prepare import prepare
from ptqpipe.stages.pipeline.stages import Pipeline

CALL_FILE = "pipeline.json"
REPLACES = "replaces"  # in it: the run was begun with --overwrite
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Made:
    """What a run made.

    record      the content of ptqpipe.json
    evaluation  the content of OUT.eval.json, None where nothing was measured
    report      OUT.report.html, None where none was asked for
    seconds     of this run, without what an interrupted one took
    """

    out: Path
    record: Mapping[str, Any] = field(repr=False)
    evaluation: Mapping[str, Any] | None = field(repr=False)
    report: Path | None
    seconds: float


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
) -> Made:
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


def run(run: Pipeline, *, say: Say = lambda line: None) -> Made:
    """Runs what is decided, as `pipeline` does."""
    begun = time.monotonic()
    _open(run, run.identity)
    steps, said = run.steps(), set[str]()  # several stages look at the same data
    for line in text.header(run, steps):
        say(line)
    try:
        for number, step in enumerate(steps, 1):
            started, label = time.monotonic(), f"[{number}/{len(steps)}] {step.name}"
            with bars_of(label), suppress(AlreadyComplete):
                step.run()
            say(f"{label}  {time.monotonic() - started:.1f} s")
            for line in dict.fromkeys(one for one in run.notes if one not in said):
                say(f"  {line}")
            said.update(run.notes)
            run.notes.clear()
    except BaseException:
        _close_if_empty(run)
        raise
    if run.begun.exists():
        shutil.rmtree(run.begun)
    record = read_json_object(run.out / RECORD_FILE)
    return Made(run.out, record, run.evaluation, run.report, time.monotonic() - begun)


def _open(run: Pipeline, identity: Mapping[str, str]) -> None:
    """Refuses or accepts what lies at the output and beside it, and makes the hidden folder of the run."""
    begun, out = run.begun, Paths.of(run.out).out
    check_place(run.out)
    for name, own, what in (("eval.json", is_result, "an eval file"), ("report.html", is_report, "a report")):
        if getattr(run.work, name.partition(".")[0]):
            check_file(run.beside(name), own=own, what=f"{what} of ptqpipe")
    former = read_json_object(begun / CALL_FILE) if (begun / CALL_FILE).exists() else None
    if run.mode == "overwrite":
        former = None
        if begun.exists():
            shutil.rmtree(begun)
    elif run.mode == "new" and former is not None:
        raise OutputExists(f"{begun} is left from an unfinished run; --resume continues it, --overwrite discards it")
    if former is None and run.mode != "overwrite" and out.exists() and any(out.iterdir()):
        _refuse(run, identity)
    changed = _changed(former, identity)
    if changed:
        raise UsageError(
            f"{begun} was started with another value of {changed}; give what it had and --resume, or --overwrite to "
            "start over"
        )
    if run.work.keep_stages is not None:
        _keep(run, identity)
    if former is None:
        _check_disk(run)
        former = {**identity, **({REPLACES: True} if run.mode == "overwrite" else {})}
        with output_errors(begun):
            begun.mkdir(parents=True, exist_ok=True)
            (begun / CALL_FILE).write_bytes(json_bytes(former))
    run.replaces = bool(former.get(REPLACES))


def _changed(former: Mapping[str, Any] | None, identity: Mapping[str, str]) -> str:
    """What another call decided otherwise, in words; empty for nothing, and for no call."""
    names = [*identity, *(name for name in former or () if name not in identity and name != REPLACES)]
    changed = [name for name in names if former is not None and former.get(name) != identity.get(name)]
    return changed[0].removeprefix("the ") if changed else ""


def _keep(run: Pipeline, identity: Mapping[str, str]) -> None:
    """Makes the folder of --keep-stages one of this call, since what lies there is used as this call's own.
    UsageError for a folder with other files, for that of a call that decided otherwise, and for one in the model or the
    output."""
    folder = run.folder
    for place, name in ((run.path, "the source"), (run.out, "the output")):
        check_disjoint(Paths.of(place).out, folder, names=f"the stages' folder and {name}", option="--keep-stages")
    with output_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        others = any(folder.iterdir())
    if (folder / CALL_FILE).exists():
        changed = _changed(read_json_object(folder / CALL_FILE), identity)
        if changed:
            raise UsageError(
                f"--keep-stages {folder} has the stages of a run with another value of {changed}; name another folder"
            )
    elif others:
        raise UsageError(f"--keep-stages {folder} has files that no run left there; name an empty folder, or a new one")
    else:
        write_file(folder / CALL_FILE, json_bytes(dict(identity)).decode())


def _refuse(run: Pipeline, identity: Mapping[str, str]) -> None:
    """The output is there and no run of several stages is under way. Returns for a plain conversion to resume."""
    if run.mode == "new":
        raise OutputExists(f"{run.out} exists and is not empty; --overwrite replaces it, or choose another -o")
    own = completed_run(run.out) is not None
    record = read_json_object(run.out / RECORD_FILE) if own else {}
    if record.get("pipeline", {}).get("run") == run_id_of(identity):
        raise AlreadyComplete(f"{run.out} is already complete, by this very run; nothing is left to do", run.out)
    if run.way is not None or run.work.budget is not None:
        raise WrongOutput(
            f"{run.out} has no unfinished run next to it and is no output of this run; --overwrite replaces it, or "
            "choose another -o"
        )


def _check_disk(run: Pipeline) -> None:
    """The output, and what certainly lies beside it."""
    place = next(folder for folder in Paths.of(run.out).out.parents if folder.is_dir())
    free, need = shutil.disk_usage(place).free, run.weights_bytes + max(run.disk.codes, run.disk.pairs) + run.disk.small
    if need > free:
        raise OutputError(
            f"{place} has {disk_size(free)} free, the output and temporary files need {disk_size(need)}; free "
            "some space, or choose another -o"
        )


def _close_if_empty(run: Pipeline) -> None:
    """A run that failed before its first stage had made anything leaves nothing behind."""
    left = {path.name for path in run.begun.iterdir()} if run.begun.exists() else {CALL_FILE, ""}
    if left == {CALL_FILE} and run.work.keep_stages is None and not Paths.of(run.out).partial.exists():
        shutil.rmtree(run.begun)
