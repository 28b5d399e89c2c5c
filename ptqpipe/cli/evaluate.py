"""Commands that measure: eval, simulate allreduce."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from ptqpipe.cli import next_steps
from ptqpipe.cli.common import Given, command, main, this_call
from ptqpipe.cli.lines import fitted, say
from ptqpipe.cli.parameters import ACTIVATIONS, DEVICE, FIELD, JSON, PATH, QUIET, Existing, Size, computing_dtype, names
from ptqpipe.errors import UsageError


@command(
    name="eval",
    example="""
ptqpipe eval CKPT --source MODEL --data held-out.txt
ptqpipe eval CKPT --tasks local_piqa --task-data FOLDER --limit 200
""",
    leaves="nothing is written; what is complete of a baseline's log-probabilities stays in the cache for the next run",
)
@click.argument("ckpt")
@click.option("--source", metavar="MODEL", help="The model that CKPT was made from, to compare with.")
@click.option(
    "--data",
    multiple=True,
    metavar="FILE|DIR|NAME:CONFIG:SPLIT",
    help="Text to score: .txt, .jsonl, .json, .csv or .parquet files, a folder of them, or a data set of the "
    "datasets library. Repeatable.  [default: a sample text of 110 kB]",
)
@FIELD
@click.option(
    "--seqlen", type=int, metavar="N", help="Tokens in each window.  [default: the model's positions, at most 2048]"
)
@click.option(
    "--stride", type=int, metavar="N", help="Tokens from the start of a window to the next.  [default: --seqlen]"
)
@click.option("--max-tokens", type=int, metavar="N", help="Tokens of each text to use, from its beginning.")
@click.option(
    "--tasks",
    type=names,
    default="",
    metavar="A,B",
    help="Tasks of lm-eval to run, with commas; local_piqa, local_lambada, ... read the files in --task-data.",
)
@click.option("--task-data", type=PATH, metavar="DIR", help="Folder with the files of the local_ tasks.")
@click.option("--include-path", type=PATH, metavar="DIR", help="Folder of further task files (YAML) for lm-eval.")
@click.option("--limit", type=int, metavar="N", help="Samples of each task to use, from its beginning.")
@click.option("--batch-size", type=int, default=8, show_default=True, help="Batch size for --tasks.")
@computing_dtype("fp32", "bf16", "fp16", "auto", who="both models compute")
@DEVICE
@ACTIVATIONS
@click.option(
    "--cache-dir",
    type=PATH,
    help="Folder that keeps the log-probabilities of --source for later runs.  [default: ~/.cache/ptqpipe]",
)
@click.option(
    "--cache-size", type=Size(), default="16GiB", show_default=True, help="Limit of --cache-dir; 0 keeps nothing."
)
@click.option(
    "--samples",
    type=click.IntRange(0, 100),
    default=0,
    show_default=True,
    metavar="N",
    help="Prompts from --data that both models continue by 32 tokens, to be shown by `ptqpipe report`.",
)
@click.option(
    "-o",
    "--out",
    type=PATH,
    help="JSON file to write.  [default: <ckpt>.eval.json beside a checkpoint of ptqpipe, of others in the working "
    "folder]",
)
@click.option("--overwrite", is_flag=True, help="Replace an eval file that holds more than this call measures.")
@JSON
@QUIET
def evaluate(given: Given) -> None:
    """Measure perplexity, KL divergence and task scores.

    CKPT is a folder, or a name on the hub. Packed weights are decoded exactly, and the inputs of linear layers are
    quantized as the format says.
    """
    from ptqpipe.checkpoint import read_json_object, resolve_source
    from ptqpipe.stages.evaluate import run as stage, text as report

    options = given.into(
        stage.Options,
        tasks=tuple(dict.fromkeys(given.tasks)),
        cache_dir=None if given.cache_size == 0 else given.cache_dir or _user_cache(),
        cache_limit=given.cache_size,
        command=this_call(),
    )
    target = given.out or report.default_out(given.ckpt)
    compared = given.source is not None and bool(given.data or not options.tasks)
    report.check_target(target, overwrite=given.overwrite, compared=compared, tasks=bool(options.tasks))
    shown = not given.quiet and sys.stderr.isatty()
    given.say_unused_gpu()
    result = stage.evaluate(given.ckpt, source=given.source, options=options, progress=shown, log=given.log)
    try:
        given.show(json.dumps(result) if given.as_json else f"{report.render(result)}\n")
    finally:  # shown even if it cannot be written, written even if nobody reads on
        report.write(result, target, ckpt=Path(given.ckpt), warn=lambda line: given.show(f"warning: {line}", err=True))
    if not given.as_json:
        given.show(f"written to {target}")
        config = read_json_object(resolve_source(given.ckpt) / "config.json")
        next_steps.say_next(given, next_steps.evaluate, target, "quantization_config" in config)


def _user_cache() -> Path:
    """$XDG_CACHE_HOME/ptqpipe, by default ~/.cache/ptqpipe."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "ptqpipe"


