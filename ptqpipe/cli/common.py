"""What the commands share: sizes, errors as one line, the machine, the ranks, how to resume.

Beside the commands this is the only file that knows click, reads the environment, or turns an error into an exit code.
"""

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, ParamSpec, TypeVar

import click

from ptqpipe.errors import AlreadyComplete, PtqError, UsageError, first_line, one_line

if TYPE_CHECKING:
    from ptqpipe.stages.common.machine import Machine, Ranks

P = ParamSpec("P")
R = TypeVar("R")

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(b|[kmgt]i?b?)?", re.IGNORECASE)
MAX_SIZE = 2**62  # bytes
INTERRUPTED = 130  # exit code: 128 and the number of SIGINT
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


class Existing(click.ParamType[Path]):
    """A folder or a file that the call names and that must be there: exit code 2 if not, in every command.

    What a file that is there holds is for the stages to judge.
    """

    def __init__(self, kind: Literal["folder", "file"]) -> None:
        """``kind``: which of the two."""
        self.name = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path; click's error where there is no such thing."""
        path = Path(value)
        try:
            there, folder = path.exists(), path.is_dir()
        except (OSError, ValueError):  # a name too long, a zero byte
            there = folder = False
        if not there:
            self.fail(one_line(f"{str(path)!r} does not exist, expected a {self.name}"), param, ctx)
        if folder != (self.name == "folder"):
            found = "folder" if folder else "file"
            self.fail(one_line(f"{str(path)!r} is a {found}, expected a {self.name}"), param, ctx)
        return path


_DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class Dtype(click.ParamType[str]):
    """A float type in either spelling, ``bf16`` or ``bfloat16``; "auto" where ``auto`` says so.

    long  whether the stage wants the long spelling
    """

    name = "dtype"

    def __init__(self, *known: str, long: bool = True) -> None:
        """``known``: short spellings, as help and messages say them."""
        self._known, self._long = known, long

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The spelling that the stage wants; click's error for an unknown one."""
        word = str(value).strip().lower()
        short = next((short for short, long in _DTYPES.items() if word == long), word)
        if short not in self._known:
            self.fail(f"{value!r} is unknown; use {', '.join(self._known)}", param, ctx)
        return _DTYPES.get(short, short) if self._long else short

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """The words themselves."""
        return "|".join(self._known)


def one_line_errors(command: Callable[P, R]) -> Callable[P, R | None]:
    """PtqError, disk errors and Ctrl-C become one line on stderr and an exit code; anything else is a bug, with its
    trace."""

    @wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return command(*args, **kwargs)
        except AlreadyComplete as done:
            click.echo(str(done))
        except PtqError as error:
            _fail(str(error), error.exit_code)
        except BrokenPipeError:  # nobody reads on: click ends in silence
            raise
        except OSError as error:
            _fail(one_line(": ".join(str(part) for part in (error.strerror or error, error.filename) if part)), 1)
        except MemoryError as error:
            _fail(one_line(f"out of memory{f' ({error})' if str(error) else ''}; lower --workers or --max-memory"), 1)
        except KeyboardInterrupt:
            click.echo(f"\nInterrupted: {_kept()}.", err=True)
            sys.exit(INTERRUPTED)
        return None

    return wrapped


def _kept() -> str:
    """What a command that was interrupted leaves; those that can be resumed say it by `says_how_to_resume`."""
    context = click.get_current_context(silent=True)
    name, given = ("", {}) if context is None else (context.command.name, context.params)
    if name == "plan" and given.get("measure") is not None:
        return f"what is measured is kept in {given['out']}.measured.jsonl, and the same command continues from there"
    if name == "eval":
        return "nothing is written; a baseline's logits that are complete stay in the cache for the next run"
    if name == "demo":
        return f"the formats that are finished are kept in {given.get('out')}; another demo begins anew"
    if name == "allreduce":
        return "what is printed is all; plots are not written"
    return "nothing is written" if name != "serve" else "the service has ended"


def _fail(message: str, code: int) -> NoReturn:
    rank = os.environ.get("RANK")
    where = f" (rank {rank})" if rank not in (None, "0") else ""
    click.echo(f"Error{where}: {message}", err=True)
    sys.exit(code)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a command that writes a folder runs: options of machine and output, none of which decides bytes."""

    workers: int | None
    max_memory: int
    mode: Literal["new", "resume", "overwrite"]
    as_json: bool
    quiet: bool

    def machine(self, device: str = "cpu") -> "Machine":
        """The machine options, checked."""
        return machine_of(self.workers, device, self.max_memory, progress=not self.quiet and not self.as_json)


def run_options(counted: str) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Adds the options of `RunOptions` to a command, which gets them as ``run``.

    counted  what ``--workers`` counts: "Weights in flight"
    """

    def decorate(command: Callable[..., R]) -> Callable[..., R]:
        @wraps(command)
        def wrapped(
            *,
            workers: int | None,
            max_memory: int,
            resume: bool,
            overwrite: bool,
            as_json: bool,
            quiet: bool,
            **arguments: Any,
        ) -> R:
            run = RunOptions(workers, max_memory, mode_of(resume, overwrite), as_json, quiet)
            return command(run=run, **arguments)

        for option in reversed(_run_options(counted)):
            wrapped = option(wrapped)
        return wrapped

    return decorate


