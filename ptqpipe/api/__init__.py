"""The Python API: every command as a function of the same name, and what only Python has.

commands.py, rewriting.py, checks.py   the commands that write, and those that look
models.py, loading.py    a model in memory; transformers quantizing while it loads
service.py               a service for the length of a block
matrices.py              one matrix, and the weights of a checkpoint
calls.py, data.py, result.py   keywords and errors, calibration data, what a call returns
"""

from ptqpipe.api.checks import diff, evaluate, inspect, report, simulate, verify
from ptqpipe.api.commands import calibrate, convert, generate, plan, transform, tune
from ptqpipe.api.matrices import load_tensors, quantize
from ptqpipe.api.models import quantize_model, save_checkpoint
from ptqpipe.api.rewriting import dequantize, relayout
from ptqpipe.api.service import serve

__all__ = [
    "calibrate",
    "convert",
    "dequantize",
    "diff",
    "evaluate",
    "generate",
    "inspect",
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
