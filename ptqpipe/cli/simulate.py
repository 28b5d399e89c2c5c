"""What an AllReduce would cost and lose on machines that are not at hand: simulate allreduce."""

import json
from pathlib import Path

import click

from ptqpipe.cli.common import Existing, Size, one_line_errors
from ptqpipe.errors import UsageError


@click.group()
def simulate() -> None:
    """Simulate collectives: error by exact numerics, time by a model."""


@simulate.command(epilog="Example: ptqpipe simulate allreduce --ranks 8..64 --codec int8,nvfp4")
@click.option("--ranks", default="8..512", show_default=True, metavar="8|2,4|8..512", help="Worlds; a range doubles.")
@click.option("--codec", default="int8", show_default=True, metavar="A,B", help="What is sent; times use the first.")
@click.option("--block", type=int, default=64, show_default=True, help="Elements that share a scale.")
@click.option(
    "--hadamard",
    type=int,
    default=0,
    metavar="N",
    help="Rotate groups of N before quantizing.  [default: 0, not]",
)
@click.option("--scheme", metavar="A,B", help="Schemes whose error is simulated.")
@click.option(
    "--data", default="gaussian", show_default=True, metavar="A,B", help="gaussian, t3, outliers, cancelling."
)
@click.option("--elements", type=int, default=1 << 16, show_default=True, help="Of one rank's drawn message.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--partials", type=Existing("file"), metavar="FILE", help="Partials of a .safetensors file.")
@click.option("--tensor", metavar="NAME", help="With --partials: [ranks, ...], or inputs of a linear layer.")
@click.option("--weight", metavar="NAME", help="With --partials: the layer's weight [outer, inner].")
@click.option("--node", type=int, default=8, show_default=True, help="Ranks of a machine, in hierarchical schemes.")
@click.option("--topology", metavar="A,B", help="Machines, ethernet-<G>g among them.  [default: all]")
@click.option("--size", type=Size(), multiple=True, help="Bytes of the message; repeatable.  [default: 64KiB to 1GiB]")
@click.option("--only", type=click.Choice(["error", "time"]), help="One half of it.")
@click.option("--plot", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help="Write PNGs there.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON lines instead of tables.")
@one_line_errors
def allreduce(
    ranks: str,
    codec: str,
    block: int,
    hadamard: int,
    scheme: str | None,
    data: str,
    elements: int,
    seed: int,
    partials: Path | None,
    tensor: str | None,
    weight: str | None,
    node: int,
    topology: str | None,
    size: tuple[int, ...],
    only: str | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Error and time of plain and quantized AllReduces, and the message size from which quantizing pays.

    Errors are computed with the arithmetic that runs; times are a model of latency, bandwidth and codec speed.
    """
    from ptqpipe.stages import simulate as stage

    if partials is None and (tensor or weight):
        raise UsageError("--tensor and --weight belong to --partials; add it")
    if plot is not None:
        stage.check_plots(plot)
    worlds, codecs = stage.worlds(ranks), stage.codecs_of(codec, block=block, hadamard=hadamard)
    sources = stage.sources_of(data, elements=elements, seed=seed)
    if partials is not None:
        sources = (stage.read_partials(partials, tensor=tensor, weight=weight),)
    machines, sizes = stage.topologies_of(topology), size or stage.DEFAULT_SIZES
    request = stage.Request(worlds, codecs, sources, stage.schemes_of(scheme), machines, node, sizes)
    times, evens = ([], []) if only == "error" else stage.time_rows(request)
    errors = []
    if only != "time":
        for row in stage.error_rows(request):
            errors.append(row)
            if as_json:
                click.echo(json.dumps(stage.as_dict(row)))
    if as_json:
        for line in [*map(stage.as_dict, times), *map(stage.as_dict, evens)]:
            click.echo(json.dumps(line))
    else:
        halves = [stage.error_text(errors)] if errors else []
        halves += [stage.time_text(times, evens, machines)] if times else []
        click.echo("\n\n".join(halves))
    for path in [] if plot is None else stage.write_plots(plot, errors, times):
        click.echo(f"{path} written", err=True)
