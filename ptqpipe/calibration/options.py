"""The options of `calibrate` and `generate`, and those about text that other commands share."""

from dataclasses import dataclass
from pathlib import Path

from ptqpipe.run.options import ComputingOptions, Options, RestartOptions, argument, option, required

FLOAT_TYPES = ("fp32", "fp64", "bf16", "fp16", "auto")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class WindowOptions(Options):
    """How many windows of text there are, how long they are in tokens, and the seed that chooses them."""

    samples: int = option(128, "Windows of text that the model runs on.", metavar="N")
    seqlen: int | None = option(
        None, "Tokens in each window.", metavar="N", shown="256; 2048 with images; at most the model's positions"
    )
    seed: int = option(0, "Seed that chooses the windows.", metavar="N")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class TextOptions(WindowOptions):
    """The text that windows come from."""

    data: tuple[str, ...] = option(
        (),
        "Text like what the model will serve: .txt, .jsonl, .json, .csv, .parquet, or a data set NAME:CONFIG:SPLIT. "
        "Repeatable; FILE=2 gives it the weight 2.",
        metavar="FILE",
        shown="required",
    )
    text_field: str | None = option(
        None,
        "Field with the text in each row of {data}.",
        metavar="NAME",
        shown="messages, text, content, prompt, ...",
    )


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class CalibrateOptions(TextOptions):
    """What decides the statistics, besides the model."""

    holdout: int | None = option(
        None,
        "Held-out windows, on which convert compares its result with plain rounding; they double the size of the "
        "moments.",
        metavar="N",
        shown="samples / 8",
    )
    moments: tuple[str, ...] = option(
        ("diagonal", "full"),
        "Second moments of the inputs to collect, with commas: diagonal, block (16x16), full. GPTQ, the default of "
        "convert {stats}, needs full, which takes 4 bytes for every pair of a layer's inputs, twice with held-out "
        "windows. diagonal,block is small and enough for convert {algorithm} rtn. kl adds a backward pass: plan then "
        "minimizes KL divergence, and so does convert {stats} if full is collected, too. pairs adds a backward pass "
        "that stores inputs and gradients of some tokens, for transform {learn}.",
        metavar="KINDS",
        kind="names",
    )
    dtype: str = option(
        "float32",
        "Float type that the model computes in; auto is the checkpoint's own.",
        kind="dtype",
        choices=FLOAT_TYPES,
    )


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class CalibrateCommand(CalibrateOptions, ComputingOptions, RestartOptions):
    """The options of `calibrate`."""

    model: str = argument()
    out: Path = required("Folder of statistics to write.", short="-o")
    device: str = option(
        "cpu",
        "Device that computes: cpu, cuda:N, cuda (all GPUs share the samples; under torchrun one GPU per rank), auto.",
        metavar="DEVICE",
    )


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class GenerateOptions(WindowOptions):
    """Which text a model writes. Windows take turns in several temperatures and lengths; several texts fill a window.

    prompts  files, or data sets by name, with rows that texts begin with: of each at most half of a text
    """

    samples: int = option(
        128,
        "Windows of text to calibrate on; one more is written for every 8 of them, which calibrate holds out.",
        metavar="N",
    )
    seed: int = option(0, "Seed of the random draws.", metavar="N")
    temperature: tuple[float, ...] = option(
        (1.0,),
        "Sampling temperature, up to 2. Repeatable: windows alternate between the values.",
        metavar="X",
        shown="1",
    )
    length: tuple[int, ...] = option(
        (),
        "Tokens in each text; several texts fill a window. Repeatable: windows alternate between the values.",
        metavar="N",
        shown="a window",
    )
    prompts: tuple[str, ...] = option(
        (),
        "Prompts that the texts begin with: each a row of the file, as {data} reads it, cut to half of {length}. "
        "Repeatable.",
        metavar="FILE",
        shown="one random token",
    )
    dtype: str = option(
        "float32",
        "Float type that the model computes in; auto is the checkpoint's own.",
        kind="dtype",
        choices=("fp32", "bf16", "fp16", "auto"),
    )


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class GenerateCommand(GenerateOptions, ComputingOptions):
    """The options of `generate`. An own ``max_memory`` it has not: a batch of windows is all that it holds."""

    model: str = argument()
    out: Path = required("File of token ids to write (.jsonl).", short="-o")
    overwrite: bool = option(False, "Replace an existing file.")
