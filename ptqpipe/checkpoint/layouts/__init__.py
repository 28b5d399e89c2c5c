"""Containers: one file for each on-disk layout, which reads and writes its names, bytes and config; found by file name.

A container knows how a quantized weight is *stored*: names, bytes, config. The way of a weight: ``parts`` says from the
shape alone which tensors will be written, ``encode_part`` turns a QTensor (or a run of its rows) into the bytes of one
of them, ``stored_weights`` finds the quantized weights of a checkpoint from its headers and config, and ``decode``
reads one back as a QTensor.
"""

import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any, cast

from ptqpipe.checkpoint.layouts._codec import (
    WHOLE_ROLES,
    decode,
    decode_input_global,
    encode_part,
    part_bytes,
    part_offset,
    scale_codes,
)
from ptqpipe.checkpoint.layouts._config import (
    FLOAT_MODEL,
    HF_QUANT_CONFIG,
    announces_kv_cache,
    is_kv_scale,
    is_read_only,
    kv_scale,
    kv_scale_place,
    memoized_parts,
    merged_config,
    quantization_config,
    same_value,
    without_quantization,
)
from ptqpipe.checkpoint.layouts._dangling import Dangling, dangling
from ptqpipe.checkpoint.layouts._integers import has_integers
from ptqpipe.checkpoint.layouts._lists import Lists, contradicted, is_stack
from ptqpipe.checkpoint.layouts._types import (
    DECODED_ROLES,
    ConfigRequest,
    Container,
    Names,
    Part,
    PartKind,
    StoredWeight,
    Target,
)
from ptqpipe.errors import CheckpointError, UsageError, did_you_mean


def container_names() -> list[str]:
    """The names that :func:`get_container` knows: one for each module here, those with a leading underscore aside."""
    return list(_names_in(tuple(__path__)))


@cache
def _names_in(folders: tuple[str, ...]) -> list[str]:
    """Listed once: a checkpoint asks for them a dozen times, which took a quarter of deciding its conversion."""
    return sorted(module.name for module in pkgutil.iter_modules(folders) if not module.name.startswith("_"))


def get_container(name: str) -> Container:
    """The container called ``name`` (its file's name, ``-`` and ``_`` alike); UsageError with the known names."""
    key = name.lower().replace("-", "_")
    if key not in container_names():
        raise UsageError(f"unknown container {name!r}; {did_you_mean(key, _written(), listed=True)}")
    return cast(Container, import_module(f"{__name__}.{key}"))


def _written() -> list[str]:
    return [name for name in container_names() if not is_read_only(get_container(name))]


def detect_container(config: Mapping[str, Any], names: Names) -> str | None:
    """The name of the container that a checkpoint has, None for a plain one.

    ``config`` is config.json (see :func:`merged_config`). CheckpointError for a quantized checkpoint of a kind that
    ptqpipe does not read.
    """
    for name in container_names():
        if get_container(name).detect(config, names):
            return name
    described = quantization_config(config)
    if not described:
        return None
    method = described.get("quant_method") or described.get("quant_algo")
    raise CheckpointError(
        f"quant_method {method!r} in config.json is not one that ptqpipe reads ({', '.join(container_names())}); "
        f"{FLOAT_MODEL}"
    )
