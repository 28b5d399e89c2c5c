"""What several commands say: when and where a result was made, differences of JSON values, decibels."""

import json
import math
import os
import platform
import shlex
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ptqpipe.containers import short_json
from ptqpipe.kernels.cpu_library import processor
from ptqpipe.report import content

_VALUE = 48  # characters of a value of a JSON file


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


def sqnr_db(relative_mse: float) -> float:
    """Signal to quantization noise ratio; inf for an exact weight, -inf for one without any signal."""
    found = content.decibels(relative_mse)
    return found if found is not None else math.inf if relative_mse <= 0 else -math.inf
