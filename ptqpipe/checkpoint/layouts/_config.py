"""What containers share about config files and schemes: where a quantization is described, which scheme it means,
and which modules are not quantized."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ptqpipe.checkpoint.layouts._codec import FLOAT_SCALES
from ptqpipe.checkpoint.layouts._lists import wholes
from ptqpipe.checkpoint.layouts._types import (
    ConfigFiles,
    ConfigRequest,
    Container,
    Names,
    Part,
    PartKind,
    StoredWeight,
    Target,
)
from ptqpipe.checkpoint.tensor_names import experts_of
from ptqpipe.errors import CheckpointError, FormatError
from ptqpipe.numerics.formats import Format
from ptqpipe.numerics.schemes import SCHEMES, Activation, Scheme

HF_QUANT_CONFIG = "hf_quant_config.json"
"""ModelOpt's own config file, which describes the quantization once more, or alone."""

FLOAT_MODEL = "start from the model's float checkpoint"
"""The remedy for what is quantized in a form that is not read, or not as a whole."""

_KEYS = ("quantization_config", "compression_config")
_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")  # where models of several parts have it


def quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The quantization's description in a config.json, empty when there is none; CheckpointError if it is no object."""
    for holder in (config, *(config.get(part) for part in _PARTS)):
        if not isinstance(holder, Mapping):
            continue
        for key in _KEYS:
            section = holder.get(key)
            if section is None:
                continue
            if not isinstance(section, Mapping):
                raise CheckpointError(f"{key} in config.json is {type(section).__name__}, expected an object")
            return section
    return {}


def quant_method(config: Mapping[str, Any]) -> str:
    """The method that a config.json names, in lower case with "-" for "_"; "modelopt" where its producer alone is
    named; "" for none."""
    described = quantization_config(config)
    method = described.get("quant_method")
    producer = described.get("producer")
    if method is None and isinstance(producer, Mapping) and described.get("quant_algo"):
        method = producer.get("name")
    return str(method or "").lower().replace("_", "-")


def merged_config(config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None) -> dict[str, Any]:
    """config.json with the description of hf_quant_config.json, where config.json itself has none.

    Older ModelOpt checkpoints describe themselves there alone. Where both do, config.json wins, as in vLLM and SGLang.
    """
    merged = dict(config)
    if hf_quant_config and not quantization_config(config):
        inner = hf_quant_config.get("quantization")
        if not isinstance(inner, Mapping):
            raise CheckpointError("hf_quant_config.json has no object 'quantization'")
        described = {"quant_method": "modelopt", **inner, "ignore": inner.get("exclude_modules")}
        merged["quantization_config"] = {"kv_cache_scheme": inner.get("kv_cache_quant_algo"), **described}
    return merged


def without_quantization(base: Mapping[str, Any]) -> dict[str, Any]:
    cleaned = {key: value for key, value in base.items() if key not in _KEYS}
    for part in _PARTS:
        if isinstance(cleaned.get(part), Mapping):
            cleaned[part] = {key: value for key, value in cleaned[part].items() if key not in _KEYS}
    return cleaned


def structure(fmt: Format) -> tuple[str, tuple[int, int], str, bool, bool]:
    """The stored structure of a format: names and the width of float scales do not count."""
    scale = "float" if fmt.scale.dtype is not None else fmt.scale.name
    return fmt.element.name, fmt.block, scale, fmt.has_global, fmt.has_zeros


def scheme_for(fmt: Format, activation: Activation) -> Scheme:
    """The scheme of a stored weight: the row of the table with this structure, else one made up for reading."""
    own = structure(fmt)
    for scheme in SCHEMES.values():
        if scheme.activation is activation and structure(scheme.fmt) == own:
            return scheme if scheme.fmt == fmt else replace(scheme, fmt=fmt)
    name = fmt.name if activation is Activation.NONE else f"{fmt.name}+{activation}"
    container = "ptqpipe" if "/" in name else "compressed_tensors"
    return Scheme(name, fmt, activation, name.upper().replace("/", "-"), container=container)


def check_parts(parts: Sequence[Part], names: Names, *, weight: str) -> None:
    """CheckpointError unless every part is stored with its dtype and shape."""
    for part in parts:
        stored = names.get(part.name)
        if stored is None:
            raise CheckpointError(
                f"{weight} has no tensor {part.name!r} {part.dtype} {list(part.shape)}: it is lost, or the layout is "
                f"another than config.json says; {FLOAT_MODEL}"
            )
        if stored != (part.dtype, part.shape):
            raise CheckpointError(
                f"{part.name!r} is {stored[0]} {list(stored[1])}, but its config says {part.dtype} {list(part.shape)}; "
                f"the two do not belong together, or the layout is one that is not read: {FLOAT_MODEL}"
            )


