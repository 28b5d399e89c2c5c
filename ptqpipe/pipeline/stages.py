"""The stages of one `convert` with ``data`` run: the inputs of each, where it writes, and their order.

Must not know how a stage works, nor how a call is checked.
"""

import json
import re
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ptqpipe._version import __version__
from ptqpipe.calibration.command import calibrate
from ptqpipe.calibration.options import CalibrateOptions, GenerateOptions
from ptqpipe.calibration.own_text import generate
from ptqpipe.calibration.rows import weighted
from ptqpipe.calibration.statistics import STATS_FILE
from ptqpipe.check.evaluate import command as evaluation
from ptqpipe.check.evaluate.eval_summary import write as write_evaluation
from ptqpipe.check.options import EvalOptions
from ptqpipe.check.report.command import make_report
from ptqpipe.check.verify.command import verify
from ptqpipe.checkpoint import FOLDING_FILE, Mode, Paths, file_sha256, has_begun, read_json_object, run_id_of
from ptqpipe.conversion import command as conversion
from ptqpipe.conversion.call_recipe import best_with
from ptqpipe.conversion.job import named_source
from ptqpipe.conversion.options import TransformOptions
from ptqpipe.conversion.prepare import prepare
from ptqpipe.conversion.transform.factors import find_factors
from ptqpipe.errors import AlreadyComplete, CheckpointError, PtqWarning, arg
from ptqpipe.models.source import Source
from ptqpipe.pipeline import validate
from ptqpipe.pipeline.budget.command import Budget, plan_mixed, write_recipe
from ptqpipe.pipeline.disk_space import codes_bytes
from ptqpipe.pipeline.ledger import Ledger
from ptqpipe.pipeline.pair_rows import pair_samples
from ptqpipe.pipeline.presets import QualityPreset, describe
from ptqpipe.pipeline.tune.command import tune
from ptqpipe.pipeline.tune.tune_options import TuneOptions
from ptqpipe.quantization.learned_codes import ROUNDING_FILE
from ptqpipe.recipe.file import build_recipe
from ptqpipe.recipe.options import PipelineOptions, RecipeOptions
from ptqpipe.run.machine import Machine, compute_threads

_TOGETHER = {"samples": ("samples", "seqlen", "seed")}  # one entry of a journal
_RENAMED = {"for": "reader"}  # since journals have been written


def _key(*options: str) -> str:
    """The entry of options in the journals and records of runs: their bytes stay, whoever runs."""
    *others, last = (f"--{name}" for name in options)
    return f"{', '.join(others)} or {last}" if others else last


