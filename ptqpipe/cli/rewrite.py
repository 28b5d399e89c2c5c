"""Commands that write a checkpoint's numbers in another form: relayout, dequantize."""

import json
from pathlib import Path

import click

from ptqpipe.cli.common import Size, machine_of, mode_of, one_line_errors, ranks_of, says_how_to_resume


@click.command()
@click.argument("ckpt", type=click.Path(path_type=Path))
@click.option("--container", required=True, metavar="NAME", help="The layout to write; see `ptqpipe formats`.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Output folder [default: <ckpt>-<container>].")
@click.option("--workers", type=int, metavar="N", help="Weights in flight [processors, at most 16].")
@click.option("--max-memory", type=Size(), default="2GiB", show_default=True, help="Limit of resident memory.")
@click.option("--resume", is_flag=True, help="Continue an interrupted run.")
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.option("-q", "--quiet", is_flag=True, help="No progress bar.")
@one_line_errors
def relayout(
    ckpt: Path,
    container: str,
    out: Path | None,
    workers: int | None,
    max_memory: int,
    resume: bool,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Rewrite CKPT in another container: the same codes and scales, nothing is quantized again."""
    from ptqpipe.stages import relayout as stage

    out = out if out is not None else Path(f"{ckpt.resolve().name}-{container.lower().replace('_', '-')}")
    machine = machine_of(workers, "cpu", max_memory, progress=not quiet and not as_json)
    mode = mode_of(resume, overwrite)
    with says_how_to_resume(f"ptqpipe relayout {ckpt} --container {container} -o {out} --resume"):
        done = stage.relayout(ckpt, out, container=container, mode=mode, machine=machine, ranks=ranks_of())
    if done is not None:
        click.echo(json.dumps(stage.to_json(done)) if as_json else stage.render(done))


@click.command()
@click.argument("ckpt", type=click.Path(path_type=Path))
@click.option("--dtype", default="bf16", show_default=True, metavar="NAME", help="bf16, fp16 or fp32.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Output folder [default: <ckpt>-<dtype>].")
@click.option("--workers", type=int, metavar="N", help="Weights in flight [processors, at most 16].")
@click.option("--max-memory", type=Size(), default="2GiB", show_default=True, help="Limit of resident memory.")
@click.option("--resume", is_flag=True, help="Continue an interrupted run.")
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.option("-q", "--quiet", is_flag=True, help="No progress bar.")
@one_line_errors
def dequantize(
    ckpt: Path,
    dtype: str,
    out: Path | None,
    workers: int | None,
    max_memory: int,
    resume: bool,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write CKPT as a plain float checkpoint that every tool loads."""
    from ptqpipe.stages import dequantize as stage

    out = out if out is not None else Path(f"{ckpt.resolve().name}-{dtype}")
    machine = machine_of(workers, "cpu", max_memory, progress=not quiet and not as_json)
    mode = mode_of(resume, overwrite)
    with says_how_to_resume(f"ptqpipe dequantize {ckpt} --dtype {dtype} -o {out} --resume"):
        done = stage.dequantize(ckpt, out, dtype=dtype, mode=mode, machine=machine, ranks=ranks_of())
    if done is not None:
        click.echo(json.dumps(stage.to_json(done)) if as_json else stage.render(done))
