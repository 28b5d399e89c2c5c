"""The scales of a quantized kv cache: they belong to no weight, but their names differ between layouts."""

import re
from collections.abc import Mapping
from typing import Any

from ptqpipe.checkpoint.layouts._config import HF_QUANT_CONFIG, quantization_config
from ptqpipe.checkpoint.layouts._types import ConfigFiles, Container, Part, PartKind

_NAME = re.compile(r"(.*?)\.(?:[kv]_proj\.)?([kv])_scale")
_ANY = re.compile(r"(.*?)\.(?:[kvq]_proj\.)?([kvq])_scale")


def kv_scale(name: str, dtype: str, shape: tuple[int, ...], *, container: Container | None = None) -> Part | None:
    """A stored kv-cache scale as ``container`` stores it: the same bytes, another name and one number as [1] or [].

    None for a tensor that is no such scale. Containers without a kv cache of their own, plain checkpoints (None), and
    scales of more than one number keep their name and shape.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    style = None if container is None else container.CAPABILITIES.kv_cache
    if style is None or style.name is None or shape not in ((), (1,)):
        return Part(name, dtype, shape, PartKind.OTHER)
    return Part(match.expand(style.name), dtype, style.shape, PartKind.OTHER)


def kv_scale_place(name: str) -> tuple[str, str] | None:
    """(attention module, "k", "v" or "q") of a tensor whose name is that of a kv-cache scale, else None."""
    match = _ANY.fullmatch(name)
    return None if match is None else (match[1], match[2])


def is_kv_scale(name: str) -> bool:
    """Whether a tensor's name says that it scales a quantized kv cache."""
    return kv_scale_place(name) is not None


def announces_kv_cache(files: ConfigFiles) -> bool:
    """Whether one of the config files says that the kv cache is quantized."""
    described = quantization_config(files["config.json"] or {})
    return _announced(described) or _announced(files.get(HF_QUANT_CONFIG) or {})


def _announced(value: Any) -> bool:
    """Whether one of the keys, at any depth, has a value."""
    if isinstance(value, Mapping):
        keys = ("kv_cache_scheme", "kv_cache_quant_algo")
        return any((key in keys and inner is not None) or _announced(inner) for key, inner in value.items())
    return isinstance(value, list) and any(map(_announced, value))
