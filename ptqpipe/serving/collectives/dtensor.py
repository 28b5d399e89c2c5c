"""The quantized all-reduce inside DTensor: a placement for pending sums, and a row-wise style that leaves it behind.

    parallelize_module(model, mesh, {"mlp.down_proj": QuantRowwise(reduce)})     # torch.distributed.tensor.parallel

A pending sum (`Partial`) becomes a whole tensor (`Replicate`) through its ``_reduce_value``; that is the one thing
changed here. Sums to a shard (reduce-scatter) stay torch's. Must not know models.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor.parallel import RowwiseParallel

Reduce = Callable[[torch.Tensor], torch.Tensor]


class QuantPartial(Partial):
    """A pending sum that ``reduce`` makes: a `QuantAllReduce` of the group of the mesh's dimension."""

    def __init__(self, reduce: Reduce) -> None:
        super().__init__("sum")
        object.__setattr__(self, "reduce", reduce)

    def _reduce_value(self, tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int) -> torch.Tensor:
        reduce: Reduce = object.__getattribute__(self, "reduce")
        return reduce(tensor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QuantPartial) and other.__dict__["reduce"] is self.__dict__["reduce"]

    def __hash__(self) -> int:
        return hash(("quantized", id(self.__dict__["reduce"])))

    def __repr__(self) -> str:
        return "QuantPartial()"

    def __str__(self) -> str:
        return "QP"


class QuantRowwise(RowwiseParallel):
    """torch's row-wise style whose sum goes through ``reduce``. The other arguments are its own."""

    def __init__(
        self,
        reduce: Reduce,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        self.placement = QuantPartial(reduce)

    def _prepare_output_fn(  # type: ignore[override]  # torch's is static; it is looked up on the instance
        self,
        output_layouts: tuple[Placement, ...],
        use_local_output: bool,
        mod: torch.nn.Module,
        outputs: DTensor,
        device_mesh: DeviceMesh,
    ) -> Any:
        if isinstance(outputs.placements[0], Partial) and isinstance(output_layouts[0], Replicate):
            local = outputs.to_local()
            outputs = DTensor.from_local(local, device_mesh, [self.placement], run_check=False)
        theirs: Any = RowwiseParallel._prepare_output_fn
        return theirs(output_layouts, use_local_output, mod, outputs, device_mesh)
