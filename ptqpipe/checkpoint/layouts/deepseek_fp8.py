"""DeepSeek's FP8 layout: ``quant_method: fp8``, blocks of 128 x 128, F32 ``weight_scale_inv`` (which multiplies).

The one layout of FP8 blocks that transformers, vLLM, SGLang and TensorRT-LLM all read, experts included. Reading also
takes other block sizes, E8M0 scales, and one scale per tensor, as older checkpoints have them; and DeepSeek-V4's files:
scales called ``scale``, and experts in MXFP4, I8 [out, in/2] with the even column in the low four bits.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ptqpipe.checkpoint.layouts._config import quantization_config
from ptqpipe.checkpoint.layouts._scale_inv import ScaleInv, stored_weights_of
from ptqpipe.checkpoint.layouts._types import ConfigRequest, Names, Part, StoredWeight, schemes_of
from ptqpipe.errors import CheckpointError, FormatError
from ptqpipe.numerics.formats import FORMATS, Format
from ptqpipe.numerics.schemes import Activation, Capabilities, Scheme, get_scheme

QUANT_METHOD = "fp8"
CAPABILITIES = Capabilities(float32_scales=True, even_blocks=True, transformers="kernels")
_LAYOUT = ScaleInv(
    "deepseek_fp8",
    QUANT_METHOD,
    get_scheme("fp8_block"),
    scale_dtype="F32",
    described={"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
    ignore_keys=("modules_to_not_convert",),
)
# Scales that are powers of two: DeepGEMM on Blackwell uses them as they are, and rounds any others when it loads them.
_UE8M0 = replace(_LAYOUT, scheme=get_scheme("fp8_block_ue8m0"), described={**_LAYOUT.described, "scale_fmt": "ue8m0"})
detect, lists, config_faults = _LAYOUT.detect, _LAYOUT.lists, _LAYOUT.config_faults
_IN_SHARDS = "mimo_v2"  # MiMo-V2.5's published qkv_proj is of shards that were quantized apart


def supports(scheme: Scheme) -> str | None:
    """None for the two schemes, else what to use."""
    return None if _UE8M0.supports(scheme) is None else _LAYOUT.supports(scheme)


def configs(request: ConfigRequest) -> dict[str, dict[str, Any]]:
    """config.json with everything kept listed. FormatError where both kinds of scales are asked for."""
    powers = any(_UE8M0.supports(scheme) is None for scheme in schemes_of(request.targets))
    return (_UE8M0 if powers else _LAYOUT).configs(request)


def parts(
    weight: str, shape: tuple[int, int], scheme: Scheme, *, experts: int | None = None, transposed: bool = False
) -> tuple[Part, ...]:
    """The tensors that store this weight. FormatError for what the layout cannot store.

    A short last block of rows is refused where transformers would take it for smaller whole blocks: it divides the
    rows by the height of the scale grid.
    """
    (rows, columns), (block, width) = shape, scheme.fmt.block
    if supports(scheme) is None:
        if columns % width:
            raise FormatError(f"{weight}: FP8 blocks need K in multiples of {width}, got {columns}; keep it")
        if rows > block and rows % block and rows % -(-rows // block) == 0:
            raise FormatError(f"{weight}: transformers misreads {rows} rows in blocks of {block}; keep it")
    layout = _LAYOUT if _UE8M0.supports(scheme) is not None else _UE8M0
    return layout.parts(weight, shape, scheme, experts=experts, transposed=transposed)


def stored_weights(config: Mapping[str, Any], names: Names) -> dict[str, StoredWeight]:
    described = quantization_config(config)
    block = _read_block(described.get("weight_block_size"), described.get("scale_fmt"))
    in_shards = str(config.get("model_type")).startswith(_IN_SHARDS)
    return stored_weights_of(names, *block, excluded=lists(config), in_shards=in_shards)


def _read_block(block: Any, scale_fmt: Any) -> tuple[Format, Activation]:
    if block is None:
        return FORMATS["fp8_tensor"], Activation.UNKNOWN
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(x, int) and x > 0 for x in block)):
        raise CheckpointError(f"weight_block_size in config.json is {block!r}, expected two positive integers")
    fmt = FORMATS["fp8_block_ue8m0" if scale_fmt == "ue8m0" else "fp8_block"]
    if block == list(fmt.block):
        return fmt, Activation.FP8_GROUP
    return replace(fmt, block=(block[0], block[1])), Activation.UNKNOWN
