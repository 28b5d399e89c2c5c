"""Completion of the command line by the shell: the script, and the values of options. Nothing here imports torch."""

from collections.abc import Callable, Iterable
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from ptqpipe.cli.common import Given, command, main
from ptqpipe.errors import UsageError

_PLACES = {
    "bash": "~/.local/share/bash-completion/completions/ptqpipe",
    "zsh": "a folder of $fpath, under the name _ptqpipe",
    "fish": "~/.config/fish/completions/ptqpipe.fish",
}


def _formats() -> Iterable[str]:
    from ptqpipe.recipe.formats_table import to_json

    return [name for one in to_json()["formats"] for name in (one["name"], *one["aliases"])]


def _files_of(package: str) -> Callable[[], Iterable[str]]:
    def names() -> Iterable[str]:
        from ptqpipe.recipe.formats_table import named

        return [one["name"] for one in named(package)]

    return names


def _recipes() -> Iterable[str]:
    from ptqpipe.errors import RecipeError
    from ptqpipe.recipe.listing import names

    try:
        return names()
    except RecipeError:  # an installation without any
        return ()


def _nothing() -> Iterable[str]:
    return ()


# By the names of parameters: the values, and what else the shell may offer ("dir", "file", or nothing).
_VALUES: dict[str, tuple[Callable[[], Iterable[str]], str]] = {
    **dict.fromkeys(("scheme", "format", "formats"), (_formats, "")),
    "container": (_files_of("containers"), ""),
    "search": (_files_of("search"), ""),
    "apply": (_files_of("transforms"), ""),
    "recipe_path": (_recipes, "file"),
    "data": (_nothing, "file"),
    **dict.fromkeys(("model", "ckpt", "a", "b", "source", "baseline"), (_nothing, "dir")),
}


class Completed(click.ParamType[Any]):
    """Another type of values, with values that the shell offers. Of a list with commas it completes the last name."""

    def __init__(self, kind: click.ParamType[Any], values: Callable[[], Iterable[str]], also: str) -> None:
        """``kind``: the type that converts; ``values``, ``also``: as in `_VALUES`."""
        self._kind, self._values, self._also = kind, values, also
        self.name = kind.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Delegates to the converting type."""
        return self._kind.convert(value, param, ctx)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str | None:
        """Delegates to the converting type."""
        return self._kind.get_metavar(param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The values that go on from what is typed, and files or folders."""
        before, comma, last = incomplete.rpartition(",")
        items = [CompletionItem(before + comma + name) for name in self._values() if name.startswith(last)]
        return [*items, *([CompletionItem(incomplete, type=self._also)] if self._also else [])]


def complete_values(commands: Iterable[click.Command]) -> None:
    """Gives the parameters of these commands the values that the shell offers."""
    for one in commands:
        if isinstance(one, click.Group):
            complete_values(one.commands.values())
            continue
        for parameter in one.params:
            if parameter.name in _VALUES and not isinstance(parameter.type, click.Choice | Completed):
                parameter.type = Completed(parameter.type, *_VALUES[parameter.name])


@command(
    example="""
ptqpipe completion bash > ~/.local/share/bash-completion/completions/ptqpipe
ptqpipe completion fish > ~/.config/fish/completions/ptqpipe.fish
"""
)
@click.argument("shell", type=click.Choice(list(_PLACES)), required=False, metavar="{bash|zsh|fish}")
def completion(given: Given) -> None:
    """Print a script for completion by bash, zsh or fish.

    The first line of the script says where it belongs. A new shell then completes commands, options, formats,
    containers, recipes, searches and folders.
    """
    if given.shell is None:
        raise UsageError("no shell is named, expected bash, zsh or fish; for example: ptqpipe completion bash")
    shell = get_completion_class(given.shell)
    assert shell is not None, "the shells of _PLACES are click's"
    script = shell(main, {}, "ptqpipe", "_PTQPIPE_COMPLETE").source()
    note = f"# Completion of ptqpipe by {given.shell}: save this script as {_PLACES[given.shell]}."
    if given.shell == "zsh":  # the first line of a file of $fpath is its directive
        first, _, rest = script.lstrip().partition("\n")
        click.echo(f"{first}\n{note.replace('as a folder', 'in a folder')}\n{rest}")
        return
    click.echo(f"{note}\n{script.lstrip()}")
