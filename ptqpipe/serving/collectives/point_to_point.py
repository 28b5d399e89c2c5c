"""The all-reduce transport for any process group that can send and receive: two-shot and one-shot, in chunks.

Two-shot: every rank sends its part of stripe p to rank p, which adds them up and sends the sum to all. Step t encodes
and sends chunk t, sums and returns chunk t - LAG, decodes chunk t - 2 LAG, so while one chunk is computed the wire has
others to carry. Receives are posted WINDOW chunks ahead: gloo moves no byte before the receiver has asked for it.

Every rank decodes the same bytes, those of its own stripe too, so all end with the same bits.

Must not know codecs. Messages of one pair of ranks and one tag arrive in order; a tag means one chunk and direction.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from ptqpipe.serving.collectives.wire import Layout, Stats, Wire

LAG = 1  # chunks on the wire while one is computed
WINDOW = 2 * LAG + 2  # chunks that have buffers at a time: those under way, and one to be asked for ahead of its turn
_TAGS = 1 << 30  # ours start here: a group's other messages between two ranks usually count from 0
_PER_GROUP = 1 << 20


class Workspace:
    """Bytes that calls share, grown on demand: WINDOW slots of rooms of one size, or all in one."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)
        self._rooms = self._size = 0

    def reset(self, *, rooms: int, nbytes: int) -> None:
        """``rooms`` of ``nbytes`` (a multiple of 64 is made of it) in every slot."""
        self._rooms, self._size = rooms, -(-nbytes // 64) * 64
        if self._bytes.numel() < WINDOW * rooms * self._size:
            self._bytes = torch.empty(WINDOW * rooms * self._size, dtype=torch.uint8)

    def whole(self, nbytes: int) -> torch.Tensor:
        """The first ``nbytes`` of the buffer, for callers that divide them themselves."""
        if self._bytes.numel() < nbytes:
            self._bytes = torch.empty(nbytes, dtype=torch.uint8)
        return self._bytes[:nbytes]

    def room(self, chunk: int, index: int, nbytes: int) -> torch.Tensor:
        """The first bytes of room ``index`` in the slot of ``chunk``, which it shares with chunk + WINDOW."""
        first = (chunk % WINDOW * self._rooms + index) * self._size
        return self._bytes[first : first + nbytes]


Landing = tuple[torch.Tensor, dist.Work | None]  # where a message arrives, and when


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
    stats: Stats
    own_exact: bool = True
    rank: int = field(init=False)
    ranks: int = field(init=False)
    _sends: list[list[dist.Work]] = field(default_factory=lambda: [[] for _ in range(WINDOW)])
    _parts: dict[int, list[Landing]] = field(default_factory=dict)
    _sums: dict[int, list[Landing]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rank, self.ranks = self.group.rank(), self.group.size()

    @property
    def peers(self) -> list[int]:
        """The other ranks, the next one first, so that not all send to rank 0 first."""
        return [(self.rank + step) % self.ranks for step in range(1, self.ranks)]

    def two_shot(self) -> None:
        """Runs it; returns when ``out`` is written and no buffer is in use."""
        layout = self.layout
        self.workspace.reset(rooms=3 * len(self.peers) + 2, nbytes=self._longest())
        for chunk in range(min(WINDOW, layout.chunks)):
            self._receive(chunk)
        for step in range(layout.chunks + 2 * LAG):
            if step < layout.chunks:
                self._send_parts(step)
            if 0 <= step - LAG < layout.chunks:
                self._reduce(step - LAG)
            done = step - 2 * LAG
            if 0 <= done < layout.chunks:
                self._decode(done)
                if done + WINDOW < layout.chunks:
                    self._receive(done + WINDOW)
        self._wait([work for works in self._sends for work in works])

    def one_shot(self) -> None:
        """Every rank sends all of its part to every other and adds them up itself: one rounding, no way back.

        The layout is that of one rank; ``out`` must not be ``x``.
        """
        layout, peers = self.layout, self.peers
        self.workspace.reset(rooms=len(peers) + 1, nbytes=self._longest())
        for chunk in range(min(WINDOW, layout.chunks)):
            self._receive_parts(chunk, len(layout.span(0, chunk)))
        mine: dict[int, torch.Tensor] = {}
        for step in range(layout.chunks + LAG):
            if step < layout.chunks:
                self._wait(self._free(step))
                mine[step] = self._encode(layout.span(0, step), step, len(peers))
                for p in peers:
                    self._send(mine[step], p, step, 2 * step)
            done = step - LAG
            if done >= 0:
                self._sum(done, layout.span(0, done), mine.pop(done), self.workspace.room(done, 0, 0))
                if done + WINDOW < layout.chunks:
                    self._receive_parts(done + WINDOW, len(layout.span(0, done + WINDOW)))
        self._wait([work for works in self._sends for work in works])

    def _longest(self) -> int:
        """Bytes of the longest message."""
        return self.wire.nbytes(len(self.layout.span(0, 0)), self.x.dtype)

    def _receive(self, chunk: int) -> None:
        """Asks for the others' parts of this rank's stripe, and for the sums of theirs."""
        self._receive_parts(chunk, len(self.layout.span(self.rank, chunk)))
        sums: list[Landing] = []
        for index, p in enumerate(self.peers):
            span = self.layout.span(p, chunk)
            room = self.workspace.room(chunk, len(self.peers) + index, self.wire.nbytes(len(span), self.x.dtype))
            room = self.wire.landing(self.out[span.start : span.stop], room)
            sums.append((room, self._ask(room, p, 2 * chunk + 1)))
        self._sums[chunk] = sums

    def _receive_parts(self, chunk: int, elements: int) -> None:
        nbytes = self.wire.nbytes(elements, self.x.dtype)
        rooms = [self.workspace.room(chunk, index, nbytes) for index in range(len(self.peers))]
        self._parts[chunk] = [(room, self._ask(room, p, 2 * chunk)) for room, p in zip(rooms, self.peers, strict=True)]

    def _free(self, chunk: int) -> list[dist.Work]:
        """What was sent from the slot that ``chunk`` is about to use; forgets it."""
        works = self._sends[chunk % WINDOW]
        self._sends[chunk % WINDOW] = []
        return works

    def _send_parts(self, chunk: int) -> None:
        self._wait(self._free(chunk))
        for index, p in enumerate(self.peers):
            span = self.layout.span(p, chunk)
            if len(span):
                self._send(self._encode(span, chunk, 2 * len(self.peers) + index), p, chunk, 2 * chunk)

    def _encode(self, span: range, chunk: int, index: int) -> torch.Tensor:
        begun = time.perf_counter()
        part = self.x[span.start : span.stop]
        room = self.workspace.room(chunk, index, self.wire.nbytes(len(span), part.dtype))
        message = self.wire.encode(part, room)
        self.stats.encode_s += time.perf_counter() - begun
        return message

    def _reduce(self, chunk: int) -> None:
        span, last = self.layout.span(self.rank, chunk), 3 * len(self.peers)
        if not len(span):
            return
        mine = None if self.own_exact else self._encode(span, chunk, last)
        room = self.workspace.room(chunk, last + 1, self.wire.nbytes(len(span), self.x.dtype))
        message = self._sum(chunk, span, mine, room)
        for p in self.peers:
            self._send(message, p, chunk, 2 * chunk + 1)

    def _sum(self, chunk: int, span: range, mine: torch.Tensor | None, room: torch.Tensor) -> torch.Tensor:
        """Sums the received parts of ``span`` and this rank's own; ``mine`` None: its unrounded numbers are used."""
        parts = self._parts.pop(chunk)
        self._wait([work for _, work in parts])
        begun = time.perf_counter()
        terms: dict[int, torch.Tensor | None] = {p: part for p, (part, _) in zip(self.peers, parts, strict=True)}
        terms[self.rank] = mine
        in_order = [terms[rank] for rank in range(self.ranks)]
        own, out = self.x[span.start : span.stop], self.out[span.start : span.stop]
        message = self.wire.reduce(in_order, own, room, out)
        self.stats.reduce_s += time.perf_counter() - begun
        return message

    def _decode(self, chunk: int) -> None:
        for p, (message, work) in zip(self.peers, self._sums.pop(chunk), strict=True):
            span = self.layout.span(p, chunk)
            if len(span):
                self._wait([work])
                begun = time.perf_counter()
                self.wire.decode(message, self.out[span.start : span.stop])
                self.stats.decode_s += time.perf_counter() - begun

    def _send(self, message: torch.Tensor, peer: int, chunk: int, tag: int) -> None:
        self.stats.wire_bytes += message.numel()
        self._sends[chunk % WINDOW].append(self.group.send([message], peer, self.tag + tag))

    def _ask(self, room: torch.Tensor, peer: int, tag: int) -> dist.Work | None:
        return self.group.recv([room], peer, self.tag + tag) if room.numel() else None

    def _wait(self, works: Sequence[dist.Work | None]) -> None:
        begun = time.perf_counter()
        for work in works:
            if work is not None:
                work.wait()
        self.stats.wait_s += time.perf_counter() - begun


def first_tag(instance: int) -> int:
    """Tags of the ``instance``-th user of a group."""
    return _TAGS + instance % (_TAGS // _PER_GROUP) * _PER_GROUP


def one_shot_at_once(
    group: dist.ProcessGroup,
    wire: Wire,
    x: torch.Tensor,
    out: torch.Tensor,
    *,
    workspace: Workspace,
    stats: Stats,
) -> None:
    """One-shot as one all-to-all, for the smallest messages between CPUs: the bits of ``Exchange.one_shot``.

    What costs time in a small message is threads that wake up. An all-to-all sends and receives everything on the
    group's own thread and wakes the caller once; ``Exchange`` wakes it for every message. But gloo's all-to-all asks
    for a message only behind its own, so that two ranks send one after the other: on a slow link that costs more than
    it saves, which is why ``gate.py`` has to measure it. Calls of one group must come in the same order on all ranks,
    as those of any collective. ``x`` [n] is contiguous; ``out`` may be ``x``; no buffer is in use afterwards.
    """
    ranks, rank, size = group.size(), group.rank(), wire.nbytes(x.numel(), x.dtype)
    others = (ranks - 1) * size
    copies, received, encoding = workspace.whole(2 * others + size).split_with_sizes([others, others, size])
    begun = time.perf_counter()
    message = wire.encode(x, encoding)
    copies.view(ranks - 1, size).copy_(message)
    sizes = [size] * ranks
    sizes[rank] = 0
    encoded = time.perf_counter()
    group.alltoall_base(received, copies, sizes, sizes).wait()
    arrived = time.perf_counter()
    terms: list[torch.Tensor | None] = list(received.split_with_sizes(sizes))
    terms[rank] = message
    wire.reduce(terms, x, encoding[:0], out)
    stats.encode_s += encoded - begun
    stats.wait_s += arrived - encoded
    stats.reduce_s += time.perf_counter() - arrived
    stats.wire_bytes += others
