"""Packages whose import takes seconds: a terminal shows what is being imported, with the garbage collector paused.

Must not import anything itself: what is imported, and when, is the commands' business.
"""

import gc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_SLOW = frozenset({"torch", "transformers", "datasets", "lm_eval", "scipy"})


class _Watcher:
    """A finder of modules that finds those of slow packages, and has their imports say what they are of if ``shown``.

    What an import makes stays: a tenth of torch's time goes into finding that there is no garbage in it.
    """

    def __init__(self, shown: bool) -> None:
        self._shown = shown
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

        def watched_run(module: ModuleType) -> None:
            if self._inside:
                run(module)
                return
            words = f"loading {package} ..." if self._shown else ""
            self._inside, collects = True, gc.isenabled()
            gc.disable()
            self._show(words)
            try:
                run(module)
            finally:
                self._show(" " * len(words), end="\r")
                self._inside = False
                if collects:
                    gc.enable()

        loader.exec_module = watched_run
        return spec

    def _show(self, words: str, *, end: str = "") -> None:
        if self._shown:
            print(f"\r{words}", end=end, file=sys.stderr, flush=True)


def watch_imports(*, shown: bool) -> None:
    """From now on no cycles are looked for while a slow package is imported. ``shown``: for a terminal, there is a line
    meanwhile, which goes when the package is there."""
    sys.meta_path[:] = [_Watcher(shown), *(finder for finder in sys.meta_path if not isinstance(finder, _Watcher))]
