"""What the commands share: how one is declared, errors as one line, the machine, the ranks, how to resume.

A command is a function of its options (``run/options.py``) and of a `Terminal`; `command` declares it. Only this file
turns an error into an exit code.
"""

import io
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click
from click.core import ParameterSource

from ptqpipe._version import __version__
from ptqpipe.cli.completion import complete_values
from ptqpipe.cli.foreign import hold_back
from ptqpipe.cli.help import Command, Commands, examples
from ptqpipe.cli.lines import error_as_json, fitted, say
from ptqpipe.cli.parameters import params_of
from ptqpipe.errors import AlreadyComplete, PtqError, UsageError, failure, first_line, is_no_memory, is_panic, one_line
from ptqpipe.run.options import MachineOptions, Options, described, options_of

if TYPE_CHECKING:
    from ptqpipe.run.machine import Machine, Ranks

C = TypeVar("C", bound=Options)

INTERRUPTED = 130  # exit code: 128 and the number of SIGINT


@dataclass(frozen=True)
class Terminal:
    """Where a command prints, and how much: ``as_json`` by --json, ``quiet`` by --quiet."""

    as_json: bool = False
    quiet: bool = False

    @property
    def silent(self) -> bool:
        """Whether the call wants its result alone."""
        return self.quiet or self.as_json

    @property
    def log(self) -> Callable[[str], None] | None:
        """Prints a line on stderr, the header of a run; None where the call wants none."""
        return None if self.silent else lambda line: self.show(line, err=True)

    def show(self, text: str, *, err: bool = False) -> None:
        """Prints text for people on stdout, or on stderr: in a terminal, long lines go on in the next at a word. With
        --json it is data, and printed as it is."""
        stream = sys.stderr if err else sys.stdout
        click.echo(text if self.as_json else fitted(text, stream), err=err)

    def warn(self, line: str | None) -> None:
        """Prints a warning on stderr, if there is one."""
        if line is not None:
            self.show(f"warning: {line}", err=True)

    def show_result(self, result: Any, words: ModuleType) -> None:
        """Prints the result of a command as ``words`` has it, a module with ``to_json`` and ``render``."""
        self.show(json.dumps(words.to_json(result)) if self.as_json else words.render(result))

    def mention_unused_gpu(self, device: str) -> None:
        """Says on stderr that a GPU is not used, where there is one and nobody chose a device; not under --quiet or
        --json."""
        import torch

        from ptqpipe.run.machine import environment_number

        chosen = click.get_current_context().get_parameter_source("device") is not ParameterSource.DEFAULT
        if self.silent or chosen or device != "cpu" or environment_number("LOCAL_RANK", 0, least=0):
            return
        if torch.cuda.is_available():
            name = torch.cuda.get_device_name()
            say(f"A GPU was found ({name}) and is not used; to use it, add --device cuda.")

    def machine(self, options: MachineOptions, *, device: str = "cpu", waits: bool = True) -> "Machine":
        """The machine that the options describe; ``waits`` as `machine_for`."""
        from ptqpipe.run.machine import machine_for

        if hasattr(options, "device"):
            self.mention_unused_gpu(device)
        return machine_for(options, device=device, progress=not self.silent and sys.stderr.isatty(), waits=waits)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="ptqpipe")
def main() -> None:
    """Quantize Hugging Face models to FP4 and FP8, in little memory, with block scales that are proven optimal."""
    for stream in (sys.stdout, sys.stderr):  # names of files need not be Unicode, and terminals need not know it
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    hold_back(os.environ)


