"""Values of options that the shell offers; the script of a shell is click's own. Nothing here imports torch.

_PTQPIPE_COMPLETE=bash_source ptqpipe > ~/.local/share/bash-completion/completions/ptqpipe
"""

from collections.abc import Callable, Iterable
from typing import Any

import click
from click.shell_completion import CompletionItem


def _formats() -> Iterable[str]:
    from ptqpipe.recipe.formats_table import to_json

    return [name for one in to_json()["formats"] for name in (one["name"], *one["aliases"])]


def _named(kind: str) -> Callable[[], Iterable[str]]:
    def names() -> Iterable[str]:
        from ptqpipe.recipe.formats_table import named

        return [one["name"] for one in named(kind)]

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
    **dict.fromkeys(("format", "formats"), (_formats, "")),
    "container": (_named("containers"), ""),
    "scale_search": (_named("searches"), ""),
    "transforms": (_named("transforms"), ""),
    "recipe": (_recipes, "file"),
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


def complete_values(params: list[click.Parameter]) -> list[click.Parameter]:
    """The parameters, with the values that the shell offers for them."""
    for one in params:
        if one.name in _VALUES and not isinstance(one.type, click.Choice | Completed):
            one.type = Completed(one.type, *_VALUES[one.name])
    return params
