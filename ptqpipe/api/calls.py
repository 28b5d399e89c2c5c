"""What the functions of the Python API share: keywords from the classes of options, the machine, values of options.

A function declares its main parameters and ``**options``; `command` says of which class (``run/options.py``) these are.
Names, types and defaults come from there, so that none is written twice.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, fields
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

from ptqpipe.api.kinds import check_kinds
from ptqpipe.checkpoint import resolve_source
from ptqpipe.errors import UsageError
from ptqpipe.recipe.options import RecipeOptions, recipe_path
from ptqpipe.run.machine import Machine, machine_for
from ptqpipe.run.options import MachineOptions, Option, Options, check_names, described, options_of, spelled, type_of
from ptqpipe.run.quantities import bytes_of

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound=Options)

_PROGRESS = inspect.Parameter("progress", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=bool | None)


def watched(progress: bool | None) -> bool:
    """Whether progress is shown: as the call says, else where somebody may be looking, in a terminal or a notebook."""
    return (sys.stderr.isatty() or "ipykernel" in sys.modules) if progress is None else progress


def command(kind: type[Options] = Options, *, progress: bool = False) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function one of the API: its ``**options`` are the options of ``kind`` that it does not declare itself.

    progress  whether ``progress`` is among them: bars, None: `watched`
    """
    rows = {one.name: (one, row) for one in options_of(kind) if (row := described(one)) is not None and not row.shell}

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        plain = inspect.signature(function)
        own = [p for p in plain.parameters.values() if p.kind is not p.VAR_KEYWORD]
        more = [_keyword(kind, one, row) for name, (one, row) in rows.items() if name not in plain.parameters]
        more += [_PROGRESS] * (progress and "progress" not in plain.parameters)
        names = [p.name for p in (*own, *more)]

        @wraps(function)
        def call(*values: P.args, **options: P.kwargs) -> R:
            check_names(options, names, what=function.__name__)
            check_kinds([*own, *more], dict(zip((p.name for p in own), values, strict=False)) | options)
            return function(*values, **options)

        call.__signature__ = plain.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        return call

    return decorate


def _keyword(kind: type[Options], one: Field[Any], row: Option) -> inspect.Parameter:
    """An option in Python: a size may be a text, too; None is one that a call does not state, where that matters."""
    hint, default = get_type_hints(kind)[one.name], one.default
    hint = hint | str if row.kind == "size" else hint
    if one.name in {one.name for one in options_of(RecipeOptions)} and hasattr(kind, "stated"):
        hint, default = hint | None, None
    return inspect.Parameter(one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def options_from(kind: type[T], options: Mapping[str, Any], **more: Any) -> T:
    """The options of a call: those among its keywords, and ``more``; None is an option that the call does not state.

    UsageError for a value that is none of an option's choices or out of its bounds.
    """
    rows = {one.name: described(one) for one in fields(kind)}
    values = {name: value for name, value in {**options, **more}.items() if name in rows and value is not None}
    values = {name: _value(kind, name, rows[name], value) for name, value in values.items()}
    if "stated" in rows:
        values["stated"] = frozenset(name for name, value in values.items() if value is not False)
    return kind(**values).check()


def _value(kind: type[Options], name: str, row: Option | None, value: Any) -> Any:
    """A value as the field has it."""
    one = next(one for one in fields(kind) if one.name == name)
    row = row or one.metadata.get("argument") or Option()
    type_ = type_of(one, kind)
    if row.kind == "size":
        return size_of(value, name=name)
    if row.kind == "dtype" and isinstance(value, str):
        return spelled(value, long="auto" in row.choices)
    if row.kind == "recipe" and str(value):
        return recipe_path(value)
    if get_origin(type_) is tuple:
        several = names_in(value) if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
        return tuple(_one(name, row, get_args(type_)[0], each) for each in several)
    return _one(name, row, type_, value)


def _one(name: str, row: Option, type_: Any, value: Any) -> Any:
    """One value; a number of NumPy as Python's."""
    if row.kind == "model":
        return folder_of(value)
    if type_ is Path and str(value) == "":
        raise UsageError(f"{name} is empty, expected a path")
    return type_(value) if type_ in (Path, str, int, float, bool) else value


def names_in(value: Any) -> tuple[Any, ...]:
    """Several values: a list of them, a text with commas, or one alone."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(","))
    return tuple(value) if isinstance(value, Iterable) else (value,)


def machine_of(options: MachineOptions, progress: bool | None, *, waits: bool = True) -> Machine:
    """The machine of a call; ``waits`` as `machine_for`."""
    device = str(getattr(options, "device", "cpu"))
    return machine_for(options, device=device, progress=watched(progress), waits=waits)


def size_of(value: str | int, *, name: str) -> int:
    """The bytes of a size that a call gives as ``name``. UsageError for what is none."""
    nbytes = value if isinstance(value, int) else bytes_of(str(value))
    if nbytes is None:
        raise UsageError(f"{name} {value!r} is not a size; write 2GiB, 800MB or a number of bytes")
    return nbytes


def path_or_none(value: str | Path | None) -> Path | None:
    """A path where the call has one."""
    return None if value is None else Path(value)


def folder_of(model: str | Path) -> Path:
    """The folder of a checkpoint that is named by its path or by its name on the hub. UsageError for neither."""
    return resolve_source(str(model))
