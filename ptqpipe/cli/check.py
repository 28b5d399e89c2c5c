"""Commands that look at checkpoints and change nothing: inspect, verify, diff, report, recipes, doctor, formats."""

import json
import shutil
import sys
from dataclasses import dataclass

import click

from ptqpipe.check.options import DiffCommand, InspectCommand, ReportCommand, VerifyCommand
from ptqpipe.cli import next_steps
from ptqpipe.cli.common import Terminal, command, this_call
from ptqpipe.run.options import MachineOptions, Options, argument


@command(
    VerifyCommand,
    example="""
ptqpipe verify CKPT
ptqpipe verify CKPT --source MODEL --optimal
""",
)
def verify(options: VerifyCommand, terminal: Terminal) -> None:
    """Check a checkpoint's bytes and claims.

    The exit code is 1 if there is a fault. CKPT alone is enough to check hashes, sizes and config files. With --source
    errors are recomputed, and the weights are quantized again to compare. docs/using.md lists the few claims that
    cannot be checked.
    """
    from ptqpipe.check.verify import command as stage
    from ptqpipe.check.verify.report import render, to_json

    shown = sys.stderr.isatty() and not terminal.silent
    report = stage.verify(
        options.ckpt,
        source=options.source,
        statistics=options.stats,
        optimal=options.optimal,
        all_blocks=options.all_blocks,
        progress=shown,
        log=terminal.log,
    )
    terminal.show(json.dumps(to_json(report)) if terminal.as_json else render(report, all_faults=options.all_faults))
    next_steps.say_next(terminal, next_steps.verify(options, report.ok))
    sys.exit(1 if report.faults else 0)


@command(InspectCommand, example="ptqpipe inspect CKPT", quiet=False)
def inspect(options: InspectCommand, terminal: Terminal) -> None:
    """Show formats, sizes and suspicious scales.

    Formats and bits per weight of CKPT are grouped by the role of the weights.
    """
    from ptqpipe.check import inspect as stage

    report = stage.inspect(options.ckpt)
    terminal.show_result(report, stage)
    next_steps.say_next(terminal, next_steps.inspect(options, bool(report.weights)))


@command(DiffCommand, example="ptqpipe diff CKPT OTHER", quiet=False)
def diff(options: DiffCommand, terminal: Terminal) -> None:
    """Compare two checkpoints; exit 1 if they differ.

    A and B may have different containers; their weights are compared.
    """
    from ptqpipe.check import diff as stage

    report = stage.diff(options.a, options.b)
    terminal.show_result(report, stage)
    backwards = report.container_b == "plain" != report.container_a
    next_steps.say_next(terminal, next_steps.diff(options, report.equal, backwards))
    sys.exit(0 if report.equal else 1)


@command(ReportCommand, example="ptqpipe report CKPT", json=False)
def report(options: ReportCommand, terminal: Terminal) -> None:
    """Write an HTML or markdown report on a checkpoint.

    It shows quality, size, errors, scales and what became of every tensor of CKPT, in one file that needs no network.
    Several checkpoints of one model are compared: quality against size, layer by layer. An earlier report is replaced,
    no other file.
    """
    from ptqpipe.check.report.command import make_report
    from ptqpipe.check.report.compare_command import compare

    machine = terminal.machine(MachineOptions())
    if len(options.ckpts) > 1:
        path, lines = compare(options.ckpts, out=options.out, kind=options.kind, machine=machine, log=terminal.log)
    else:
        path, lines = make_report(
            options.ckpts[0],
            source=options.source,
            evaluation=options.eval,
            out=options.out,
            kind=options.kind,
            all_rows=options.all_rows,
            command=this_call(),
            machine=machine,
            log=terminal.log,
        )
    terminal.show(lines)
    next_steps.say_next(terminal, next_steps.report(path))


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class RecipesCommand(Options):
    """The options of `recipes`."""

    name: str | None = argument(None)


@command(
    RecipesCommand,
    example="""
ptqpipe recipes
ptqpipe recipes nvfp4_gptq > mine.yaml
""",
    quiet=False,
)
def recipes(options: RecipesCommand, terminal: Terminal) -> None:
    """List the built-in recipes, or print one.

    `ptqpipe convert MODEL --recipe NAME` uses it; docs/using.md explains how to write your own.
    """
    from ptqpipe.recipe import listing as stage

    if options.name is not None:
        text = stage.text_of(options.name)
        shown = json.dumps({"name": options.name, "text": text}) if terminal.as_json else text
        click.echo(shown, nl=terminal.as_json)
        return
    click.echo(json.dumps(stage.to_json()) if terminal.as_json else stage.render())


@command(Options, example="ptqpipe doctor", quiet=False)
def doctor(options: Options, terminal: Terminal) -> None:
    """Show what this machine has, and what it lacks.

    Processor and kernels, torch, GPU, optional packages, memory, disk and hub. The exit code is always 0.
    """
    from ptqpipe.check import doctor as stage

    checks = stage.examine()
    if terminal.as_json:
        click.echo(json.dumps(stage.to_json(checks)))
        return
    click.echo(stage.render(checks, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
    next_steps.say_next(terminal, next_steps.doctor())


@command(Options, example="ptqpipe formats", quiet=False)
def formats(options: Options, terminal: Terminal) -> None:
    """List formats, containers, searches and transforms.

    Each format with its bits per weight, the hardware that multiplies in it, and the programs that load it.
    """
    from ptqpipe.recipe import formats_table as stage

    click.echo(json.dumps(stage.to_json()) if terminal.as_json else stage.render())
