"""The commands that write a quantized checkpoint another way, as functions of the same names."""

from pathlib import Path
from typing import Any

from ptqpipe.api.calls import RESTART, command, folder_of, machine_of, mode_of, run_keywords
from ptqpipe.api.commands import checkpoint
from ptqpipe.api.result import Result
from ptqpipe.checkpoint import name_of
from ptqpipe.conversion import dequantize as dequantize_stage
from ptqpipe.conversion.relayout import command as relayout_stage


@command(run_keywords(), RESTART)
def relayout(ckpt: str | Path, container: str, out: str | Path | None = None, **options: Any) -> Result:
    """Rewrites a quantized checkpoint in another container; nothing is quantized again.

    out      folder to write; None: ``<ckpt>-<container>`` in the working folder
    options  those of the machine, ``resume`` and ``overwrite``

    >>> ptqpipe.relayout("OUT", "modelopt", "OUT-modelopt")
    <relayout OUT-modelopt: format nvfp4, weights 21 at 4.50 bits, size 1.20 MB, time ... s>
    """
    folder = folder_of(ckpt)
    target = Path(f"{name_of(folder)}-{container.lower().replace('_', '-')}") if out is None else Path(out)
    machine, mode = machine_of(options), mode_of(options)
    done = relayout_stage.relayout(folder, target, container=container, mode=mode, machine=machine)
    return checkpoint("relayout", done, relayout_stage.render)


@command(run_keywords(), RESTART)
def dequantize(ckpt: str | Path, out: str | Path | None = None, *, dtype: str = "bf16", **options: Any) -> Result:
    """Writes a quantized checkpoint as plain floats, which every tool loads.

    out      folder to write; None: ``<ckpt>-<dtype>`` in the working folder
    dtype    bf16, fp16 or fp32
    options  those of the machine, ``resume`` and ``overwrite``

    >>> ptqpipe.dequantize("OUT", "FLOATS")
    <dequantize FLOATS: weights 21, size 2.89 MB, time ... s>
    """
    folder = folder_of(ckpt)
    target = Path(f"{name_of(folder)}-{dtype}") if out is None else Path(out)
    machine, mode = machine_of(options), mode_of(options)
    done = dequantize_stage.dequantize(folder, target, dtype=dtype, mode=mode, machine=machine)
    return checkpoint("dequantize", done, dequantize_stage.render)
