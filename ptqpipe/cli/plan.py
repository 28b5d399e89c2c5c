"""The command that chooses a format for every layer: plan."""

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ptqpipe.cli.common import Size, machine_of, next_line, one_line_errors
from ptqpipe.errors import UsageError

if TYPE_CHECKING:
    from ptqpipe.stages.plan.run import Budget

_SMALL = re.compile(r"\d{1,2}(?:\.\d+)?|\d*\.\d+")  # bytes that no model fits in
_BITS = re.compile(r"(\d+(?:\.\d+)?)\s*(?:bits?|bpw)", re.IGNORECASE)


@click.command(epilog="Example: ptqpipe plan MODEL --budget 5.5bits --stats stats -o mixed.yaml")
@click.argument("model")
@click.option("--budget", required=True, metavar="4.75bits|9GB", help="Bits per weight, or bytes of weights on disk.")
@click.option("--formats", metavar="A,B,...", help="Candidates.  [default: nvfp4,mxfp4a16,mxfp8a16,fp8_dynamic,keep]")
@click.option("--stats", type=click.Path(path_type=Path), help="Folder of `ptqpipe calibrate`: weighted output errors.")
@click.option("--measure", type=click.Path(path_type=Path), metavar="FILE", help="Measure KL on this text instead.")
@click.option("--max-tokens", type=int, metavar="N", help="With --measure: tokens of the text.  [default: 4096]")
@click.option(
    "--window", type=int, metavar="N", help="With --measure: tokens of context.  [default: the model's, at most 2048]"
)
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="The recipe.")
@click.option("--workers", type=int, metavar="N", help="Groups in flight.  [default: processors, at most 16]")
@click.option("--max-memory", type=Size(), default="2GiB", show_default=True, help="Limit of resident memory.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
@one_line_errors
def plan(
    model: str,
    budget: str,
    formats: str | None,
    stats: Path | None,
    measure: Path | None,
    max_tokens: int | None,
    window: int | None,
    out: Path,
    workers: int | None,
    max_memory: int,
    as_json: bool,
    quiet: bool,
) -> None:
    """Choose a format for every layer of MODEL under a budget, by integer programming; writes a recipe for convert.

    Without --stats and --measure the sensitivity of a layer is the error of its weights. --measure keeps its numbers
    in OUT.measured.jsonl and continues from there.
    """
    from ptqpipe.stages.plan import run as stage
    from ptqpipe.stages.plan import text
    from ptqpipe.stages.plan.measure import DEFAULT_TOKENS, Measurement
    from ptqpipe.stages.plan.units import DEFAULT_FORMATS

    if measure is None and (max_tokens is not None or window is not None):
        raise UsageError("--max-tokens and --window belong to --measure; add it")
    stage.check_recipe_target(out)
    measurement = None
    if measure is not None:
        shown = not quiet and sys.stderr.isatty()
        measurement = Measurement(
            text=measure,
            record=out.with_name(f"{out.name}.measured.jsonl"),
            tokens=DEFAULT_TOKENS if max_tokens is None else max_tokens,
            window=window,
            on_measured=(lambda done, of: click.echo(f"\r{done} of {of} measured", nl=done == of, err=True))
            if shown
            else None,
        )
    found = stage.plan_mixed(
        model,
        _budget(budget),
        formats=DEFAULT_FORMATS if formats is None else tuple(formats.replace(" ", "").split(",")),
        stats=stats,
        measurement=measurement,
        machine=machine_of(workers, "cpu", max_memory, progress=False),
    )
    stage.write_recipe(found, out)
    if as_json:
        click.echo(json.dumps(text.to_json(found)))
        return
    click.echo(f"{text.render(found)}\n{out} is the recipe")
    click.echo(next_line("convert", model, "--recipe", out, *([] if stats is None else ["--stats", stats])))


def _budget(text: str) -> "Budget":
    """Bits or bytes. UsageError for anything else."""
    from ptqpipe.stages.plan.run import Budget

    match = _BITS.fullmatch(text.strip())
    if match is not None:
        return Budget(bits=float(match[1]))
    if _SMALL.fullmatch(text.strip()) is not None:
        number = text.strip()
        raise UsageError(f"--budget {number} is a number without a unit; write {number}bits, or a size such as 9GB")
    try:
        return Budget(nbytes=Size().convert(text, None, None))
    except click.UsageError:
        raise UsageError(f"--budget {text!r} is neither bits nor bytes; write 4.75bits, 9GB or 800MiB") from None