def command(
    options: type[C],
    *,
    example: str,
    name: str | None = None,
    json: bool = True,
    quiet: bool = True,
    more: Sequence[click.Parameter] = (),
    leaves: str | Callable[[C], str] = "nothing is written",
) -> Callable[[Callable[[C, Terminal], None]], click.Command]:
    """Declares a command, once: a function of its options and of the terminal. Its errors become one line on stderr and
    an exit code, and so does Ctrl-C.

    options      a class of ``run/options.py``, from which the command has its parameters
    example      a call, the last line of its help; or several, one a line
    json, quiet  whether it has --json and --quiet
    more         parameters that only the command line knows; the function finds them in click's context
    leaves       what is left after Ctrl-C, in words; for commands that resume, where nothing is left to continue from
    """

    def make_params() -> list[click.Parameter]:
        return complete_values([*params_of(options), *more, *([_JSON] * json), *([_QUIET] * quiet)])

    def decorate(function: Callable[[C, Terminal], None]) -> click.Command:
        names = {one.name for one in fields(options)}

        def call(as_json: bool = False, quiet: bool = False, **values: Any) -> None:
            with _errors_in_one_line():
                _check_environment(options)
                chosen = options(**_stated(values, names)).check()
                try:
                    function(chosen, Terminal(as_json, quiet))
                except KeyboardInterrupt:
                    say(f"\nInterrupted: {leaves if isinstance(leaves, str) else leaves(chosen)}.")
                    sys.exit(INTERRUPTED)

        call.__doc__ = function.__doc__
        declare = main.command(
            name or function.__name__, cls=Command, epilog=examples(example), make_params=make_params
        )
        return declare(call)

    return decorate


def _check_environment(options: type[Options]) -> None:
    """UsageError for a variable that is set and empty: click takes it for one that is not set."""
    for one in options_of(options):
        row = described(one)
        if row is not None and row.envvar and os.environ.get(row.envvar) == "":
            raise UsageError(f"{row.envvar} in the environment is empty; give a value, or unset it")


def _stated(values: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The parameters that are options, with the names of those that the call states where the class wants these."""
    chosen = {name: value for name, value in values.items() if name in names}
    if "stated" in names:
        source = click.get_current_context().get_parameter_source
        chosen["stated"] = frozenset(name for name in chosen if source(name) is ParameterSource.COMMANDLINE)
    return chosen


_JSON = click.Option(["--json", "as_json"], is_flag=True, help="Print JSON instead of text.")
_QUIET = click.Option(["-q", "--quiet"], is_flag=True, help="Show no progress bar.")


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """PtqError and disk errors as one line and an exit code; anything else is a bug, with its trace."""
    try:
        yield
    except AlreadyComplete as done:
        click.echo(json.dumps({"complete": str(done)}) if _as_json() else fitted(str(done), sys.stdout))
    except PtqError as error:
        _fail("; ".join([str(error), *getattr(error, "__notes__", ())]), error.exit_code)
    except BrokenPipeError:  # nobody reads on: click ends in silence
        raise
    except OSError as error:
        message = ": ".join(str(part) for part in (error.filename, failure(error)) if part)
        _fail(_out_of_resources(error) or one_line(message), 1)
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


def _as_json() -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and context.params.get("as_json", False) is True


def _fail(message: str, code: int) -> NoReturn:
    rank = os.environ.get("RANK")
    where = f" (rank {rank})" if rank not in (None, "0") else ""
    if _as_json():
        click.echo(error_as_json(f"{message}{where}", code))
    else:
        say(f"Error{where}: {message}")
    sys.exit(code)


@contextmanager
def resume_hint(out: Path, mode: str) -> Iterator[None]:
    """Ctrl-C ends with the command that continues, where something is left of this run to continue from, and an error
    with what became of it.

    A line on stderr tells when ``--resume`` finds nothing, neither unfinished nor complete, and the run starts anew.
    """
    from ptqpipe.conversion.job import is_unfinished

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


def devices_of(device: str) -> list[str]:
    """The names of the devices that ``--device`` means: "auto" is "cuda" where there is a GPU, "cuda" all GPUs that are
    visible, or the rank's own under torchrun."""
    import torch

    from ptqpipe.run.machine import environment_number

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device != "cuda" or environment_number("LOCAL_WORLD_SIZE", 1, least=1) > 1:
        return [device]
    return [f"cuda:{number}" for number in range(torch.cuda.device_count())] or [device]


def ranks_of() -> "Ranks":
    """This process among those of a torchrun, joined by gloo; rank 0 of 1 without one."""
    from ptqpipe.run.machine import Ranks, environment_number

    world = environment_number("WORLD_SIZE", 1, least=1)
    if world == 1:
        return Ranks()
    rank = environment_number("RANK", None, least=0)
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
