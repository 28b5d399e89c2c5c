"""Parameters of commands from the classes of their options (``run/options.py``): `params_of`, and click's types for
values that are more than text."""

from dataclasses import MISSING, Field, fields
from pathlib import Path
from string import Formatter
from typing import Any, Literal, get_args, get_origin

import click

from ptqpipe.errors import PtqError, one_line
from ptqpipe.recipe.options import recipe_path
from ptqpipe.run.options import Option, described, options_of, spelled, type_of
from ptqpipe.run.quantities import bytes_of

EMPTY = "the name is empty, expected that of a file or folder; is a variable of the shell not set?"


class NonEmptyPath(click.Path):
    """A file or folder that the call names. An empty name is refused: it would mean the working folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Click's path; click's error for an empty one."""
        return self.fail(EMPTY, param, ctx) if value == "" else super().convert(value, param, ctx)


class RecipePath(NonEmptyPath):
    """A recipe: the name of one that comes with ptqpipe, or a file."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """As `recipe_path`."""
        return recipe_path(super().convert(value, param, ctx))


MAX_SIZE = 2**62  # bytes


class Size(click.ParamType[int]):
    """A number of bytes: ``800MB`` (10^6), ``2GiB`` (2^30), ``1500000000``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parses a size; click's error otherwise."""
        if isinstance(value, int):
            return value
        size = bytes_of(str(value))
        if size is None:
            self.fail(f"{value!r} is not a size; write 2GiB, 800MB or a number of bytes", param, ctx)
        if size > MAX_SIZE:
            self.fail(f"{value!r} is more than any machine has; write 2GiB, 800MB or a number of bytes", param, ctx)
        return size


class Existing(click.ParamType[Path]):
    """A folder or a file that the call names and that must be there: exit code 2 if not, in every command.

    The stages judge what is in it.
    """

    def __init__(self, kind: Literal["folder", "file"]) -> None:
        """``kind``: which of the two."""
        self.name = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path; click's error where there is no such thing."""
        if value == "":
            self.fail(EMPTY, param, ctx)
        path = Path(value)
        try:
            there, folder = path.exists(), path.is_dir()
        except (OSError, ValueError):  # a name too long, a zero byte
            there = folder = False
        if not there:
            from ptqpipe.checkpoint import nearest_path

            meant = nearest_path(path)
            remedy = f"; {meant}" if meant else ""
            self.fail(one_line(f"{str(path)!r} does not exist, expected a {self.name}{remedy}"), param, ctx)
        if folder != (self.name == "folder"):
            actual = "folder" if folder else "file"
            self.fail(one_line(f"{str(path)!r} is a {actual}, expected a {self.name}"), param, ctx)
        return path


class Model(Existing):
    """A model or a checkpoint that the call names: its folder, or its name on the hub, from where it is fetched.

    A folder goes first; the stages judge what is in it.
    """

    def __init__(self) -> None:
        """The kind is that of a folder."""
        super().__init__("folder")

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The folder, of a hub name that of its snapshot in the cache; click's error where there is none."""
        from ptqpipe.checkpoint import resolve_source

        if ctx is not None and ctx.resilient_parsing:  # a shell completes the line: nothing is fetched for that
            return Path(value)
        try:
            path = Path(value).expanduser()
            return super().convert(path, param, ctx) if value and path.is_dir() else resolve_source(str(value))
        except (PtqError, OSError, RuntimeError, ValueError) as error:
            self.fail(one_line(str(error)), param, ctx)


class HintedChoice(click.Choice[str]):
    """A choice whose error says where something is that stands elsewhere: --algorithm awq is a transform."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The choice; click's error for an unknown one, with the remedy."""
        if value not in self.choices and (remedy := _ELSEWHERE.get(str(value).lower())):
            self.fail(f"{value!r} is not one of {', '.join(map(repr, self.choices))}; {remedy}", param, ctx)
        return super().convert(value, param, ctx)


_BEFORE = (
    "it is a transform of the float model: ptqpipe transform MODEL --transforms {} --stats STATS -o OUT, then convert "
    "OUT"
)
_ELSEWHERE = {
    **{name: _BEFORE.format(name) for name in ("awq", "smoothquant", "aqas", "rotate", "smooth_swiglu")},
    **{name: _BEFORE.format("rotate") for name in ("quarot", "spinquant", "hadamard")},
    **dict.fromkeys(
        ("learned", "autoround", "auto-round"),
        "ptqpipe tune MODEL --data TEXT -o codes finds codes by data, and convert --codes codes writes them",
    ),
}


