"""Whether what a call gives is of the kind that its keywords have: a wrong one ends in a line that names the keyword,
before it ends in the depths of a stage."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin

import torch

from ptqpipe.errors import UsageError, one_line

# A kind -> what it is called; in a union the first one that is found here gives the words.
_WORDS: dict[Any, str] = {
    Path: "a path or a name",
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
}
_ANYTHING = (Any, Iterable[Any])
_NAMED = ("eval",)


def check_kinds(parameters: Iterable[inspect.Parameter], values: Mapping[str, Any]) -> None:
    """UsageError for a value of another kind than its parameter is annotated with, and for an empty name of an output.

    What has no place in a table of kinds, tensors and formats, is left to who reads it.
    """
    for one in parameters:
        value = values.get(one.name, one.default)
        if one.kind is one.VAR_POSITIONAL or value is one.default or (one.default is None and value is False):
            continue
        if one.name == "out" and isinstance(value, str) and not value:
            raise UsageError("out is empty, expected the name of what to write")
        if not _fits(value, one.annotation) and not _converted(one.name, value):
            raise UsageError(f"{one.name} is {one_line(repr(value), limit=80)}, expected {_words(one.annotation)}")


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind. Texts stand for paths, and for one of several names."""
    kinds = get_args(kind)
    if kind in _ANYTHING:
        return True
    if isinstance(kind, UnionType):
        return any(_fits(value, one) for one in kinds) or ({str, int} <= set(kinds) and _is_number(value))
    if get_origin(kind) in (tuple, Iterable):
        if isinstance(value, str):
            return kinds[0] in (str, Any)
        if isinstance(value, list | tuple | set | frozenset):
            return all(isinstance(one, kinds[0] | PathLike) for one in value)
        return isinstance(value, Iterable) and not isinstance(value, bytes | Mapping) and not hasattr(value, "dtype")
    if get_origin(kind) is Literal:
        return isinstance(value, str)
    if get_origin(kind) is Callable:
        return callable(value)
    if kind is Path:
        return isinstance(value, str | PathLike)
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    if kind is bool:
        return isinstance(value, Integral | None) or getattr(getattr(value, "dtype", None), "kind", "") == "b"
    return isinstance(value, kind) if kind in (str, NoneType, torch.nn.Module) else True


def _converted(name: str, value: Any) -> bool:
    """Whether a value that is no text is made one: devices, and paths among options that have no path."""
    return isinstance(value, torch.device) if name == "device" else isinstance(value, PathLike) and name in _NAMED


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _words(kind: Any) -> str:
    """The name of a kind."""
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if {str, int} <= set(kinds):
        return "a size such as 2GiB, or a number of bytes"
    if any(get_origin(one) in (tuple, Iterable) for one in kinds):
        return "names: a text, or a list of texts"
    if any(get_origin(one) is Callable for one in kinds):
        return "a function"
    kinds = tuple(str if get_origin(one) is Literal else one for one in kinds)
    name = next((words for one, words in _WORDS.items() if one in kinds), "")
    module = "a model in memory" if torch.nn.Module in kinds else ""
    return ", or ".join(filter(None, (name, module)))
