"""The options of a conversion: those that decide bytes, which recipes have as keys, and those of its stages.

A line of `CodeOptions` or `CheckpointOptions` says everything about an option (`run/options.py`); `RecipeOptions` are
the same options as a call states them.
"""

from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from ptqpipe.errors import RecipeError
from ptqpipe.run.options import Options, check_names, check_value, described, option, options_of


class Algorithm(NamedTuple):
    """A row of `ALGORITHMS`: a way to choose codes, described without loading it.

    module     its file, which has a function ``quantize(task)``; see ``ptqpipe/quantization/__init__.py``
    moment     the moment of the inputs that it needs from statistics; empty: none
    objective  what the block scales minimize unless the call or the recipe says so
    options    fields of `CodeOptions` that it alone reads
    """

    module: str
    moment: str = ""
    objective: str = "none"
    options: tuple[str, ...] = ()


# What a recipe can name, the better after the worse: with statistics, convert takes the last whose moment is there.
ALGORITHMS: dict[str, Algorithm] = {
    "rtn": Algorithm("ptqpipe.quantization.rtn"),
    "gptq": Algorithm(
        "ptqpipe.quantization.gptq",
        moment="full_moment",
        objective="diagonal",
        options=("damping", "order", "scales", "refine_passes"),
    ),
}

# The search of block scales where neither the call nor the recipe names one and no data weighs them, by format: what
# measured the least divergence (docs/search.md). Formats that are not here: exact.
SEARCHES = {"mxfp4": "enlarged"}
AUTO = "auto"

# What the scales minimize without data, by format: for FP8 and MXFP8 it makes no difference
# (labs/propagated/NOTES.md).
PROPAGATED = "propagated"
OBJECTIVES = {"nvfp4": PROPAGATED, "mxfp4": PROPAGATED}
_DATA_FREE = (AUTO, "none", PROPAGATED)
DAMPING = 0.01  # of a second moment, as a fraction of its mean diagonal

# The largest activation that must not clip where neither statistics nor the call or recipe say it, by what happens to
# activations (labs/input_scale_grid/NOTES.md). NVFP4 rounds the largest value of each block to
# E4M3, FP8 every value: what is far below the largest activation costs FP8 more, so NVFP4 has more room above.
INPUT_AMAX = {"nvfp4": 2928.0, "fp8_static": 336.0}


