"""ptqpipe quantizes Hugging Face checkpoints to FP4 and FP8, in little memory, with block scales proven optimal.

    ptqpipe.quantize_model("Qwen/Qwen3-8B", "nvfp4", data="text.jsonl", out="packed")    # the one call
    ptqpipe.convert("path/to/model", format="nvfp4")          # without data
    ptqpipe.verify("packed", source="path/to/model")          # every command is a function of its name
    q = ptqpipe.quantize(w, "nvfp4"); q.dequantize()          # one matrix

docs/python.md tells the rest. Names resolve on first use, so that importing the package (or asking for ``--help``) does
not import torch. Importing it makes transformers' ``from_pretrained`` read these checkpoints, too: see
``runtime/hook.py``.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ptqpipe._version import __version__
from ptqpipe.errors import PtqError
from ptqpipe.runtime import hook

if TYPE_CHECKING:
    from ptqpipe.api import (
        calibrate,
        convert,
        dequantize,
        diff,
        evaluate,
        generate,
        inspect,
        load_tensors,
        plan,
        quantize,
        quantize_model,
        relayout,
        report,
        save_checkpoint,
        serve,
        simulate,
        transform,
        tune,
        verify,
    )
    from ptqpipe.api.loading import Config
    from ptqpipe.qtensor import QTensor
    from ptqpipe.runtime import load_model

__all__ = [
    "Config",
    "PtqError",
    "QTensor",
    "__version__",
    "calibrate",
    "convert",
    "dequantize",
    "diff",
    "evaluate",
    "generate",
    "inspect",
    "load_model",
    "load_tensors",
    "plan",
    "quantize",
    "quantize_model",
    "relayout",
    "report",
    "save_checkpoint",
    "serve",
    "simulate",
    "transform",
    "tune",
    "verify",
]

# Where names are that are not functions of the API.
_HOME = {"Config": "ptqpipe.api.loading", "QTensor": "ptqpipe.qtensor", "load_model": "ptqpipe.runtime"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ptqpipe' has no attribute {name!r}")
    return getattr(import_module(_HOME.get(name, "ptqpipe.api")), name)


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """This package, in which two functions have the names of subpackages: importing those leaves the names alone."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("plan", "report") or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
hook.install()