def described(key: str) -> str:
    """What an entry of a journal is called in a message."""
    return re.sub(r"--(\w+)", lambda option: arg(_RENAMED.get(option[1], option[1])), key)


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
    texts     files of ``data``, and behind them the model's own text once it is written
    codes     bytes of the codes beside the output, at most
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
    preset: QualityPreset | None
    texts: list[str]
    needs_statistics: bool
    weights_bytes: int
    warnings: tuple[str, ...]
    mode: Mode
    machine: Machine
    floats: Path = field(init=False)
    begun: Path = field(init=False)
    codes_bytes: int = field(init=False)
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
            self.pair_samples = pair_samples(source, self.work)
            self.codes_bytes = codes_bytes(source, self.preset, weights_bytes=self.weights_bytes)

    @property
    def folder(self) -> Path:
        """Where the stages' outputs lie."""
        return self.begun if self.work.work_dir is None else Path(self.work.work_dir).expanduser()

    @property
    def computing(self) -> Machine:
        """The machine for stages that compute and wait for no disk."""
        return replace(self.machine, workers=min(self.machine.workers, compute_threads()))

    def _identity(self, source: Source) -> dict[str, str]:
        """What decides the bytes, by its name in a message; no folder's name is in it."""
        work, recipe = self.work, build_recipe(self.recipe, path=self.recipe_path)
        field = [] if work.text_field is None else [f"{_key('field')} {work.text_field}"]
        own = [f"{validate.SELF}={self._own_weight!r}"] if self.texts and self._own_weight is not None else []
        values = {
            "data": [*([_content(name) for name in self.texts] or work.data), *own, *field],
            "quality": work.quality,
            "budget": work.budget,
            "formats": work.formats,
            "for": work.reader,
            "samples": [work.samples, work.seqlen, work.seed],
        } | {name: True for name in ("requantize", "untie") if getattr(work, name)}
        named = {
            "the model": source.reader.fingerprint(),
            "the recipe": recipe.digest,
            "the version of ptqpipe": __version__,
        }
        return named | {_key(*_TOGETHER.get(name, (name,))): json.dumps(value) for name, value in values.items()}

    def steps(self) -> list[Step]:
        """The stages in their order."""
        preset, work = self.preset, self.work
        steps: list[Step] = []

        def add(wanted: object, name: str, words: str, run: Callable[[], None]) -> None:
            if wanted:
                steps.append(Step(name, words, run))

        add(self._own_weight is not None, "generate", "the model generates text to calibrate on", self._generate)
        words = "learn rotations from the gradients at the inputs of layers, and fold them into the weights"
        add(preset and preset.rotations, "rotate", words, self._rotate)
        statistics = self.needs_statistics and preset is not None
        add(statistics, "calibrate", "statistics of the inputs of every layer, a few kB each", self._calibrate)
        folded = f"{preset and preset.transform}: find scaling factors, and fold them into the weights"
        add(preset and preset.transform, "transform", folded, self._transform)
        add(work.budget, "plan", f"a format for every layer at {work.budget}", self._plan)
        add(
            preset and preset.method,
            "tune",
            describe(QualityPreset(method=preset.method if preset else "")),
            self._tune,
        )
        add(True, "convert", f"into {self.out}", self._convert)
        add(True, "verify", "check hashes and recorded claims of the result", self._verify)
        add(work.eval, "eval", f"KL divergence from the original model on {', '.join(work.eval)}", self._eval)
        add(work.report, "report", f"{self.beside('report.html')}", self._report)
        return steps

    def beside(self, ending: str) -> Path:
        """A file next to the output."""
        return self.out.parent / f"{self.out.name}.{ending}"

    def windows(self) -> dict[str, Any]:
        """``samples``, ``seqlen`` and ``seed`` as all stages take them."""
        return {name: getattr(self.work, name) for name in ("samples", "seqlen", "seed")}

    @property
    def _own_weight(self) -> float | None:
        return validate.own_weight(self.work.data)

    @property
    def _field(self) -> str | None:
        """Of the rows of ``data``; those that the model has written have one of their own."""
        return None if self.texts == [str(self._own_text)] else self.work.text_field

    @property
    def _own_text(self) -> Path:
        return self.folder / "own-text.jsonl"  # the name by which its perplexity is told

    @property
    def stats(self) -> Path | None:
        """The statistics of the model that is quantized, if this run makes any."""
        if not self.needs_statistics or self.preset is None:
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
            count, _ = validate.own_share(self.work.data, self.work.samples)
            options = GenerateOptions(**self.windows() | {"samples": count})
            generate(self.path, self._own_text, options=options, machine=self.computing)
        self.ledger.add(self._own_text)
        self.texts.append(f"{self._own_text}={self._own_weight!r}" if self.texts else str(self._own_text))

    def _rotate(self) -> None:
        assert self.preset is not None
        pairs, target = self.folder / "pairs", self.folder / "rotations"
        if not target.exists() or Paths.of(target).partial.exists():
            kinds = ("diagonal", "pairs")
            options = CalibrateOptions(
                **self.windows() | {"samples": self.pair_samples}, text_field=self._field, moments=kinds, holdout=0
            )
            with suppress(AlreadyComplete):
                done = calibrate(self.path, self.texts, pairs, options=options, mode="resume", machine=self.computing)
                self.notes += [] if done is None else done.notes
            self.ledger.add(pairs / STATS_FILE)
            rotation = TransformOptions(
                self.preset.rotations, dtype="fp32", learn=self.preset.steps, format=self._format, untie=self.work.untie
            )
            with suppress(AlreadyComplete):
                find_factors(self.path, target, stats=pairs, options=rotation, mode="resume", machine=self.computing)
        self.ledger.add(target / FOLDING_FILE)
        if pairs.exists() and self.work.work_dir is None:
            shutil.rmtree(pairs)
        foldings = read_json_object(target / FOLDING_FILE)["foldings"]
        self.notes += [f"warning: {line}" for line in self._gainless(foldings)]
        if foldings:
            self.floats = target

    def _gainless(self, foldings: Sequence[Mapping[str, Any]]) -> list[str]:
        """A line for each rotation that was learned and is not folded in."""
        names = self.preset.rotations.split(",") if self.preset is not None and self.preset.rotations else []
        folded = {folding["transform"] for folding in foldings if "matrices" in folding}
        why = "what was learned gains nothing on the tokens that were held out"
        return [f"{name} is left out: {why}" for name in names if name not in folded]

    def _calibrate(self) -> None:
        assert self.preset is not None
        assert self.stats is not None
        blocks = self.preset.transform and not self._scaled
        by_kl = self.work.budget is not None and self.preset.method == "gptq"  # as the codes will be chosen
        kinds = ("diagonal", *(["block"] if blocks else []), *(["kl"] if by_kl else []))
        options = CalibrateOptions(**self.windows(), text_field=self._field, moments=kinds)
        with suppress(AlreadyComplete):
            done = calibrate(
                self.floats, self.texts, self.stats, options=options, mode="resume", machine=self.computing
            )
            self.notes += [] if done is None else done.notes
        self.ledger.add(self.stats / STATS_FILE)

    def _transform(self) -> None:
        assert self.preset is not None
        assert self.stats is not None
        target = self.folder / "factors"
        options = TransformOptions(transforms=self.preset.transform, format=self._format, dtype="fp32")
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
        formats = validate.formats_for(self.work.reader, self.work.formats)
        budget = Budget.parse(str(self.work.budget))
        follows = self.preset is not None and bool(self.preset.method)
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
        assert self.preset is not None
        target = self.folder / "codes"
        with suppress(AlreadyComplete):
            done = tune(
                self.floats,
                self.texts,
                target,
                recipe=self.recipe,
                recipe_path=self.recipe_file,
                stats=self.stats if _static(self) else None,
                options=TuneOptions(**self.windows(), text_field=self._field, method=self.preset.method),
                mode="resume",
                machine=self.computing,
            )
            self.notes += done.notes
        self.ledger.add(target / ROUNDING_FILE)

    def _convert(self) -> None:
        codes = self.folder / "codes" if self.preset is not None and self.preset.method else None
        stats = self.stats if codes is None or _static(self) else None
        path = self.recipe_file if codes is None else None
        where: dict[str, Any] = {"recipe_path": path, "stats": stats, "rounding": codes}
        options = RecipeOptions() if codes is not None else best_with(self.recipe, **where)
        paths = Paths.of(self.out)
        mode: Mode = "overwrite" if self.ledger.replaces(paths.out) and not has_begun(paths) else "resume"
        where["requantize"] = self.work.requantize
        with prepare(self.floats, options=options, out=self.out, **where) as prepared:
            job = prepared.with_record_entries(self._entry(), consumes=self.work.work_dir is None)
            conversion.convert(job, mode=mode, machine=self.machine)

    def _entry(self) -> dict[str, Any]:
        """What the record says of this run; nothing where it is the one of a plain conversion."""
        if self.preset is None and self.work.budget is None:
            return {}
        identity = {"quality": self.work.quality or "best", "run": run_id_of(self.identity)}
        entry: dict[str, Any] = {"pipeline": {**identity, "budget": self.work.budget}}
        without = [] if self.preset is None else list(self.preset.without)
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
        options = EvalOptions(
            data=tuple(self.work.eval),
            text_field=self.work.text_field,
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
    return validate.has_static(build_recipe(run.recipe, path=run.recipe_file))


def _without_algorithm(content: Mapping[str, Any]) -> dict[str, Any]:
    rules = [{k: v for k, v in rule.items() if k not in ("algorithm", "objective")} for rule in content["rules"]]
    return {**content, "rules": rules}
