"""Tensor parallelism at run time: what a rank is, and the hooks that join the ranks' partial results.

A row-parallel layer has some of the columns of its weight, so its output is a summand of the true one: a hook gives it
to ``all_reduce`` and adds the bias afterwards. A layer whose output is split is gathered where the model needs all of
it (the logits). Nothing else of a model is touched: its forward works on fewer heads and narrower matrices. Must not
know formats, files or how a model is cut (``shard.py``).

Sums go through one callable, which may choose by the size of a message: quantized for a prefill, plain for a decode
step. Logits and embeddings never pass it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import linear

from ptqpipe.errors import UsageError, usage

AllReduce = Callable[[torch.Tensor], torch.Tensor]
"""Sums a contiguous tensor over the ranks. It may write to its argument; every rank gets the same bits."""
RunCollective = Callable[[Callable[[], torch.Tensor]], torch.Tensor]
"""Runs a collective operation, now or beside something else, but in the order of its calls; returns what it gives."""


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """One rank of a group that computes one model.

    size, rank  how many ranks there are, and which this is
    group       the process group; None is torch's default one (unused where ``size`` is 1)
    all_reduce  sums the partial outputs of row-parallel layers; None is torch's
    run         runs each sum and gather of a forward: may do so in the background while it lets another forward compute
                in the same thread (``engine/overlap.py``); None: at once
    """

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    all_reduce: AllReduce | None = None
    run: RunCollective | None = None

    def check(self) -> None:
        """UsageError for ranks that make no sense, or that torch.distributed does not have."""
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise UsageError(f"rank {self.rank} of {self.size}; expected a size of 1 or more and a rank below it")
        if self.size == 1:
            return
        if not dist.is_available() or not dist.is_initialized():
            raise UsageError(
                f"tp={self.size} needs torch.distributed; call torch.distributed.init_process_group first, or use "
                f"{usage('serve', 'CKPT', tp=self.size)}, which starts the ranks"
            )
        size, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        if (size, rank) != (self.size, self.rank):
            raise UsageError(
                f"this is rank {rank} of {size} in the process group, not {self.rank} of {self.size}; pass the group "
                "that has tp ranks"
            )

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks."""
        x = x.contiguous()
        return self._sum(x) if self.run is None else self.run(lambda: self._sum(x))

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors ``[..., n]`` side by side, ``[..., size * n]``, as they are."""
        return self._gathered(x) if self.run is None else self.run(lambda: self._gathered(x))

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        if self.all_reduce is not None:
            return self.all_reduce(x)
        dist.all_reduce(x, group=self.group)
        return x

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)


def reduce_output(module: torch.nn.Module, ranks: TensorParallel) -> None:
    """Sums the module's output over the ranks. Its own ``bias``, which each rank has whole, is added once, after."""
    bias = module._parameters.get("bias")
    if bias is not None:
        module._parameters["bias"] = None
        module.register_parameter("bias_after_reduce", bias)

    def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        total = ranks.reduce(output)
        return total if bias is None else total + module.bias_after_reduce

    module.register_forward_hook(hook)


def gather_output(module: torch.nn.Module, ranks: TensorParallel) -> None:
    """Joins the ranks' outputs of a layer with some of the rows each."""
    module.register_forward_hook(lambda module, args, output: ranks.gather(output))


def split_input(module: torch.nn.Module, start: int, stop: int) -> None:
    """Gives a layer with some of the columns its part of an input that every rank has whole."""
    module.register_forward_pre_hook(lambda module, args: (args[0][..., start:stop], *args[1:]))


def use_rows(module: torch.nn.Linear, start: int, stop: int) -> None:
    """Makes a layer whose weight is shared with another module compute some of its rows only, its ``own_rows``."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        bias = None if module.bias is None else module.bias[start:stop]
        return linear(x, module.weight[start:stop], bias)

    module.own_rows = slice(start, stop)  # type: ignore[assignment]
    module.forward = forward  # type: ignore[method-assign,assignment]
