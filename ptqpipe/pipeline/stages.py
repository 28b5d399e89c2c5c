"""The stages of one ``convert --data`` run: the inputs of each, where it writes, and their order.

Must not know how a stage works, nor how a call is checked.
"""

import json
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ptqpipe._version import __version__
from ptqpipe.calibration.command import CalibrateOptions, calibrate
from ptqpipe.calibration.own_text import GenerateOptions, generate
from ptqpipe.calibration.rows import weighted
from ptqpipe.calibration.statistics import STATS_FILE
from ptqpipe.check.evaluate import command as evaluation
from ptqpipe.check.evaluate.eval_summary import write as write_evaluation
from ptqpipe.check.report.command import make_report
from ptqpipe.check.verify.command import verify
from ptqpipe.checkpoint import FOLDING_FILE, Mode, Paths, file_sha256, has_begun, read_json_object, run_id_of
from ptqpipe.conversion import command as conversion, named_source
from ptqpipe.conversion.prepare import best_with, prepare
from ptqpipe.conversion.transform.factors import find_factors
from ptqpipe.conversion.transform.plan import TransformOptions
from ptqpipe.errors import AlreadyComplete, CheckpointError, PtqWarning
from ptqpipe.models.source import Source
from ptqpipe.pipeline import call
from ptqpipe.pipeline.budget.command import Budget, plan_mixed, write_recipe
from ptqpipe.pipeline.ledger import Ledger
from ptqpipe.pipeline.presets import Way, describe
from ptqpipe.pipeline.room import Disk, disk_of, memory_of, memory_text, pair_samples
from ptqpipe.pipeline.tune.command import tune
from ptqpipe.pipeline.tune.tune_options import TuneOptions
from ptqpipe.quantization.learned_codes import CODES_FILE
from ptqpipe.recipe.file import build_recipe
from ptqpipe.recipe.options import PipelineOptions, RecipeOptions
from ptqpipe.run.machine import Machine, compute_threads


@dataclass(frozen=True, slots=True)
class Step:
    """A stage of the run: its name, what it will do in words, and what does it."""

    name: str
    words: str
    run: Callable[[], None]


