"""The options of `relayout`, `dequantize` and `transform`."""

from dataclasses import dataclass
from pathlib import Path

from ptqpipe.run.options import Options, WritingOptions, argument, option, required

STORED_FLOATS = ("bf16", "fp16", "fp32")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class RelayoutCommand(WritingOptions):
    """The options of `relayout`."""

    ckpt: Path = argument(kind="model")
    container: str = required("Layout to write; `ptqpipe formats` lists them.", metavar="NAME")
    out: Path | None = option(None, "Folder to write.", short="-o", shown="<ckpt>-<container>")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class DequantizeCommand(WritingOptions):
    """The options of `dequantize`."""

    ckpt: Path = argument(kind="model")
    dtype: str = option("bf16", "Float type of the weights that are written.", kind="dtype", choices=STORED_FLOATS)
    out: Path | None = option(None, "Folder to write.", short="-o", shown="<ckpt>-<dtype>")


@dataclass(frozen=True)
class TransformOptions(Options):
    """The options that decide the bytes, besides source and statistics.

    transforms  in their order; ``dtype``: None: the source's where that is exact, else fp32
    """

    transforms: str = option(
        "smoothquant",
        "Transforms to apply, in order, with commas: smoothquant, awq, aqas, smooth_swiglu, rotate.",
        metavar="NAMES",
        required=True,
    )
    alpha: float | None = option(None, "Exponent of the inputs in SmoothQuant, or the strength of Smooth-SwiGLU.")
    power_of_two: bool = option(False, "Round factors to powers of two: exact in every float type.")
    fold_at: tuple[str, ...] | None = option(
        None,
        "Between which layers factors move, with commas: from a norm to the layers that read it (norm), within latent "
        "attention (latent), from v_proj to o_proj (value), from up_proj to down_proj (up).",
        metavar="KINDS",
        kind="names",
        shown="each transform's own",
    )
    rotation_size: int | None = option(
        None,
        "Channels rotated together, 16 to 256.",
        shown="32; with {learn} the largest that divides the hidden size",
    )
    learn: int = option(
        0,
        "Learn rotations for {format} in this many steps, such as 200; needs {stats} of {moments} diagonal,pairs.",
        metavar="STEPS",
        shown="0, Hadamard matrices",
    )
    untie: bool = option(False, "Store an output head that is tied to the embedding separately.")
    format: str = option(
        "nvfp4", "Number format for which awq and aqas search and rotations are learned.", metavar="NAME"
    )
    dtype: str | None = option(
        None,
        "Float type of the weights that are written.",
        kind="dtype",
        choices=STORED_FLOATS,
        shown="the source's if that is exact, else fp32",
    )
    shard_size: int | None = option(None, "Size of the largest weight file.", kind="size", shown="chosen by the total")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class TransformCommand(TransformOptions, WritingOptions):
    """The options of `transform`."""

    model: str = argument()
    stats: Path | None = option(
        None,
        "Folder of statistics that `ptqpipe calibrate` wrote; Hadamard rotations need none.",
        metavar="DIR",
    )
    out: Path = required("Folder to write.", short="-o")
