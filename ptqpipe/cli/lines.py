"""Text in lines that a terminal has room for; elsewhere a line stays one, so that programs can read it."""

import json
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import click

from ptqpipe.errors import printable


def wrapped(text: str, width: int) -> str:
    """The text with lines of at most ``width`` characters, as far as there are spaces: the rest of a longer one stands
    below it, further to the right. Rows of tables, which have runs of spaces, stay as they are."""
    lines = []
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        if len(line) <= width or "  " in line.strip():
            lines.append(line)
        else:
            wrapper = textwrap.TextWrapper(width, subsequent_indent=f"{indent}  ")
            wrapper.break_long_words = wrapper.break_on_hyphens = False
            lines += wrapper.wrap(line)
    return "\n".join(lines)


def fitted(text: str, stream: TextIO) -> str:
    """The text for a stream: what names from files would do to a terminal escaped, and `wrapped` where it is one."""
    text = printable(text, keep="\n")
    return wrapped(text, shutil.get_terminal_size().columns) if _is_terminal(stream) else text


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty()


def say(text: str) -> None:
    """Prints text for people on stderr."""
    click.echo(fitted(text, sys.stderr), err=True)


def error_as_json(message: str, code: int) -> str:
    """What a command with --json prints on stdout in place of its result: the message and the exit code."""
    return json.dumps({"error": message, "exit_code": code})


class _JsonError(click.ClickException):
    exit_code = click.UsageError.exit_code

    def show(self, file: Any = None) -> None:
        click.echo(error_as_json(self.message, self.exit_code))


@contextmanager
def click_errors_fitted(*, as_json: bool) -> Iterator[None]:
    """Errors that click itself finds and prints, about options and their values, are `fitted` as others are, or with
    ``as_json`` `error_as_json`."""
    try:
        yield
    except click.UsageError as error:
        if as_json:
            raise _JsonError(error.format_message()) from None
        message, head = error.format_message(), "Error: "
        text = fitted(head + message, sys.stderr)
        if "\n" in message or text == head + message:  # a help text, or all fits
            raise
        raise click.UsageError(text.removeprefix(head), error.ctx) from None
