"""The float state of a checkpoint, tensor by tensor, decoded when asked: what a model's parameters are filled from.

A checkpoint's logical tensors (``Source.tensors``) have the names of the float checkpoint whatever the container, so
transformers' own renaming and merging of names (experts into 3-D stacks) applies to them unchanged. This file must not
know models. The numbers are ``QTensor.dequantize``: float32, the one definition of decode.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import EllipsisType

import torch

from ptqpipe.containers import kv_scale
from ptqpipe.plan import Slice
from ptqpipe.source import Source, SourceRows

# llm-compressor 0.14 writes Mixtral's experts by the names of transformers' modules, not of the checkpoint (its issue
# 3069); transformers finds none of them. This goes when such checkpoints are forgotten.
_MIXTRAL = re.compile(r"(\.block_sparse_moe\.experts\.\d+\.)(gate|up|down)_proj(\.weight)$")
_MIXTRAL_NAMES = {"gate": "w1", "up": "w3", "down": "w2"}

Index = EllipsisType | slice | int | tuple[EllipsisType | slice | int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LazyTensor:
    """One logical tensor of a checkpoint, read and decoded by indexing: the protocol of a safetensors slice."""

    source: Source
    name: str

    @property
    def shape(self) -> torch.Size:
        """Shape in the float checkpoint."""
        return torch.Size(self.source.tensors[self.name][1])

    def get_shape(self) -> list[int]:
        """As a safetensors slice says it."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """As a safetensors slice says it: BF16 for a stored weight, whose decode is float32."""
        return self.source.tensors[self.name][0]

    def __getitem__(self, index: Index) -> torch.Tensor:
        """float32 of a stored weight, otherwise the stored dtype."""
        return self.read()[index]

    def read(self) -> torch.Tensor:
        """The whole tensor: float32 of a stored weight, otherwise the stored dtype."""
        stored = self.source.stored.get(self.name)
        if stored is None:
            return self.source.reader.read(self.name)
        if stored.experts is None:
            return self._matrix(None)
        return torch.stack([self._matrix(expert) for expert in range(stored.experts)])

    def _matrix(self, expert: int | None) -> torch.Tensor:
        """One matrix in the orientation of the float checkpoint."""
        stored = self.source.stored[self.name]
        rows = SourceRows(self.source, Slice(self.name, expert=expert), shape=stored.shape)
        w = rows.rows(0, stored.shape[0])
        return w.t().contiguous() if stored.transposed else w


def checkpoint_name(name: str) -> str:
    """The name that a model's own checkpoint has for a tensor of this name."""
    return _MIXTRAL.sub(lambda match: f"{match[1]}{_MIXTRAL_NAMES[match[2]]}{match[3]}", name)


def lazy_state(source: Source) -> Mapping[str, LazyTensor]:
    """Every logical tensor of a checkpoint but the scales of its kv cache, which belong to no parameter."""
    return {
        checkpoint_name(name): LazyTensor(source, name)
        for name, (dtype, shape) in source.tensors.items()
        if kv_scale(name, dtype, shape, container="plain") is None
    }
