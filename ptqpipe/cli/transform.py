"""The command that writes an equivalent float checkpoint: transform."""

import json
from pathlib import Path

import click

from ptqpipe.cli.common import (
    Dtype,
    RunOptions,
    Size,
    next_line,
    one_line_errors,
    ranks_of,
    run_options,
    says_how_to_resume,
)


@click.command(epilog="Example: ptqpipe transform MODEL --apply smoothquant --stats stats -o smooth")
@click.argument("model")
@click.option("--apply", "apply", required=True, metavar="NAMES", help="smoothquant, awq, aqas, smooth_swiglu, rotate.")
@click.option("--stats", type=click.Path(path_type=Path), help="Folder of `ptqpipe calibrate`; rotations need none.")
@click.option("--alpha", type=float, help="SmoothQuant's exponent of the inputs, or Smooth-SwiGLU's strength.")
@click.option("--power-of-two", is_flag=True, help="Round factors to powers of two: exact in every float dtype.")
@click.option("--edges", metavar="KINDS", help="Where factors move: norm, value, up.  [default: each transform's own]")
@click.option("--block", type=int, default=32, show_default=True, help="Size of the Hadamard blocks: 16 to 128.")
@click.option("--untie", is_flag=True, help="Write a head that is the embedding as a tensor of its own.")
@click.option("--format", "fmt", default="nvfp4", show_default=True, help="The format that searches quantize with.")
@click.option(
    "--dtype",
    type=Dtype("bf16", "fp16", "fp32", long=False),
    help="What the weights are written in.  [default: the source's if that is exact, else fp32]",
)
@click.option("--shard-size", type=Size(), help="Largest file of weights.  [default: chosen from the total]")
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="Output folder.")
@one_line_errors
@run_options("Components in flight")
def transform(
    model: str,
    apply: str,
    stats: Path | None,
    alpha: float | None,
    power_of_two: bool,
    edges: str | None,
    block: int,
    untie: bool,
    fmt: str,
    dtype: str | None,
    shard_size: int | None,
    out: Path,
    run: RunOptions,
) -> None:
    """Fold smoothing factors or rotations into MODEL: an equivalent model that quantizes better.

    Statistics of MODEL are not those of the result: calibrate that again for `ptqpipe convert --stats`.
    """
    from ptqpipe.stages.transform import run as stage
    from ptqpipe.stages.transform import text
    from ptqpipe.stages.transform.plan import TransformOptions

    options = TransformOptions(
        apply=apply,
        alpha=alpha,
        powers_of_two=power_of_two,
        edges=None if edges is None else tuple(edges.replace(" ", "").split(",")),
        block=block,
        untie=untie,
        dtype=dtype,
        format=fmt,
        shard_bytes=shard_size,
    )
    with says_how_to_resume(out, run.mode):
        done = stage.transform(
            model, out, stats=stats, options=options, mode=run.mode, machine=run.machine(), ranks=ranks_of()
        )
    if done is None:
        return
    if run.as_json:
        click.echo(json.dumps(text.to_json(done)))
        return
    click.echo(text.render(done))
    click.echo(next_line("convert", out, "--format", fmt))
