"""The options of `verify`, `inspect`, `diff`, `eval` and `report`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ptqpipe.calibration.options import TextOptions
from ptqpipe.errors import UsageError, arg
from ptqpipe.run.options import ComputingOptions, Options, argument, option, same_option

CACHE_BYTES = 16 << 30  # of a baseline's log-probabilities that are kept


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class VerifyCommand(Options):
    """The options of `verify`."""

    ckpt: Path = argument(kind="model")
    source: Path | None = option(None, "The model that CKPT was made from.", metavar="MODEL", kind="model")
    stats: Path | None = option(None, "The statistics that CKPT was made with, if there were any.", metavar="DIR")
    optimal: bool = option(False, "Prove again, by brute force on a sample of blocks, that block scales are optimal.")
    all_blocks: bool = option(False, "Let {optimal} prove every block instead of a sample.")
    all_faults: bool = option(False, "List every fault instead of the first few.", shell=True)

    def __post_init__(self) -> None:
        if self.all_blocks and not self.optimal:
            raise UsageError(
                f"{arg('all_blocks')} says how many blocks {arg('optimal')} proves; add {arg('optimal', True)}"
            )
        if self.stats is not None and self.source is None:
            raise UsageError(
                f"{arg('stats')} needs {arg('source')}: with both the weights are quantized again; add {arg('source')}"
            )


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class InspectCommand(Options):
    """The options of `inspect`."""

    ckpt: Path = argument(kind="model")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class DiffCommand(Options):
    """The options of `diff`."""

    a: Path = argument(kind="model")
    b: Path = argument(kind="model")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class EvalOptions(Options):
    """What is measured, and how.

    data       texts: files, folders of them, data sets by name; the package's sample for neither data nor tasks
    tasks      lm-eval's or local ones; with `task_data`, `include_path`, `limit` and `batch_size` as ``TaskRequest``
    cache_dir  None: nothing is kept
    samples    beginnings of the first text that both models continue, for a report
    command    the call that is recorded with the result
    """

    data: tuple[str, ...] = option(
        (),
        "Text to score: .txt, .jsonl, .json, .csv or .parquet files, a folder of them, or a data set of the datasets "
        "library. Repeatable.",
        metavar="FILE|DIR|NAME:CONFIG:SPLIT",
        shown="a sample text of 110 kB",
    )
    pairs: tuple[Path, ...] = option(
        (),
        "Of a sentence embedder: pairs of sentences to compare its embeddings on, two with a tab between them a line, "
        "or .jsonl with two fields. Repeatable.",
        metavar="FILE",
        kind="file",
        shown="up to 2,000 pairs of sentences of {data}",
    )
    text_field: str | None = same_option(TextOptions, "text_field")
    seqlen: int | None = option(
        None, "Tokens in each window.", metavar="N", shown="the model's positions, at most 2048"
    )
    stride: int | None = option(None, "Tokens from the start of a window to the next.", metavar="N", shown="{seqlen}")
    max_tokens: int | None = option(None, "Tokens of each text to use, from its beginning.", metavar="N")
    tasks: tuple[str, ...] = option(
        (),
        "Tasks of lm-eval to run, with commas; local_piqa, local_lambada, ... read the files in {task_data}.",
        metavar="A,B",
        kind="names",
    )
    task_data: Path | None = option(None, "Folder with the files of the local_ tasks.", metavar="DIR")
    include_path: Path | None = option(None, "Folder of further task files (YAML) for lm-eval.", metavar="DIR")
    limit: int | None = option(None, "Samples of each task to use, from its beginning.", metavar="N")
    batch_size: int = option(8, "Batch size for {tasks}.", metavar="N")
    dtype: str = option(
        "float32",
        "Float type that both models compute in; auto is the checkpoint's own.",
        kind="dtype",
        choices=("fp32", "bf16", "fp16", "auto"),
    )
    device: str = same_option(ComputingOptions, "device")
    activations: Literal["simulated", "none"] = option(
        "simulated",
        "Quantize activations as the format of the checkpoint says, or leave them.",
        choices=("simulated", "none"),
    )
    cache_dir: Path | None = option(
        None,
        "Folder that keeps the log-probabilities of {source} for later runs.",
        metavar="DIR",
        shown="~/.cache/ptqpipe",
    )
    cache_size: int = option(CACHE_BYTES, "Limit of {cache_dir}; 0 keeps nothing.", kind="size", shown="16GiB")
    samples: int = option(
        0,
        "Prompts from {data} that both models continue by 32 tokens, to be shown by `ptqpipe report`.",
        metavar="N",
        bounds=(0, 100),
    )
    command: str = ""


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class EvalCommand(EvalOptions):
    """The options of `eval`."""

    ckpt: str = argument()
    source: str | None = option(None, "The model that CKPT was made from, to compare with.", metavar="MODEL")
    out: Path | None = option(
        None,
        "JSON file to write.",
        short="-o",
        shown="<ckpt>.eval.json beside a checkpoint of ptqpipe, of others in the working folder",
    )
    overwrite: bool = option(False, "Replace an eval file that holds more than this call measures.")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ReportCommand(Options):
    """The options of `report`."""

    ckpts: tuple[Path, ...] = argument(metavar="CKPT...", kind="model")
    source: Path | None = option(
        None,
        "The model that CKPT was made from; errors are recomputed with it.",
        metavar="MODEL",
        kind="model",
        shown="found beside CKPT or in the hub's cache",
    )
    eval: Path | None = option(
        None,
        "The file that `ptqpipe eval` wrote for CKPT.",
        kind="file",
        shown="<ckpt>.eval.json beside it or in the working folder",
    )
    out: Path | None = option(None, "File to write.", short="-o", shown="<ckpt>.report.html")
    kind: str | None = option(
        None, "Kind of file to write.", choices=("html", "md"), shown="by the ending of {out}, else html"
    )
    all_rows: bool = option(False, "Compare scale searches on all rows instead of a sample.")

    def __post_init__(self) -> None:
        if len(self.ckpts) > 1 and (self.source is not None or self.eval is not None or self.all_rows):
            names = f"{arg('source')}, {arg('eval')} and {arg('all_rows')}"
            raise UsageError(f"{names} are for a report on one checkpoint; leave them out")
