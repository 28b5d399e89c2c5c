"""What the commands share: how one is declared, errors as one line, the machine, the ranks, how to resume.

A command is a function of `Given`, the parameters of one call. `command` declares it; its options are in
``parameters.py`` where several commands have them. Only this file reads the environment, or turns an error into an exit
code.
"""

import io
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

import click
from click.core import ParameterSource

from ptqpipe._version import __version__
from ptqpipe.cli.foreign import hold_back
from ptqpipe.cli.help import Command, Commands, examples
from ptqpipe.cli.lines import fitted, say
from ptqpipe.errors import AlreadyComplete, PtqError, UsageError, failure, first_line, is_no_memory, is_panic, one_line
from ptqpipe.recipe.options import PipelineOptions, RecipeOptions, pipeline_fields, recipe_fields

if TYPE_CHECKING:
    from ptqpipe.conversion import Run
    from ptqpipe.run.machine import Machine, Ranks

T = TypeVar("T")

INTERRUPTED = 130  # exit code: 128 and the number of SIGINT


class Given(SimpleNamespace):
    """The parameters of one call of a command, by name."""

    def into(self, kind: type[T], **more: Any) -> T:
        """A dataclass from the parameters that are called as its fields are, and ``more``."""
        names = {one.name for one in fields(kind)}  # type: ignore[arg-type]  # T is a dataclass
        return kind(**{name: value for name, value in vars(self).items() if name in names} | more)

    @property
    def recipe(self) -> RecipeOptions:
        """Those that decide bytes (`recipe_options`)."""
        names = recipe_fields()
        given = {name: value for name, value in vars(self).items() if name in names}
        return RecipeOptions(self.scheme, self.ignore, **given)

    @property
    def pipeline(self) -> PipelineOptions:
        """Those of a run of several stages (`pipeline_options`)."""
        given = {name: getattr(self, name, None) for name in pipeline_fields()}
        return PipelineOptions(**{name: value for name, value in given.items() if value is not None})

    @property
    def mode(self) -> Literal["new", "resume", "overwrite"]:
        """The output mode. UsageError for --resume and --overwrite at once."""
        if self.resume and self.overwrite:
            raise UsageError("--resume and --overwrite contradict each other; give one of them")
        return "resume" if self.resume else "overwrite" if self.overwrite else "new"

    @property
    def silent(self) -> bool:
        """Whether the call asks for its result alone: by --quiet or --json."""
        return getattr(self, "quiet", False) or getattr(self, "as_json", False)

    @property
    def log(self) -> Callable[[str], None] | None:
        """Prints a line on stderr, the header of a run; None where --quiet or --json asks for none."""
        return None if self.silent else lambda line: self.show(line, err=True)

    def show(self, text: str, *, err: bool = False) -> None:
        """Prints text for people on stdout, or on stderr: in a terminal, long lines go on in the next at a word. With
        --json it is data, and printed as it is."""
        stream = sys.stderr if err else sys.stdout
        click.echo(text if getattr(self, "as_json", False) else fitted(text, stream), err=err)

    def tell(self, result: Any, words: ModuleType) -> None:
        """Prints the result of a stage as ``words`` has it, a module with ``to_json`` and ``render``."""
        self.show(json.dumps(words.to_json(result)) if self.as_json else words.render(result))

    def say_unused_gpu(self) -> None:
        """Says on stderr that a GPU is not used, where there is one and nobody chose a device; not under --quiet or
        --json."""
        import torch

        chosen = click.get_current_context().get_parameter_source("device") is not ParameterSource.DEFAULT
        if self.silent or chosen or getattr(self, "device", "") != "cpu" or _environment("LOCAL_RANK", 0, least=0):
            return
        if torch.cuda.is_available():
            name = torch.cuda.get_device_name()
            say(f"A GPU was found ({name}) and is not used; to use it, add --device cuda.")

    def machine(self, device: str = "cpu", *, waits: bool = True) -> "Machine":
        """The machine options, checked; see `machine_of`."""
        self.say_unused_gpu()
        limit = getattr(self, "max_memory", 8 << 30)
        return machine_of(self.workers, device, limit, progress=not self.silent, waits=waits)

    @property
    def run(self) -> "Run":
        """What every stage that writes a checkpoint takes besides its own: mode, machine, ranks and log."""
        return {"mode": self.mode, "machine": self.machine(), "ranks": ranks_of(), "log": self.log}


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="ptqpipe")
def main() -> None:
    """Quantize Hugging Face models to FP4 and FP8, in little memory, with block scales that are proven optimal."""
    for stream in (sys.stdout, sys.stderr):  # names of files need not be Unicode, and terminals need not know it
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    hold_back(os.environ)