def matrix_shape(names: Names, name: str, *, bits: int, owner: str) -> tuple[int, int]:
    """(N, K) of the weight whose codes of ``bits`` bits are the stored tensor ``name``; ``owner`` is who needs it."""
    stored = names.get(name)
    if stored is None:
        raise CheckpointError(f"{owner} has scales of a quantized weight, but no {name!r}; {FLOAT_MODEL}")
    if len(stored[1]) != 2 or 0 in stored[1]:
        raise CheckpointError(f"{name!r} has shape {list(stored[1])}, expected two dimensions and at least one element")
    return stored[1][0], stored[1][1] * 8 // bits


def refuse(weight: str, *, container: str, scheme_reason: str | None, experts: int | None, transposed: bool) -> None:
    """FormatError for what a layout of 2-D linears in [out, in] cannot store."""
    if scheme_reason is not None:
        raise FormatError(f"{weight}: {scheme_reason}")
    if not weight.endswith(".weight"):
        raise FormatError(f"{weight}: {container} stores weights called <module>.weight only; use ptqpipe for it")
    if experts is not None:
        raise FormatError(f"{weight}: {container} has no stacks of experts; store each as a weight, or use ptqpipe")
    if transposed:
        raise FormatError(f"{weight}: {container} has no [in, out] weights (Conv1D); use ptqpipe for it")


def scale_grid(fmt: Format, shape: tuple[int, int]) -> tuple[int, ...]:
    """The shape of a weight's scales: of one for all of it [1]. FormatError where blocks do not fill ``shape``."""
    grid = fmt.scale_shape(shape)
    return (1,) if fmt.one_scale else grid


def stored_grid(weight: str, fmt: Format, shape: tuple[int, int]) -> tuple[int, ...]:
    """`scale_grid` of a weight that is stored. CheckpointError where blocks do not fill its shape."""
    try:
        return scale_grid(fmt, shape)
    except FormatError as error:
        raise CheckpointError(f"{weight}: {error}") from None


def accept_variants(expected: Sequence[Part], names: Names, *, weight: str) -> tuple[Part, ...]:
    """Parts with the variations that readers accept: one number as [] or [1], static input scales in any float.

    CheckpointError where a part is not stored, or otherwise than so.
    """
    for part in expected:
        if names.get(part.name) != part[1:3]:
            break
    else:  # as nearly all are
        return tuple(expected)
    changed = []
    for part in expected:
        dtype, shape = names.get(part.name, (part.dtype, part.shape))
        if part.shape not in ((), (1,)) or shape not in ((), (1,)):
            shape = part.shape
        if part.role is not PartKind.INPUT_GLOBAL or dtype not in FLOAT_SCALES:
            dtype = part.dtype
        same = (dtype, shape) == (part.dtype, part.shape)
        changed.append(part if same else part._replace(dtype=dtype, shape=shape))
    check_parts(changed, names, weight=weight)
    return tuple(changed)


PartsOf = Callable[..., tuple[Part, ...]]
"""`Container.parts` of a layout."""


def memoized_parts(parts: PartsOf) -> PartsOf:
    """``parts`` of a layout, which asks it once for weights of one shape, scheme and leaf name: of the tens of
    thousands of a mixture of experts the names alone differ."""
    memo: dict[tuple[object, ...], tuple[Scheme, list[tuple[str, tuple[Any, ...]]]]] = {}

    def of(
        weight: str, shape: tuple[int, int], scheme: Scheme, /, *, experts: int | None = None, transposed: bool = False
    ) -> tuple[Part, ...]:
        parent, dot, leaf = weight.removesuffix(".weight").rpartition(".")
        start = len(parent) + len(dot)
        key = (leaf, len(weight) - start, bool(experts_of(weight)), shape, id(scheme), experts, transposed)
        base = weight[:start]
        if key in memo:
            return tuple([Part(base + name, *rest) for name, rest in memo[key][1]])
        fresh = parts(weight, shape, scheme, experts=experts, transposed=transposed)
        if all(part.name.startswith(base) for part in fresh):
            # With the scheme, so that no other gets its id.
            memo[key] = scheme, [(part.name[start:], part[1:]) for part in fresh]
        return fresh

    return of


def same_value(a: Any, b: Any) -> bool:
    """Whether two values of configs mean the same: readers ignore the case of names, and one format has two."""
    if a == "naive-quantized" and b in ("int-quantized", "float-quantized"):
        return True
    return (a.lower() if isinstance(a, str) else a) == (b.lower() if isinstance(b, str) else b)


