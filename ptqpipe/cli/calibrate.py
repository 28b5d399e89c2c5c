"""ptqpipe calibrate."""

import json
from pathlib import Path

import click

from ptqpipe.cli.common import (
    Dtype,
    Size,
    devices_of,
    machine_of,
    mode_of,
    next_line,
    one_line_errors,
    ranks_of,
    says_how_to_resume,
)


@click.command(epilog="Example: ptqpipe calibrate MODEL --data text.jsonl -o stats")
@click.argument("model")
@click.option(
    "--data",
    multiple=True,
    metavar="FILE",
    help="Text like what the model will serve: .txt, .jsonl, .parquet, or a data set NAME:CONFIG:SPLIT. Repeatable.  "
    "[required]",
)
@click.option("--field", metavar="NAME", help="Field of a row.  [default: messages, text, content, prompt, ...]")
@click.option("--samples", type=int, default=128, show_default=True, metavar="N", help="Windows to run.")
@click.option(
    "--holdout",
    type=int,
    metavar="N",
    help="Further windows for judging what convert makes of these; moments are kept twice.  [default: samples / 8]",
)
@click.option(
    "--seqlen", type=int, metavar="N", help="Tokens of a window.  [default: the model's positions, at most 2048]"
)
@click.option("--seed", type=int, default=0, show_default=True, help="Chooses the windows.")
@click.option(
    "--moments",
    default="diagonal,full",
    show_default=True,
    metavar="KINDS",
    help="diagonal, block (16x16), full: GPTQ, convert's choice with --stats, needs it; 4 bytes for every pair of a "
    "layer's inputs, twice with held-out windows. diagonal,block is small and fits convert --algorithm rtn.",
)
@click.option(
    "--dtype",
    type=Dtype("fp32", "fp64", "bf16", "fp16", "auto"),
    default="fp32",
    show_default=True,
    help="What the model computes in; auto: the checkpoint's own.",
)
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="Statistics folder to write.")
@click.option(
    "--max-memory", type=Size(), default="8GiB", show_default=True, help="Samples that do not fit go to disk."
)
@click.option("--workers", type=int, metavar="N", help="Threads.  [default: physical cores]")
@click.option(
    "--device",
    default="cpu",
    show_default=True,
    help="cpu, cuda:N, cuda (all GPUs share the samples; one for each rank of a torchrun), or auto.",
)
@click.option("--resume", is_flag=True, help="Continue an interrupted run; where there is none, start.")
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.option("-q", "--quiet", is_flag=True, help="No progress bar.")
@one_line_errors
def calibrate(
    model: str,
    data: tuple[str, ...],
    field: str | None,
    samples: int,
    holdout: int | None,
    seqlen: int | None,
    seed: int,
    moments: str,
    dtype: str,
    out: Path,
    max_memory: int,
    workers: int | None,
    device: str,
    resume: bool,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run MODEL (a folder, or a hub name) on text, block by block, and keep statistics of its linear inputs."""
    import torch

    from ptqpipe.stages.calibrate import run as stage
    from ptqpipe.stages.calibrate import text

    options = stage.CalibrateOptions(
        samples=samples,
        seqlen=seqlen,
        seed=seed,
        field=field,
        moments=tuple(kind for kind in moments.replace(" ", "").split(",") if kind),
        dtype=dtype,
        holdout=holdout,
    )
    devices = devices_of(device)
    machine = machine_of(workers, devices[0], max_memory, progress=not quiet and not as_json, waits=False)
    mode = mode_of(resume, overwrite)
    with says_how_to_resume(out, mode):
        done = stage.calibrate(
            model,
            data,
            out,
            options=options,
            mode=mode,
            machine=machine,
            ranks=ranks_of(),
            devices=[machine.device, *map(torch.device, devices[1:])],
            warn=lambda line: click.echo(f"Warning: {line}", err=True),
        )
    if done is None:
        return
    if as_json:
        click.echo(json.dumps(text.to_json(done)))
        return
    click.echo(text.render(done))
    click.echo(next_line("convert", model, "--stats", out))
