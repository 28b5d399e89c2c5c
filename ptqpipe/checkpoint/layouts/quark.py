"""AMD Quark's layout, read only: ``quant_method: quark`` with MXFP4 or FP8 weights called ``weight``.

As amd-quark 0.13 exports it (``pack_method: reorder``, real quantized). Nothing is written: compressed-tensors holds
the same numbers and more readers take it.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from ptqpipe.checkpoint.layouts._codec import with_scale_dtype
from ptqpipe.checkpoint.layouts._config import (
    ReadOnly,
    accept_variants,
    matrix_shape,
    quantization_config,
    scheme_for,
    stored_grid,
)
from ptqpipe.checkpoint.layouts._lists import Lists, by_expressions, by_wildcards, is_head, listed
from ptqpipe.checkpoint.layouts._types import Names, Part, PartKind, StoredWeight
from ptqpipe.errors import CheckpointError
from ptqpipe.numerics.formats import FORMATS
from ptqpipe.numerics.schemes import Activation, Capabilities

QUANT_METHOD = "quark"
CAPABILITIES = Capabilities(transformers="quark")
_LAYOUT = ReadOnly(QUANT_METHOD)
supports, parts, configs = _LAYOUT.supports, _LAYOUT.parts, _LAYOUT.configs
detect, config_faults = _LAYOUT.detect, _LAYOUT.config_faults

# (dtype, qscheme) of the weight's spec -> format name
_WEIGHTS = {
    ("fp4", "per_group"): "mxfp4",
    ("fp8_e4m3", "per_tensor"): "fp8_tensor",
    ("fp8_e4m3", "per_channel"): "fp8_channel",
}


def lists(config: Mapping[str, Any]) -> Lists:
    """What readers take for excluded: names and expressions (vLLM), wildcards (Quark), layers without a weight spec."""
    described = quantization_config(config)
    entries = listed(described, "exclude") or []
    return Lists(
        "exclude",
        entries,
        patterns={**by_expressions(entries), **by_wildcards(entries)},
        also=lambda names: _without_weights(names[0], described),
        unsure=lambda module: is_head(module) and not entries,
    )


def stored_weights(config: Mapping[str, Any], names: Names) -> dict[str, StoredWeight]:
    described, excluded = quantization_config(config), lists(config)
    weights = {}
    for name in names:
        module = name.removesuffix(".weight_scale")
        if module != name:
            excluded.refuse([module])
            weights[f"{module}.weight"] = _stored(module, _spec(module, described), names)
    return weights


def _without_weights(module: str, described: Mapping[str, Any]) -> str | None:
    spec = _spec(module, described)
    return None if spec.get("weight") else "has a quark config without a weight spec for it"


def _spec(module: str, described: Mapping[str, Any]) -> Mapping[str, Any]:
    """The quantization spec of a module: the first matching wildcard of ``layer_quant_config``, else the global one."""
    layers = described.get("layer_quant_config") or {}
    for pattern, spec in layers.items() if isinstance(layers, Mapping) else ():
        if fnmatchcase(module, pattern) and isinstance(spec, Mapping):
            return spec
    spec = described.get("global_quant_config")
    if not isinstance(spec, Mapping):
        raise CheckpointError("quantization_config of a quark checkpoint has no 'global_quant_config'")
    return spec


def _stored(module: str, spec: Mapping[str, Any], names: Names) -> StoredWeight:
    weight, described = f"{module}.weight", spec.get("weight")
    if not isinstance(described, Mapping):
        raise CheckpointError(f"{module} is quantized, but its quark config has no weight spec")
    key = (str(described.get("dtype")), str(described.get("qscheme")))
    if key not in _WEIGHTS or (key[0] == "fp4" and described.get("group_size") != 32):
        raise CheckpointError(f"{module} has quark weights {key}, which ptqpipe does not read")
    scale = names[f"{module}.weight_scale"]
    fmt = with_scale_dtype(FORMATS[_WEIGHTS[key]], scale[0])
    n, k = shape = matrix_shape(names, weight, bits=fmt.element.bits, owner=module)
    grid = stored_grid(weight, fmt, shape)
    if fmt.block == (1, 0) and len(scale[1]) == 1:
        grid = (n,)
    expected = [
        Part(weight, "U8" if fmt.element.bits < 8 else "F8_E4M3", (n, k * fmt.element.bits // 8), PartKind.DATA),
        Part(f"{module}.weight_scale", "U8" if fmt.scale.dtype is None else scale[0], grid, PartKind.SCALES),
    ]
    activation = _activation(spec.get("input_tensors"))
    if f"{module}.input_scale" in names:
        expected.append(Part(f"{module}.input_scale", names[f"{module}.input_scale"][0], (1,), PartKind.INPUT_GLOBAL))
    checked = accept_variants(expected, names, weight=weight)
    return StoredWeight(weight, shape, scheme_for(fmt, activation), checked)


def _activation(spec: Any) -> Activation:
    if spec is None:
        return Activation.NONE
    if not isinstance(spec, Mapping):
        return Activation.UNKNOWN
    if spec.get("dtype") == "fp4" and spec.get("is_dynamic") is True:
        return Activation.MXFP4
    if spec.get("dtype") == "fp8_e4m3" and spec.get("is_dynamic") is False and spec.get("qscheme") == "per_tensor":
        return Activation.FP8_TENSOR_STATIC
    return Activation.UNKNOWN
