"""GPTQ's layout, read only: ``quant_method: gptq``, INT4 or INT8, both of its versions, columns in any order.

``qweight`` I32 [K*bits/32, N], packed along K; ``qzeros`` I32 [groups, N*bits/32], packed along N; ``scales``
[groups, N]; ``g_idx`` I32 [K], the group of every column. w = (q - z) * s, where version 1 stores z - 1.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ptqpipe.checkpoint.layouts._config import ReadOnly, check_parts, quantization_config, scheme_for, strings
from ptqpipe.checkpoint.layouts._integers import group_size, integer_format
from ptqpipe.checkpoint.layouts._lists import Lists, in_blocks, is_head, matched, plain_head
from ptqpipe.checkpoint.layouts._types import Load, Names, Part, PartKind, StoredWeight
from ptqpipe.errors import CheckpointError, one_line
from ptqpipe.numerics.formats import Format, unpack
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.numerics.schemes import Activation, Capabilities

QUANT_METHOD = "gptq"
CAPABILITIES = Capabilities(transformers="transformers")
_LAYOUT = ReadOnly(QUANT_METHOD)
supports, parts, configs = _LAYOUT.supports, _LAYOUT.parts, _LAYOUT.configs
detect, config_faults = _LAYOUT.detect, _LAYOUT.config_faults

_LEAST_ZERO = {"gptq": 1, "gptq_v2": 0}  # the zero point that is stored as 0, by checkpoint_format


def lists(config: Mapping[str, Any]) -> Lists:
    """What readers take for excluded: what the first rule of ``dynamic`` that matches says "-:" of, what
    ``modules_in_block_to_quantize`` lacks; and the head, unless it is said to be quantized. They look for codes in
    decoder layers."""
    described = quantization_config(config)
    return Lists(
        "dynamic",
        also=partial(_excluded, described, _inside(described)),
        aims=lambda names: is_head(names[0]) or in_blocks(names[0]),
    )


def _excluded(described: Mapping[str, Any], inside: Sequence[str], names: Sequence[str]) -> str | None:
    rule = next((rule for rule in (_rule(described, name) for name in names) if rule is not None), None)
    if rule is not None and rule.startswith("-:"):
        return f"lists it under 'dynamic' as {one_line(repr(rule), limit=200)}"
    if inside and not is_head(names[0]) and not any(part in names[0] for part in inside):
        return "does not list it under 'modules_in_block_to_quantize'"
    return plain_head(described, names)


def _rule(described: Mapping[str, Any], module: str) -> str | None:
    rules = described.get("dynamic") or {}
    if not isinstance(rules, Mapping):
        raise CheckpointError(f"dynamic in config.json is {type(rules).__name__}, expected an object of rules")
    patterns = ((rule, rule[2:] if rule.startswith(("-:", "+:")) else rule) for rule in rules)
    return next((rule for rule, pattern in patterns if matched(pattern, module, entry=rule)), None)


def _inside(described: Mapping[str, Any]) -> list[str]:
    """``modules_in_block_to_quantize``, a list of lists of names, as one; empty where all are quantized."""
    blocks = described.get("modules_in_block_to_quantize") or []
    runs = [run if isinstance(run, list) else [run] for run in blocks] if isinstance(blocks, list) else [[blocks]]
    return strings([name for run in runs for name in run], "modules_in_block_to_quantize")


def _described(described: Mapping[str, Any], module: str) -> Mapping[str, Any]:
    """The settings of a module in config.json: its own rule overrides the others."""
    rule = _rule(described, module)
    own = {} if rule is None else described["dynamic"][rule]
    if not isinstance(own, Mapping):
        raise CheckpointError(f"the rule {rule!r} under 'dynamic' in config.json is {own!r:.60}, expected an object")
    return {**described, **own}


def stored_weights(config: Mapping[str, Any], names: Names) -> dict[str, StoredWeight]:
    described = quantization_config(config)
    version = described.get("checkpoint_format") or "gptq"
    modules = [name.removesuffix(".qweight") for name in names if name.endswith(".qweight")]
    lists(config).refuse(modules)
    weights = {}
    for module in modules:
        own = _described(described, module)
        bits = own.get("bits")
        if bits not in (4, 8) or version not in _LEAST_ZERO:
            shown = f"{bits!r} bits, checkpoint_format {version!r}"
            versions = " or ".join(_LEAST_ZERO)
            raise CheckpointError(f"a gptq checkpoint of {shown}, is not read ({module}); expected 4 or 8, {versions}")
        settings = {"bits": bits, "group": group_size(own, QUANT_METHOD), "ordered": not own.get("desc_act")}
        weights[f"{module}.weight"] = _stored(module, names, **settings, least=_LEAST_ZERO[version])
    return weights


def _stored(module: str, names: Names, *, bits: int, group: int, ordered: bool, least: int) -> StoredWeight:
    """``ordered``: every group is of neighbouring columns; else each column has a scale of its own, its group's."""
    shape = names[f"{module}.qweight"][1]
    if len(shape) != 2 or 0 in shape:
        raise CheckpointError(f"'{module}.qweight' has shape {list(shape)}, expected [in*{bits}/32, out]")
    k, n = shape[0] * 32 // bits, shape[1]
    if group and k % group:
        raise CheckpointError(f"'{module}.qweight' is of {k} columns, which groups of {group} do not divide")
    groups = k // group if group else 1
    scale = names.get(f"{module}.scales", ("F16", ()))[0]
    expected = [
        Part(f"{module}.qweight", "I32", shape, PartKind.DATA),
        Part(f"{module}.qzeros", "I32", (groups, n * bits // 32), PartKind.ZEROS),
        Part(f"{module}.scales", scale, (groups, n), PartKind.SCALES),
    ]
    if not ordered or f"{module}.g_idx" in names:
        expected.append(Part(f"{module}.g_idx", "I32", (k,), PartKind.GROUPS))
    weight = f"{module}.weight"
    check_parts(expected, names, weight=weight)
    fmt = integer_format(bits, group if ordered else 1, scale, zeros=True)
    read = partial(_read, module, fmt, (n, k), least=least, has_groups=len(expected) == 4)
    return StoredWeight(weight, (n, k), scheme_for(fmt, Activation.NONE), tuple(expected), whole=read)


def _read(module: str, fmt: Format, shape: tuple[int, int], load: Load, *, least: int, has_groups: bool) -> QTensor:
    bits = fmt.element.bits
    words, packed, scales = (load(f"{module}.{name}", None, None) for name in ("qweight", "qzeros", "scales"))
    zeros = unpack(packed.contiguous().view(torch.uint8), bits).int() + least
    if int(zeros.max()) >= 1 << bits:
        raise CheckpointError(f"'{module}.qzeros' has a zero point {int(zeros.max())}, beyond {bits} bits")
    if has_groups:
        index = _groups(module, load(f"{module}.g_idx", None, None).long(), len(scales), fmt)
        if fmt.block[1] == 1:
            zeros, scales = zeros[index], scales[index]
    data = words.t().contiguous().view(torch.uint8)
    return QTensor(fmt, shape, data, scales.t().contiguous(), zeros=zeros.to(torch.uint8).t().contiguous())


def _groups(module: str, index: torch.Tensor, groups: int, fmt: Format) -> torch.Tensor:
    """``g_idx`` as it is. CheckpointError for a group that there is not, or an order that the config denies."""
    if not 0 <= int(index.min()) <= int(index.max()) < groups:
        span = f"{int(index.min())} to {int(index.max())}"
        raise CheckpointError(f"'{module}.g_idx' has groups {span}, but there are {groups}, counted from 0")
    width = fmt.block[1] or len(index)
    if width > 1 and not torch.equal(index, torch.arange(len(index)) // width):
        raise CheckpointError(f"'{module}.g_idx' has columns in another order, but config.json says desc_act false")
    return index
