"""Where a model lets factors move from one layer to another: its edges.

An *edge* joins what produces channels with the weights that read them, with nothing between but operations that a
factor per channel passes through:

    norm    norm weight (and bias)        -> q, k, v, or gate, up, the experts, the router, the shared expert
    latent  norm between two projections   -> the second of them (DeepSeek's latent queries, keys and values)
    value   rows of v_proj                -> columns of o_proj; attention mixes tokens, never channels of a head
    up      rows of up_proj               -> columns of down_proj, since the MLP is act(gate) * up
    final   the norm after the last layer -> the head (rotations only)

``find_structure.py`` finds them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ptqpipe.models.families import Norms

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""name -> (safetensors dtype, shape) of the tensors of a plain checkpoint."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """One logical weight [out, in], or some rows of it, inside a tensor of the checkpoint.

    start       the first row (of [out, in]) inside the tensor
    expert      number in a 3-D stack
    transposed  the tensor holds it as [in, out]
    bias        the tensor added to its output, None without one
    modules     names that statistics may know it by, the likelier first
    group       what shares one global scale in readers: weights of one edge with equal groups
    quantized   whether recipes quantize it; routers and heads are scaled along but do not count
    """

    tensor: str
    shape: tuple[int, int]
    start: int = 0
    expert: int | None = None
    transposed: bool = False
    bias: str | None = None
    modules: tuple[str, ...] = ()
    group: str = ""
    quantized: bool = True


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm that multiplies by (offset + weight) and may add a bias."""

    weight: str
    offset: float = 0.0
    bias: str | None = None


@dataclass(frozen=True, slots=True)
class Edge:
    """One place where factors move: see the top of the file.

    channels    how many factors there are
    repeat      value edges: how many query heads read each key-value head
    head_dim    value edges: channels of a head
    gated       value edges: each channel is multiplied by a gate of its own behind attention
    """

    id: str
    kind: str
    producer: Norm | Matrix
    consumers: tuple[Matrix, ...]
    channels: int
    repeat: int = 1
    head_dim: int = 0
    gated: bool = False

    def channel_of(self) -> torch.Tensor:
        """int64 [K]: the channel that each input column of the consumers reads."""
        if self.repeat == 1:
            return torch.arange(self.channels)
        columns = torch.arange(self.channels * self.repeat)
        head = columns // self.head_dim // self.repeat
        return head * self.head_dim + columns % self.head_dim

    def tensors(self) -> list[str]:
        """Every tensor that a factor on this edge changes."""
        producer = self.producer
        names = [producer.weight if isinstance(producer, Norm) else producer.tensor]
        names += [producer.bias] if producer.bias is not None else []
        return list(dict.fromkeys([*names, *(consumer.tensor for consumer in self.consumers)]))


@dataclass(frozen=True, slots=True)
class Structure:
    """A model as transforms see it.

    edges       in the order of the layers
    writers     matrices whose rows are channels of the residual stream (o_proj, down_proj)
    embeddings  tensors [rows, hidden] that begin the residual stream
    output_norms  norms between a sublayer and the residual stream
    tied        the head is the embedding
    others      tensors that no edge, writer or embedding names
    """

    norms: Norms
    model_type: str
    hidden: int
    edges: tuple[Edge, ...]
    writers: tuple[Matrix, ...]
    embeddings: tuple[str, ...]
    output_norms: tuple[str, ...]
    tied: bool
    others: tuple[str, ...]


def rotated_tensors(edges: Iterable[Edge], writers: Iterable[Matrix], embeddings: Iterable[str]) -> list[list[str]]:
    """Every tensor that a rotation changes on some edges, in some writers and embeddings, those of each together."""
    sets = [edge.tensors() for edge in edges]
    sets += [[writer.tensor, *([writer.bias] if writer.bias else [])] for writer in writers]
    return sets + [[name] for name in embeddings]


def grouped(names: Iterable[str], sets: Iterable[Sequence[str]]) -> dict[str, list[str]]:
    """Names in groups: those that overlapping sets join, and each of the others alone, as ``keep:NAME``."""
    component = _joined(sets)
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(component.get(name, f"keep:{name}"), []).append(name)
    return groups


def _joined(sets: Iterable[Sequence[str]]) -> dict[str, str]:
    """Name -> the name that stands for all that overlapping sets join it with."""
    parent: dict[str, str] = {}

    def root(name: str) -> str:
        while parent.setdefault(name, name) != name:
            parent[name] = parent[parent[name]]
            name = parent[name]
        return name

    for names in sets:
        for name in names[1:]:
            parent[root(name)] = root(names[0])
        root(names[0])
    return {name: root(name) for name in parent}
