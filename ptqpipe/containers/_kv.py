"""The scales of a quantized kv cache: they belong to no weight, but their names differ between layouts."""

import re

from ptqpipe.containers._types import Part, Role

WITH_KV_CACHE = frozenset({"compressed_tensors", "modelopt", "ptqpipe"})
"""Layouts whose config says that the kv cache is quantized."""

_STYLES = {"compressed_tensors": (r"\1.\2_scale", (1,)), "modelopt": (r"\1.\2_proj.\2_scale", ())}
_NAME = re.compile(r"(.*?)\.(?:[kv]_proj\.)?([kv])_scale")


def kv_scale(name: str, dtype: str, shape: tuple[int, ...], *, container: str) -> Part | None:
    """A stored kv-cache scale as ``container`` spells it: the same bytes, another name and one number as [1] or [].

    None for a tensor that is no such scale. Containers without a kv cache of their own, and scales of more than one
    number, keep their name and shape.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    style = _STYLES.get(container)
    if style is None or shape not in ((), (1,)):
        return Part(name, dtype, shape, Role.OTHER)
    return Part(match.expand(style[0]), dtype, style[1], Role.OTHER)
