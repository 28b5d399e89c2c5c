"""NVIDIA ModelOpt's layout: config.json and hf_quant_config.json, read by TensorRT-LLM, vLLM and SGLang.

Names, dtypes and shapes are those of modelopt 0.47: 0-d F32 for one number, global scales multiply, per-channel scales
are 1-D, block scales 4-D. The NVFP4 payload is that of compressed-tensors under other names. Both config files say the
same: vLLM and SGLang prefer the first, TensorRT-LLM the second. Knows the layout only.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ptqpipe.checkpoint.json_values import short_json
from ptqpipe.checkpoint.layouts._codec import with_scale_dtype
from ptqpipe.checkpoint.layouts._config import (
    FLOAT_MODEL,
    HF_QUANT_CONFIG,
    accept_variants,
    kept_experts,
    kv_cache_scheme,
    matrix_shape,
    module_list,
    quant_method,
    quantization_config,
    refuse,
    same_value,
    scheme_for,
    structure,
    without_quantization,
)
from ptqpipe.checkpoint.layouts._lists import Lists, by_wildcards, called, components, is_head, listed
from ptqpipe.checkpoint.layouts._types import ConfigFiles, ConfigRequest, Names, Part, PartKind, StoredWeight
from ptqpipe.errors import CheckpointError, FormatError
from ptqpipe.numerics.formats import FORMATS, Format, get_format
from ptqpipe.numerics.schemes import Activation, Capabilities, KvCache, Scheme

QUANT_METHOD = "modelopt"
CAPABILITIES = Capabilities(
    kv_cache=KvCache(r"\1.\2_proj.\2_scale", (), written=True, per_head=False),
    float32_scales=True,
    hf_quant_config=True,
    methods=("modelopt_fp4", "modelopt_mixed"),
    transformers="never",
)
PRODUCER = {"name": "modelopt", "version": "0.47.0"}  # the layout's version; some readers test the name

# algorithm -> format name, activations. The first rows are written, the others read only.
_WRITTEN: dict[str, tuple[str, Activation]] = {
    "NVFP4": ("nvfp4", Activation.NVFP4_STATIC_GLOBAL),
    "W4A16_NVFP4": ("nvfp4", Activation.NONE),
    "FP8": ("fp8_tensor", Activation.FP8_TENSOR_STATIC),
    "FP8_PER_CHANNEL_PER_TOKEN": ("fp8_channel", Activation.FP8_TOKEN),
    "FP8_PB_WO": ("fp8_block", Activation.FP8_GROUP),
    "MXFP8": ("mxfp8", Activation.MXFP8),
}
_READ: dict[str, tuple[str, Activation]] = {
    **_WRITTEN,
    "FP8_BLOCK_SCALES": ("fp8_block", Activation.FP8_GROUP),
    "MXFP4": ("mxfp4", Activation.MXFP4),
    "W4A16_MXFP4": ("mxfp4", Activation.NONE),
    "W4A8_MXFP4_FP8": ("mxfp4", Activation.UNKNOWN),
    "W4A8_NVFP4_FP8": ("e2m1/32/e4m3/global", Activation.FP8_TENSOR_STATIC),
}
_ALGORITHMS = {(structure(FORMATS[name]), activation): algo for algo, (name, activation) in _WRITTEN.items()}
_GROUP_SIZES = {"nvfp4": 16, "mxfp8": 32, "fp8_block": 128}
_MIXED = "MIXED_PRECISION"


def supports(scheme: Scheme) -> str | None:
    """None if the layout can store this scheme and a reader takes it, else one line that says why not and what can."""
    if (structure(scheme.fmt), scheme.activation) in _ALGORITHMS:
        return None
    return (
        f"no reader takes {scheme.name} in ModelOpt's layout (it has {', '.join(a.lower() for a in _WRITTEN)}); "
        f"use the {'ptqpipe' if '/' in scheme.name else scheme.container} container"
    )


def parts(
    weight: str, shape: tuple[int, int], scheme: Scheme, *, experts: int | None = None, transposed: bool = False
) -> tuple[Part, ...]:
    """The tensors that store this weight. FormatError for what the layout cannot store."""
    refuse(weight, container="modelopt", scheme_reason=supports(scheme), experts=experts, transposed=transposed)
    return _parts(weight, shape, scheme, "F32")


def _parts(weight: str, shape: tuple[int, int], scheme: Scheme, float_dtype: str) -> tuple[Part, ...]:
    fmt, (n, k), module = scheme.fmt, shape, weight.removesuffix(".weight")
    rows, cols = fmt.scale_shape(shape)
    bits = fmt.element.bits
    stored = [Part(weight, "U8" if bits < 8 else "F8_E4M3", (n, k * bits // 8), PartKind.DATA)]
    if fmt.scale.dtype is None:
        scale = Part(
            f"{module}.weight_scale", "F8_E4M3" if fmt.scale.name == "e4m3" else "U8", (rows, cols), PartKind.SCALES
        )
    else:
        forms: dict[tuple[int, int], tuple[int, ...]] = {(0, 0): (), (1, 0): (n,)}
        scale = Part(f"{module}.weight_scale", float_dtype, forms.get(fmt.block, (rows, 1, cols, 1)), PartKind.SCALES)
    stored.append(scale)
    if fmt.has_global:
        stored.append(Part(f"{module}.weight_scale_2", "F32", (), PartKind.GLOBAL))
    if scheme.needs_input_global_scale:
        stored.append(Part(f"{module}.input_scale", "F32", (), PartKind.INPUT_GLOBAL))
    return tuple(stored)


# --- Writing the config


def configs(request: ConfigRequest) -> dict[str, dict[str, Any]]:
    """config.json and hf_quant_config.json, saying the same."""
    request.check(supports)
    kept = module_list(request.kept_modules, request.targets, request.base)
    if "" in kept:
        raise FormatError(
            "the source has a tensor '.weight', of a module without a name: modelopt lists kept modules by parts of "
            "their names, and the empty one is part of all; rename it, or use another container"
        )
    algorithms = {target.module: _algorithm(target.scheme) for target in request.targets}
    distinct = list(dict.fromkeys(algorithms.values()))
    kept += kept_experts(kept, request.targets)  # vLLM asks for the module of the experts, not for single ones
    exclude = _exclusions(kept, list(algorithms))
    nested: dict[str, Any] = {
        "quant_algo": distinct[0] if len(distinct) == 1 else _MIXED,
        "kv_cache_quant_algo": None if kv_cache_scheme(request.base) is None else "FP8",
        "exclude_modules": exclude,
    }
    flat: dict[str, Any] = {"quant_method": QUANT_METHOD, "quant_algo": nested["quant_algo"], "ignore": exclude}
    if len(distinct) == 1:
        group_size = _layer(distinct[0]).get("group_size")
        if group_size is not None:
            nested["group_size"] = group_size
        groups = {"group_0": {**_arguments(distinct[0]), "targets": ["Linear"]}}
    else:
        nested["quantized_layers"] = {name: _layer(algo) for name, algo in algorithms.items()}
        flat["quantized_layers"] = nested["quantized_layers"]
        groups = {
            f"group_{number}": {**_arguments(algo), "targets": [m for m, a in algorithms.items() if a == algo]}
            for number, algo in enumerate(distinct)
        }
    flat["config_groups"] = groups
    if nested["kv_cache_quant_algo"]:
        flat["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    flat["producer"] = dict(PRODUCER)
    flat["ptqpipe"] = dict(request.provenance)
    return {
        "config.json": {**without_quantization(request.base), "quantization_config": flat},
        HF_QUANT_CONFIG: {"producer": dict(PRODUCER), "quantization": nested},
    }


def _algorithm(scheme: Scheme) -> str:
    return _ALGORITHMS[(structure(scheme.fmt), scheme.activation)]


def config_faults(files: ConfigFiles, stored: Mapping[str, StoredWeight]) -> Iterator[tuple[str, str]]:
    """Where hf_quant_config.json and config.json differ: vLLM and SGLang read one, TensorRT-LLM the other."""
    nested = (files[HF_QUANT_CONFIG] or {}).get("quantization")
    described = quantization_config(files["config.json"] or {})
    if not isinstance(nested, Mapping):
        return
    inner = _flat(files["config.json"] or {})
    for key in ("quant_algo", "quantized_layers"):  # what the lists exclude is compared with the weights
        a, b = nested.get(key) or None, inner.get(key) or None
        if (b is not None or described) and not same_value(a, b):
            message = f"says {key} {short_json(a)}, config.json {short_json(b)}; readers take one of the two"
            yield HF_QUANT_CONFIG, message


def _layer(algorithm: str) -> dict[str, Any]:
    size = _GROUP_SIZES.get(_WRITTEN[algorithm][0])
    return {"quant_algo": algorithm} if size is None else {"quant_algo": algorithm, "group_size": size}


def _arguments(algorithm: str) -> dict[str, Any]:
    """A config group as modelopt writes it. vLLM takes "NVFP4" without ``input_activations`` for weight-only."""
    name, activation = _WRITTEN[algorithm]
    sized = {} if name not in _GROUP_SIZES else {"group_size": _GROUP_SIZES[name]}
    arguments = {"dynamic": False, "num_bits": FORMATS[name].element.bits, "type": "float", **sized}
    weights = {**arguments, "strategy": "channel"} if name == "fp8_channel" else arguments
    return (
        {"weights": weights} if activation is Activation.NONE else {"input_activations": arguments, "weights": weights}
    )


# Of these SGLang's is_layer_excluded takes an entry for those of every layer.
_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")


def _exclusions(kept: Sequence[str], quantized: Sequence[str]) -> list[str]:
    """Kept modules as patterns with the readers' wildcards.

    vLLM also takes an entry for a substring: "model.layers.0.mlp.gate" would leave model.layers.0.mlp.gate_up_proj
    unquantized, and SGLang goes by the last part of some names. Where that could happen the last letter goes into
    brackets: as a wildcard that is the same name, as a substring or a last part it matches nothing.
    """
    every = "\n".join(quantized)  # searched as a whole, since there may be tens of thousands of each
    latent = {name.rpartition(".")[2] for name in quantized}.intersection(_LATENT)
    return [
        f"{module[:-1]}[{module[-1]}]" if module in every or module.rpartition(".")[2] in latent else module
        for module in kept
    ]


# --- Reading


def detect(config: Mapping[str, Any], names: Names) -> bool:
    return quant_method(config).startswith(QUANT_METHOD)


def lists(config: Mapping[str, Any]) -> Lists:
    """What readers take for excluded: wildcards of whole names, names of parents (vLLM takes an entry for a part of a
    name), wildcards of one component (SGLang). In mixed precision they look for codes of what is listed alone, else of
    all linear layers; those before modelopt 0.39 had no towers, and vLLM knows them by their names."""
    described = _flat(config)
    entries = listed(described, "ignore", "exclude_modules") or []
    mixed = str(described.get("quant_algo")).upper() == _MIXED
    return Lists(
        "ignore",
        entries,
        literal="parts",
        patterns=by_wildcards(entries),
        also=components("ignore", entries),
        aims=(lambda names: any(_entry(name, described) for name in names)) if mixed else _no_tower,
        unsure=lambda module: is_head(module) and not entries,
    )


def _flat(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The description, also of a hf_quant_config.json that was copied into config.json."""
    described = quantization_config(config)
    nested = described.get("quantization")
    return nested if isinstance(nested, Mapping) else described


