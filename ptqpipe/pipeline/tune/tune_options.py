"""What tune can be told besides model, recipe and data."""

from dataclasses import dataclass, field, replace

from ptqpipe.calibration.rounding import Settings
from ptqpipe.errors import UsageError

METRICS = ("kl", "output")
METHODS = ("gptq", "kl", "layerwise", "gptq+learned", "learned")
GLOBAL = "global"
TRAIN = ("head", "embeddings", "norms", "biases", GLOBAL)
SHARE = 0.5
END_TO_END = Settings(steps=100, rate=0.0015)
FOUR_BIT_RATE = 0.01  # under "kl" where inputs have 4 bits: at END_TO_END's, too few codes move to make up for these


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """The options that decide the codes, besides model, recipe and data.

    seqlen    None: 2048, or the model's positions
    method    of METHODS: what finds the codes. "gptq" goes through the linear layers in the order of the model,
              "layerwise" is GPTQ of each by itself, on the inputs of the float model; "learned" is gradient descent
              on the output of each decoder layer, "kl" that on the KL divergence of the model, after "gptq"
    metric    of METRICS, under "gptq", "layerwise" and "kl": what an error costs. "kl": what it adds to the KL
              divergence of the model, to second order, by the gradients of a reverse pass; "output": its square at the
              layer's output. None: "kl" where the method is "gptq" alone or "kl"
    share     fraction of the error of earlier layers that each layer compensates for under "gptq" and "kl": 0 to 1
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
        usual = "kl" if self.method in ("gptq", "kl") else "output"
        return self.method in ("gptq", "layerwise", "kl") and (self.metric or usual) == "kl"

    @property
    def follows(self) -> bool:
        """Whether GPTQ goes through the layers in the order of the model."""
        return "gptq" in self.method or self.method == "kl"


def settings_of(steps: int | None, *, method: str, seed: int) -> Settings:
    """The settings of a method, with its usual number of steps for None. UsageError for fewer than one."""
    usual = END_TO_END if method == "kl" else Settings()
    if steps is not None and steps < 1:
        raise UsageError(f"--steps {steps} is too few; use 1 or more")
    return replace(usual, steps=usual.steps if steps is None else steps, seed=seed)


def check(options: TuneOptions) -> None:
    """UsageError for a method or a metric that there is not, and for a share out of range."""
    if options.method not in METHODS:
        raise UsageError(f"--method {options.method!r} is unknown; use {', '.join(METHODS)}")
    if options.metric not in (None, *METRICS):
        raise UsageError(f"--metric {options.metric!r} is unknown; use {', '.join(METRICS)}")
    if options.metric == "kl" and not options.by_kl:
        raise UsageError("--metric kl belongs to --method gptq, layerwise and kl; leave it out, or use one of them")
    unknown = [kind for kind in options.train if kind not in TRAIN]
    if unknown:
        raise UsageError(f"--train {unknown[0]!r} is unknown; use {', '.join(TRAIN)}, with commas")
    if options.train and options.method != "kl":
        raise UsageError("--train belongs to --method kl; add it, or leave --train out")
    if not 0.0 <= options.share <= 1.0:
        raise UsageError(f"--share {options.share} is out of range; use 0 (no compensation) to 1 (full compensation)")