def strings(value: Any, key: str) -> list[str]:
    """``value`` as a list of strings; CheckpointError naming ``key`` otherwise."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise CheckpointError(f"{key} in config.json must be a list of strings")
    return value


def kv_cache_scheme(base: Mapping[str, Any]) -> dict[str, Any] | None:
    """The FP8 kv-cache scheme of a source that has one: its scales are kept as they are, so it stays described.

    In compressed-tensors' terms; ModelOpt's are the same without a strategy.
    """
    scheme = quantization_config(base).get("kv_cache_scheme")
    if scheme == "FP8":
        scheme = {"num_bits": 8, "type": "float"}
    if not isinstance(scheme, Mapping) or scheme.get("num_bits") != 8 or scheme.get("type") != "float":
        return None
    return {"num_bits": 8, "type": "float", "strategy": scheme.get("strategy") or "tensor", "dynamic": False}


def kept_stacks(kept: Iterable[str], targets: Sequence[Target]) -> list[str]:
    """Modules that own kept stacks of experts: "...mlp.experts" for "...mlp.experts.gate_up_proj"."""
    return kept_experts((name for name in kept if re.search(r"(^|\.)experts\.[^.\d]+$", name)), targets)


def kept_experts(kept: Iterable[str], targets: Sequence[Target]) -> list[str]:
    """Modules whose experts are all kept, in stacks or one by one: "...mlp.experts" for "...mlp.experts.3.up_proj"."""
    owners = [owner for owner in dict.fromkeys(map(experts_of, kept)) if owner]
    quantized = {experts_of(target.module) for target in targets} if owners else set()
    return [owner for owner in owners if owner not in quantized]


# What readers call otherwise than checkpoints do: they rename tensors, not these lists, and take what they do not find
# in them for codes. vLLM's gemma3n.py has a module "self_decoder" around some. It calls state-space layers
# "mixer", and falcon_h1.py and zamba2.py count them on behind the layers with attention ("{behind}"). SGLang
# has "model" for "backbone", and "proj" for "o_proj" in the tower of pixtral.py. What is fused, it and zamba2.py look
# for by the name of the whole alone (`wholes`): SGLang in ModelOpt's layout (is_layer_excluded of modelopt_quant.py),
# and where a model has no packed_modules_mapping, as most have not.
_SELF_DECODER = (r"\b(?=(altup_projections\.\d+|per_layer_model_projection)$)", "self_decoder.")
_READERS_NAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "gemma3n": (_SELF_DECODER,),
    "gemma3n_text": (_SELF_DECODER,),
    **dict.fromkeys(("mamba", "falcon_mamba", "nemotron_h"), ((r"^backbone\.", "model."),)),
    **dict.fromkeys(("mistral3", "pixtral"), ((r"(?<=\battention\.)o_proj$", "proj"),)),
    "granitemoehybrid": ((r"\bmamba\.", "mixer."),),
    "falcon_h1": ((r"\blayers\.(\d+)\.mamba\.", "{behind}.mixer."), (r"\bself_attn\.(?=[qkvo]_proj$)", "")),
    "zamba2": (
        (r"^model\.layers\.(\d+)\.(mamba_decoder\.)?mamba\.", "{behind}.mixer."),
        (r"^model\.layers\.(\d+)\.(?=linear$)", "{behind}."),
        (r"\blayers\.\d+\.shared_transformer\.(self_attn\.)?", ""),
        (r"(?<=linear_[qkv]_adapter)_list\.\d+", ""),
        (r"\b0$", "A"),
        (r"\b1$", "B"),
    ),
}
_BEHIND = {"falcon_h1": "num_hidden_layers", "zamba2": "hybrid_layer_ids"}


def _readers_name(module: str, config: Mapping[str, Any]) -> str:
    kind = str(config.get("model_type"))
    layers = config.get(_BEHIND.get(kind, ""))
    first = len(layers) if isinstance(layers, list) else layers if isinstance(layers, int) else 0
    for pattern, named in _READERS_NAMES.get(kind, ()):
        match = re.search(pattern, module)
        if match is not None:
            behind = first + int(match[1]) if "{behind}" in named else 0
            module = module[: match.start()] + named.format(behind=behind) + module[match.end() :]
    return module


def _drafting_name(module: str, config: Mapping[str, Any]) -> str:
    """What SGLang calls a module of the layer behind the last, or the head, in the model of its own with which
    it drafts (deepseek_nextn.py, glm4_moe_nextn.py). Not found by this name the layer would be taken for codes."""
    layers = config.get("num_hidden_layers")
    if not config.get("num_nextn_predict_layers"):
        return module
    if module == "lm_head":
        return "model.shared_head.head"
    return re.sub(rf"^model\.layers\.{layers}\.(?=self_attn\.|mlp\.)", "model.decoder.", module)


def module_list(
    kept_modules: Iterable[str], targets: Sequence[Target], config: Mapping[str, Any] = MappingProxyType({})
) -> list[str]:
    """Kept modules in order, without repeats, with ``lm_head`` unless it is quantized: readers look for it by name even
    where a tied model has no such tensor. Biases of experts are matrices but no modules: vLLM would take
    "...experts.gate_up_proj_bias" for a reason to leave the experts unquantized. What a reader calls otherwise than
    the checkpoint of this config.json stands there by both names."""
    quantized = {target.module for target in targets}
    names = [name.removesuffix(".weight") for name in kept_modules if not (name.endswith("bias") and experts_of(name))]
    names += [_readers_name(name, config) for name in names]
    partly = set(wholes(quantized))  # of these a part is quantized: no reader fuses them
    names += [name for name in wholes(names) if name not in partly]
    if not any(name.split(".")[-1] == "lm_head" for name in (*names, *quantized)):
        names.append("lm_head")
    names += [_drafting_name(name, config) for name in names]
    return [name for name in dict.fromkeys(names) if name not in quantized]


@dataclass(frozen=True, slots=True)
class ReadOnly:
    """A layout by its ``quant_method``, without a way to write it."""

    method: str

    def supports(self, scheme: Scheme) -> str | None:
        return f"{self.method} is read only; write {scheme.name} with the {scheme.container} container"

    def parts(
        self,
        weight: str,
        shape: tuple[int, int],
        scheme: Scheme,
        *,
        experts: int | None = None,
        transposed: bool = False,
    ) -> tuple[Part, ...]:
        raise FormatError(f"{weight}: {self.supports(scheme)}")

    def configs(self, request: ConfigRequest) -> dict[str, dict[str, Any]]:
        raise FormatError(f"{self.method} is read only; choose another container")

    def config_faults(self, files: ConfigFiles, stored: Mapping[str, StoredWeight]) -> Iterator[tuple[str, str]]:
        return iter(())

    def detect(self, config: Mapping[str, Any], names: Names) -> bool:
        return quant_method(config) == self.method


def is_read_only(container: Container) -> bool:
    return isinstance(getattr(container.supports, "__self__", None), ReadOnly)


# The scales of a quantized kv cache: they belong to no weight, but their names differ between layouts.

_KV_SCALE = re.compile(r"(.*?)\.(?:[kv]_proj\.)?([kv])_scale")
_ANY_KV_SCALE = re.compile(r"(.*?)\.(?:[kvq]_proj\.)?([kvq])_scale")


def kv_scale(name: str, dtype: str, shape: tuple[int, ...], *, container: Container | None = None) -> Part | None:
    """A stored kv-cache scale as ``container`` stores it: the same bytes, another name and one number as [1] or [].

    None for a tensor that is no such scale. Containers without a kv cache of their own, plain checkpoints (None), and
    scales of more than one number keep their name and shape.
    """
    match = _KV_SCALE.fullmatch(name)
    if match is None:
        return None
    style = None if container is None else container.CAPABILITIES.kv_cache
    if style is None or style.name is None or shape not in ((), (1,)):
        return Part(name, dtype, shape, PartKind.OTHER)
    return Part(match.expand(style.name), dtype, style.shape, PartKind.OTHER)


def kv_scale_place(name: str) -> tuple[str, str] | None:
    """(attention module, "k", "v" or "q") of a tensor whose name is that of a kv-cache scale, else None."""
    match = _ANY_KV_SCALE.fullmatch(name)
    return None if match is None else (match[1], match[2])


def is_kv_scale(name: str) -> bool:
    """Whether a tensor's name says that it scales a quantized kv cache."""
    return kv_scale_place(name) is not None


def announces_kv_cache(files: ConfigFiles) -> bool:
    """Whether one of the config files says that the kv cache is quantized."""
    described = quantization_config(files["config.json"] or {})
    return _announced(described) or _announced(files.get(HF_QUANT_CONFIG) or {})


def _announced(value: Any) -> bool:
    if isinstance(value, Mapping):
        keys = ("kv_cache_scheme", "kv_cache_quant_algo")
        return any((key in keys and inner is not None) or _announced(inner) for key, inner in value.items())
    return isinstance(value, list) and any(map(_announced, value))
