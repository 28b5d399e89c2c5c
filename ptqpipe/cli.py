"""The command line: a command parses, calls one stage, prints what it says. Heavy imports live inside the commands.

This is the only file that knows click, reads the environment, or turns an error into an exit code.
"""

import json
import os
import re
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import click

from ptqpipe._version import __version__
from ptqpipe.errors import PtqError, UsageError

if TYPE_CHECKING:
    from ptqpipe.stages.machine import Machine, Ranks

P = ParamSpec("P")
R = TypeVar("R")

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(b|[kmgt]i?b?)?", re.IGNORECASE)
_UNITS = {"": 1, "b": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


class Size(click.ParamType):
    """A number of bytes: ``800MB`` (10^6), ``2GiB`` (2^30), ``1500000000``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parses a size; click's error otherwise."""
        if isinstance(value, int):
            return value
        match = _SIZE.fullmatch(str(value).strip())
        if match is None:
            self.fail(f"{value!r} is not a size; write 2GiB, 800MB or a number of bytes", param, ctx)
        unit = (match[2] or "").lower()
        return int(float(match[1]) * _UNITS[unit.removesuffix("b") if len(unit) > 1 else unit])


def one_line_errors(command: Callable[P, R]) -> Callable[P, R]:
    """PtqError and a failing disk become one line on stderr and an exit code; anything else is a bug and keeps its trace."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except PtqError as error:
            _fail(str(error), error.exit_code)
        except (PermissionError, FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            _fail(f"{error.strerror}: {error.filename}", 1)
        except MemoryError:
            _fail("out of memory; lower --workers or --max-memory", 1)

    return wrapped


def _fail(message: str, code: int) -> Any:
    rank = os.environ.get("RANK")
    where = f" (rank {rank})" if rank not in (None, "0") else ""
    click.echo(f"Error{where}: {message}", err=True)
    sys.exit(code)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="ptqpipe")
def main() -> None:
    """Hugging Face checkpoints to FP4 and FP8: streaming, with block scales that are proven optimal."""


@main.command()
@click.argument("model")
@click.option("--format", "scheme", metavar="NAME", help="nvfp4 (default), nvfp4_w4a4, mxfp4, mxfp8, fp8, fp8_block, ...; see `ptqpipe formats`.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Output folder [default: <model>-<FORMAT>].")
@click.option("--recipe", "recipe_path", type=click.Path(path_type=Path), help="A YAML recipe instead of --format.")
@click.option("--container", metavar="NAME", help="compressed_tensors, modelopt, deepseek_fp8, gptoss_mxfp4, ptqpipe.")
@click.option("--search", metavar="NAME", help="exact (default), absmax, four_over_six, ...; see `ptqpipe formats`.")
@click.option("--global-scale", type=click.Choice(["search", "absmax"]), help="Search the global scale (default) or take amax.")
@click.option("--ignore", multiple=True, metavar="PATTERN", help="Keep these modules: a name, a glob, or re:<regex>. Repeatable.")
@click.option("--input-amax", type=float, metavar="A", help="W4A4 without calibration: the largest activation that must not clip [336].")
@click.option("--shard-size", type=Size(), metavar="SIZE", help="Largest weight file [about 1/32 of all, 256MiB to 4GiB].")
@click.option("--workers", type=int, metavar="N", help="Units in flight [processors, at most 16].")
@click.option("--device", default="cpu", show_default=True, help="cpu, cuda or cuda:N.")
@click.option("--max-memory", type=Size(), default="2GiB", show_default=True, help="Limit of resident memory.")
@click.option("--resume", is_flag=True, help="Continue an interrupted run.")
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
    ignore: tuple[str, ...],
    input_amax: float | None,
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
    from ptqpipe.recipe import RecipeOptions
    from ptqpipe.stages import convert as stage
    from ptqpipe.stages import tables

    if resume and overwrite:
        raise UsageError("--resume and --overwrite contradict each other; give one of them")
    options = RecipeOptions(scheme, container, search, global_scale, ignore, input_amax, shard_size)
    machine = _machine(workers, device, max_memory, progress=not quiet and not as_json)
    prepared = stage.prepare(model, options=options, recipe_path=recipe_path, out=out)
    with prepared.source:
        if dry_run:
            click.echo(json.dumps(tables.plan_json(prepared, machine)) if as_json else tables.plan_text(prepared, machine))
            return
        ranks = _ranks()
        if ranks.rank == 0 and not as_json:
            click.echo(tables.header_text(prepared))
        try:
            mode = "resume" if resume else "overwrite" if overwrite else "new"
            done = stage.convert(prepared, mode=mode, machine=machine, ranks=ranks)
        except KeyboardInterrupt:
            again = f"ptqpipe convert {model} ... -o {prepared.out} --resume"
            click.echo(f"\nInterrupted. What is finished is kept; continue with: {again}", err=True)
            sys.exit(130)
    if done is not None:
        click.echo(json.dumps(tables.converted_json(done)) if as_json else tables.converted_text(done))


@main.command()
def formats() -> None:
    """List formats, containers and searches."""
    from ptqpipe.containers import container_names
    from ptqpipe.schemes import SCHEMES
    from ptqpipe.search import search_names

    click.echo("formats (any case; also element/block/scale[/global], such as e2m1/8/ue5m3):")
    for scheme in SCHEMES.values():
        names = ", ".join((scheme.name, *scheme.aliases))
        click.echo(f"  {names:<42} {scheme.describe()} [{scheme.container}]")
    click.echo(f"containers: {', '.join(container_names())}")
    click.echo(f"searches:   {', '.join(search_names())}")


def _machine(workers: int | None, device: str, max_memory: int, *, progress: bool) -> "Machine":
    """The machine options, checked."""
    import torch

    from ptqpipe.stages.machine import Machine, default_workers

    if device != "cpu" and not re.fullmatch(r"cuda(:\d+)?", device):
        raise UsageError(f"--device {device!r} is unknown; use cpu, cuda or cuda:N")
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise UsageError(f"--device {device} needs a GPU that torch can use; none is visible, use --device cpu")
        device = device if ":" in device else f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    local = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return Machine(
        workers=workers if workers is not None else max(1, default_workers() // local),
        device=torch.device(device),
        memory_bytes=max_memory,
        progress=progress and sys.stderr.isatty(),
    )


def _ranks() -> "Ranks":
    """This process among those of a torchrun, joined by gloo; rank 0 of 1 without one."""
    from ptqpipe.stages.machine import Ranks

    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return Ranks()
    import torch

    torch.distributed.init_process_group("gloo")
    return Ranks(int(os.environ["RANK"]), world)
