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
    "--data": "--values",
}

ALIASES = {"quantize": "convert", "quantise": "convert", "evaluate": "eval"}  # of commands


def add_former(parser: Any, options: Iterable[click.Parameter], ctx: click.Context) -> None:
    """Lets click's ``parser`` of a command take the former spellings that no option has taken; help shows none."""
    known = {flag: option for option in options for flag in option.opts}
    for former, present in FORMER.items():
        if present in known and former not in known:
            hidden = copy(known[present])
            hidden.opts = [former]
            hidden.add_to_parser(parser, ctx)


def check_command(name: str, known: object, ctx: click.Context) -> None:
    """Fails with a hint where a model stands in the place of the command, ``known`` being None."""
    if known is None and ("/" in name or Path(name).is_dir()):
        ctx.fail(f"{name!r} is no command; to quantize that model: ptqpipe convert {shlex.quote(name)}")