@dataclass(slots=True)
class Pipeline:
    """A run that is decided. Has written nothing yet.

    path      of the model; ``floats`` what is quantized: the model, or the folder of the factors to fold into it
    folder    where the stages' outputs lie; ``begun`` the hidden folder that says that a run is unfinished
    texts     files of --data, and behind them the model's own text once it is written
    disk      what it takes beside the output; ``memory`` about what each stage holds
    identity  what decides the bytes, by its name in a message
    ledger    what the stages have left in that folder, once the run is open
    command   the call, which eval file and report show
    notes     lines of the stages about the data, not printed yet
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
    warnings: tuple[str, ...]
    mode: Mode
    machine: Machine
    floats: Path = field(init=False)
    begun: Path = field(init=False)
    disk: Disk = field(init=False)
    memory: str = field(init=False)
    pair_samples: int = field(init=False)
    identity: Mapping[str, str] = field(init=False)
    evaluation: Mapping[str, Any] | None = None
    report: Path | None = None
    ledger: Ledger = field(init=False)
    command: str = ""
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.out.name or ".." in self.out.parts:  # what lies beside it is called by its name
            self.out = Paths.of(self.out).out
        self.floats, self.begun = self.path, Paths.of(self.out).stages
        with Source.open(self.path) as source:
            self.identity = self._identity(source)
            known, size = self.needs_statistics, self.weights_bytes
            self.pair_samples = pair_samples(source, self.work)
            self.disk = disk_of(source, self.work, self.way, statistics=known, weights_bytes=size)
            limit = self.machine.memory_bytes
            self.memory = memory_text(memory_of(source, self.work, self.way, limit=limit), limit)

    @property
    def folder(self) -> Path:
        """Where the stages' outputs lie."""
        return self.begun if self.work.keep_stages is None else Path(self.work.keep_stages).expanduser()

    @property
    def computing(self) -> Machine:
        """The machine for stages that compute and wait for no disk."""
        return replace(self.machine, workers=min(self.machine.workers, compute_threads()))

    def _identity(self, source: Source) -> dict[str, str]:
        """What decides the bytes, by its name in a message; no folder's name is in it."""
        work, recipe = self.work, build_recipe(self.recipe, path=self.recipe_path)
        field = [] if work.field is None else [f"--field {work.field}"]  # which part of the texts is read
        own = [f"{call.SELF}={self._own_weight!r}"] if self.texts and self._own_weight is not None else []
        given = {
            "--data": [*([_content(name) for name in self.texts] or work.data), *own, *field],
            "--quality": work.quality,
            "--budget": work.budget,
            "--formats": work.formats,
            "--for": work.reader,
            "--samples, --seqlen or --seed": [work.samples, work.seqlen, work.seed],
        } | {f"--{name}": True for name in ("requantize", "untie") if getattr(work, name)}
        named = {
            "the model": source.reader.fingerprint(),
            "the recipe": recipe.digest,
            "the version of ptqpipe": __version__,
        }
        return named | {name: json.dumps(value) for name, value in given.items()}

    def steps(self) -> list[Step]:
        """The stages in their order."""
        way, work = self.way, self.work
        steps: list[Step] = []

        def add(wanted: object, name: str, words: str, run: Callable[[], None]) -> None:
            if wanted:
                steps.append(Step(name, words, run))

        add(self._own_weight is not None, "generate", "the model generates text to calibrate on", self._generate)
        turned = "learn rotations from the gradients at the inputs of layers, and fold them into the weights"
        add(way and way.rotations, "rotate", turned, self._rotate)
        known = self.needs_statistics and way is not None
        add(known, "calibrate", "statistics of the inputs of every layer, a few kB each", self._calibrate)
        folded = f"{way and way.transform}: find scaling factors, and fold them into the weights"
        add(way and way.transform, "transform", folded, self._transform)
        add(work.budget, "plan", f"a format for every layer at {work.budget}", self._plan)
        add(way and way.method, "tune", describe(Way(method=way.method if way else "")), self._tune)
        add(True, "convert", f"into {self.out}", self._convert)
        add(True, "verify", "check hashes and recorded claims of the result", self._verify)
        add(work.eval, "eval", f"KL divergence from the original model on {', '.join(work.eval)}", self._eval)
        add(work.report, "report", f"{self.beside('report.html')}", self._report)
        return steps

    def beside(self, ending: str) -> Path:
        """A file next to the output."""
        return self.out.parent / f"{self.out.name}.{ending}"

    def windows(self) -> dict[str, Any]:
        """--samples, --seqlen and --seed as all stages take them."""
        return {name: getattr(self.work, name) for name in ("samples", "seqlen", "seed")}

    @property
    def _own_weight(self) -> float | None:
        return call.own_weight(self.work.data)

    @property
    def _field(self) -> str | None:
        """Of the rows of --data; those that the model has written have one of their own."""
        return None if self.texts == [str(self._own_text)] else self.work.field

    @property
    def _own_text(self) -> Path:
        return self.folder / "own-text.jsonl"  # the name by which its perplexity is told

    @property
    def stats(self) -> Path | None:
        """The statistics of the model that is quantized, if this run makes any."""
        if not self.needs_statistics or self.way is None:
            return None
        return self.folder / ("statistics-transformed" if self._scaled else "statistics")

    @property
    def _scaled(self) -> bool:
        """Whether the factors of the transform are in what is quantized."""
        return self.floats == self.folder / "factors"

    @property
    def _format(self) -> str:
        """The one that what is folded in is made for."""
        return build_recipe(self.recipe, path=self.recipe_path).schemes()[0].name

    @property
    def recipe_file(self) -> Path | None:
        """The recipe file: the call's, or the one that was planned."""
        return self.folder / "recipe.yaml" if self.work.budget is not None else self.recipe_path

    def _generate(self) -> None:
        if not self._own_text.exists():
            count, _ = call.own_share(self.work.data, self.work.samples)
            options = GenerateOptions(**self.windows() | {"samples": count})
            generate(self.path, self._own_text, options=options, machine=self.computing)
        self.ledger.add(self._own_text)
        self.texts.append(f"{self._own_text}={self._own_weight!r}" if self.texts else str(self._own_text))

    def _rotate(self) -> None:
        assert self.way is not None
        pairs, target = self.folder / "pairs", self.folder / "rotations"
        if not target.exists() or Paths.of(target).partial.exists():
            kinds = ("diagonal", "pairs")
            options = CalibrateOptions(
                **self.windows() | {"samples": self.pair_samples}, field=self._field, moments=kinds, holdout=0
            )
            with suppress(AlreadyComplete):
                done = calibrate(self.path, self.texts, pairs, options=options, mode="resume", machine=self.computing)
                self.notes += [] if done is None else done.notes
            self.ledger.add(pairs / STATS_FILE)
            asked: dict[str, Any] = {"learn": self.way.steps, "format": self._format, "untie": self.work.untie}
            turning = TransformOptions(self.way.rotations, dtype="fp32", **asked)
            with suppress(AlreadyComplete):
                find_factors(self.path, target, stats=pairs, options=turning, mode="resume", machine=self.computing)
        self.ledger.add(target / FOLDING_FILE)
        if pairs.exists() and self.work.keep_stages is None:
            shutil.rmtree(pairs)
        foldings = read_json_object(target / FOLDING_FILE)["foldings"]
        self.notes += [f"warning: {line}" for line in self._gainless(foldings)]
        if foldings:
            self.floats = target

    def _gainless(self, foldings: Sequence[Mapping[str, Any]]) -> list[str]:
        """A line for each rotation that was learned and is not folded in."""
        names = self.way.rotations.split(",") if self.way is not None and self.way.rotations else []
        folded = {folding["transform"] for folding in foldings if "matrices" in folding}
        why = "what was learned gains nothing on the tokens that were held out"
        return [f"{name} is left out: {why}" for name in names if name not in folded]

    def _calibrate(self) -> None:
        assert self.way is not None
        assert self.stats is not None
        blocks = self.way.transform and not self._scaled
        by_kl = self.work.budget is not None and self.way.method == "gptq"  # as the codes will be chosen
        kinds = ("diagonal", *(["block"] if blocks else []), *(["kl"] if by_kl else []))
        options = CalibrateOptions(**self.windows(), field=self._field, moments=kinds)
        with suppress(AlreadyComplete):
            done = calibrate(
                self.floats, self.texts, self.stats, options=options, mode="resume", machine=self.computing
            )
            self.notes += [] if done is None else done.notes
        self.ledger.add(self.stats / STATS_FILE)

    def _transform(self) -> None:
        assert self.way is not None
        assert self.stats is not None
        target = self.folder / "factors"
        options = TransformOptions(apply=self.way.transform, format=self._format, dtype="fp32")
        with suppress(AlreadyComplete):
            find_factors(self.floats, target, stats=self.stats, options=options, mode="resume", machine=self.machine)
        self.ledger.add(target / FOLDING_FILE)
        self.floats = target
        if _static(self):
            self._calibrate()

    def _plan(self) -> None:
        target = self.folder / "recipe.yaml"
        if not target.exists():
            self._find_plan(target)
        self.ledger.add(target)

    def _find_plan(self, target: Path) -> None:
        formats = call.formats_for(self.work)
        budget = Budget.parse(str(self.work.budget))
        follows = self.way is not None and bool(self.way.method)
        plan = plan_mixed(
            self.path,
            budget,
            formats=formats,
            sensitivity=self.stats,
            machine=self.machine,
            container=self.recipe.container,
            follows=follows,
            rotations=build_recipe(self.recipe).rotations,
            requantize=self.work.requantize,
        )
        if follows:
            plan = replace(plan, content=_without_algorithm(plan.content))
        write_recipe(plan, target)

    def _tune(self) -> None:
        assert self.way is not None
        target = self.folder / "codes"
        with suppress(AlreadyComplete):
            done = tune(
                self.floats,
                self.texts,
                target,
                recipe=self.recipe,
                recipe_path=self.recipe_file,
                stats=self.stats if _static(self) else None,
                options=TuneOptions(**self.windows(), data_field=self._field, method=self.way.method),
                mode="resume",
                machine=self.computing,
            )
            self.notes += done.notes
        self.ledger.add(target / CODES_FILE)

    def _convert(self) -> None:
        codes = self.folder / "codes" if self.way is not None and self.way.method else None
        stats = self.stats if codes is None or _static(self) else None
        path = self.recipe_file if codes is None else None
        where: dict[str, Any] = {"recipe_path": path, "stats": stats, "codes": codes}
        options = RecipeOptions() if codes is not None else best_with(self.recipe, **where)
        paths = Paths.of(self.out)
        mode: Mode = "overwrite" if self.ledger.replaces(paths.out) and not has_begun(paths) else "resume"
        where["requantize"] = self.work.requantize
        with prepare(self.floats, options=options, out=self.out, **where) as prepared:
            job = prepared.with_record_entries(self._entry(), consumes=self.work.keep_stages is None)
            conversion.convert(job, mode=mode, machine=self.machine)

    def _entry(self) -> dict[str, Any]:
        """What the record says of this run; nothing where it is the one of a plain conversion."""
        if self.way is None and self.work.budget is None:
            return {}
        asked = {"quality": self.work.quality or "best", "run": run_id_of(self.identity)}
        entry: dict[str, Any] = {"pipeline": {**asked, "budget": self.work.budget}}
        without = [] if self.way is None else list(self.way.without)
        foldings: list[dict[str, Any]] = []
        if self.floats != self.path:
            folded = read_json_object(self.floats / FOLDING_FILE)
            foldings = folded["foldings"]
            done = {folding["transform"] for folding in foldings}
            with Source.open(self.path) as source:
                names = ",".join(name for name in folded["transforms"] if name in done)
                entry["transformed"] = {"transform": names, "from": named_source(source), "foldings": foldings}
        without += self._gainless(foldings)
        entry["pipeline"] |= {"untie": True} if self.work.untie else {}
        entry["pipeline"] |= {"without": without} if without else {}
        return entry

    def _verify(self) -> None:
        report = verify(self.out, workers=self.machine.workers, progress=self.machine.progress)
        if not report.ok:
            first = report.faults[0]
            raise CheckpointError(
                f"{self.out} has {len(report.faults)} faults, the first: {first.where} {first.message}; "
                f"ptqpipe verify {self.out} lists them"
            )

    def _eval(self) -> None:
        options = evaluation.Options(
            data=tuple(self.work.eval),
            field=self.work.field,
            device=str(self.machine.device),
            cache_dir=self.begun / "logits",
            command=self.command,
            samples=3,
        )
        shown = self.machine.progress
        self.evaluation = evaluation.evaluate(str(self.out), source=str(self.path), options=options, progress=shown)
        warn = partial(warnings.warn, category=PtqWarning, stacklevel=2)
        write_evaluation(self.evaluation, self.beside("eval.json"), ckpt=self.out, warn=warn)

    def _report(self) -> None:
        measured = self.beside("eval.json") if self.work.eval else None
        self.report, _ = make_report(
            self.out,
            source=self.path,
            evaluation=measured,
            out=self.beside("report.html"),
            command=self.command,
            machine=self.machine,
        )


def _content(name: str) -> str:
    """What identifies a text: the hash of a file, the name of a data set; and its weight."""
    plain, weight = weighted(name)
    path = Path(plain).expanduser()
    return (file_sha256(path) if path.is_file() else plain) + ("" if weight is None else f"={weight!r}")


def _static(run: Pipeline) -> bool:
    """Whether the output has numbers of its own from the statistics: scales of inputs or of the KV cache, biases."""
    return call.has_static(build_recipe(run.recipe, path=run.recipe_file))


def _without_algorithm(content: Mapping[str, Any]) -> dict[str, Any]:
    rules = [{k: v for k, v in rule.items() if k not in ("algorithm", "weighting")} for rule in content["rules"]]
    return {**content, "rules": rules}