def _no_tower(names: Sequence[str]) -> bool:
    return not any(part in names[0] for part in ("vision_tower", "vision_model", "visual"))


def stored_weights(config: Mapping[str, Any], names: Names) -> dict[str, StoredWeight]:
    described, excluded = _flat(config), lists(config)
    weights = {}
    for name in names:
        module = name.removesuffix(".weight_scale")
        if module == name:
            continue
        excluded.refuse([module])
        weights[f"{module}.weight"] = _stored(module, _read_algorithm(module, described), names)
    for name, (dtype, shape) in names.items():
        if name.endswith(".weight") and len(shape) == 2 and dtype in ("F8_E4M3", "U8") and name not in weights:
            raise CheckpointError(f"{name!r} is {dtype} without a {name + '_scale'!r}; {FLOAT_MODEL}")
    return weights


def _read_algorithm(module: str, described: Mapping[str, Any]) -> str:
    algorithm = str(described.get("quant_algo") or "").upper()
    if algorithm != _MIXED:
        return algorithm
    if not isinstance(described.get("quantized_layers"), Mapping):
        raise CheckpointError("quant_algo MIXED_PRECISION needs 'quantized_layers' in config.json; there is none")
    for name in called(module):
        entry = _entry(name, described)
        if entry is not None:
            return str(entry.get("quant_algo") or "").upper()
    raise CheckpointError(f"{module} is quantized, but 'quantized_layers' does not list it; readers drop it")


