"""DeepSeek's FP8 layout: ``quant_method: fp8``, blocks of 128 x 128, F32 ``weight_scale_inv`` (which multiplies).

The one spelling of FP8 blocks that transformers, vLLM, SGLang and TensorRT-LLM all read, experts included. Reading also
takes other block sizes, E8M0 scales, and one scale per tensor, as older checkpoints have them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ptqpipe.containers import _scale_inv
from ptqpipe.containers._config import (
    expert_name_warnings,
    quantization_config,
    sglang_scale_warnings,
    structure,
)
from ptqpipe.containers._types import Names, Part, StoredWeight, Target
from ptqpipe.errors import CheckpointError, FormatError
from ptqpipe.formats import FORMATS, Format
from ptqpipe.schemes import Activation, Scheme

QUANT_METHOD = "fp8"


def supports(scheme: Scheme) -> str | None:
    """None for FP8 in blocks of 128 x 128 with dynamic activations, else what to use."""
    if structure(scheme.fmt) == structure(FORMATS["fp8_block"]) and scheme.activation is Activation.FP8_GROUP:
        return None
    return f"deepseek_fp8 stores fp8_block only, not {scheme.name}; use the {scheme.container} container"


def parts(
    weight: str, shape: tuple[int, int], scheme: Scheme, *, experts: int | None = None, transposed: bool = False
) -> tuple[Part, ...]:
    """The tensors that store this weight. FormatError for what the layout cannot spell.

    A short last block of rows is refused where transformers would take it for smaller whole blocks: it divides the
    rows by the height of the scale grid.
    """
    reason = supports(scheme)
    block = scheme.fmt.block[0]
    if reason is None and shape[1] % scheme.fmt.block[1]:
        raise FormatError(f"{weight}: FP8 blocks need K in multiples of {scheme.fmt.block[1]}, got {shape[1]}; keep it")
    if reason is None and shape[0] % block and shape[0] % -(-shape[0] // block) == 0 and shape[0] > block:
        raise FormatError(f"{weight}: transformers misreads {shape[0]} rows in blocks of {block}; keep it")
    return _scale_inv.parts(
        weight,
        shape,
        scheme,
        container="deepseek_fp8",
        reason=reason,
        experts=experts,
        transposed=transposed,
        scale_dtype="F32",
    )


def configs(
    base: Mapping[str, Any],
    targets: Sequence[Target],
    *,
    kept_modules: Sequence[str],
    provenance: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    """config.json with ``quantization_config``."""
    for target in targets:
        reason = supports(target.scheme)
        if reason is not None:
            raise FormatError(f"{target.weight}: {reason}")
    return _scale_inv.configs(
        base,
        targets,
        kept_modules=kept_modules,
        provenance=provenance,
        quantization={
            "quant_method": QUANT_METHOD,
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
        },
        ignore_keys=("modules_to_not_convert",),
    )


def warnings(targets: Sequence[Target], config: Mapping[str, Any]) -> list[str]:
    """What readers are known to get wrong about this output: one line each, with the remedy."""
    remedy = "use --container compressed_tensors for SGLang"
    return [
        *expert_name_warnings(targets, config, container="deepseek_fp8"),
        *sglang_scale_warnings(config, remedy=remedy),
    ]


def detect(config: Mapping[str, Any], names: Names) -> bool:
    """Whether a checkpoint with this config has this layout."""
    return _scale_inv.method(config) == QUANT_METHOD


def stored_weights(config: Mapping[str, Any], names: Names) -> dict[str, StoredWeight]:
    """Every quantized weight, by logical name. CheckpointError where names, dtypes, shapes and config disagree."""
    block = quantization_config(config).get("weight_block_size")
    return _scale_inv.stored_weights(names, *_read_block(block))


def _read_block(block: Any) -> tuple[Format, Activation]:
    if block is None:
        return FORMATS["fp8_tensor"], Activation.UNKNOWN
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(x, int) and x > 0 for x in block)):
        raise CheckpointError(f"weight_block_size in config.json is {block!r}, expected two positive integers")
    fmt = FORMATS["fp8_block"]
    if block == list(fmt.block):
        return fmt, Activation.FP8_GROUP
    return replace(fmt, block=(block[0], block[1])), Activation.UNKNOWN