class Dtype(click.ParamType[str]):
    """A float type by its short or long name, ``bf16`` or ``bfloat16``; "auto" if that is among the accepted ones.

    long  whether the command takes the long name
    """

    name = "dtype"

    def __init__(self, *accepted: str, long: bool = True) -> None:
        """``accepted``: the short names, as help and messages show them."""
        self._accepted, self._long = accepted, long

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The name that the command takes; click's error for an unknown one."""
        word = str(value).strip().lower()
        if spelled(word, long=False) not in self._accepted:
            self.fail(f"{value!r} is unknown; use {', '.join(self._accepted)}", param, ctx)
        return spelled(word, long=self._long)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """The accepted names."""
        return "|".join(self._accepted)


def names_in(value: str | tuple[str, ...]) -> tuple[str, ...]:
    """The type of a value with several names: they stand between commas, without spaces and empty ones."""
    if isinstance(value, tuple):  # a default
        return value
    return tuple(name for name in value.replace(" ", "").split(",") if name)


_KINDS: dict[str, Any] = {
    "size": Size(), "names": names_in, "model": Model(), "file": Existing("file"), "folder": Existing("folder"),
    "recipe": RecipePath(),
}  # fmt: skip
_PATH = NonEmptyPath(path_type=Path)


def params_of(owner: type) -> list[click.Parameter]:
    """Click's parameters for the options of a class: its arguments, then its options, each as its field says.

    Click hands over a field's own default where the call has no such option.
    """
    arguments = ((one, one.metadata["argument"]) for one in fields(owner) if "argument" in one.metadata)
    options = ((one, described(one)) for one in options_of(owner))
    return [
        *(_argument(one, row, type_of(one, owner)) for one, row in arguments),
        *(_option(one, row, type_of(one, owner)) for one, row in options if row is not None),
    ]


def _argument(one: Field[Any], row: Option, kind: Any) -> click.Argument:
    several = get_origin(kind) is tuple
    more = {} if one.default is MISSING else {"default": one.default, "required": False}
    value = _type(row, get_args(kind)[0] if several else kind)
    return click.Argument([one.name], type=value, nargs=-1 if several else 1, **{
        "metavar": row.metavar or None, "required": True, **more
    })  # fmt: skip


def _option(one: Field[Any], row: Option, kind: Any) -> click.Option:
    flag = f"--{one.name.replace('_', '-')}"
    text, several = spelled_help(row.help), get_origin(kind) is tuple and row.kind != "names"
    needed = row.required or one.default is MISSING
    default = shown_default(one, row, kind)
    if kind is bool:
        names = [f"{flag}/--no-{flag[2:]}" if one.default is True else flag, one.name]
        text += "  [default: on]" if one.default is True else ""
        return click.Option(names, is_flag=True, default=one.default, help=text)
    fallback: dict[str, Any] = {} if needed else {"default": one.default}  # click takes None for a value that is there
    return click.Option(
        [*([row.short] if row.short else []), flag, one.name],
        type=_type(row, get_args(kind)[0] if several else kind),
        multiple=several,
        required=needed,
        metavar=row.metavar or None,
        envvar=row.envvar or None,
        help=text + _suffix(default, needed),
        **fallback,
    )


def _suffix(default: str, needed: bool) -> str:
    """What stands behind a help text; click itself says of a needed option that it is."""
    if default == "required":  # by the command, which says more than click would
        return "  [required]"
    return f"  [default: {default}]" if default and not needed else ""


def shown_default(one: Field[Any], row: Option, kind: Any) -> str:
    """The default of an option as help says it; empty for none."""
    if row.shown or one.default in (None, MISSING, ()) or one.default is False:
        return spelled_help(row.shown)
    if row.kind == "dtype":
        return spelled(str(one.default), long=False)
    if row.kind == "names":
        return ",".join(one.default)
    return f"{one.default:g}" if kind is float else str(one.default)


def _type(row: Option, kind: Any) -> Any:
    if row.kind == "dtype":
        return Dtype(*row.choices, long="auto" in row.choices)
    if row.kind:
        return _KINDS[row.kind]
    if row.choices:
        return HintedChoice(list(row.choices))
    return _PATH if kind is Path else kind


def spelled_help(text: str) -> str:
    """A help text with its ``{options}`` as flags."""
    pieces = Formatter().parse(text)
    return "".join(before + ("" if name is None else f"--{name.replace('_', '-')}") for before, name, _, _ in pieces)
