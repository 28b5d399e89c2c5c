"""ptqpipe quantizes Hugging Face checkpoints to FP4 and FP8, in little memory, with block scales proven optimal.

    ptqpipe.convert("path/to/model", format="nvfp4")          # the whole checkpoint
    q = ptqpipe.quantize(w, "nvfp4"); q.dequantize()          # one matrix
    weights = ptqpipe.load_tensors("path/to/checkpoint")      # any layout that ptqpipe reads, as QTensors

Names resolve on first use, so that importing the package (or asking for ``--help``) does not import torch. Importing it
makes transformers' ``from_pretrained`` read these checkpoints, too: see ``runtime/hook.py``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ptqpipe._version import __version__
from ptqpipe.errors import PtqError
from ptqpipe.runtime import hook

if TYPE_CHECKING:
    from ptqpipe.api import convert, load_tensors, quantize
    from ptqpipe.qtensor import QTensor
    from ptqpipe.runtime import load_model

__all__ = ["PtqError", "QTensor", "__version__", "convert", "load_model", "load_tensors", "quantize"]

_HOME = {
    "QTensor": "ptqpipe.qtensor",
    "convert": "ptqpipe.api",
    "load_model": "ptqpipe.runtime",
    "load_tensors": "ptqpipe.api",
    "quantize": "ptqpipe.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'ptqpipe' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


hook.install()