@main.group()
def simulate() -> None:
    """Simulate collectives: their errors and their times.

    Errors come from the arithmetic of the real collectives, times from a model of machines.
    """


@command(
    group=simulate,
    example="ptqpipe simulate allreduce --ranks 8..64 --codec int8,nvfp4",
    leaves="only what is printed above is complete; no plots were written",
)
@click.option(
    "--ranks",
    default="8..512",
    show_default=True,
    metavar="8|2,4|8..512",
    help="Numbers of ranks; a range means the powers of two in it.",
)
@click.option(
    "--codec",
    default="int8",
    show_default=True,
    metavar="A,B",
    help="Codecs of the messages, with commas; times are those of the first.",
)
@click.option("--block", type=int, default=64, show_default=True, help="Elements of a message that share a scale.")
@click.option(
    "--hadamard",
    type=int,
    default=0,
    metavar="N",
    help="Rotate groups of N elements before they are quantized.  [default: 0, no rotation]",
)
@click.option(
    "--scheme",
    metavar="A,B",
    help="Ways to add up whose errors are simulated, with commas.  [default: ring-bf16, two-shot-bf16, one-shot, "
    "two-shot, hierarchical, semi-loop, ring]",
)
@click.option(
    "--values",
    default="gaussian",
    show_default=True,
    metavar="A,B",
    help="Distributions of the values that are added: gaussian, t3, outliers, cancelling.",
)
@click.option("--elements", type=int, default=1 << 16, show_default=True, help="Elements in the message of each rank.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the drawn values.")
@click.option(
    "--partials",
    type=Existing("file"),
    metavar="FILE",
    help="A .safetensors file with partial sums to add up, instead of drawn ones.",
)
@click.option(
    "--tensor",
    metavar="NAME",
    help="Tensor of --partials with the sums [ranks, ...]; with --weight, the inputs of its layer.",
)
@click.option("--weight", metavar="NAME", help="Tensor of --partials with the layer's weight [outer, inner].")
@click.option("--node", type=int, default=8, show_default=True, help="Ranks per node, in hierarchical schemes.")
@click.option(
    "--topology",
    metavar="A,B",
    help="Machines whose times are modelled, with commas; ethernet-<G>g has G Gbit/s.  [default: all]",
)
@click.option(
    "--size",
    type=Size(),
    multiple=True,
    help="Size of a message whose time is modelled. Repeatable.  [default: 64KiB to 1GiB]",
)
@click.option("--only", type=click.Choice(["error", "time"]), help="Print only the errors, or only the times.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Folder to which plots are written as PNG files.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines instead of tables.")
def allreduce(given: Given) -> None:
    """Compare plain and quantized AllReduces.

    Prints the errors of sums, from the real arithmetic; times, from a model of latency, bandwidth and codec speed; and
    the message size from which quantizing pays.
    """
    from ptqpipe.stages import simulate as stage

    if given.partials is None and (given.tensor or given.weight):
        raise UsageError("--tensor and --weight belong to --partials; add it")
    if given.plot is not None:
        stage.check_plots(given.plot)
    sources = stage.sources_of(given.values, elements=given.elements, seed=given.seed)
    if given.partials is not None:
        sources = (stage.read_partials(given.partials, tensor=given.tensor, weight=given.weight),)
    codecs = stage.codecs_of(given.codec, block=given.block, hadamard=given.hadamard)
    request = stage.request_of(given.ranks, codecs, sources, given.scheme, given.topology, given.node, given.size)
    times, evens = ([], []) if given.only == "error" else stage.time_rows(request)
    errors: list[Any] = []
    if given.only != "time":
        for row in stage.error_rows(request):
            errors.append(row)
            if given.as_json:
                click.echo(json.dumps(stage.as_dict(row)))
    if given.as_json:
        for line in [*map(stage.as_dict, times), *map(stage.as_dict, evens)]:
            click.echo(json.dumps(line))
    else:
        halves = [stage.error_text(errors)] if errors else []
        halves += [stage.time_text(times, evens, request.topologies)] if times else []
        click.echo(fitted("\n\n".join(halves), sys.stdout))
    for path in [] if given.plot is None else stage.write_plots(given.plot, errors, times):
        say(f"{path} written")
