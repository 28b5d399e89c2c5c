"""The command line: a command parses, calls one stage, prints what it says. Heavy imports live inside the commands.

This is the only file that knows click, reads the environment, or turns an error into an exit code.
"""

import io
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, ParamSpec, TypeVar

import click

from ptqpipe._version import __version__
from ptqpipe.errors import AlreadyComplete, PtqError, UsageError, one_line

if TYPE_CHECKING:
    from ptqpipe.stages.machine import Machine, Ranks

P = ParamSpec("P")
R = TypeVar("R")

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(b|[kmgt]i?b?)?", re.IGNORECASE)
MAX_SIZE = 2**62  # bytes
_UNITS = {
    "": 1,
    "b": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


class Size(click.ParamType[int]):
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
        size = float(match[1]) * _UNITS[unit.removesuffix("b") if len(unit) > 1 else unit]
        if size > MAX_SIZE:
            self.fail(f"{value!r} is more than any machine has; write 2GiB, 800MB or a number of bytes", param, ctx)
        return int(size)


def one_line_errors(command: Callable[P, R]) -> Callable[P, R | None]:
    """PtqError and disk errors become one line on stderr and an exit code; anything else is a bug, with its trace."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return command(*args, **kwargs)
        except AlreadyComplete as done:
            click.echo(str(done))
        except PtqError as error:
            _fail(str(error), error.exit_code)
        except OSError as error:
            _fail(one_line(": ".join(str(part) for part in (error.strerror or error, error.filename) if part)), 1)
        except MemoryError:
            _fail("out of memory; lower --workers or --max-memory", 1)
        return None

    return wrapped


def _fail(message: str, code: int) -> NoReturn:
    rank = os.environ.get("RANK")
    where = f" (rank {rank})" if rank not in (None, "0") else ""
    click.echo(f"Error{where}: {message}", err=True)
    sys.exit(code)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="ptqpipe")
def main() -> None:
    """Hugging Face checkpoints to FP4 and FP8: streaming, with block scales that are proven optimal."""
    for stream in (sys.stdout, sys.stderr):  # names of files need not be Unicode, and terminals need not know it
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@main.command()
@click.argument("model")
@click.option(
    "--format",
    "scheme",
    metavar="NAME",
    help="nvfp4 (default), nvfp4_w4a4, mxfp4, mxfp8, fp8, fp8_block, ...; see `ptqpipe formats`.",
)
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Output folder [default: <model>-<FORMAT>].")
@click.option("--recipe", "recipe_path", type=click.Path(path_type=Path), help="A YAML recipe instead of --format.")
@click.option("--container", metavar="NAME", help="compressed_tensors, modelopt, deepseek_fp8, gptoss_mxfp4, ptqpipe.")
@click.option("--search", metavar="NAME", help="exact (default), absmax, four_over_six, ...; see `ptqpipe formats`.")
@click.option(
    "--global-scale", type=click.Choice(["search", "absmax"]), help="Search the global scale (default) or take amax."
)
@click.option(
    "--ignore", multiple=True, metavar="PATTERN", help="Keep these modules: a name, a glob, or re:<regex>. Repeatable."
)
@click.option(
    "--input-amax",
    type=float,
    metavar="A",
    help="W4A4 without calibration: the largest activation that must not clip [336].",
)
@click.option(
    "--shard-size", type=Size(), metavar="SIZE", help="Largest weight file [about 1/32 of all, 256MiB to 4GiB]."
)
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
            click.echo(
                json.dumps(tables.plan_json(prepared, machine)) if as_json else tables.plan_text(prepared, machine)
            )
            return
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a batch system's stop ends as cleanly as Ctrl-C
        ranks = _ranks()
        if ranks.rank == 0 and not as_json:
            click.echo(tables.header_text(prepared))
        try:
            mode: Literal["new", "resume", "overwrite"] = "resume" if resume else "overwrite" if overwrite else "new"
            done = stage.convert(prepared, mode=mode, machine=machine, ranks=ranks)
        except KeyboardInterrupt:
            click.echo(f"\nInterrupted. What is finished is kept; continue with: {_resume_command()}", err=True)
            sys.exit(130)
    if done is not None:
        click.echo(json.dumps(tables.converted_json(done)) if as_json else tables.converted_text(done))


@main.command()
@click.argument("ckpt", type=click.Path(path_type=Path))
@click.option("--source", type=click.Path(path_type=Path), help="The checkpoint that it was made from.")
@click.option(
    "--optimal", is_flag=True, help="Prove the block scales optimal again by brute force (a sample of blocks)."
)
@click.option("--all", "all_blocks", is_flag=True, help="With --optimal: every block instead of a sample.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@one_line_errors
def verify(ckpt: Path, source: Path | None, optimal: bool, all_blocks: bool, as_json: bool) -> None:
    """Recompute every claim of CKPT from its bytes; exit 1 on any fault."""
    from ptqpipe.stages import verify as stage

    if all_blocks and not optimal:
        raise UsageError("--all says how many blocks --optimal proves; add --optimal")
    report = stage.verify(ckpt, source=source, optimal=optimal, all_blocks=all_blocks)
    click.echo(json.dumps(stage.to_json(report)) if as_json else stage.render(report))
    sys.exit(1 if report.faults else 0)


@main.command()
@click.argument("ckpt", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@one_line_errors
def inspect(ckpt: Path, as_json: bool) -> None:
    """Show what is in CKPT: formats by role, sizes, bits per weight, suspicious scales."""
    from ptqpipe.stages import inspect as stage

    report = stage.inspect(ckpt)
    click.echo(json.dumps(stage.to_json(report)) if as_json else stage.render(report))


@main.command()
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@one_line_errors
def diff(a: Path, b: Path, as_json: bool) -> None:
    """Compare two checkpoints, in one layout or two; exit 1 if they differ."""
    from ptqpipe.stages import diff as stage

    report = stage.diff(a, b)
    click.echo(json.dumps(stage.to_json(report)) if as_json else stage.render(report))
    sys.exit(0 if report.equal else 1)


@main.command()
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    default=Path("ptqpipe-demo"),
    show_default=True,
    help="Folder for the checkpoints.",
)
@one_line_errors
def demo(out: Path) -> None:
    """Convert the embedded model to three formats, verify them, and show what each costs."""
    from ptqpipe.stages import demo as stage

    machine = _machine(None, "cpu", 2 << 30, progress=False)
    click.echo(stage.demo_text(stage.run_demo(out, machine=machine)))


@main.command()
def formats() -> None:
    """List formats, containers and searches."""
    from ptqpipe.stages import tables

    click.echo(tables.formats_text())


@main.command()
@click.argument("ckpt", type=click.Path(path_type=Path))
@click.option("--container", required=True, metavar="NAME", help="The layout to write; see `ptqpipe formats`.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Output folder [default: <ckpt>-<container>].")
@click.option("--workers", type=int, metavar="N", help="Weights in flight [processors, at most 16].")
@click.option("--max-memory", type=Size(), default="2GiB", show_default=True, help="Limit of resident memory.")
@click.option("--resume", is_flag=True, help="Continue an interrupted run.")
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.option("-q", "--quiet", is_flag=True, help="No progress bar.")
@one_line_errors
def relayout(
    ckpt: Path,
    container: str,
    out: Path | None,
    workers: int | None,
    max_memory: int,
    resume: bool,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Rewrite CKPT in another container: the same codes and scales, nothing is quantized again."""
    from ptqpipe.stages import relayout as stage

    out = out if out is not None else Path(f"{ckpt.resolve().name}-{container.lower().replace('_', '-')}")
    machine = _machine(workers, "cpu", max_memory, progress=not quiet and not as_json)
    mode = _mode(resume, overwrite)
    with _says_how_to_resume(f"ptqpipe relayout {ckpt} --container {container} -o {out} --resume"):
        done = stage.relayout(ckpt, out, container=container, mode=mode, machine=machine, ranks=_ranks())
    if done is not None:
        click.echo(json.dumps(stage.to_json(done)) if as_json else stage.render(done))


@main.command()
@click.argument("ckpt", type=click.Path(path_type=Path))
@click.option("--dtype", default="bf16", show_default=True, metavar="NAME", help="bf16, fp16 or fp32.")
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Output folder [default: <ckpt>-<dtype>].")
@click.option("--workers", type=int, metavar="N", help="Weights in flight [processors, at most 16].")
@click.option("--max-memory", type=Size(), default="2GiB", show_default=True, help="Limit of resident memory.")
@click.option("--resume", is_flag=True, help="Continue an interrupted run.")
@click.option("--overwrite", is_flag=True, help="Replace an existing output.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@click.option("-q", "--quiet", is_flag=True, help="No progress bar.")
@one_line_errors
def dequantize(
    ckpt: Path,
    dtype: str,
    out: Path | None,
    workers: int | None,
    max_memory: int,
    resume: bool,
    overwrite: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write CKPT as a plain float checkpoint that every tool loads."""
    from ptqpipe.stages import dequantize as stage

    out = out if out is not None else Path(f"{ckpt.resolve().name}-{dtype}")
    machine = _machine(workers, "cpu", max_memory, progress=not quiet and not as_json)
    mode = _mode(resume, overwrite)
    with _says_how_to_resume(f"ptqpipe dequantize {ckpt} --dtype {dtype} -o {out} --resume"):
        done = stage.dequantize(ckpt, out, dtype=dtype, mode=mode, machine=machine, ranks=_ranks())
    if done is not None:
        click.echo(json.dumps(stage.to_json(done)) if as_json else stage.render(done))


def _mode(resume: bool, overwrite: bool) -> Literal["new", "resume", "overwrite"]:
    if resume and overwrite:
        raise UsageError("--resume and --overwrite contradict each other; give one of them")
    return "resume" if resume else "overwrite" if overwrite else "new"


@contextmanager
def _says_how_to_resume(command: str) -> Iterator[None]:
    """Ctrl-C ends with the command that continues."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo(f"\nInterrupted. What is finished is kept; continue with: {command}", err=True)
        sys.exit(130)


def _resume_command() -> str:
    """This call again, as one that continues."""
    arguments = [argument for argument in sys.argv[1:] if argument not in ("--overwrite", "--resume")]
    return shlex.join(["ptqpipe", *arguments, "--resume"])


def _machine(workers: int | None, device: str, max_memory: int, *, progress: bool) -> "Machine":
    """The machine options, checked."""
    import torch

    from ptqpipe.stages.machine import Machine, default_workers

    if device != "cpu" and not re.fullmatch(r"cuda(:\d+)?", device):
        raise UsageError(f"--device {device!r} is unknown; use cpu, cuda or cuda:N")
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise UsageError(f"--device {device} needs a GPU that torch can use; none is visible, use --device cpu")
        from ptqpipe.stages.machine import require_device_kernels

        require_device_kernels()
        device = device if ":" in device else f"cuda:{_environment('LOCAL_RANK', 0, least=0)}"
    local = _environment("LOCAL_WORLD_SIZE", 1, least=1)
    return Machine(
        workers=workers if workers is not None else max(1, default_workers() // local),
        device=torch.device(device),
        memory_bytes=max_memory,
        progress=progress and sys.stderr.isatty(),
    )


def _ranks() -> "Ranks":
    """This process among those of a torchrun, joined by gloo; rank 0 of 1 without one."""
    from ptqpipe.stages.machine import Ranks

    world = _environment("WORLD_SIZE", 1, least=1)
    if world == 1:
        return Ranks()
    rank = _environment("RANK", None, least=0)
    if rank >= world:
        raise UsageError(f"RANK is {rank} of WORLD_SIZE {world}, expected less; start with torchrun, or unset both")
    import torch

    try:
        torch.distributed.init_process_group("gloo")
    except (ValueError, RuntimeError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UsageError(f"rank {rank} of {world} does not reach the others: {first}; start with torchrun") from None
    return Ranks(rank, world)


def _environment(name: str, default: int | None, *, least: int) -> int:
    """A number that torchrun sets. UsageError where it is none."""
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"\d{1,9}", text.strip()) or int(text) < least:
        found = "not set" if text is None else repr(text)
        raise UsageError(f"{name} in the environment is {found}, expected a number; start with torchrun, or unset it")
    return int(text)
