"""Says in a terminal what Python is importing, while a package is imported that takes seconds.

Must not import anything itself: what is imported, and when, is the commands' business.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_SLOW = frozenset({"torch", "transformers", "datasets", "lm_eval", "scipy"})


class _Announcer:
    """A finder of modules that finds those of slow packages, and has their imports say what they are of."""

    def __init__(self) -> None:
        self._inside = False  # of such an import: what it imports in turn is its own affair

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What Python would find itself; None, for the next finder to look, where there is nothing to say."""
        package = name.partition(".")[0]
        spec = None if self._inside or package not in _SLOW else PathFinder.find_spec(name, path, target)
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return spec
        run = loader.exec_module

        def say_and_run(module: ModuleType) -> None:
            if self._inside:
                run(module)
                return
            words = f"loading {package} ..."
            self._inside = True
            print(f"\r{words}", end="", file=sys.stderr, flush=True)
            try:
                run(module)
            finally:
                print(f"\r{' ' * len(words)}\r", end="", file=sys.stderr, flush=True)
                self._inside = False

        loader.exec_module = say_and_run
        return spec


def announce_imports() -> None:
    """From now on the import of a slow package shows a line, which goes when the package is there. For terminals."""
    if not any(isinstance(finder, _Announcer) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Announcer())
