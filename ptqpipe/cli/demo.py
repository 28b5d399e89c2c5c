"""ptqpipe demo, ptqpipe formats."""

from pathlib import Path

import click

from ptqpipe.cli.common import machine_of, one_line_errors


@click.command(epilog="Example: ptqpipe demo -o ptqpipe-demo")
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    default=Path("ptqpipe-demo"),
    show_default=True,
    help="Folder for the checkpoints.",
)
@one_line_errors
def demo(out: Path) -> None:
    """Convert the embedded model to three formats, verify them, and show what each costs."""
    from ptqpipe.stages import demo as stage

    machine = machine_of(None, "cpu", 2 << 30, progress=False)
    rows, tokens = stage.run_demo(out, machine=machine)
    click.echo(stage.demo_text(rows, tokens, out))


@click.command(epilog="Example: ptqpipe formats")
@one_line_errors
def formats() -> None:
    """List formats, containers and searches."""
    from ptqpipe.stages.convert import text as tables

    click.echo(tables.formats_text())
