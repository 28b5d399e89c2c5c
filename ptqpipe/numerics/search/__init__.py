"""Scale searches, one file each, found by file name.

A search file offers ``search(w, fmt, *, global_scale=None, importance=None) -> scales`` and the constant ``PROVEN``:
whether its scales are the argmin of ``objective.py`` over every scale that the format has.
"""

from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

import torch

from ptqpipe.errors import UsageError, did_you_mean
from ptqpipe.numerics.formats import Format

_SHARED = {"objective", "least", "proof"}  # and files whose names begin with an underscore


class Search(Protocol):
    """The shape of a search module."""

    PROVEN: bool

    def search(
        self,
        w: torch.Tensor,
        fmt: Format,
        *,
        global_scale: torch.Tensor | None = None,
        importance: torch.Tensor | None = None,
    ) -> torch.Tensor: ...


@cache
def search_names() -> list[str]:
    """The names that :func:`get_search` knows."""
    stems = (path.stem for path in Path(__file__).parent.glob("*.py"))
    return sorted(stem for stem in stems if not stem.startswith("_") and stem not in _SHARED)


def get_search(name: str) -> Search:
    """The search called ``name`` (its file's name, ``-`` and ``_`` alike); UsageError with the known names."""
    key = name.lower().replace("-", "_")
    if key not in search_names():
        raise UsageError(f"unknown search {name!r}; {did_you_mean(name, search_names(), listed=True)}")
    return cast(Search, import_module(f"{__name__}.{key}"))
