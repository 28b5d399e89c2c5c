"""The options of `tune`, and its methods."""

from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from ptqpipe.calibration.options import TextOptions
from ptqpipe.errors import UsageError, arg
from ptqpipe.pipeline.options import RECIPE, STATS
from ptqpipe.recipe.options import RecipeOptions
from ptqpipe.run.options import ComputingOptions, RestartOptions, argument, option, required, same_option


class Method(NamedTuple):
    """A row of `METHODS`.

    follows  whether GPTQ goes through the linear layers in the order of the model, on the outputs of the quantized ones
             before each; otherwise each is done by itself, on the inputs of the float model
    metric   the usual one, of `METRICS`
    descent  package that goes on from the codes of all layers, with the functions of ``kl/__init__.py``; empty: none
    """

    follows: bool
    metric: str
    descent: str = ""


METHODS = {
    "gptq": Method(follows=True, metric="kl"),
    "kl": Method(follows=True, metric="kl", descent="ptqpipe.pipeline.tune.kl"),
    "layerwise": Method(follows=False, metric="output"),
}
METRICS = ("kl", "output")
GLOBAL = "global"
TRAIN = ("head", "embeddings", "norms", "biases", GLOBAL)


@dataclass(frozen=True, slots=True)
class Settings:
    """How long and how carefully.

    steps     of gradient descent
    rate      how far a step moves, at first, what chooses between two codes
    windows   samples in one step
    held_out  share of the batches that decide whether what was found is kept, of every method
    seed      of the order of the samples
    """

    steps: int = 100
    rate: float = 0.0015
    windows: int = 8
    held_out: float = 0.125
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class TuneOptions(TextOptions):
    """The options that decide the codes, besides model and recipe.

    settings  of gradient descent, but for ``steps`` and ``seed``; its share of held-out samples counts for every method
    """

    samples: int = option(128, "Windows of text to learn from.", metavar="N")
    seed: int = option(0, "Seed that chooses the windows and their order.", metavar="N")
    method: str = option(
        "gptq",
        "How codes, the quantized values, are found: by GPTQ in the order of the model, each layer compensating for "
        "the error of earlier layers (gptq), by that and then gradient descent on the KL divergence of the whole "
        "model, held in memory (kl), or by GPTQ on each layer independently, in half the time (layerwise).",
        choices=METHODS,
    )
    metric: str | None = option(
        None,
        "Objective of GPTQ: the KL divergence of the model, estimated with gradients from a backward pass (kl), or "
        "the squared error of each layer's output, in half of the time (output).",
        choices=METRICS,
        shown="kl; of layerwise, output",
    )
    feedback: float = option(
        0.5,
        "Fraction of the error of earlier layers that each layer compensates for, 0 to 1; for {method} gptq and kl.",
        metavar="F",
        bounds=(0, 1),
        usual="1: full compensation",
    )
    steps: int | None = option(
        None, "Steps of gradient descent, for {method} kl.", metavar="N", bounds=(1, 1_000_000), shown="100"
    )
    train: tuple[str, ...] = option(
        (),
        "After the codes, also train tensors that stay float, with commas: head, embeddings, norms, biases, and "
        "global for the global scales; for {method} kl. The record, ptqpipe.json, lists the trained tensors.",
        metavar="KINDS",
        kind="names",
        choices=TRAIN,
        shown="none",
    )
    settings: Settings = field(default_factory=Settings)

    def __post_init__(self) -> None:
        settings = replace(self.settings, seed=self.seed, steps=self.steps or self.settings.steps)
        object.__setattr__(self, "settings", settings)

    @property
    def by_kl(self) -> bool:
        """Whether errors cost what they add to the model's KL divergence."""
        return (self.metric or METHODS[self.method].metric) == "kl"

    @property
    def follows(self) -> bool:
        """Whether GPTQ goes through the layers in the order of the model."""
        return METHODS[self.method].follows

    @property
    def descent(self) -> ModuleType | None:
        """The package that goes on from the codes of all layers."""
        package = METHODS[self.method].descent
        return import_module(package) if package else None


def check(options: TuneOptions) -> None:
    """UsageError for a value that an option cannot have, and for an option that the method does not read."""
    options.check()
    for name, needed in (("train", options.train), ("steps", options.steps)):
        if needed and options.descent is None:
            raise UsageError(f"{arg(name)} belongs to {arg('method', 'kl')}; add it, or leave {arg(name)} out")
    if options.feedback != TuneOptions.feedback and not options.follows:
        raise UsageError(
            f"{arg('feedback')} belongs to {arg('method')} gptq and kl; add it, or leave {arg('feedback')} out"
        )


@dataclass(frozen=True, kw_only=True)
class TuneCommand(TuneOptions, ComputingOptions, RestartOptions):
    """The options of `tune`."""

    model: str = argument()
    format: str | None = same_option(RecipeOptions, "format")
    ignore: tuple[str, ...] = same_option(RecipeOptions, "ignore")
    recipe: Path | None = option(None, RECIPE, metavar="NAME|FILE", kind="recipe")
    stats: Path | None = option(None, STATS, metavar="DIR")
    container: str | None = same_option(RecipeOptions, "container")
    rotate: str | None = same_option(RecipeOptions, "rotate")
    out: Path = required("Folder of codes to write.", short="-o")

    @property
    def recipe_options(self) -> RecipeOptions:
        """Those that decide bytes of the checkpoint that the codes are for."""
        return RecipeOptions(self.format, self.ignore, container=self.container, rotate=self.rotate)
