"""Commands that look at checkpoints and change nothing: inspect, verify, diff, report, formats."""

import json
import sys

import click

from ptqpipe.cli.common import Given, command
from ptqpipe.cli.parameters import JSON, PATH, Existing
from ptqpipe.errors import UsageError


@command(example="ptqpipe verify CKPT --source MODEL --optimal")
@click.argument("ckpt", type=Existing("folder"))
@click.option("--source", type=Existing("folder"), metavar="MODEL", help="The model that CKPT was made from.")
@click.option("--stats", type=PATH, metavar="DIR", help="The statistics that CKPT was made with, if there were any.")
@click.option(
    "--optimal", is_flag=True, help="Prove block scales optimal once more by brute force, on a sample of blocks."
)
@click.option("--all", "all_blocks", is_flag=True, help="Let --optimal prove every block instead of a sample.")
@JSON
def verify(given: Given) -> None:
    """Check a checkpoint's bytes and claims.

    The exit code is 1 if there is a fault. Hashes, sizes and config files are checked from the bytes of CKPT; errors
    need --source, with which the weights are also quantized again. docs/verify.md lists the few claims that cannot be
    checked.
    """
    from ptqpipe.stages.verify import run as stage
    from ptqpipe.stages.verify.text import render, to_json

    if given.all_blocks and not given.optimal:
        raise UsageError("--all says how many blocks --optimal proves; add --optimal")
    if given.stats is not None and given.source is None:
        raise UsageError("--stats needs --source: with both the weights are quantized again; add --source")
    report = stage.verify(
        given.ckpt,
        source=given.source,
        statistics=given.stats,
        optimal=given.optimal,
        all_blocks=given.all_blocks,
        progress=sys.stderr.isatty() and not given.as_json,
    )
    click.echo(json.dumps(to_json(report)) if given.as_json else render(report))
    sys.exit(1 if report.faults else 0)


@command(example="ptqpipe inspect CKPT")
@click.argument("ckpt", type=Existing("folder"))
@JSON
def inspect(given: Given) -> None:
    """Show formats, sizes and suspicious scales.

    Formats and bits per weight of CKPT are grouped by the role of the weights.
    """
    from ptqpipe.stages import inspect as stage

    report = stage.inspect(given.ckpt)
    click.echo(json.dumps(stage.to_json(report)) if given.as_json else stage.render(report))


@command(example="ptqpipe diff CKPT OTHER")
@click.argument("a", type=Existing("folder"))
@click.argument("b", type=Existing("folder"))
@JSON
def diff(given: Given) -> None:
    """Compare two checkpoints; exit 1 if they differ.

    A and B may have different containers: what counts are their weights.
    """
    from ptqpipe.stages import diff as stage

    report = stage.diff(given.a, given.b)
    click.echo(json.dumps(stage.to_json(report)) if given.as_json else stage.render(report))
    sys.exit(0 if report.equal else 1)


@command(example="ptqpipe report CKPT --source MODEL --eval CKPT.eval.json -o report.html")
@click.argument("ckpt", type=Existing("folder"))
@click.option(
    "--source",
    type=Existing("folder"),
    metavar="MODEL",
    help="The model that CKPT was made from; with it the errors of all weights are recomputed.",
)
@click.option("--eval", "evaluation", type=Existing("file"), help="The file that `ptqpipe eval` wrote for CKPT.")
@click.option("-o", "--out", "--output", "out", type=PATH, help="File to write.  [default: <ckpt>.report.html]")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["html", "md"]),
    help="Kind of file to write.  [default: by the ending of -o, else html]",
)
@click.option("--all", "all_rows", is_flag=True, help="Compare scale searches on all rows instead of a sample.")
def report(given: Given) -> None:
    """Write an HTML or markdown report on a checkpoint.

    It shows size, quality, errors, scales and what became of every tensor of CKPT, in one file that needs no network.
    An earlier report is replaced, no other file.
    """
    from ptqpipe.stages.report.run import make_report

    path, summary = make_report(
        given.ckpt,
        source=given.source,
        evaluation=given.evaluation,
        out=given.out,
        kind=given.kind,
        all_rows=given.all_rows,
    )
    click.echo(f"{path}: {summary}")


@command(example="ptqpipe formats")
def formats(given: Given) -> None:
    """List formats, containers and scale searches."""
    from ptqpipe.stages import formats as stage

    click.echo(stage.render())
