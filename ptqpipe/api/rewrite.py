"""The commands that write a checkpoint another way, as functions of the same names."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ptqpipe.api.calls import command, machine_of, names_in, options_from
from ptqpipe.api.result import Result, of_checkpoint
from ptqpipe.checkpoint import name_of
from ptqpipe.conversion import dequantize as dequantize_stage
from ptqpipe.conversion.options import DequantizeCommand, RelayoutCommand, TransformCommand, TransformOptions
from ptqpipe.conversion.relayout import command as relayout_stage
from ptqpipe.conversion.transform import command as transform_stage


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
    return of_checkpoint("relayout", done, relayout_stage.render)


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
    return of_checkpoint("dequantize", done, dequantize_stage.render)


@command(TransformCommand, progress=True)
def transform(
    model: str | Path,
    transforms: str | Iterable[str],
    out: str | Path,
    *,
    stats: str | Path | None = None,
    **options: Any,
) -> Result:
    """Folds smoothing factors or rotations into a float model, which then computes the same and quantizes better.

    transforms  in their order: smoothquant, awq, aqas, smooth_swiglu, rotate
    stats    folder of `calibrate`; only rotations need none
    options  as ``ptqpipe transform`` has them: ``alpha``, ``power_of_two``, ``fold_at``, ``rotation_size``, ``untie``,
             ``format``, ``dtype``, ``shard_size``, and those of the machine

    >>> ptqpipe.transform("MODEL", "smoothquant", "SMOOTH", stats="STATS")
    <transform SMOOTH: weights 21, size 4.47 MB, time ... s>
    """
    named = {"model": str(model), "transforms": ",".join(names_in(transforms)), "out": out, "stats": stats}
    chosen = options_from(TransformCommand, options, **named)
    done = transform_stage.transform(
        model,
        chosen.out,
        stats=chosen.stats,
        options=chosen.part(TransformOptions),
        mode=chosen.mode,
        machine=machine_of(chosen, options.get("progress")),
    )
    return of_checkpoint("transform", done, transform_stage.render)
