"""Running quantized checkpoints: loads them to compute exactly as their formats say.

    model = ptqpipe.runtime.load("path/to/checkpoint")          weights packed in memory; tp=N, rank=r: a rank's part
    model = ptqpipe.runtime.load_model("path/to/checkpoint")    weights decoded to floats, the oracle

Names resolve on first use: importing this package imports neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ptqpipe.runtime.loading import load, load_model

__all__ = ["load", "load_model"]

_HOME = dict.fromkeys(__all__, "ptqpipe.runtime.loading")


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ptqpipe.runtime' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