def command(
    *,
    example: str,
    name: str | None = None,
    leaves: str | Callable[[Given], str] = "nothing is written",
) -> Callable[[Callable[[Given], None]], click.Command]:
    """Declares a command, once. Its errors become one line on stderr and an exit code, and so does Ctrl-C.

    example  a call, the last line of its help; or several, one a line
    leaves   what is left after Ctrl-C, in words; for commands that resume, where nothing is left to continue from
    """

    def decorate(function: Callable[[Given], None]) -> click.Command:
        def call(**parameters: Any) -> None:
            given = Given(**parameters)
            with _errors_in_one_line(lambda: leaves if isinstance(leaves, str) else leaves(given)):
                function(given)

        call.__doc__ = function.__doc__
        call.__click_params__ = getattr(function, "__click_params__", [])  # type: ignore[attr-defined]
        return main.command(name or function.__name__, cls=Command, epilog=examples(example))(call)

    return decorate


@contextmanager
def _errors_in_one_line(leaves: Callable[[], str]) -> Iterator[None]:
    """PtqError, disk errors and Ctrl-C as one line and an exit code; anything else is a bug, with its trace."""
    try:
        yield
    except AlreadyComplete as done:
        click.echo(fitted(str(done), sys.stdout))
    except PtqError as error:
        _fail("; ".join([str(error), *getattr(error, "__notes__", ())]), error.exit_code)
    except BrokenPipeError:  # nobody reads on: click ends in silence
        raise
    except OSError as error:
        message = ": ".join(str(part) for part in (error.filename, failure(error)) if part)
        _fail(_out_of_resources(error) or one_line(message), 1)
    except KeyboardInterrupt:
        say(f"\nInterrupted: {leaves()}.")
        sys.exit(INTERRUPTED)
    except BaseException as error:
        if (reason := _out_of_resources(error)) is None:
            raise
        _fail("; ".join([one_line(reason), *getattr(error, "__notes__", ())]), 1)


# What libraries say, in errors of any kind, when the system gives no thread.
_NO_THREAD = re.compile("can't start new thread|cannot create thread|ThreadPoolBuildError|pthread_create", re.I)


def _out_of_resources(error: BaseException) -> str | None:
    """The message for an error that means a lack of memory or threads; None for others."""
    text = first_line(error)
    context = click.get_current_context(silent=True)
    options = {} if context is None else context.params
    lower = " or ".join(f"--{name.replace('_', '-')}" for name in ("workers", "max_memory") if name in options)
    remedy = f"{f'lower {lower}, or ' if lower else ''}raise the limit of this process"
    if isinstance(error, RuntimeError | OSError) or is_panic(error):
        if _NO_THREAD.search(text):
            return f"the system starts no more threads ({text}); {remedy} (ulimit -u and -v, or its container's)"
    elif not isinstance(error, MemoryError | ImportError):
        return None
    if type(error).__name__ == "OutOfMemoryError":  # of torch: no limit of this process is in the way
        sizes = ("workers", "max_memory", "batch_size", "kv_cache_size")
        less = [f"lower --{name.replace('_', '-')}" for name in sizes if name in options]
        less += ["use --device cpu"] * ("device" in options)
        return f"out of memory on the GPU ({text}); {', '.join(['end other programs on it', *less])}"
    if is_no_memory(error):
        detail = "" if text == type(error).__name__ else f" ({text})"
        return f"out of memory{detail}; {remedy} (ulimit -v, or its container's)"
    return f"a library gave up: {text}; check the model's tokenizer, and the text" if is_panic(error) else None


