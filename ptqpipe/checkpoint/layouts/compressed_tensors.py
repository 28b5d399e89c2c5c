"""The compressed-tensors layout: what transformers, vLLM and SGLang read under ``quant_method: compressed-tensors``.

Names, dtypes and config keys are those of compressed-tensors 0.20 as llm-compressor 0.14 writes them, cut to what every
reader accepts: no unknown key inside a group, ``quantization_status`` and both levels of ``format`` always present,
``scale_dtype`` wherever its absence changes the activations, MX scales as plain U8, NVFP4 global scales as divisors of
shape [1], FP8 channel scales [N, 1]. Knows the layout only: no search, no files, no model code.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ptqpipe.checkpoint.layouts._codec import scale_dtype, with_scale_dtype
from ptqpipe.checkpoint.layouts._config import (
    FLOAT_MODEL,
    accept_variants,
    kept_stacks,
    kv_cache_scheme,
    matrix_shape,
    module_list,
    quant_method,
    quantization_config,
    refuse,
    scale_grid,
    scheme_for,
    strings,
    structure,
    without_quantization,
)
from ptqpipe.checkpoint.layouts._config_groups import (
    as_written_today,
    check_formats,
    described_rotations,
    group_faults,
    lists,
    name_patterns,
    resolver,
    stored_rotations,
)
from ptqpipe.checkpoint.layouts._integers import (
    described_integers,
    integer_parts,
    integer_stacks,
    stored_integers,
    stored_stack,
)
from ptqpipe.checkpoint.layouts._types import (
    ConfigFiles,
    ConfigRequest,
    Names,
    Part,
    PartKind,
    StoredWeight,
    Target,
    schemes_of,
)
from ptqpipe.checkpoint.tensor_names import experts_of
from ptqpipe.errors import CheckpointError, FormatError
from ptqpipe.numerics.formats import FORMATS, Format
from ptqpipe.numerics.schemes import Activation, Capabilities, KvCache, Scheme

QUANT_METHOD = "compressed-tensors"
CAPABILITIES = Capabilities(rotation=True, kv_cache=KvCache(r"\1.\2_scale", written=True))

_E4M3, _U8 = "torch.float8_e4m3fn", "torch.uint8"

# format name -> (format string, weight arguments, activations that go with it)
_ROWS: dict[str, tuple[str, dict[str, Any], tuple[Activation, ...]]] = {
    "nvfp4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": _E4M3},
        (Activation.NONE, Activation.NVFP4_STATIC_GLOBAL),
    ),
    "mxfp4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": _U8},
        (Activation.NONE, Activation.MXFP4, Activation.FP8_TOKEN, Activation.FP8_GROUP),
    ),
    "mxfp6_e2m3": (
        "mxfp6-pack-quantized",
        {"num_bits": 6, "strategy": "group", "group_size": 32, "scale_dtype": _U8},
        (Activation.NONE,),
    ),
    "mxfp8": (
        "mxfp8-quantized",
        {"num_bits": 8, "strategy": "group", "group_size": 32, "scale_dtype": _U8},
        (Activation.NONE, Activation.MXFP8),
    ),
    "fp8_channel": ("float-quantized", {"num_bits": 8, "strategy": "channel"}, (Activation.FP8_TOKEN,)),
    "fp8_tensor": (
        "float-quantized",
        {"num_bits": 8, "strategy": "tensor"},
        (Activation.FP8_TOKEN, Activation.FP8_TENSOR_STATIC),
    ),
    "fp8_block": (
        "float-quantized",
        {"num_bits": 8, "strategy": "block", "block_structure": [128, 128]},
        (Activation.FP8_GROUP,),
    ),
    "int4_g32": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
        (Activation.NONE,),
    ),
    "int4_g128": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128},
        (Activation.NONE,),
    ),
    "int8_channel": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, (Activation.NONE,)),
    "int8_signed_channel": (
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel"},
        (Activation.INT8_TOKEN,),
    ),
}
_INPUTS: dict[Activation, dict[str, Any]] = {
    Activation.NVFP4_STATIC_GLOBAL: {
        "num_bits": 4,
        "strategy": "tensor_group",
        "group_size": 16,
        "dynamic": "local",
        "scale_dtype": _E4M3,
    },
    Activation.MXFP4: {"num_bits": 4, "strategy": "group", "group_size": 32, "dynamic": True, "scale_dtype": _U8},
    Activation.MXFP8: {"num_bits": 8, "strategy": "group", "group_size": 32, "dynamic": True, "scale_dtype": _U8},
    Activation.FP8_TOKEN: {"num_bits": 8, "strategy": "token", "dynamic": True},
    Activation.FP8_GROUP: {"num_bits": 8, "strategy": "group", "group_size": 128, "dynamic": True},
    Activation.FP8_TENSOR_STATIC: {"num_bits": 8, "strategy": "tensor", "dynamic": False},
    Activation.INT8_TOKEN: {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
}
_BY_STRUCTURE = {structure(FORMATS[name]): name for name in _ROWS}
_ONLY_INTEGERS, _UNREADABLE = "weight_zero_point", "weight_g_idx"
_NOT_DECODED = ("weight_shape", "output_scale")
_MARKS = frozenset({"weight_packed", "weight_scale"})
"""A module with one of these tensors is a quantized weight."""


def supports(scheme: Scheme) -> str | None:
    """None if the layout can store this scheme, else one line that says why not and what can."""
    name = _BY_STRUCTURE.get(structure(scheme.fmt))
    if name is None:
        return f"compressed-tensors has no layout for {scheme.fmt.name}; use the ptqpipe container"
    if scheme.activation not in _ROWS[name][2]:
        return f"compressed-tensors has no {name} weights with {scheme.activation} activations; choose another scheme"
    return None


def parts(
    weight: str, shape: tuple[int, int], scheme: Scheme, *, experts: int | None = None, transposed: bool = False
) -> tuple[Part, ...]:
    """The tensors that store this weight. FormatError for what the layout cannot store."""
    refuse(weight, container=QUANT_METHOD, scheme_reason=supports(scheme), experts=experts, transposed=transposed)
    fmt, module = scheme.fmt, weight.removesuffix(".weight")
    if scheme.rotation and experts_of(weight):
        raise FormatError(f"{weight}: readers of {QUANT_METHOD} rotate no inputs of experts; leave them out of rotate")
    if fmt.partial_blocks and shape[1] % fmt.block[1]:
        raise FormatError(f"{weight}: {QUANT_METHOD} needs K in multiples of {fmt.block[1]}, got {shape[1]}; keep it")
    if fmt.element.grid:
        return tuple(integer_parts(module, shape, fmt))
    n, k = shape
    packed = fmt.element.bits < 8
    data = Part(
        f"{module}.weight_packed" if packed else weight,
        "U8" if packed else "F8_E4M3",
        (n, k * fmt.element.bits // 8),
        PartKind.DATA,
    )
    stored = [data, Part(f"{module}.weight_scale", scale_dtype(fmt), scale_grid(fmt, shape), PartKind.SCALES)]
    if fmt.has_global:
        stored.append(Part(f"{module}.weight_global_scale", "F32", (1,), PartKind.GLOBAL_DIVISOR))
    if scheme.activation is Activation.NVFP4_STATIC_GLOBAL:
        stored.append(Part(f"{module}.input_global_scale", "F32", (1,), PartKind.INPUT_GLOBAL_DIVISOR))
    if scheme.activation is Activation.FP8_TENSOR_STATIC:
        stored.append(Part(f"{module}.input_scale", scale_dtype(fmt), (1,), PartKind.INPUT_GLOBAL))
    return tuple(stored)


# --- Writing the config


def configs(request: ConfigRequest) -> dict[str, dict[str, Any]]:
    """config.json with ``quantization_config``.

    One scheme: the class target "Linear" and the exact names of everything kept. Several: one group a scheme with
    disjoint anchored expressions, since readers resolve overlapping targets differently. The group of the routed
    experts comes first: transformers takes the first group whose expression mentions "experts".
    """
    request.check(supports)
    groups = _grouped(request.targets)
    ignore = module_list(request.kept_modules, request.targets, request.base)
    ignore += [name for name in _kept_stack_patterns(ignore, request.targets) if name not in ignore]
    mixed = len(groups) > 1
    described: dict[str, Any] = {}
    for number, (scheme, modules) in enumerate(groups):
        others = [name for other, names in groups if other is not scheme for name in names]
        names = name_patterns(modules, others, ignored=ignore) if mixed else ["Linear"]
        described[f"group_{number}"] = _group(scheme, names)
    quantization: dict[str, Any] = {
        "quant_method": QUANT_METHOD,
        "format": "mixed-precision" if mixed else described["group_0"]["format"],
        "quantization_status": "compressed",
        "config_groups": described,
        "ignore": ignore,
        **described_rotations(request.targets, request.kept_modules),
        "ptqpipe": dict(request.provenance),
    }
    kv_cache = kv_cache_scheme(request.base)
    if kv_cache is not None:
        quantization["kv_cache_scheme"] = {"symmetric": True, **kv_cache}
    return {"config.json": {**without_quantization(request.base), "quantization_config": quantization}}


def _grouped(targets: Sequence[Target]) -> list[tuple[Scheme, list[str]]]:
    modules: dict[tuple[Any, Activation], tuple[Scheme, list[str]]] = {}
    keys = {id(scheme): (structure(scheme.fmt), scheme.activation) for scheme in schemes_of(targets)}
    for target in targets:
        modules.setdefault(keys[id(target.scheme)], (target.scheme, []))[1].append(target.module)
    return sorted(modules.values(), key=lambda group: not any(experts_of(name) for name in group[1]))


def _group(scheme: Scheme, names: Sequence[str]) -> dict[str, Any]:
    format_name, weights, _ = _ROWS[_BY_STRUCTURE[structure(scheme.fmt)]]
    group: dict[str, Any] = {"targets": list(names), "weights": _args(weights), "format": format_name}
    if scheme.activation is not Activation.NONE:
        group["input_activations"] = _args(_INPUTS[scheme.activation])
    return group


def _args(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "float", "symmetric": True, "dynamic": False, **row}


def config_faults(files: ConfigFiles, stored: Mapping[str, StoredWeight]) -> Iterator[tuple[str, str]]:
    """Groups that do not describe what is stored, in values that readers accept; a status that misleads them."""
    described = quantization_config(files["config.json"] or {})
    schemes, groups = dict.fromkeys(weight.scheme for weight in stored.values()), described.get("config_groups")
    if isinstance(groups, Mapping) and all(supports(scheme) is None for scheme in schemes):
        wanted = [_group(scheme, ["Linear"]) for scheme in schemes]
        top = {"format": described.get("format")}  # which speaks for groups that say nothing
        groups = {name: {**top, **group} if isinstance(group, Mapping) else group for name, group in groups.items()}
        groups = {name: as_written_today(group) for name, group in groups.items()}
        yield from group_faults(groups, wanted, [weight.removesuffix(".weight") for weight in stored])
    status = described.get("quantization_status")
    if status != "compressed":
        yield "quantization_status", f"is {status!r}, expected 'compressed'; transformers loads garbage"


def _kept_stack_patterns(kept: Sequence[str], targets: Sequence[Target]) -> list[str]:
    """Expressions for kept stacks of experts ("...experts.gate_up_proj"): vLLM looks for their per-expert names."""
    stacks = kept_stacks(kept, targets)
    patterns = name_patterns(stacks, {experts_of(target.module) for target in targets}) if stacks else []
    return [pattern.removesuffix("$") + r"\..*$" for pattern in patterns]


# --- Reading


def detect(config: Mapping[str, Any], names: Names) -> bool:
    return quant_method(config) == QUANT_METHOD


def stored_weights(config: Mapping[str, Any], names: Names) -> dict[str, StoredWeight]:
    described = quantization_config(config)
    check_formats(described, names)
    rotation_of = stored_rotations(config, described)
    scheme_of = resolver(_read_groups(described))
    excluded = lists(config)
    weights, kinds = {}, dict[tuple[object, ...], StoredWeight]()  # a hundred thousand weights are of few kinds
    modules: dict[str, list[tuple[str, object]]] = {}  # what tensors each has, in whatever order
    for name, stored in names.items():
        module, _, leaf = name.rpartition(".")
        modules.setdefault(module, []).append((leaf, stored))
    for module, tensors in modules.items():
        if not _MARKS.intersection([leaf for leaf, _ in tensors]):
            continue
        excluded.refuse([module])
        scheme = scheme_of(module)
        if scheme is None:
            raise CheckpointError(f"{module} is quantized, but no config group targets it; readers drop it")
        weight, rotation = f"{module}.weight", rotation_of(module)
        kind = (id(scheme), rotation, rotation and experts_of(weight), *tensors)
        if kind in kinds:
            weights[weight] = kinds[kind].renamed(weight)
            continue
        scheme = replace(scheme, rotation=rotation) if rotation != scheme.rotation else scheme
        weights[weight] = _stored(module, scheme, names)
        if weights[weight].whole is None:
            kinds[kind] = weights[weight]
    for stack in integer_stacks(names):
        excluded.refuse([stack])
        scheme = scheme_of(stack)
        if scheme is not None and scheme.fmt.element.grid:
            weights[stack] = stored_stack(stack, scheme.fmt, scheme.activation, names)
    for name, (dtype, shape) in names.items():
        if dtype == "F8_E4M3" and name.endswith(".weight") and len(shape) == 2 and name not in weights:
            raise CheckpointError(f"{name!r} is F8_E4M3 without a {name + '_scale'!r}; {FLOAT_MODEL}")
    return weights


def _stored(module: str, scheme: Scheme, names: Names) -> StoredWeight:
    """The weight of ``module``, whose config gives ``scheme``; scale dtypes and scalar shapes as they are found."""
    weight, fmt = f"{module}.weight", scheme.fmt
    for suffix in (_UNREADABLE, *([] if fmt.element.grid else [_ONLY_INTEGERS])):
        if f"{module}.{suffix}" in names:
            raise CheckpointError(f"{module}.{suffix} is not read with {fmt.name} weights; start from the float model")
    if fmt.element.grid:
        integers = stored_integers(module, fmt, scheme.activation, names)
        return replace(integers, scheme=replace(integers.scheme, rotation=scheme.rotation))
    data = weight if fmt.element.bits == 8 else f"{module}.weight_packed"
    shape = matrix_shape(names, data, bits=fmt.element.bits, owner=module)
    scale = names.get(f"{module}.weight_scale")
    if scale is not None:
        fmt = with_scale_dtype(fmt, scale[0])
    if fmt is not scheme.fmt:
        scheme = replace(scheme_for(fmt, scheme.activation), rotation=scheme.rotation)
    try:
        expected = accept_variants(parts_for_reading(weight, shape, scheme), names, weight=weight)
    except FormatError as error:
        raise CheckpointError(str(error)) from None
    extra = [f"{module}.{suffix}" for suffix in _NOT_DECODED if f"{module}.{suffix}" in names]
    others = tuple(Part(name, *names[name], PartKind.OTHER) for name in extra)
    return StoredWeight(weight, shape, scheme, expected + others)


def parts_for_reading(
    weight: str, shape: tuple[int, int], scheme: Scheme, *, experts: int | None = None, transposed: bool = False
) -> tuple[Part, ...]:
    """:func:`parts`, for any activation: what a reader does with the input changes no weight."""
    if supports(scheme) is not None and supports(scheme_for(scheme.fmt, Activation.UNKNOWN)) is not None:
        name = _BY_STRUCTURE[structure(scheme.fmt)]
        scheme = scheme_for(scheme.fmt, _ROWS[name][2][0])
    return parts(weight, shape, scheme, experts=experts, transposed=transposed)


def _read_groups(described: Mapping[str, Any]) -> list[tuple[list[str], Scheme]]:
    """(targets, scheme) of every config group that quantizes weights."""
    groups = described.get("config_groups")
    if not groups and described.get("kv_cache_scheme"):  # the cache alone is quantized
        return []
    if not isinstance(groups, Mapping) or not groups:
        sparse = described.get("sparsity_config")
        kind = sparse.get("format") if isinstance(sparse, Mapping) else None
        if kind not in (None, "dense"):
            raise CheckpointError(f"the weights are sparse ({kind!r} in config.json), which is not read; {FLOAT_MODEL}")
        raise CheckpointError(
            "quantization_config in config.json has no config_groups, which say how weights are stored: take that file "
            "from where the checkpoint comes from"
        )
    schemes = []
    for key, group in groups.items():
        if not isinstance(group, Mapping):
            raise CheckpointError(f"config group {key!r} is {type(group).__name__}, expected an object")
        weights = group.get("weights")
        if weights is None:
            continue
        scheme = scheme_for(_read_format(weights, key), _read_activation(group.get("input_activations")))
        schemes.append((strings(group.get("targets"), f"{key}.targets"), scheme))
    return schemes


def _read_format(weights: Any, key: str) -> Format:
    """The format that a group's weight arguments mean; the other keys (observers, nulls) do not matter."""
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"the weights of config group {key!r} must be an object")
    fields = ("num_bits", "strategy", "group_size", "block_structure")
    if weights.get("type") == "float" and weights.get("symmetric") is not False:
        for name, (_, row, _) in _ROWS.items():
            if row.get("type") != "int" and all(weights.get(field) == row.get(field) for field in fields):
                return FORMATS[name]
    integer = described_integers(weights)
    if integer is not None:
        return integer
    shown = {field: weights.get(field) for field in ("type", *fields)}
    raise CheckpointError(
        f"config group {key!r} has weights {shown}, a format that ptqpipe does not read; "
        "start from the model's float checkpoint, or decode this one to bfloat16 first"
    )


def _read_activation(inputs: Any) -> Activation:
    if inputs is None:
        return Activation.NONE
    if isinstance(inputs, Mapping) and inputs.get("symmetric") is not False:
        described = {"type": "float", **inputs}
        fields = ("num_bits", "strategy", "group_size", "dynamic")
        for activation, row in _INPUTS.items():
            if described["type"] == row.get("type", "float") and all(
                described.get(key) == row.get(key) for key in fields
            ):
                return activation
    return Activation.UNKNOWN
