"""pipeline: what convert does with a text, under a budget or when it is to be measured, by the other stages in order.

    generate -> statistics -> transform -> plan -> tune -> convert -> verify -> eval -> report

as far as the call needs them. Each stage writes into a hidden folder beside the output and resumes by itself, so a run
that was interrupted anywhere ends with the same bytes. Statistics there are small (a few numbers for each input
channel); moments for GPTQ never lie on disk (``stages/tune``), and codes go as they are written into the output.

Must not know how any stage works; what a quality does is in ``table.py``.
"""

import json
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ptqpipe._version import __version__
from ptqpipe.checkpoint import (
    RECORD_FILE,
    Mode,
    Paths,
    check_file,
    completed_run,
    json_bytes,
    output_errors,
    read_json_object,
    resolve_source,
    run_id_of,
    write_file,
)
from ptqpipe.errors import AlreadyComplete, OutputError, OutputExists, UsageError, VerifyError
from ptqpipe.evaluation.result import is_result
from ptqpipe.options import PipelineOptions, RecipeOptions
from ptqpipe.quantities import disk_size
from ptqpipe.recipe import build_recipe
from ptqpipe.report import is_report
from ptqpipe.source import Source
from ptqpipe.stages.calibrate.run import CalibrateOptions, calibrate
from ptqpipe.stages.common import Machine, bars_of, compute_threads, name_of, named_source
from ptqpipe.stages.convert import run as conversion
from ptqpipe.stages.convert.prepare import best_with, prepare
from ptqpipe.stages.evaluate import run as evaluation
from ptqpipe.stages.generate import generate
from ptqpipe.stages.pipeline import call, text
from ptqpipe.stages.pipeline.table import TABLE, WEIGHTS, Way, kind_of, words_of
from ptqpipe.stages.plan.run import Budget, check_budget, plan_mixed, write_recipe
from ptqpipe.stages.report.run import make_report
from ptqpipe.stages.transform.plan import TransformOptions
from ptqpipe.stages.transform.run import transform
from ptqpipe.stages.tune.run import TuneOptions, tune
from ptqpipe.stages.verify.run import verify

CALL_FILE = "pipeline.json"
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
    record: Mapping[str, Any]
    evaluation: Mapping[str, Any] | None
    report: Path | None
    seconds: float


@dataclass(frozen=True, slots=True)
class Step:
    """A stage of the run: its name, what it will do in words, and what does it."""

    name: str
    words: str
    run: Callable[[], None]


