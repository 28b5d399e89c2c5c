"""Commands that write a checkpoint another way: relayout, dequantize, transform."""

from pathlib import Path
from typing import TYPE_CHECKING

from ptqpipe.cli import next_steps
from ptqpipe.cli.common import Terminal, command, ranks_of, resume_hint
from ptqpipe.conversion.options import DequantizeCommand, RelayoutCommand, TransformCommand, TransformOptions
from ptqpipe.run.options import WritingOptions

if TYPE_CHECKING:
    from ptqpipe.conversion.job import Run


def _run(options: WritingOptions, terminal: Terminal) -> "Run":
    """What a stage that writes a checkpoint takes besides its own options: mode, machine, ranks and log."""
    return {"mode": options.mode, "machine": terminal.machine(options), "ranks": ranks_of(), "log": terminal.log}


@command(RelayoutCommand, example="ptqpipe relayout CKPT --container modelopt")
def relayout(options: RelayoutCommand, terminal: Terminal) -> None:
    """Rewrite a checkpoint in another container.

    The codes and scales of CKPT stay the same: nothing is quantized again.
    """
    from ptqpipe.checkpoint import name_of
    from ptqpipe.conversion.relayout import command as stage

    container = options.container.lower().replace("_", "-")
    out = options.out if options.out is not None else Path(f"{name_of(options.ckpt)}-{container}")
    with resume_hint(out, options.mode):
        done = stage.relayout(options.ckpt, out, container=container, **_run(options, terminal))
    if done is not None:
        terminal.show_result(done, stage)
        next_steps.say_next(terminal, next_steps.relayout(options, done.out, done.record["container"] != "ptqpipe"))


@command(DequantizeCommand, example="ptqpipe dequantize CKPT --dtype bf16")
def dequantize(options: DequantizeCommand, terminal: Terminal) -> None:
    """Write a quantized checkpoint as plain floats.

    Every tool that loads the original model loads the result.
    """
    from ptqpipe.checkpoint import name_of
    from ptqpipe.conversion import dequantize as stage

    out = options.out if options.out is not None else Path(f"{name_of(options.ckpt)}-{options.dtype}")
    with resume_hint(out, options.mode):
        done = stage.dequantize(options.ckpt, out, dtype=options.dtype, **_run(options, terminal))
    if done is not None:
        terminal.show_result(done, stage)
        next_steps.say_next(terminal, next_steps.dequantize(options, done.out))


@command(TransformCommand, example="ptqpipe transform MODEL --transforms smoothquant --stats stats -o smooth")
def transform(options: TransformCommand, terminal: Terminal) -> None:
    """Fold smoothing factors or rotations into a model.

    The result computes the same function as MODEL and loses less when quantized. It needs statistics of its own:
    calibrate it again before `ptqpipe convert --stats`.
    """
    from ptqpipe.conversion.transform import command as stage

    with resume_hint(options.out, options.mode):
        chosen = options.part(TransformOptions)
        done = stage.transform(
            options.model, options.out, stats=options.stats, options=chosen, **_run(options, terminal)
        )
    if done is not None:
        terminal.show_result(done, stage)
        next_steps.say_next(terminal, next_steps.transform(options))
