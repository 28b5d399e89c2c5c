"""What the functions of the Python API share: keywords from the option classes, the machine, errors in Python's words.

A function declares its own parameters and ``**options``; `command` says which keywords those may be. Names, types and
defaults come from the table of options and from the stages' own classes, so that none is written twice.
"""

import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from functools import cache, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_type_hints

import torch

from ptqpipe.api.kinds import check_kinds
from ptqpipe.checkpoint import Mode, resolve_source
from ptqpipe.errors import PtqError, UsageError
from ptqpipe.recipe.options import (
    PipelineOptions,
    RecipeOptions,
    check_names,
    described,
    recipe_fields,
    spelled,
    type_of,
)
from ptqpipe.run.machine import Machine, compute_threads, default_workers
from ptqpipe.run.quantities import bytes_of
from ptqpipe.runtime.loading import check_device

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

Keywords = Mapping[str, tuple[Any, Any]]
"""Name of a keyword -> (type, default)."""

DEVICE: Keywords = {"device": (str, "cpu")}
RESTART: Keywords = {"resume": (bool, False), "overwrite": (bool, False)}
# Functions that write floats, and call them bf16; the others compute, and call them as torch does.
_SHORT = ("dequantize", "transform")
_AS_TYPED = {"eval": "evaluation"}  # the command line's spelling, where Python has another


def run_keywords(memory: str = "2GiB") -> Keywords:
    """The keywords of the machine, which decide no byte: threads, the limit of resident memory, progress bars (None:
    `watched`)."""
    return {"workers": (int | None, None), "max_memory": (str | int, memory), "progress": (bool | None, None)}


def watched(progress: bool | None) -> bool:
    """Whether progress is shown: as the call says, else where somebody may be looking, in a terminal or a notebook."""
    return (sys.stderr.isatty() or "ipykernel" in sys.modules) if progress is None else progress


def keywords_of(kind: type, *but: str) -> Keywords:
    """The fields of an option class as keywords, without those called ``but``."""
    hints = get_type_hints(kind)
    defaults = {
        one.name: one.default_factory() if one.default_factory is not MISSING else one.default for one in fields(kind)
    }
    return {name: (hints[name], default) for name, default in defaults.items() if name not in but}


def recipe_keywords(*which: str) -> Keywords:
    """The options of the table that decide bytes, or those called ``which``; None is one that is not given."""
    return {name: (type_of(one), None) for name, one in recipe_fields().items() if name in (which or recipe_fields())}


