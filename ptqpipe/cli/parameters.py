"""Parameters of commands: types of values, and options that several commands have.

Options that decide bytes come from the table in ``ptqpipe/recipe/options.py`` (`recipe_options`), those of machine and
output from `run_options`.
"""

from collections.abc import Callable
from dataclasses import Field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_origin

import click

from ptqpipe.errors import PtqError, one_line
from ptqpipe.recipe.options import described, pipeline_fields, recipe_fields, recipe_path, spelled, type_of
from ptqpipe.run.quantities import bytes_of

F = TypeVar("F", bound=Callable[..., Any])

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


PATH = NonEmptyPath(path_type=Path)
OUT: dict[str, Any] = {"type": PATH, "required": True}

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
    "it is a transform of the float model: ptqpipe transform MODEL --apply {} --stats STATS -o OUT, then convert OUT"
)
_ELSEWHERE = {
    **{name: _BEFORE.format(name) for name in ("awq", "smoothquant", "aqas", "rotate", "smooth_swiglu")},
    **{name: _BEFORE.format("rotate") for name in ("quarot", "spinquant", "hadamard")},
    **dict.fromkeys(
        ("learned", "autoround", "auto-round"),
        "ptqpipe tune MODEL --data TEXT -o codes finds codes by data, and convert --rounding codes writes them",
    ),
}


class Dtype(click.ParamType[str]):
    """A float type by its short or long name, ``bf16`` or ``bfloat16``; "auto" if that is among the accepted ones.

    long  whether the stage takes the long name
    """

    name = "dtype"

    def __init__(self, *known: str, long: bool = True) -> None:
        """``known``: the accepted short names, as help and messages show them."""
        self._known, self._long = known, long

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The name that the stage takes; click's error for an unknown one."""
        word = str(value).strip().lower()
        if spelled(word, long=False) not in self._known:
            self.fail(f"{value!r} is unknown; use {', '.join(self._known)}", param, ctx)
        return spelled(word, long=self._long)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """The accepted names."""
        return "|".join(self._known)


def computing_dtype(*known: str, who: str = "the model computes") -> Callable[[F], F]:
    """``--dtype`` of what computes: one of the ``known`` short names, the first by default."""
    return click.option(
        "--dtype",
        type=Dtype(*known),
        default=known[0],
        show_default=True,
        help=f"Float type that {who} in; auto is the checkpoint's own.",
    )


def names(value: str) -> tuple[str, ...]:
    """The type of a value with several names: they stand between commas, without spaces and empty ones."""
    return tuple(name for name in value.replace(" ", "").split(",") if name)


def options(*which: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator, in the order of the help."""

    def decorate(function: F) -> F:
        for one in reversed(which):
            function = one(function)
        return function

    return decorate


def recipe_options(*which: str) -> Callable[[F], F]:
    """--format, --ignore and the options of the table that are called so, or all; `Given.recipe` has what was given."""
    by_name = recipe_fields()
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
        *(_from_table(by_name[name]) for name in which or by_name),
    )


def pipeline_options(*which: str) -> Callable[[F], F]:
    """The options of `PipelineOptions` that are called so, or all; `Given.pipeline` has what was given."""
    by_name = pipeline_fields()
    return options(*(_from_table(by_name[name]) for name in which or by_name))


def _from_table(one: Field[Any]) -> Callable[[F], F]:
    about, kind = described(one), type_of(one)
    assert about is not None
    flag = about.flag or f"--{one.name.replace('_', '-')}"
    if kind is bool:
        return click.option(flag, one.name, is_flag=True, help=about.help)
    plain = "" if one.default in (None, ()) else f"{one.default:g}" if kind is float else str(one.default)
    default = about.shown or plain
    help_text = f"{about.help}  [default: {default}]" if default else about.help
    if one.default == ():
        return click.option(flag, one.name, multiple=True, metavar=about.metavar, help=help_text)
    if get_origin(kind) is tuple:
        return click.option(flag, one.name, type=names, metavar=about.metavar, help=help_text)
    value: Any = HintedChoice(list(about.choices)) if about.choices else Size() if about.metavar == "SIZE" else kind
    return click.option(flag, one.name, type=value, metavar=about.metavar or None, help=help_text)


MODEL = Model()
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
QUIET = click.option("-q", "--quiet", is_flag=True, help="Show no progress bar.")
DEVICE = click.option(
    "--device",
    metavar="DEVICE",
    default="cpu",
    show_default=True,
    help="Device that computes: cpu, cuda or cuda:N.",
)
ACTIVATIONS = click.option(
    "--activations",
    type=click.Choice(["simulated", "none"]),
    default="simulated",
    show_default=True,
    help="Quantize activations as the format of the checkpoint says, or leave them.",
)
FIELD = click.option(
    "--field",
    metavar="NAME",
    help="Field with the text in each row of --data.  [default: messages, text, content, prompt, ...]",
)
RECIPE = click.option(
    "--recipe",
    "recipe_path",
    type=RecipePath(),
    metavar="NAME|FILE",
    help="A recipe, instead of --format: one that `ptqpipe recipes` lists, or a YAML file.",
)
STATS = click.option("--stats", type=PATH, metavar="DIR", help="Folder of statistics that `ptqpipe calibrate` wrote.")


def workers_option(default: str) -> Callable[[F], F]:
    """``--workers``, which means the same in every command; ``default`` says how many there are."""
    return click.option(
        "--workers", type=int, metavar="N", help=f"CPU threads that work at the same time.  [default: {default}]"
    )


COMPUTES = workers_option("physical cores")  # of commands whose threads do not wait for disks


def run_options(*, computes: bool = False, spills: str = "", restart: bool = True) -> Callable[[F], F]:
    """The options of machine and output: --workers, --max-memory, --resume, --overwrite, --json and --quiet.

    computes  whether the workers only compute, and do not wait for disks
    spills    what goes to disk where ``--max-memory`` has no room for it; its default is larger then
    restart   whether the command has --resume and --overwrite
    """
    limit = f"Limit of resident memory{f'; {spills} beyond it are kept on disk' if spills else ''}."
    again = (
        click.option("--resume", is_flag=True, help="Continue an interrupted run, or start if there is none."),
        click.option("--overwrite", is_flag=True, help="Replace an existing output."),
    )
    return options(
        COMPUTES if computes else workers_option("processors, at most 16"),
        click.option("--max-memory", type=Size(), default="8GiB" if spills else "2GiB", show_default=True, help=limit),
        *(again if restart else ()),
        JSON,
        QUIET,
    )


def window_options(samples: str, seed: str) -> Callable[[F], F]:
    """Options for the number and length of text windows, and the seed that chooses them."""
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
            help="Text like what the model will serve: .txt, .jsonl, .json, .csv, .parquet, or a data set "
            "NAME:CONFIG:SPLIT. "
            "Repeatable; FILE=2 gives it the weight 2.  [required]",
        ),
        FIELD,
        window_options(samples, seed),
    )
