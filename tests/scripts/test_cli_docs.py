"""Claims about docs/cli.md: it is what scripts/cli_docs.py makes of the commands, and leaves nothing out."""

import importlib.util
from pathlib import Path

import click

from ptqpipe.cli import main

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_what_the_script_writes() -> None:
    spec = importlib.util.spec_from_file_location("cli_docs", ROOT / "scripts/cli_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "run python scripts/cli_docs.py"


def test_every_option_that_is_not_hidden_stands_on_the_page() -> None:
    text = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    for name, command in main.commands.items():
        part = text.partition(f"\n### ptqpipe {name}\n")[2].partition("\n### ptqpipe ")[0]
        for one in command.params:
            if isinstance(one, click.Option) and not one.hidden:
                assert f"`{one.opts[0]}" in part, (name, one.opts)
