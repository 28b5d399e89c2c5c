"""The options of `convert`, `tune`, `plan` and `demo`."""

from dataclasses import dataclass
from pathlib import Path

from ptqpipe.errors import UsageError, arg
from ptqpipe.recipe.options import PipelineOptions, RecipeOptions
from ptqpipe.run.options import (
    ComputingOptions,
    MachineOptions,
    Options,
    WritingOptions,
    argument,
    option,
    required,
    same_option,
)

STATS = "Folder of statistics that `ptqpipe calibrate` wrote."
RECIPE = "A recipe, instead of {format}: one that `ptqpipe recipes` lists, or a YAML file."


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ConvertCommand(RecipeOptions, PipelineOptions, WritingOptions):
    """The options of `convert`."""

    model: str = argument()
    out: Path | None = option(None, "Folder to write.", short="-o", shown="<model>-<FORMAT>")
    recipe: Path | None = option(None, RECIPE, metavar="NAME|FILE", kind="recipe")
    stats: Path | None = option(None, STATS, metavar="DIR")
    codes: Path | None = option(
        None,
        "Folder of codes that `ptqpipe tune` learned. They bring their format, container and ignored modules along.",
        metavar="DIR",
    )
    push: str | None = option(None, "Repository on the hub to which the result is uploaded.", metavar="OWNER/NAME")
    device: str = same_option(ComputingOptions, "device")
    dry_run: bool = option(False, "Print what would be done and the exact size; read and write no weights.", shell=True)

    def __post_init__(self) -> None:
        names = ("stats", "codes", "dry_run") if self.has_stages else ()
        alone = next((name for name in names if getattr(self, name)), None)
        if alone is not None:
            other = arg(str(self.stage_option))
            raise UsageError(f"{arg(alone)} is for a conversion alone, and {other} for one with data; leave one out")

    @property
    def recipe_options(self) -> RecipeOptions:
        """Those that decide bytes, without the recipe."""
        return self.but()


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class PlanCommand(MachineOptions):
    """The options of `plan`."""

    model: str = argument()
    budget: str = required("Bits per weight, or the size of all weights on disk.", metavar="4.75bits|9GB")
    formats: tuple[str, ...] | None = same_option(PipelineOptions, "formats")
    reader: str | None = same_option(PipelineOptions, "reader")
    stats: Path | None = option(
        None,
        f"{STATS} The sensitivity of a layer is then the KL divergence that its error adds (with calibrate {{moments}} "
        "kl), or else its output error.",
        metavar="DIR",
    )
    measure: Path | None = option(
        None, "Text on which the KL divergence of each layer is measured as its sensitivity.", metavar="FILE"
    )
    max_tokens: int | None = option(None, "Tokens of the {measure} text to use.", metavar="N", shown="4096")
    seqlen: int | None = option(
        None,
        "Tokens in each window of the {measure} text.",
        metavar="N",
        shown="the model's positions, at most 2048",
    )
    out: Path = required("Recipe file to write.", short="-o")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class DemoCommand(Options):
    """The options of `demo`."""

    out: Path = option(Path("ptqpipe-demo"), "Folder for the checkpoints.", short="-o")
