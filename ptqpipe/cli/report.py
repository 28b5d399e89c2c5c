"""The command that shows a checkpoint: report."""

from pathlib import Path

import click

from ptqpipe.cli.common import Existing, one_line_errors


@click.command(epilog="Example: ptqpipe report CKPT --source MODEL --eval CKPT.eval.json -o report.html")
@click.argument("ckpt", type=Existing("folder"))
@click.option("--source", type=Existing("folder"), help="The checkpoint that it was made from: errors are recomputed.")
@click.option("--eval", "evaluation", type=Existing("file"), help="What `ptqpipe eval` wrote for CKPT.")
@click.option(
    "-o",
    "--out",
    "--output",
    "output",
    type=click.Path(path_type=Path),
    help="The file.  [default: <ckpt>.report.html]",
)
@click.option(
    "--format", "kind", type=click.Choice(["html", "md"]), help="What is written.  [default: by -o's ending, else html]"
)
@click.option("--all", "all_rows", is_flag=True, help="Compare searches on all rows instead of a sample.")
@one_line_errors
def report(
    ckpt: Path, source: Path | None, evaluation: Path | None, output: Path | None, kind: str | None, all_rows: bool
) -> None:
    """Write one HTML file (or markdown) that shows CKPT: size, quality, errors, scales, every tensor's fate.

    Needs no network to read. Replaces an earlier report, no other file.
    """
    from ptqpipe.stages.report.run import make_report

    path, summary = make_report(ckpt, source=source, evaluation=evaluation, out=output, kind=kind, all_rows=all_rows)
    click.echo(f"{path}: {summary}")
