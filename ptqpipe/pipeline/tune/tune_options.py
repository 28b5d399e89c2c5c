"""What tune can be told besides model, recipe and data."""

from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

from ptqpipe.errors import UsageError, arg


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
SHARE = 0.5


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


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """The options that decide the codes, besides model, recipe and data.

    seqlen    None: 2048, or the model's positions
    method    of METHODS: what finds the codes
    metric    of METRICS: what an error costs. "kl": what it adds to the KL divergence of the model, to second order, by
              the gradients of a reverse pass; "output": its square at the layer's output. None: the method's usual one
    share     fraction of the error of earlier layers that each layer compensates for, 0 to 1, of methods that follow
    train     of TRAIN, under "kl": tensors that stay floats, and global scales, that descent changes after the codes
    settings  of gradient descent; its share of held-out samples counts for every method
    """

    samples: int = 128
    seqlen: int | None = None
    seed: int = 0
    data_field: str | None = None
    method: str = "gptq"
    metric: str | None = None
    share: float = SHARE
    train: tuple[str, ...] = ()
    settings: Settings = field(default_factory=Settings)

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


def settings_of(steps: int | None, *, seed: int) -> Settings:
    """The settings with this many steps, the usual number for None. UsageError for fewer than one."""
    if steps is not None and steps < 1:
        raise UsageError(f"{arg('steps', steps)} is too few; use 1 or more")
    return Settings(seed=seed) if steps is None else Settings(steps=steps, seed=seed)


def check(options: TuneOptions) -> None:
    """UsageError for a method or a metric that there is not, and for a share out of range."""
    if options.method not in METHODS:
        raise UsageError(f"{arg('method', options.method)} is unknown; use {', '.join(METHODS)}")
    if options.metric not in (None, *METRICS):
        raise UsageError(f"{arg('metric', options.metric)} is unknown; use {', '.join(METRICS)}")
    unknown = [kind for kind in options.train if kind not in TRAIN]
    if unknown:
        raise UsageError(f"{arg('train', unknown[0])} is unknown; use {', '.join(TRAIN)}, with commas")
    if options.train and options.descent is None:
        raise UsageError(f"{arg('train')} belongs to {arg('method', 'kl')}; add it, or leave {arg('train')} out")
    if not 0.0 <= options.share <= 1.0:
        raise UsageError(
            f"{arg('feedback', options.share)} is out of range; use 0 (no compensation) to 1 (full compensation)"
        )