def _run_options(counted: str) -> list[Callable[[Callable[..., R]], Callable[..., R]]]:
    return [
        click.option("--workers", type=int, metavar="N", help=f"{counted}.  [default: processors, at most 16]"),
        click.option("--max-memory", type=Size(), default="2GiB", show_default=True, help="Limit of resident memory."),
        click.option("--resume", is_flag=True, help="Continue an interrupted run; where there is none, start."),
        click.option("--overwrite", is_flag=True, help="Replace an existing output."),
        click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text."),
        click.option("-q", "--quiet", is_flag=True, help="No progress bar."),
    ]


def mode_of(resume: bool, overwrite: bool) -> Literal["new", "resume", "overwrite"]:
    """How the output is opened. UsageError for both at once."""
    if resume and overwrite:
        raise UsageError("--resume and --overwrite contradict each other; give one of them")
    return "resume" if resume else "overwrite" if overwrite else "new"


@contextmanager
def says_how_to_resume(out: Path, mode: str) -> Iterator[None]:
    """Ctrl-C ends with the command that continues, where something is left of this run to continue from.

    ``--resume`` where nothing is, neither unfinished nor complete, is said: the run starts from its beginning.
    """
    from ptqpipe.stages.common.jobs import is_unfinished

    if mode == "resume" and not is_unfinished(out) and not out.exists() and ranks_of().rank == 0:
        click.echo(f"Nothing unfinished lies beside {out}: starting from the beginning.", err=True)
    try:
        yield
    except KeyboardInterrupt:
        if not is_unfinished(out):
            raise
        click.echo(f"\nInterrupted. What is finished is kept; continue with: {_resume_command()}", err=True)
        sys.exit(INTERRUPTED)


def _resume_command() -> str:
    """This call again, as one that continues."""
    arguments = [argument for argument in sys.argv[1:] if argument not in ("--overwrite", "--resume")]
    return shlex.join(["ptqpipe", *arguments, "--resume"])


def next_line(*words: object) -> str:
    """The last line of a command whose output another one takes: that call, to be pasted as it is."""
    return f"next: {shlex.join(['ptqpipe', *map(str, words)])}"


def machine_of(workers: int | None, device: str, max_memory: int, *, progress: bool, waits: bool = True) -> "Machine":
    """The machine options, checked.

    waits  whether the workers wait for disks: where they only compute, there is one for each physical core
    """
    import torch

    from ptqpipe.stages.common.machine import Machine, compute_threads, default_workers

    if device != "cpu" and not re.fullmatch(r"cuda(:\d+)?", device):
        raise UsageError(f"--device {device!r} is unknown; use cpu, cuda or cuda:N")
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise UsageError(f"--device {device} needs a GPU that torch can use; none is visible, use --device cpu")
        from ptqpipe.stages.common.machine import require_device_kernels

        require_device_kernels()
        device = device if ":" in device else f"cuda:{_environment('LOCAL_RANK', 0, least=0)}"
    local = _environment("LOCAL_WORLD_SIZE", 1, least=1)
    return Machine(
        workers=workers
        if workers is not None
        else max(1, (default_workers() if waits else compute_threads()) // local),
        device=torch.device(device),
        memory_bytes=max_memory,
        progress=progress and sys.stderr.isatty(),
    )


def devices_of(device: str) -> list[str]:
    """The names of the devices that ``--device`` means: "auto" is "cuda" where there is a GPU, "cuda" all GPUs that are
    visible, or the rank's own under torchrun."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device != "cuda" or _environment("LOCAL_WORLD_SIZE", 1, least=1) > 1:
        return [device]
    return [f"cuda:{number}" for number in range(torch.cuda.device_count())] or [device]


def ranks_of() -> "Ranks":
    """This process among those of a torchrun, joined by gloo; rank 0 of 1 without one."""
    from ptqpipe.stages.common.machine import Ranks

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
        raise UsageError(
            f"rank {rank} of {world} does not reach the others: {first_line(error)}; start with torchrun"
        ) from None
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
