"""The commands that write a quantized checkpoint another way, as functions of the same names."""

from pathlib import Path
from typing import Any

from ptqpipe.api.calls import command, machine_of, options_from
from ptqpipe.api.commands import checkpoint
from ptqpipe.api.result import Result
from ptqpipe.checkpoint import name_of
from ptqpipe.conversion import dequantize as dequantize_stage
from ptqpipe.conversion.options import DequantizeCommand, RelayoutCommand
from ptqpipe.conversion.relayout import command as relayout_stage


@command(RelayoutCommand, progress=True)
def relayout(ckpt: str | Path, container: str, out: str | Path | None = None, **options: Any) -> Result:
    """Rewrites a quantized checkpoint in another container; nothing is quantized again.

    out      folder to write; None: ``<ckpt>-<container>`` in the working folder
    options  those of the machine, ``resume`` and ``overwrite``

    >>> ptqpipe.relayout("OUT", "modelopt", "OUT-modelopt")
    <relayout OUT-modelopt: format nvfp4, weights 21 at 4.50 bits, size 1.20 MB, time ... s>
    """
    chosen = options_from(RelayoutCommand, options, ckpt=ckpt, container=container, out=out)
    target = chosen.out or Path(f"{name_of(chosen.ckpt)}-{container.lower().replace('_', '-')}")
    machine = machine_of(chosen, options.get("progress"))
    done = relayout_stage.relayout(chosen.ckpt, target, container=container, mode=chosen.mode, machine=machine)
    return checkpoint("relayout", done, relayout_stage.render)


@command(DequantizeCommand, progress=True)
def dequantize(ckpt: str | Path, out: str | Path | None = None, *, dtype: str = "bf16", **options: Any) -> Result:
    """Writes a quantized checkpoint as plain floats, which every tool loads.

    out      folder to write; None: ``<ckpt>-<dtype>`` in the working folder
    dtype    bf16, fp16 or fp32
    options  those of the machine, ``resume`` and ``overwrite``

    >>> ptqpipe.dequantize("OUT", "FLOATS")
    <dequantize FLOATS: weights 21, size 2.89 MB, time ... s>
    """
    chosen = options_from(DequantizeCommand, options, ckpt=ckpt, out=out, dtype=dtype)
    target = chosen.out or Path(f"{name_of(chosen.ckpt)}-{chosen.dtype}")
    machine = machine_of(chosen, options.get("progress"))
    done = dequantize_stage.dequantize(chosen.ckpt, target, dtype=chosen.dtype, mode=chosen.mode, machine=machine)
    return checkpoint("dequantize", done, dequantize_stage.render)
