"""The command that measures: eval."""

import json
import os
import sys
from pathlib import Path

import click

from ptqpipe.cli import next_steps
from ptqpipe.cli.common import Given, command, this_call
from ptqpipe.cli.parameters import ACTIVATIONS, DEVICE, FIELD, JSON, PATH, QUIET, Size, computing_dtype, names


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
    from ptqpipe.check.evaluate import command as stage, eval_summary as report
    from ptqpipe.checkpoint import read_json_object, resolve_source

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
