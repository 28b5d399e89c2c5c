"""Commands that write a checkpoint's numbers in another form: relayout, dequantize."""

import json
from pathlib import Path

import click

from ptqpipe.cli.common import Dtype, Existing, RunOptions, one_line_errors, ranks_of, run_options, says_how_to_resume


@click.command(epilog="Example: ptqpipe relayout CKPT --container modelopt")
@click.argument("ckpt", type=Existing("folder"))
@click.option("--container", required=True, metavar="NAME", help="The layout to write; see `ptqpipe formats`.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Output folder.  [default: <ckpt>-<container>]")
@one_line_errors
@run_options("Weights in flight")
def relayout(ckpt: Path, container: str, out: Path | None, run: RunOptions) -> None:
    """Rewrite CKPT in another container: the same codes and scales, nothing is quantized again."""
    from ptqpipe.stages.common.identity import name_of
    from ptqpipe.stages.relayout import run as stage
    from ptqpipe.stages.relayout import text

    out = out if out is not None else Path(f"{name_of(ckpt)}-{container.lower().replace('_', '-')}")
    with says_how_to_resume(out, run.mode):
        done = stage.relayout(ckpt, out, container=container, mode=run.mode, machine=run.machine(), ranks=ranks_of())
    if done is not None:
        click.echo(json.dumps(text.to_json(done)) if run.as_json else text.render(done))


@click.command(epilog="Example: ptqpipe dequantize CKPT --dtype bf16")
@click.argument("ckpt", type=Existing("folder"))
@click.option(
    "--dtype",
    type=Dtype("bf16", "fp16", "fp32", long=False),
    default="bf16",
    show_default=True,
    help="What the weights are written in.",
)
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Output folder.  [default: <ckpt>-<dtype>]")
@one_line_errors
@run_options("Weights in flight")
def dequantize(ckpt: Path, dtype: str, out: Path | None, run: RunOptions) -> None:
    """Write CKPT as a plain float checkpoint that every tool loads."""
    from ptqpipe.stages import dequantize as stage
    from ptqpipe.stages.common.identity import name_of

    out = out if out is not None else Path(f"{name_of(ckpt)}-{dtype}")
    with says_how_to_resume(out, run.mode):
        done = stage.dequantize(ckpt, out, dtype=dtype, mode=run.mode, machine=run.machine(), ranks=ranks_of())
    if done is not None:
        click.echo(json.dumps(stage.to_json(done)) if run.as_json else stage.render(done))
