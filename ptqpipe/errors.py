"""The errors that ptqpipe raises on purpose.

A message is one line: what is wrong (its value and name), what was expected, what to do. The CLI prints
it without a stack trace; anything that is not a PtqError is a bug and keeps its trace.
"""

import errno
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

MAX_MESSAGE = 600  # characters; names and values from a damaged file can be millions


def printable(text: str, *, keep: str = "") -> str:
    """``text`` with whatever would break a line or steer a terminal escaped (control characters, direction marks, lone
    surrogates), but for the characters of ``keep``."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def one_line(text: str, *, limit: int = MAX_MESSAGE) -> str:
    """``text`` as `printable` has it, cut to ``limit`` characters."""
    text = printable(text)
    return text if len(text) <= limit else f"{text[: limit // 2]} ... {text[-(limit // 2 - 5) :]}"


def first_line(error: BaseException) -> str:
    """The first line of another library's error, with the second where the first one ends with a colon.

    Without terminal colours; the name of the error's class where it has no text.
    """
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        return " ".join(lines[:2])
    return lines[0] if lines else type(error).__name__


def nearest(word: str, names: Iterable[str]) -> str:
    """The name that is most like a word; empty where none is like it."""
    return next(iter(get_close_matches(word, list(names), n=1, cutoff=0.65)), "")


def did_you_mean(word: str, names: Iterable[str], *, listed: bool = False) -> str:
    """The remedy for an unknown word: "did you mean nvfp4?", or "known are ..." where none is like it.

    listed  both
    """
    names = list(names)
    meant, listing = nearest(word, names), f"known are {', '.join(names)}"
    if not meant:
        return listing
    return f"did you mean {meant}? {listing}" if listed else f"did you mean {meant}?"


_in_shell = False  # of the process, not of a context: threads of a command write messages, too


@contextmanager
def shell_messages() -> Iterator[None]:
    """Meanwhile `arg` and `usage` spell options as a command line has them, in all threads; else as Python does."""
    global _in_shell
    before, _in_shell = _in_shell, True
    try:
        yield
    finally:
        _in_shell = before


def argv(**options: object) -> list[str]:
    """Options as words of a command line: ``max_model_len=8, resume=True, overlap=False, tag=("a", "b")`` as
    ``--max-model-len 8 --resume --no-overlap --tag a --tag b``. None is left out."""
    words: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{flag}")
        elif value is not None:
            several = value if isinstance(value, list | tuple) else (value,)
            words += [word for one in several for word in (f"--{flag}", str(one))]
    return words


def arg(name: str, value: object = None) -> str:
    """An option in a message, spelled for who reads it: ``max_memory`` or ``--max-memory``, with a value
    ``samples=8`` or ``--samples 8``, and of a switch ``resume=True`` or ``--resume``."""
    if _in_shell:
        return shlex.join(argv(**{name: True if value is None else value}))
    return name if value is None else f"{name}={_literal(value)}"


def usage(command: str, *arguments: str, **options: object) -> str:
    """A call in a message: ``ptqpipe calibrate MODEL --data TEXT``, or ``ptqpipe.calibrate("MODEL", data="TEXT")``."""
    if _in_shell:
        return shlex.join(["ptqpipe", command, *arguments, *argv(**options)])
    keywords = (f"{name}={_literal(value)}" for name, value in options.items() if value is not None)
    function = "evaluate" if command == "eval" else command
    return f"ptqpipe.{function}({', '.join([*map(_literal, arguments), *keywords])})"


def _literal(value: object) -> str:
    """A value as Python has it: paths as text, text between double quotes."""
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_literal, value))}]"
    text = str(value) if isinstance(value, Path) else value
    return f'"{text}"' if isinstance(text, str) and '"' not in text else repr(text)


_GONE = frozenset({errno.ENOENT, errno.ESTALE, errno.ENODEV, errno.ENXIO, errno.ENOTCONN, errno.EHOSTDOWN})


def _of_machine(error: OSError) -> str:
    """The remedy for what the machine lacks; empty for other errors."""
    remedies = {
        errno.EMFILE: f"raise the limit of open files (ulimit -n), or lower {arg('workers')}",
        errno.ENFILE: "close other programs: the system has no more files to open",
        errno.ENOMEM: f"lower {arg('workers')} or {arg('max_memory')}",
        errno.EIO: "the disk failed, the system's log says how (dmesg)",
    }
    return remedies.get(error.errno or 0, "")


def read_failure(error: OSError) -> str:
    """Why a file cannot be read, and the remedy that fits."""
    if error.errno in _GONE:
        remedy = "it was removed, renamed or unmounted: put it back"
    elif error.errno in (errno.EACCES, errno.EPERM):
        remedy = "make it, and the folders above it, readable for you"
    else:
        remedy = _of_machine(error) or "check the file"
    return f"{error.strerror or type(error).__name__}; {remedy}"


def write_failure(error: OSError, *, resumes: bool = True) -> str:
    """Why a file cannot be written, and the remedy that fits. ``resumes``: whether the command has ``resume``."""
    again, another = arg("resume", True) if resumes else "repeat the command", f"choose another {arg('out')}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = f"free some space and {again}, or {another}"
    elif error.errno == errno.EROFS:
        remedy = f"mount the file system for writing and {again}, or {another}"
    elif error.errno in (errno.EACCES, errno.EPERM):
        remedy = f"change its folder's permissions, or {another}"
    elif error.errno in _GONE:
        remedy = f"its folder was removed, renamed or unmounted: put it back and {again}, or start again"
    elif error.errno == errno.EFBIG:
        remedy = f"the file system takes no file of that size; {another}"
    elif error.errno in (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.EINVAL):
        remedy = another
    else:
        remedy = f"{_of_machine(error) or 'check the disk'}; then {again}"
    return f"{error.strerror or type(error).__name__}; {remedy}"


def failure(error: OSError) -> str:
    """Why a file cannot be read or written, where it is not known which was tried, and the remedy that fits."""
    of_writing = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
    return write_failure(error, resumes=False) if of_writing else read_failure(error)


class PtqWarning(UserWarning, RuntimeWarning):
    """What ptqpipe warns of; commands print it as a line, and no other package's warnings."""


