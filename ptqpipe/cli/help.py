"""Help in groups: which commands stand together in ``ptqpipe --help``, and which options in the help of one command.

Both tables hold names alone. A command or an option that no group names comes last, under "More".
"""

import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from functools import cached_property
from importlib import import_module
from typing import Any, TypeVar

import click

from ptqpipe.cli.lines import click_errors_fitted
from ptqpipe.cli.slow_imports import watch_imports
from ptqpipe.cli.spelling import ALIASES, check_command, name_here
from ptqpipe.errors import shell_messages

T = TypeVar("T")

COMMANDS: dict[str, tuple[str, ...]] = {
    "Start": ("demo", "convert", "serve", "chat"),
    "Better quality": ("generate", "calibrate", "tune", "plan", "transform"),
    "Check": ("verify", "inspect", "diff", "eval", "report"),
    "Rewrite and more": ("relayout", "dequantize", "formats", "recipes", "doctor"),
}

# The file of a command where it is not called as the command is.
FILES = {
    **dict.fromkeys(("generate", "tune", "plan"), "calibrate"),
    **dict.fromkeys(("relayout", "dequantize", "transform"), "rewrite"),
    **dict.fromkeys(("verify", "inspect", "diff", "report", "formats", "recipes", "doctor"), "check"),
    "eval": "evaluate",
}

# By the names of the parameters, with its command's where that differs from others' of the name. Only commands with
# more options than fit a screen show them in groups.
OPTIONS: dict[str, tuple[str, ...]] = {
    "What to write": (
        "format", "recipe", "reader", "budget", "formats", "ignore", "mtp", "requantize", "container",
        "shard_size", "transform.dtype", "out", "push",
    ),
    "Text": (
        "data", "pairs", "text_field", "samples", "seqlen", "stride", "max_tokens", "seed", "holdout", "measure",
        "tasks", "task_data", "include_path", "limit", "batch_size", "system", "temperature", "top_p", "length",
        "prompts",
    ),
    "Quality": (
        "quality", "stats", "codes", "source", "transforms", "scale_search", "global_scale", "algorithm",
        "objective", "damping", "refine_passes", "bias_correction", "moments", "method",
        "metric", "feedback", "train", "steps", "alpha", "power_of_two", "fold_at", "rotation_size", "learn", "untie",
        "eval", "report",
    ),
    "Activations and key-value cache": ("activations", "rotate", "input_amax", "input_scale", "headroom", "kv_cache"),
    "Address": ("url", "host", "port", "allowed_host", "api_key", "served_model_name", "access_log"),
    "Limits": (
        "max_model_len", "max_num_seqs", "max_batch_tokens", "max_queue", "max_body", "kv_cache_size", "drain",
    ),
    "Engine": (
        "chat_template", "allowed_local_media_path", "decoded", "prefix_caching", "batch_invariant", "tp", "allreduce",
        "overlap", "speculative", "speculative_tokens",
    ),
    "vLLM": ("engine", "vllm_python", "nnodes", "node_rank", "master_addr", "master_port"),
    "Machine": ("device", "dtype", "workers", "max_memory", "cache_dir", "cache_size"),
    "Run": ("dry_run", "resume", "overwrite", "work_dir", "as_json", "quiet", "help",
        "help_all", "_click_default_help",  # click 8.2 calls --help so
    ),
}  # fmt: skip
LONG = 12  # options
# What --help shows of a command with more options than MOST; --help-all shows all of them.
MOST = 20
FIRST = frozenset((
    "out", "format", "recipe", "reader", "budget", "ignore", "data", "samples", "seqlen", "max_tokens", "tasks",
    "quality", "method", "source", "eval", "report", "kv_cache", "host", "port", "api_key", "served_model_name",
    "max_model_len", "max_num_seqs", "kv_cache_size", "chat_template", "tp", "allreduce", "speculative", "engine",
    "device", "max_memory", "dry_run", "resume", "overwrite", "help", "_click_default_help", "help_all",
))  # fmt: skip
_NUMBERS = {"integer": "N", "float": "X"}  # by the names of click's types


def in_groups(items: Mapping[str, T], groups: Mapping[str, Iterable[str]]) -> dict[str, list[T]]:
    """The items below the headings of their groups, in the order of the groups; "More" has what is left."""
    left = dict(items)
    members = {title: [left.pop(name) for name in names if name in left] for title, names in groups.items()}
    members["More"] = list(left.values())
    return {title: group for title, group in members.items() if group}


