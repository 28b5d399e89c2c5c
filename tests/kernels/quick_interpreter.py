"""A plugin for what runs under Triton's interpreter: names are looked up once, and a row's products are its own.

The interpreter looks through all names of the language at every call of a kernel or of a function that a kernel calls,
which takes a third of its time. Which names are functions of the language does not change.

NumPy's matrix products add up a row in an order that its place among the rows decides on some CPUs (OpenBLAS with
AVX2), unlike a GPU's. In float64, rounded once, this is not seen in a float32.
"""

import functools
import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
from triton.runtime import interpreter


@functools.cache
def names(place: Any) -> list[str]:
    """Of the functions of the language in a module or class of it."""
    return [name for name, member in inspect.getmembers(place) if interpreter.tl.core.is_builtin(member)]


def members(place: Any) -> list[tuple[str, Any]]:
    """The functions of the language; none where the interpreter has put others in their place, as it does to all."""
    found = names(place)
    replaced = bool(found) and not interpreter.tl.core.is_builtin(getattr(place, found[0]))
    return [] if replaced else [(name, getattr(place, name)) for name in found]


def product(a: Any, b: Any, dtype: Any = np.float32) -> Any:
    """``a @ b`` in ``dtype``."""
    return np.matmul(a, b, dtype=np.float64).astype(dtype)


interpreter.np = SimpleNamespace(**vars(np) | {"matmul": product})
interpreter.inspect = SimpleNamespace(**vars(inspect) | {"getmembers": members})
