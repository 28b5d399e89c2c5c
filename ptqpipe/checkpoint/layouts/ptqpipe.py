"""ptqpipe's own layout: any format, any block, stacks of experts, [in, out] weights. Read by ptqpipe alone.

A weight ``X`` becomes ``X_packed`` (U8, rows packed as ``formats.py`` says), ``X_scale`` (the scale grid; E4M3 codes
as F8_E4M3, other codes as U8, float scales as themselves) and, where the format has one, ``X_global_scale`` (F32, shape
[1], multiplies). A stack of experts has a leading axis E in all of them. A weight that the float model holds as
[in, out] is stored as [out, in] like any other and marked ``transposed``.

The config:

    "quantization_config": {
      "quant_method": "ptqpipe", "version": 1,                              3 with a rotation, such as "rotation": 64
      "default": {"format": "e2m1/8/ue5m3", "activation": "none"},
      "weights": {"h.0.attn.c_attn.weight": {"format": ..., "transposed": true}, ...}    only what differs
    }

Version 2 had low-rank parts, matrices ``X_low_rank_left`` and ``X_low_rank_right`` whose product was added to the
decode. It is refused: without them a weight is another one.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ptqpipe.checkpoint.layouts._codec import scale_dtype
from ptqpipe.checkpoint.layouts._config import check_parts, quantization_config, scheme_for, without_quantization
from ptqpipe.checkpoint.layouts._lists import Lists
from ptqpipe.checkpoint.layouts._types import ConfigFiles, ConfigRequest, Names, Part, PartKind, StoredWeight
from ptqpipe.errors import CheckpointError, FormatError
from ptqpipe.numerics.formats import Format, get_codec, get_format
from ptqpipe.numerics.schemes import ROTATION_BLOCKS, Activation, Capabilities, KvCache, Scheme

QUANT_METHOD = "ptqpipe"
CAPABILITIES = Capabilities(
    stacks=True, transposed=True, rotation=True, kv_cache=KvCache(), own_reader=True, transformers="never"
)
VERSION = 1
LOW_RANK_VERSION = 2  # of earlier builds
ROTATION_VERSION = 3  # readers that do not know inputs that are rotated must not read past them


def supports(scheme: Scheme) -> str | None:
    """None: this layout stores every scheme whose format it can describe."""
    try:
        _describe(scheme.fmt)
    except FormatError as error:
        return str(error)
    return None


def parts(
    weight: str, shape: tuple[int, int], scheme: Scheme, *, experts: int | None = None, transposed: bool = False
) -> tuple[Part, ...]:
    """The tensors that store this weight; ``transposed`` changes the config only."""
    fmt, (n, k) = scheme.fmt, shape
    grid = fmt.scale_shape(shape)
    if k * fmt.element.bits % 8:
        raise FormatError(f"{weight}: {k} codes of {fmt.element.bits} bits do not fill whole bytes; keep it")
    stacked = experts is not None
    lead = () if experts is None else (experts,)
    stored = [
        Part(f"{weight}_packed", "U8", (*lead, n, k * fmt.element.bits // 8), PartKind.DATA, stacked),
        Part(f"{weight}_scale", scale_dtype(fmt), (*lead, *grid), PartKind.SCALES, stacked),
    ]
    if fmt.has_global:
        stored.append(Part(f"{weight}_global_scale", "F32", (*lead, 1), PartKind.GLOBAL, stacked))
    if scheme.needs_input_global_scale:
        stored.append(Part(f"{weight}_input_global_scale", "F32", (*lead, 1), PartKind.INPUT_GLOBAL, stacked))
    return tuple(stored)


def configs(request: ConfigRequest) -> dict[str, dict[str, Any]]:
    """config.json with ``quantization_config``; the format of most weights is the default, the others are listed."""
    entries = {target.weight: _entry(target.scheme) for target in request.targets}
    common = Counter(_frozen(entry) for entry in entries.values()).most_common(1)
    default = dict(common[0][0]) if common else {}
    listed: dict[str, Any] = {}
    for target in request.targets:
        entry = entries[target.weight]
        own = {} if _frozen(entry) == _frozen(default) else entry
        if target.transposed:
            own = {**own, "transposed": True}
        if own:
            listed[target.weight] = own
    quantization = {
        "quant_method": QUANT_METHOD,
        "version": _version([target.scheme for target in request.targets]),
        "default": default,
        "weights": listed,
        "ptqpipe": dict(request.provenance),
    }
    kv_cache = quantization_config(request.base).get("kv_cache_scheme")
    if kv_cache is not None:  # its scales are kept as they are, so it stays described as it is
        quantization["kv_cache_scheme"] = kv_cache
    return {"config.json": {**without_quantization(request.base), "quantization_config": quantization}}


def _version(schemes: Sequence[Scheme]) -> int:
    return ROTATION_VERSION if any(scheme.rotation for scheme in schemes) else VERSION


def config_faults(files: ConfigFiles, stored: Mapping[str, StoredWeight]) -> Iterator[tuple[str, str]]:
    return iter(())


def detect(config: Mapping[str, Any], names: Names) -> bool:
    return quantization_config(config).get("quant_method") == QUANT_METHOD


def lists(config: Mapping[str, Any]) -> Lists:
    """Nothing: codes are known by their names."""
    return Lists("weights", aims=lambda _: False)


def stored_weights(config: Mapping[str, Any], names: Names) -> dict[str, StoredWeight]:
    described = quantization_config(config)
    if described.get("version") == LOW_RANK_VERSION:
        raise _has_low_rank("the checkpoint")
    if described.get("version") not in (VERSION, ROTATION_VERSION):
        versions = f"{VERSION} and {ROTATION_VERSION}"
        raise CheckpointError(f"ptqpipe layout version {described.get('version')!r}; this ptqpipe reads {versions}")
    default, listed = described.get("default"), described.get("weights")
    if not isinstance(default, Mapping) or not isinstance(listed, Mapping):
        raise CheckpointError("quantization_config has no 'default' and 'weights'; the config.json is damaged")
    weights: dict[str, StoredWeight] = {}
    for name in names:
        weight = name.removesuffix("_packed")
        if weight == name or f"{weight}_scale" not in names:
            continue
        entry = listed.get(weight, {})
        if not isinstance(entry, Mapping):
            raise CheckpointError(f"the entry of {weight!r} in config.json must be an object")
        weights[weight] = _stored(weight, {**(default if "format" not in entry else {}), **entry}, names)
    missing = [weight for weight in listed if weight not in weights]
    if missing:
        raise CheckpointError(f"config.json lists {missing[0]!r} as quantized, but there is no '{missing[0]}_packed'")
    return weights


def _stored(weight: str, entry: Mapping[str, Any], names: Names) -> StoredWeight:
    scheme = _read_entry(weight, entry)
    stored = names[f"{weight}_packed"][1]
    if len(stored) not in (2, 3) or 0 in stored:
        raise CheckpointError(f"'{weight}_packed' has shape {list(stored)}, expected two or three dimensions")
    experts = stored[0] if len(stored) == 3 else None
    shape = (stored[-2], stored[-1] * 8 // scheme.fmt.element.bits)
    try:
        expected = parts(weight, shape, scheme, experts=experts)
    except FormatError as error:
        raise CheckpointError(f"{weight}: {error}") from None
    check_parts(expected, names, weight=weight)
    if "low_rank" in entry or any(f"{weight}_low_rank_{side}" in names for side in ("left", "right")):
        raise _has_low_rank(repr(weight))
    return StoredWeight(weight, shape, scheme, expected, experts, transposed=entry.get("transposed") is True)


def _has_low_rank(what: str) -> CheckpointError:
    return CheckpointError(
        f"{what} has a low-rank part, which an earlier build wrote and this ptqpipe does not read; convert the float "
        "model again"
    )


def _entry(scheme: Scheme) -> dict[str, Any]:
    entry = {**_describe(scheme.fmt), "activation": str(scheme.activation)}
    return entry | ({"rotation": scheme.rotation} if scheme.rotation else {})


def _read_entry(weight: str, entry: Mapping[str, Any]) -> Scheme:
    try:
        scheme = scheme_for(_read_format(entry), Activation(entry.get("activation", "none")))
        return replace(scheme, rotation=_read_rotation(entry)) if "rotation" in entry else scheme
    except (FormatError, ValueError) as error:
        raise CheckpointError(f"config.json describes {weight!r} as {dict(entry)}: {error}") from None


def _describe(fmt: Format) -> dict[str, Any]:
    """A format as config keys: its name, and what differs from the format of that name. FormatError if it has none."""
    named = get_format(fmt.name)
    described: dict[str, Any] = {"format": fmt.name}
    if fmt.scale != named.scale:
        described["scale"] = fmt.scale.name
    if fmt.block != named.block:
        described["block"] = list(fmt.block)
    if _read_format(described) != fmt:
        raise FormatError(f"format {fmt.name} differs from the one of that name; give it the name of a known format")
    return described


def _read_format(entry: Mapping[str, Any]) -> Format:
    fmt = get_format(str(entry.get("format")))
    if "scale" in entry:
        fmt = replace(fmt, scale=get_codec(str(entry["scale"])))
    if "block" in entry:
        block = entry["block"]
        if not (isinstance(block, list) and len(block) == 2 and all(isinstance(x, int) and x >= 0 for x in block)):
            raise FormatError(f"block {block!r} is not [rows, columns]")
        fmt = replace(fmt, block=(block[0], block[1]))
    return fmt


def _read_rotation(entry: Mapping[str, Any]) -> int:
    block = entry["rotation"]
    if not isinstance(block, int) or isinstance(block, bool) or block not in ROTATION_BLOCKS:
        raise FormatError(f"rotation {block!r} is none of the blocks {', '.join(map(str, ROTATION_BLOCKS))}")
    return block


def _frozen(entry: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in sorted(entry.items()))