@dataclass(frozen=True, kw_only=True)
class CodeOptions:
    """Options for the codes of weights. A rule of a recipe is these and a pattern of modules."""

    scale_search: str = option(
        AUTO,
        "Search of the block scales: enlarged, exact, absmax, ...; `ptqpipe formats` lists all.",
        metavar="NAME",
        shown="enlarged for MXFP4 without data, else exact",
    )
    global_scale: str = option(
        "search",
        "Search the global scale of formats that have one, or take the one of the largest weight.",
        choices=("search", "absmax"),
    )
    algorithm: str = option(
        "rtn",
        "How codes are chosen with {stats}: rtn rounds to nearest, gptq feeds back the error of earlier columns.",
        choices=ALGORITHMS,
        shown="gptq; rtn where calibrate left out the full moments",
    )
    objective: str = option(
        AUTO,
        "What the block scales minimize: the error of the weights (none), the output error by the input energies that "
        "the weights of the layers before let expect (propagated), with {stats} by the second moment of each input "
        "(diagonal) or by the moments inside blocks of 16 inputs (block).",
        choices=(AUTO, "none", PROPAGATED, "diagonal", "block"),
        shown="diagonal with statistics, else propagated for NVFP4 and MXFP4, none for other formats",
    )
    damping: float = option(
        DAMPING,
        "For {algorithm} gptq: what is added to the second moment of each input, as a fraction of their mean.",
        metavar="D",
        bounds=(0, 10),
        usual=f"the usual is {DAMPING}",
    )
    order: str = option("static", choices=("static", "none"))
    scales: str = option("auto", choices=("auto", "first", "entry"))
    refine_passes: int = option(
        3,
        "For {algorithm} gptq: passes of coordinate descent over scales and codes after GPTQ's error feedback; at most "
        "one with statistics of calibrate {moments} kl.",
        metavar="N",
        bounds=(0, 1000),
        usual="passes",
    )

    def search_for(self, fmt: str) -> str:
        """The search of the block scales for a format by its name: the one that is given, or what `SEARCHES` says."""
        if self.scale_search != AUTO:
            return self.scale_search
        return "exact" if self.moments else SEARCHES.get(fmt, "exact")

    @property
    def propagates(self) -> bool:
        """Whether the scales are weighted by what the weights let expect of the inputs."""
        return self.objective == PROPAGATED

    @property
    def moments(self) -> tuple[str, ...]:
        """The moments of each input that choosing the codes reads; none without statistics."""
        needed = ALGORITHMS[self.algorithm].moment
        if not needed and self.objective in _DATA_FREE:
            return ()
        block = ("block_moment",) if self.objective == "block" and needed != "full_moment" else ()
        return tuple(dict.fromkeys(("second_moment", *([needed] if needed else []), *block)))


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions:
    """Options for a whole checkpoint. A recipe is these and its rules."""

    container: str | None = option(
        None,
        "Layout of the files: compressed_tensors, modelopt, deepseek_fp8, gptoss_mxfp4, mxfp8_hf or ptqpipe.",
        metavar="NAME",
        shown="the one that readers of the format expect",
    )
    input_amax: float | None = option(
        None,
        "Largest activation that must not clip, for formats with static activation scales and no {stats}.",
        metavar="A",
        shown=f"{INPUT_AMAX['nvfp4']:g} for NVFP4, {INPUT_AMAX['fp8_static']:g} for FP8",
    )
    input_scale: str = option(
        "absmax",
        "Which activation seen by calibration sets a static activation scale: the largest, the 99.99 % quantile, or "
        "the one of the least squared error. Needs {stats}.",
        choices=("absmax", "percentile", "mse"),
    )
    headroom: float = option(
        1.0,
        "Multiply the calibrated activation maximum by F before deriving a static activation scale. Needs {stats}.",
        metavar="F",
        bounds=(0.1, 1000),
        usual="1: none",
    )
    kv_cache: str = option(
        "none",
        "Store scales for an FP8 key-value cache, one for each layer or one for each head. Needs {stats} or {data}.",
        choices=("none", "fp8", "fp8_per_head"),
    )
    bias_correction: bool = option(
        False, "Change biases so that the mean output of each layer stays what it was. Needs {stats} or {data}."
    )
    rotate: str | None = option(
        None,
        "Rotate the inputs of these layers by Hadamard blocks of BLOCK columns while the model runs, such as "
        "down_proj:64; their weights are rotated to match. Besides ptqpipe only vLLM runs this, on one GPU.",
        metavar="ROLE:BLOCK,...",
        shown="none",
    )
    mtp: str = option(
        "keep",
        "Format of multi-token prediction layers, which serve speculative decoding: unchanged (keep), or their experts "
        "and projections in FP8 or NVFP4.",
        choices=("keep", "fp8", "nvfp4"),
    )
    shard_size: int | None = option(
        None,
        "Size of the largest weight file.",
        kind="size",
        shown="about 1/32 of all, 256MiB to 4GiB",
    )


