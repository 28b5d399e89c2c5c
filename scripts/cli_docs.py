"""Writes docs/cli.md from the commands themselves: every command with its options, in the groups of their help.

    python scripts/cli_docs.py

A test compares the page with what this script makes of the commands.
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import click

from ptqpipe.cli import main
from ptqpipe.cli.help import COMMANDS, Command, in_groups

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
HEAD = """# Command line

Every command with all its options, in the groups of `ptqpipe --help` and `ptqpipe COMMAND --help`.
`python scripts/cli_docs.py` writes this page from the commands. How they work together, what Ctrl-C leaves and what
exit codes mean stands on the page on [using ptqpipe](using.md).
"""


def page() -> str:
    """The whole page."""
    with main.make_context("ptqpipe", [], resilient_parsing=True) as context:
        shown = {name: main.commands[name] for name in main.list_commands(context) if not main.commands[name].hidden}
        lines = [HEAD]
        for title, commands in in_groups(dict(zip(shown, shown.items(), strict=True)), COMMANDS).items():
            lines += [f"## {title}", ""]
            for name, command in commands:
                lines += _command(name, command, context)
    return "\n".join(lines).rstrip() + "\n"


def _command(name: str, command: click.Command, parent: click.Context) -> Iterator[str]:
    """The lines of a command."""
    with command.make_context(name, [], parent=parent, resilient_parsing=True) as context:
        yield from (f"### {context.command_path}", "", *_paragraphs(command.help or ""))
        usage = " ".join(command.collect_usage_pieces(context))
        yield from ("```", f"{context.command_path} {usage}", "```", "")
        assert isinstance(command, Command)
        for title, options in command.sections(context).items():
            records = [record for one in options if (record := one.get_help_record(context)) is not None]
            rows = [
                f"| `{_cell(names)}` | {_cell(text).replace('<', '&lt;')} |"
                for names, text in records
                if "--help" not in names
            ]
            if rows:
                yield from (f"| {title} | |", "|---|---|", *rows, "")
        calls = re.findall(r"ptqpipe .*", command.epilog or "")
        yield from ("Examples:" if len(calls) > 1 else "Example:", "", *(f"    {call}" for call in calls), "")


def _paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.replace("\b", "").split("\n\n"):
        yield from (" ".join(paragraph.split()), "")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
