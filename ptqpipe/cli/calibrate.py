"""Commands that prepare a conversion: calibrate, generate, tune, plan."""

import json

import click

from ptqpipe.calibration.options import CalibrateCommand, CalibrateOptions, GenerateCommand, GenerateOptions
from ptqpipe.cli import next_steps
from ptqpipe.cli.common import Terminal, command, devices_of, ranks_of, resume_hint
from ptqpipe.errors import argv
from ptqpipe.pipeline.options import PlanCommand
from ptqpipe.pipeline.tune.options import TuneCommand


@command(
    CalibrateCommand,
    example="""
ptqpipe calibrate MODEL --data text.jsonl -o stats
ptqpipe calibrate MODEL --data wikitext:wikitext-2-raw-v1:train -o stats
""",
)
def calibrate(options: CalibrateCommand, terminal: Terminal) -> None:
    """Collect statistics of a model's linear inputs.

    MODEL, a folder or a name on the hub, runs on text one decoder layer at a time.
    """
    import torch

    from ptqpipe.calibration import command as stage, summary as text

    devices = devices_of(options.device)
    machine = terminal.machine(options, device=devices[0], waits=False)
    with resume_hint(options.out, options.mode):
        done = stage.calibrate(
            options.model,
            options.data,
            options.out,
            options=options.part(CalibrateOptions),
            mode=options.mode,
            machine=machine,
            ranks=ranks_of(),
            devices=[machine.device, *map(torch.device, devices[1:])],
            warn=terminal.warn,
            log=terminal.log,
        )
    if done is not None:
        terminal.show_result(done, text)
        next_steps.say_next(terminal, next_steps.calibrate(options))


@command(GenerateCommand, example="ptqpipe generate MODEL --samples 128 --seqlen 512 -o own.jsonl", json=False)
def generate(options: GenerateCommand, terminal: Terminal) -> None:
    """Let a model generate its own calibration text.

    For when you have no text: calibrate and tune take the file as --data.
    """
    from ptqpipe.calibration import own_text as stage

    done = stage.generate(
        options.model,
        options.out,
        options=options.part(GenerateOptions),
        overwrite=options.overwrite,
        machine=terminal.machine(options, device=options.device, waits=False),
        log=terminal.log,
    )
    samples, held_out, seqlen = (done.content[name] for name in ("samples", "held_out", "seqlen"))
    terminal.show(
        f"{done.out}: {samples} windows of {seqlen} tokens and {held_out} more to hold out, in {done.seconds:.1f} s"
    )
    next_steps.say_next(terminal, next_steps.generate(options, argv(samples=samples, seqlen=seqlen)))


@command(
    TuneCommand,
    example="""
ptqpipe tune MODEL --data text.jsonl -o codes
ptqpipe tune MODEL --data text.jsonl --format nvfp4_w4a4 --method kl -o codes
""",
)
def tune(options: TuneCommand, terminal: Terminal) -> None:
    """Learn how a model's weights are rounded.

    MODEL is tuned one decoder layer at a time, starting from what convert would write with these options.
    `ptqpipe convert MODEL --codes OUT` then writes the result.
    """
    from ptqpipe.pipeline.tune import command as stage, tune_summary as text

    with resume_hint(options.out, options.mode):
        done = stage.tune(
            options.model,
            options.data,
            options.out,
            recipe=options.recipe_options,
            recipe_path=options.recipe,
            stats=options.stats,
            options=options,
            mode=options.mode,
            machine=terminal.machine(options, device=options.device, waits=False),
            log=terminal.log,
        )
    terminal.show_result(done, text)
    next_steps.say_next(terminal, next_steps.tune(options))


def _left_of_plan(options: PlanCommand) -> str:
    if options.measure is None:
        return "nothing is written"
    return f"what is measured is kept in {options.out}.measured.jsonl, and the same command continues from there"


@command(
    PlanCommand,
    example="""
ptqpipe plan MODEL --budget 5.5bits --stats stats -o mixed.yaml
ptqpipe plan MODEL --budget 9GB --measure text.txt --reader vllm -o mixed.yaml
""",
    leaves=_left_of_plan,
)
def plan(options: PlanCommand, terminal: Terminal) -> None:
    """Choose a format for every layer under a budget.

    Integer programming minimizes the sum of sensitivities and writes a recipe for convert. Without --stats and
    --measure the sensitivity of a layer is the error of its weights. Results of --measure are kept in
    OUT.measured.jsonl, from which an interrupted call continues.
    """
    from ptqpipe.pipeline.budget import command as stage, plan_summary as text

    allocation = stage.plan(options, machine=terminal.machine(options), log=terminal.log)
    if terminal.as_json:
        click.echo(json.dumps(text.to_json(allocation)))
        return
    terminal.show(f"{text.render(allocation)}\n{options.out} is the recipe")
    next_steps.say_next(terminal, next_steps.plan(options))
