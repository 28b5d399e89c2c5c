"""A run of `convert` with ``data``, a budget or an evaluation, as it is decided: what it reads, and where it writes."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ptqpipe._version import __version__
from ptqpipe.calibration.rows import weighted
from ptqpipe.checkpoint import Mode, Paths, file_sha256
from ptqpipe.errors import arg
from ptqpipe.models.source import Source
from ptqpipe.pipeline import validate
from ptqpipe.pipeline.disk_space import codes_bytes
from ptqpipe.pipeline.ledger import Ledger
from ptqpipe.pipeline.presets import QualityPreset
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
            self.codes_bytes = codes_bytes(source, self.preset, weights_bytes=self.weights_bytes)

    @property
    def folder(self) -> Path:
        return self.begun if self.work.work_dir is None else Path(self.work.work_dir).expanduser()

    @property
    def computing(self) -> Machine:
        """The machine for stages that compute and wait for no disk."""
        return replace(self.machine, workers=min(self.machine.workers, compute_threads()))

    def _identity(self, source: Source) -> dict[str, str]:
        """What decides the bytes, by its name in a message; no folder's name is in it."""
        work, recipe = self.work, build_recipe(self.recipe, path=self.recipe_path)
        field = [] if work.text_field is None else [f"{_key('field')} {work.text_field}"]
        own = [f"{validate.SELF}={self.own_weight!r}"] if self.texts and self.own_weight is not None else []
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

    def beside(self, ending: str) -> Path:
        return self.out.parent / f"{self.out.name}.{ending}"

    def windows(self) -> dict[str, Any]:
        """``samples``, ``seqlen`` and ``seed`` as all stages take them."""
        return {name: getattr(self.work, name) for name in ("samples", "seqlen", "seed")}

    @property
    def own_weight(self) -> float | None:
        return validate.own_weight(self.work.data)

    @property
    def field_of_rows(self) -> str | None:
        """Of the rows of ``data``; those that the model has written have one of their own."""
        return None if self.texts == [str(self.own_text)] else self.work.text_field

    @property
    def own_text(self) -> Path:
        return self.folder / "own-text.jsonl"  # the name by which its perplexity is told

    @property
    def stats(self) -> Path | None:
        """The statistics of the model that is quantized, if this run makes any."""
        if not self.needs_statistics or self.preset is None:
            return None
        return self.folder / ("statistics-transformed" if self.scaled else "statistics")

    @property
    def scaled(self) -> bool:
        """Whether the factors of the transform are in what is quantized."""
        return self.floats == self.folder / "factors"

    @property
    def format(self) -> str:
        """The one that what is folded in is made for."""
        return build_recipe(self.recipe, path=self.recipe_path).schemes()[0].name

    @property
    def static(self) -> bool:
        """Whether the output has numbers from the statistics: scales of inputs or of the KV cache, biases."""
        return validate.has_static(build_recipe(self.recipe, path=self.recipe_file))

    @property
    def recipe_file(self) -> Path | None:
        """The recipe file: the call's, or the one that was planned."""
        return self.folder / "recipe.yaml" if self.work.budget is not None else self.recipe_path

    def gainless(self, foldings: Sequence[Mapping[str, Any]]) -> list[str]:
        """A line for each rotation that was learned and is not folded in."""
        names = self.preset.rotations.split(",") if self.preset is not None and self.preset.rotations else []
        folded = {folding["transform"] for folding in foldings if "matrices" in folding}
        why = "what was learned gains nothing on the tokens that were held out"
        return [f"{name} is left out: {why}" for name in names if name not in folded]


def _content(name: str) -> str:
    """What identifies a text: the hash of a file, the name of a data set; and its weight."""
    plain, weight = weighted(name)
    path = Path(plain).expanduser()
    return (file_sha256(path) if path.is_file() else plain) + ("" if weight is None else f"={weight!r}")