class PtqError(Exception):
    """Root of every error that a user can act on. ``exit_code`` is what the CLI exits with.

    The message may hold names from files: it is made one printable line of bounded length here.

    >>> try:
    ...     ptqpipe.convert("MODEL", format="nvfp5")
    ... except ptqpipe.PtqError as error:
    ...     print(error)
    unknown format 'nvfp5'; did you mean nvfp4? known are nvfp4, ...
    """

    exit_code: int = 1

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class UsageError(PtqError):
    """The call itself is wrong: an option, a path, a missing optional dependency."""

    exit_code = 2


class CheckpointError(PtqError):
    """A checkpoint's files are damaged, inconsistent, of a kind that cannot be read, or not what they claim to be."""


class FormatError(PtqError):
    """A number format is unknown, or does not fit the tensor that it was asked for."""


class UnknownFormat(FormatError):
    """A format that is asked for by a name that nobody knows."""

    exit_code = 2


class UnfitFormat(FormatError):
    """A format and a container that are asked for together and do not fit."""

    exit_code = 2


class NumericsError(PtqError):
    """A tensor holds values (NaN, inf, magnitudes out of range) that cannot be quantized faithfully.

    weight  the weight that the message names; empty where it names none
    """

    def __init__(self, message: str, *, weight: str = "") -> None:
        super().__init__(message)
        self.weight = weight


def not_finite(what: str, dtype: object) -> NumericsError:
    """The error for what a model computed in a dtype: NaN, inf, or ``what`` else the sentence says. Another dtype is
    a remedy where this one has a small range or few digits."""
    name = str(dtype).removeprefix("torch.")
    remedy = f"use {arg('dtype', 'fp32')}, or check" if name in ("float16", "bfloat16") else "check"
    return NumericsError(f"{what} in {name}; {remedy} the model's weights")


def missing_package(what: str, package: str, install: str) -> UsageError:
    """The error for a package that is not installed. ``what`` needs it; ``install`` is what pip is to install."""
    quoted = f"'{install}'" if "[" in install else install
    return UsageError(f"{what} needs {package}; install it with: pip install {quoted}")


# What libraries say, in errors of any kind, when there is no memory.
_NO_MEMORY = re.compile(
    "bad_alloc|can't allocate|cannot allocate|not enough memory|out of memory|failed to map segment|failed to allocate",
    re.I,
)


def is_no_memory(error: BaseException) -> bool:
    """Whether a library's error means that the system or the GPU has no memory left: nothing of its input is wrong."""
    return isinstance(error, MemoryError) or _NO_MEMORY.search(first_line(error)) is not None


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust gave up: what it raises is no Exception, so that nothing else would catch it."""
    return type(error).__name__ == "PanicException"


@contextmanager
def tokenizer_errors(what: str) -> Iterator[None]:
    """Makes a UsageError about ``what`` of a tokenizer's failure: an Exception of no further kind, or a panic."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and not is_panic(error):
            raise
        raise UsageError(
            f"{what}: the model's tokenizer fails on this text: {first_line(error)}; shorten the text or leave it out"
        ) from None


class RecipeError(PtqError):
    """A recipe, which is part of the call, is malformed or contradicts itself."""

    exit_code = 2


class OutputError(PtqError):
    """The output cannot be written: it exists, is read-only, or the disk is full."""


class OutputExists(OutputError):
    """The output path exists, and the call does not allow to replace it."""

    exit_code = 2


class WrongOutput(OutputError):
    """The output that the call names can be none: a root folder, below a file, nothing unfinished to resume."""

    exit_code = 2


class AlreadyComplete(OutputError):
    """The run that is to be resumed has finished: nothing is left to do, and nothing is wrong. It made ``out``."""

    exit_code = 0

    def __init__(self, message: str, out: Path) -> None:
        super().__init__(message)
        self.out = out