def _entry(name: str, described: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The entry of a module in ``quantized_layers``; an entry of a parent holds for its children."""
    layers = described.get("quantized_layers")
    while name and isinstance(layers, Mapping):
        entry = layers.get(name)
        if isinstance(entry, Mapping):
            return entry
        name = name.rpartition(".")[0]
    return None


def _stored(module: str, algorithm: str, names: Names) -> StoredWeight:
    weight = f"{module}.weight"
    if algorithm not in _READ:
        algorithms = ", ".join(_READ)
        raise CheckpointError(
            f"{module} has quant_algo {algorithm!r}, which ptqpipe does not read (it reads {algorithms})"
        )
    if f"{module}.pre_quant_scale" in names:
        raise CheckpointError(
            f"{module} has a pre_quant_scale (AWQ), which is not folded into the weight; not readable"
        )
    name, activation = _READ[algorithm]
    scale_dtype = names[f"{module}.weight_scale"][0]
    fmt: Format = with_scale_dtype(get_format(name), scale_dtype)
    shape = matrix_shape(names, weight, bits=fmt.element.bits, owner=module)
    scheme = scheme_for(fmt, activation)
    try:
        expected = accept_variants(_parts(weight, shape, scheme, scale_dtype), names, weight=weight)
    except FormatError as error:
        raise CheckpointError(f"{weight}: {error}") from None
    return StoredWeight(weight, shape, scheme, expected)
