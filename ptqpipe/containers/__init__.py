"""Containers: the names, bytes and config of one on-disk layout each, in both directions; found by file name.

A container knows how a quantized weight is *spelled*. It must not know how scales are chosen, what a model is, or how
files are written. The walk of a weight: ``parts`` says from the shape alone which tensors will be written,
``encode_part`` turns a QTensor (or a run of its rows) into the bytes of one of them, ``stored_weights`` finds the
quantized weights of a checkpoint from its headers and config, and ``decode`` reads one back as a QTensor.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from ptqpipe.errors import UsageError
from ptqpipe.schemes import Scheme


class Role(StrEnum):
    """What a stored tensor of a quantized weight holds."""

    DATA = "data"  # packed codes, row major
    SCALES = "scales"  # block scales, row major over the scale grid
    GLOBAL = "global"  # float32 global scale, multiplies
    GLOBAL_DIVISOR = "global_divisor"  # its reciprocal
    INPUT_GLOBAL = "input_global"  # float32 global scale of the input, multiplies
    INPUT_GLOBAL_DIVISOR = "input_global_divisor"
    OTHER = "other"  # kept with the weight, not part of its decode


@dataclass(frozen=True, slots=True)
class Part:
    """One stored tensor of a quantized weight. ``dtype`` is safetensors' spelling ("U8", "F8_E4M3", "F32" ...)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: Role


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A quantized weight found in a checkpoint.

    ``weight`` is the logical name ("model.layers.0.mlp.up_proj.weight"). ``shape`` is (N, K). A stack of experts in
    one 3-D tensor has ``experts`` = E, and its parts have a leading axis E.
    """

    weight: str
    shape: tuple[int, int]
    scheme: Scheme
    parts: tuple[Part, ...]
    experts: int | None = None

    def part(self, role: Role) -> Part | None:
        """The part with this role, if there is one."""
        return next((part for part in self.parts if part.role is role), None)


@dataclass(frozen=True, slots=True)
class Target:
    """A weight that a converted checkpoint stores quantized; what the config files are written from."""

    weight: str
    scheme: Scheme
    experts: int | None = None


class Container(Protocol):
    """The shape of a container module."""

    QUANT_METHOD: str

    def supports(self, scheme: Scheme) -> str | None:
        """None if the layout can spell this scheme, else one line that says why not and what can."""

    def parts(self, weight: str, shape: tuple[int, int], scheme: Scheme, *, experts: int | None = None) -> tuple[Part, ...]:
        """The tensors that store this weight, in the order in which they are written."""

    def configs(
        self, base: Mapping[str, Any], targets: Sequence[Target], *, kept_modules: Sequence[str], provenance: Mapping[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """The config files by file name ("config.json", ...): the source's config with the quantization described."""

    def detect(self, config: Mapping[str, Any], names: Mapping[str, tuple[str, tuple[int, ...]]]) -> bool:
        """Whether a checkpoint with this config and these tensors (name -> dtype, shape) has this layout."""

    def stored_weights(
        self, config: Mapping[str, Any], names: Mapping[str, tuple[str, tuple[int, ...]]]
    ) -> dict[str, StoredWeight]:
        """Every quantized weight, by logical name. CheckpointError where names, dtypes, shapes and config disagree."""


Load = Callable[[str, int | None, int | None], torch.Tensor]
"""Reads rows [start, stop) of a stored tensor's first axis (all of it for None)."""

_SHARED = {"__init__"}


def container_names() -> list[str]:
    """The names that :func:`get_container` knows."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in _SHARED)


def get_container(name: str) -> Container:
    """The container called ``name`` (its file's name, ``-`` and ``_`` alike); UsageError with the known names."""
    key = name.lower().replace("-", "_")
    if key not in container_names():
        raise UsageError(f"unknown container {name!r}; known are {', '.join(container_names())}")
    return cast(Container, import_module(f"{__name__}.{key}"))
