"""Commands that look at checkpoints and change nothing: verify, inspect, diff."""

import json
import sys
from pathlib import Path

import click

from ptqpipe.cli.common import Existing, one_line_errors
from ptqpipe.errors import UsageError


@click.command(epilog="Example: ptqpipe verify CKPT --source MODEL --optimal")
@click.argument("ckpt", type=Existing("folder"))
@click.option("--source", type=Existing("folder"), help="The checkpoint that it was made from.")
@click.option("--stats", type=click.Path(path_type=Path), help="The statistics that it was made with, if any.")
@click.option(
    "--optimal", is_flag=True, help="Prove the block scales optimal again by brute force (a sample of blocks)."
)
@click.option("--all", "all_blocks", is_flag=True, help="With --optimal: every block instead of a sample.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@one_line_errors
def verify(ckpt: Path, source: Path | None, stats: Path | None, optimal: bool, all_blocks: bool, as_json: bool) -> None:
    """Recompute every claim of CKPT from its bytes; exit 1 on any fault."""
    from ptqpipe.stages.verify import run as stage
    from ptqpipe.stages.verify.text import render, to_json

    if all_blocks and not optimal:
        raise UsageError("--all says how many blocks --optimal proves; add --optimal")
    if stats is not None and source is None:
        raise UsageError("--stats needs --source: with both the weights are quantized again; add --source")
    report = stage.verify(ckpt, source=source, statistics=stats, optimal=optimal, all_blocks=all_blocks)
    click.echo(json.dumps(to_json(report)) if as_json else render(report))
    sys.exit(1 if report.faults else 0)


@click.command(epilog="Example: ptqpipe inspect CKPT")
@click.argument("ckpt", type=Existing("folder"))
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@one_line_errors
def inspect(ckpt: Path, as_json: bool) -> None:
    """Show what is in CKPT: formats by role, sizes, bits per weight, suspicious scales."""
    from ptqpipe.stages import inspect as stage

    report = stage.inspect(ckpt)
    click.echo(json.dumps(stage.to_json(report)) if as_json else stage.render(report))


@click.command(epilog="Example: ptqpipe diff CKPT OTHER")
@click.argument("a", type=Existing("folder"))
@click.argument("b", type=Existing("folder"))
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@one_line_errors
def diff(a: Path, b: Path, as_json: bool) -> None:
    """Compare two checkpoints, in one layout or two; exit 1 if they differ."""
    from ptqpipe.stages import diff as stage

    report = stage.diff(a, b)
    click.echo(json.dumps(stage.to_json(report)) if as_json else stage.render(report))
    sys.exit(0 if report.equal else 1)
