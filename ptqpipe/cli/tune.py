"""ptqpipe tune."""

import json
from pathlib import Path

import click

from ptqpipe.cli.common import Size, machine_of, mode_of, next_line, one_line_errors, says_how_to_resume
from ptqpipe.errors import UsageError


@click.command(epilog="Example: ptqpipe tune MODEL --data text.jsonl -o codes")
@click.argument("model")
@click.option(
    "--data",
    multiple=True,
    metavar="FILE",
    help="Text like what the model will serve. Repeatable.  [required]",
)
@click.option("--field", metavar="NAME", help="Field of a row.  [default: messages, text, content, prompt, ...]")
@click.option("--format", "scheme", metavar="NAME", help="nvfp4, nvfp4_w4a4, mxfp4, ...  [default: nvfp4]")
@click.option("--recipe", "recipe_path", type=click.Path(path_type=Path), help="A YAML recipe instead of --format.")
@click.option(
    "--container", metavar="NAME", help="The container of the conversion, where --format's default does not fit."
)
@click.option("--ignore", multiple=True, metavar="PATTERN", help="Keep these modules. Repeatable.")
@click.option("--stats", type=click.Path(path_type=Path), help="Statistics of `ptqpipe calibrate`, for the start.")
@click.option("--algorithm", type=click.Choice(["rtn", "gptq"]), help="With --stats: the codes to start from.")
@click.option("--samples", type=int, default=128, show_default=True, metavar="N", help="Windows to learn from.")
@click.option(
    "--seqlen",
    type=int,
    metavar="N",
    help="Tokens of a window.  [default: the model's positions, at most 2048]",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Chooses the windows and their order.")
@click.option(
    "--method",
    type=click.Choice(["learned", "gptq", "gptq+learned"]),
    default="learned",
    show_default=True,
    help="gptq: error feedback, layer by layer, each making up for what those before it have lost.",
)
@click.option("--share", type=float, metavar="F", help="How much of that a layer makes up for, 0 to 1.  [default: 0.5]")
@click.option("--steps", type=int, metavar="N", help="Steps of descent in each block.  [default: 200]")
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="Folder of codes to write.")
@click.option(
    "--max-memory", type=Size(), default="8GiB", show_default=True, help="Samples that do not fit go to disk."
)
@click.option("--workers", type=int, metavar="N", help="Threads.  [default: physical cores]")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option("--resume", is_flag=True, help="Continue an interrupted run; where there is none, start.")
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.option("-q", "--quiet", is_flag=True, help="No progress bar.")
@one_line_errors
def tune(
    model: str,
    data: tuple[str, ...],
    field: str | None,
    scheme: str | None,
    recipe_path: Path | None,
    container: str | None,
    ignore: tuple[str, ...],
    stats: Path | None,
    algorithm: str | None,
    samples: int,
    seqlen: int | None,
    seed: int,
    method: str,
    share: float | None,
    steps: int | None,
    out: Path,
    max_memory: int,
    workers: int | None,
    device: str,
    resume: bool,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Find how MODEL's weights are rounded, block by block; `ptqpipe convert MODEL --rounding OUT` writes them."""
    from ptqpipe.options import RecipeOptions
    from ptqpipe.stages.tune import run as stage
    from ptqpipe.stages.tune import text

    if share is not None and "gptq" not in method:
        raise UsageError("--share belongs to --method gptq and gptq+learned; add it, or leave --share out")
    if steps is not None and "learned" not in method:
        raise UsageError("--steps belongs to --method learned and gptq+learned; add it, or leave --steps out")
    options = stage.TuneOptions(
        samples,
        seqlen,
        seed,
        field,
        method=method,
        share=stage.SHARE if share is None else share,
        settings=stage.settings_of(steps, seed=seed),
    )
    machine = machine_of(workers, device, max_memory, progress=not quiet and not as_json, waits=False)
    mode = mode_of(resume, overwrite)
    with says_how_to_resume(out, mode):
        done = stage.tune(
            model,
            data,
            out,
            recipe=RecipeOptions(scheme=scheme, container=container, ignore=ignore, algorithm=algorithm),
            recipe_path=recipe_path,
            stats=stats,
            options=options,
            mode=mode,
            machine=machine,
        )
    if as_json:
        click.echo(json.dumps(text.to_json(done)))
        return
    click.echo(text.render(done))
    known = [] if stats is None else ["--stats", stats]
    click.echo(next_line("convert", model, "--rounding", out, *known))
