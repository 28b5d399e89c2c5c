"""The mxfp8 method of transformers and SGLang: ``quant_method: mxfp8``, U8 ``weight_scale_inv`` [N, K/32].

The spelling of MXFP8 that transformers reads for experts too; vLLM 0.32 wants the scale called ``weight_scale`` and
refuses it. Reading takes both names.
"""

from collections.abc import Mapping, Sequence
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
from ptqpipe.formats import FORMATS
from ptqpipe.schemes import Activation, Scheme

QUANT_METHOD = "mxfp8"


def supports(scheme: Scheme) -> str | None:
    """None for MXFP8 with dynamic MXFP8 activations, else what to use."""
    if structure(scheme.fmt) == structure(FORMATS["mxfp8"]) and scheme.activation is Activation.MXFP8:
        return None
    return f"mxfp8_hf stores mxfp8 only, not {scheme.name}; use the {scheme.container} container"


def parts(
    weight: str, shape: tuple[int, int], scheme: Scheme, *, experts: int | None = None, transposed: bool = False
) -> tuple[Part, ...]:
    """The tensors that store this weight. FormatError for what the layout cannot spell."""
    return _scale_inv.parts(
        weight,
        shape,
        scheme,
        container="mxfp8_hf",
        reason=supports(scheme),
        experts=experts,
        transposed=transposed,
        scale_dtype="U8",
    )


def configs(
    base: Mapping[str, Any],
    targets: Sequence[Target],
    *,
    kept_modules: Sequence[str],
    provenance: Mapping[str, Any],
) -> dict[str, dict[str, Any]]:
    """config.json with ``quantization_config``. Two readers, two names for what is kept: both are written."""
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
            "scale_fmt": "ue8m0",
            "weight_block_size": [1, 32],
        },
        ignore_keys=("modules_to_not_convert", "ignored_layers"),
    )


def warnings(targets: Sequence[Target], config: Mapping[str, Any]) -> list[str]:
    """What readers are known to get wrong about this output."""
    refused = "vLLM 0.32 refuses this spelling of mxfp8; use --container compressed-tensors for vLLM"
    return [
        refused,
        *expert_name_warnings(targets, config, container="mxfp8_hf"),
        *sglang_scale_warnings(config, remedy="use --format fp8 or nvfp4 for SGLang"),
    ]


def detect(config: Mapping[str, Any], names: Names) -> bool:
    """Whether a checkpoint with this config has this layout."""
    return _scale_inv.method(config) == QUANT_METHOD


def stored_weights(config: Mapping[str, Any], names: Names) -> dict[str, StoredWeight]:
    """Every quantized weight, by logical name. CheckpointError where names, dtypes, shapes and config disagree."""
    block = quantization_config(config).get("weight_block_size", [1, 32])
    if block != [1, 32]:
        raise CheckpointError(f"weight_block_size of an mxfp8 checkpoint is {block!r}, expected [1, 32]")
    return _scale_inv.stored_weights(names, FORMATS["mxfp8"], Activation.MXFP8)