@dataclass(slots=True)
class Pipeline:
    """A run that is decided. Has written nothing yet.

    path     of the model; ``floats`` the model that is quantized, another one behind a transform
    folder   where the stages' outputs lie; ``begun`` the hidden folder that says that a run is unfinished
    texts    files of --data, empty where the model writes its own
    """

    path: Path
    out: Path
    recipe: RecipeOptions
    recipe_path: Path | None
    work: PipelineOptions
    way: Way | None
    texts: list[str]
    needs_statistics: bool
    weights_bytes: int
    mode: Mode
    machine: Machine
    floats: Path = field(init=False)
    begun: Path = field(init=False)
    evaluation: Mapping[str, Any] | None = None
    report: Path | None = None

    def __post_init__(self) -> None:
        self.floats, self.begun = self.path, Paths.of(self.out).stages

    @property
    def folder(self) -> Path:
        """Where the stages' outputs lie."""
        return self.begun if self.work.keep_stages is None else Path(self.work.keep_stages).expanduser()

    @property
    def computing(self) -> Machine:
        """The machine for stages that compute and wait for no disk."""
        return replace(self.machine, workers=min(self.machine.workers, compute_threads()))

    @property
    def identity(self) -> dict[str, str]:
        """What decides the bytes, by its name in a message."""
        given = {name: getattr(self.work, name) for name in ("data", "quality", "budget", "formats", "reader")}
        with Source.open(self.path) as source:
            fingerprint = source.reader.fingerprint()
        return {
            "the model": fingerprint,
            "the recipe": json.dumps([self.recipe.scheme, self.recipe.ignore, str(self.recipe_path), *_pairs(self)]),
            **{f"--{name}": json.dumps(value) for name, value in given.items()},
            "--samples, --seqlen or --seed": json.dumps([self.work.samples, self.work.seqlen, self.work.seed]),
            "the version of ptqpipe": __version__,
        }

    def steps(self) -> list[Step]:
        """The stages in their order."""
        way, work = self.way, self.work
        found: list[Step] = []

        def add(wanted: object, name: str, words: str, run: Callable[[], None]) -> None:
            if wanted:
                found.append(Step(name, words, run))

        add(work.data and not self.texts, "generate", "the model writes its own text", self._generate)
        known = self.needs_statistics and way is not None
        add(known, "calibrate", "statistics of the inputs of every layer, a few kB each", self._calibrate)
        add(way and way.transform, "transform", f"{way and way.transform}, into a float copy", self._transform)
        add(work.budget, "plan", f"a format for every layer at {work.budget}", self._plan)
        add(way and way.method, "tune", words_of(way or Way()), self._tune)
        add(True, "convert", f"into {self.out}", self._convert)
        add(True, "verify", "hashes and claims of the result", self._verify)
        add(work.eval, "eval", f"KL divergence to the model on {', '.join(work.eval)}", self._eval)
        add(work.report, "report", f"{self.beside('report.html')}", self._report)
        return found

    def beside(self, ending: str) -> Path:
        """A file next to the output."""
        return self.out.parent / f"{self.out.name}.{ending}"

    def windows(self) -> dict[str, Any]:
        """--samples, --seqlen and --seed as all stages take them."""
        return {name: getattr(self.work, name) for name in ("samples", "seqlen", "seed")}

    @property
    def stats(self) -> Path | None:
        """The statistics of the model that is quantized, if this run makes any."""
        if not self.needs_statistics or self.way is None:
            return None
        return self.folder / ("statistics" if self.floats == self.path else "statistics-transformed")

    @property
    def recipe_file(self) -> Path | None:
        """The recipe file: the call's, or the one that was planned."""
        return self.folder / "recipe.yaml" if self.work.budget is not None else self.recipe_path

    def _generate(self) -> None:
        target = self.folder / "text.jsonl"
        if not target.exists():
            generate(self.path, target, **self.windows(), machine=self.computing)
        self.texts = [str(target)]

    def _calibrate(self) -> None:
        assert self.way is not None
        assert self.stats is not None
        kinds = ("diagonal", "block") if self.way.transform and self.floats == self.path else ("diagonal",)
        options = CalibrateOptions(**self.windows(), moments=kinds)
        calibrate(self.floats, self.texts, self.stats, options=options, mode="resume", machine=self.computing)

    def _transform(self) -> None:
        """The float copy goes by the model's name, which the record of the output then has."""
        assert self.way is not None
        target = self.folder / "transformed" / name_of(self.path)
        target.parent.mkdir(exist_ok=True)
        options = TransformOptions(apply=self.way.transform, format=self.recipe.scheme or "nvfp4", dtype="fp32")
        with suppress(AlreadyComplete):
            transform(self.path, target, stats=self.stats, options=options, mode="resume", machine=self.machine)
        self.floats = target
        if _static(self):
            self._calibrate()

    def _plan(self) -> None:
        target = self.folder / "recipe.yaml"
        if target.exists():
            return
        formats = call.formats_for(self.work)
        budget = Budget.parse(str(self.work.budget))
        stats, container = self.stats, self.recipe.container
        found = plan_mixed(self.path, budget, formats=formats, stats=stats, machine=self.machine, container=container)
        if self.way is not None and self.way.method:
            found = replace(found, content=_without_algorithm(found.content))
        write_recipe(found, target)

    def _tune(self) -> None:
        assert self.way is not None
        tune(
            self.floats,
            self.texts,
            self.folder / "codes",
            recipe=self.recipe,
            recipe_path=self.recipe_file,
            stats=self.stats if _static(self) else None,
            options=TuneOptions(**self.windows(), method=self.way.method),
            mode="resume",
            machine=self.computing,
        )

    def _convert(self) -> None:
        codes = self.folder / "codes" if self.way is not None and self.way.method else None
        stats = self.stats if codes is None or _static(self) else None
        where = {"recipe_path": self.recipe_file if codes is None else None, "stats": stats, "rounding": codes}
        options = RecipeOptions() if codes is not None else best_with(self.recipe, **where)
        more = self._entry()
        with prepare(self.floats, options=options, out=self.out, **where) as prepared:
            job = prepared.with_more(more, consumes=self.work.keep_stages is None)
            conversion.convert(job, mode="resume" if self.mode == "new" else self.mode, machine=self.machine)

    def _entry(self) -> dict[str, Any]:
        """What the record says of this run; nothing where it is the one of a plain conversion."""
        if self.way is None and self.work.budget is None:
            return {}
        asked = {"quality": self.work.quality or "best", "run": run_id_of(self.identity)}
        entry: dict[str, Any] = {"pipeline": {**asked, "budget": self.work.budget}}
        if self.floats != self.path:
            with Source.open(self.path) as source:
                assert self.way is not None
                entry["transformed"] = {"transform": self.way.transform, "from": named_source(source)}
        return entry

    def _verify(self) -> None:
        found = verify(self.out, workers=self.machine.workers)
        if not found.ok:
            first = found.faults[0]
            raise VerifyError(
                f"{self.out} has {len(found.faults)} faults, the first: {first.where} {first.message}; "
                f"ptqpipe verify {self.out} lists them"
            )

    def _eval(self) -> None:
        options = evaluation.Options(
            data=tuple(Path(name).expanduser() for name in self.work.eval),
            device=str(self.machine.device),
            cache_dir=self.folder / "logits",
        )
        shown = self.machine.progress
        self.evaluation = evaluation.evaluate(str(self.out), baseline=str(self.path), options=options, progress=shown)
        write_file(self.beside("eval.json"), json.dumps(self.evaluation, indent=1) + "\n")

    def _report(self) -> None:
        measured = self.beside("eval.json") if self.work.eval else None
        self.report, _ = make_report(self.out, source=self.floats, evaluation=measured, out=self.beside("report.html"))


