"""Values of JSON files: shown short, compared, and numbers that JSON has no words for."""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

_VALUE = 48  # characters of a value that differs


def short_json(value: Any, limit: int = 80) -> str:
    """A value as JSON, cut to ``limit`` characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= limit else text[: limit - 3] + "..."


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
