"""What may be typed instead of the names that help shows: former spellings of options, and names from other tools."""

import shlex
from collections.abc import Iterable
from copy import copy
from pathlib import Path
from typing import Any

import click

# Former spellings of options and what they are now. A command that has the present one still takes the former.
FORMER = {
    "--baseline": "--source",
    "--window": "--seqlen",
    "--threads": "--workers",
    "--format": "--kind",
}

ALIASES = {"quantize": "convert", "quantise": "convert", "evaluate": "eval"}  # of commands


# What other tools call an option, by its name here.
ELSEWHERE = {
    "--data": ("--calib", "--calib-data", "--calib-dataset", "--calibration-data", "--dataset", "--text"),
    "--format": ("--bits", "--dtype", "--qformat", "--quant", "--quantization", "--quantize", "--scheme", "--type"),
    "--out": ("--export-dir", "--export-path", "--output-dir", "--output-path", "--save-dir"),
    "--samples": ("--calib-size", "--nsamples", "--num-samples"),
    "--seqlen": ("--max-seq-length", "--sequence-length"),
    "--max-model-len": ("--context-length", "--ctx-size", "--max-length"),
    "--overwrite": ("--force", "--yes"),
}
ARGUMENT = ("--checkpoint", "--ckpt", "--model", "--model-name", "--model-path", "--pretrained")  # has no option here


def name_here(error: click.NoSuchOption, known: Iterable[click.Parameter]) -> click.UsageError:
    """The error with what an unknown option is called here where another tool has it; else as it was."""
    params = list(known)
    flag = error.option_name.lower().replace("_", "-")
    flags = {name for one in params for name in one.opts}
    meant = [here for here, others in ELSEWHERE.items() if flag in others and here in flags]
    first = next((str(one.name).upper() for one in params if isinstance(one, click.Argument)), None)
    if flag in ARGUMENT and first is not None and error.ctx is not None:
        return click.UsageError(f"{error.message} Name it without one: {error.ctx.command_path} {first}", error.ctx)
    return click.UsageError(f"{error.message} Did you mean {meant[0]!r}?", error.ctx) if meant else error


def add_former(parser: Any, options: Iterable[click.Parameter], ctx: click.Context) -> None:
    """Lets click's ``parser`` of a command take the former spellings that no option has taken; help shows none."""
    by_flag = {flag: option for option in options for flag in option.opts}
    for former, present in FORMER.items():
        if present in by_flag and former not in by_flag:
            hidden = copy(by_flag[present])
            hidden.opts = [former]
            hidden.add_to_parser(parser, ctx)


def check_command(name: str, known: object, ctx: click.Context) -> None:
    """Fails with a hint where a model stands in the place of the command, ``known`` being None."""
    if known is None and ("/" in name or Path(name).is_dir()):
        ctx.fail(f"{name!r} is no command; to quantize that model: ptqpipe convert {shlex.quote(name)}")
