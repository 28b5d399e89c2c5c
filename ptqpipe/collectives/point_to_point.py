"""The transport for any process group that can send and receive: two-shot and one-shot, in chunks.

Two-shot: every rank sends its part of stripe p to rank p, which adds them up and sends the sum to all. Step t encodes
and sends chunk t, sums and returns chunk t - LAG, decodes chunk t - 2 LAG, so while one chunk is computed the wire has
others to carry. All receives are posted first: gloo moves no byte before the receiver has asked for it.

Every rank decodes the same bytes, those of its own stripe too, so all end with the same bits.

Must not know codecs. Messages of one pair of ranks and one tag arrive in order; a tag means one chunk and direction.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ptqpipe.collectives.layout import Layout
from ptqpipe.collectives.stats import Phases
from ptqpipe.collectives.wire import Wire

LAG = 1  # chunks on the wire while one is computed
_TAGS = 1 << 30  # ours start here: a group's other messages between two ranks usually count from 0
_PER_GROUP = 1 << 20


class Workspace:
    """Bytes that calls share, grown on demand."""

    def __init__(self) -> None:
        self._room = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def reset(self, nbytes: int) -> None:
        """Room for a call that takes ``nbytes`` (and up to 63 of each piece for alignment)."""
        if self._room.numel() < nbytes:
            self._room = torch.empty(nbytes, dtype=torch.uint8)
        self._used = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """The next ``nbytes``, aligned to 64 as the whole is."""
        first = self._used
        self._used = first + -(-nbytes // 64) * 64
        return self._room[first : first + nbytes]


@dataclass(slots=True)
class Exchange:
    """One call on one rank.

    x, out  contiguous, 1-d, of one dtype and size; ``out`` may be ``x`` for two-shot
    tag     the first of two tags a chunk
    """

    group: dist.ProcessGroup
    wire: Wire
    layout: Layout
    x: torch.Tensor
    out: torch.Tensor
    tag: int
    workspace: Workspace
    phases: Phases
    own_exact: bool = True
    rank: int = field(init=False)
    ranks: int = field(init=False)
    _sends: list[dist.Work] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rank, self.ranks = self.group.rank(), self.group.size()

    @property
    def peers(self) -> list[int]:
        """The other ranks, the next one first, so that not all send to rank 0 first."""
        return [(self.rank + step) % self.ranks for step in range(1, self.ranks)]

    def two_shot(self) -> None:
        """Runs it; returns when ``out`` is written and no buffer is in use."""
        layout, peers = self.layout, self.peers
        self.workspace.reset(self._room_needed())
        parts = [[self._receive_part(p, j) for p in peers] for j in range(layout.chunks)]
        sums = [[self._receive_sum(p, j) for p in peers] for j in range(layout.chunks)]
        for step in range(layout.chunks + 2 * LAG):
            if step < layout.chunks:
                self._send_parts(peers, step)
            if 0 <= step - LAG < layout.chunks:
                self._reduce(peers, step - LAG, parts[step - LAG])
            if 0 <= step - 2 * LAG < layout.chunks:
                self._decode(peers, step - 2 * LAG, sums[step - 2 * LAG])
        self._wait(self._sends)

    def one_shot(self) -> None:
        """Every rank sends all of its part to every other and adds them up itself: one rounding, no way back.

        The layout is that of one rank; ``out`` must not be ``x``.
        """
        layout, peers, dtype = self.layout, self.peers, self.x.dtype
        size = self.wire.nbytes(layout.stripe * layout.unit, dtype) + 64 * layout.chunks
        self.workspace.reset(size * (len(peers) + 1))
        spans = [layout.span(0, j) for j in range(layout.chunks)]
        rooms = [[self.workspace.take(self.wire.nbytes(len(span), dtype)) for _ in peers] for span in spans]
        landed = [
            [self._receive(room, p, 2 * j) for p, room in zip(peers, rooms[j], strict=True)]
            for j in range(layout.chunks)
        ]
        mine: list[torch.Tensor] = []
        for step in range(layout.chunks + LAG):
            if step < layout.chunks:
                part = self.x[spans[step].first : spans[step].last]
                mine.append(self._encode(part))
                for p in peers:
                    self._send(mine[-1], p, 2 * step)
            if step >= LAG:
                j = step - LAG
                self._wait(landed[j])
                terms: dict[int, torch.Tensor | None] = dict(zip(peers, rooms[j], strict=True))
                terms[self.rank] = mine[j]
                self._sum(terms, j, self.workspace.take(0))
        self._wait(self._sends)

    def _room_needed(self) -> int:
        """Bytes of all messages that this rank sends and receives."""
        layout, dtype = self.layout, self.x.dtype
        stripe = self.wire.nbytes(layout.stripe * layout.unit, dtype) + 64 * layout.chunks
        return stripe * (4 * (layout.ranks - 1) + 2)

    def _receive_part(self, peer: int, chunk: int) -> tuple[torch.Tensor, dist.Work | None]:
        """What ``peer`` puts into this rank's stripe."""
        room = self.workspace.take(self.wire.nbytes(len(self.layout.span(self.rank, chunk)), self.x.dtype))
        return room, self._receive(room, peer, 2 * chunk)

    def _receive_sum(self, peer: int, chunk: int) -> tuple[torch.Tensor, dist.Work | None]:
        """The sum of the stripe of ``peer``."""
        span = self.layout.span(peer, chunk)
        room = self.workspace.take(self.wire.nbytes(len(span), self.x.dtype))
        room = self.wire.landing(self.out[span.first : span.last], room)
        return room, self._receive(room, peer, 2 * chunk + 1)

    def _send_parts(self, peers: Sequence[int], chunk: int) -> None:
        for p in peers:
            span = self.layout.span(p, chunk)
            if len(span):
                self._send(self._encode(self.x[span.first : span.last]), p, 2 * chunk)

    def _encode(self, part: torch.Tensor) -> torch.Tensor:
        begun = time.perf_counter()
        message = self.wire.encode(part, self.workspace.take(self.wire.nbytes(part.numel(), part.dtype)))
        self.phases.encode += time.perf_counter() - begun
        return message

    def _reduce(self, peers: Sequence[int], chunk: int, parts: Sequence[tuple[torch.Tensor, dist.Work | None]]) -> None:
        span = self.layout.span(self.rank, chunk)
        if not len(span):
            return
        self._wait([work for _, work in parts])
        terms: dict[int, torch.Tensor | None] = {p: room for p, (room, _) in zip(peers, parts, strict=True)}
        terms[self.rank] = None if self.own_exact else self._encode(self.x[span.first : span.last])
        room = self.workspace.take(self.wire.nbytes(len(span), self.x.dtype))
        message = self._sum(terms, chunk, room)
        for p in peers:
            self._send(message, p, 2 * chunk + 1)

    def _sum(self, terms: dict[int, torch.Tensor | None], chunk: int, room: torch.Tensor) -> torch.Tensor:
        begun = time.perf_counter()
        span = self.layout.span(self.rank if self.layout.ranks > 1 else 0, chunk)
        in_order = [terms[rank] for rank in range(len(terms))]
        own, out = self.x[span.first : span.last], self.out[span.first : span.last]
        message = self.wire.reduce(in_order, own, room, out)
        self.phases.reduce += time.perf_counter() - begun
        return message

    def _decode(self, peers: Sequence[int], chunk: int, sums: Sequence[tuple[torch.Tensor, dist.Work | None]]) -> None:
        for p, (message, work) in zip(peers, sums, strict=True):
            span = self.layout.span(p, chunk)
            if not len(span):
                continue
            self._wait([work])
            begun = time.perf_counter()
            self.wire.decode(message, self.out[span.first : span.last])
            self.phases.decode += time.perf_counter() - begun

    def _send(self, message: torch.Tensor, peer: int, tag: int) -> None:
        self.phases.sent += message.numel()
        self._sends.append(self.group.send([message], peer, self.tag + tag))

    def _receive(self, room: torch.Tensor, peer: int, tag: int) -> dist.Work | None:
        return self.group.recv([room], peer, self.tag + tag) if room.numel() else None

    def _wait(self, works: Sequence[dist.Work | None]) -> None:
        begun = time.perf_counter()
        for work in works:
            if work is not None:
                work.wait()
        self.phases.wait += time.perf_counter() - begun


def first_tag(instance: int) -> int:
    """Tags of the ``instance``-th user of a group."""
    return _TAGS + instance % (_TAGS // _PER_GROUP) * _PER_GROUP
