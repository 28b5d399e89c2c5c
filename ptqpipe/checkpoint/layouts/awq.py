"""AWQ's layout, read only: ``quant_method: awq``, version gemm, INT4 with zero points.

``qweight`` I32 [K, N/8], ``qzeros`` I32 [K/group, N/8] and ``scales`` [K/group, N]: eight columns of N share a word, in
the order of `_NIBBLES`, and w = (q - z) * s.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from ptqpipe.checkpoint.layouts._config import ReadOnly, check_parts, quantization_config, scheme_for
from ptqpipe.checkpoint.layouts._integers import group_size, integer_format
from ptqpipe.checkpoint.layouts._lists import Lists, as_transformers, in_blocks, is_head, listed, plain_head
from ptqpipe.checkpoint.layouts._types import Load, Names, Part, PartKind, StoredWeight
from ptqpipe.errors import CheckpointError
from ptqpipe.numerics.formats import Format, pack, unpack
from ptqpipe.numerics.qtensor import QTensor
from ptqpipe.numerics.schemes import Activation, Capabilities

QUANT_METHOD = "awq"
CAPABILITIES = Capabilities(transformers="transformers")
_LAYOUT = ReadOnly(QUANT_METHOD)
supports, parts, configs = _LAYOUT.supports, _LAYOUT.parts, _LAYOUT.configs
detect, config_faults = _LAYOUT.detect, _LAYOUT.config_faults

_ROWS = 256  # even: two codes share a byte
_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)  # column j of eight is the j-th of these nibbles of its word


def lists(config: Mapping[str, Any]) -> Lists:
    """What readers take for excluded: a part of a name (AutoAWQ, vLLM), an expression from its beginning
    (transformers); and the head, unless it is said to be quantized. They look for codes in decoder layers."""
    described = quantization_config(config)
    entries = listed(described, "modules_to_not_convert") or []
    return Lists(
        "modules_to_not_convert",
        entries,
        literal="inside",
        patterns=as_transformers(entries),
        also=partial(plain_head, described),
        aims=lambda names: is_head(names[0]) or in_blocks(names[0]),
    )


def stored_weights(config: Mapping[str, Any], names: Names) -> dict[str, StoredWeight]:
    described = quantization_config(config)
    bits, version = described.get("bits", 4), str(described.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm":
        raise CheckpointError(f"an awq checkpoint of {bits} bits, version {version!r}, is not read; expected 4, 'gemm'")
    group = group_size(described, QUANT_METHOD)
    modules = [name.removesuffix(".qweight") for name in names if name.endswith(".qweight")]
    lists(config).refuse(modules)
    return {f"{module}.weight": _stored(module, group, names) for module in modules}


def _stored(module: str, group: int, names: Names) -> StoredWeight:
    shape = names[f"{module}.qweight"][1]
    if len(shape) != 2 or 0 in shape:
        raise CheckpointError(f"'{module}.qweight' has shape {list(shape)}, expected [in, out/8]")
    k, n = shape[0], shape[1] * 8
    if group and k % group:
        raise CheckpointError(f"'{module}.qweight' has {k} rows, which groups of {group} do not divide")
    groups = k // group if group else 1
    scale = names.get(f"{module}.scales", ("F16", ()))[0]
    fmt = integer_format(4, group, scale, zeros=True)
    expected = (
        Part(f"{module}.qweight", "I32", (k, n // 8), PartKind.DATA),
        Part(f"{module}.qzeros", "I32", (groups, n // 8), PartKind.ZEROS),
        Part(f"{module}.scales", scale, (groups, n), PartKind.SCALES),
    )
    weight = f"{module}.weight"
    check_parts(expected, names, weight=weight)
    read = partial(_read, module, fmt, (n, k))
    return StoredWeight(weight, (n, k), scheme_for(fmt, Activation.NONE), expected, whole=read)


def _read(module: str, fmt: Format, shape: tuple[int, int], load: Load) -> QTensor:
    """A weight, its codes put in order a few rows of the file at a time: apart they take twice the room."""
    words, (n, k) = load(f"{module}.qweight", None, None), shape
    codes = torch.empty(n, k // 2, dtype=torch.uint8)
    for start in range(0, k, _ROWS):
        stop = min(start + _ROWS, k)
        codes[:, start // 2 : stop // 2] = pack(_codes(words[start:stop]), 4)
    scales = load(f"{module}.scales", None, None).t().contiguous()
    return QTensor(fmt, shape, codes, scales, zeros=_codes(load(f"{module}.qzeros", None, None)))


def _codes(words: torch.Tensor) -> torch.Tensor:
    """int32 [rows, N/8] -> uint8 codes [N, rows]."""
    nibbles = unpack(words.contiguous().view(torch.uint8), 4)
    columns = torch.arange(nibbles.shape[1])
    return nibbles[:, columns // 8 * 8 + torch.tensor(_NIBBLES)[columns % 8]].t().contiguous()
