"""Registers ptqpipe's quantizer in transformers when transformers is imported, and not a moment before.

transformers has no entry points for quantizers, so something must run when its registry comes into being. Importing it
from ``import ptqpipe`` would cost seconds in every command; so where it is not loaded yet, one finder waits in
``sys.meta_path`` for the registry's module, adds a step to its loading, and leaves. It never loads anything itself, and
this file imports nothing but the standard library.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

REGISTRY = "transformers.quantizers.auto"


class _WhenImported:
    """A finder for one module, which it finds where the others do, and registers after it is loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec of the registry's module with a loader that registers; None for every other module."""
        if name != REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module: ModuleType) -> None:
                load(module)
                register_now()

            spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Registers now where transformers' registry is loaded, else as soon as it is. Doing it twice is doing it once."""
    if REGISTRY in sys.modules:
        register_now()
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


def register_now() -> None:
    """Registers. A transformers that this ptqpipe does not know must stay usable, so a failure is a warning."""
    try:
        import_module("ptqpipe.runtime.hf")  # which registers; it may be under way, having imported the registry itself
    except Exception as error:
        import warnings

        warnings.warn(
            f"ptqpipe could not register in transformers ({type(error).__name__}: {error}); "
            "ptqpipe.runtime.load_model does not need it",
            stacklevel=2,
        )
