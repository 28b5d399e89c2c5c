"""Commands that look at checkpoints and change nothing: inspect, verify, diff, report, recipes, doctor, formats."""

import json
import shutil
import sys

import click

from ptqpipe.cli import next_steps
from ptqpipe.cli.common import Given, command, machine_of, this_call
from ptqpipe.cli.parameters import JSON, MODEL, PATH, QUIET, Existing
from ptqpipe.errors import UsageError


@command(
    example="""
ptqpipe verify CKPT
ptqpipe verify CKPT --source MODEL --optimal
"""
)
@click.argument("ckpt", type=MODEL)
@click.option("--source", type=MODEL, metavar="MODEL", help="The model that CKPT was made from.")
@click.option("--stats", type=PATH, metavar="DIR", help="The statistics that CKPT was made with, if there were any.")
@click.option(
    "--optimal", is_flag=True, help="Prove again, by brute force on a sample of blocks, that block scales are optimal."
)
@click.option("--all", "all_blocks", is_flag=True, help="Let --optimal prove every block instead of a sample.")
@click.option("--all-faults", is_flag=True, help="List every fault instead of the first few.")
@JSON
@QUIET
def verify(given: Given) -> None:
    """Check a checkpoint's bytes and claims.

    The exit code is 1 if there is a fault. CKPT alone is enough to check hashes, sizes and config files. With --source
    errors are recomputed, and the weights are quantized again to compare. docs/using.md lists the few claims that
    cannot be checked.
    """
    from ptqpipe.check.verify import command as stage
    from ptqpipe.check.verify.report import render, to_json

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
        progress=sys.stderr.isatty() and given.log is not None,
        log=given.log,
    )
    given.show(json.dumps(to_json(report)) if given.as_json else render(report, all_faults=given.all_faults))
    next_steps.say_next(given, next_steps.verify, report.ok)
    sys.exit(1 if report.faults else 0)


@command(example="ptqpipe inspect CKPT")
@click.argument("ckpt", type=MODEL)
@JSON
def inspect(given: Given) -> None:
    """Show formats, sizes and suspicious scales.

    Formats and bits per weight of CKPT are grouped by the role of the weights.
    """
    from ptqpipe.check import inspect as stage

    report = stage.inspect(given.ckpt)
    given.tell(report, stage)
    next_steps.say_next(given, next_steps.inspect, bool(report.weights))


@command(example="ptqpipe diff CKPT OTHER")
@click.argument("a", type=MODEL)
@click.argument("b", type=MODEL)
@JSON
def diff(given: Given) -> None:
    """Compare two checkpoints; exit 1 if they differ.

    A and B may have different containers; their weights are compared.
    """
    from ptqpipe.check import diff as stage

    report = stage.diff(given.a, given.b)
    given.tell(report, stage)
    backwards = report.container_b == "plain" != report.container_a
    next_steps.say_next(given, next_steps.diff, report.equal, backwards)
    sys.exit(0 if report.equal else 1)


@command(example="ptqpipe report CKPT")
@click.argument("ckpts", type=MODEL, nargs=-1, required=True, metavar="CKPT...")
@click.option(
    "--source",
    type=MODEL,
    metavar="MODEL",
    help="The model that CKPT was made from; errors are recomputed with it.  [default: found beside CKPT or in the "
    "hub's cache]",
)
@click.option(
    "--eval",
    "evaluation",
    type=Existing("file"),
    help="The file that `ptqpipe eval` wrote for CKPT.  [default: <ckpt>.eval.json beside it or in the working folder]",
)
@click.option("-o", "--out", "--output", "out", type=PATH, help="File to write.  [default: <ckpt>.report.html]")
@click.option(
    "--kind",
    type=click.Choice(["html", "md"]),
    help="Kind of file to write.  [default: by the ending of -o, else html]",
)
@click.option("--all", "all_rows", is_flag=True, help="Compare scale searches on all rows instead of a sample.")
@QUIET
def report(given: Given) -> None:
    """Write an HTML or markdown report on a checkpoint.

    It shows quality, size, errors, scales and what became of every tensor of CKPT, in one file that needs no network.
    Several checkpoints of one model are compared: quality against size, layer by layer. An earlier report is replaced,
    no other file.
    """
    machine = machine_of(None, "cpu", 2 << 30, progress=not given.quiet)
    if len(given.ckpts) > 1:
        from ptqpipe.check.report.compare_command import compare

        if given.source is not None or given.evaluation is not None or given.all_rows:
            raise UsageError("--source, --eval and --all are for a report on one checkpoint; leave them out")
        path, lines = compare(given.ckpts, out=given.out, kind=given.kind, machine=machine, log=given.log)
        given.show(lines)
        next_steps.say_next(given, next_steps.report, path)
        return
    from ptqpipe.check.report.command import make_report

    path, lines = make_report(
        given.ckpts[0],
        source=given.source,
        evaluation=given.evaluation,
        out=given.out,
        kind=given.kind,
        all_rows=given.all_rows,
        command=this_call(),
        machine=machine,
        log=given.log,
    )
    given.show(lines)
    next_steps.say_next(given, next_steps.report, path)


@command(
    example="""
ptqpipe recipes
ptqpipe recipes nvfp4_gptq > mine.yaml
"""
)
@click.argument("name", required=False)
@JSON
def recipes(given: Given) -> None:
    """List the built-in recipes, or print one.

    `ptqpipe convert MODEL --recipe NAME` uses it; docs/using.md explains how to write your own.
    """
    from ptqpipe.recipe import listing as stage

    if given.name is not None:
        text = stage.text_of(given.name)
        click.echo(json.dumps({"name": given.name, "text": text}) if given.as_json else text, nl=given.as_json)
        return
    click.echo(json.dumps(stage.to_json()) if given.as_json else stage.render())


@command(example="ptqpipe doctor")
@JSON
def doctor(given: Given) -> None:
    """Show what this machine has, and what it lacks.

    Processor and kernels, torch, GPU, optional packages, memory, disk and hub. The exit code is always 0.
    """
    from ptqpipe.check import doctor as stage

    checks = stage.examine()
    if given.as_json:
        click.echo(json.dumps(stage.to_json(checks)))
        return
    click.echo(stage.render(checks, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    next_steps.say_next(given, next_steps.doctor)


@command(example="ptqpipe formats")
@JSON
def formats(given: Given) -> None:
    """List formats, containers, searches and transforms.

    Each format with its bits per weight, the hardware that multiplies in it, and the programs that load it.
    """
    from ptqpipe.recipe import formats_table as stage

    click.echo(json.dumps(stage.to_json()) if given.as_json else stage.render())
