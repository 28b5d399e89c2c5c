"""What may be typed instead of the names that help shows: former spellings of options, and names from other tools."""

import shlex
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


class CommandBySpelling(click.Command):
    """A command that also takes the former spellings of its options; help and completion show the present ones."""

    def make_parser(self, ctx: click.Context) -> Any:
        """Click's parser, with the former spellings that no option of the command has taken."""
        parser = super().make_parser(ctx)
        known = {flag: param for param in self.get_params(ctx) for flag in param.opts}
        for former, present in FORMER.items():
            if present in known and former not in known:
                hidden = copy(known[present])
                hidden.opts = [former]
                hidden.add_to_parser(parser, ctx)
        return parser


class CommandsBySpelling(click.Group):
    """A group that knows commands by their `ALIASES`, too, which help does not list."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name, or of its alias."""
        return super().get_command(ctx, cmd_name) or self.commands.get(ALIASES.get(cmd_name, ""))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Click's, with a hint where a model stands in the place of the command."""
        name = args[0]
        if self.get_command(ctx, name) is None and ("/" in name or Path(name).is_dir()):
            ctx.fail(f"{name!r} is no command; to quantize that model: ptqpipe convert {shlex.quote(name)}")
        return super().resolve_command(ctx, args)
