"""What may be typed instead of the names that help shows: aliases of commands, and what other tools call options."""

import shlex
from collections.abc import Iterable
from pathlib import Path

import click

ALIASES = {"quantize": "convert", "quantise": "convert", "evaluate": "eval"}  # of commands


# What other tools, and unreleased builds of this one, call an option, by its name here.
ELSEWHERE = {
    "--data": ("--calib", "--calib-data", "--calib-dataset", "--calibration-data", "--dataset", "--text"),
    "--format": ("--bits", "--dtype", "--qformat", "--quant", "--quantization", "--quantize", "--scheme", "--type"),
    "--out": ("--export-dir", "--export-path", "--output-dir", "--output-path", "--save-dir"),
    "--samples": ("--calib-size", "--nsamples", "--num-samples"),
    "--seqlen": ("--max-seq-length", "--sequence-length"),
    "--max-model-len": ("--context-length", "--ctx-size", "--max-length"),
    "--overwrite": ("--force", "--yes"),
    "--reader": ("--for", "--target"),
    "--text-field": ("--field", "--text-column"),
    "--work-dir": ("--keep-stages",),
    "--codes": ("--rounding",),
    "--scale-search": ("--search",),
    "--objective": ("--weighting",),
    "--transforms": ("--apply",),
    "--rotation-size": ("--block",),
}
ARGUMENT = ("--checkpoint", "--ckpt", "--model", "--model-name", "--model-path", "--pretrained")  # has no option here


def name_here(error: click.NoSuchOption, options: Iterable[click.Parameter]) -> click.UsageError:
    """The error with what an unknown option is called here where another tool has it; else as it was."""
    params = list(options)
    flag = error.option_name.lower().replace("_", "-")
    flags = {name for one in params for name in one.opts}
    meant = [here for here, others in ELSEWHERE.items() if flag in others and here in flags]
    first = next((str(one.name).upper() for one in params if isinstance(one, click.Argument)), None)
    if flag in ARGUMENT and first is not None and error.ctx is not None:
        return click.UsageError(f"{error.message} Name it without one: {error.ctx.command_path} {first}", error.ctx)
    return click.UsageError(f"{error.message} Did you mean {meant[0]!r}?", error.ctx) if meant else error


def check_command(name: str, command: object, ctx: click.Context) -> None:
    """Fails with a hint where a model stands in the place of the command, ``command`` being None."""
    if command is None and ("/" in name or Path(name).is_dir()):
        ctx.fail(f"{name!r} is no command; to quantize that model: ptqpipe convert {shlex.quote(name)}")
