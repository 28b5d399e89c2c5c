"""ptqpipe eval."""

import json
import sys
from pathlib import Path
from typing import Literal, cast

import click

from ptqpipe.cli.common import one_line_errors


@click.command(name="eval")
@click.argument("ckpt")
@click.option("--baseline", metavar="MODEL", help="The model to compare with: the one that CKPT was made from.")
@click.option(
    "--data", type=click.Path(path_type=Path), multiple=True, metavar="FILE", help="Text to score. Repeatable."
)
@click.option("--window", type=int, metavar="N", help="Tokens of context [the model's positions, at most 2048].")
@click.option("--stride", type=int, metavar="N", help="Windows begin every N tokens [the window].")
@click.option("--max-tokens", type=int, metavar="N", help="Use the first N tokens of each file.")
@click.option("--dtype", default="float32", show_default=True, help="float32, bfloat16, float16 or auto.")
@click.option(
    "--activations",
    type=click.Choice(["simulated", "none"]),
    default="simulated",
    show_default=True,
    help="Quantize activations as the format says, or not.",
)
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Where the JSON goes [<ckpt>.eval.json].")
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
    dtype: str,
    activations: str,
    out: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Measure CKPT (a folder, or a hub name): perplexity, KL divergence to a baseline, lm-eval tasks."""
    from ptqpipe.stages import evaluate as stage

    options = stage.Options(
        data=data,
        window=window,
        stride=stride,
        max_tokens=max_tokens,
        dtype=dtype,
        activations=cast(Literal["simulated", "none"], activations),
    )
    result = stage.evaluate(ckpt, baseline=baseline, options=options, progress=not quiet and sys.stderr.isatty())
    target = out or stage.default_out(ckpt)
    stage.write(result, target)
    click.echo(json.dumps(result) if as_json else f"{stage.render(result)}\n\n{target}")