def _fail(message: str, code: int) -> NoReturn:
    rank = os.environ.get("RANK")
    where = f" (rank {rank})" if rank not in (None, "0") else ""
    say(f"Error{where}: {message}")
    sys.exit(code)


@contextmanager
def resume_hint(out: Path, mode: str) -> Iterator[None]:
    """Ctrl-C ends with the command that continues, where something is left of this run to continue from, and an error
    with what became of it.

    A line on stderr tells when ``--resume`` finds nothing, neither unfinished nor complete, and the run starts anew.
    """
    from ptqpipe.conversion import is_unfinished

    left = is_unfinished(out)
    if mode == "resume" and not is_unfinished(out, alive=True) and not out.exists() and ranks_of().rank == 0:
        say(f"{out} has no unfinished run: starting from the beginning.")
    try:
        yield
    except Exception as error:
        if is_unfinished(out) and not (left and mode == "new"):
            error.add_note("what is finished is kept (--resume continues it, --overwrite starts over)")
        raise
    except KeyboardInterrupt:
        if not is_unfinished(out):
            raise
        say(f"\nInterrupted. Finished parts are kept; continue with: {_resume_command()}")
        sys.exit(INTERRUPTED)


def this_call() -> str:
    """The command line of this call."""
    return shlex.join(["ptqpipe", *sys.argv[1:]])


def _resume_command() -> str:
    """This call again, as one that continues."""
    arguments = [argument for argument in sys.argv[1:] if argument not in ("--overwrite", "--resume")]
    return shlex.join(["ptqpipe", *arguments, "--resume"])


def machine_of(workers: int | None, device: str, max_memory: int, *, progress: bool, waits: bool = True) -> "Machine":
    """The machine options, checked.

    waits  whether the workers wait for disks: where they only compute, there is one for each physical core
    """
    import torch

    from ptqpipe.run.machine import Machine, compute_threads, default_workers

    if device != "cpu" and not re.fullmatch(r"cuda(:\d+)?", device):
        raise UsageError(f"--device {device!r} is unknown; use cpu, cuda or cuda:N")
    if device.startswith("cuda"):
        if not torch.cuda.is_available():
            raise UsageError(f"--device {device} needs a GPU that torch can use; none is visible, use --device cpu")
        from ptqpipe.run.machine import require_device_kernels

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
    from ptqpipe.run.machine import Ranks

    world = _environment("WORLD_SIZE", 1, least=1)
    if world == 1:
        return Ranks()
    rank = _environment("RANK", None, least=0)
    if rank >= world:
        raise UsageError(f"RANK is {rank} of WORLD_SIZE {world}, expected less; start with torchrun, or unset both")
    from ptqpipe.run.processes import join_group, join_remedy

    try:
        join_group(rank, world)
    except (ValueError, RuntimeError, OSError) as error:
        raise UsageError(
            f"rank {rank} of {world} does not reach the others: {first_line(error)}; {join_remedy(error)}"
        ) from None
    return Ranks(rank, world)


def _environment(name: str, default: int | None, *, least: int) -> int:
    """A number that torchrun sets. UsageError where it is none."""
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"\d{1,9}", text.strip()) or int(text) < least:
        got = "not set" if text is None else repr(text)
        raise UsageError(
            f"{name} in the environment is {got}, expected a number of {least} or more; start with torchrun, or "
            "unset it"
        )
    return int(text)
