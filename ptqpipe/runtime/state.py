"""The float state of a checkpoint, tensor by tensor, decoded when asked: what a model's parameters are filled from.

A checkpoint's logical tensors (``Source.tensors``) have the names of the float checkpoint whatever the container, so
transformers' own renaming and merging of names (experts into 3-D stacks) applies to them unchanged. A rank of several
gets parts of them, and only those are read. This file must not know models. The numbers are ``QTensor.dequantize``:
float32, the one definition of decode.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import EllipsisType

import torch

from ptqpipe.checkpoint.layouts import kv_scale
from ptqpipe.models.source import Source
from ptqpipe.runtime.shard_read import Range, read_box, read_part

Index = EllipsisType | slice | int | tuple[EllipsisType | slice | int, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """The part of a tensor that a rank holds; None is all of an axis.

    rows, columns  of outputs and inputs of the layer, whatever the orientation
    dims           the dimensions of the float tensor that they are in
    """

    rows: tuple[Range, ...] | None = None
    columns: Range | None = None
    dims: tuple[int, int] = (-2, -1)

    def ranges(self, shape: tuple[int, ...]) -> list[tuple[Range, ...]]:
        """The ranges of each dimension of a float tensor of this shape."""
        ranges: list[tuple[Range, ...]] = [((0, extent),) for extent in shape]
        if self.rows is not None:
            ranges[self.dims[0]] = self.rows
        if self.columns is not None:
            ranges[self.dims[1]] = (self.columns,)
        return ranges


WHOLE = Region()


@dataclass(frozen=True, slots=True, eq=False)
class LazyTensor:
    """One logical tensor of a checkpoint, or a part of it, read and decoded by indexing, as a safetensors slice is.

    read_one  called with the name after each reading, from whatever thread reads
    """

    source: Source
    name: str
    region: Region = WHOLE
    read_one: Callable[[str], None] = lambda name: None

    @property
    def shape(self) -> torch.Size:
        """Shape in the float checkpoint, of the part."""
        whole = self.source.tensors[self.name][1]
        return torch.Size(sum(stop - start for start, stop in part) for part in self.region.ranges(whole))

    def get_shape(self) -> list[int]:
        """Same interface as a safetensors slice."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Same interface as a safetensors slice: BF16 for a stored weight, whose decode is float32."""
        return self.source.tensors[self.name][0]

    def __getitem__(self, index: Index) -> torch.Tensor:
        """float32 of a stored weight, otherwise the stored dtype."""
        return self.read()[index]

    def read(self) -> torch.Tensor:
        """The whole part: float32 of a stored weight, otherwise the stored dtype."""
        tensor = self._read()
        self.read_one(self.name)
        return tensor

    def _read(self) -> torch.Tensor:
        stored = self.source.stored.get(self.name)
        if stored is None:
            if self.region == WHOLE:
                return self.source.reader.read(self.name)
            return read_box(self.source.reader, self.name, self.region.ranges(self.source.tensors[self.name][1]))
        matrices = [self._matrix(expert) for expert in stored.planes]
        return torch.stack(matrices) if stored.experts is not None else matrices[0]

    def _matrix(self, expert: int | None) -> torch.Tensor:
        """One matrix in the orientation of the float checkpoint."""
        stored = self.source.stored[self.name]
        region = self.region
        w = read_part(self.source, stored, expert=expert, rows=region.rows, columns=region.columns).dequantize()
        return w.t().contiguous() if stored.transposed else w


def parameter_names(source: Source) -> list[str]:
    """Every logical tensor of a checkpoint but the scales of its kv cache, which belong to no parameter."""
    return [name for name, (dtype, shape) in source.tensors.items() if kv_scale(name, dtype, shape) is None]


def lazy_state(
    source: Source,
    regions: Mapping[str, Region] | None = None,
    *,
    read_one: Callable[[str], None] = lambda name: None,
) -> dict[str, LazyTensor]:
    """The state by the checkpoint's names.

    regions   of the tensors to take; None for all, whole
    read_one  as in `LazyTensor`
    """
    if regions is None:
        regions = dict.fromkeys(parameter_names(source), WHOLE)
    return {name: LazyTensor(source, name, region, read_one) for name, region in regions.items()}