def _pairs(run: Pipeline) -> list[Any]:
    return sorted((name, str(value)) for name, value in run.recipe.given.items())


def _static(run: Pipeline) -> bool:
    """Whether the output has numbers of its own from the statistics: scales of inputs or of the KV cache, biases."""
    return call.has_static(build_recipe(run.recipe, path=run.recipe_file))


def _without_algorithm(content: Mapping[str, Any]) -> dict[str, Any]:
    rules = [{k: v for k, v in rule.items() if k not in ("algorithm", "weighting")} for rule in content["rules"]]
    return {**content, "rules": rules}


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
    prepared = prepare_run(model, recipe, recipe_path, out, work or PipelineOptions(), mode, machine or Machine())
    return run(prepared, say=say)


def run(run: Pipeline, *, say: Say = lambda line: None) -> Made:
    """Runs what is decided, as `pipeline` does."""
    begun = time.monotonic()
    _open(run, run.identity)
    steps = run.steps()
    for line in text.header(run.path, run.out, steps, run.weights_bytes):
        say(line)
    try:
        for number, step in enumerate(steps, 1):
            started, label = time.monotonic(), f"[{number}/{len(steps)}] {step.name}"
            with bars_of(label), suppress(AlreadyComplete):
                step.run()
            say(f"{label}  {time.monotonic() - started:.1f} s")
    except BaseException:
        _close_if_empty(run)
        raise
    if run.begun.exists():
        shutil.rmtree(run.begun)
    record = read_json_object(run.out / RECORD_FILE)
    return Made(run.out, record, run.evaluation, run.report, time.monotonic() - begun)


