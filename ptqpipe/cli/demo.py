"""The demo command."""

from ptqpipe.cli import next_steps
from ptqpipe.cli.common import Terminal, command
from ptqpipe.pipeline.options import DemoCommand
from ptqpipe.run.options import MachineOptions


@command(
    DemoCommand,
    example="ptqpipe demo -o ptqpipe-demo",
    json=False,
    quiet=False,
    leaves=lambda options: (
        f"the formats that are finished are kept in {options.out}; another demo starts from the beginning"
    ),
)
def demo(options: DemoCommand, terminal: Terminal) -> None:
    """Convert a small built-in model to three formats.

    The checkpoints are verified, and a table shows what each format costs.
    """
    from ptqpipe.pipeline import demo as stage
    from ptqpipe.run.machine import machine_for

    stage.run_demo(options.out, machine=machine_for(MachineOptions()), show=terminal.show)
    next_steps.say_next(terminal, next_steps.demo(options, stage.SCHEMES[0]))
