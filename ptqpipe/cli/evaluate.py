"""ptqpipe eval."""

import json
import os
import sys
from pathlib import Path
from typing import Literal, cast

import click

from ptqpipe.cli.common import Dtype, Size, one_line_errors


@click.command(name="eval", epilog="Example: ptqpipe eval CKPT --baseline MODEL --data held-out.txt")
@click.argument("ckpt")
@click.option("--baseline", metavar="MODEL", help="The model to compare with: the one that CKPT was made from.")
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="Text to score: .txt, .jsonl or .parquet. Repeatable.",
)
@click.option(
    "--window", type=int, metavar="N", help="Tokens of context.  [default: the model's positions, at most 2048]"
)
@click.option("--stride", type=int, metavar="N", help="Windows begin every N tokens.  [default: the window]")
@click.option("--max-tokens", type=int, metavar="N", help="Use the first N tokens of each file.")
@click.option("--tasks", default="", metavar="A,B", help="lm-eval's tasks, or local_piqa, local_lambada, ...")
@click.option("--task-data", type=click.Path(path_type=Path), metavar="DIR", help="The files of the local_ tasks.")
@click.option("--include-path", type=click.Path(path_type=Path), metavar="DIR", help="Further lm-eval task YAMLs.")
@click.option("--limit", type=int, metavar="N", help="Use the first N samples of each task.")
@click.option("--batch-size", type=int, default=8, show_default=True, help="Of the tasks.")
@click.option(
    "--dtype",
    type=Dtype("fp32", "bf16", "fp16", "auto"),
    default="fp32",
    show_default=True,
    help="What both models compute in; auto: the checkpoint's own.",
)
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option(
    "--activations",
    type=click.Choice(["simulated", "none"]),
    default="simulated",
    show_default=True,
    help="Quantize activations as the format says, or not.",
)
@click.option(
    "--cache-dir",
    type=click.Path(path_type=Path),
    help="Where the baseline's logits are kept.  [default: ~/.cache/ptqpipe]",
)
@click.option("--cache-size", type=Size(), default="16GiB", show_default=True, help="Limit of the cache; 0: none.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Where the JSON goes.  [default: <ckpt>.eval.json]")
@click.option("--overwrite", is_flag=True, help="Replace an eval file that holds more than this call measures.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option("-q", "--quiet", is_flag=True, help="No progress bar.")
@one_line_errors
def evaluate(
    ckpt: str,
    baseline: str | None,
    data: tuple[Path, ...],
    window: int | None,
    stride: int | None,
    max_tokens: int | None,
    tasks: str,
    task_data: Path | None,
    include_path: Path | None,
    limit: int | None,
    batch_size: int,
    dtype: str,
    device: str,
    activations: str,
    cache_dir: Path | None,
    cache_size: int,
    out: Path | None,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Measure CKPT (a folder, or a hub name): perplexity, KL divergence to a baseline, lm-eval tasks.

    Packed weights are decoded exactly, and the inputs of linear layers are quantized as the format says.
    """
    from ptqpipe.stages.evaluate import run as stage
    from ptqpipe.stages.evaluate import text as report

    options = stage.Options(
        data=data,
        window=window,
        stride=stride,
        max_tokens=max_tokens,
        tasks=tuple(dict.fromkeys(name.strip() for name in tasks.split(",") if name.strip())),
        task_data=task_data,
        include_path=include_path,
        limit=limit,
        batch_size=batch_size,
        dtype=dtype,
        device=device,
        activations=cast(Literal["simulated", "none"], activations),
        cache_dir=None if cache_size == 0 else cache_dir or _user_cache(),
        cache_limit=cache_size,
    )
    target = out or report.default_out(ckpt)
    compared = baseline is not None and bool(data)
    report.check_target(target, overwrite=overwrite, compared=compared, tasks=bool(options.tasks))
    result = stage.evaluate(ckpt, baseline=baseline, options=options, progress=not quiet and sys.stderr.isatty())
    try:
        click.echo(json.dumps(result) if as_json else f"{report.render(result)}\n")
    finally:  # shown even if it cannot be written, written even if nobody reads on
        report.write(result, target)
    if not as_json:
        click.echo(f"written to {target}")


def _user_cache() -> Path:
    """$XDG_CACHE_HOME/ptqpipe, by default ~/.cache/ptqpipe."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path.home() / ".cache") / "ptqpipe"
