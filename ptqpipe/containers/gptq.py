"""GPTQ's layout, read only: ``quant_method: gptq``, INT4 or INT8, both of its versions, columns in any order.

``qweight`` I32 [K*bits/32, N], packed along K; ``qzeros`` I32 [groups, N*bits/32], packed along N; ``scales``
[groups, N]; ``g_idx`` I32 [K], the group of every column. w = (q - z) * s, where version 1 stores z - 1.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ptqpipe.containers._config import check_parts, quantization_config, scheme_for
from ptqpipe.containers._integers import group_size, integer_format
from ptqpipe.containers._read_only import ReadOnly
from ptqpipe.containers._types import Load, Names, Part, Role, StoredWeight
from ptqpipe.errors import CheckpointError
from ptqpipe.formats import Format, unpack
from ptqpipe.qtensor import QTensor
from ptqpipe.schemes import Abilities, Activation

QUANT_METHOD = "gptq"
ABILITIES = Abilities(transformers="transformers")
_LAYOUT = ReadOnly(QUANT_METHOD)
supports, parts, configs, warnings = _LAYOUT.supports, _LAYOUT.parts, _LAYOUT.configs, _LAYOUT.warnings
detect, config_faults = _LAYOUT.detect, _LAYOUT.config_faults

_LEAST_ZERO = {"gptq": 1, "gptq_v2": 0}  # the zero point that is stored as 0, by checkpoint_format


def stored_weights(config: Mapping[str, Any], names: Names) -> dict[str, StoredWeight]:
    """Every quantized weight, by logical name. CheckpointError where names, dtypes, shapes and config disagree."""
    described = quantization_config(config)
    bits, version = described.get("bits"), described.get("checkpoint_format") or "gptq"
    if bits not in (4, 8) or version not in _LEAST_ZERO:
        found = f"{bits!r} bits, checkpoint_format {version!r}"
        raise CheckpointError(f"a gptq checkpoint of {found}, is not read; expected 4 or 8, {' or '.join(_LEAST_ZERO)}")
    dynamic = described.get("dynamic") or {}
    other = next((rule for rule in dynamic if not str(rule).startswith("-:")), None)
    if other is not None:
        raise CheckpointError(f"the rule {other!r} under 'dynamic' in config.json gives modules other bits: not read")
    group = group_size(described, QUANT_METHOD)
    modules = [name.removesuffix(".qweight") for name in names if name.endswith(".qweight")]
    given = {"bits": bits, "group": group, "ordered": not described.get("desc_act"), "least": _LEAST_ZERO[version]}
    return {f"{module}.weight": _stored(module, names, **given) for module in modules}


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
        Part(f"{module}.qweight", "I32", shape, Role.DATA),
        Part(f"{module}.qzeros", "I32", (groups, n * bits // 32), Role.ZEROS),
        Part(f"{module}.scales", scale, (groups, n), Role.SCALES),
    ]
    if not ordered or f"{module}.g_idx" in names:
        expected.append(Part(f"{module}.g_idx", "I32", (k,), Role.GROUPS))
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
        found = f"{int(index.min())} to {int(index.max())}"
        raise CheckpointError(f"'{module}.g_idx' has groups {found}, but there are {groups}, counted from 0")
    width = fmt.block[1] or len(index)
    if width > 1 and not torch.equal(index, torch.arange(len(index)) // width):
        raise CheckpointError(f"'{module}.g_idx' has columns in another order, but config.json says desc_act false")
    return index