def command(*groups: Keywords) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function one of the API: its ``**options`` are the keywords of ``groups``, its errors speak Python."""
    by_name = {name: entry for group in groups for name, entry in group.items()}

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        plain = inspect.signature(function)
        own = [p for p in plain.parameters.values() if p.kind is not p.VAR_KEYWORD]
        names = [*(p.name for p in own), *by_name]
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for name, (kind, default) in by_name.items()
        ]

        @wraps(function)
        def call(*given: P.args, **options: P.kwargs) -> R:
            for typed, name in _AS_TYPED.items():
                if typed in options and typed not in names and name in names:
                    options[name] = options.pop(typed)
            with errors_in_python(names):
                check_names(options, names, what=function.__name__)
                check_kinds([*own, *more], dict(zip((p.name for p in own), given, strict=False)) | options)
                if isinstance(dtype := options.get("dtype"), str):
                    options["dtype"] = spelled(dtype, long=function.__name__ not in _SHORT)
                return function(*given, **options)

        call.__signature__ = plain.replace(parameters=[*own, *more])  # type: ignore[attr-defined]
        return call

    return decorate


def into(kind: type[T], options: Mapping[str, Any], **more: Any) -> T:
    """An option class from the keywords that are called as its fields are, and ``more``. Several names may be a text
    with commas, too."""
    defaults = {one.name: one.default for one in fields(kind)}  # type: ignore[arg-type]  # kind is a dataclass
    values = {name: value for name, value in options.items() if name in defaults}
    values |= {name: names_in(value) for name, value in values.items() if isinstance(defaults[name], tuple)}
    return kind(**values | more)


def recipe_of(options: Mapping[str, Any], *, format: str | None, ignore: Iterable[str]) -> RecipeOptions:
    """The options that decide bytes, among the keywords of a call."""
    patterns = (ignore,) if isinstance(ignore, str) else tuple(ignore)
    return RecipeOptions(format, patterns, **{name: options[name] for name in recipe_fields() if name in options})


def mode_of(options: Mapping[str, Any]) -> Mode:
    """The output mode. UsageError for resume and overwrite at once."""
    resume, overwrite = (options.get(name, False) for name in RESTART)
    if resume and overwrite:
        raise UsageError("resume and overwrite contradict each other; give one of them")
    return "resume" if resume else "overwrite" if overwrite else "new"


def machine_of(options: Mapping[str, Any], *, memory: str = "2GiB", waits: bool = True) -> Machine:
    """The machine that the keywords of a call describe.

    memory  the limit of memory where the call gives none
    waits   whether the workers wait for disks: where they only compute, there is one for each physical core
    """
    device, workers = str(options.get("device", "cpu")), options.get("workers")
    check_device(device)
    if workers is None:
        workers = default_workers() if waits else compute_threads()
    nbytes = size_of(options.get("max_memory", memory), name="max_memory")
    return Machine(workers, torch.device(device), nbytes, progress=watched(options.get("progress")))


def size_of(value: str | int, *, name: str) -> int:
    """The bytes of a size that a call gives as ``name``. UsageError for what is none."""
    nbytes = value if isinstance(value, int) else bytes_of(str(value))
    if nbytes is None:
        raise UsageError(f"{name} {value!r} is not a size; write 2GiB, 800MB or a number of bytes")
    return nbytes


def pipeline_of(options: Mapping[str, Any], data: Sequence[str]) -> PipelineOptions:
    """The pipeline options among the keywords of a call. ``data``: by its names."""
    texts = options.get("eval") or ()
    chosen = {name: value for name, value in options.items() if value is not None}
    chosen |= {"formats": names_in(chosen["formats"])} if "formats" in chosen else {}
    chosen |= {"keep_stages": str(chosen["keep_stages"])} if "keep_stages" in chosen else {}
    named = (texts,) if isinstance(texts, str | Path) else tuple(texts)
    return into(PipelineOptions, chosen, data=tuple(data), eval=tuple(map(str, named)))


def names_in(value: str | Iterable[str]) -> tuple[str, ...]:
    """Several names: a list, or a text with commas."""
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else tuple(value)


def path_or_none(value: str | Path | None) -> Path | None:
    """A path where one was given."""
    return None if value is None else Path(value)


def folder_of(model: str | Path) -> Path:
    """The folder of a checkpoint that is named by its path or by its name on the hub. UsageError for neither."""
    return resolve_source(str(model))


@contextmanager
def errors_in_python(names: Collection[str]) -> Any:
    """Messages of PtqErrors name options as keywords of Python meanwhile. ``names``: those of the function."""
    try:
        yield
    except PtqError as error:
        error.args = (in_python(str(error), names), *error.args[1:])
        raise


# Flags, which are True when they are given, and options whose keyword is not their own name.
_FLAGS = ("resume", "overwrite", "optimal", "untie", "bias_correction")
_OTHER_NAMES = {
    "shard_size": "shard_bytes",
    "all": "all_blocks",
    "power_of_two": "powers_of_two",
    "eval": "evaluation",
    "for": "reader",
}
_OPTION = re.compile(
    r"(?P<code>`[^`]*`|\bptqpipe [a-z]+ [^;,]*)"
    r"|(?<![\w-])(?:--(?P<name>[a-z][a-z0-9]*(?:-[a-z0-9]+)*)|-(?P<short>o))(?![\w-])"
    r"(?: (?P<value>'[^']*'|[A-Z]+\b|[\w.:/+-]*\w))?"
)


def in_python(message: str, names: Collection[str] = ()) -> str:
    """A message of the command line in Python's words: ``overwrite=True`` for ``--overwrite``, ``seqlen=N`` for
    ``--seqlen N``, ``out`` for ``-o``. Whole commands stay as they are. ``names``: keywords that are called as their
    options, though the same options have other keywords in other functions."""
    return _OPTION.sub(lambda match: _keyword(match, names), message)


def _keyword(match: re.Match[str], names: Collection[str]) -> str:
    if match["code"] is not None:
        return match["code"]
    name, value = (match["name"] or "out").replace("-", "_"), match["value"]
    name = name if name in names else _OTHER_NAMES.get(name, name)
    rest = "" if value is None else f" {value}"
    if name in _FLAGS:
        return f"{name}=True{rest}"
    if value is None or not _is_value(value):
        return f"{name}{rest}"
    bare = (
        (value.isalpha() and value.isupper())
        or value.startswith("'")
        or re.fullmatch(r"-?\d+(\.\d+)?", value) is not None
    )
    return f"{name}={value}" if bare else f'{name}="{value}"'


def _is_value(word: str) -> bool:
    """Whether a word after an option is its value, and not the next word of the sentence."""
    return word.isupper() or not word.isalpha() or word in _choices()


@cache
def _choices() -> frozenset[str]:
    options = [described(one) for one in recipe_fields().values()]
    return frozenset({"cpu", "cuda", *(str(choice) for one in options if one is not None for choice in one.choices)})
