"""Words of all commands: names of weights with their numbers as ``*``, differences of JSON values."""

import json
import math
import os
import platform
import re
import shlex
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ptqpipe.containers import short_json
from ptqpipe.errors import one_line
from ptqpipe.kernels.cpu_library import processor
from ptqpipe.quantities import table
from ptqpipe.report import content

__all__ = [
    "decibels", "finite", "json_differences", "layer_of", "name_pattern", "number_in", "role_of", "same_json", "table",
]  # fmt: skip

_VALUE = 48  # characters of a value of a JSON file
_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


def run_facts(command: str = "") -> dict[str, str]:
    """When (UTC) and on which machine a result is made, and by which command, its folders left out: it is published."""
    words = [_without_folders(word) for word in shlex.split(command)]
    cores = f"{os.cpu_count()} processors, {platform.system()}"
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {"date": now, "machine": f"{processor()[0]}, {cores}", "command": shlex.join(words)}


def _without_folders(word: str) -> str:
    """An argument with its path's last part alone; names on the hub stay whole."""
    option, equals, value = word.rpartition("=")
    path = Path(value)
    hidden = path.is_absolute() or value.startswith((".", "~")) or os.path.exists(path.parent)
    return f"{option}{equals}{path.name}" if hidden and path.name else word


def same_json(a: Any, b: Any) -> bool:
    """Whether two values of JSON files are equal; NaN, which Python's writer knows, is equal to itself."""
    return bool(a == b) or json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def json_differences(a: Any, b: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """(path of keys, value in a, value in b) of all that differs in two values of JSON files; values are cut short."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in [*a, *(key for key in b if key not in a)]:
            if key not in a:
                yield path + key, "missing", short_json(b[key], _VALUE)
            elif key not in b:
                yield path + key, short_json(a[key], _VALUE), "missing"
            elif not same_json(a[key], b[key]):
                yield from json_differences(a[key], b[key], f"{path}{key}.")
    elif not same_json(a, b):
        yield path.removesuffix("."), short_json(a, _VALUE), short_json(b, _VALUE)


def finite(value: float | None) -> float | None:
    """A number for JSON, which has no infinity and no NaN: None stands for them."""
    return value if value is not None and math.isfinite(value) else None


def decibels(relative_mse: float) -> float:
    """Signal to quantization noise ratio; inf for an exact weight, -inf for one without any signal."""
    found = content.decibels(relative_mse)
    return found if found is not None else math.inf if relative_mse <= 0 else -math.inf


def role_of(weight: str) -> str:
    """The role of a weight: its module's last name, with ``experts.`` before it for an expert's."""
    parts = re.sub(r"\[\d+\]$", "", weight).removesuffix(".weight").split(".")
    return f"experts.{parts[-1]}" if "experts" in parts else parts[-1]


def name_pattern(name: str) -> str:
    """The name with every layer or expert number as ``*``, in one line."""
    return re.sub(r"(?<=\.)\d+(?=\.)|\[\d+\]", "*", one_line(name, limit=300))


def layer_of(name: str) -> int | None:
    """The number of the decoder layer in a tensor's name: its first one."""
    return number_in(_LAYER, name)


def number_in(pattern: re.Pattern[str], name: str) -> int | None:
    """The number that the first group of a pattern finds, None for none or an absurd one."""
    match = pattern.search(name)
    return int(match[1]) if match is not None and len(match[1]) <= 6 else None
