"""Running quantized checkpoints: loading them with the semantics that their formats state.

    model = ptqpipe.runtime.load_model("path/to/checkpoint")       any container, dense or MoE

Names resolve on first use: importing this package imports neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ptqpipe.runtime.load import load_model

__all__ = ["load_model"]

_HOME = {"load_model": "ptqpipe.runtime.load"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ptqpipe.runtime' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
