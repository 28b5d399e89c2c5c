"""The transport for small messages between CPUs: two-shot and one-shot, each step one all-to-all of everything.

What costs time in a small message is threads that wake up. An all-to-all sends and receives all messages of a step on
the group's own thread and wakes the caller once; ``point_to_point.py`` wakes it for every message, but has chunks to
compute while others travel. Same bits as point to point.

Must not know codecs. Steps of one group must come in the same order on all ranks, as those of any collective.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ptqpipe.collectives.layout import Layout
from ptqpipe.collectives.point_to_point import Workspace
from ptqpipe.collectives.stats import Phases
from ptqpipe.collectives.wire import Wire


@dataclass(slots=True)
class AtOnce:
    """One call on one rank; the fields are those of ``point_to_point.Exchange``, the layout of one chunk.

    ``out`` may be ``x``.
    """

    group: dist.ProcessGroup
    wire: Wire
    layout: Layout
    x: torch.Tensor
    out: torch.Tensor
    workspace: Workspace
    phases: Phases
    own_exact: bool = True
    rank: int = field(init=False)
    ranks: int = field(init=False)

    def __post_init__(self) -> None:
        self.rank, self.ranks = self.group.rank(), self.group.size()

    def two_shot(self) -> None:
        """Every part to its owner, every sum to all. Returns when ``out`` is written and no buffer is in use."""
        sizes = [self.wire.nbytes(len(self.layout.span(rank, 0)), self.x.dtype) for rank in range(self.ranks)]
        mine, span, total = sizes[self.rank], self.layout.span(self.rank, 0), sum(sizes)
        room = self.workspace.whole(2 * total + 2 * self.ranks * mine + mine)
        parts, sums, received, copies, made = _split(room, [total, total, self.ranks * mine, self.ranks * mine, mine])
        parts, part_sizes = self._encode(parts, sizes)
        coming = [mine] * self.ranks
        coming[self.rank] = part_sizes[self.rank]
        self._swap(parts, part_sizes, received[: sum(coming)], coming)
        if mine:
            begun = time.perf_counter()
            terms: list[torch.Tensor | None] = list(_split(received[: sum(coming)], coming))
            if self.own_exact:
                terms[self.rank] = None
            own, out = self.x[span.first : span.last], self.out[span.first : span.last]
            copies.view(self.ranks, mine).copy_(self.wire.reduce(terms, own, made, out))
            self.phases.reduce += time.perf_counter() - begun
        sums = self.wire.landing(self.out, sums)
        self._swap(copies, [mine] * self.ranks, sums, sizes)
        self._decode(sums, sizes)

    def one_shot(self) -> None:
        """All to all, and every rank adds it up itself: one rounding. The layout is that of one rank."""
        size = self.wire.nbytes(self.layout.elements, self.x.dtype)
        room = self.workspace.whole((2 * self.ranks - 1) * size)
        copies, received, made = _split(room, [(self.ranks - 1) * size, (self.ranks - 1) * size, size])
        begun = time.perf_counter()
        message = self.wire.encode(self.x, made)
        copies.view(self.ranks - 1, size).copy_(message)
        self.phases.encode += time.perf_counter() - begun
        sizes = [size] * self.ranks
        sizes[self.rank] = 0
        self._swap(copies, sizes, received, sizes)
        begun = time.perf_counter()
        terms: list[torch.Tensor | None] = list(_split(received, sizes))
        terms[self.rank] = message
        self.wire.reduce(terms, self.x, made[:0], self.out)
        self.phases.reduce += time.perf_counter() - begun

    def _encode(self, room: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, list[int]]:
        """The messages of all parts, one behind the other, and their sizes; without this rank's where none needs it."""
        parts, found = self.wire.landing(self.x, room), list(sizes)
        if parts is not room:
            return parts, found  # messages are the values
        begun, at = time.perf_counter(), 0
        if self.own_exact:
            found[self.rank] = 0
        for rank, size in enumerate(found):
            if size:
                span = self.layout.span(rank, 0)
                self.wire.encode(self.x[span.first : span.last], room[at : at + size])
                at += size
        self.phases.encode += time.perf_counter() - begun
        return room[:at], found

    def _decode(self, sums: torch.Tensor, sizes: list[int]) -> None:
        begun = time.perf_counter()
        for rank, message in enumerate(_split(sums, sizes)):
            span = self.layout.span(rank, 0)
            if rank != self.rank and len(span):
                self.wire.decode(message, self.out[span.first : span.last])
        self.phases.decode += time.perf_counter() - begun

    def _swap(
        self, given: torch.Tensor, given_sizes: list[int], received: torch.Tensor, received_sizes: list[int]
    ) -> None:
        begun = time.perf_counter()
        self.group.alltoall_base(received, given, received_sizes, given_sizes).wait()
        self.phases.sent += sum(given_sizes) - given_sizes[self.rank]
        self.phases.wait += time.perf_counter() - begun


def _split(room: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.split_with_sizes(room, list(sizes)))
