"""What the commands share: how one is declared, its options, errors as one line, the machine, the ranks, how to resume.

A command is a function of `Given`, the parameters of one call. `command` declares it; options that set a field of a
recipe come from the table in ``ptqpipe/options.py`` (`recipe_options`), those of machine and output from `run_options`.

Beside the commands this is the only file that knows click, reads the environment, or turns an error into an exit code.
"""

import io
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import Field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import click

from ptqpipe._version import __version__
from ptqpipe.errors import AlreadyComplete, PtqError, UsageError, one_line
from ptqpipe.options import RecipeOptions, described, recipe_fields, type_of

if TYPE_CHECKING:
    from ptqpipe.stages.common.machine import Machine, Ranks

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

PATH = click.Path(path_type=Path)
OUT: dict[str, Any] = {"type": PATH, "required": True}

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

    The stages judge what is in it.
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
    """A float type in either spelling, ``bf16`` or ``bfloat16``; "auto" if that is among the known ones.

    long  whether the stage takes the long spelling
    """

    name = "dtype"

    def __init__(self, *known: str, long: bool = True) -> None:
        """``known``: short spellings, as help and messages show them."""
        self._known, self._long = known, long

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The spelling that the stage takes; click's error for an unknown one."""
        word = str(value).strip().lower()
        short = next((short for short, long in _DTYPES.items() if word == long), word)
        if short not in self._known:
            self.fail(f"{value!r} is unknown; use {', '.join(self._known)}", param, ctx)
        return _DTYPES.get(short, short) if self._long else short

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """The known spellings."""
        return "|".join(self._known)


def names(value: str) -> tuple[str, ...]:
    """The type of a value with several names: they stand between commas, without spaces and empty ones."""
    return tuple(name for name in value.replace(" ", "").split(",") if name)


class Given(SimpleNamespace):
    """The parameters of one call of a command, by name."""

    def into(self, kind: type[T], **more: Any) -> T:
        """A dataclass from the parameters that are called as its fields are, and ``more``."""
        names = {one.name for one in fields(kind)}  # type: ignore[arg-type]  # T is a dataclass
        return kind(**{name: value for name, value in vars(self).items() if name in names} | more)

    @property
    def recipe(self) -> RecipeOptions:
        """Those that decide bytes (`recipe_options`)."""
        known = recipe_fields()
        given = {name: value for name, value in vars(self).items() if name in known}
        return RecipeOptions(self.scheme, self.ignore, **given)

    @property
    def mode(self) -> Literal["new", "resume", "overwrite"]:
        """How the output is opened. UsageError for --resume and --overwrite at once."""
        if self.resume and self.overwrite:
            raise UsageError("--resume and --overwrite contradict each other; give one of them")
        return "resume" if self.resume else "overwrite" if self.overwrite else "new"

    def machine(self, device: str = "cpu", *, waits: bool = True) -> "Machine":
        """The machine options, checked; see `machine_of`."""
        shown = not self.quiet and not getattr(self, "as_json", False)
        return machine_of(self.workers, device, getattr(self, "max_memory", 8 << 30), progress=shown, waits=waits)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="ptqpipe")
def main() -> None:
    """Hugging Face checkpoints to FP4 and FP8: streaming, with block scales that are proven optimal."""
    for stream in (sys.stdout, sys.stderr):  # names of files need not be Unicode, and terminals need not know it
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def command(
    *,
    example: str,
    name: str | None = None,
    leaves: str | Callable[[Given], str] = "nothing is written",
    group: click.Group = main,
) -> Callable[[Callable[[Given], None]], click.Command]:
    """Declares a command, once. Its errors become one line on stderr and an exit code, and so does Ctrl-C.

    example  a call, the last line of its help
    leaves   what is left after Ctrl-C, in words; for commands that resume, where nothing is left to continue from
    """

    def decorate(function: Callable[[Given], None]) -> click.Command:
        def call(**parameters: Any) -> None:
            given = Given(**parameters)
            with _errors_in_one_line(lambda: leaves if isinstance(leaves, str) else leaves(given)):
                function(given)

        call.__doc__ = function.__doc__
        call.__click_params__ = getattr(function, "__click_params__", [])  # type: ignore[attr-defined]
        return group.command(name or function.__name__, epilog=f"Example: {example}")(call)

    return decorate


@contextmanager
def _errors_in_one_line(leaves: Callable[[], str]) -> Iterator[None]:
    """PtqError, disk errors and Ctrl-C as one line and an exit code; anything else is a bug, with its trace."""
    try:
        yield
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
        click.echo(f"\nInterrupted: {leaves()}.", err=True)
        sys.exit(INTERRUPTED)