def prepare_run(
    model: str | Path,
    recipe: RecipeOptions | None,
    recipe_path: Path | None,
    out: Path | None,
    work: PipelineOptions,
    mode: Mode,
    machine: Machine,
) -> Pipeline:
    """Decides a run from the call and from headers. Raises what `pipeline` raises before any work; writes nothing."""
    recipe = recipe or RecipeOptions()
    call.check_call(work, recipe, recipe_path)
    texts = call.texts_of(work.data)
    if work.reader is not None and work.budget is None:
        recipe = call.for_reader(work.reader, recipe, recipe_path)
    formats = call.formats_for(work) if work.budget is not None else ()
    path = resolve_source(str(model))
    if work.budget is not None:
        check_budget(path, Budget.parse(work.budget), formats)
        if work.reader is not None:
            recipe = recipe.but(container=call.container_of_all(work.reader, formats))
        out = out or Path(f"{name_of(path)}-MIXED")
        kind, static, nbytes = WEIGHTS, True, 0
    else:
        with prepare(path, options=recipe, recipe_path=recipe_path, out=out, collected=bool(work.data)) as prepared:
            out, nbytes = prepared.out, prepared.layout.file_bytes
            kind, static = kind_of(prepared.outputs.recipe.schemes()), call.has_static(prepared.outputs.recipe)
    way = TABLE[kind][work.quality or "best"] if work.data else None
    needs = way is not None and bool(static or way.transform or not way.method)
    return Pipeline(path, out, recipe, recipe_path, work, way, texts, needs, nbytes, mode, machine)


def _open(run: Pipeline, identity: Mapping[str, str]) -> None:
    """Refuses or accepts what lies at the output and beside it, and makes the hidden folder of the run."""
    begun, out = run.begun, Paths.of(run.out).out
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
    changed = [name for name in identity if former is not None and former.get(name) != identity[name]]
    if changed:
        raise UsageError(
            f"{begun} was begun with another value of {changed[0].removeprefix('the ')}; give what it had and "
            "--resume, or --overwrite to begin again"
        )
    if former is None:
        _check_disk(run)
        with output_errors(begun):
            begun.mkdir(parents=True, exist_ok=True)
            (begun / CALL_FILE).write_bytes(json_bytes(dict(identity)))
    with output_errors(run.folder):
        run.folder.mkdir(parents=True, exist_ok=True)


def _refuse(run: Pipeline, identity: Mapping[str, str]) -> None:
    """The output is there and no run of several stages is under way. Returns for a plain conversion to resume."""
    if run.mode == "new":
        raise OutputExists(f"{run.out} exists and is not empty; --overwrite replaces it, or choose another -o")
    own = completed_run(run.out) is not None
    record = read_json_object(run.out / RECORD_FILE) if own else {}
    if record.get("pipeline", {}).get("run") == run_id_of(identity):
        raise AlreadyComplete(f"{run.out} is already complete, by this very run; nothing is left to do")


def _check_disk(run: Pipeline) -> None:
    """The output, its codes before they are written into it, and the float copy of a transform."""
    codes = run.weights_bytes if run.way is not None and run.way.method else 0
    floats = 0
    if run.way is not None and run.way.transform:
        with Source.open(run.path) as source:
            floats = 2 * sum(entry.nbytes for entry in source.reader.entries.values())
    place = next(folder for folder in Paths.of(run.out).out.parents if folder.is_dir())
    free, need = shutil.disk_usage(place).free, run.weights_bytes + codes + floats
    if need > free:
        raise OutputError(
            f"{place} has {disk_size(free)} free, the output and what is made on the way need {disk_size(need)}; free "
            "some space, or choose another -o"
        )


def _close_if_empty(run: Pipeline) -> None:
    """A run that failed before its first stage had made anything leaves nothing behind."""
    left = {path.name for path in run.begun.iterdir()} if run.begun.exists() else {CALL_FILE, ""}
    if left == {CALL_FILE} and run.work.keep_stages is None and not Paths.of(run.out).partial.exists():
        shutil.rmtree(run.begun)
