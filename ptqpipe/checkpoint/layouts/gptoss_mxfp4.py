"""gpt-oss' MXFP4 layout: ``quant_method: mxfp4``, stacks of experts only.

``...experts.gate_up_proj`` becomes ``_blocks`` U8 [E, N, K/32, 16] and ``_scales`` U8 [E, N, K/32]; the float model has
it as [E, K, N]. Rows of gate and up alternate, as the columns of the float model do. Readers know this method for
gpt-oss alone: in any other model they leave the weights out.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ptqpipe.checkpoint.layouts._config import (
    FLOAT_MODEL,
    check_parts,
    kept_stacks,
    module_list,
    quant_method,
    quantization_config,
    scheme_for,
    structure,
    without_quantization,
)
from ptqpipe.checkpoint.layouts._lists import Lists, as_transformers, is_stack, listed
from ptqpipe.checkpoint.layouts._types import ConfigFiles, ConfigRequest, Names, Part, PartKind, StoredWeight
from ptqpipe.errors import CheckpointError, FormatError
from ptqpipe.numerics.formats import FORMATS
from ptqpipe.numerics.schemes import Activation, Capabilities, Scheme

QUANT_METHOD = "mxfp4"
CAPABILITIES = Capabilities(matrices=False, stacks=True, transformers="kernels")
_FMT = FORMATS["mxfp4"]
_BLOCK_BYTES = 16


def supports(scheme: Scheme) -> str | None:
    """None for MXFP4 (the layout has no field for activations), else what to use."""
    if structure(scheme.fmt) == structure(_FMT) and scheme.activation in (Activation.NONE, Activation.MXFP4):
        return None
    return f"gptoss_mxfp4 stores mxfp4 only, not {scheme.name}; use the {scheme.container} container"


def parts(
    weight: str, shape: tuple[int, int], scheme: Scheme, *, experts: int | None = None, transposed: bool = False
) -> tuple[Part, ...]:
    """The tensors that store this stack. FormatError for what the layout cannot store."""
    reason = supports(scheme)
    if reason is not None:
        raise FormatError(f"{weight}: {reason}")
    if experts is None:
        raise FormatError(f"{weight}: gptoss_mxfp4 stores stacks of experts only; keep it, or use compressed_tensors")
    n, groups = scheme.fmt.scale_shape(shape)
    return (
        Part(f"{weight}_blocks", "U8", (experts, n, groups, _BLOCK_BYTES), PartKind.DATA, stacked=True),
        Part(f"{weight}_scales", "U8", (experts, n, groups), PartKind.SCALES, stacked=True),
    )


def configs(request: ConfigRequest) -> dict[str, dict[str, Any]]:
    kept = module_list(request.kept_modules, request.targets, request.base)
    kept += kept_stacks(kept, request.targets)
    quantization = {"quant_method": QUANT_METHOD, "modules_to_not_convert": kept, "ptqpipe": dict(request.provenance)}
    return {"config.json": {**without_quantization(request.base), "quantization_config": quantization}}


def config_faults(files: ConfigFiles, stored: Mapping[str, StoredWeight]) -> Iterator[tuple[str, str]]:
    return iter(())


def detect(config: Mapping[str, Any], names: Names) -> bool:
    return quant_method(config) == QUANT_METHOD


def lists(config: Mapping[str, Any]) -> Lists:
    """What readers take for excluded: an expression from the beginning of a name, or a run of its components. They look
    for codes of stacks of experts alone."""
    entries = listed(quantization_config(config), "modules_to_not_convert") or []
    return Lists(
        "modules_to_not_convert",
        entries,
        literal="parts",
        patterns=as_transformers(entries),
        suffixes=True,
        aims=lambda names: is_stack(names[0]),
    )


def stored_weights(config: Mapping[str, Any], names: Names) -> dict[str, StoredWeight]:
    """Every stack of experts, by the name of the float model's tensor. CheckpointError where shapes disagree."""
    weights, excluded = {}, lists(config)
    for name, (_, shape) in names.items():
        weight = name.removesuffix("_blocks")
        if weight == name:
            continue
        if len(shape) != 4 or 0 in shape:
            raise CheckpointError(f"{name!r} has shape {list(shape)}, expected [experts, rows, groups, {_BLOCK_BYTES}]")
        excluded.refuse([weight])
        experts, n, groups, _ = shape
        matrix = (n, groups * _FMT.block[1])
        scheme = scheme_for(_FMT, Activation.NONE)
        expected = parts(weight, matrix, scheme, experts=experts)
        check_parts(expected, names, weight=weight)
        weights[weight] = StoredWeight(weight, matrix, scheme, expected, experts, transposed=True)
    for name in names:
        if name.endswith("_scales") and name.removesuffix("_scales") not in weights:
            raise CheckpointError(f"{name!r} has no '{name.removesuffix('_scales')}_blocks'; {FLOAT_MODEL}")
    return weights