class Commands(click.Group):
    """A group whose help lists its commands by `COMMANDS`, a line each. It knows them by their `ALIASES`, too."""

    @property
    def commands(self) -> MutableMapping[str, click.Command]:
        """All commands: imports the files of those that nobody has asked for yet."""
        for name in (name for names in COMMANDS.values() for name in names):
            self._import(name)
        return self._imported

    @commands.setter
    def commands(self, commands: MutableMapping[str, click.Command]) -> None:
        self._imported = commands

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Click's, which imports no other command."""
        self._imported[name or str(cmd.name)] = cmd

    def _import(self, name: str) -> None:
        if name not in self._imported:
            import_module(f"ptqpipe.cli.{FILES.get(name, name)}")

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name, or of its alias."""
        name = ALIASES.get(cmd_name, cmd_name)
        if any(name in names for names in COMMANDS.values()):
            self._import(name)
        return self._imported.get(name)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Click's; messages spell options as flags meanwhile."""
        with shell_messages():
            return super().main(*args, **kwargs)

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> click.Context:
        """Click's; what it finds wrong is in lines that a terminal has room for, or JSON, here and in `invoke`."""
        as_json = "--json" in args
        with click_errors_fitted(as_json=as_json):
            context = super().make_context(info_name, args, *rest, **extra)
        context.meta[_AS_JSON] = as_json
        return context

    def invoke(self, ctx: click.Context) -> Any:
        """Click's, which runs the command."""
        with click_errors_fitted(as_json=ctx.meta[_AS_JSON]):
            return super().invoke(ctx)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Click's; `help` and `help COMMAND` are --help."""
        return super().parse_args(ctx, [*args[1:2], "--help"] if args[:1] == ["help"] else args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Click's, with a hint where a model stands in the place of the command."""
        check_command(args[0], self.get_command(ctx, args[0]), ctx)
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names in the order of the help."""
        groups = in_groups({name: name for name in self.commands}, COMMANDS)
        order = [name for names in COMMANDS.values() for name in names]
        return sorted((name for names in groups.values() for name in names), key=[*order, *self.commands].index)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """A section for each group."""
        shown = {name: self.commands[name] for name in self.list_commands(ctx) if not self.commands[name].hidden}
        width = max(map(len, shown))
        rows = {name: (name.ljust(width), one.get_short_help_str(limit=80)) for name, one in shown.items()}
        for title, members in in_groups(rows, COMMANDS).items():
            with formatter.section(title):
                formatter.write_dl(members)


class Command(click.Command):
    """A command whose options stand in groups (`OPTIONS`) if there are many."""

    def __init__(self, *args: Any, make_params: Callable[[], list[click.Parameter]], **kwargs: Any) -> None:
        """Click's, without ``params``."""
        super().__init__(*args, **kwargs)
        self._make_params = make_params
        del self.params

    @cached_property
    def params(self) -> list[click.Parameter]:  # type: ignore[override]
        """Click's, made when they are first asked for: the list of commands needs none. A number is N or X."""
        params = self._make_params()
        for one in params:
            one.metavar = one.metavar or _NUMBERS.get(one.type.name)
        return params

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Click's; an option that other tools have gets the name that it has here.

        From here on a terminal shows what is being imported: to see whether a name is that of a model takes torch.
        """
        if not ctx.resilient_parsing:
            watch_imports(shown=sys.stderr.isatty() and {"-q", "--quiet", "--json"}.isdisjoint(args))
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise name_here(error, self.get_params(ctx)) from None
        except click.MissingParameter as error:
            if isinstance(error.param, click.Option) and error.param.help:
                what = error.param.help.partition("  [")[0].rstrip(".")
                raise click.MissingParameter(what, error.ctx, error.param) from None
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The sections of the help that list options: all of them after --help-all."""
        for title, options in self.sections(ctx, everything=ctx.meta.get(_ALL, False)).items():
            with formatter.section(title):
                formatter.write_dl([record for one in options if (record := one.get_help_record(ctx)) is not None])

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Click's, and --help-all of a command with many options."""
        params = super().get_params(ctx)
        if sum(map(_is_shown, params)) <= MOST:
            return params
        return [*params, click.Option(
            ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_help_all,
            help="Show all options and exit.",
        )]  # fmt: skip

    def sections(self, ctx: click.Context, *, everything: bool = True) -> dict[str, list[click.Parameter]]:
        """The options that help shows, below their headings: "Options" alone for a command with few. Without
        ``everything`` of a command with many only those of `FIRST`."""
        shown = {str(one.name): one for one in self.get_params(ctx) if _is_shown(one)}
        if not everything and len(shown) > MOST:
            shown = {name: one for name, one in shown.items() if name in FIRST}
        groups = {title: [name.removeprefix(f"{self.name}.") for name in names] for title, names in OPTIONS.items()}
        return in_groups(shown, groups) if len(shown) > LONG else {"Options": list(shown.values())}


_ALL, _AS_JSON = "ptqpipe.help_all", "ptqpipe.as_json"


def _help_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def _is_shown(one: Any) -> bool:
    return isinstance(one, click.Option) and not one.hidden


def examples(lines: str) -> str:
    """The end of a command's help: a call, or several, one a line."""
    calls = lines.strip().splitlines()
    if len(calls) == 1:
        return f"Example: {calls[0]}"
    return "\n".join(["\b", "Examples:", *(f"  {call.strip()}" for call in calls)])
