"""Checks that a parsed JSON file has the fields that its reader needs, each of its type, before any is used.

What is expected is written as the file is: a type, `COUNT` or `NUMBER`; a dictionary of field names, where "name?" need
not be there and "*" is every name; a list of one, for lists of any length.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ptqpipe.checkpoint.header import shown
from ptqpipe.checkpoint.regular_file import MAX_JSON_BYTES, read_regular
from ptqpipe.errors import CheckpointError, read_failure

COUNT: Final = "a count"
NUMBER: Final = "a number"
_WORDS: Final = {str: "text", bool: "true or false", dict: "an object", list: "a list"}


def read_versioned(path: Path, wanted: Any, *, version: int, remedy: str) -> dict[str, Any]:
    """A JSON file of a version that is known, its fields checked: see `check_fields`.

    Raises CheckpointError, naming the file, for one that cannot be read or parsed, of another version, or damaged.
    """
    try:
        content: dict[str, Any] = json.loads(read_regular(path, limit=MAX_JSON_BYTES))
    except OSError as error:
        raise CheckpointError(f"{shown(str(path))} cannot be read: {read_failure(error)}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{shown(str(path))} is damaged: {error}; {remedy}") from None
    check_fields(path, content, {"version": COUNT}, remedy=remedy)
    if content["version"] != version:
        raise CheckpointError(f"{shown(str(path))} has version {content['version']}, expected {version}; {remedy}")
    check_fields(path, content, wanted, remedy=remedy)
    return content


def check_fields(path: Path, value: Any, wanted: Any, *, remedy: str) -> None:
    """CheckpointError, naming the file and the first field that is missing or of another type."""
    problem = _problem(value, wanted, "")
    if problem:
        raise CheckpointError(f"{shown(str(path))} is damaged: {problem}; {remedy}")


def _problem(value: Any, wanted: Any, where: str) -> str:
    if isinstance(wanted, Mapping):
        return _in_object(value, wanted, where)
    if isinstance(wanted, list):
        if not isinstance(value, list):
            return _unlike(value, "a list", where)
        return next((p for i, item in enumerate(value) if (p := _problem(item, wanted[0], f"{where}[{i}]"))), "")
    if wanted == COUNT:
        fits = type(value) is int and 0 <= value < 2**63
    elif wanted == NUMBER:
        fits = type(value) in (int, float) and -(2**63) < value < 2**63 and math.isfinite(value)
    else:
        fits = isinstance(value, wanted)
    return "" if fits else _unlike(value, wanted if isinstance(wanted, str) else _WORDS[wanted], where)


def _in_object(value: Any, wanted: Mapping[str, Any], where: str) -> str:
    if not isinstance(value, Mapping):
        return _unlike(value, "an object", where)
    for name, kind in wanted.items():
        if name == "*":
            problem = next((p for key, item in value.items() if (p := _problem(item, kind, _below(where, key)))), "")
        elif (field := name.removesuffix("?")) in value:
            problem = _problem(value[field], kind, _below(where, field))
        else:
            problem = "" if name.endswith("?") else f"{shown(where)[1:-1] or 'it'} has no {name!r}"
        if problem:
            return problem
    return ""


def _below(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _unlike(value: Any, what: str, where: str) -> str:
    return f"{shown(where)[1:-1] or 'it'} is {shown(value, limit=80)}, expected {what}"