@dataclass(frozen=True, kw_only=True)
class PipelineOptions(Options):
    """Options of a pipeline run of `convert`: calibrate on text, keep to a budget, fit a reader, measure."""

    data: tuple[str, ...] = option(
        (),
        "Text to calibrate on, like what the model will serve: .txt, .jsonl, .json, .csv, .parquet, a folder, a data "
        "set NAME:CONFIG:SPLIT, or self for text that the model generates. Repeatable; FILE=2 gives a file the weight "
        "2, and self gets as many windows as all files together.",
        metavar="FILE|DIR|NAME|self",
    )
    text_field: str | None = option(
        None,
        "Field with the text in each row of {data} and {eval}.",
        metavar="NAME",
        shown="messages, text, content, prompt, ...",
    )
    quality: str | None = option(
        None,
        "How much is computed with {data}: scales only (fast), GPTQ on each layer independently (good), or the method "
        "that measured best for the format (best).",
        choices=("fast", "good", "best"),
        shown="best",
    )
    budget: str | None = option(
        None,
        "Choose a format for every layer so that the weights have this many bits on average, or this size on disk.",
        metavar="4.75bits|9GB",
    )
    formats: tuple[str, ...] | None = option(
        None,
        "Formats to choose from under {budget}, with commas.",
        metavar="A,B,...",
        kind="names",
        shown="nvfp4,mxfp4a16,mxfp8a16,fp8_dynamic,keep, as far as the reader runs them",
    )
    reader: str | None = option(
        None,
        "Program that will load the result: chooses the container, and refuses formats that it does not run.",
        choices=("vllm", "sglang", "trtllm", "transformers"),
    )
    requantize: bool = option(
        False,
        "Quantize again the weights that MODEL already stores below 8 bits, even to a format that cannot hold all of "
        "their numbers; that can only add error.",
    )
    untie: bool = option(
        False,
        "Store an output head that is tied to the embedding as a separate tensor, so that {quality} best can rotate "
        "the residual stream, too: usually less loss with quantized activations, for that tensor's size more on disk.",
    )
    eval: tuple[str, ...] = option(
        (),
        "Text on which the result is compared with MODEL at the end, into OUT.eval.json: a file, a folder of them, or "
        "a data set NAME:CONFIG:SPLIT. Repeatable.",
        metavar="TEXT",
    )
    report: bool = option(False, "Write OUT.report.html at the end.")
    samples: int = option(128, "Windows of {data} that the model runs on.", metavar="N")
    seqlen: int | None = option(
        None,
        "Tokens in each window of {data}.",
        metavar="N",
        shown="256; 2048 with images; at most the model's positions",
    )
    seed: int = option(0, "Seed that chooses the windows of {data}.", metavar="N")
    work_dir: Path | None = option(
        None, "Folder that keeps intermediate results: statistics, codes, generated text.", metavar="DIR"
    )

    @property
    def stage_option(self) -> str | None:
        """The first option by which the call needs the multi-stage pipeline; None where it needs none."""
        own = (one for one in fields(PipelineOptions) if one.name not in ("reader", "requantize"))
        return next((one.name for one in own if getattr(self, one.name) != one.default), None)

    @property
    def has_stages(self) -> bool:
        """Whether the call needs the multi-stage pipeline."""
        return self.stage_option is not None


def check_options(options: Any) -> None:
    """RecipeError for a field of a rule or a recipe that is none of its choices or out of its bounds."""
    for one in fields(options):
        check_value(one.name, getattr(options, one.name), described(one), RecipeError)


@dataclass(frozen=True, init=False)
class RecipeOptions(CodeOptions, CheckpointOptions, Options):
    """The options of a call that decide bytes: each that it states overrides the recipe.

    stated  names of those that the call states; the others have their defaults, or what the recipe says
    """

    format: str | None = option(
        None,
        "Number format: nvfp4, nvfp4_w4a4, mxfp4, mxfp8, fp8, fp8_block, ...; `ptqpipe formats` lists all.",
        metavar="NAME",
        shown="nvfp4",
    )
    ignore: tuple[str, ...] = option(
        (),
        "Leave these modules unquantized, whatever a recipe says: a name, a glob, re:<regex>. Repeatable.",
        metavar="PATTERN",
    )
    stated: frozenset[str] = frozenset()

    def __init__(self, format: str | None = None, ignore: Collection[str] = (), **options: Any) -> None:
        """UsageError for a name that is no option. None and False are what an option is that a call does not state."""
        names = [one.name for one in options_of(RecipeOptions)]
        check_names(options, names, what="convert")
        stated = {name: value for name, value in options.items() if value is not None and value is not False}
        for one in fields(RecipeOptions):
            object.__setattr__(self, one.name, stated.get(one.name, one.default))
        for name, value in (("format", format), ("ignore", tuple(ignore)), ("stated", frozenset(stated))):
            object.__setattr__(self, name, value)

    @property
    def overrides(self) -> dict[str, Any]:
        """The options of rules and recipes that the call states, by name."""
        names = (one.name for table in (CodeOptions, CheckpointOptions) for one in fields(table))
        return {name: getattr(self, name) for name in names if name in self.stated}

    def but(self, **options: Any) -> "RecipeOptions":
        """These options with others on top."""
        return RecipeOptions(self.format, self.ignore, **{**self.overrides, **options})


def recipe_path(name: str | Path | None) -> Path | None:
    """The recipe that a call names, a path even where it is a name. ``./NAME`` becomes absolute: `Path` drops the
    ``./``, which says that a file is meant and no recipe that comes with ptqpipe."""
    if name is None:
        return None
    path = Path(name)
    return path.absolute() if str(name).startswith("./") else path
