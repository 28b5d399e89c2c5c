"""``ptqpipe::quant_all_reduce``: one operator that torch.compile treats as opaque, and the registry behind it.

The operator takes a tensor and the name of a reducer, since a graph holds strings but no process groups.
"""

import weakref
from collections.abc import Callable

import torch

from ptqpipe.errors import UsageError

Reducer = Callable[[torch.Tensor], torch.Tensor]
"""``x`` to its sum over the ranks, a new tensor."""

_reducers: "weakref.WeakValueDictionary[str, Reducer]" = weakref.WeakValueDictionary()


def register(reducer: Reducer, name: str) -> str:
    """Registers ``reducer`` under ``name``, for as long as it lives. Returns the name."""
    _reducers[name] = reducer
    return name


@torch.library.custom_op("ptqpipe::quant_all_reduce", mutates_args=())
def quant_all_reduce(x: torch.Tensor, name: str) -> torch.Tensor:
    """The sum of ``x`` over the ranks of the reducer called ``name``. UsageError when it is gone."""
    reducer = _reducers.get(name)
    if reducer is None:
        raise UsageError(f"no all-reduce {name!r}; keep the QuantAllReduce as long as the compiled model runs")
    return reducer(x)


@quant_all_reduce.register_fake
def _shape(x: torch.Tensor, name: str) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
