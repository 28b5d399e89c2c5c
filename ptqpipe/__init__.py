"""ptqpipe quantizes Hugging Face checkpoints to FP4 and FP8, in little memory, with block scales proven optimal.

    ptqpipe.quantize_model("Qwen/Qwen3-8B", "nvfp4", data="text.jsonl", out="packed")    # everything in one call
    ptqpipe.convert("path/to/model", format="nvfp4")          # without data
    ptqpipe.verify("packed", source="path/to/model")          # every command is a function
    q = ptqpipe.quantize(w, "nvfp4"); q.dequantize()          # one matrix

docs/python.md has the rest. Names resolve on first use, so that importing the package (or asking for ``--help``) does
not import torch. Importing it makes transformers' ``from_pretrained`` read these checkpoints, too: see
``runtime/hook.py``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ptqpipe._version import __version__
from ptqpipe.errors import PtqError, nearest
from ptqpipe.runtime import hook

if TYPE_CHECKING:
    from ptqpipe.api.calibrate import calibrate, generate, plan, tune
    from ptqpipe.api.check import diff, evaluate, inspect, report, verify
    from ptqpipe.api.convert import convert
    from ptqpipe.api.matrices import load_tensors, quantize
    from ptqpipe.api.models import quantize_model, save_checkpoint
    from ptqpipe.api.rewrite import dequantize, relayout, transform
    from ptqpipe.api.server_process import serve
    from ptqpipe.api.transformers_config import Config
    from ptqpipe.numerics.qtensor import QTensor
    from ptqpipe.runtime.loading import load_model

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
    "transform",
    "tune",
    "verify",
]

# Where names are searched for, on first use; what imports little comes first.
_HOMES = (
    "numerics.qtensor", "runtime.loading", "api.matrices", "api.convert", "api.calibrate", "api.rewrite", "api.check",
    "api.models",
    "api.server_process", "api.transformers_config",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in __all__:
        meant = "" if name.startswith("_") else nearest(name, __all__)
        raise AttributeError(
            f"module 'ptqpipe' has no attribute {name!r}" + (f"; did you mean {meant}?" if meant else "")
        )
    for home in _HOMES:
        module = import_module(f"ptqpipe.{home}")
        value = vars(module).get(name)
        if getattr(value, "__module__", None) == module.__name__:  # and is not imported there from elsewhere
            return value
    raise AttributeError(f"'ptqpipe' lists {name!r}, which none of its modules defines")


def __dir__() -> list[str]:
    return __all__


hook.install()