def _fail(message: str, code: int) -> NoReturn:
    rank = os.environ.get("RANK")
    where = f" (rank {rank})" if rank not in (None, "0") else ""
    click.echo(f"Error{where}: {message}", err=True)
    sys.exit(code)


def options(*which: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator, in the order of the help."""

    def decorate(function: F) -> F:
        for one in reversed(which):
            function = one(function)
        return function

    return decorate


def recipe_options(*which: str) -> Callable[[F], F]:
    """--format, --ignore and the options of the table that are called so, or all; `Given.recipe` has what was given."""
    known = recipe_fields()
    return options(
        click.option(
            "--format",
            "scheme",
            metavar="NAME",
            help="Number format: nvfp4, nvfp4_w4a4, mxfp4, mxfp8, fp8, fp8_block, ...; `ptqpipe formats` lists all.  "
            "[default: nvfp4]",
        ),
        click.option(
            "--ignore",
            multiple=True,
            metavar="PATTERN",
            help="Leave these modules unquantized, whatever a recipe says: a name, a glob, re:<regex>. Repeatable.",
        ),
        *(_from_table(known[name]) for name in which or known),
    )


def _from_table(one: Field[Any]) -> Callable[[F], F]:
    about, kind = described(one), type_of(one)
    assert about is not None
    flag = about.flag or f"--{one.name.replace('_', '-')}"
    if kind is bool:
        return click.option(flag, one.name, is_flag=True, help=about.help)
    plain = "" if one.default is None else f"{one.default:g}" if kind is float else str(one.default)
    default = about.shown or plain
    help_text = f"{about.help}  [default: {default}]" if default else about.help
    value: Any = click.Choice(list(about.choices)) if about.choices else Size() if about.metavar == "SIZE" else kind
    return click.option(flag, one.name, type=value, metavar=about.metavar or None, help=help_text)


JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
QUIET = click.option("-q", "--quiet", is_flag=True, help="Show no progress bar.")
DEVICE = click.option("--device", default="cpu", show_default=True, help="Device that computes: cpu, cuda or cuda:N.")
STATS = click.option("--stats", type=PATH, metavar="DIR", help="Folder of statistics that `ptqpipe calibrate` wrote.")


def run_options(
    workers: str,
    *,
    default: str = "processors, at most 16",
    memory: str = "2GiB",
    restart: bool = True,
) -> Callable[[F], F]:
    """The options of machine and output: --workers, --max-memory, --resume, --overwrite, --json and --quiet.

    workers  what ``--workers`` counts, as its help says it; ``default`` how many there are
    memory   the default of ``--max-memory``
    restart  whether the command has --resume and --overwrite
    """
    again = (
        click.option("--resume", is_flag=True, help="Continue an interrupted run; where there is none, start."),
        click.option("--overwrite", is_flag=True, help="Replace an existing output."),
    )
    return options(
        click.option("--workers", type=int, metavar="N", help=f"{workers}.  [default: {default}]"),
        click.option("--max-memory", type=Size(), default=memory, show_default=True, help="Limit of resident memory."),
        *(again if restart else ()),
        JSON,
        QUIET,
    )


def window_options(samples: str, seed: str) -> Callable[[F], F]:
    """How many windows of text are read or written, how long they are, and the seed that chooses them."""
    return options(
        click.option("--samples", type=int, default=128, show_default=True, metavar="N", help=samples),
        click.option(
            "--seqlen",
            type=int,
            metavar="N",
            help="Tokens in each window.  [default: the model's positions, at most 2048]",
        ),
        click.option("--seed", type=int, default=0, show_default=True, help=seed),
    )


def data_options(samples: str, seed: str) -> Callable[[F], F]:
    """The text that a model runs on: files, the field of their rows, and `window_options`."""
    return options(
        click.option(
            "--data",
            multiple=True,
            metavar="FILE",
            help="Text like what the model will serve: .txt, .jsonl, .parquet, or a data set NAME:CONFIG:SPLIT. "
            "Repeatable.  [required]",
        ),
        click.option(
            "--field",
            metavar="NAME",
            help="Field with the text in each row of --data.  [default: messages, text, content, prompt, ...]",
        ),
        window_options(samples, seed),
    )


@contextmanager
def says_how_to_resume(out: Path, mode: str) -> Iterator[None]:
    """Ctrl-C ends with the command that continues, where something is left of this run to continue from.

    A line on stderr tells when ``--resume`` finds nothing, neither unfinished nor complete, and the run starts anew.
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
