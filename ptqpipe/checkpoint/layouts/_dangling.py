"""Tensors that look like parts of a quantized weight and belong to none that is read.

Told by names, dtypes and shapes alone. Codes that nobody decodes are taken for numbers, and scales that nobody applies
leave their weights wrong by them: who reads weights asks here first. What models have beside the weights of linear
layers (masks, tables of ids, `logit_scale`, norms called `scale`) is none of these.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from ptqpipe.checkpoint.layouts._config import is_kv_scale
from ptqpipe.checkpoint.layouts._types import Names

_BARE = ("F8_E4M3", "F8_E5M2")  # and their other spellings: floats of which a cast makes a weight
_FLOATS = frozenset({"F32", "F16", "BF16"})
_CODES = frozenset({"U8", "I8", "U16", "I16", "U32", "I32"})  # ids and positions are I64, masks are BOOL

_LOOKS = {
    "packed": "packed codes",
    "scales": "scales of codes",
    "zeros": "zero points of codes",
    "groups": "the groups of codes",
    "shape": "the shape of packed codes",
    "input": "a static scale of activations",
    "quantizer": "the state of a quantizer",
}
# What a tensor is called, behind the last dot or behind "weight.", that nothing but a quantized weight has.
_LAST = re.compile(
    r"(?:^|\.)(?:"
    r"(?P<packed>weight_packed|_?weight_qdata|q_?weight|W_q|Qidxs|trellis|int_data|weight\._data"
    r"|bitmask|row_offsets)"
    r"|(?P<scales>_?weight_((block|per_tensor|global)_)?scale(_inv|_2|s)?|weights_scaling_factor(_2)?|scale_weight"
    r"|wscales|SCB|weight\.(_scale|_shift|scale)|weight\.(nested_)?(absmax|quant_map)|weight\.quant_state\..+)"
    r"|(?P<zeros>qzeros|wzeros|_?weight_zero_point|weight\._?zero_point)"
    r"|(?P<groups>(weight_)?g_idx|q_groups|q_invperm)"
    r"|(?P<shape>weight_shape)"
    r"|(?P<input>(input|output|activation)_((global_)?scale(_inv)?|zero_point)|scale_input|activation_scaling_factor"
    r"|pre_quant_scale|prequant_scaling_factor)"
    r"|(?P<quantizer>(weight|input|output|[qkv]_bmm)_quantizer\..+|weight_fake_quant\..+"
    r"|activation_post_process\..+|scaled_fp8|comfy_quant)"
    r")$"
)
# Endings of the last name of what belongs to the tensor, or the stack of experts, of the name before them.
_ENDING = re.compile(
    r"(?P<base>.+?)_(?:"
    r"(?P<packed>packed|blocks|qdata|qweight)"
    r"|(?P<input>(input|output)_(global_)?scale)"
    r"|(?P<scales>(weight_)?((block|global)_)?scale(_inv|_2)?|scales|absmax)"
    r"|(?P<zeros>zero_point|qzeros|zeros)"
    r"|(?P<groups>g_idx)"
    r"|(?P<shape>shape)"
    r")"
)
_PROJECTION = re.compile(r"(.*_proj|w\d+|.*linear)(_weight)?")
_PACKED_ENDINGS = ("_packed", "_blocks", "_qdata", "_qweight")
_SCALES_OF = ("{0}_scale_inv", "{0}_scale", "{1}.weight_scale", "{1}.scale_weight", "{1}.scale")


class Dangling(NamedTuple):
    """A tensor that no weight uses, and what it looks like.

    cast  it is a float of 8 bits without any scale: its numbers may be those of the weight
    """

    name: str
    looks: str
    cast: bool = False


def dangling(names: Names, consumed: Collection[str] = (), *, described: bool = True) -> list[Dangling]:
    """Every such tensor, codes before their scales.

    consumed   the parts of weights that are read
    described  config.json describes a quantization, which the scales of a KV cache are part of
    """
    parts = _dangling(names, consumed, described)
    return sorted(parts, key=lambda part: part.looks != _LOOKS["packed"] and not part.looks.startswith("F"))


def _dangling(names: Names, consumed: Collection[str], described: bool) -> Iterator[Dangling]:
    beside = defaultdict[str, list[str]](list)  # by module: what no weight uses
    for name in (name for name in names if name not in consumed):
        beside[name.rpartition(".")[0]].append(name)
    tails: dict[str, str] = {}  # a hundred thousand names have few
    for members in beside.values():
        for name in members:
            dtype, shape = names[name]
            tail = ".".join(name.rsplit(".", 3)[-3:])
            looks = tails.get(tail)
            if looks is None:
                looks = tails[tail] = _by_tail(tail)
            if is_kv_scale(name):
                looks = "" if described else "a scale of a quantized KV cache"
            else:
                looks = "" if looks == _LOOKS["packed"] and dtype in _FLOATS else looks
                looks = looks or _by_ending(name, dtype, names)
            if not looks and dtype in _CODES and _are_codes(name, shape, members, names):
                looks = _LOOKS["packed"]
            if looks:
                yield Dangling(name, looks)
            elif dtype.startswith(("F8_", "F6_", "F4")):
                yield _small_float(name, dtype, names)


def _by_tail(tail: str) -> str:
    match = _LAST.search(tail)
    return "" if match is None else _LOOKS[str(match.lastgroup)]


def _by_ending(name: str, dtype: str, names: Names) -> str:
    """What a tensor looks like beside the one that it is called after; empty for nothing."""
    parent, dot, leaf = name.rpartition(".")
    match = _ENDING.fullmatch(leaf) if "_" in leaf else None
    if match is None:
        return ""
    owner = f"{parent}{dot}{match['base']}"
    kind = next(kind for kind in _LOOKS if match.groupdict().get(kind) is not None)
    sure = leaf.endswith("_scale_inv") or (kind == "packed" and dtype in _CODES)
    codes = (other for ending in _PACKED_ENDINGS if (other := owner + ending) != name)
    beside = owner in names or any(other in names for other in codes)
    return _LOOKS[kind] if sure or beside or _PROJECTION.fullmatch(match["base"]) else ""


def _are_codes(name: str, shape: tuple[int, ...], beside: Sequence[str], names: Names) -> bool:
    """Whether integers are a weight's, by their name, or by what is beside them in a module: scales, and no weight."""
    if len(shape) not in (2, 3) or 0 in shape:
        return False
    module, _, leaf = name.rpartition(".")
    if leaf == "weight" or "experts" in name.split("."):
        return True
    scaled = any(names[other][0] in _FLOATS and names[other][1] not in ((), (1,)) for other in beside)
    return bool(module) and scaled and f"{module}.weight" not in names


def _small_float(name: str, dtype: str, names: Names) -> Dangling:
    """A tensor whose dtype alone says that it is none that models compute with."""
    if dtype.startswith("F8_E8M0"):
        return Dangling(name, _LOOKS["scales"])
    module = name.removesuffix(".weight")
    scale = next((s for pattern in _SCALES_OF if (s := pattern.format(name, module)) != name and s in names), None)
    looks = f"{dtype} codes" + (" without a scale" if scale is None else f" with the scales {scale!r}")
    return Dangling(name, looks, cast=scale is None and dtype.startswith(_BARE))
