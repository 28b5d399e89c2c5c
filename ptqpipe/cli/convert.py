"""ptqpipe convert."""

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from ptqpipe.cli.common import Size, machine_of, mode_of, one_line_errors, ranks_of, says_how_to_resume


@click.command(epilog="Example: ptqpipe convert MODEL --format nvfp4 -o OUT")
@click.argument("model")
@click.option(
    "--format",
    "scheme",
    metavar="NAME",
    help="nvfp4, nvfp4_w4a4, mxfp4, mxfp8, fp8, fp8_block, ...; see `ptqpipe formats`.  [default: nvfp4]",
)
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Output folder.  [default: <model>-<FORMAT>]")
@click.option("--recipe", "recipe_path", type=click.Path(path_type=Path), help="A YAML recipe instead of --format.")
@click.option(
    "--container", metavar="NAME", help="compressed_tensors, modelopt, deepseek_fp8, gptoss_mxfp4, mxfp8_hf, ptqpipe."
)
@click.option(
    "--search",
    metavar="NAME",
    help="exact, absmax, four_over_six, ...; see `ptqpipe formats`.  [default: exact]",
)
@click.option(
    "--global-scale",
    type=click.Choice(["search", "absmax"]),
    help="Search the global scale or take amax.  [default: search]",
)
@click.option(
    "--rounding",
    type=click.Path(path_type=Path),
    help="Learned codes of `ptqpipe tune`. Format, container and ignored modules are those that they were learned for.",
)
@click.option("--stats", type=click.Path(path_type=Path), help="Statistics of `ptqpipe calibrate`.")
@click.option(
    "--algorithm",
    type=click.Choice(["rtn", "gptq"]),
    help="With --stats: how codes are chosen.  [default: gptq; rtn where calibrate left out the full moments]",
)
@click.option(
    "--weighting",
    type=click.Choice(["none", "diagonal", "block"]),
    help="With --stats: what the block scales minimize.  [default: diagonal]",
)
@click.option(
    "--damping",
    type=float,
    metavar="D",
    help="gptq: share of the mean second moment that is added.  [default: 0.01]",
)
@click.option(
    "--refine",
    type=int,
    metavar="N",
    help="gptq: sweeps of coordinate descent over scales and codes afterwards.  [default: 3]",
)
@click.option(
    "--low-rank", type=int, metavar="R", help="Rank of a correction added to each weight (container ptqpipe)."
)
@click.option("--low-rank-dtype", type=click.Choice(["bf16", "fp8"]), help="What it is stored in.  [default: bf16]")
@click.option(
    "--ignore", multiple=True, metavar="PATTERN", help="Keep these modules: a name, a glob, or re:<regex>. Repeatable."
)
@click.option(
    "--input-amax",
    type=float,
    metavar="A",
    help="W4A4 without calibration: the largest activation that must not clip.  [default: 336]",
)
@click.option(
    "--input-scale",
    type=click.Choice(["absmax", "percentile", "mse"]),
    help="Static activation scales with --stats: by which activation.  [default: absmax]",
)
@click.option("--headroom", type=float, metavar="F", help="That activation is multiplied by F.  [default: 1]")
@click.option("--bias-correction", is_flag=True, help="With --stats: biases make up for the mean error.")
@click.option(
    "--kv-cache",
    type=click.Choice(["none", "fp8", "fp8_per_head"]),
    help="With --stats: scales of an FP8 key-value cache.  [default: none]",
)
@click.option(
    "--shard-size",
    type=Size(),
    metavar="SIZE",
    help="Largest weight file.  [default: about 1/32 of all, 256MiB to 4GiB]",
)
@click.option("--workers", type=int, metavar="N", help="Units in flight.  [default: processors, at most 16]")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option("--max-memory", type=Size(), default="2GiB", show_default=True, help="Limit of resident memory.")
@click.option("--resume", is_flag=True, help="Continue an interrupted run; where there is none, start.")
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
@click.option("--dry-run", is_flag=True, help="Print the plan and the exact size; read and write no weights.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("-q", "--quiet", is_flag=True, help="No progress bar.")
@one_line_errors
def convert(
    model: str,
    scheme: str | None,
    out: Path | None,
    recipe_path: Path | None,
    container: str | None,
    search: str | None,
    global_scale: str | None,
    rounding: Path | None,
    stats: Path | None,
    algorithm: str | None,
    weighting: str | None,
    damping: float | None,
    refine: int | None,
    low_rank: int | None,
    low_rank_dtype: str | None,
    ignore: tuple[str, ...],
    input_amax: float | None,
    input_scale: str | None,
    headroom: float | None,
    bias_correction: bool,
    kv_cache: str | None,
    shard_size: int | None,
    workers: int | None,
    device: str,
    max_memory: int,
    resume: bool,
    overwrite: bool,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Convert MODEL (a folder, or a hub name) to a packed low-precision checkpoint.

    Under torchrun the units are divided among the ranks; the bytes are the same.
    """
    from ptqpipe.options import RecipeOptions
    from ptqpipe.stages.convert import run as stage
    from ptqpipe.stages.convert import text as tables
    from ptqpipe.stages.convert.prepare import best_with, prepare

    mode = mode_of(resume, overwrite)
    options = RecipeOptions(
        scheme=scheme,
        container=container,
        search=search,
        global_scale=global_scale,
        ignore=ignore,
        input_amax=input_amax,
        shard_bytes=shard_size,
        algorithm=algorithm,
        weighting=weighting,
        damping=damping,
        refine=refine,
        input_scale=input_scale,
        headroom=headroom,
        kv_cache=kv_cache,
        bias_correction=bias_correction or None,
        low_rank=low_rank,
        low_rank_dtype=low_rank_dtype,
    )
    machine = machine_of(workers, device, max_memory, progress=not quiet and not as_json)
    options = best_with(options, stats=stats, recipe_path=recipe_path, rounding=rounding)
    prepared = prepare(model, options=options, recipe_path=recipe_path, out=out, stats=stats, rounding=rounding)
    with prepared:
        no_config = tables.missing_config(prepared)
        if dry_run:
            _warn(no_config)
            click.echo(
                json.dumps(tables.plan_json(prepared, machine)) if as_json else tables.plan_text(prepared, machine)
            )
            return
        ranks = ranks_of()
        if ranks.rank == 0:
            _warn(no_config)
        with says_how_to_resume(prepared.out, mode), _stop_is_interrupt():
            if ranks.rank == 0 and not as_json:
                click.echo(tables.header_text(prepared, machine))
            done = stage.convert(prepared, mode=mode, machine=machine, ranks=ranks)
    if done is not None:
        click.echo(json.dumps(tables.converted_json(done)) if as_json else tables.converted_text(done))


def _warn(line: str | None) -> None:
    """A line on stderr, where there is one to say."""
    if line is not None:
        click.echo(f"warning: {line}", err=True)


@contextmanager
def _stop_is_interrupt() -> Iterator[None]:
    """SIGTERM, a batch system's stop, ends meanwhile as cleanly as Ctrl-C. To be called in the main thread."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
