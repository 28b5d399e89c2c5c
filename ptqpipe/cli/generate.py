"""ptqpipe generate."""

from pathlib import Path

import click

from ptqpipe.cli.common import Dtype, machine_of, next_line, one_line_errors


@click.command(epilog="Example: ptqpipe generate MODEL --samples 128 --seqlen 512 -o own.jsonl")
@click.argument("model")
@click.option(
    "--samples",
    type=int,
    default=128,
    show_default=True,
    metavar="N",
    help="Windows to calibrate on; one more is written for every 8 of them, which calibrate holds out.",
)
@click.option(
    "--seqlen", type=int, metavar="N", help="Tokens of a window.  [default: the model's positions, at most 2048]"
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the draws.")
@click.option(
    "--dtype",
    type=Dtype("fp32", "bf16", "fp16", "auto"),
    default="fp32",
    show_default=True,
    help="What the model computes in; auto: the checkpoint's own.",
)
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), required=True, help="File of token ids to write (.jsonl)."
)
@click.option("--workers", type=int, metavar="N", help="Most threads.  [default: physical cores]")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
@click.option("-q", "--quiet", is_flag=True, help="No progress bar.")
@one_line_errors
def generate(
    model: str,
    samples: int,
    seqlen: int | None,
    seed: int,
    dtype: str,
    out: Path,
    workers: int | None,
    device: str,
    overwrite: bool,
    quiet: bool,
) -> None:
    """Let MODEL write the text to calibrate on, where there is no data: calibrate and tune take it as --data."""
    from ptqpipe.stages import generate as stage

    machine = machine_of(workers, device, 8 << 30, progress=not quiet, waits=False)
    done = stage.generate(
        model,
        out,
        samples=samples,
        seqlen=seqlen,
        seed=seed,
        dtype=dtype,
        overwrite=overwrite,
        machine=machine,
        say=None if quiet else lambda line: click.echo(line, err=True),
    )
    click.echo(
        f"{done.out}: {done.samples} windows of {done.seqlen} tokens and {done.held_out} more to hold out, in "
        f"{done.seconds:.1f} s"
    )
    windows = ["--samples", done.samples, "--seqlen", done.seqlen]
    click.echo(next_line("calibrate", model, "--data", out, *windows, "-o", out.with_name(f"{out.stem}-stats")))
