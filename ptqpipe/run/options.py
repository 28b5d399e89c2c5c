"""Options of commands: a field of a frozen dataclass is an option of the command line and a keyword of Python.

`option` makes such a field: the line says its type, default, help and the values that it may have. The command line
has its parameters from there (``cli/parameters.py``), Python its signatures (``api/calls.py``), a recipe file its keys
(``recipe/file.py``), and ``docs/cli.md`` its text. In help texts ``{samples}`` is another option, which each of the
two spells as its own. Nothing here imports torch: ``ptqpipe --help`` reads these classes.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import cache
from inspect import get_annotations
from typing import Any, Literal, NamedTuple, Self, TypeVar, get_args, get_origin, get_type_hints

from ptqpipe.errors import RecipeError, UsageError, arg, did_you_mean, nearest

T = TypeVar("T")
Mode = Literal["new", "resume", "overwrite"]


class Option(NamedTuple):
    """The properties of an option besides its name, type and default.

    help     what it means, to a reader who knows nothing else; empty: neither face has it (only recipe files do)
    metavar  what help calls its value
    kind     how text becomes a value where the type alone does not say it: ``size`` (bytes), ``names`` (several,
             between commas), ``dtype``, ``model`` (a folder or a name on the hub), ``file``,
             ``folder`` (that are there), ``recipe`` (a file or the name of one that comes with the package)
    choices  the values that it may have; empty: any of its type
    bounds   the least and the largest value
    usual    a hint on values, after the bounds in the message of a value outside them
    shown    the default as help says it; empty: the field's own
    short    a further name on the command line, as ``-o``
    envvar   variable of the environment that has the value where the command line has none
    shell    whether only the command line has it
    required whether a call has to state it, though the field has a default
    """

    help: str = ""
    metavar: str = ""
    kind: str = ""
    choices: Collection[str] = ()
    bounds: tuple[float, float] | None = None
    usual: str = ""
    shown: str = ""
    short: str = ""
    envvar: str = ""
    shell: bool = False
    required: bool = False


def option(default: T, help: str = "", **more: Any) -> T:
    """A field of a dataclass that is an `Option` with this default."""
    return field(default=default, metadata={"option": Option(help, **more)})


def required(help: str, **more: Any) -> Any:
    """A field of a dataclass that is an option without a default."""
    return field(metadata={"option": Option(help, **more)})


def argument(default: Any = ..., metavar: str = "", kind: str = "") -> Any:
    """A field that stands on a command line without a name of its own, in the order of the class; ``...``: required."""
    metadata = {"argument": Option(metavar=metavar, kind=kind)}
    return field(metadata=metadata) if default is ... else field(default=default, metadata=metadata)


def same_option(owner: type, name: str) -> Any:
    """A field that is the option of another class."""
    one = {one.name: one for one in fields(owner)}[name]
    return field(default=one.default, metadata=one.metadata)


def described(one: Field[Any]) -> Option | None:
    """The properties of a field; None for a field that is no option."""
    row: Option | None = one.metadata.get("option")
    return row


_hints = cache(get_type_hints)


def type_of(one: Field[Any], owner: type) -> Any:
    """The type of an option's values: int for ``int | None``."""
    hint = _hints(owner)[one.name]
    if get_origin(hint) in (tuple, Literal) or not get_args(hint):
        return hint
    return next(kind for kind in get_args(hint) if kind is not type(None))


def options_of(owner: type) -> Iterator[Field[Any]]:
    """The options of a class, its own before those of its bases, which come in the order of the class's line."""
    by_name = {one.name: one for one in fields(owner)}
    order = dict.fromkeys(name for base in owner.__mro__ for name in get_annotations(base))
    ordered = (by_name[name] for name in order if name in by_name)
    return (one for one in ordered if (row := described(one)) is not None and row.help)


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Options:
    """Options of a command, or some of them."""

    def part(self, kind: type[T]) -> T:
        """The options of a class that this one extends, alone."""
        return kind(**{one.name: getattr(self, one.name) for one in fields(kind)})  # type: ignore[arg-type]  # dataclass

    def check(self) -> Self:
        """These options. UsageError for a value that is none of its choices or out of its bounds."""
        for one in options_of(type(self)):
            value = getattr(self, one.name)
            if value == () and one.default not in ((), MISSING):
                raise UsageError(f"{arg(one.name)} names nothing; give a name, or several with commas between them")
            check_value(one.name, value, described(one), UsageError)
        return self


def check_names(options: Iterable[str], allowed: Iterable[str], *, what: str) -> None:
    """UsageError for the first name that is not ``allowed``, with the nearest that is."""
    allowed = list(allowed)
    for name in options:
        if name not in allowed:
            raise UsageError(f"{what} has no option {name!r}; {did_you_mean(name, sorted(allowed))}")


def check_value(name: str, value: Any, row: Option | None, error: type[UsageError | RecipeError]) -> None:
    """``error`` for a value that is none of the option's choices or out of its bounds."""
    if row is None or value is None:
        return
    values: Sequence[Any] = value if isinstance(value, tuple) else (value,)
    for one in values:
        option = arg(name, one) if error is UsageError else f"{name} {one!r}"
        if row.choices and (spelled(one, long=False) if row.kind == "dtype" else one) not in row.choices:
            meant = nearest(str(one), row.choices)
            remedy = f"{f'did you mean {meant}? ' if meant else ''}use {', '.join(row.choices)}"
            raise error(f"{option} is unknown; {remedy}")
        if row.bounds is not None and not row.bounds[0] <= one <= row.bounds[1]:
            least, most = (f"{bound:.9g}" for bound in row.bounds)
            hint = f" ({row.usual})" if row.usual else ""
            raise error(f"{option} is out of range; use {least} {'or more' if most == 'inf' else f'to {most}'}{hint}")


_LONG = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def spelled(dtype: str, *, long: bool) -> str:
    """A float type's name in its long spelling, float32, or its short one, fp32, whichever is given. Other words stay
    as they are."""
    short = next((short for short, name in _LONG.items() if dtype == name), dtype)
    return _LONG.get(short, short) if long else short


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class MachineOptions(Options):
    """What a command may use of the machine; no byte depends on it. ``max_memory``: bytes."""

    workers: int | None = option(
        None, "CPU threads that work at the same time.", metavar="N", shown="processors, at most 16"
    )
    max_memory: int = option(2 << 30, "Limit of resident memory.", kind="size", shown="2GiB")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class ComputingOptions(MachineOptions):
    """`MachineOptions` of what runs a model: its workers wait for no disk, and samples beyond the memory go there."""

    workers: int | None = option(None, "CPU threads that work at the same time.", metavar="N", shown="physical cores")
    max_memory: int = option(
        8 << 30, "Limit of resident memory; samples beyond it are kept on disk.", kind="size", shown="8GiB"
    )
    device: str = option("cpu", "Device that computes: cpu, cuda or cuda:N.", metavar="DEVICE")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class RestartOptions(Options):
    """What becomes of an output that is there already, unfinished or complete."""

    resume: bool = option(False, "Continue an interrupted run, or start if there is none.")
    overwrite: bool = option(False, "Replace an existing output.")

    @property
    def mode(self) -> Mode:
        """The output mode. UsageError for both at once."""
        if self.resume and self.overwrite:
            raise UsageError(f"{arg('resume')} and {arg('overwrite')} contradict each other; give one of them")
        return "resume" if self.resume else "overwrite" if self.overwrite else "new"


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class WritingOptions(MachineOptions, RestartOptions):
    """The options of what writes a checkpoint."""
