"""Which transport moves the messages of a sum, and what it keeps between sums.

Must not know thresholds: whether and how a sum is sent is decided by ``allreduce.py``.
"""

from typing import get_args

import torch
import torch.distributed as dist

from ptqpipe.errors import UsageError
from ptqpipe.serving.collectives.by_collectives import CollectiveExchange
from ptqpipe.serving.collectives.codecs import WireCodec
from ptqpipe.serving.collectives.point_to_point import Exchange, Workspace, first_tag, one_shot_at_once
from ptqpipe.serving.collectives.symmetric import SymmetricExchange, SymmetricMemory, Transport, choose
from ptqpipe.serving.collectives.wire import Layout, Plain, Quantized, Stats, Wire


class Transports:
    """The transports of one all-reduce.

    kind        as `QuantAllReduce` has it
    memory      symmetric memory of its quantized sums; None where they take another way
    background  whether a sum runs in the background: then messages with tags keep out of others' collectives
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        kind: Transport | SymmetricMemory,
        codec: WireCodec | None,
        instance: int,
        *,
        own_exact: bool,
    ) -> None:
        """Collective.

        codec     of the sums that symmetric memory may carry; None: it carries none
        instance  number of this all-reduce among those of the group
        """
        if not isinstance(kind, SymmetricMemory) and kind not in get_args(Transport):
            raise UsageError(f"unknown transport {kind!r}; known are {', '.join(get_args(Transport))}")
        self.group, self.kind, self.own_exact = group, kind, own_exact
        self.memory = None if codec is None else choose(kind, group, codec)
        self.background = False
        self._tag = first_tag(instance)
        self._workspace = Workspace()
        self._stream: torch.cuda.Stream | None = None

    def run(
        self, x: torch.Tensor, out: torch.Tensor, layout: Layout, wire: Wire, stats: Stats, *, one_shot: bool
    ) -> None:
        """Writes the sum of ``x [n]`` to ``out [n]``, which may be ``x``; both contiguous. UsageError without a
        transport for it."""
        if self.memory is not None and isinstance(wire, Quantized):
            SymmetricExchange(self.memory, wire.codec, layout, x, out, stats, self.own_exact).two_shot()
            return
        collectives = self.kind == "collectives" or (self.kind != "p2p" and x.is_cuda)
        if collectives and not one_shot:
            if x.is_cuda and self._stream is None:
                self._stream = torch.cuda.Stream(x.device)
            stream = self._stream if x.is_cuda else None
            CollectiveExchange(self.group, wire, layout, x, out, stream, stats, self.own_exact).two_shot()
            return
        if x.is_cuda:
            raise UsageError("one_shot and transport p2p are for CPU tensors; leave both out for CUDA")
        if one_shot and isinstance(wire, Plain) and self.kind == "auto" and not self.background:
            one_shot_at_once(self.group, wire, x, out, workspace=self._workspace, stats=stats)
            return
        x = x.clone() if one_shot and x.data_ptr() == out.data_ptr() else x
        exchange = Exchange(self.group, wire, layout, x, out, self._tag, self._workspace, stats, self.own_exact)
        exchange.one_shot() if one_shot else exchange.two_shot()
